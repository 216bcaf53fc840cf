"""One case measured: warm up, time, check; torch by turns where it is compared with."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

from ...bindings.errors import NcclError
from ...comm.communicator import Communicator
from ..command import FailedError
from . import beside_torch
from .operations import Buffers, Call, Case, call_of
from .options import AGGREGATES
from .report import Row, Side
from .timing import across, captured, iterations
from .ways import taken

_MOST_TURNS, _LEAST_A_TURN = 8, 5


class UnfitError(FailedError):
    """A rank has not the memory for a size, or cannot register it."""


def measured(comm: Communicator, case: Case, options: argparse.Namespace, one_clock: bool) -> Row:
    """The row of the table, equal on all ranks."""
    buffers = _made(comm, case, options.local_register)
    try:
        return Row(case, [_side(comm, buffers, index, options, one_clock) for index in (0, 1)])
    finally:
        buffers.close()


def _made(comm: Communicator, case: Case, registration: int) -> Buffers:
    """The buffers, registered; an error on all ranks if one of them fails."""
    made: list[Buffers] = []
    _on_all(
        comm,
        f"{case.nbytes} bytes of {case.collective}",
        "has not the memory",
        "pass a smaller -e",
        lambda: made.append(Buffers(case, comm, registration)),
    )
    if registration:
        what = f"-R {registration}, {case.nbytes} bytes of {case.collective}"
        _on_all(comm, what, "failed", "pass -R 0", lambda: made[0].register(comm, registration))
    return made[0]


def _on_all(comm: Communicator, what: str, failed: str, hint: str, step: Callable[[], Any]) -> None:
    """Take a step on all ranks; UnfitError on all of them if it fails on one."""
    why = ""
    try:
        step()
    except (RuntimeError, MemoryError, ValueError, NcclError) as error:
        why = str(error).partition("\n")[0] or "out of memory"
    if across(comm, [float(bool(why))], "max")[0]:
        raise UnfitError(f"{what}: {why or f'another rank {failed}'}; {hint}")


def _side(
    comm: Communicator, buffers: Buffers, index: int, options: argparse.Namespace, one_clock: bool
) -> Side | None:
    place = buffers.places[index]
    if place is None:
        return None
    case, average = buffers.case, AGGREGATES[options.average]
    call = call_of(comm, case, place, options.plan)
    theirs = _torchs(comm, case, place, index == 1) if options.compare else None
    buffers.clear()
    for one in [call, theirs] if theirs else [call]:
        for _ in range(options.warmup_iters):
            one()
    torchs: list[float] = []
    if options.graph:
        times = _replayed(comm, lambda: call_of(comm, case, place, options.plan), options)
    else:
        times, torchs = _by_turns(comm, call, theirs, options.iters, one_clock)
    side = Side(across(comm, times, average), across(comm, [statistics.fmean(times)], average)[0])
    if torchs:
        side.torch = across(comm, [statistics.fmean(torchs)], average)[0]
    if not comm.library.is_host:
        side.way = taken(call, comm.rank == 0)
    if options.check:
        side.wrong = _wrong(comm, buffers, place, call, options.check)
    return side


def _by_turns(
    comm: Communicator, call: Call, theirs: Call | None, count: int, one_clock: bool
) -> tuple[list[float], list[float]]:
    if theirs is None:
        return iterations(comm, call, count, one_clock), []
    turns = max(min(_MOST_TURNS, count // _LEAST_A_TURN), 1)
    ours: list[float] = []
    torchs: list[float] = []
    for turn in range(turns):
        part = count * (turn + 1) // turns - count * turn // turns
        ours += iterations(comm, call, part, one_clock)
        torchs += iterations(comm, theirs, part, one_clock)
    return ours, torchs


def _replayed(comm: Communicator, make: Callable[[], Call], options: argparse.Namespace) -> list[float]:
    graph = captured(comm, make, options.iters)
    times = iterations(comm, graph.replay, options.graph, True)
    graph.reset()
    return [seconds / options.iters for seconds in times]


def _torchs(comm: Communicator, case: Case, place: tuple[Any, Any], in_place: bool) -> Call | None:
    """torch's call, if it can be made on all ranks: its backends know fewer types and operators."""
    call = beside_torch.call_of(case, comm.rank, place, in_place)
    if call is None:
        return None
    try:
        call()
        failed = 0.0
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        failed = 1.0
    return None if across(comm, [failed], "max")[0] else call


def _wrong(comm: Communicator, buffers: Buffers, place: tuple[Any, Any], call: Call, rounds: int) -> int:
    """Elements that are wrong, of all ranks and rounds."""
    found = 0
    for _ in range(rounds):
        buffers.prepare(place)
        comm.barrier()  # what is sent is ready before another rank reads it, and one stream orders what a GPU does
        call()
        found += buffers.wrong(place)
    return round(across(comm, [float(found)], "sum")[0])
