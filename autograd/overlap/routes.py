"""Choose the schedule of each call of a layer, the same on all ranks; keep, save, load and retry these decisions."""

from __future__ import annotations

import json
import os
import threading
import weakref
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pynccl import Communicator, NcclInvalidUsage
from pynccl.bindings.values import path_of, shown
from pynccl.comm.observers import observers

from ..agreement import gathered
from ..recompute import replay_choice
from ..streams import is_capturing
from .config import METHODS, OverlapConfig
from .schedules import LOCAL_REASONS, OFF, PATTERNS, Decision, PassKey, Schedule, candidates_for, format_times
from .tune import Race, ScheduledCall
from .workspace import workspace_of

MAX_SHAPES = 16  # races on a communicator of one pass with one weight, each with another number of rows
MAX_PASSES = 1024  # kept for a communicator, and for a layer
FILE_VERSION = 2


class _Passes:
    """The decisions and races of one communicator, and which of them concern a layer."""

    def __init__(self) -> None:
        self.entries: dict[PassKey, Decision | Race] = {}
        self.shapes: Counter[PassKey] = Counter()  # number of races, by key without rows
        self.keys: weakref.WeakKeyDictionary[Any, dict[PassKey, None]] = weakref.WeakKeyDictionary()  # by owner

    def get(self, owner: Any, key: PassKey) -> Decision | Race | None:
        """Return None if the owner has not run this pass: the ranks have not compared its arguments."""
        try:
            return self.entries.get(key) if key in self.keys.get(owner, ()) else None
        except TypeError:
            raise TypeError(f"owner is {shown(owner)}, expected the module that makes the call") from None

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
        for key in self.keys.pop(owner, ()):
            self.entries.pop(key, None)
            self.shapes.pop(_without_rows(key), None)


def _without_rows(key: PassKey) -> PassKey:
    return key._replace(m=0)


by_comm: weakref.WeakKeyDictionary[Communicator, _Passes] = weakref.WeakKeyDictionary()
won: dict[str, dict[str, Any]] = {}  # `PassKey.name` -> results of this process's races
from_files: dict[str, dict[str, Any]] = {}  # the same, of `load`


class Route(NamedTuple):
    """How a forward call runs.

    composed      by the operations of unfused.py, since neither pass overlaps
    has_backward  whether the call has a backward pass that communicates"""

    call: ScheduledCall
    composed: bool
    has_backward: bool


def pass_key(
    pattern: str, rows: int, w: Tensor, config: OverlapConfig, reduce_dtype: torch.dtype | None = None
) -> PassKey:
    """rows: of all ranks; w [out, in]: the shard of this rank"""
    same_bits = config.deterministic or torch.are_deterministic_algorithms_enabled()
    return PassKey(pattern, rows, w.shape[0], w.shape[1], w.dtype, config, same_bits, reduce_dtype)


def route_of(comm: Communicator, owner: Any, forward: PassKey | None, backward: PassKey | None) -> Route:
    """Return the route of a forward call. A recomputation in a checkpoint uses the route of its first pass.

    forward    None: the forward pass communicates nothing
    backward   None: there is no backward pass, or it communicates nothing"""

    def backward_is_off() -> bool:
        if backward is None:
            return True
        found = _lookup(comm, owner, backward)
        if not isinstance(found, Decision) or found.method != "off":
            return False
        _notify(owner, found)  # schedule_call will not run for it
        return True

    def first() -> Route:
        call = ScheduledCall(None) if forward is None else schedule_call(comm, owner, forward)
        overlaps = call.decision is not None and call.decision.method != "off"
        return Route(call, not overlaps and backward_is_off(), backward is not None)

    passes = _passes_of(comm)
    keys = [key for key in (forward, backward) if key is not None]
    lasting = all(isinstance(passes.entries.get(key), Decision) for key in keys)
    scope = passes, comm if owner is None else owner
    route, replayed = replay_choice(scope, forward or backward, first, lasting)
    if not replayed:
        return route
    composed = route.composed and (route.has_backward or backward_is_off())
    return Route(ScheduledCall(route.call.decision), composed, route.has_backward)


def schedule_call(comm: Communicator, owner: Any, key: PassKey) -> ScheduledCall:
    """Count this call, and return its schedule, which is the same on all ranks."""
    found = _lookup(comm, owner, key)
    call = ScheduledCall(found) if isinstance(found, Decision) else _next(comm, key, found)
    _notify(owner, call.decision)
    return call


def _next(comm: Communicator, key: PassKey, race: Race) -> ScheduledCall:
    if _captures(comm):
        return ScheduledCall(race.decision)
    before = race.decision
    call = race.next(comm)
    after = race.decision
    if after is not before and after.settled:
        won[key.name(comm)] = {"schedule": after.schedule, "tried": dict(after.tried)}
        if race.closed:
            _passes_of(comm).entries[key] = after
        if after.method == "off":
            workspace_of(comm).drop()  # perhaps only the race needed its buffers
    return call


def _notify(owner: Any, decision: Decision | None) -> None:
    for observer in tuple(observers):
        observer.decided(owner, decision)


def _passes_of(comm: Communicator) -> _Passes:
    found = by_comm.get(comm)
    if found is None:
        found = by_comm[comm] = _Passes()
    return found


def _all_passes() -> list[tuple[Communicator, _Passes]]:
    """Other threads may add communicators meanwhile."""
    comms = [comm for ref in by_comm.keyrefs() if (comm := ref()) is not None]
    return [(comm, by_comm[comm]) for comm in comms]


def _lookup(comm: Communicator, owner: Any, key: PassKey) -> Decision | Race:
    passes, owner = _passes_of(comm), comm if owner is None else owner
    found = passes.get(owner, key)
    if found is not None and not comm.checking:
        return found
    candidates, reason = candidates_for(comm, key)
    if reason in LOCAL_REASONS:
        return key.decision(comm.library.is_host, OFF, reason)  # not stored: the number of such shapes is unbounded
    if _captures(comm):
        if found is not None or len(candidates) == 1:
            return found or key.decision(
                comm.library.is_host, candidates[0], reason
            )  # not stored: ranks did not compare it
        return key.decision(
            comm.library.is_host, OFF, "captured into a CUDA graph before its race; run the model before the capture"
        )
    loaded = _agree(comm, key)
    found = passes.entries.get(key) or _start(comm, passes, key, candidates, reason, loaded)
    return passes.add(owner, key, found)


def _start(
    comm: Communicator,
    passes: _Passes,
    key: PassKey,
    candidates: tuple[Schedule, ...],
    reason: str,
    loaded: dict[str, Any],
) -> Decision | Race:
    if len(candidates) == 1:
        return key.decision(comm.library.is_host, candidates[0], reason)
    for schedule in candidates:
        if str(schedule) == loaded.get("schedule"):
            tried = loaded["tried"]
            return key.decision(comm.library.is_host, schedule, f"loaded; tried: {format_times(tried)}", tried=tried)
    if passes.shapes[_without_rows(key)] >= MAX_SHAPES:
        reason = f"{MAX_SHAPES} numbers of rows were tried before; ad.overlap.retry(layer) forgets them"
        return key.decision(comm.library.is_host, OFF, reason)
    passes.shapes[_without_rows(key)] += 1
    return Race(comm, key, candidates)


def _captures(comm: Communicator) -> bool:
    return not comm.library.is_host and is_capturing(torch.device(comm.device))


# ---------------------------------------------------------------------------------------------- consistency of ranks


def _agree(comm: Communicator, key: PassKey) -> dict[str, Any]:
    """Return the loaded decision if all ranks have loaded the same schedule, else {}.

    Collective, at the first call of a layer with these arguments, and at every call if PYNCCL_CHECK=1. Raises
    NcclInvalidUsage on every rank if the ranks pass different arguments."""
    config = key.config
    loaded = from_files.get(key.name(comm), {})
    sizes = [PATTERNS.index(key.pattern), key.m, key.n, key.k, METHODS.index(config.method)]
    rest = zlib.crc32(repr((str(key.dtype), str(key.reduce_dtype), config, key.same_bits)).encode())
    schedule = zlib.crc32(loaded.get("schedule", "").encode())
    rows = gathered(comm, [*sizes, min(config.chunks or 0, key.m), rest, schedule])
    if any(row[:-1] != rows[0][:-1] for row in rows):
        lines = "\n".join(f"  rank {rank}: {_format_row(*row[:-1])}" for rank, row in enumerate(rows))
        raise NcclInvalidUsage(
            f"the ranks would use different schedules, and hang:\n{lines}\n"
            "  every rank must pass the same sizes, data types and OverlapConfig"
        )
    return loaded if all(row[-1] == schedule for row in rows) else {}


def _format_row(pattern: int, m: int, n: int, k: int, method: int, chunks: int, rest: int) -> str:
    config = f"method={METHODS[method]!r}" + (f", chunks={chunks}" if chunks else "")
    return f"{PATTERNS[pattern]} of m={m}, n={n}, k={k}, OverlapConfig({config}, ..) [all options: {rest:x}]"


# ---------------------------------------------------------------------------------------------- public


def decisions(model: nn.Module | Communicator) -> tuple[Decision, ...]:
    """Return the decisions for the passes of a layer, or of all layers in a model.

    For a communicator, return those of functions called without a layer. During a race, `settled` is False and the
    schedule is the one that leads."""
    return tuple(decision for owner in _owners("decisions", model) for decision in decisions_of(owner))


def decisions_of(owner: Any) -> tuple[Decision, ...]:
    """Return the decisions of `owner` itself, without those of its submodules."""
    found = ((passes, key) for _, passes in _all_passes() for key in passes.keys.get(owner, ()))
    entries = (passes.entries[key] for passes, key in found if key in passes.entries)
    return tuple(entry if isinstance(entry, Decision) else entry.decision for entry in entries)


def retry(model: nn.Module | Communicator) -> None:
    """Start new races in the next calls of a model's layers, or of a communicator's functions. Call it on every rank.

    Layers with the same passes on one communicator share a race, also the new one. Use it after the load of the
    machine, its clocks or a library has changed. It discards earlier decisions, including loaded ones."""
    for owner in _owners("retry", model):
        for comm, passes in _all_passes():
            for key in passes.keys.get(owner, ()):
                from_files.pop(key.name(comm), None)
                won.pop(key.name(comm), None)
            passes.forget(owner)


def _owners(name: str, model: Any) -> Iterable[Any]:
    if isinstance(model, nn.Module):
        return model.modules()
    if isinstance(model, Communicator):
        return (model,)
    raise TypeError(f"overlap.{name}: model is {shown(model)}, expected a torch.nn.Module or a communicator")


def save(path: str | Path) -> None:
    """Write the decisions of this process's races as JSON, for `load`.

    All ranks may write the same file, since the ranks of a communicator make the same decisions."""
    path = Path(path_of(path, "overlap.save: path"))
    text = json.dumps({"version": FILE_VERSION, "decisions": {**from_files, **won}}, indent=1)
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text + "\n")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink()
        raise


def load(path: str | Path) -> None:
    """Read decisions from a file that `save` has written. Call it on every rank, before the first step.

    They apply to passes of the same sizes, data types, options, number of ranks and device that no layer of the
    communicator has run yet. A pass for which the ranks have loaded different schedules is raced for.

    Raises OSError if the file cannot be read, and ValueError if it is not a file of `save`."""
    path = Path(path_of(path, "overlap.load: path"))
    try:
        content = json.loads(path.read_text())
        version = content["version"]
        found = (
            {name: _record(value) for name, value in content["decisions"].items()} if version == FILE_VERSION else {}
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"overlap.load: path {path} is not a file of ad.overlap.save(): {shown(error)}") from None
    if version != FILE_VERSION:
        raise ValueError(
            f"overlap.load: {path} has version {shown(version)}, expected {FILE_VERSION}; run the races again and "
            "save()"
        )
    from_files.update(found)


def _record(decision: Any) -> dict[str, Any]:
    """Check a decision of a file."""
    schedule, tried = decision["schedule"], decision["tried"]
    if not isinstance(schedule, str):
        raise TypeError(f"schedule is {shown(schedule)}, expected a string")
    return {"schedule": schedule, "tried": {str(name): float(seconds) for name, seconds in tried.items()}}
