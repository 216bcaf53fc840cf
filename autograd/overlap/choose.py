"""Choose the schedule of each pass, the same on all ranks; list these decisions, and discard them."""

from __future__ import annotations

import weakref
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pynccl import Communicator
from pynccl.bindings.errors import ranks_disagree
from pynccl.bindings.values import shown
from pynccl.comm.base import by_key
from pynccl.watch.frames import attribute_calls

from ..agreement import broadcast_object, gathered
from ..recompute import replay_choice
from ..state import state_of
from ..streams import is_capturing
from . import saved
from .buffers import Buffers
from .lanes import observers
from .schedules import OFF, Decision, PassKey, Schedule, candidates_for, format_times, why_off
from .tune import Race, ScheduledCall

MAX_SHAPES = 16  # races on a communicator of one pass with one weight, each with another number of rows
MAX_PASSES = 1024  # kept for a communicator, and for a layer


class Passes:
    """The decisions and races of one communicator, and which of them concern a layer.

    needs_grad  owner -> whether its x has needed a gradient on any rank"""

    def __init__(self) -> None:
        self.entries: dict[PassKey, Decision | Race] = {}
        self.shapes: Counter[PassKey] = Counter()  # number of races, by key with m=0
        self.keys: weakref.WeakKeyDictionary[Any, dict[PassKey, None]] = weakref.WeakKeyDictionary()  # by owner
        self.needs_grad: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def get(self, owner: Any, key: PassKey) -> Decision | Race | None:
        """Return None if the owner has not run this pass: the ranks have not compared its arguments."""
        return self.entries.get(key) if key in self.keys.get(owner, ()) else None

    def add(self, owner: Any, key: PassKey, found: Decision | Race) -> Decision | Race:
        keys: dict[PassKey, Any] = self.keys.setdefault(owner, {})
        if len(self.entries) >= MAX_PASSES:  # the races are limited by `shapes`
            self.entries = {at: one for at, one in self.entries.items() if isinstance(one, Race) or one.tried}
        if len(keys) >= MAX_PASSES:
            keys.clear()
        keys[key], self.entries[key] = None, found
        return found

    def forget(self, owner: Any) -> None:
        """Forget the decisions of a layer's passes, also for other layers with the same passes."""
        self.needs_grad.pop(owner, None)
        for key in self.keys.pop(owner, ()):
            self.entries.pop(key, None)
            self.shapes.pop(key._replace(m=0), None)


def choose(comm: Communicator, owner: Any, key: PassKey) -> ScheduledCall:
    """Return the schedule of a forward pass. A recomputation in a checkpoint uses that of its first pass."""
    passes = state_of(comm, Passes)
    scope = passes, comm if owner is None else owner
    lasting = isinstance(passes.entries.get(key), Decision)
    call, replayed = replay_choice(scope, key, lambda: pass_of(comm, owner, key), lasting)
    return ScheduledCall(call.decision) if replayed else call


def pass_of(comm: Communicator, owner: Any, key: PassKey) -> ScheduledCall:
    """Count a pass, and return its schedule, which is the same on all ranks."""
    found = entry_of(comm, owner, key)
    call = ScheduledCall(found) if isinstance(found, Decision) else _next(comm, key, found)
    for observer in tuple(observers):
        observer.decided(owner, call.decision)
    return call


def x_needs_grad(comm: Communicator, owner: Any, requires_grad: bool) -> bool:
    """Return whether the input of a column-parallel layer needs a gradient on any rank. Every rank then takes part in
    its sum. It is True for a function that is called without a layer: its calls have nothing in common.

    Collective in the first call of a layer, and in the first one in which an input needs a gradient after none did.
    So an input may begin to need one only on all ranks together. Once it has, the layer computes it in every call,
    until `retry`. With PYNCCL_CHECK=1 the ranks compare in every call. In a CUDA graph capture they cannot: then it is
    True, which needs no agreement."""
    if owner is None:
        return True
    passes = state_of(comm, Passes)
    known = passes.needs_grad.get(owner)
    if known is None or (requires_grad and not known) or comm.checking:
        if _captures(comm):
            return True
        with attribute_calls("x_needs_grad"):  # for the flight recorder
            known = passes.needs_grad[owner] = any(need for (need,) in gathered(comm, [requires_grad]))
    return known


def _next(comm: Communicator, key: PassKey, race: Race) -> ScheduledCall:
    if _captures(comm):
        return ScheduledCall(race.decision)
    before = race.decision
    call = race.next(comm)
    after = race.decision
    if after is not before and after.settled:
        saved.won[key.name(comm)] = {"schedule": after.schedule, "tried": dict(after.tried)}
        if race.closed:
            state_of(comm, Passes).entries[key] = after
        if after.method == "off":
            state_of(comm, Buffers).drop()  # perhaps only the race needed them
    return call


def _all_passes() -> list[tuple[Any, Passes]]:
    """Other threads may add communicators meanwhile."""
    comms = [comm for ref in by_key.valuerefs() if (comm := ref()) is not None]
    return [(comm, passes) for comm in comms if (passes := comm._attached.get(Passes)) is not None]


def entry_of(comm: Communicator, owner: Any, key: PassKey) -> Decision | Race:
    """Return the decision or race of a pass.

    Collective as `_agree`: it raises NcclInvalidUsage on every rank if the ranks pass different arguments."""
    passes, owner = state_of(comm, Passes), comm if owner is None else owner
    found = passes.get(owner, key)
    if found is not None and not comm.checking:
        return found
    if why := why_off(key):
        return key.decision(OFF, why)  # not stored: the number of such shapes is unbounded
    candidates, reason = candidates_for(key)
    if _captures(comm):  # the ranks cannot compare the pass, so it is not stored
        if found is not None or len(candidates) == 1:
            return found or key.decision(candidates[0], reason)
        return key.decision(OFF, "captured into a CUDA graph before its race; run the model before the capture")
    loaded = _agree(comm, key)
    found = passes.entries.get(key) or _start(passes, key, candidates, reason, loaded)
    return passes.add(owner, key, found)


def _start(
    passes: Passes, key: PassKey, candidates: Sequence[Schedule], reason: str, loaded: Mapping[str, Any]
) -> Decision | Race:
    if len(candidates) == 1:
        return key.decision(candidates[0], reason)
    for schedule in candidates:
        if str(schedule) == loaded.get("schedule"):
            tried = loaded["tried"]
            return key.decision(schedule, f"loaded; tried: {format_times(tried)}", tried=tried)
    passes.shapes[key._replace(m=0)] += 1
    if passes.shapes[key._replace(m=0)] > MAX_SHAPES:
        reason = f"{MAX_SHAPES} numbers of rows were tried before; ad.overlap.retry(layer) forgets them"
        return key.decision(OFF, reason)
    return Race(key, candidates)


def _captures(comm: Communicator) -> bool:
    return not comm.library.is_host and is_capturing(torch.device(comm.device))


# ---------------------------------------------------------------------------------------------- consistency of ranks


def _agree(comm: Communicator, key: PassKey) -> Mapping[str, Any]:
    """Return the loaded decision if all ranks have loaded the same schedule, else {}.

    Collective, at the first call of a layer with these arguments, and at every call if PYNCCL_CHECK=1. Raises
    NcclInvalidUsage on every rank if the ranks pass different arguments."""
    loaded = saved.from_files.get(key.name(comm), {})
    row = [zlib.crc32(text.encode()) for text in (str(key), loaded.get("schedule", ""))]
    keys, schedules = zip(*gathered(comm, row), strict=True)
    if len(set(keys)) > 1:
        rows = [f"rank {rank}: {broadcast_object(comm, str(key), rank)}" for rank in range(comm.size)]
        rows += ["every rank must pass the same sizes, data types and OverlapConfig"]
        raise ranks_disagree(rows, " about the schedules of this layer")
    return loaded if len(set(schedules)) == 1 else {}


# ---------------------------------------------------------------------------------------------- public


def decisions(model: nn.Module | Communicator) -> tuple[Decision, ...]:
    """Return the decisions for the passes of a layer, or of all layers in a model.

    For a communicator, return those of functions called without a layer. During a race, `settled` is False and the
    schedule is the one that leads."""
    return tuple(decision for owner in _owners("decisions", model) for decision in decisions_of(owner))


def decisions_of(owner: Any) -> tuple[Decision, ...]:
    """Return the decisions of `owner` itself, without those of its submodules."""
    found = (passes.entries.get(key) for _, passes in _all_passes() for key in passes.keys.get(owner, ()))
    return tuple(one if isinstance(one, Decision) else one.decision for one in found if one is not None)


def retry(model: nn.Module | Communicator) -> None:
    """Start new races in the next calls of a model's layers, or of a communicator's functions. Call it on every rank.

    Layers with the same passes on one communicator share a race, also the new one. Use it after the load of the
    machine, its clocks or a library has changed. It discards earlier decisions, including loaded ones."""
    for owner in _owners("retry", model):
        for comm, passes in _all_passes():
            for key in passes.keys.get(owner, ()):
                saved.from_files.pop(key.name(comm), None)
                saved.won.pop(key.name(comm), None)
            passes.forget(owner)


def _owners(name: str, model: Any) -> Iterable[Any]:
    if isinstance(model, nn.Module):
        return model.modules()
    if isinstance(model, Communicator):
        return (model,)
    raise TypeError(f"overlap.{name}: model is {shown(model)}, expected a torch.nn.Module or a communicator")
