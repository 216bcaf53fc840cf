"""The weights of a model whose modules are replaced: parameters that several have, drawn initial values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from pynccl import Communicator

from .plan import NAME, Site
from .regions import Stay, names, read_by
from .replacement import Given
from .shards import Shard, Sharded, shard_of


class User(NamedTuple):
    path: str  # of the module
    name: str  # of its parameter


def tied_parameters(model: nn.Module) -> list[list[User]]:
    """Of parameters that several modules have: all of these modules, under each of their names."""
    users: dict[int, list[User]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            users.setdefault(id(parameter), []).append(User(path, name))
    return [one for one in users.values() if len(one) > 1]


def check_tied(given: Given, stays: Iterable[Stay], sites: Mapping[str, Site], made: Mapping[str, Any]) -> None:
    """That each of these would be cut, or summed, in one way wherever it is used. What holds a parameter and does not
    read it, as the head of BERT the bias of its decoder, has what the others have."""
    first, staying = names(given.model), {stay.path: stay for stay in stays}
    for group in tied_parameters(given.model):
        becomes: dict[User, Any] = {}
        for user in group:
            module = given.model.get_submodule(user.path)
            read = read_by(module)
            stay, site = staying.get(user.path), sites.get(first[user.path])
            if (site is not None and site.function is not None) or (stay is not None and stay.made):
                continue  # tie() looks at it
            if stay is not None and (read is None or user.name in read):
                whole = getattr(module, user.name).shape
                partial = stay.is_partial(given.sequence_parallel)
                becomes[user] = _cut(Shard(given.comm, None, whole, partial=True) if partial else None)
            elif stay is None and site is not None:
                layer = made[site.path]
                shard = shard_of(getattr(layer, user.name))
                becomes[user] = _cut(shard) if isinstance(layer, Sharded) else next(iter(site.roles.items()))
        if len({repr(one) for one in becomes.values()}) > 1:
            raise ValueError(_told(given, list(becomes), staying, sites, first))


def _cut(shard: Shard | None) -> Any:
    if shard is None:
        return None
    return shard.dim, shard.shape, shard.splits, shard.blocks, shard.transposed, shard.partial


def _told(
    given: Given, group: list[User], staying: Mapping[str, Stay], sites: Mapping[str, Site], first: Mapping[str, str]
) -> str:
    """What the plan says of the users of a parameter, and what it should say."""
    said, whole, cut = [], {}, {}
    for path, name in group:
        module, site = given.model.get_submodule(path), sites.get(first[path])
        roles = " and ".join(map(repr, site.roles)) if site is not None else ""
        said.append(f"{f'{path}.{name}'.lstrip('.')} ({roles or 'of which it says nothing'})")
        whole[path] = staying[path].right if path in staying else "replicated"
        plain = type(module).forward in (nn.Embedding.forward, nn.Linear.forward)
        if plain and name == "weight":
            cut[path] = "vocab_embedding" if isinstance(module, nn.Embedding) else "vocab_head"
    ways = []
    if len(cut) == len(group) and "vocab_embedding" in cut.values():
        ways.append(" and ".join(f"{role!r} of {path}" for path, role in cut.items()))
    if len(set(whole.values())) == 1:
        ways.append(f"{next(iter(whole.values()))!r} of all of them")
    ways.append("a parameter of its own for each")
    return (
        f"{NAME}: {' and '.join(said)} are one parameter, of which the plan makes different things; expected "
        f"{', or '.join(ways)}"
    )


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


def stages(model: nn.Module) -> Iterator[dict[str, nn.Module]]:
    """The modules in the order of model.apply, in pieces: all of a layer of a list, since the function that draws it
    may draw in its children once more; else each by itself."""
    kept: dict[str, nn.Module] = {}
    lists = [f"{path}." for path, one in model.named_modules() if isinstance(one, nn.ModuleList) and path]
    for path, module in list(_post_order(model)):
        kept[path] = module
        above = next((one for one in lists if path.startswith(one)), None)
        if above is None or "." not in path[len(above) :]:
            yield kept
            kept = {}


def _post_order(model: nn.Module, above: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in model.named_children():
        yield from _post_order(child, f"{above}.{name}".lstrip("."))
    yield above, model


def is_computed(module: nn.Module) -> bool:
    """Whether it has nothing but buffers that no checkpoint has, such as the frequencies of rotary embeddings."""
    buffers = dict(module.named_buffers(recurse=False))
    if any(True for _ in module.parameters(recurse=False)) or not any(one.is_meta for one in buffers.values()):
        return False
    return buffers.keys().isdisjoint(module.state_dict())


def draw(module: nn.Module, comm: Communicator, init: Callable[[nn.Module], Any]) -> None:
    """Give a module of the meta device memory, whole, and its initial values."""
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    marks = {name: shard_of(one) for name, one in module.named_parameters(recurse=False)}
    if any(one.is_meta for one in own):
        module.to_empty(device=comm.device, recurse=False)
    init(module)
    for name, one in module.named_parameters(recurse=False):
        if marks[name] is not None:
            one.shard = marks[name]  # type: ignore[attr-defined]


def put(model: nn.Module, path: str, module: nn.Module) -> None:
    old = model.get_submodule(path)
    for parent in list(model.modules()):  # it may have several names
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, module)
                if isinstance(parent, nn.TransformerEncoderLayer):
                    parent.activation_relu_or_gelu = 0  # no fast path, which uses weights and calls no layer
