"""The weights of a model whose modules are replaced: parameters that several have, drawn initial values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from pynccl import Communicator

from .plan import NAME
from .shards import shard_of


class User(NamedTuple):
    path: str  # of the module
    name: str  # of its parameter


def tied_parameters(model: nn.Module) -> list[list[User]]:
    users: dict[int, list[User]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            users.setdefault(id(parameter), []).append(User(path, name))
    return [one for one in users.values() if len(one) > 1]


def check_tied(tied: list[list[User]], made: Mapping[str, nn.Module | None]) -> None:
    for group in tied:
        shards = {}
        for path, name in group:
            layer = made.get(path)
            if layer is not None:
                shards[f"{path}.{name}"] = shard_of(getattr(layer, name))
        cuts = {shard and (shard.dim, shard.shape, shard.splits) for shard in shards.values()}
        if len(cuts) > 1:
            raise ValueError(
                f"{NAME}: {' and '.join(shards)} are one parameter, and the plan cuts them in different ways; expected "
                "'vocab_embedding' and 'vocab_head', or 'replicated' for all"
            )


def tie(model: nn.Module, group: list[User]) -> None:
    """Make them one parameter again: the one that was drawn last, if they were drawn."""
    parameters = [getattr(model.get_submodule(path), name) for path, name in group]
    kept = next((one for one in reversed(parameters) if shard_of(one) is not None), parameters[-1])
    for path, name in group:
        setattr(model.get_submodule(path), name, kept)


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
