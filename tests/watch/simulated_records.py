"""The flight records of a simulated job: made by hand, or written by real recorders and read from their files."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from simulator import BY_ALL, Call, Job, Membership
from watched import NOW

from pynccl.bindings.abi import DataType, RedOp
from pynccl.watch import layout, reader, recorder, track
from pynccl.watch.records import COMPLETED, DEAD, FAILED, INSIDE, ISSUED, RUNNING, STOPPED
from pynccl.watch.records import CallRecord, CommRecord, ProcessRecord

_STATES = {"running": RUNNING, "stopped": STOPPED, "dead": DEAD}
_ENDED = {
    "DESTROYED": "destroyed",
    "ABORTED": "aborted",
    "ABORTED_BY_WATCHDOG": "aborted",
    "AT_EXIT": "aborted at exit",
    "": "",
}
HANDLES = 1000  # stream of a route: the handle that its messages are posted on


@dataclasses.dataclass
class Observed:
    """What the watchdog of a rank knows about one communicator.

    completed  the newest call known to have completed on its stream; waits_at, awaited_at: see CommRecord"""

    completed: int
    waits_at: float = 0.0
    awaited_at: float = 0.0


def observe(job: Job) -> dict[tuple[str, int], Observed]:
    """Return what the watchdogs have observed. A mark on the streams passes only as a whole, so some calls before one
    that hangs may not be known to have completed."""
    found = {}
    rng = random.Random(job.size)
    for (name, rank), own in job.members.items():
        pending = [call.entry for call in own.calls if not call.done and call.stream]
        prefix = min([call.entry for call in own.calls if not call.done], default=len(own.calls) + 1) - 1
        seen = Observed(prefix if not pending or rng.random() < 0.5 else rng.randint(0, prefix))
        streams = {call.stream for call in own.calls if not call.done and call.stream}
        if pending and not job.comms[name].route:
            seen.waits_at = NOW - 1.0 if job.ranks[rank].state != "dead" else job.ranks[rank].heartbeat
        if not job.cuda or job.comms[name].route:
            waits = [thread for thread in job.threads if thread.rank == rank and thread.waits and thread.in_wait]
            waits = [thread for thread in waits if streams & {call.stream for call in thread.blocked}]
            seen.awaited_at = min((thread.since for thread in waits), default=0.0)
        found[name, rank] = seen
    return found


def hand_made(job: Job) -> list[ProcessRecord]:
    """Return the records of all ranks."""
    observed = observe(job)
    return [_process(job, rank, observed) for rank in range(job.size) if job.ranks[rank].recorded]


def _process(job: Job, rank: int, observed: dict[tuple[str, int], Observed]) -> ProcessRecord:
    known = job.ranks[rank]
    comms = [
        _comm(job, name, rank, own, observed[name, rank]) for (name, owner), own in job.members.items() if owner == rank
    ]
    comms.sort(key=lambda comm: comm.made)
    record = ProcessRecord(
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
        end=known.end,
        end_at=known.end_at,
        end_site="/job/train.py:99" if known.ending in ("EXCEPTION", "CALL_FAILED") else "",
    )
    _set(record, ending=("ProcessEnd", known.ending or "RUNNING"))
    if hasattr(record, "failed_in") and known.failed_in[0]:
        setattr(record, "failed_in", (f"u-{known.failed_in[0]}", known.failed_in[1]))
    return record


def _set(record: Any, **values: tuple[str, str]) -> None:
    """Set fields whose values are enums of the layout, in versions that have them."""
    for name, (kind, member) in values.items():
        if hasattr(record, name) and hasattr(layout, kind):
            setattr(record, name, getattr(layout, kind)[member])


def _comm(job: Job, name: str, rank: int, own: Membership, seen: Observed) -> CommRecord:
    comm = job.comms[name]
    calls = [_call(job, call, own, seen) for call in own.calls]
    record = CommRecord(
        f"u-{name}",
        name,
        comm.ranks.index(rank),
        len(comm.ranks),
        device="cuda:0" if job.cuda and not comm.route else "cpu",
        made=own.made,
        parent=f"u-{comm.parent}" if comm.parent else "",
        entered=max((call.number for call in calls), default=0),
        completed=max((call.number for call in calls if call.state == COMPLETED), default=0),
        waits_at=seen.waits_at,
        awaited_at=seen.awaited_at,
        ranks=list(comm.ranks) if comm.listed else [],
        excluded=list(own.excluded),
        calls=calls,
        ended_at=own.ended_at,
        ended_site="/job/train.py:98" if own.ended in ("DESTROYED", "ABORTED") else "",
    )
    current: Any = record
    current.ended = _ENDED[own.ended]
    if hasattr(layout, "CommEnd"):
        current.ended = layout.CommEnd[own.ended or "LIVE"]
    return record


def _call(job: Job, call: Call, own: Membership, seen: Observed) -> CallRecord:
    """Return the record of a call, whose state is as a reader derives it from times, streams and marks."""
    op, newest = call.op, own.calls[-1]
    route = job.comms[op.comm].route
    on_host = not job.cuda or route
    posted = route or (on_host and bool(call.stream))
    returned = call.returned
    synchronous = route or (on_host and not call.stream)
    if call.outcome:
        state = FAILED
    elif returned:
        state = COMPLETED if synchronous or call.entry <= seen.completed else ISSUED
    elif route or (call is not newest and not (call.group and call.group == newest.group)):
        state = ISSUED
    else:
        state = INSIDE
    record = CallRecord(
        call.entry,
        call.number,
        op.operation,
        op.count,
        op.dtype,
        op.op,
        op.root,
        op.peer,
        stream=HANDLES + call.stream if call.stream else 0,
        group=call.group,
        posted=posted,
        site=f"/job/train.py:{op.line}",
        issued=call.issued,
        returned=returned,
        state=state,
        error=call.error,
    )
    if state == COMPLETED:
        record.completed = returned if synchronous else NOW - 300.0
    if call.outcome:
        _set(record, outcome=("Outcome", call.outcome))
    for name, value in {"result": call.result, "lost": call.lost}.items():
        if hasattr(record, name) and call.outcome:
            setattr(record, name, value)
    return record
