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
from .trials import (
    LOCAL_REASONS,
    OFF,
    PATTERNS,
    Decision,
    PassKey,
    Schedule,
    ScheduledCall,
    Trial,
    candidates_for,
    format_times,
)
from .workspace import workspace_of

MAX_SHAPES = 16  # trials per pass of a layer
MAX_PASSES = 1024  # entries of one `_Passes`
FILE_VERSION = 2


class _Passes:
    """The decisions and trials of one layer, or of functions called without a layer, on one communicator."""

    def __init__(self) -> None:
        self.entries: dict[PassKey, Decision | Trial] = {}
        self.shapes: Counter[str] = Counter()  # pattern -> number of trials

    def add(self, key: PassKey, found: Decision | Trial) -> Decision | Trial:
        if len(self.entries) >= MAX_PASSES:
            self.forget()
        self.entries[key] = found
        return found

    def forget(self) -> None:
        self.entries.clear()
        self.shapes.clear()


_passes: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Communicator, _Passes]] = weakref.WeakKeyDictionary()
_decided: dict[str, dict[str, Any]] = {}  # `PassKey.name` -> results of this process's trials
_loaded: dict[str, dict[str, Any]] = {}  # the same, from files


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
    passes = _passes_of(comm, owner)

    def backward_is_off() -> bool:
        if backward is None:
            return True
        found = _lookup(comm, passes, backward)
        if not isinstance(found, Decision) or found.method != "off":
            return False
        _notify(owner, found)  # schedule_call will not run for it
        return True

    def first() -> Route:
        call = ScheduledCall(None) if forward is None else schedule_call(comm, owner, forward)
        overlaps = call.decision is not None and call.decision.method != "off"
        return Route(call, not overlaps and backward_is_off(), backward is not None)

    keys = [key for key in (forward, backward) if key is not None]
    lasting = not any(isinstance(passes.entries.get(key), Trial | None) for key in keys)
    route, replayed = replay_choice(passes, forward or backward, first, lasting)
    if not replayed:
        return route
    composed = route.composed and (route.has_backward or backward_is_off())
    return Route(ScheduledCall(route.call.decision), composed, route.has_backward)


def schedule_call(comm: Communicator, owner: Any, key: PassKey) -> ScheduledCall:
    """Count this call, and return its schedule, which is the same on all ranks."""
    passes = _passes_of(comm, owner)
    found = _lookup(comm, passes, key)
    if isinstance(found, Trial) and found.calls == found.total:
        found = passes.entries[key] = found.settle(comm)
        _decided[key.name(comm)] = {"schedule": found.schedule, "tried": dict(found.tried)}
        if found.method == "off":
            workspace_of(comm).drop()  # only the trial may have needed its buffers
    call = ScheduledCall(found) if isinstance(found, Decision) else found.next(comm)
    _notify(owner, call.decision)
    return call


def _notify(owner: Any, decision: Decision | None) -> None:
    for observer in tuple(observers):
        observer.decided(owner, decision)


def _passes_of(comm: Communicator, owner: Any) -> _Passes:
    module = comm if owner is None else owner
    try:
        by_comm = _passes.get(module)
    except TypeError:
        raise TypeError(f"owner is {shown(owner)}, expected the module that makes the call") from None
    if by_comm is None:
        by_comm = _passes[module] = weakref.WeakKeyDictionary()
    passes = by_comm.get(comm)
    if passes is None:
        passes = by_comm[comm] = _Passes()
    return passes


def _lookup(comm: Communicator, passes: _Passes, key: PassKey) -> Decision | Trial:
    found = passes.entries.get(key)
    if found is not None and not comm.checking and (isinstance(found, Decision) or not _captures(comm)):
        return found
    candidates, reason = candidates_for(comm, key)
    if reason in LOCAL_REASONS:
        return key.decision(comm, OFF, reason)  # not stored: the number of such shapes is unbounded
    if _captures(comm):
        if isinstance(found, Decision) or len(candidates) == 1:
            return found or key.decision(comm, candidates[0], reason)  # not stored: ranks did not compare it
        return key.decision(comm, OFF, "captured into a CUDA graph before a trial; run 25 steps before the capture")
    loaded = _agree(comm, key)
    return found or passes.add(key, _start(comm, passes, key, candidates, reason, loaded))


def _start(
    comm: Communicator,
    passes: _Passes,
    key: PassKey,
    candidates: tuple[Schedule, ...],
    reason: str,
    loaded: dict[str, Any],
) -> Decision | Trial:
    if len(candidates) == 1:
        return key.decision(comm, candidates[0], reason)
    for schedule in candidates:
        if str(schedule) == loaded.get("schedule"):
            tried = loaded["tried"]
            return key.decision(comm, schedule, f"loaded; tried: {format_times(tried)}", tried=tried)
    if passes.shapes[key.pattern] >= MAX_SHAPES:
        reason = f"{MAX_SHAPES} shapes of this pass were tried before; ad.overlap.retry(layer) forgets them"
        return key.decision(comm, OFF, reason)
    passes.shapes[key.pattern] += 1
    return Trial(comm, key, candidates)


def _captures(comm: Communicator) -> bool:
    return not comm.library.is_host and is_capturing(torch.device(comm.device))


# ---------------------------------------------------------------------------------------------- consistency of ranks


def _agree(comm: Communicator, key: PassKey) -> dict[str, Any]:
    """Return the loaded decision if all ranks have loaded the same schedule, else {}.

    Collective, at the first call of a layer with these arguments, and at every call if PYNCCL_CHECK=1. Raises
    NcclInvalidUsage on every rank if the ranks pass different arguments."""
    config = key.config
    loaded = _loaded.get(key.name(comm), {})
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

    For a communicator, return those of functions called without a layer. A pass that is still on trial has `settled`
    False and the schedule of its last call."""
    return tuple(decision for owner in _owners("decisions", model) for decision in decisions_of(owner))


def decisions_of(owner: Any) -> tuple[Decision, ...]:
    """Return the decisions of `owner` itself, without those of its submodules."""
    entries = (entry for passes in _passes.get(owner, {}).values() for entry in passes.entries.values())
    return tuple(entry if isinstance(entry, Decision) else entry.current for entry in entries)


def retry(model: nn.Module | Communicator) -> None:
    """Start new trials in the next calls of a model's layers, or of a communicator's functions. Call it on every rank.

    Use it after the load of the machine, its clocks or a library has changed. It discards the decisions of earlier
    trials, including loaded ones."""
    for owner in _owners("retry", model):
        for comm, passes in _passes.get(owner, {}).items():
            for key in passes.entries:
                _loaded.pop(key.name(comm), None)
            passes.forget()


def _owners(name: str, model: Any) -> Iterable[Any]:
    if isinstance(model, nn.Module):
        return model.modules()
    if isinstance(model, Communicator):
        return (model,)
    raise TypeError(f"overlap.{name}: model is {shown(model)}, expected a torch.nn.Module or a communicator")


def save(path: str | Path) -> None:
    """Write the decisions of this process's trials as JSON, for `load`.

    All ranks may write the same file, since the ranks of a communicator make the same decisions."""
    path = Path(path_of(path, "overlap.save: path"))
    text = json.dumps({"version": FILE_VERSION, "decisions": {**_loaded, **_decided}}, indent=1)
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

    They apply to passes of the same sizes, data types, options, number of ranks and device that a layer has not run
    yet. A pass for which the ranks have loaded different schedules is tried.

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
            f"overlap.load: {path} has version {shown(version)}, expected {FILE_VERSION}; run the trials again and "
            "save()"
        )
    _loaded.update(found)


def _record(decision: Any) -> dict[str, Any]:
    """Check a decision of a file."""
    schedule, tried = decision["schedule"], decision["tried"]
    if not isinstance(schedule, str):
        raise TypeError(f"schedule is {shown(schedule)}, expected a string")
    return {"schedule": schedule, "tried": {str(name): float(seconds) for name, seconds in tried.items()}}
