"""The layer that takes the place of a module, as the plan says, and the parameters that it takes over."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn

from pynccl import Communicator
from pynccl.bindings.values import shown

from ..mesh import Mesh
from ..torch_internals import has_hooks
from .dropout import Dropout
from .hooks import Entering
from .linear import ColumnParallelLinear, KeyValueLinear, RowParallelLinear
from .plan import LAYERS, NAME, Planned, Site, reads, widths_of
from .shards import Sharded, shard_of
from .vocabulary import VocabParallelEmbedding, VocabParallelHead

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
