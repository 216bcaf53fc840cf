"""What passes between cut and whole modules of a model made parallel: hooks of those that stay, the loss of cut logits.

A hook that refers to what belongs to the model, such as its `Sequence`, is an object or a bound method of one, so that
copy.deepcopy gives the copy hooks of its own.
"""

from __future__ import annotations

import copy
import ctypes
import inspect
import math
import zlib
from collections.abc import Iterable, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pynccl import Communicator

from .. import rng
from ..agreement import difference
from ..arguments import as_int
from ..ops.all_gather import all_gather, split
from ..ops.all_reduce import copy as copied
from ..streams import is_capturing
from ..torch_internals import has_no_values, is_tracing, own_parameters, reentrant_checkpoints, tensors_in
from .plan import NAME, Planned, is_within, names_read, probability
from .shards import Shard, Sharded, shard_of
from .vocabulary import VocabParallelHead, rows_of_ranks, vocab_parallel_cross_entropy

# ------------------------------------------------------------------------------------------------- the sequence


class Sequence:
    """How the hidden states of a model are cut along the sequence, dimension `seq_dim`, in the forward pass under way.

    Without gradients a length that N does not divide is left whole: then no layer communicates along the sequence.
    """

    def __init__(self, comm: Communicator, seq_dim: int) -> None:
        self.comm, self.seq_dim = comm, seq_dim
        self.is_cut = True
        self.shape: tuple[int, ...] = ()  # of the whole hidden states, where it is cut
        self.layers: list[Any] = []  # of the model, that communicate along the sequence

    def begin(self, x: Tensor, path: str) -> Tensor:
        """This rank's part of the hidden states that come into the module at `path`."""
        ranks, dim = self.comm.size, self.seq_dim
        fits = x.dim() > dim and x.shape[dim] % ranks == 0
        self._set(fits or torch.is_grad_enabled() or any(reentrant_checkpoints()))
        self.shape = tuple(x.shape) if self.is_cut else ()
        if not self.is_cut:
            return x
        if not fits:
            raise ValueError(
                f"{path}: hidden states of shape {list(x.shape)} cannot be cut along the sequence over {ranks} ranks; "
                f"parallelize was told that dimension {dim} is the sequence (seq_dim): pad it to a multiple of "
                f"{ranks}, or call parallelize with sequence_parallel=False; without gradients, under torch.no_grad(), "
                "any length will do"
            )
        return split(x, self.comm, dim)

    def end(self, _: nn.Module, args: Any, output: Any) -> Any:
        """A forward hook: the first tensor of a module's output is gathered."""
        if isinstance(output, tuple):
            return (self.end(_, args, output[0]), *output[1:])
        if self.is_cut:
            return all_gather(output, self.comm, self.seq_dim, grad="replicated")
        self._set(True)
        return output

    def _set(self, is_cut: bool) -> None:
        if self.is_cut != is_cut:
            self.is_cut = is_cut
            for layer in self.layers:
                layer.sequence_parallel = is_cut


class Entering:
    """A forward pre-hook: a tensor of a module's input is cut along the sequence; or it is gathered, or copied, for all
    the layers in the module.

    how   "cut", "gathered" or "copied"
    name  of the argument; None: the first tensor
    """

    def __init__(self, path: str, how: str, sequence: Sequence, name: str | None) -> None:
        self.path, self.how, self.sequence, self.name = path, how, sequence, name
        self.made: Tensor | None = None  # while the module is called; no weakref, which torch's tensors may outlive
        self.looked_at: set[str] = set()

    def register(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self, with_kwargs=True)
        if self.how != "cut":
            module.register_forward_hook(self.forget, always_call=True)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        if self.name is None:
            chosen = next((name for name, one in given.items() if isinstance(one, Tensor)), None)
        else:
            names = list(inspect.signature(module.forward).parameters)
            chosen = names.index(self.name) if self.name not in kwargs and self.name in names else self.name
        if not isinstance(given.get(chosen), Tensor):
            named = "" if self.name is None else f" {self.name}"
            raise TypeError(f"{NAME}: {self.path} was called without a tensor{named}, which was to be {self.how}")
        given[chosen] = self._changed(given[chosen])
        return tuple(given[at] for at in range(len(args))), {name: given[name] for name in kwargs}

    def _changed(self, x: Tensor) -> Tensor:
        sequence = self.sequence
        if self.how == "cut":
            return sequence.begin(x, self.path)
        if self.how == "gathered" and sequence.is_cut:
            y: Tensor = all_gather(x, sequence.comm, sequence.seq_dim, grad="sum")
        else:
            y = copied(x, sequence.comm)
        if not torch.compiler.is_compiling():
            self.made = y
        return y

    def forget(self, *_: Any) -> None:
        """A forward hook: the call is over."""
        self.made = None

    def look_at(self, path: str, layer: nn.Module, args: tuple[Any, ...]) -> None:
        """A forward pre-hook of a layer in the module: once, with gradients, whether its input comes from what was made
        here. Else its gradient would not be summed over the ranks."""
        if path in self.looked_at or torch.compiler.is_compiling() or not args or not isinstance(args[0], Tensor):
            return
        if self.made is None or self.made.grad_fn is None:
            return
        seen, waiting = set(), [args[0].grad_fn]
        while waiting and self.made.grad_fn not in seen:
            node = waiting.pop()
            if node is not None and node not in seen:
                seen.add(node)
                waiting += [above for above, _ in node.next_functions]
        if args[0].requires_grad and self.made.grad_fn not in seen:
            raise ValueError(
                f"{NAME}: {path} was called with an input that does not come from that of {self.path}, which the plan "
                "says it shares, as keys and values of cross attention do not; expected 'column' with the option "
                "gather_input=True, and sequence_parallel=False where its input is not cut"
            )
        self.looked_at.add(path)


class Outputs:
    """A forward hook of a model, and of the models in it: what transformers gives of each layer, of the parts of all
    ranks. It is known by its shape, since each family has names of its own, and none with return_dict=False.

    heads  numbers of heads of attention on all ranks
    """

    def __init__(self, sequence: Sequence, heads: set[int | None]) -> None:
        self.sequence, self.heads = sequence, heads

    def __call__(self, _: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, MutableMapping):
            for name, one in list(output.items()):
                output[name] = self._of_layers(one)
        elif type(output) in (tuple, list):
            return type(output)(map(self._of_layers, output))
        return output

    def _of_layers(self, value: Any) -> Any:
        return type(value)(map(self._whole, value)) if type(value) in (tuple, list) else value

    def _whole(self, one: Any) -> Any:
        """Of a tensor that is a part [.., s/N, ..] of hidden states, [tokens/N, ..] of those of routers, or
        [b, heads/N, s, t] of attention."""
        if not isinstance(one, Tensor) or not one.is_floating_point():
            return one
        comm, dim, part = self.sequence.comm, self.sequence.seq_dim, [*self.sequence.shape]
        if part:
            part[dim] //= comm.size
            if list(one.shape[:-1]) == part[:-1]:
                return all_gather(one, comm, dim, grad="replicated")
            if one.dim() == 2 and one.shape[0] == math.prod(part[:-1]):
                tokens = one.unflatten(0, part[:-1])
                return all_gather(tokens, comm, dim, grad="replicated").flatten(0, -2)
        if one.dim() == 4 and one.shape[1] * comm.size in self.heads and one.shape[1] not in self.heads:
            return all_gather(one, comm, 1, grad="replicated")
        return one


class SameInput:
    """A hook of the whole model: the first batch is compared. ValueError, on all ranks, if they have other ones."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.seen = comm, False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.seen or is_tracing():
            return
        if not self.comm.library.is_host and is_capturing(torch.device(self.comm.device)):
            return
        given = tensors_in([args, dict(sorted(kwargs.items()))])
        if any(has_no_values(one) or one.layout != torch.strided for one in given):
            return
        self.seen = True
        shapes = [f"{list(one.shape)} {one.dtype}" for one in given]
        other = difference(self.comm, {"of other shapes or types": shapes, "with other values": checksum(given)})
        if other is not None:
            raise ValueError(
                f"{type(module).__name__}: rank {other.rank} was given a batch {other.what} than rank 0; expected the "
                f"same on all {self.comm.size} ranks that share the model: give the sampler the rank of the "
                "data-parallel communicator, not of all"
            )


def checksum(tensors: Iterable[Tensor]) -> int:
    """Of the bytes of dense tensors."""
    total = 0
    for one in tensors:
        whole = one.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        if whole.numel():
            total = zlib.crc32((ctypes.c_char * whole.nbytes).from_address(whole.data_ptr()), total)
    return total


# ------------------------------------------------------------------------------------------------- random numbers


class Drawing:
    """Two hooks: between them this rank draws its own numbers."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.open: list[Any] = []

    def register(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self.begin)
        module.register_forward_hook(self.end, always_call=True)

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


# ------------------------------------------------------------------------------------------------- cut logits


def leave_logits_cut(model: nn.Module, comm: Communicator) -> None:
    """Of models of transformers whose head leaves each rank its words: their loss, and no generate()."""
    for module in model.modules():
        heads = (one for one in module.modules() if isinstance(one, VocabParallelHead))
        is_transformers = hasattr(module, "save_pretrained")
        if all(one.gather_output for one in heads) or not (module is model or is_transformers):
            continue
        loss = getattr(module, "loss_function", None) if "loss_function" in names_read(module) else None
        if getattr(loss, "__name__", "") == "ForCausalLMLoss":
            module.loss_function = partial(_causal_loss, comm)  # type: ignore[assignment]
        elif is_transformers:
            module.register_forward_pre_hook(_refuse_labels, with_kwargs=True)
        if hasattr(module, "generate"):
            module.generate = partial(_refuse_cut_logits, "generate")  # type: ignore[assignment]


def _refuse_labels(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("labels") is not None:
        _refuse_cut_logits(f"{type(module).__name__} with labels")


def _refuse_cut_logits(what: str, *_: Any, **__: Any) -> Any:
    raise RuntimeError(
        f"{what}: each rank has the logits of its own words, of which it would make something else; call parallelize "
        "with gather_logits=True, or for a loss vocab_parallel_cross_entropy"
    )


def _causal_loss(
    comm: Communicator,
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """transformers' loss of a language model, of logits that are cut over the vocabulary."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    loss = vocab_parallel_cross_entropy(
        logits,
        shift_labels,
        comm,
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
        splits=rows_of_ranks(vocab_size, comm.size),
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch


# ------------------------------------------------------------------------------------------------- where they go


def hook_modules(planned: Planned, sequence: Sequence) -> dict[str, Entering]:
    """Register what is done for the input and the output of modules that stay. Returns the hooks of those whose input
    is shared, by path."""
    entering = {}
    for path, site in planned.sites.items():
        module, roles = site.module, site.roles
        if "sequence_begin" in roles and planned.sequence_parallel:
            Entering(path, "cut", sequence, roles["sequence_begin"].get("input")).register(module)
        if "shared_input" in roles:
            how = "gathered" if planned.sequence_parallel else "copied"
            entering[path] = Entering(path, how, sequence, roles["shared_input"].get("input"))
            entering[path].register(module)
        if "sequence_end" in roles and planned.sequence_parallel:
            module.register_forward_hook(sequence.end)
        if "attention_dropout" in roles and probability(getattr(module, roles["attention_dropout"]["p"])) > 0:
            Drawing(planned.comm).register(module)
    return entering


def hook_outputs(planned: Planned, sequence: Sequence) -> None:
    """Of modules around one stack of layers that are cut, which may give what these made; without a stack, of the
    models. Their numbers of heads are those that the plan says, or else the configuration."""
    stacks = set(planned.stacks())
    for path, module in planned.model.named_modules():
        around = sum(is_within(one, path) for one in stacks)
        if around == 1 or (not stacks and (not path or hasattr(module, "config"))):
            heads = {planned.cut_heads(one) for one in planned.of_role("column") if is_within(one.path, path)}
            configs = (getattr(one, "config", None) for one in module.modules())
            theirs = (as_int(getattr(one, "num_attention_heads", None)) for one in configs)
            module.register_forward_hook(
                Outputs(sequence, heads - {None} or {next((one for one in theirs if one), None)})
            )


# ------------------------------------------------------------------------------------------------- copies and saves


def keep_parts(model: nn.Module) -> None:
    """See to it that copies of the model have the marks of its parameters, also in modules that are not `Sharded`, and
    that save_pretrained of models of transformers, also within it, refuses to save what this rank has."""
    for module in model.modules():
        parameters = own_parameters(module)
        marks = {name: shard for name, one in parameters.items() if one is not None and (shard := shard_of(one))}
        if marks and not isinstance(module, Sharded):
            keeping = Marks(parameters, marks)
            module.register_load_state_dict_post_hook(keeping)
            module.register_forward_pre_hook(keeping)
        if hasattr(module, "save_pretrained") and any(shard_of(one) is not None for one in module.parameters()):
            module.save_pretrained = partial(_save_pretrained, module)  # type: ignore[assignment]


class Marks:
    """A hook of load_state_dict, whose assign=True makes new parameters, and of the forward pass, before which others
    may have, as to_empty() does. As a part of the module it is copied with it, and then marks the parameters there,
    which are new ones, too."""

    def __init__(self, parameters: dict[str, nn.Parameter | None], marks: dict[str, Shard]) -> None:
        self.parameters, self.marks = parameters, marks

    def __call__(self, *_: Any) -> None:
        for name, shard in self.marks.items():
            parameter: Any = self.parameters.get(name)
            if parameter is not None and getattr(parameter, "shard", None) is not shard:
                parameter.shard = shard

    def __deepcopy__(self, memo: dict[int, Any]) -> Marks:
        twin = Marks(copy.deepcopy(self.parameters, memo), self.marks)
        twin()
        return twin


def _save_pretrained(model: nn.Module, save_directory: Any, *args: Any, **options: Any) -> Any:
    """transformers' own, of the whole state dict, which it needs. Ranks that have none of it write nothing."""
    state = args[1] if len(args) > 1 else options.get("state_dict")
    if state is None or options.get("distributed_checkpoint"):
        raise RuntimeError(
            "save_pretrained: each rank has a part of this model, which would be saved as if it were the whole. On "
            "every rank, call ad.save_full_state_dict(model, folder), and model.config.save_pretrained(folder) on "
            "rank 0; or model.save_pretrained(folder, state_dict=ad.full_state_dict(model))"
        )
    for name, one in model.state_dict(keep_vars=True).items() if state else ():
        shard, given = shard_of(one) if isinstance(one, Tensor) else None, state.get(name)
        if shard is not None and isinstance(given, Tensor) and tuple(given.shape) != shard.shape:
            raise ValueError(
                f"save_pretrained: {name} of state_dict has shape {list(given.shape)}, expected that of the whole, "
                f"{list(shard.shape)}: pass state_dict=ad.full_state_dict(model)"
            )
    kind: Any = type(model)
    return kind.save_pretrained(model, save_directory, *args, **options) if state else None
