"""The contents of a process's flight recorder as dataclasses: processes, communicators, calls.

reader.py reads them from the ring file, cross_node.py sends them to other nodes as JSON, verdict.py analyzes them.
Times are seconds since the epoch, by the clock of the process's node; 0.0 means unknown.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

# States of a call. INSIDE: its C function is not known to have returned. ISSUED: it has returned, and the call is on a
# stream; or another thread than the program's is inside it. LAUNCHED: it has returned, and nothing tells whether its
# stream has passed it, as that was passed as a number or is closed. COMPLETED: the stream has passed it, which only
# polling detects. FAILED: it raised an exception.
INSIDE, ISSUED, LAUNCHED, COMPLETED, FAILED = "inside", "issued", "launched", "completed", "failed"
NOT_KNOWN = "not known whether it has run"  # of a LAUNCHED call, for messages

_FRESH_SECONDS = 2.0  # a line observed this recently counts as current
_SILENT_SECONDS = 5.0  # a killed process ended at most this long after its last heartbeat

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
    group       calls of one rank with the same number were issued as one group; 0: not in a group
    posted      the program went on, and waits for it only at CommRecord.awaited_at. With the host library: calls on
                streams, messages of torch.distributed. Not with CUDA, where the program's waits are unknown
    site        file:line of the call; "" if no user code made it
    function    "AllReduce.backward" if an autograd function made it; forward_site: the line of its forward call
    detail      further arguments: "color=0, key=1" of a split, the calls of a group plan
    """

    entry: int
    number: int
    operation: str
    count: int = -1
    dtype: str = ""
    op: str = ""
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
    returned: float = 0.0
    completed: float = 0.0
    state: str = COMPLETED
    error: str = ""  # first line of the exception

    @property
    def collective(self) -> bool:
        return self.number > 0

    @property
    def may_wait(self) -> bool:
        """Whether it is not known to have completed or failed. A LAUNCHED message counts as completed."""
        return self.state in (INSIDE, ISSUED) or (self.state == LAUNCHED and self.collective)

    @property
    def gave_up(self) -> bool:
        """Whether it raised because of other ranks: then it counts as a wait, not as a cause."""
        return self.state == FAILED and _blames_others(self.error)


@dataclass
class CommRecord:
    """One communicator as one rank has it.

    uid      the same on all its ranks, on every node, except those that joined by grow()
    name     for messages: CommConfig.comm_name, else its origin: "init", "split of init, color 0"
    entered  number of the last collective it entered; completed: of the last collective that completed
    calls    the last ones, oldest first
    cut      whether the record was truncated so far that omitted calls may matter
    waits_at when its streams were last observed waiting for calls issued earlier
    awaited_at  since when the program waits for its posted calls; 0.0: it does not
    ranks    global rank of each of its ranks; []: unknown
    excluded the ranks that its last shrink excludes, as this rank called it
    ended    "" while alive, else "destroyed", "aborted", "aborted at exit", ...; ended_site, ended_at: where, when
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
    ended: str = ""
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
    end        how it ended, "" while it runs: "ValueError: no such file", "exit", "killed or crashed";
               end_site: the user's line of the exception; end_at: when
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
        return self.end == "exit"

    @property
    def killed(self) -> bool:
        """For a DEAD process: whether it ended silently, or by a signal."""
        return not self.end or self.end.startswith(("killed", "SIG"))

    @property
    def gave_up(self) -> bool:
        """Whether it ended because a call timed out or failed due to other ranks: it was waiting there until then."""
        if self.state != DEAD or self.exited_cleanly or self.killed:
            return False
        failed = [call for comm in self.comms if (call := comm.last()) is not None and call.state == FAILED]
        if self.end.startswith("Nccl") and failed:
            return any(call.gave_up for call in failed)
        return _blames_others(self.end)

    @property
    def estimated_end(self) -> float:
        """Estimated time of its end, to order the ends on one node."""
        return self.end_at or (self.heartbeat + _SILENT_SECONDS if self.heartbeat else self.now)


def _blames_others(error: str) -> bool:
    """Return whether an error says that other ranks are missing, have gone, or made different calls."""
    return any(word in error for word in ("Timeout", "timed out", "RemoteError", "Aborted", "lost rank", "disagree"))


def to_json(record: ProcessRecord) -> dict[str, Any]:
    """Return plain values for json.dumps, without fields that have their default."""
    comms = [{**_changed(comm), "calls": [_changed(call) for call in comm.calls]} for comm in record.comms]
    return {**_changed(record), "comms": comms}


def _changed(record: Any) -> dict[str, Any]:
    fields = ((attr, getattr(record, attr.name)) for attr in dataclasses.fields(record))
    return {attr.name: value for attr, value in fields if value != attr.default}


def from_json(values: Any) -> ProcessRecord:
    """Return the record that `to_json` converted. Anything else, including other versions, raises ValueError."""
    try:
        comms = [
            CommRecord(**{**comm, "calls": [CallRecord(**call) for call in comm["calls"]]}) for comm in values["comms"]
        ]
        return ProcessRecord(**{**values, "comms": comms})
    except (TypeError, KeyError) as error:
        raise ValueError(f"not a process record of this version: {error!r}") from None
