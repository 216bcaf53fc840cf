"""How each call of a layer goes, alike on all ranks: what is remembered of its passes; saved, loaded, tried again."""

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
from pynccl.bindings.values import shown
from pynccl.comm.observers import observers

from ..agreement import gathered
from ..recompute import as_in_first_pass
from ..streams import is_capturing
from .config import METHODS, OverlapConfig
from .trials import ALONE, OFF, PATTERNS, Asked, Decision, Trial, Turn, Way, in_words, ways_of
from .workspace import workspace_of

MOST_SHAPES = 16  # of a pass of a layer that are tried
MOST_KEPT = 1024  # shapes that are remembered at once
FILE_VERSION = 1


class _Passes:
    """What is known of a layer's passes over a communicator, or of its functions that no layer called."""

    def __init__(self) -> None:
        self.known: dict[Asked, Decision | Trial] = {}
        self.shapes: Counter[str] = Counter()  # that were tried, of each pattern

    def add(self, asked: Asked, found: Decision | Trial) -> Decision | Trial:
        if len(self.known) >= MOST_KEPT:
            self.forget()
        self.known[asked] = found
        return found

    def forget(self) -> None:
        self.known.clear()
        self.shapes.clear()


_passes: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Communicator, _Passes]] = weakref.WeakKeyDictionary()
_found: dict[str, dict[str, Any]] = {}  # what this process has decided, by `Asked.name`
_loaded: dict[str, dict[str, Any]] = {}  # what files say


class Route(NamedTuple):
    """How a forward call goes. composed: by the operations of unfused.py, since nothing of it overlaps

    graded  whether it was asked for a backward pass, too"""

    turn: Turn
    composed: bool
    graded: bool


def asked_for(
    pattern: str, rows: int, w: Tensor, config: OverlapConfig, reduce_dtype: torch.dtype | None = None
) -> Asked:
    """rows: of all ranks; w [out, in] of this one."""
    same_bits = config.deterministic or torch.are_deterministic_algorithms_enabled()
    return Asked(pattern, rows, w.shape[0], w.shape[1], w.dtype, config, same_bits, reduce_dtype)


def route_of(comm: Communicator, owner: Any, forward: Asked | None, backward: Asked | None) -> Route:
    """Of a forward call; what a checkpoint computes anew goes as it went at first.

    forward    None: it communicates nothing
    backward   None: there will be none, or none that communicates"""
    home = _home(comm, owner)

    def backward_is_off() -> bool:
        if backward is None:
            return True
        found = _known(comm, home, backward)
        if not isinstance(found, Decision) or found.method != "off":
            return False
        _tell(owner, found)  # nobody will ask for its turn
        return True

    def first() -> Route:
        turn = Turn(None) if forward is None else turn_of(comm, owner, forward)
        overlaps = turn.decision is not None and turn.decision.method != "off"
        return Route(turn, not overlaps and backward_is_off(), backward is not None)

    lasting = not any(isinstance(home.known.get(one), Trial | None) for one in (forward, backward) if one is not None)
    route, anew = as_in_first_pass(home, forward or backward, first, lasting)
    if not anew:
        return route
    return Route(Turn(route.turn.decision), route.composed and (route.graded or backward_is_off()), route.graded)


def turn_of(comm: Communicator, owner: Any, asked: Asked) -> Turn:
    """The way of this call, which is counted; the same on all ranks."""
    home = _home(comm, owner)
    found = _known(comm, home, asked)
    if isinstance(found, Trial) and found.calls == found.last:
        found = home.known[asked] = found.settle(comm)
        _found[asked.name(comm)] = {"way": found.way, "tried": dict(found.tried)}
        if found.method == "off":
            workspace_of(comm).drop()  # which may have grown in the trial alone
    turn = Turn(found) if isinstance(found, Decision) else found.next(comm)
    _tell(owner, turn.decision)
    return turn


def _tell(owner: Any, decision: Decision | None) -> None:
    for observer in tuple(observers):
        observer.decided(owner, decision)


def _home(comm: Communicator, owner: Any) -> _Passes:
    key = comm if owner is None else owner
    try:
        homes = _passes.get(key)
    except TypeError:
        raise TypeError(f"owner is {shown(owner)}, expected the module for which is decided") from None
    if homes is None:
        homes = _passes[key] = weakref.WeakKeyDictionary()
    home = homes.get(comm)
    if home is None:
        home = homes[comm] = _Passes()
    return home


def _known(comm: Communicator, home: _Passes, asked: Asked) -> Decision | Trial:
    found = home.known.get(asked)
    if found is not None and not comm.checking and (isinstance(found, Decision) or not _captures(comm)):
        return found
    ways, reason = ways_of(comm, asked)
    if reason in ALONE:
        return asked.decision(comm, OFF, reason)  # not kept: there is no end of such shapes
    if _captures(comm):
        if isinstance(found, Decision) or len(ways) == 1:
            return found or asked.decision(comm, ways[0], reason)  # not kept: it was compared with nobody's
        return asked.decision(comm, OFF, "captured into a CUDA graph before it was tried; run 25 steps before that")
    loaded = _agreed(comm, asked)
    return found or home.add(asked, _begun(comm, home, asked, ways, reason, loaded))


def _begun(
    comm: Communicator, home: _Passes, asked: Asked, ways: tuple[Way, ...], reason: str, loaded: dict[str, Any]
) -> Decision | Trial:
    if len(ways) == 1:
        return asked.decision(comm, ways[0], reason)
    for way in ways:
        if str(way) == loaded.get("way"):
            tried = loaded["tried"]
            return asked.decision(comm, way, f"loaded; tried: {in_words(tried)}", tried=tried)
    if home.shapes[asked.pattern] >= MOST_SHAPES:
        reason = f"{MOST_SHAPES} shapes of this pass were tried before; ad.overlap.retry(layer) forgets them"
        return asked.decision(comm, OFF, reason)
    home.shapes[asked.pattern] += 1
    return Trial(comm, asked, ways)


def _captures(comm: Communicator) -> bool:
    return not comm.library.is_host and is_capturing(torch.device(comm.device))


# ---------------------------------------------------------------------------------------------- what ranks compare


def _agreed(comm: Communicator, asked: Asked) -> dict[str, Any]:
    """What files say, where the way is the same on all ranks; else nothing. A collective, at the first call of a layer
    with these arguments, and with PYNCCL_CHECK=1 at every one: NcclInvalidUsage on every rank unless all pass the
    same."""
    config = asked.config
    loaded = _loaded.get(asked.name(comm), {})
    said = [PATTERNS.index(asked.pattern), asked.m, asked.n, asked.k, METHODS.index(config.method)]
    rest = zlib.crc32(repr((str(asked.dtype), str(asked.reduce_dtype), config, asked.same_bits)).encode())
    way = zlib.crc32(loaded.get("way", "").encode())
    rows = gathered(comm, [*said, min(config.chunks or 0, asked.m), rest, way])
    if any(row[:-1] != rows[0][:-1] for row in rows):
        lines = "\n".join(f"  rank {rank}: {_row_in_words(*row[:-1])}" for rank, row in enumerate(rows))
        raise NcclInvalidUsage(
            f"the ranks would not overlap alike, and would wait for each other:\n{lines}\n"
            "  every rank must pass the same sizes, types and OverlapConfig"
        )
    return loaded if all(row[-1] == way for row in rows) else {}


def _row_in_words(pattern: int, m: int, n: int, k: int, method: int, chunks: int, rest: int) -> str:
    config = f"method={METHODS[method]!r}" + (f", chunks={chunks}" if chunks else "")
    return (
        f"{PATTERNS[pattern]} of m={m}, n={n}, k={k}, by OverlapConfig({config}, ..) [type and all options: {rest:x}]"
    )


# ---------------------------------------------------------------------------------------------- for the user


def decisions(model: nn.Module | Communicator) -> tuple[Decision, ...]:
    """What was decided for the passes of a layer, or of all layers in a model; of a communicator, for those of its
    functions that no layer has called. What is still on trial has `settled` False, and the way of its last call."""
    every = (one for owner in _owners("decisions", model) for one in decisions_of(owner))
    return tuple(every)


def decisions_of(owner: Any) -> tuple[Decision, ...]:
    """Of itself, not of modules in it."""
    known = (one for home in _passes.get(owner, {}).values() for one in home.known.values())
    return tuple(one if isinstance(one, Decision) else one.shown for one in known)


def retry(model: nn.Module | Communicator) -> None:
    """Try the ways anew, in the next calls of a model's layers; of a communicator, of the functions. On every rank.

    For another machine load, clock or library: what was tried, also what was loaded, is forgotten."""
    for owner in _owners("retry", model):
        for comm, home in _passes.get(owner, {}).items():
            for asked in home.known:
                _loaded.pop(asked.name(comm), None)
            home.forget()


def _owners(name: str, model: Any) -> Iterable[Any]:
    if isinstance(model, nn.Module):
        return model.modules()
    if isinstance(model, Communicator):
        return (model,)
    raise TypeError(f"{name}: model is {shown(model)}, expected a torch.nn.Module, or a communicator")


def save(path: str | Path) -> None:
    """Write what the trials of this process have decided, as JSON, for `load`. Every rank may write the same file: the
    ranks of a communicator decide the same."""
    path = Path(path)
    text = json.dumps({"version": FILE_VERSION, "decisions": {**_loaded, **_found}}, indent=1)
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    number = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        with os.fdopen(number, "w") as file:
            file.write(text + "\n")
        os.replace(part, path)
    except BaseException:
        part.unlink()
        raise


def load(path: str | Path) -> None:
    """Take decisions from a file of `save`, for passes of the same sizes, types, options, number of ranks and device
    that a layer has not begun. On every rank, before the first step; where not all have loaded the same, a pass is
    tried.

    OSError where it cannot be read, ValueError where it is no such file."""
    try:
        said = json.loads(Path(path).read_text())
        version = said["version"]
        found = {name: _record(one) for name, one in said["decisions"].items()} if version == FILE_VERSION else {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"load: {path} is no file that ad.overlap.save() has written: {shown(error)}") from None
    if version != FILE_VERSION:
        raise ValueError(
            f"load: {path} is of version {shown(version)}, expected {FILE_VERSION}; try anew, and save that"
        )
    _loaded.update(found)


def _record(one: Any) -> dict[str, Any]:
    """A decision of a file."""
    way, tried = one["way"], one["tried"]
    if not isinstance(way, str):
        raise TypeError(f"a way is {shown(way)}")
    return {"way": way, "tried": {str(name): float(seconds) for name, seconds in tried.items()}}
