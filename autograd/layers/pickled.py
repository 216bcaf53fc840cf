"""set_communicator: a module that comes out of a pickle is connected with the other ranks again.

    torch.save(model, f"model-{comm.rank}.pt")                                # this rank's part
    model = torch.load(f"model-{comm.rank}.pt", weights_only=False)
    ad.set_communicator(model, comm)                                          # on every rank

What a communicator was before is then one that knows its rank and size, and how it was split off: all else raises.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from pynccl import Communicator
from pynccl.bindings.values import instance
from pynccl.comm.base import Origin

from ..agreement import broadcast_object, raise_alike
from ..arguments import check_comm
from ..mesh import Mesh

NAME = "set_communicator"
Module = TypeVar("Module", bound=nn.Module)

_PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device)
_APART = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)  # others have them too


def set_communicator(module: Module, comm: Communicator | Mesh) -> Module:
    """Put a communicator where a pickled module had one, everywhere in it, in place; returns it. Every rank must
    call it.

    comm  of as many ranks as the one that was pickled, and this rank's place in it the same: the parameters are that
          rank's parts. What had been split off is split off again, as for keys and values of fewer heads than ranks; so
          comm may be the one that all others in the module come from. A Mesh: what came of an axis is its `mesh[axis]`

    Parameters stay the same objects, so an optimizer of theirs goes on. Communicators in the module that were destroyed
    or aborted are replaced likewise; one that is alive stays. After it, `ad.rng.seed(seed, comm)` again for `Dropout`.
    ValueError, on all ranks, if one has the part of another rank or of another number of ranks. For these there are
    `full_state_dict` and `save_full_state_dict`.
    """
    mesh = comm if isinstance(comm, Mesh) else None
    top = mesh.comm if mesh is not None else comm
    check_comm(NAME, top, module=module)
    instance(module, nn.Module, f"{NAME}: module", "a torch.nn.Module")
    assert isinstance(top, Communicator)
    top.check_alive()
    found: dict[Origin, None] = {}

    def note(one: Communicator) -> Communicator:
        if not one.alive:
            found[one.origin] = None
        return one

    _Swap(note).of(module)
    base, problem = _base(list(found), top)
    raise_alike(top, problem)
    made: dict[Origin, Communicator] = {}
    if base is not None:
        made[base] = top
    _split(top, base, _children(list(found), base), mesh, made)
    wrong = [one for one in found if (made[one].rank, made[one].size) != (one.rank, one.size)]
    if wrong:
        now, (one, *_) = made[wrong[0]], wrong
        problem = ValueError(
            f"{NAME}: what was rank {one.rank} of {one.size} would be rank {now.rank} of {now.size}: the ranks' "
            "modules are not of one save"
        )
    raise_alike(top, problem)
    _Swap(lambda one: one if one.alive else made[one.origin]).of(module)
    return module


def _base(found: list[Origin], comm: Communicator) -> tuple[Origin | None, Exception | None]:
    """Which of them, or of those that they all come from, `comm` stands for."""
    if not found:
        return None, None
    lines = [one.line() for one in found]
    common = [one for one in lines[0] if all(one in line for line in lines)]
    for one in common:
        if (one.rank, one.size) == (comm.rank, comm.size):
            return one, None
    if not common:
        were = " and ".join(dict.fromkeys(f"rank {line[-1].rank} of {line[-1].size}" for line in lines))
        return None, ValueError(
            f"{NAME}: the module has communicators that do not come from one ({were}); give its parts theirs, one by "
            "one: set_communicator(module.part, comm)"
        )
    first = common[0]
    expected = " or ".join(f"rank {one.rank} of {one.size}" for one in common)
    remedy = "load the file of this rank"
    if comm.size not in {one.size for one in common}:
        remedy = (
            "for another number of ranks save ad.full_state_dict(model) or ad.save_full_state_dict(model, path) and "
            "load that"
        )
    return None, ValueError(
        f"{NAME}: the module is that of rank {first.rank} of {first.size}, of whose parameters it has that rank's "
        f"parts; comm is rank {comm.rank} of {comm.size}, expected {expected}; {remedy}"
    )


def _children(found: list[Origin], base: Origin | None) -> dict[Origin | None, dict[int, Origin]]:
    """parent -> number of the split -> what it made, of all that is to be made below `base`."""
    children: dict[Origin | None, dict[int, Origin]] = {}
    for origin in found:
        for one in origin.line():
            if one == base:
                break
            children.setdefault(one.parent, {})[one.number] = one
    return children


def _split(
    comm: Communicator,
    origin: Origin | None,
    children: dict[Origin | None, dict[int, Origin]],
    mesh: Mesh | None,
    made: dict[Origin, Communicator],
) -> None:
    """Split off what is to come from `comm`, in the order of the first time, and from that in turn. A rank that is in
    none of a split's communicators, or has no module of it, takes part in it all the same."""
    own = children.get(origin, {}) if origin is not None else {}
    told = {number: one.axes for number, one in own.items()}
    rows: list[dict[int, tuple[str, ...]]] = [broadcast_object(comm, told, rank) for rank in range(comm.size)]
    axes = {number: names for row in rows for number, names in row.items()}
    wrong = None
    for one in own.values():
        if mesh is not None and mesh.comm is comm and one.axes and all(name in mesh for name in one.axes):
            size = mesh.size(*one.axes)
            if size != one.size:
                wrong = ValueError(
                    f"{NAME}: along {', '.join(one.axes)} the module was cut over {one.size} ranks, the mesh has {size}"
                )
    raise_alike(comm, wrong)
    new: list[tuple[Origin, Communicator]] = []
    for number in sorted(axes):
        child: Origin | None = own.get(number)
        if mesh is not None and mesh.comm is comm and axes[number] and all(name in mesh for name in axes[number]):
            there: Communicator | None = mesh[axes[number]]
        elif child is None:
            there = comm.split(None)
        else:
            there = comm.split(child.color, child.key, child.config)
        if child is not None and there is not None:
            new.append((child, there))
    for child, there in new:
        if child.axes:
            there.origin = there.origin._replace(axes=child.axes)
        made[child] = there
        _split(there, child, children, None, made)


class _Swap:
    """Looks for communicators in all that an object holds, and puts there what `swap` returns for them."""

    def __init__(self, swap: Callable[[Communicator], Communicator]) -> None:
        self.swap = swap
        self.seen: dict[int, tuple[Any, Any]] = {}  # id -> it, so that the id stays its own, and what stands for it

    def of(self, value: Any) -> Any:
        if isinstance(value, Communicator):
            return self.swap(value)
        if isinstance(value, (*_PLAIN, *_APART)):
            return value
        if id(value) in self.seen:
            return self.seen[id(value)][1]
        self.seen[id(value)] = (value, value)
        if isinstance(value, (tuple, frozenset)):  # a new one, where what it holds is another
            items = [self.of(one) for one in value]
            if any(new is not old for new, old in zip(items, value, strict=True)):
                made = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
                self.seen[id(value)] = (value, made)
                return made
            return value
        self._within(value)
        return value

    def _within(self, value: Any) -> None:
        if isinstance(value, dict):
            items = [(self.of(key), self.of(one)) for key, one in value.items()]
            changed = [new for new, old in zip(items, value.items(), strict=True) if new[0] is not old[0]]
            if changed:
                value.clear()
                value.update(items)
            for key, new in items:
                if value[key] is not new:
                    value[key] = new
        elif isinstance(value, list):
            for at, one in enumerate(value):
                new = self.of(one)
                if new is not one:
                    value[at] = new
        elif isinstance(value, set):
            items = [self.of(one) for one in value]
            value.clear()
            value.update(items)
        elif isinstance(value, types.MethodType):
            self.of(value.__self__)
        elif isinstance(value, partial):
            state = value.__reduce__()[2]
            value.__setstate__((self.of(value.func), self.of(value.args), self.of(value.keywords), state[3]))  # type: ignore[attr-defined]
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict):
            self.of(held)
        for kind in type(value).__mro__:
            names = kind.__dict__.get("__slots__", ())
            for name in (names,) if isinstance(names, str) else names:
                if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                    old = getattr(value, name)
                    new = self.of(old)
                    if new is not old:
                        object.__setattr__(value, name, new)
