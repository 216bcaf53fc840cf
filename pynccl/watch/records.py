"""The contents of a process's flight recorder as dataclasses: processes, communicators, calls.

reader.py reads them from the ring file, cross_node.py sends them to other nodes as JSON, verdict.py analyzes them.
Times are seconds since the epoch, by the clock of the process's node; 0.0 means unknown.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from ..bindings.errors import Outcome
from ..bindings.values import shown
from .layout import VERSION, CommEnd, ProcessEnd

# States of a call. INSIDE: its C function is not known to have returned. ISSUED: it has returned, and the call is on a
# stream; or another thread than the program's is inside it. LAUNCHED: it has returned, and nothing tells whether its
# stream has passed it, as that was passed as a number or is closed. COMPLETED: the stream has passed it, which only
# polling detects. FAILED: it raised an exception, or was aborted: see Outcome.
INSIDE, ISSUED, LAUNCHED, COMPLETED, FAILED = "inside", "issued", "launched", "completed", "failed"
NOT_KNOWN = "not known whether it has run"  # of a LAUNCHED call, for messages

_FRESH_SECONDS = 2.0  # a line observed this recently counts as current
_SILENT_SECONDS = 5.0  # a killed process ended at most this long after its last heartbeat

# A call with one of these outcomes had waited for other ranks until then, so it counts as a wait, not as a cause.
WAITED = {Outcome.PEER_LOST, Outcome.TIMED_OUT, Outcome.ABORTED_BY_WATCHDOG, Outcome.MISMATCH}

# States of a process. UNKNOWN: it is on another node or in another container.
RUNNING, STOPPED, DEAD, UNKNOWN = "running", "stopped", "dead", "unknown"


@dataclass
class CallRecord:
    """One call of a communicator.

    entry       its number among all calls of this communicator on this rank, from 1
    number      its number among the collectives, from 1, the same on all ranks if they agree; 0: not a numbered
                collective (send, recv, one-sided, shrink, finalize, ...)
    operation   "all_reduce", "send", "split", "barrier", "init", "group plan", ...
    count       number of elements; -1 without one. dtype: "FLOAT32" or ""; op: "SUM" or ""
    root, peer  ranks in the communicator; -1 without one
    started     when its stream has begun it, if that is known; 0.0: it has not, or that is unknown
    message     the number of a send among those to its peer, or of a recv among those from it, from 1; 0: not one
    group       calls of one rank with the same number were issued as one group; 0: not in a group
    posted      the program went on, and waits for it only at CommRecord.awaited_at. With the host library: calls on
                streams, messages of torch.distributed. Not with CUDA, where the program's waits are unknown
    site        file:line of the call; "" if no user code made it
    function    "AllReduce.backward" if an autograd function made it; forward_site: the line of its forward call
    detail      further arguments: "color=0, key=1" of a split, the calls of a group plan
    code        detail of the outcome: NCCL's result, the rank that was lost, the signal; -1: none
    error       first line of the exception; only of the last one that failed
    """

    entry: int
    number: int
    operation: str
    count: int = -1
    dtype: str = ""
    op: str = ""
    message: int = 0
    root: int = -1
    peer: int = -1
    stream: int = 0
    group: int = 0
    plan: bool = False
    posted: bool = False
    site: str = ""
    function: str = ""
    forward_site: str = ""
    detail: str = ""
    issued: float = 0.0
    started: float = 0.0
    returned: float = 0.0
    completed: float = 0.0
    state: str = COMPLETED
    outcome: Outcome = Outcome.PENDING
    code: int = -1
    error: str = ""

    @property
    def collective(self) -> bool:
        return self.number > 0

    @property
    def may_wait(self) -> bool:
        """Whether it is not known to have completed or failed. A LAUNCHED message counts as completed."""
        return self.state in (INSIDE, ISSUED) or (self.state == LAUNCHED and self.collective)

    @property
    def gave_up(self) -> bool:
        """Whether it waited for other ranks until it failed because of them."""
        return self.outcome in WAITED

    @property
    def is_cause(self) -> bool:
        """Whether it failed by itself: neither because of other ranks, nor since the program ended the communicator."""
        return self.state == FAILED and not self.gave_up and self.outcome != Outcome.ABORTED_BY_PROGRAM


@dataclass
class CommRecord:
    """One communicator as one rank has it.

    uid      the same on all its ranks, on every node, except those that joined by grow()
    name     for messages: CommConfig.comm_name, else its origin: "init", "split of init, color 0"
    entered  number of the last collective it entered; completed: of the last collective that completed
    calls    the last ones, oldest first
    cut      whether the newest messages to and from some peers are omitted
    waits_at when its streams were last observed waiting for calls issued earlier
    awaited_at  since when the program waits for its posted calls; 0.0: it does not
    ranks    global rank of each of its ranks; []: unknown
    excluded the ranks that its last shrink excludes, as this rank called it
    ended    how; LIVE is false. ended_site, ended_at: where, when
    """

    uid: str
    name: str
    rank: int
    size: int
    device: str = ""
    made_at: str = ""
    made: float = 0.0
    parent: str = ""
    entered: int = 0
    completed: int = 0
    cut: bool = False
    waits_at: float = 0.0
    awaited_at: float = 0.0
    ranks: list[int] = field(default_factory=list)
    excluded: list[int] = field(default_factory=list)
    calls: list[CallRecord] = field(default_factory=list)
    ended: CommEnd = CommEnd.LIVE
    ended_site: str = ""
    ended_at: float = 0.0

    def last(self) -> CallRecord | None:
        """Return the newest call."""
        return self.calls[-1] if self.calls else None


@dataclass
class ProcessRecord:
    """One process.

    host       host name; machine: an id that is unique to the node (and container)
    rank       RANK of the launch, -1 without one
    born       when the process started; started: when its record did; 0.0: unknown
    now        when the record was read; heartbeat: when its watchdog last wrote to the file
    where      "data.py:41 next_batch": the innermost line of user code in its main thread, at where_at
    stack      of the main thread, or of the thread inside a call: one line per frame, outermost first; "" if unknown
    state      RUNNING, STOPPED (SIGSTOP, or a debugger), DEAD, UNKNOWN
    ending     how it ended. outcome: of the call whose error ended it; code: its detail, the exit code, or the signal
    end        the same for people: "ValueError: no such file", "exit"; end_site: the user's line of the exception;
               end_at: when
    """

    pid: int
    host: str
    machine: str = ""
    job: str = ""
    rank: int = -1
    path: str = ""
    command: str = ""
    born: float = 0.0
    started: float = 0.0
    now: float = 0.0
    heartbeat: float = 0.0
    where: str = ""
    where_at: float = 0.0
    stack: str = ""
    state: str = RUNNING
    ending: ProcessEnd = ProcessEnd.RUNNING
    outcome: Outcome = Outcome.PENDING
    code: int = -1
    end: str = ""
    end_site: str = ""
    end_at: float = 0.0
    comms: list[CommRecord] = field(default_factory=list)

    def of(self, uid: str) -> list[CommRecord]:
        """Return its communicators with this uid: several if threads of one process are ranks."""
        return [comm for comm in self.comms if comm.uid == uid]

    def uids(self) -> set[str]:
        """Return the uids of its communicators."""
        return {comm.uid for comm in self.comms}

    def newest_call(self) -> CallRecord | None:
        """Return the call that it issued last, on any communicator."""
        last = [call for comm in self.comms if (call := comm.last()) is not None]
        return max(last, key=lambda call: call.issued, default=None)

    def last_place(self) -> str:
        """Return its newest known line: of its main thread, or of its newest call if that is more recent."""
        newest = self.newest_call()
        old = not self.where or 0 < self.where_at < (newest.issued if newest else 0.0)
        return newest.site if newest and newest.site and old else self.where

    @property
    def seen_ago(self) -> float:
        """Seconds since the line of its main thread was observed; 0.0 if that was just now."""
        age = self.now - self.where_at if self.where_at > 0 else 0.0
        return age if age > _FRESH_SECONDS else 0.0

    # How it ended

    @property
    def exited_cleanly(self) -> bool:
        return self.ending == ProcessEnd.CLEAN

    @property
    def killed(self) -> bool:
        """Whether it ended silently, or by a signal: it did not end itself."""
        return self.state == DEAD and self.ending in (ProcessEnd.RUNNING, ProcessEnd.KILLED, ProcessEnd.INTERRUPTED)

    @property
    def gave_up(self) -> bool:
        """Whether it ended because a call failed due to other ranks: it was waiting there until then."""
        return self.state == DEAD and self.ending == ProcessEnd.CALL_FAILED and self.outcome in WAITED

    @property
    def estimated_end(self) -> float:
        """Estimated time of its end, to order the ends on one node."""
        return self.end_at or (self.heartbeat + _SILENT_SECONDS if self.heartbeat else self.now)


# JSON


def to_json(record: ProcessRecord) -> dict[str, Any]:
    """Return plain values for json.dumps, without fields that have their default."""
    comms = [{**_changed(comm), "calls": [_changed(call) for call in comm.calls]} for comm in record.comms]
    return {"format": VERSION, **_changed(record), "comms": comms}


def _changed(record: Any) -> dict[str, Any]:
    fields = ((attr, getattr(record, attr.name)) for attr in dataclasses.fields(record))
    return {
        attr.name: value.name if isinstance(value, IntEnum) else value
        for attr, value in fields
        if value != attr.default
    }


def from_json(values: Any) -> ProcessRecord:
    """Return the record that `to_json` converted. Anything else raises ValueError, which names the field."""
    if isinstance(values, dict):
        values = dict(values)
        if (found := values.pop("format", "none")) != VERSION:
            expected = f"and this pynccl reads {VERSION}; use the pynccl of the job"
            raise ValueError(f"process: format {shown(found)}, {expected}")
    record: ProcessRecord = _checked(ProcessRecord, values, "process")
    for i, comm in enumerate(record.comms):
        if not 0 <= comm.rank < comm.size:
            raise ValueError(f"process.comms[{i}]: rank {comm.rank:,} of {comm.size:,}")
    return record


def _checked(kind: Any, value: Any, where: str) -> Any:
    """Return a value from JSON as the annotation `kind` of its field says. ValueError if it is something else."""
    if kind in (ProcessRecord, CommRecord, CallRecord):
        hints = _hints(kind)
        if not isinstance(value, dict):
            raise ValueError(f"{where} is {shown(value)}, expected an object")
        if unknown := sorted(value.keys() - hints.keys()):
            raise ValueError(f"{where} has the fields {unknown[:3]}: not a record of this pynccl version")
        try:
            return kind(**{name: _checked(hints[name], each, f"{where}.{name}") for name, each in value.items()})
        except TypeError as error:  # a field is left out
            raise ValueError(f"{where}: {error}") from None
    if typing.get_origin(kind) is list and isinstance(value, list):
        (of,) = typing.get_args(kind)
        return [_checked(of, each, f"{where}[{i}]") for i, each in enumerate(value)]
    if isinstance(kind, type) and issubclass(kind, IntEnum) and isinstance(value, str) and value in kind.__members__:
        return kind[value]
    if kind in _LARGEST and type(value) in (int, kind) and abs(value) <= _LARGEST[kind]:
        return kind(value)
    if kind in (str, bool) and type(value) is kind:
        return value
    raise ValueError(f"{where} is {shown(value)}, expected {getattr(kind, '__name__', kind)}")


_LARGEST = {int: (1 << 64) - 1, float: 1e11}  # a stream's handle; a time
_hints = functools.cache(typing.get_type_hints)
