"""The last calls of all ranks as a trace for ui.perfetto.dev: a process a rank, a track a communicator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import chrome_trace as chrome
from ...chrome_trace import Event
from ...watch.records import COMPLETED, FAILED, INSIDE, ISSUED, CallRecord, CommRecord, ProcessRecord
from . import clocks
from .table import call_name, rank_of
from .text import cut

Flows = dict[tuple[str, int], list[tuple[float, int, int]]]  # (communicator, number) -> begin, pid, tid of each rank
_OPEN = {INSIDE: " (inside)", ISSUED: " (issued)", FAILED: " (failed)"}


@dataclass
class _Slice:
    """A call with its place in time."""

    call: CallRecord
    begin: float
    end: float


def write(path: str | Path, processes: list[ProcessRecord]) -> None:
    """Write Chrome's trace format."""
    shifts = clocks.offsets(processes)
    chrome.write(path, events(processes, shifts), _metadata(shifts))


def _metadata(shifts: dict[str, float]) -> dict[str, Any]:
    moved = {name: f"{shift:+.6f} s" for name, shift in shifts.items() if shift}
    if len(shifts) < 2:
        said = "all ranks have the clock of one machine"
    elif moved:
        said = (
            "the clocks of machines were aligned by collectives that they did together; accurate to the length of those"
        )
    else:
        said = "the clocks of machines were compared by collectives that they did together, and not moved"
    return {"clocks": said, "moved": moved, "source": "python -m pynccl hang --timeline"}


def events(processes: list[ProcessRecord], shifts: dict[str, float]) -> Iterator[Event]:
    """Metadata, then slices and ends, then the arrows between ranks; times in microseconds from the earliest one."""
    ordered = sorted(processes, key=lambda one: (rank_of(one), one.host, one.pid))
    tracks = [(pid, process, _tracks(process)) for pid, process in enumerate(ordered)]
    begins = [
        one.begin + shifts[clocks.machine_of(process)]
        for _, process, found in tracks
        for _, _, slices in found
        for one in slices
    ]
    ends = [one.end_at + shifts[clocks.machine_of(one)] for one in ordered if one.end_at]
    zero = min([*begins, *ends], default=0.0)
    flows: Flows = {}
    for pid, process, found in tracks:
        offset = shifts[clocks.machine_of(process)] - zero
        yield from _names(pid, process, found)
        for tid, (comm, _, slices) in enumerate(found, 1):
            for one in slices:
                yield _event(pid, tid, comm, one, offset)
                if one.call.collective:
                    flows.setdefault((comm.uid, one.call.number), []).append((one.begin + offset, pid, tid))
        yield from _end(pid, process, offset)
    for number, (key, places) in enumerate(flows.items()):
        yield from chrome.arrows(number, f"#{key[1]}", sorted(places))


def _tracks(process: ProcessRecord) -> list[tuple[CommRecord, int, list[_Slice]]]:
    """(communicator, stream, slices): a communicator whose calls are on several streams has a track for each."""
    found = []
    for comm in process.comms:
        placed = [_placed(call, process.now) for call in comm.calls if call.issued]
        streams = sorted({one.call.stream for one in placed})
        for stream in streams or [0]:
            found.append((comm, stream, _in_turn([one for one in placed if one.call.stream == stream])))
    return found


def _placed(call: CallRecord, now: float) -> _Slice:
    end = now if call.state in (INSIDE, ISSUED) else call.completed or call.returned
    return _Slice(call, call.issued, max(end, call.issued) if end else call.issued)


def _in_turn(slices: list[_Slice]) -> list[_Slice]:
    """What runs on a stream runs one after the other: a call begins, at the earliest, when the one before has ended.

    Those that are open end all at once, now, and so lie within each other."""
    free = 0.0
    for one in slices:
        one.begin = max(one.begin, free)
        one.end = max(one.end, one.begin)
        if one.call.state in (COMPLETED, FAILED):
            free = one.end
    return slices


def _names(pid: int, process: ProcessRecord, tracks: list[tuple[CommRecord, int, list[_Slice]]]) -> Iterator[Event]:
    rank = rank_of(process)
    labels = f"pid {process.pid} on {cut(process.host, 60)}"
    yield from chrome.process(pid, f"rank {rank}" if rank >= 0 else f"pid {process.pid}", labels)
    several = {id(comm): sum(comm is other for other, _, _ in tracks) > 1 for comm, _, _ in tracks}
    for tid, (comm, stream, _) in enumerate(tracks, 1):
        name = cut(comm.name, 60) or "communicator"
        yield from chrome.lane(pid, tid, f"{name}, stream {stream:#x}" if several[id(comm)] else name)
    yield chrome.named("thread_name", pid, 0, name="process")


def _event(pid: int, tid: int, comm: CommRecord, one: _Slice, offset: float) -> Event:
    name, begin = call_name(one.call) + _OPEN.get(one.call.state, ""), one.begin + offset
    return chrome.piece(name, "comm", pid, tid, begin, one.end + offset, _args(comm, one))


def _args(comm: CommRecord, one: _Slice) -> dict[str, Any]:
    call = one.call
    args: dict[str, Any] = {"comm": comm.name, "rank": comm.rank, "entry": call.entry, "state": call.state}
    numbers = {"number": call.number or -1, "count": call.count, "root": call.root, "peer": call.peer}
    args |= {name: value for name, value in numbers.items() if value >= 0}
    names = ("dtype", "op", "site", "function", "forward_site", "detail", "error")
    args |= {name: getattr(call, name) for name in names if getattr(call, name)}
    if call.group:
        args["group"] = call.group
    return args


def _end(pid: int, process: ProcessRecord, offset: float) -> Iterator[Event]:
    if process.end and process.end_at:
        said = {"site": process.end_site}
        yield chrome.moment(f"ended: {cut(process.end, 120)}", "end", pid, 0, process.end_at + offset, said)
