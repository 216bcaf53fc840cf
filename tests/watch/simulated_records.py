"""The flight records of a simulated job: made by hand, or written by real recorders and read from their files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from simulator import BY_ALL, MESSAGES, SIGNALS, Call, Job, Membership
from watched import NOW

from pynccl import NcclTimeout
from pynccl.bindings import errors
from pynccl.bindings.abi import DataType, RedOp
from pynccl.bindings.errors import Outcome
from pynccl.watch import folder, reader, recorder, track
from pynccl.watch.layout import CommEnd, ProcessEnd
from pynccl.watch.recorder import Ending
from pynccl.watch.records import (
    COMPLETED,
    DEAD,
    FAILED,
    INSIDE,
    ISSUED,
    RUNNING,
    STOPPED,
    CallRecord,
    CommRecord,
    ProcessRecord,
)

_STATES = {"running": RUNNING, "stopped": STOPPED, "dead": DEAD}
HANDLES = 1000  # stream of a route: the handle that its messages are posted on


def hand_made(job: Job) -> list[ProcessRecord]:
    """Return the records of all ranks."""
    return [_process(job, rank) for rank in range(job.size) if job.ranks[rank].recorded]


def _process(job: Job, rank: int) -> ProcessRecord:
    known = job.ranks[rank]
    comms = [_comm(job, name, rank, own) for (name, owner), own in job.members.items() if owner == rank]
    comms.sort(key=lambda comm: comm.made)
    return ProcessRecord(
        1000 + rank,
        "a",
        "m",
        rank=rank,
        comms=comms,
        state=_STATES[known.state],
        started=NOW - 900,
        now=NOW,
        heartbeat=known.heartbeat,
        where=known.where or "/job/train.py:1 step",
        ending=ProcessEnd[known.ending or "RUNNING"],
        outcome=Outcome[known.outcome or "PENDING"],
        code=known.code,
        end=known.end,
        end_at=known.end_at,
        end_site="/job/train.py:99" if known.ending in ("EXCEPTION", "CALL_FAILED") else "",
    )


def _comm(job: Job, name: str, rank: int, own: Membership) -> CommRecord:
    comm = job.comms[name]
    calls = [_call(job, call, own) for call in own.calls]
    for call in [call for call in calls if call.state == FAILED][:-1]:
        call.error = ""  # a record has only the last one
    return CommRecord(
        f"u-{name}",
        name,
        comm.ranks.index(rank),
        len(comm.ranks),
        device="cuda:0" if job.cuda and not comm.route else "cpu",
        made=own.made,
        parent=f"u-{comm.parent}" if comm.parent else "",
        entered=max((call.number for call in calls), default=0),
        completed=max((call.number for call in calls if call.state == COMPLETED), default=0),
        waits_at=own.waits_at,
        awaited_at=own.awaited_at,
        ranks=list(comm.ranks) if comm.listed else [],
        excluded=list(own.excluded),
        calls=calls,
        ended=CommEnd[own.ended or "LIVE"],
        ended_at=own.ended_at,
        ended_site="/job/train.py:98" if own.ended in ("DESTROYED", "ABORTED") else "",
    )


def _call(job: Job, call: Call, own: Membership) -> CallRecord:
    """Return the record of a call, whose state is as a reader derives it from times, streams and marks."""
    op, newest = call.op, own.calls[-1]
    route = job.comms[op.comm].route
    on_host = not job.cuda or route
    posted = route or (on_host and bool(call.stream))
    synchronous = route or (on_host and not call.stream)
    if call.outcome:
        state = FAILED
    elif call.returned:
        state = COMPLETED if synchronous or call.entry <= own.completed else ISSUED
    elif route or (call is not newest and not (call.group and call.group == newest.group)):
        state = ISSUED
    else:
        state = INSIDE
    return CallRecord(
        entry=call.entry,
        number=call.number,
        operation=op.operation,
        count=op.count,
        dtype=op.dtype,
        op=op.op,
        root=op.root,
        peer=op.peer,
        message=call.message,
        stream=HANDLES + call.stream if call.stream else 0,
        group=call.group,
        posted=posted,
        site=f"/job/train.py:{op.line}",
        issued=call.issued,
        returned=call.returned,
        completed=0.0 if state != COMPLETED else call.returned if synchronous else NOW - 300.0,
        state=state,
        outcome=Outcome[call.outcome or "PENDING"],
        code=call.code,
        error=call.error,
    )


# Through real recorders


class Clock:
    """The clock of the recorders of a simulated job."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def through_files(job: Job, path: Path, patch: pytest.MonkeyPatch) -> list[ProcessRecord]:
    """Write the records of all ranks by real recorders into this folder, and read them."""
    clock = Clock()
    patch.setenv("PYNCCL_WATCH_DIR", str(path))
    for module in (recorder, track):
        patch.setattr(module, "now", clock)
    patch.setattr(reader, "time", SimpleNamespace(monotonic=lambda: NOW, time=time.time))
    patch.setattr(folder, "state_of", lambda pid, start: _STATES[job.ranks[pid - 1000].state])
    found = []
    for rank in range(job.size):
        if not job.ranks[rank].recorded:
            continue
        patch.setenv("RANK", str(rank))
        clock.now = NOW - 900
        own = recorder.Recorder()
        patch.setattr(recorder, "_recorder", own)
        _write(job, rank, own, clock)
        found.append(reader.read_file(own.path))
        folder.remove(own.path)
    return found


Event = tuple[float, int, Callable[[], object]]  # when, a tie-breaker, what


def _write(job: Job, rank: int, own: recorder.Recorder, clock: Clock) -> None:
    """Let a recorder write what a rank did."""
    process, head = job.ranks[rank], own.head
    head.pid, head.wall, head.clock = 1000 + rank, NOW - 900, NOW - 900
    events: list[Event] = []
    for name, owner in job.members:
        if owner == rank:
            events += _Writer(job, name, rank, own).events()
    events.append((NOW - 0.5, 0, lambda: own.write_where(process.where or "/job/train.py:1 step", "")))
    if process.end:
        ending = Ending(
            ProcessEnd[process.ending],
            process.end,
            "/job/train.py:99" if process.ending in ("EXCEPTION", "CALL_FAILED") else "",
            Outcome[process.outcome or "PENDING"],
            process.code,
        )
        events.append((process.end_at, 4000, lambda: own.end(ending)))
    for when, _, what in sorted(events, key=lambda event: event[:2]):
        clock.now = when
        what()
    head.heartbeat, head.where_at = process.heartbeat, 0.0


class _Writer:
    """Writes what a rank did with one communicator."""

    def __init__(self, job: Job, name: str, rank: int, own: recorder.Recorder) -> None:
        self.comm, self.member, self.own = job.comms[name], job.members[name, rank], own
        self.on_host, self.rank = not job.cuda or self.comm.route, self.comm.ranks.index(rank)
        self.track: Any = None
        self.aborted = False

    def events(self) -> Iterator[Event]:
        """Yield what it did, and when."""
        member = self.member
        yield member.made, -1, self.make
        for call in member.calls:
            yield call.issued, call.entry, partial(self.enter, call)
            if call.outcome and call.done:  # it was aborted, as it was not known that it had completed
                yield call.done, 1000, partial(self.leave, call)
            if call.outcome:
                yield call.returned, 2000, partial(self.fail, call)
            elif call.returned:
                yield call.returned, 1000, partial(self.leave, call)
        yield NOW - 300.0, 0, self.observe
        if member.ended:
            site = "/job/train.py:98" if member.ended in ("DESTROYED", "ABORTED") else ""
            yield member.ended_at, 3000, lambda: self.track.end(CommEnd[member.ended], site)

    def make(self) -> None:
        comm = self.comm
        identity = track.Identity(f"u-{comm.name}", comm.name, f"u-{comm.parent}" if comm.parent else "")
        ranks = comm.ranks if comm.listed else ()
        self.track = track.Track(self.own, identity, self.rank, len(comm.ranks), ranks)
        self.track.write("device", "cpu" if self.on_host else "cuda:0")
        self.track.library = SimpleNamespace(is_host=True) if self.on_host else None
        if comm.route:
            self.track.posts_on = HANDLES + next((call.stream for call in self.member.calls), 0)

    def enter(self, call: Call) -> None:
        op = call.op
        if op.operation == "shrink":
            self.track.exclude(op.excluded)
        weight = {"init": 1, "split": 1, "barrier": 1, **dict.fromkeys(BY_ALL, 0)}.get(op.operation, -1)
        stream = HANDLES + call.stream if call.stream and not self.comm.route else 0
        site = f"/job/train.py:{op.line}"
        self.track.enter(op.operation, _arguments(call), stream, group=call.group, site=site, weight=weight)

    def leave(self, call: Call) -> None:
        self.track.leave(call.entry)
        if call.op.operation == "init":
            self.track.unnumbered(call.entry)

    def fail(self, call: Call) -> None:
        if call.outcome == "ABORTED_BY_WATCHDOG":
            if not self.aborted:  # it aborts all calls at once
                self.aborted, self.track.comm_head.completed = True, self.member.completed
                self.track.aborted_by_watchdog(NcclTimeout("aborted by the watchdog"))
        else:
            self.track.failed(call.entry, _error_of(call))

    def observe(self) -> None:
        self.track.completed(self.member.completed)
        self.track.mark_awaited(self.member.awaited_at)
        self.track.comm_head.waits_at = self.member.waits_at


def _arguments(call: Call) -> tuple[object, ...]:
    """Return the arguments of the C function of a call."""
    op = call.op
    if op.operation in SIGNALS:
        return (op.peer,) if op.operation == "signal" else (1, [SimpleNamespace(peer=op.peer, opCnt=1)])
    if op.count < 0:
        return ()
    last = [RedOp[op.op]] if op.op else []
    last += [op.root] if op.root >= 0 else []
    buffers: list[object] = [0] if op.operation in MESSAGES else [0, 0]
    return (*buffers, op.count, DataType[op.dtype], *last, *([op.peer] if op.peer >= 0 else []))


def _error_of(call: Call) -> BaseException:
    """Return the exception that a call has raised."""
    name, _, text = call.error.partition(": ")
    kind = getattr(errors, name, None) or {"RuntimeError": RuntimeError, "KeyboardInterrupt": KeyboardInterrupt}[name]
    error: Any = kind(text)
    if isinstance(error, errors.NcclError) and call.outcome == "PEER_LOST":
        error._peer = call.code
    raised: BaseException = errors.with_outcome(error, Outcome.MISMATCH) if call.outcome == "MISMATCH" else error
    return raised
