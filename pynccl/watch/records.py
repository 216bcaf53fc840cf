"""The contents of a process's flight recorder as dataclasses: processes, communicators, calls.

reader.py reads them from the ring file, cross_node.py sends them to other machines as JSON, verdict.py analyzes them.
Times are seconds since the epoch, by the clock of the process's machine; 0.0 means unknown.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

# How far a call has come. INSIDE: its C function has not returned, as far as is known. ISSUED: it has; the call is on a
# stream, and COMPLETED once the stream has passed it, which is learnt by polls only. FAILED: it has raised.
INSIDE, ISSUED, COMPLETED, FAILED = "inside", "issued", "completed", "failed"

_FRESH_SECONDS = 2.0  # a line that was seen so lately counts as the present one
_SILENT_SECONDS = 5.0  # the end of a process that nobody heard from is later than its last heartbeat, by less than this

# What a process is. UNKNOWN: on another machine, or in another container.
RUNNING, STOPPED, DEAD, UNKNOWN = "running", "stopped", "dead", "unknown"


@dataclass
class CallRecord:
    """One call of a communicator.

    entry       its number among all the calls of this communicator on this rank, from 1
    number      its number among the collective ones, from 1, the same on all ranks that agree; 0: it is none of them
                (send, recv, one-sided, shrink, finalize, ...)
    operation   "all_reduce", "send", "split", "barrier", "init", "group plan", ...
    count       elements; -1 where there is none. dtype: "FLOAT32" or ""; op: "SUM" or ""
    root, peer  ranks of the communicator; -1 where there is none
    group       calls of one rank with the same number here were issued as one group; 0: in none
    site        file:line of the call; "" where no line of the user made it
    function    "AllReduce.backward" where an autograd function made it; forward_site: the line of its forward call
    detail      what else there is to say: "color=0, key=1" of a split, the calls of a group plan
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
    site: str = ""
    function: str = ""
    forward_site: str = ""
    detail: str = ""
    issued: float = 0.0
    returned: float = 0.0
    completed: float = 0.0
    state: str = COMPLETED
    error: str = ""  # what it raised, first line

    @property
    def collective(self) -> bool:
        return self.number > 0

    @property
    def open(self) -> bool:
        """Whether it has not completed, as far as is known."""
        return self.state in (INSIDE, ISSUED)

    @property
    def gave_up(self) -> bool:
        """Whether it has raised because of others: then it is no cause, and was a wait."""
        return self.state == FAILED and _blames_others(self.error)


@dataclass
class CommRecord:
    """One communicator as one rank has it.

    uid      the same on all its ranks, on every machine, but those that joined it by grow()
    name     for messages: CommConfig.comm_name, else what made it: "init", "split of init, color 0"
    entered  number of the last collective call that it has entered; completed: of the last one that has completed
    calls    the last ones, oldest first
    cut      whether so few calls were passed on that earlier ones may matter
    waits_at when its streams were last seen to wait for calls before that
    ended    "" while it lives, else "destroyed", "aborted", "aborted at exit", ...; ended_site, ended_at: where, when
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
    calls: list[CallRecord] = field(default_factory=list)
    ended: str = ""
    ended_site: str = ""
    ended_at: float = 0.0

    def last(self) -> CallRecord | None:
        """The newest call."""
        return self.calls[-1] if self.calls else None


@dataclass
class ProcessRecord:
    """One process.

    host       host name; machine: what tells machines (and containers) apart
    rank       RANK of the launch, -1 without one
    born       when it was started; started: when its record was; 0.0 where that is not known
    now        when this was read; heartbeat: when its watchdog last wrote into the file
    where      "data.py:41 next_batch": the innermost line of the user in its main thread, at where_at
    stack      the main thread, or the thread that is inside a call: one line per frame, outermost first; "" if unknown
    state      RUNNING, STOPPED (SIGSTOP, or a debugger), DEAD, UNKNOWN
    end        how it ended, in words, "" while it runs: "ValueError: no such file", "exit", "killed or crashed";
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
        """Its communicators of this name: several, where threads of one process are ranks."""
        return [comm for comm in self.comms if comm.uid == uid]

    def uids(self) -> set[str]:
        """The names of its communicators."""
        return {comm.uid for comm in self.comms}

    def newest_call(self) -> CallRecord | None:
        """The one that it issued last, on any communicator."""
        last = [call for comm in self.comms if (call := comm.last()) is not None]
        return max(last, key=lambda call: call.issued, default=None)

    def last_place(self) -> str:
        """The newest line that is known of it: of its main thread, or of its newest call, where that came later."""
        newest = self.newest_call()
        old = not self.where or 0 < self.where_at < (newest.issued if newest else 0.0)
        return newest.site if newest and newest.site and old else self.where

    @property
    def seen_ago(self) -> float:
        """How many seconds ago the line of its main thread was seen; 0.0 if that was just now."""
        age = self.now - self.where_at if self.where_at > 0 else 0.0
        return age if age > _FRESH_SECONDS else 0.0

    # How it ended

    @property
    def ended_well(self) -> bool:
        return self.end == "exit"

    @property
    def killed(self) -> bool:
        """Whether, being DEAD, it ended without a word, or by a signal."""
        return not self.end or self.end.startswith(("killed", "SIG"))

    @property
    def gave_up(self) -> bool:
        """Whether it ended because a call did not come about: it had waited there until then."""
        if self.state != DEAD or self.ended_well or self.killed:
            return False
        failed = [call for comm in self.comms if (call := comm.last()) is not None and call.state == FAILED]
        if self.end.startswith("Nccl") and failed:
            return any(call.gave_up for call in failed)
        return _blames_others(self.end)

    @property
    def ended_about(self) -> float:
        """When it ended, to put ends of one machine in order."""
        return self.end_at or (self.heartbeat + _SILENT_SECONDS if self.heartbeat else self.now)


def _blames_others(error: str) -> bool:
    """Whether an error says that others did not come, have gone, or call something else."""
    return any(word in error for word in ("Timeout", "timed out", "RemoteError", "Aborted", "lost rank", "disagree"))


def to_json(record: ProcessRecord) -> dict[str, Any]:
    """As plain values for json.dumps; what has its default is left out."""
    comms = [{**_changed(comm), "calls": [_changed(call) for call in comm.calls]} for comm in record.comms]
    return {**_changed(record), "comms": comms}


def _changed(record: Any) -> dict[str, Any]:
    fields = ((one, getattr(record, one.name)) for one in dataclasses.fields(record))
    return {one.name: value for one, value in fields if value != one.default}


def from_json(values: Any) -> ProcessRecord:
    """The record of what `to_json` gave; ValueError for anything else, also of another version."""
    try:
        comms = [
            CommRecord(**{**comm, "calls": [CallRecord(**call) for call in comm["calls"]]}) for comm in values["comms"]
        ]
        return ProcessRecord(**{**values, "comms": comms})
    except (TypeError, KeyError) as error:
        raise ValueError(f"no record of a process: {error!r}") from None
