"""What modules of a model made parallel do besides: hooks of those that stay, the loss of logits that are cut."""

from __future__ import annotations

import inspect
import math
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from pynccl import Communicator

from .. import rng
from ..ops.all_gather import all_gather, split
from ..ops.all_reduce import copy
from ..torch_internals import reentrant_checkpoints
from .plan import NAME
from .vocabulary import vocab_parallel_cross_entropy


class Sequence:
    """Whether the sequence is cut in the forward pass under way, for the hooks and layers of a model."""

    def __init__(self) -> None:
        self.cut = True
        self.shape: tuple[int, ...] = ()  # of the whole hidden states, where it is cut
        self.layers: list[Any] = []

    def find(self, model: nn.Module) -> None:
        self.layers = [one for one in model.modules() if getattr(one, "sequence_parallel", None) is True]

    def leave_whole(self, whole: bool) -> None:
        if self.cut == whole:
            self.cut = not whole
            for layer in self.layers:
                layer.sequence_parallel = self.cut


class Entering:
    """A hook: the first tensor of a module's input is gathered along the sequence, or cut, or copied."""

    def __init__(
        self, path: str, comm: Communicator, seq_dim: int, how: str, sequence: Sequence, name: str | None = None
    ) -> None:
        self.path, self.comm, self.seq_dim, self.how, self.sequence = path, comm, seq_dim, how, sequence
        self.name = name  # of the input; None: the first tensor
        self.made: Tensor | None = None  # while the module is called; no weakref, which torch's tensors may outlive

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.name is not None:
            bound = inspect.signature(module.forward).bind(*args, **kwargs)
            if not isinstance(bound.arguments.get(self.name), Tensor):
                raise TypeError(
                    f"{NAME}: {self.path} was called without a tensor {self.name}, which was to be {self.how}"
                )
            bound.arguments[self.name] = self._changed(bound.arguments[self.name])
            return bound.args, bound.kwargs
        for at, x in enumerate(args):
            if isinstance(x, Tensor):
                return (*args[:at], self._changed(x), *args[at + 1 :]), kwargs
        for name, x in kwargs.items():
            if isinstance(x, Tensor):
                return args, {**kwargs, name: self._changed(x)}
        raise TypeError(f"{NAME}: {self.path} was called without a tensor, which was to be {self.how}")

    def _changed(self, x: Tensor) -> Tensor:
        if self.how == "cut":
            fits = x.dim() > self.seq_dim and x.shape[self.seq_dim] % self.comm.size == 0
            trains = fits or torch.is_grad_enabled() or any(reentrant_checkpoints())
            self.sequence.leave_whole(not trains)
            if not self.sequence.cut:
                self.sequence.shape = ()
                return x
            if x.dim() <= self.seq_dim:
                raise ValueError(
                    f"{self.path}: hidden states have shape {list(x.shape)}, and parallelize was told that dimension "
                    f"{self.seq_dim} is the sequence (seq_dim)"
                )
            if not fits:
                raise ValueError(
                    f"{self.path}: hidden states of shape {list(x.shape)} cannot be cut along the sequence, dimension "
                    f"{self.seq_dim}, on {self.comm.size} ranks: pad it to a multiple of {self.comm.size}, or call "
                    "parallelize with sequence_parallel=False; without gradients, under torch.no_grad(), any length "
                    "will do"
                )
            self.sequence.shape = tuple(x.shape)
            y: Tensor = split(x, self.comm, self.seq_dim)
        elif self.how == "copied" or not self.sequence.cut:
            y = copy(x, self.comm)
        else:
            y = all_gather(x, self.comm, self.seq_dim, grad="sum")
        if not torch.compiler.is_compiling():
            self.made = y if self.how != "cut" else None
        return y

    def forget(self, *_: Any) -> None:
        """A hook: the call is over."""
        self.made = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "made": None}


class FromShared:
    """A hook of a layer whose input another module gathers, or copies: that it is made of that, looked at once."""

    def __init__(self, path: str, entering: Entering) -> None:
        self.path, self.entering, self.seen = path, entering, False

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.seen or torch.compiler.is_compiling() or not args or not isinstance(args[0], Tensor):
            return
        made = self.entering.made
        if made is None or made.grad_fn is None:
            return
        if args[0].requires_grad and not _comes_from(args[0], made):
            raise ValueError(
                f"{NAME}: {self.path} was called with an input that does not come from that of {self.entering.path}, "
                "which the plan says it shares, as keys and values of cross attention do not; expected 'column' with "
                "the option gather_input=True, and sequence_parallel=False where its input is not cut"
            )
        self.seen = True


def _comes_from(x: Tensor, made: Tensor) -> bool:
    """Whether `made` is in the graph of x, or is x."""
    wanted = made.grad_fn
    seen, waiting = set(), [x.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is wanted:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [above for above, _ in node.next_functions]
    return False


class Leaving:
    """A hook: the first tensor of a module's output is gathered along the sequence."""

    def __init__(self, comm: Communicator, seq_dim: int, sequence: Sequence) -> None:
        self.comm, self.seq_dim, self.sequence = comm, seq_dim, sequence

    def __call__(self, _: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (self(_, args, output[0]), *output[1:])
        if not self.sequence.cut:
            self.sequence.leave_whole(False)
            return output
        return all_gather(output, self.comm, self.seq_dim, grad="replicated")


class Outputs:
    """A hook of a model, and of the models in it: what transformers gives of each layer, of the parts of all ranks. It
    is known by its shape, since each family has names of its own, and none with return_dict=False."""

    def __init__(self, comm: Communicator, seq_dim: int, sequence: Sequence, heads: set[int]) -> None:
        self.comm, self.seq_dim, self.sequence, self.heads = comm, seq_dim, sequence, heads

    def __call__(self, _: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, MutableMapping):
            for name, one in list(output.items()):
                if type(one) in (tuple, list):
                    output[name] = type(one)(map(self._whole, one))
            return output
        if type(output) in (tuple, list):
            return type(output)(
                type(one)(map(self._whole, one)) if type(one) in (tuple, list) else one for one in output
            )
        return output

    def _whole(self, one: Any) -> Any:
        """Of a tensor that is a part [.., s/N, ..] of hidden states, [tokens/N, ..] of those of routers, or
        [b, heads/N, s, t] of attention."""
        if not isinstance(one, Tensor) or not one.is_floating_point():
            return one
        ranks, whole = self.comm.size, self.sequence.shape
        part = [*whole]
        if whole:
            part[self.seq_dim] //= ranks
        if whole and list(one.shape[:-1]) == part[:-1]:
            return all_gather(one, self.comm, self.seq_dim, grad="replicated")
        if whole and one.dim() == 2 and one.shape[0] == math.prod(part[:-1]):
            tokens = one.unflatten(0, part[:-1])
            return all_gather(tokens, self.comm, self.seq_dim, grad="replicated").flatten(0, -2)
        if one.dim() == 4 and one.shape[1] * ranks in self.heads and one.shape[1] not in self.heads:
            return all_gather(one, self.comm, 1, grad="replicated")
        return one


class Drawing:
    """Two hooks: between them this rank draws its own numbers."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.open: list[Any] = []

    @torch.compiler.disable
    def begin(self, module: nn.Module, args: Any) -> None:
        if module.training:
            rng.agree("dropout of attention", self.comm)
            block = rng.cut(self.comm)
            block.__enter__()
            self.open.append(block)

    @torch.compiler.disable
    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        if module.training and self.open:
            self.open.pop().__exit__(None, None, None)


class NoLogits:
    """`generate` of a model of which each rank has the logits of its words."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError(
            "generate: each rank has the logits of its own words, of which it would choose; call parallelize with "
            "gather_logits=True"
        )


class NoLabels:
    """A hook of a model whose own loss would take the logits of this rank's words for all of them."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("labels") is not None:
            raise ValueError(
                f"{type(module).__name__} was called with labels: each rank has the logits of its own words, of which "
                "its loss would be another one; call it without, and vocab_parallel_cross_entropy, or call parallelize "
                "with gather_logits=True"
            )


class CausalLoss:
    """The loss of a language model of transformers, of logits that are cut over the vocabulary."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        first, columns = vocab_size % self.comm.size, vocab_size // self.comm.size
        splits = [columns + (rank < first) for rank in range(self.comm.size)]
        mean = num_items_in_batch is None
        loss = vocab_parallel_cross_entropy(
            logits,
            shift_labels,
            self.comm,
            ignore_index=ignore_index,
            reduction="mean" if mean else "sum",
            splits=splits,
        )
        return loss if mean else loss / num_items_in_batch
