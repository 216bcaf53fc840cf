"""parallelize: replace modules of a model with tensor-parallel layers, according to a plan."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from pynccl import Communicator
from pynccl.bindings.values import instance, shown

from ..agreement import difference, run_on_all_ranks
from ..arguments import check_comm, checked
from ..mesh import Mesh
from ..overlap.keys import Overlap
from ..torch_internals import has_no_values, move_forward_hooks, uncompiled, wrapped_in
from ..wire import Dtype
from .dropout import ELEMENTWISE, FUNCTIONS, Dropout
from .dtensors import is_dtensor
from .hooks import (
    GatherInput,
    SequenceSharding,
    handle_sharded_logits,
    hook_modules,
    hook_outputs,
    preserve_shards,
)
from .linear import ColumnParallelLinear, KeyValueLinear, RowParallelLinear
from .plan import NAME, PlannedModel, Site, read, reads, title_of, widths_of
from .plan_checks import (
    KeptModule,
    check_dropouts,
    check_kept_modules,
    check_nothing_lost,
    check_replaceable,
    check_sharded_layers,
    check_tied,
    kept_modules,
    tied_parameters,
    warn_unmentioned,
)
from .same_input import CheckSameInput, checksum
from .shard import Shard
from .shards import Sharded, set_shard, shard_of
from .vocabulary import VocabParallelEmbedding, VocabParallelHead

_SAMPLE = 16  # elements of each parameter that are compared


@checked
def parallelize(
    model: nn.Module,
    comm: Communicator,
    plan: Mapping[str, Any],
    sequence_parallel: bool = True,
    seq_dim: int = 1,
    *,
    overlap: Overlap = "auto",
    reduce_dtype: Dtype = None,
    gather_logits: bool = True,
    init: Callable[[nn.Module], Any] | None = None,
) -> nn.Module:
    """Apply tensor parallelism and sequence parallelism to a model, according to a plan.

    It modifies the model in place, and returns it. It is a collective: every rank of `comm` must call it, with equal
    weights.

        ad.parallelize(model, comm, ad.plans.llama)
        model(input_ids=ids, labels=ids).loss.backward()
        ad.finish_gradients(model)

    Each rank keeps its shard of the weights. Names of modules and parameters do not change.

    model              the unsharded model; on the meta device, see `init`
    comm               the N tensor-parallel ranks, for example `mesh["tp"]`. All of them must be given the same batches
    plan               dict {pattern of module paths: role}, see below. `ad.plans` has those of well-known models
    sequence_parallel  between "sequence_begin" and "sequence_end" each rank has 1/N of the sequence. In training its
                       length must be divisible by N: pad it if it is not. Without gradients (torch.no_grad(), as in
                       generate()) other lengths are computed without sequence parallelism
    seq_dim            sequence dimension of the hidden states: 1 if the batch comes first
    overlap            how the layers hide communication behind matmuls, see `ColumnParallelLinear`
    reduce_dtype       data type in which the layers sum over ranks; None: that of the summed tensor
    gather_logits      False: "vocab_head" returns the logits of this rank's shard of the vocabulary. Causal models of
                       transformers then compute their loss with `vocab_parallel_cross_entropy`
    init               for a model on the meta device. None: its shards stay there, for `load_full_state_dict`; in
                       models of transformers, buffers that no checkpoint has are computed. A function of a module, such
                       as `model._init_weights` or `lambda m: m.reset_parameters()`: initializes one full layer at a
                       time and keeps this rank's shard, with the values that `model.apply(init)` gives the unsharded
                       model with the same seed

    In a pattern, "*" matches one part of a path, "**" any number of parts; "layers.-1" is the last module of a list,
    and "" the model itself: its own parameters, and modules in it that have no placement of their own. Each pattern
    must match a module, except those that begin with "**.". A role is one of the names below, a pair (name, options), a
    function `f(module, comm)` that returns the replacement, or a list of these.

    Roles of modules that are replaced:

    "column"            nn.Linear (or transformers' Conv1D) -> `ColumnParallelLinear`. Options: those of the class; and
                        heads, the name in model.config of the number of heads, which must be divisible by N
    "row"               nn.Linear (or Conv1D) -> `RowParallelLinear`. Options: those of the class
    "key_value"         as "column". With fewer heads than ranks, several ranks share a head (`KeyValueLinear`), and the
                        parent's num_key_value_groups is adjusted
    "vocab_embedding"   nn.Embedding -> `VocabParallelEmbedding`
    "vocab_head"        nn.Linear -> `VocabParallelHead`

    Roles of modules that are kept:

    "shared_input"      gather the input of this module once, for all "column" and "key_value" modules in it. Option:
                        input, the argument's name; default: the first tensor
    "sequence"          it sees this rank's shard of the sequence: `finish_gradients` sums its gradients
    "partial"           it sees this rank's heads or columns: gradients are summed, also without sequence parallelism
    "replicated"        it does the same work on every rank
    "sequence_begin"    split the input of this module along the sequence. Option: input, as above
    "sequence_end"      gather the output of this module along the sequence
    "divide"            divide counting attributes by N. Option: attributes, such as ["num_heads"], or
                        ["config.num_heads"], which divides it in a copy of the config that other modules may share
    "attention_dropout" this module applies dropout to this rank's heads in its forward. Option: p, the name of its
                        attribute that is the probability or a dropout module

    Forward hooks and forward pre-hooks of a module that a layer or `ad.Dropout` replaces move to the new module. Other
    kinds raise. A function in the plan gets the module with its hooks, and moves them itself. Wrap modules
    (DistributedDataParallel, checkpoint_wrapper) afterwards.

    torch's dropout modules that the plan mentions become `ad.Dropout`: with random numbers of each rank's own if they
    are "partial", or "sequence" with sequence parallelism; with equal ones if they, or a module around them, are
    "replicated". Those that zero whole channels (Dropout1d, 2d, 3d and FeatureAlphaDropout) and subclasses must be
    "replicated", unless p is 0.

    Raises ValueError or TypeError, on every rank and before the model is changed, with the name of the module. A
    forward pass raises ValueError if the ranks have different input tensors; on a GPU, the next one does. Warns
    (UserWarning) about modules with parameters, and dropout, that the plan does not mention: they are replicated; and
    if the weights are not equal on all ranks.
    """
    check_comm(NAME, comm, model=model)
    comm.check_alive()
    planned = PlannedModel(uncompiled(model), comm, sequence_parallel, seq_dim, overlap, reduce_dtype, gather_logits)
    layers, kept = run_on_all_ranks(comm, lambda: _checked(planned, plan, init))
    _check_same_on_all_ranks(planned, init)
    warn_unmentioned(planned, kept)

    # From here on the model is changed.
    inner, sequence = planned.model, SequenceSharding(comm, seq_dim)
    tied = tied_parameters(inner)
    for entry in kept:
        if planned.has_partial_gradients(entry.placement):
            for parameter in entry.module.parameters(recurse=False):
                set_shard(parameter, Shard(comm, None, parameter.shape, partial=True))
    if not sequence_parallel or planned.of_role("sequence_begin"):
        inner.register_forward_pre_hook(CheckSameInput(comm), with_kwargs=True)  # before one that splits the input
    gather_inputs = hook_modules(planned, sequence)
    divide(planned)
    replace(planned, layers, gather_inputs, init)
    for group in tied:
        tie(inner, group)
    sequence.layers = [one for one in inner.modules() if getattr(one, "sequence_parallel", None) is True]
    hook_outputs(planned, sequence)
    handle_sharded_logits(inner, comm)
    preserve_shards(inner)
    return model


def _checked(
    planned: PlannedModel, plan: Mapping[str, Any], init: Any
) -> tuple[dict[str, Sharded | None], list[KeptModule]]:
    """Check the plan. Return the layers that will replace modules, by path, and the modules that are kept."""
    _check_arguments(planned, init)
    planned.sites = read(planned.model, plan)
    layers = {path: make_layer(planned, site) for path, site in planned.sites.items()}
    for path, placement in planned.dropouts().items():
        if placement is not None:
            check_nothing_lost(path, planned.model.get_submodule(path), "ad.Dropout", "")
    kept = kept_modules(planned)
    check_sharded_layers(planned)
    check_kept_modules(planned, kept)
    check_dropouts(planned)
    check_tied(planned, kept, layers)
    return layers, kept


def _check_arguments(planned: PlannedModel, init: Any) -> None:
    instance(planned.model, nn.Module, f"{NAME}: model", "a torch.nn.Module")
    for path, module in planned.model.named_modules():
        if wrapped_in(module) is not None or any(map(is_dtensor, module.parameters(recurse=False))):
            what = "has DTensors" if wrapped_in(module) is None else "wraps a module"
            raise TypeError(
                f"{NAME}: {title_of(path, module)} ({type(module).__name__}) {what}; call {NAME} first, and DDP, "
                "checkpoint_wrapper and fully_shard (not FullyShardedDataParallel) on the parallel model"
            )
    for name in ("sequence_parallel", "gather_logits"):
        instance(getattr(planned, name), bool, f"{NAME}: {name}", "True or False")
    instance(planned.seq_dim, int, f"{NAME}: seq_dim", "a dimension of hidden states, such as 1")
    if planned.reduce_dtype is not None:
        instance(planned.reduce_dtype, torch.dtype, f"{NAME}: reduce_dtype", "a torch.dtype, such as torch.float32")
    if init is not None and not callable(init):
        raise TypeError(f"{NAME}: init is {shown(init)}, expected a function of a module, such as model._init_weights")


def _check_same_on_all_ranks(planned: PlannedModel, init: Any) -> None:
    """Raise ValueError, on all ranks, if their models would differ. Only warn if their weights do, since a checkpoint
    that is loaded later fixes that."""
    model, comm = planned.model, planned.comm
    if comm.size == 1:
        return

    def name_of(value: Any) -> str:  # for values that JSON cannot encode; all functions count as equal
        return "a function" if callable(value) else type(value).__name__

    text = partial(json.dumps, default=name_of)
    names = ("sequence_parallel", "seq_dim", "overlap", "gather_logits")
    samples = []
    for one in model.parameters():
        if one.numel() and not has_no_values(one) and one.layout == torch.strided:
            step = max(1, one.numel() // _SAMPLE)
            samples.append(one.detach().reshape(-1)[::step][:_SAMPLE].to(torch.float64))
    values = {
        "the roles of the modules in the plan": text([(path, site.roles) for path, site in planned.sites.items()]),
        "the options": text([*(getattr(planned, name) for name in names), str(planned.reduce_dtype), init is None]),
        "names, shapes, dtypes or devices of the parameters": [
            f"{name} {list(one.shape)} {one.dtype} {one.is_meta}" for name, one in model.named_parameters()
        ],
        "the weights": checksum([torch.cat(samples)] if samples else []),
    }
    other = difference(comm, values)
    if other is not None and other.what != "the weights":
        raise ValueError(f"{NAME}: {other}; pass the same on all ranks")
    if other is not None:
        warnings.warn(
            f"{NAME}: rank {other.rank} and rank 0 have different weights, so the shards do not make up one model; "
            "call torch.manual_seed(seed) before making the model, or load a checkpoint with load_full_state_dict "
            "afterwards",
            UserWarning,
            stacklevel=3,
        )


# ------------------------------------------------------------------------------------------------- layers


_CLASSES: dict[str, Any] = {
    "column": ColumnParallelLinear,
    "row": RowParallelLinear,
    "key_value": ColumnParallelLinear,
    "vocab_embedding": VocabParallelEmbedding,
    "vocab_head": VocabParallelHead,
}


def make_layer(planned: PlannedModel, site: Site) -> Sharded | None:
    """Return the layer that will replace the module, on the meta device. None: the module is kept, or a function of the
    plan makes the layer, or the layer needs new communicators, which all ranks must make together."""
    if site.layer is None:
        return None
    check_replaceable(site, site.layer)
    try:
        if _shares_heads(planned, site):
            return None
        layer: Sharded = _CLASSES[site.layer].like(site.module, planned.comm, **_layer_options(planned, site))
        return layer
    except (ValueError, TypeError) as error:
        if str(error).startswith(NAME):
            raise
        shape = next((list(one.shape) for one in site.module.parameters(recurse=False)), [])
        raise type(error)(f"{NAME}: {site.path}, weight {shape}: {error}") from None


def _shares_heads(planned: PlannedModel, site: Site) -> bool:
    """Return whether there are fewer key/value heads than ranks, so that several ranks share one. ValueError if the
    heads cannot be divided over the ranks."""
    heads, ranks = planned.num_heads(site), planned.comm.size
    if heads is None or heads % ranks == 0:
        return False
    shares = site.layer == "key_value"
    if not shares or ranks % heads:
        expected = "a multiple or a divisor of that" if shares else "a multiple of that"
        raise ValueError(f"model.config.{site.options['heads']} is {heads}, on {ranks} ranks; expected {expected}")
    if site.shared is None:
        raise ValueError(f"{heads} heads on {ranks} ranks need 'shared_input' on the module that contains it")
    if widths_of(site.module)[1] % heads:
        raise ValueError(f"{widths_of(site.module)[1]} outputs are not divisible by {heads} heads")
    return True


def _layer_options(planned: PlannedModel, site: Site) -> dict[str, Any]:
    """Return the keyword arguments of the layer's class."""
    if site.layer == "vocab_embedding":
        return {"reduce_dtype": planned.reduce_dtype, **site.options}
    if site.layer == "vocab_head":
        return {"gather_output": planned.gather_logits, **site.options}
    options = {name: getattr(planned, name) for name in ("sequence_parallel", "seq_dim", "overlap", "reduce_dtype")}
    if site.shared is not None and site.is_column:
        options["gather_input"] = False
    return options | {name: value for name, value in site.options.items() if name != "heads"}


def replace(
    planned: PlannedModel, layers: Mapping[str, Sharded | None], gather_inputs: Mapping[str, GatherInput], init: Any
) -> None:
    """Replace modules with parallel layers and `ad.Dropout`.

    layers         path -> layer on the meta device
    gather_inputs  path of a "shared_input" module -> its hook
    init           initializes the modules of the meta device, one step of full modules at a time
    """
    model, meshes = planned.model, dict[int, Mesh]()
    for path, placement in planned.dropouts().items():
        old, sharded = model.get_submodule(path), planned.has_partial_gradients(placement)
        if placement is not None and type(old) in (ELEMENTWISE if sharded else FUNCTIONS):
            new = Dropout.like(old, planned.comm, sharded)
            move_forward_hooks(old, new)
            _replace_module(model, path, new)
    for modules in list(_initialization_steps(model)):
        _initialize(modules.values(), planned.comm, init, getattr(model, "_init_weights", None))
        for site in [planned.sites[path] for path in modules if path in planned.sites]:
            if site.function is not None:
                made = _call_plan_function(planned, site)
            elif site.layer is not None:
                made = (layers[site.path] or _key_value(planned, site, meshes)).take(site.module)
                move_forward_hooks(site.module, made)
                if init is not None:
                    site.module.to_empty(device="meta", recurse=False)  # frees the full module before the next step
            else:
                continue
            if site.shared is not None and getattr(made, "gather_input", None) is False:
                made.register_forward_pre_hook(partial(gather_inputs[site.shared].check_source, site.path))
            _replace_module(model, site.path, made)


def _call_plan_function(planned: PlannedModel, site: Site) -> nn.Module:
    assert site.function is not None
    made = site.function(site.module, planned.comm)
    if made is not None and not isinstance(made, nn.Module):
        raise TypeError(
            f"{NAME}: {site.title}: the function in the plan returned {shown(made)}, expected a torch.nn.Module, or "
            "None"
        )
    if made not in (None, site.module) and not site.path:
        raise TypeError(
            f"{NAME}: {site.title}: the function in the plan returned another module, but only modules in a model are "
            "replaced; expected the same module, or None"
        )
    return made or site.module


def _key_value(planned: PlannedModel, site: Site, meshes: dict[int, Mesh]) -> Sharded:
    """Return a layer whose heads are each shared by several ranks.

    meshes  number of heads -> mesh of heads and of the ranks that share one
    """
    heads = planned.num_heads(site) or 1
    if heads not in meshes:
        meshes[heads] = Mesh(planned.comm, {"heads": heads, "shared": planned.comm.size // heads})
    mesh, options = meshes[heads], {**_layer_options(planned, site), "sequence_parallel": False}
    return KeyValueLinear.like(site.module, mesh["heads"], shared=mesh["shared"], **options)


def _replace_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Replace the module at `path`, under all names that it has."""
    old = model.get_submodule(path)
    for parent in [] if module is old else list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, module)
                if isinstance(parent, nn.TransformerEncoderLayer):
                    parent.activation_relu_or_gelu = 0  # disables the fast path, which does not call the layers


# ------------------------------------------------------------------------------------------------- parameters


def tie(model: nn.Module, group: list[tuple[str, str]]) -> None:
    """Tie the parameters of these modules again, to the one that was initialized last."""
    users = [(module, path, name) for path, name in group if hasattr(module := model.get_submodule(path), name)]
    parameters = [getattr(module, name) for module, _, name in users]
    kept = next((one for one in reversed(parameters) if shard_of(one) is not None), parameters[-1])
    for module, path, name in users:
        shape = getattr(module, name).shape
        if shape != kept.shape and reads(module, name):
            raise ValueError(
                f"{NAME}: {path}.{name}, made by a function in the plan, has shape {list(shape)} on this rank, but it "
                f"is tied to a parameter of shape {list(kept.shape)}; make a layer with the same shard of it"
            )
        setattr(module, name, kept)


def _initialization_steps(model: nn.Module, path: str = "") -> Iterator[dict[str, nn.Module]]:
    """Yield the modules in the order of model.apply, by steps: each layer of a list is one step, since `init` of the
    layer may initialize its submodules again; other modules are one step each."""
    for name, child in list(model.named_children()):
        below = f"{path}.{name}".lstrip(".")
        if isinstance(model, nn.ModuleList) and path:
            yield {one: module for step in _initialization_steps(child, below) for one, module in step.items()}
        else:
            yield from _initialization_steps(child, below)
    yield {path: model}


def _initialize(modules: Iterable[nn.Module], comm: Communicator, init: Any, buffers_by: Any) -> None:
    """Allocate full modules of the meta device and initialize them: all modules with `init`. Without it, use
    `buffers_by` for modules that have only non-persistent buffers, such as rotary embeddings."""
    for module in modules:
        parameters = dict(module.named_parameters(recurse=False))
        buffers = dict(module.named_buffers(recurse=False))
        is_meta = any(one.is_meta for one in (*parameters.values(), *buffers.values()))
        made_by = init or buffers_by
        if made_by is None or (
            init is None and (not is_meta or parameters or buffers.keys() & module.state_dict().keys())
        ):
            continue
        shards = {name: shard_of(one) for name, one in parameters.items()}
        if is_meta:
            module.to_empty(device=comm.device, recurse=False)
        made_by(module)
        for name, one in module.named_parameters(recurse=False):
            if shards[name] is not None:
                set_shard(one, shards[name])


# ------------------------------------------------------------------------------------------------- number of heads


def divide(planned: PlannedModel) -> None:
    """Divide the attributes that count heads or columns, so that they hold for this rank."""
    ranks = planned.comm.size
    for path, site in planned.sites.items():
        module: Any = site.module
        for name in site.divided:
            owner, _, last = name.rpartition(".")
            if owner:  # such as "config", which other modules may share: change a copy
                setattr(module, owner, copy.copy(getattr(module, owner)))
            counts = getattr(module, owner) if owner else module
            setattr(counts, last, getattr(counts, last) // ranks)
        for child in planned.children(path):
            heads = planned.num_heads(child) if child.layer == "key_value" else None
            if heads is not None and heads < ranks and hasattr(module, "num_key_value_groups"):
                module.num_key_value_groups = planned.config_heads("num_attention_heads", child.path) // ranks
