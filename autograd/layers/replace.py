"""parallelize: the modules of a model become tensor-parallel ones, after a plan."""

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
from ..arguments import check_comm
from ..mesh import Mesh
from ..overlap.config import Overlap
from ..torch_internals import has_hooks, has_no_values
from ..wire import Dtype
from .dropout import Dropout
from .hooks import Entering, SameInput, Sequence, checksum, hook_modules, hook_outputs, keep_parts, leave_logits_cut
from .linear import ColumnParallelLinear, KeyValueLinear, RowParallelLinear
from .plan import LAYERS, NAME, Planned, Site, read, reads, widths_of
from .plan_checks import Stay, check_cut, check_staying, check_tied, staying, tied_parameters, warn_of_silence
from .shards import Shard, Sharded, shard_of
from .vocabulary import VocabParallelEmbedding, VocabParallelHead

_SAMPLE = 16  # elements of each parameter that are compared


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
    """Make a model tensor-parallel, in place; returns it. Each rank keeps its part of the weights, which are equal on
    all ranks before. Names of modules and parameters stay.

    plan: {pattern of module paths: role}; `ad.plans` has those of well-known models, and says how patterns are
    written. Each pattern has to fit a module, but for one that begins with "**.". A role is one of these names, a pair
    (name, options), a list of them, or a function `f(module, comm)` that returns what takes the module's place.

    "column"          nn.Linear (or transformers' Conv1D) -> ColumnParallelLinear. Options: of the class; heads: the
                      name in model.config of the number of heads, which N has to divide
    "row"             nn.Linear -> RowParallelLinear
    "key_value"       as "column"; of fewer heads than ranks each is shared by several ranks (`KeyValueLinear`), and
                      num_key_value_groups of the parent becomes what it is on this rank
    "shared_input"    the input of this module is gathered once, for all "column" and "key_value" modules in it.
                      Options: input: the argument's name, where it is not the first tensor
    "vocab_embedding" nn.Embedding -> VocabParallelEmbedding
    "vocab_head"      nn.Linear -> VocabParallelHead
    "sequence"        stays, and sees this rank's part of the sequence: `finish_gradients` sums its gradients
    "partial"         stays, and sees this rank's heads or columns: the same, without sequence parallelism, too
    "sequence_begin"  the input of this module is cut along the sequence. Options: input
    "sequence_end"    the output of this module is gathered along the sequence
    "replicated"      stays
    "divide"          attributes that count what is on all ranks are divided by N. Options: attributes, such as
                      ["num_heads"]; of "config.num_heads" in a copy of config, which modules may share
    "attention_dropout" what this module draws itself is of this rank's heads. Options: p: name of its attribute, a
                      probability or a dropout module, that says how much

    nn.Dropout modules that the plan mentions draw as `ad.rng` does: each rank its own numbers where they are "partial",
    or "sequence" with sequence parallelism; equal ones where they are "replicated", or within a module that is.

    sequence_parallel  between "sequence_begin" and "sequence_end" each rank has 1/N of the sequence, which N has to
                       divide: padded, where it does not. Without gradients (torch.no_grad) other lengths are computed
                       without sequence parallelism, as in generate()
    seq_dim            where hidden states have the sequence: 1 if the batch comes first
    gather_logits      False: a "vocab_head" leaves each rank its words; a model of transformers then has its loss by
                       `vocab_parallel_cross_entropy`
    init               of a model on the meta device. None: its parts stay there, for `load_full_state_dict`; of models
                       of transformers the buffers that no checkpoint has are made. A function
                       of a module, such as `model._init_weights` or `lambda m: m.reset_parameters()`: a layer at a time
                       is drawn whole, and this rank's part kept: as `model.apply(init)` of the unsharded model does
                       with the same seed

    After backward(): `finish_gradients(model)`, then `clip_grad_norm_`. ValueError and TypeError name the module, on
    every rank, before anything is changed; the first forward pass raises ValueError if ranks have other batches.
    UserWarning for modules with parameters, and for dropout, of which the plan says nothing: they are replicated; and
    for weights that are not equal on all ranks.
    """
    check_comm(NAME, comm, model=model)
    comm.check_alive()
    planned = Planned(model, comm, sequence_parallel, seq_dim, overlap, reduce_dtype, gather_logits)
    layers, stays = run_on_all_ranks(comm, lambda: _checked(planned, plan, init))
    _check_alike(planned, init)
    warn_of_silence(planned, stays)

    # From here on the model is changed.
    tied, sequence = tied_parameters(model), Sequence(comm, seq_dim)
    for stay in stays:
        for parameter in stay.module.parameters(recurse=False) if planned.is_summed(stay.role) else ():
            parameter.shard = Shard(comm, None, parameter.shape, partial=True)  # type: ignore[attr-defined]
    entering = hook_modules(planned, sequence)
    divide(planned)
    replace(planned, layers, entering, init)
    for group in tied:
        tie(model, group)
    sequence.layers = [one for one in model.modules() if getattr(one, "sequence_parallel", None) is True]
    if not sequence_parallel or planned.of_role("sequence_begin"):
        model.register_forward_pre_hook(SameInput(comm), with_kwargs=True)
    hook_outputs(planned, sequence)
    leave_logits_cut(model, comm)
    keep_parts(model)
    return model


def _checked(planned: Planned, plan: Mapping[str, Any], init: Any) -> tuple[dict[str, Sharded | None], list[Stay]]:
    """The layers that take the places of modules, and the modules that stay, if the plan is right."""
    _check_arguments(planned, init)
    planned.sites = read(planned.model, plan)
    layers = {path: layer_of(planned, site) for path, site in planned.sites.items()}
    stays = staying(planned)
    check_cut(planned)
    check_staying(planned, stays)
    check_tied(planned, stays, layers)
    return layers, stays


def _check_arguments(planned: Planned, init: Any) -> None:
    instance(planned.model, nn.Module, f"{NAME}: model", "a torch.nn.Module")
    for name in ("sequence_parallel", "gather_logits"):
        instance(getattr(planned, name), bool, f"{NAME}: {name}", "True or False")
    instance(planned.seq_dim, int, f"{NAME}: seq_dim", "a dimension of hidden states, such as 1")
    if planned.reduce_dtype is not None:
        instance(planned.reduce_dtype, torch.dtype, f"{NAME}: reduce_dtype", "a torch.dtype, such as torch.float32")
    if init is not None and not callable(init):
        raise TypeError(f"{NAME}: init is {shown(init)}, expected a function of a module, such as model._init_weights")


def _check_alike(planned: Planned, init: Any) -> None:
    """ValueError, on all ranks, if they would make other models; UserWarning if they have other weights, which a
    checkpoint that is loaded afterwards may put right."""
    model, comm = planned.model, planned.comm
    if comm.size == 1:
        return

    def said(one: Any) -> str:  # of what JSON has no word for: a function is one, whatever made it
        return "a function" if callable(one) else type(one).__name__

    text = partial(json.dumps, default=said)  # equal where the value is
    names = ("sequence_parallel", "seq_dim", "overlap", "gather_logits")
    samples = []
    for one in model.parameters():
        if one.numel() and not has_no_values(one) and one.layout == torch.strided:
            step = max(1, one.numel() // _SAMPLE)
            samples.append(one.detach().reshape(-1)[::step][:_SAMPLE].to(torch.float64))
    values = {
        "what the plan says of the modules": text([(path, site.roles) for path, site in planned.sites.items()]),
        "the options": text([*(getattr(planned, name) for name in names), str(planned.reduce_dtype), init is None]),
        "names, shapes, types or devices of the parameters": [
            f"{name} {list(one.shape)} {one.dtype} {one.is_meta}" for name, one in model.named_parameters()
        ],
        "the weights": checksum([torch.cat(samples)] if samples else []),
    }
    other = difference(comm, values)
    if other is not None and other.what != "the weights":
        raise ValueError(f"{NAME}: {other}; expected the same on all ranks")
    if other is not None:
        warnings.warn(
            f"{NAME}: rank {other.rank} and rank 0 have other weights, and each will keep its part of its own: call "
            "torch.manual_seed(seed) before the model is made, or load a checkpoint afterwards by load_full_state_dict",
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


def layer_of(planned: Planned, site: Site) -> Sharded | None:
    """The layer that is to take the module's place, on the meta device. None: there is none yet, since a function of
    the plan makes it, or it needs communicators that all ranks have to make together; or the module stays."""
    if site.layer is None:
        return None
    _check_replaceable(site, site.layer)
    try:
        if _shares_heads(planned, site):
            return None
        layer: Sharded = _CLASSES[site.layer].like(site.module, planned.comm, **_options(planned, site))
        return layer
    except (ValueError, TypeError) as error:
        if str(error).startswith(NAME):
            raise
        shape = next((list(one.shape) for one in site.module.parameters(recurse=False)), [])
        raise type(error)(f"{NAME}: {site.path}, weight {shape}: {error}") from None


def _check_replaceable(site: Site, role: str) -> None:
    """That the module is what the role is for, and that nothing is lost with it: only of torch's own classes it is
    known what they do."""
    module, kind = site.module, type(site.module)
    if isinstance(module, Sharded):
        raise TypeError(f"{NAME}: {site.path} is {kind.__name__} already; make a model parallel once")
    right: Any = nn.Embedding if role == "vocab_embedding" else nn.Linear
    is_conv = kind.__name__ == "Conv1D" and "Conv1D" in LAYERS[role]
    if not isinstance(module, right) and not is_conv:
        raise TypeError(f"{NAME}: {site.path} is {kind.__name__}, and the plan says {role!r}: expected {LAYERS[role]}")
    own = "hooks" if has_hooks(module) else "" if kind is right or is_conv else f"more than a torch.nn.{right.__name__}"
    if own:
        raise TypeError(
            f"{NAME}: {site.path} is {kind.__name__} with {own}, which would be lost in the layer in its place; say "
            "'replicated' of it, and of what has the same parameter, or give a function that makes the layer"
        )


def _shares_heads(planned: Planned, site: Site) -> bool:
    """Whether there are fewer heads of keys or values than ranks, so that several ranks share one. ValueError for heads
    that cannot be cut."""
    heads, ranks = planned.cut_heads(site), planned.comm.size
    if heads is None or heads % ranks == 0:
        return False
    shares = site.layer == "key_value"
    if not shares or ranks % heads:
        expected = "one to be a multiple of the other" if shares else "a multiple of the ranks"
        raise ValueError(f"model.config.{site.options['heads']} is {heads}, on {ranks} ranks; expected {expected}")
    if not site.shared:
        raise ValueError(f"{heads} heads on {ranks} ranks need 'shared_input' of the module around")
    if widths_of(site.module)[1] % heads:
        raise ValueError(f"{widths_of(site.module)[1]} outputs are not divisible by {heads} heads")
    return True


def _options(planned: Planned, site: Site) -> dict[str, Any]:
    """What the class of the layer is told."""
    if site.layer == "vocab_embedding":
        return {"reduce_dtype": planned.reduce_dtype, **site.options}
    if site.layer == "vocab_head":
        return {"gather_output": planned.gather_logits, **site.options}
    options = {name: getattr(planned, name) for name in ("sequence_parallel", "seq_dim", "overlap", "reduce_dtype")}
    if site.shared and site.is_column:
        options["gather_input"] = False
    return options | {name: value for name, value in site.options.items() if name != "heads"}


def replace(
    planned: Planned, layers: Mapping[str, Sharded | None], entering: Mapping[str, Entering], init: Any
) -> None:
    """Put layers and dropout in their places.

    layers    path -> layer, without parameters, that is made already
    entering  path -> hook of a module that gathers the input of the layers in it
    init      of modules on the meta device: a function of a module, by which a piece at a time is drawn whole
    """
    model, meshes = planned.model, dict[int, Mesh]()
    for path, place in planned.dropouts().items():
        if place is not None:
            old: Any = model.get_submodule(path)
            _put(model, path, Dropout(old.p, planned.comm, planned.is_summed(place), old.inplace).train(old.training))
    for modules in list(_pieces(model)):
        _draw(modules.values(), planned.comm, init, getattr(model, "_init_weights", None))
        for site in [planned.sites[path] for path in modules if path in planned.sites]:
            if site.function is not None:
                made = _made_by_function(planned, site)
            elif site.layer is not None:
                made = (layers[site.path] or _key_value(planned, site, meshes)).take(site.module)
                if init is not None:
                    site.module.to_empty(device="meta", recurse=False)  # so that one piece at a time is whole
            else:
                continue
            if site.shared and getattr(made, "gather_input", None) is False:
                made.register_forward_pre_hook(partial(entering[site.shared].look_at, site.path))
            _put(model, site.path, made)


def _made_by_function(planned: Planned, site: Site) -> nn.Module:
    assert site.function is not None
    made = site.function(site.module, planned.comm)
    if made is not None and not isinstance(made, nn.Module):
        raise TypeError(f"{NAME}: {site.path}: the plan's function returned {shown(made)}, expected a module")
    return made or site.module


def _key_value(planned: Planned, site: Site, meshes: dict[int, Mesh]) -> Sharded:
    """A layer of which several ranks share a part.

    meshes  number of heads -> the ranks as a grid of heads, and of those that share one
    """
    heads = planned.cut_heads(site) or 1
    if heads not in meshes:
        meshes[heads] = Mesh(planned.comm, {"heads": heads, "shared": planned.comm.size // heads})
    mesh, options = meshes[heads], {**_options(planned, site), "sequence_parallel": False}
    return KeyValueLinear.like(site.module, mesh["heads"], shared=mesh["shared"], **options)


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put it in the place of the module at `path`, which may have several names."""
    old = model.get_submodule(path)
    for parent in [] if module is old else list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, module)
                if isinstance(parent, nn.TransformerEncoderLayer):
                    parent.activation_relu_or_gelu = 0  # no fast path, which uses weights and calls no layer


# ------------------------------------------------------------------------------------------------- parameters


def tie(model: nn.Module, group: list[tuple[str, str]]) -> None:
    """Make them one parameter again: the one that was drawn last, if they were drawn."""
    users = [(module, path, name) for path, name in group if hasattr(module := model.get_submodule(path), name)]
    parameters = [getattr(module, name) for module, _, name in users]
    kept = next((one for one in reversed(parameters) if shard_of(one) is not None), parameters[-1])
    for module, path, name in users:
        shape = getattr(module, name).shape
        if shape != kept.shape and reads(module, name):
            raise ValueError(
                f"{NAME}: {path}.{name}, made by a function of the plan, has shape {list(shape)} on this rank, and is "
                f"one parameter with what is cut to {list(kept.shape)}; expected a layer that has the same part of it"
            )
        setattr(module, name, kept)


def _pieces(model: nn.Module, path: str = "") -> Iterator[dict[str, nn.Module]]:
    """The modules in the order of model.apply, in pieces: all of a layer of a list, since the function that draws it
    may draw in its children once more; else each by itself."""
    for name, child in list(model.named_children()):
        below = f"{path}.{name}".lstrip(".")
        if isinstance(model, nn.ModuleList) and path:
            yield {one: module for piece in _pieces(child, below) for one, module in piece.items()}
        else:
            yield from _pieces(child, below)
    yield {path: model}


def _draw(modules: Iterable[nn.Module], comm: Communicator, init: Any, buffers_by: Any) -> None:
    """Give modules of the meta device memory, whole, and their initial values: all by `init`; without it, by
    `buffers_by`, those that have nothing but buffers that no checkpoint has, as rotary embeddings."""
    for module in modules:
        parameters = dict(module.named_parameters(recurse=False))
        buffers = dict(module.named_buffers(recurse=False))
        is_meta = any(one.is_meta for one in (*parameters.values(), *buffers.values()))
        made_by = init or buffers_by
        if made_by is None or (
            init is None and (not is_meta or parameters or buffers.keys() & module.state_dict().keys())
        ):
            continue
        marks = {name: shard_of(one) for name, one in parameters.items()}
        if is_meta:
            module.to_empty(device=comm.device, recurse=False)
        made_by(module)
        for name, one in module.named_parameters(recurse=False):
            if marks[name] is not None:
                one.shard = marks[name]  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------- numbers of heads


def divide(planned: Planned) -> None:
    """Make attributes that count heads or columns what they are on this rank."""
    ranks = planned.comm.size
    for path, site in planned.sites.items():
        module: Any = site.module
        for name in site.divided:
            owner, _, last = name.rpartition(".")
            if owner:  # an object that it shares with others, such as "config": in a copy of that
                setattr(module, owner, copy.copy(getattr(module, owner)))
            counts = getattr(module, owner) if owner else module
            setattr(counts, last, getattr(counts, last) // ranks)
        for child in planned.children(path):
            heads = planned.cut_heads(child) if child.layer == "key_value" else None
            if heads is not None and heads < ranks and hasattr(module, "num_key_value_groups"):
                module.num_key_value_groups = planned.heads("num_attention_heads", child.path) // ranks
