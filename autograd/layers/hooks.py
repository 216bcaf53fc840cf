"""Hooks of a parallelized model: inputs and outputs that are split and gathered, and the loss of sharded logits.

A hook that refers to a part of the model, such as its `SequenceSharding`, is an object or a bound method of one, so
that copy.deepcopy gives the copied model its own hooks.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, MutableMapping
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pynccl import Communicator
from pynccl.bindings.values import shown

from .. import rng
from ..arguments import as_int
from ..ops.all_gather import all_gather, split
from ..ops.all_reduce import copy as copied
from ..torch_internals import own_parameters, reentrant_checkpoints
from .plan import NAME, PlannedModel, is_within, names_read, probability
from .shard import Shard
from .shards import Sharded, set_shard, shard_of
from .vocabulary import VocabParallelEmbedding, VocabParallelHead, rows_of_ranks, vocab_parallel_cross_entropy

# ------------------------------------------------------------------------------------------------- the sequence


class SequenceSharding:
    """How the hidden states are sharded along the sequence, dimension `seq_dim`, in the current forward pass.

    Without gradients, a length that is not divisible by N stays unsharded: then no layer communicates along the
    sequence.
    """

    def __init__(self, comm: Communicator, seq_dim: int) -> None:
        self.comm, self.seq_dim = comm, seq_dim
        self.is_sharded = True
        self.shape: tuple[int, ...] = ()  # of the unsharded hidden states, while they are sharded
        self.layers: list[Any] = []  # of the model, that communicate along the sequence

    def begin(self, x: Tensor, path: str) -> Tensor:
        """Return this rank's shard of the hidden states that enter the module at `path`."""
        ranks, dim = self.comm.size, self.seq_dim
        # a branch, since torch.compile makes symbolic booleans of comparisons and cannot compare those
        if x.dim() > dim and x.shape[dim] % ranks == 0:
            self._set(True)
            self.shape = tuple(x.shape)
            return split(x, self.comm, dim)
        if torch.is_grad_enabled() or any(reentrant_checkpoints()):
            raise ValueError(
                f"{path}: cannot split hidden states of shape {list(x.shape)} along dimension {dim}, the sequence "
                f"(seq_dim), over {ranks} ranks; pad it to a multiple of {ranks}, or pass sequence_parallel=False to "
                "parallelize (under torch.no_grad() any length works)"
            )
        self._set(False)
        self.shape = ()
        return x

    def end(self, path: str, module: nn.Module, args: Any, output: Any) -> Any:
        """Gather the first tensor in the output of the module at `path`: with it, a forward hook."""
        found: list[Tensor] = []

        def gathered(value: Any) -> Any:
            if found or not isinstance(value, Tensor):
                return value if found else map_items(gathered, value)
            found.append(value)
            if value.dim() <= self.seq_dim or not self.is_sharded:
                return value
            return all_gather(value, self.comm, self.seq_dim, grad="replicated")

        result = gathered(output)
        if not found or found[0].dim() <= self.seq_dim:
            what = f"the first tensor of its output has shape {list(found[0].shape)}" if found else "it has none"
            raise TypeError(
                f"{NAME}: {path} is 'sequence_end' and returned {shown(output)}; expected hidden states, with a "
                f"sequence in dimension {self.seq_dim}, as the first tensor in a tuple, list, dict or dataclass, but "
                f"{what}"
            )
        self._set(True)
        return result

    def _set(self, is_sharded: bool) -> None:
        if self.is_sharded != is_sharded:
            self.is_sharded = is_sharded
            for layer in self.layers:
                layer.sequence_parallel = is_sharded


def map_items(function: Callable[[Any], Any], value: Any) -> Any:
    """Replace the items of a tuple, list, NamedTuple, dict or dataclass by the function's results: in place, or in a
    new object if it cannot be changed. Other objects, such as the caches of transformers, are returned as they are."""
    items: dict[Any, Any] = {}
    if isinstance(value, MutableMapping):
        items = dict(value)
    elif isinstance(value, (tuple, list)):
        items = dict(enumerate(value))
    elif is_dataclass(value) and not isinstance(value, type):
        items = {one.name: getattr(value, one.name) for one in fields(value)}
    changed = {key: new for key, old in items.items() if (new := function(old)) is not old}
    if changed and isinstance(value, tuple):
        made: Any = {**items, **changed}.values()
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    for key, one in changed.items():
        if isinstance(value, (MutableMapping, list)):
            value[key] = one
            continue
        try:
            setattr(value, key, one)
        except FrozenInstanceError:
            return replace(value, **changed)
    return value


class _InputHook:
    """A forward pre-hook that replaces one tensor of a module's input. name: the argument; None: the first tensor"""

    def __init__(self, path: str, sequence: SequenceSharding, name: str | None) -> None:
        self.path, self.sequence, self.name = path, sequence, name

    def register(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        inputs: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        if self.name is None:
            key = next((key for key, value in inputs.items() if isinstance(value, Tensor)), None)
        else:
            names = list(inspect.signature(module.forward).parameters)
            key = names.index(self.name) if self.name not in kwargs and self.name in names else self.name
        if not isinstance(inputs.get(key), Tensor):
            named = "" if self.name is None else f" {self.name!r}"
            raise TypeError(
                f"{NAME}: {self.path} was called without a tensor argument{named}; the plan splits, gathers or copies "
                "its input: pass one, or name it by the role's option 'input'"
            )
        inputs[key] = self.replaced(inputs[key])
        return tuple(inputs[at] for at in range(len(args))), {name: inputs[name] for name in kwargs}

    def replaced(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class SplitInput(_InputHook):
    """Split the input of a module along the sequence."""

    def replaced(self, x: Tensor) -> Tensor:
        return self.sequence.begin(x, self.path)


class GatherInput(_InputHook):
    """Gather the input of a module along the sequence, once for all layers in it. sequence_parallel=False: copy it."""

    def __init__(self, path: str, sequence: SequenceSharding, name: str | None, sequence_parallel: bool) -> None:
        super().__init__(path, sequence, name)
        self.sequence_parallel = sequence_parallel
        self.gathered: Tensor | None = None  # during the module's call; a weakref would die while torch keeps the data
        self.checked: set[str] = set()

    def register(self, module: nn.Module) -> None:
        super().register(module)
        module.register_forward_hook(self.forget, always_call=True)

    def replaced(self, x: Tensor) -> Tensor:
        sequence = self.sequence
        if self.sequence_parallel and sequence.is_sharded:
            y: Tensor = all_gather(x, sequence.comm, sequence.seq_dim, grad="sum")
        else:
            y = copied(x, sequence.comm)
        if not torch.compiler.is_compiling():
            self.gathered = y
        return y

    def forget(self, *_: Any) -> None:
        """Drop the gathered tensor after the module's call: a forward hook."""
        self.gathered = None

    def check_source(self, path: str, layer: nn.Module, args: tuple[Any, ...]) -> None:
        """Check once, with gradients, that the input of a layer in the module comes from the gathered tensor. Otherwise
        its gradient would not be summed over the ranks. A forward pre-hook of the layer."""
        if path in self.checked or torch.compiler.is_compiling() or not args or not isinstance(args[0], Tensor):
            return
        if self.gathered is None or self.gathered.grad_fn is None:
            return
        seen, waiting = set(), [args[0].grad_fn]
        while waiting and self.gathered.grad_fn not in seen:
            node = waiting.pop()
            if node is not None and node not in seen:
                seen.add(node)
                waiting += [above for above, _ in node.next_functions]
        if args[0].requires_grad and self.gathered.grad_fn not in seen:
            raise ValueError(
                f"{NAME}: the input of {path} does not come from the 'shared_input' of {self.path} (keys and values of "
                "cross attention, for example); use ('column', {'gather_input': True}), with 'sequence_parallel': "
                "False if that input is not sharded"
            )
        self.checked.add(path)


class GatherOutput:
    """Gather the shards that transformers returns of each layer (hidden states, attentions, router logits).

    A forward hook of a model, and of the models in it. It recognizes them by shape, since each model family names them
    differently, and return_dict=False gives no names.

    heads  numbers of attention heads on all ranks
    """

    def __init__(self, sequence: SequenceSharding, heads: set[int | None]) -> None:
        self.sequence, self.heads = sequence, heads

    def __call__(self, _: nn.Module, args: Any, output: Any) -> Any:
        return map_items(self._of_layers, output)

    def _of_layers(self, value: Any) -> Any:
        return map_items(self._gathered, value) if isinstance(value, (tuple, list)) else value

    def _gathered(self, x: Any) -> Any:
        """Gather x if it is a shard of hidden states [.., s/N, ..], of router logits [tokens/N, ..], or of attentions
        [b, heads/N, s, t]."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        comm, dim, shard = self.sequence.comm, self.sequence.seq_dim, [*self.sequence.shape]
        if shard:
            shard[dim] //= comm.size
            if list(x.shape[:-1]) == shard[:-1]:
                return all_gather(x, comm, dim, grad="replicated")
            if x.dim() == 2 and x.shape[0] == math.prod(shard[:-1]):
                tokens = x.unflatten(0, shard[:-1])
                return all_gather(tokens, comm, dim, grad="replicated").flatten(0, -2)
        if x.dim() == 4 and x.shape[1] * comm.size in self.heads and x.shape[1] not in self.heads:
            return all_gather(x, comm, 1, grad="replicated")
        return x


# ------------------------------------------------------------------------------------------------- random numbers


class LocalRng:
    """Two hooks: in the module's forward pass, this rank draws random numbers of its own."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.entered: list[Any] = []

    def register(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self.begin)
        module.register_forward_hook(self.end, always_call=True)

    @torch.compiler.disable
    def begin(self, module: nn.Module, args: Any) -> None:
        if module.training:
            rng.check_equal_states("dropout of attention", self.comm)
            block = rng.sharded(self.comm)
            block.__enter__()
            self.entered.append(block)

    @torch.compiler.disable
    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        if module.training and self.entered:
            self.entered.pop().__exit__(None, None, None)


# ------------------------------------------------------------------------------------------------- sharded logits


def handle_sharded_logits(model: nn.Module, comm: Communicator) -> None:
    """Give transformers models with sharded logits a vocab-parallel loss, and make their generate() raise."""
    for module in model.modules():
        heads = (child for child in module.modules() if isinstance(child, VocabParallelHead))
        is_transformers = hasattr(module, "save_pretrained")
        if all(head.gather_output for head in heads) or not (module is model or is_transformers):
            continue
        loss = getattr(module, "loss_function", None) if "loss_function" in names_read(module) else None
        if getattr(loss, "__name__", "") == "ForCausalLMLoss":
            module.loss_function = partial(_causal_loss, comm)  # type: ignore[assignment]
        elif is_transformers:
            module.register_forward_pre_hook(_reject_labels, with_kwargs=True)
        if hasattr(module, "generate"):
            module.generate = partial(_reject_sharded_logits, "generate")  # type: ignore[assignment]


def _resize_token_embeddings(
    model: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *_: Any, **__: Any
) -> Any:
    """Return the embedding, as transformers does if its size does not change. It cannot change."""
    embeddings = model.get_input_embeddings()
    rows = embeddings.num_embeddings
    if new_num_tokens in (None, rows) and (pad_to_multiple_of is None or rows % pad_to_multiple_of == 0):
        return embeddings
    raise RuntimeError(
        f"resize_token_embeddings: new_num_tokens is {new_num_tokens} and pad_to_multiple_of {pad_to_multiple_of}, but "
        f"the {rows} rows of the embedding are sharded over the ranks; call it before {NAME}"
    )


def _reject_labels(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if kwargs.get("labels") is not None:
        _reject_sharded_logits(f"{type(module).__name__} with labels")


def _reject_sharded_logits(operation: str, *_: Any, **__: Any) -> Any:
    raise RuntimeError(
        f"{operation}: each rank has only the logits of its vocabulary shard, but this needs all of them; call "
        "parallelize with gather_logits=True, or compute the loss with vocab_parallel_cross_entropy"
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
    """transformers' ForCausalLMLoss for logits that are sharded over the vocabulary."""
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


# ------------------------------------------------------------------------------------------------- registration


def hook_modules(planned: PlannedModel, sequence: SequenceSharding) -> dict[str, GatherInput]:
    """Register the input and output hooks of the modules that are kept. Return those of "shared_input", by path."""
    gather_inputs = {}
    for path, site in planned.sites.items():
        module, roles = site.module, site.roles
        if "sequence_begin" in roles and planned.sequence_parallel:
            SplitInput(site.title, sequence, roles["sequence_begin"].get("input")).register(module)
        if "shared_input" in roles:
            name = roles["shared_input"].get("input")
            gather_inputs[path] = GatherInput(site.title, sequence, name, planned.sequence_parallel)
            gather_inputs[path].register(module)
        if "sequence_end" in roles and planned.sequence_parallel:
            module.register_forward_hook(partial(sequence.end, site.title))
        if "attention_dropout" in roles and probability(getattr(module, roles["attention_dropout"]["p"])) > 0:
            LocalRng(planned.comm).register(module)
    return gather_inputs


def hook_outputs(planned: PlannedModel, sequence: SequenceSharding) -> None:
    """Register GatherOutput on the modules that contain one stack of sharded layers and may return what these make;
    without a stack, on the models. The number of heads comes from the plan, otherwise from the configuration."""
    stacks = set(planned.stacks())
    for path, module in planned.model.named_modules():
        around = sum(is_within(stack, path) for stack in stacks)
        if around == 1 or (not stacks and (not path or hasattr(module, "config"))):
            heads = {planned.num_heads(site) for site in planned.of_role("column") if is_within(site.path, path)}
            configs = (getattr(child, "config", None) for child in module.modules())
            in_configs = (as_int(getattr(config, "num_attention_heads", None)) for config in configs)
            module.register_forward_hook(
                GatherOutput(sequence, heads - {None} or {next((number for number in in_configs if number), None)})
            )


# ------------------------------------------------------------------------------------------------- copies and saves


def preserve_shards(model: nn.Module) -> None:
    """Keep `parameter.shard` in copies of the model, also in modules that are not `Sharded`, and make save_pretrained
    and resize_token_embeddings of transformers models reject this rank's shards."""
    vocabulary = VocabParallelEmbedding, VocabParallelHead
    for module in model.modules():
        parameters = own_parameters(module)
        shards = {name: shard for name, one in parameters.items() if one is not None and (shard := shard_of(one))}
        if shards and not isinstance(module, Sharded):
            restore = RestoreShards(parameters, shards)
            module.register_load_state_dict_post_hook(restore)
            module.register_forward_pre_hook(restore)
        if hasattr(module, "save_pretrained") and any(shard_of(one) is not None for one in module.parameters()):
            module.save_pretrained = partial(_save_pretrained, module)  # type: ignore[assignment]
        if hasattr(module, "resize_token_embeddings") and any(isinstance(one, vocabulary) for one in module.modules()):
            module.resize_token_embeddings = partial(_resize_token_embeddings, module)  # type: ignore[assignment]


class RestoreShards:
    """Set `shard` on parameters that were replaced: by load_state_dict(assign=True), or by to_empty() and the like
    before the forward pass. Copied with its module, it has the copied parameters."""

    def __init__(self, parameters: dict[str, nn.Parameter | None], shards: dict[str, Shard]) -> None:
        self.parameters, self.shards = parameters, shards

    def __call__(self, *_: Any) -> None:
        for name, shard in self.shards.items():
            parameter = self.parameters.get(name)
            if parameter is not None and getattr(parameter, "shard", None) is not shard:
                set_shard(parameter, shard)


def _save_pretrained(model: nn.Module, save_directory: Any, *args: Any, **options: Any) -> Any:
    """Call transformers' save_pretrained with a full state dict, and require one. Ranks with an empty one write
    nothing."""
    state = args[1] if len(args) > 1 else options.get("state_dict")
    if state is None or options.get("distributed_checkpoint"):
        raise RuntimeError(
            "save_pretrained: this rank has only shards of the parameters. Call ad.save_full_state_dict(model, folder) "
            "on every rank, and model.config.save_pretrained(folder) on rank 0; or, on every rank, "
            "model.save_pretrained(folder, state_dict=ad.full_state_dict(model))"
        )
    for name, one in model.state_dict(keep_vars=True).items() if state else ():
        shard, value = shard_of(one) if isinstance(one, Tensor) else None, state.get(name)
        if shard is not None and isinstance(value, Tensor) and tuple(value.shape) != shard.shape:
            raise ValueError(
                f"save_pretrained: {name} of state_dict has shape {list(value.shape)}, expected that of the full "
                f"parameter, {list(shard.shape)}; pass state_dict=ad.full_state_dict(model)"
            )
    kind: Any = type(model)
    return kind.save_pretrained(model, save_directory, *args, **options) if state else None
