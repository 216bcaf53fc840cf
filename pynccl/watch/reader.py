"""Read the file of a flight recorder into a ProcessRecord. Its process may be writing now, or may have been killed.

A file with a wrong length, magic or version raises `BadRecord`. Slots that are being written are left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Any, TypeVar

from ..bindings.abi import DataType, RedOp
from ..bindings.errors import Outcome
from . import folder, layout
from .layout import CommEnd, CommHead, ProcessEnd, get
from .records import (
    COMPLETED,
    DEAD,
    FAILED,
    INSIDE,
    ISSUED,
    LAUNCHED,
    RUNNING,
    UNKNOWN,
    CallRecord,
    CommRecord,
    ProcessRecord as Process,
)

E = TypeVar("E", bound=IntEnum)
_ANSWER_TIMEOUT = 2.0  # seconds for a process to write its stacks; its watchdog polls twice a second if it gets the CPU
_POLL_SECONDS = 0.02
_MAX_READS = 3  # attempts to read a ring buffer that is being written


class BadRecord(ValueError):
    """A file is not a flight recorder's, or is truncated or damaged; the message names file and problem."""


def read_folder(path: str, *, uid: str = "", calls: bool = True) -> tuple[list[Process], list[str]]:
    """Return the records of all files in this folder, and the problems found.

    uid    only processes that are or were in this communicator, or that are connected to it through other
           communicators, since it may wait for them
    calls  also read the calls, which are nearly all of the data"""
    records, problems = _read_all(folder.files(path), calls and not uid)
    if uid:
        related = _related(records, uid)
        records = _read_all([record.path for record in related], True)[0] if calls else related
    return records, problems


def _read_all(paths: Iterable[str], calls: bool) -> tuple[list[Process], list[str]]:
    records, problems = [], []
    for path in paths:
        try:
            records.append(read_file(path, calls))
        except BadRecord as error:
            problems.append(str(error))
        except FileNotFoundError:
            continue  # its process has exited cleanly meanwhile
        except OSError as error:
            problems.append(f"{path}: {error.strerror or error}")
    return records, problems


def _related(records: list[Process], uid: str) -> list[Process]:
    """Return the processes of this communicator, and those connected to it through other communicators."""
    members = [(record, record.uids()) for record in records]
    reached, size = {uid}, 0
    while len(reached) > size:
        size = len(reached)
        reached = reached.union(*(uids for _, uids in members if uids & reached))
    return [record for record, uids in members if uids & reached]


def read_file(path: str, calls: bool = True) -> Process:
    """Read a file. Raises BadRecord if it is not a flight recorder's, OSError if it cannot be opened."""
    with open(path, "rb", buffering=0) as file:
        return _File(path, file.fileno()).process(calls)


def ask(processes: Iterable[Process]) -> bool:
    """Ask the processes that run on this node to write their stacks, and wait for that, at most two seconds.

    Return whether any did: then read their files again."""
    begun = time.monotonic()
    clock = bytes(ctypes.c_double(begun))
    asked = [
        process.path
        for process in processes
        if _can_answer(process) and folder.write_field(process.path, "stack_requested", clock)
    ]
    waiting = asked
    while waiting and time.monotonic() - begun < _ANSWER_TIMEOUT:
        time.sleep(_POLL_SECONDS)
        waiting = [path for path in waiting if not _has_answered(path, begun)]
    return len(waiting) < len(asked)


def _can_answer(process: Process) -> bool:
    """Return whether to ask a process: not if it is silent or wrote its stack after its newest call."""
    if (
        process.state != RUNNING
        or not process.path
        or process.pid == os.getpid()
        or process.now - process.heartbeat > _ANSWER_TIMEOUT
    ):
        return False
    newest = max((comm.calls[-1].issued for comm in process.comms if comm.calls), default=0.0)
    return process.now - process.where_at > _ANSWER_TIMEOUT or process.where_at < newest


def _has_answered(path: str, begun: float) -> bool:
    with contextlib.suppress(OSError, BadRecord), open(path, "rb", buffering=0) as file:
        return bool(_File(path, file.fileno()).head.where_at >= begun)
    return True  # it has ended meanwhile


class _File:
    """An open file. It is read, not mapped: if a mapped file shrank, access to it would kill the reader."""

    def __init__(self, path: str, file: int) -> None:
        self.path, self._file = path, file
        self.head = layout.Header.from_buffer_copy(self._read(0, layout.STRINGS_AT))
        if self.head.magic != layout.MAGIC:
            raise BadRecord(f"{path}: not a pynccl flight recorder file, or still being created")
        if self.head.version != layout.VERSION:
            found = f"format version {self.head.version}, and this pynccl reads version {layout.VERSION}"
            raise BadRecord(f"{path}: {found}; use the pynccl of the job")
        self._strings = b""
        self._wall = self.head.wall - self.head.clock  # offset from the monotonic to the wall clock

    def _read(self, where: int, nbytes: int) -> bytes:
        data = os.pread(self._file, nbytes, where)
        if len(data) != nbytes:
            raise BadRecord(
                f"{self.path}: not a pynccl flight recorder file, or truncated at {where + len(data):,} bytes"
            )
        return data

    def comms(self) -> Iterator[tuple[Any, int]]:
        """Yield the head of each communicator, and the offset of its slots."""
        for number in range(self.head.regions):
            at = layout.REGIONS_AT + number * layout.REGION_BYTES
            head = CommHead.from_buffer_copy(self._read(at, layout.REGION_HEAD))
            # An inconsistent rank means that the region is being reused right now.
            if head.valid and 0 <= head.rank < head.size:
                yield head, at + layout.REGION_HEAD

    def process(self, calls: bool) -> Process:
        head = self.head
        here = get(head.machine) == folder.machine()
        # A process that has recorded its end counts as dead, although it may still be closing resources.
        state = DEAD if head.ended else folder.state_of(head.pid, head.start) if here else UNKNOWN
        ending = _enum(ProcessEnd, head.ending)
        return Process(
            pid=head.pid,
            host=get(head.host),
            machine=get(head.machine),
            job=get(head.job),
            command=get(head.command),
            rank=head.rank,
            path=self.path,
            born=head.process_started,
            started=head.wall,
            # On the file's clock, even if the wall clock was set since.
            now=self._seconds(time.monotonic()) if here else time.time(),
            heartbeat=self._seconds(head.heartbeat),
            where=get(head.where),
            where_at=self._seconds(head.where_at),
            stack=get(head.stack, lines=True),
            state=state,
            ending=ProcessEnd.KILLED if state == DEAD and not ending else ending,
            outcome=_enum(Outcome, head.outcome),
            code=head.code,
            end=get(head.end),
            end_site=get(head.end_site),
            end_at=self._seconds(head.ended),
            comms=[self._comm(comm, at, calls) for comm, at in self.comms()],
        )

    def _seconds(self, clock: float) -> float:
        """Convert monotonic seconds to seconds since the epoch; 0 to 0.0."""
        return clock + self._wall if clock else 0.0

    def _comm(self, head: Any, at: int, calls: bool) -> CommRecord:
        comm = CommRecord(
            uid=get(head.uid),
            name=get(head.name),
            rank=head.rank,
            size=head.size,
            device=get(head.device),
            made_at=get(head.made_at),
            made=self._seconds(head.made),
            parent=get(head.parent),
            waits_at=self._seconds(head.waits_at),
            awaited_at=self._seconds(head.awaited_at),
            ranks=list(head.ranks[: head.size]) if any(bytes(head.ranks)) else [],
            excluded=[rank for rank, excluded in enumerate(bytes(head.excluded)) if excluded],
            calls=self._calls(head, at) if calls else [],
            ended=_enum(CommEnd, head.ended),
            ended_site=get(head.ended_site),
            ended_at=self._seconds(head.ended_at),
        )
        comm.entered = max((call.number for call in comm.calls), default=0)
        comm.completed = max((call.number for call in comm.calls if call.state == COMPLETED), default=0)
        return comm

    def _calls(self, head: Any, at: int) -> list[CallRecord]:
        """Return the calls in the ring buffer, oldest first, with their states."""
        for _ in range(_MAX_READS):
            data = self._read(at, layout.CALLS * layout.SLOT.size)
            slots = sorted(slot for slot in layout.SLOT.iter_unpack(data) if slot[0] and slot[0] == slot[-1])
            if not slots or slots[-1][0] - slots[0][0] < len(slots):
                break  # else the ring buffer was overwritten meanwhile
        # Read after the slots, because strings are written before the slots that refer to them.
        self._strings = self._read(layout.STRINGS_AT, layout.STRINGS * layout.STRING_BYTES)
        calls = [self._call(slot) for slot in slots]
        on_host = get(head.device) == "cpu"
        for call in calls:
            synchronous = call.posted or (on_host and not call.stream)
            call.posted = call.posted or (on_host and bool(call.stream and call.returned))
            if call.state in (FAILED, LAUNCHED):
                continue
            if call.returned:
                call.state = COMPLETED if synchronous or call.entry <= head.completed else ISSUED
                if call.state == COMPLETED:
                    call.completed = call.returned if synchronous else self._seconds(head.completed_at)
            elif call.posted:
                call.state = ISSUED
            elif call is not calls[-1] and not (call.group and call.group == calls[-1].group):
                call.state = ISSUED  # it has returned, because a later call of another group exists
        failed = [call for call in calls if call.state == FAILED]
        if failed and head.error:
            failed[-1].error = get(head.error)
        return calls

    def _call(self, slot: tuple[Any, ...]) -> CallRecord:
        entry, issued, returned, number, stream, group, *texts, flags, outcome = slot[:13]
        count, dtype, first, second, code = slot[13:18]
        operation, site, detail, function, forward = map(self._string, texts)
        _, names = layout.ARGUMENTS.get(operation, (0, ("peer", "message") if operation in layout.SIGNALS else ()))
        rest = dict(zip(names, (first, second), strict=False))
        op = rest.get("op", -1)
        state = LAUNCHED if returned and flags & layout.UNKNOWN_STREAM else INSIDE
        return CallRecord(
            entry=entry,
            number=number,
            operation=operation or "call",
            count=-1 if count == layout.NO_COUNT else count,
            dtype=_name(DataType, dtype),
            op=_name(RedOp, op) or ("PRE_MUL_SUM" if op > 0 else ""),
            message=rest.get("message", 0),
            root=rest.get("root", -1),
            peer=rest.get("peer", -1),
            stream=stream,
            group=group,
            plan=bool(flags & layout.PLAN),
            posted=bool(flags & layout.POSTED),
            site=site,
            function=function,
            forward_site=forward,
            detail=detail,
            issued=self._seconds(issued),
            returned=self._seconds(returned),
            state=FAILED if outcome else state,
            outcome=_enum(Outcome, outcome),
            code=code,
        )

    def _string(self, number: int) -> str:
        at = number * layout.STRING_BYTES
        return get(self._strings[at : at + layout.STRING_BYTES])


def _name(kind: Any, value: int) -> str:
    return str(kind(value).name) if value in kind._value2member_map_ else ""


def _enum(kind: type[E], value: int) -> E:
    """Return the member of this value; the first one for a value of a damaged file."""
    return kind(value) if value in kind._value2member_map_ else next(iter(kind))
