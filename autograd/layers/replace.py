"""The layer that takes the place of a module, as the plan says, and the parameters that it takes over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from pynccl import Communicator
from pynccl.bindings.values import shown

from ..mesh import Mesh
from ..torch_internals import has_hooks
from .dropout import Dropout
from .linear import ColumnParallelLinear, KeyValueLinear, RowParallelLinear
from .plan import LAYERS, NAME, Planned, Site, read_by, widths_of
from .plan_checks import User
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
    roles = [role for role in site.roles if role in LAYERS]
    if len(roles) > 1:
        raise ValueError(f"{NAME}: {site.path}: the plan says {' and '.join(roles)}; a module can be one of them")
    if roles and site.function is not None:
        raise ValueError(f"{NAME}: {site.path}: the plan says {roles[0]} and gives a function; it can be one of them")
    if not roles:
        return None
    (role,) = roles
    _check_replaceable(planned, site, role)
    try:
        if _is_shared(planned, site):
            return None
        layer: Sharded = _CLASSES[role].like(site.module, planned.comm, **_options(planned, site, role))
        return layer
    except (ValueError, TypeError) as error:
        if str(error).startswith(NAME):
            raise
        shape = next((list(one.shape) for one in site.module.parameters(recurse=False)), [])
        raise type(error)(f"{NAME}: {site.path}, weight {shape}: {error}") from None


def _check_replaceable(planned: Planned, site: Site, role: str) -> None:
    """That the module is what the role is for, and that nothing is lost with it."""
    module, kind = site.module, type(site.module).__name__
    for other in ("shared_input", "sequence_begin", "sequence_end"):
        if other in site.roles:
            raise ValueError(
                f"{NAME}: {site.path}: the plan says {role}, and {other}, which is for a module that stays; say "
                "that of the module around"
            )
    if site.shared and role.startswith("vocab"):
        raise ValueError(
            f"{NAME}: {site.path} is within {site.shared}, whose input 'column' layers share, and the plan says {role} "
            "of it, which takes what is equal on all ranks; say 'column'"
        )
    if isinstance(module, Sharded):
        raise TypeError(f"{NAME}: {site.path} is {kind} already; make a model parallel once")
    _check_alone(planned.model, site)
    fits = isinstance(module, nn.Embedding if role == "vocab_embedding" else nn.Linear)
    if not fits and not (kind == "Conv1D" and kind in LAYERS[role]):
        raise TypeError(f"{NAME}: {site.path} is {kind}, and the plan says {role!r}: expected {LAYERS[role]}")


def _check_alone(model: nn.Module, site: Site) -> None:
    """That nothing is lost with the module, and that it is called: not its weight used by what is around."""
    module, more = site.module, []
    if any(isinstance(module, one) and type(module).forward is not one.forward for one in (nn.Linear, nn.Embedding)):
        more.append("a forward of its own")
    if has_hooks(module):
        more.append("hooks")
    if parametrize.is_parametrized(module):
        more.append("parametrizations")
    if isinstance(model.get_submodule(site.parent), nn.MultiheadAttention):
        more.append("a weight that nn.MultiheadAttention uses without calling it")
    if not more:
        return
    own = {id(one) for one in module.parameters(recurse=False)}
    tied = [
        name
        for name, one in model.named_modules()
        if one is not module and any(id(each) in own for each in one.parameters(recurse=False))
    ]
    raise TypeError(
        f"{NAME}: {site.path} is {type(module).__name__} with {' and '.join(more)}, which would be lost in the layer "
        "in its place; say 'replicated'"
        + (f", also of {' and '.join(tied)}, which has the same parameter" if tied else "")
        + ", or give a function that makes the layer"
    )


def _is_shared(planned: Planned, site: Site) -> bool:
    """Whether there are fewer heads of keys or values than ranks, so that several ranks share one. ValueError for heads
    that cannot be cut."""
    heads, ranks, outputs = planned.cut_heads(site), planned.comm.size, widths_of(site.module)[1]
    if heads is None or heads % ranks == 0:
        return False
    if "key_value" not in site.roles or ranks % heads:
        named = site.roles.get("column", site.roles.get("key_value", {}))["heads"]
        expected = "one to be a multiple of the other" if "key_value" in site.roles else "a multiple of the ranks"
        raise ValueError(f"model.config.{named} is {heads}, on {ranks} ranks; expected {expected}")
    if not site.shared:
        raise ValueError(f"{heads} heads on {ranks} ranks need 'shared_input' of the module around")
    if outputs % heads:
        raise ValueError(f"{outputs} outputs are not divisible by {heads} heads")
    return True


def _options(planned: Planned, site: Site, role: str) -> dict[str, Any]:
    """What the class of the layer is told."""
    options = dict(site.roles[role])
    if role == "vocab_embedding":
        return {"reduce_dtype": planned.reduce_dtype, **options}
    if role == "vocab_head":
        return {"gather_output": planned.gather_logits, **options}
    options.pop("heads", None)
    if site.shared and role != "row":
        options.setdefault("gather_input", False)
    names = ("sequence_parallel", "seq_dim", "overlap", "reduce_dtype")
    return {**{name: getattr(planned, name) for name in names}, **options}


def in_its_place(planned: Planned, site: Site, layer: Sharded | None, meshes: dict[int, Mesh]) -> nn.Module | None:
    """What takes the module's place, with its parameters; None: it stays.

    meshes  number of heads -> the ranks as a grid of heads, and of those that share one: made here when first needed
    """
    comm, module = planned.comm, site.module
    if site.function is not None:
        made = site.function(module, comm)
        if made is not None and not isinstance(made, nn.Module):
            raise TypeError(f"{NAME}: {site.path}: the plan's function returned {shown(made)}, expected a module")
        return made or module
    if layer is None and "key_value" in site.roles:
        heads = planned.cut_heads(site) or 1
        if heads not in meshes:
            meshes[heads] = Mesh(comm, {"heads": heads, "shared": comm.size // heads})
        options = {**_options(planned, site, "key_value"), "sequence_parallel": False}
        mesh = meshes[heads]
        layer = KeyValueLinear.like(module, mesh["heads"], shared=mesh["shared"], **options)
    return None if layer is None else layer.take(module)


def dropout_of(planned: Planned, module: nn.Module, place: str) -> nn.Module:
    assert isinstance(module, nn.Dropout)
    cut = place == "partial" or (place == "sequence" and planned.sequence_parallel)
    return Dropout(module.p, planned.comm, cut, module.inplace).train(module.training)


def put(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put it in the place of the module at `path`, which may have several names."""
    old = model.get_submodule(path)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, module)
                if isinstance(parent, nn.TransformerEncoderLayer):
                    parent.activation_relu_or_gelu = 0  # no fast path, which uses weights and calls no layer


# ------------------------------------------------------------------------------------------------- parameters


def tie(model: nn.Module, group: list[User]) -> None:
    """Make them one parameter again: the one that was drawn last, if they were drawn."""
    users = [(user, module) for user in group if hasattr(module := model.get_submodule(user.path), user.name)]
    parameters = [getattr(module, user.name) for user, module in users]
    kept = next((one for one in reversed(parameters) if shard_of(one) is not None), parameters[-1])
    for (path, name), module in users:
        shape = getattr(module, name).shape
        if shape != kept.shape and name in (read_by(module) or {name}):
            raise ValueError(
                f"{NAME}: {path}.{name}, made by a function of the plan, has shape {list(shape)} on this rank, and is "
                f"one parameter with what is cut to {list(kept.shape)}; expected a layer that has the same part of it"
            )
        setattr(module, name, kept)


def stages(model: nn.Module, path: str = "") -> Iterator[dict[str, nn.Module]]:
    """The modules in the order of model.apply, in pieces: all of a layer of a list, since the function that draws it
    may draw in its children once more; else each by itself."""
    for name, child in list(model.named_children()):
        below = f"{path}.{name}".lstrip(".")
        if isinstance(model, nn.ModuleList) and path:
            yield {one: module for piece in stages(child, below) for one, module in piece.items()}
        else:
            yield from stages(child, below)
    yield {path: model}


def _is_computed(module: nn.Module) -> bool:
    """Whether it has nothing but buffers that no checkpoint has, such as the frequencies of rotary embeddings."""
    buffers = dict(module.named_buffers(recurse=False))
    if any(True for _ in module.parameters(recurse=False)) or not any(one.is_meta for one in buffers.values()):
        return False
    return buffers.keys().isdisjoint(module.state_dict())


def draw(modules: Iterable[nn.Module], comm: Communicator, init: Any, buffers_by: Any) -> None:
    """Give modules of the meta device memory, whole, and their initial values.

    init        a function of a module, of all modules
    buffers_by  the like, if init is None, of those that have nothing but buffers that no checkpoint has
    """
    for module in modules:
        if init is not None:
            _draw(module, comm, init)
        elif buffers_by is not None and _is_computed(module):
            _draw(module, comm, buffers_by)


def _draw(module: nn.Module, comm: Communicator, init: Callable[[nn.Module], Any]) -> None:
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    marks = {name: shard_of(one) for name, one in module.named_parameters(recurse=False)}
    if any(one.is_meta for one in own):
        module.to_empty(device=comm.device, recurse=False)
    init(module)
    for name, one in module.named_parameters(recurse=False):
        if marks[name] is not None:
            one.shard = marks[name]  # type: ignore[attr-defined]
