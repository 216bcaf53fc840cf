"""The file of a flight recorder -> a ProcessRecord. Its process may have been killed at any moment, or be writing now.

A file is a recorder's if its length, its magic and its version are right, else it is a `BadRecord`; what its process
was writing this moment is left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Iterable, Iterator
from typing import Any

from ..bindings.abi import DataType, RedOp
from . import folder, layout
from .layout import CommHead, get
from .records import (
    COMPLETED,
    DEAD,
    FAILED,
    INSIDE,
    ISSUED,
    RUNNING,
    UNKNOWN,
    CallRecord,
    CommRecord,
    ProcessRecord as Process,
)

_ANSWER_SECONDS = (
    2.0  # in which a process says where its threads are; its watchdog looks twice a second, if it gets the CPU
)
_PAUSE = 0.02
_READS = 3  # of a ring that is being written


class BadRecord(ValueError):
    """A file that is no flight recorder's, or was cut short, or damaged; says which, and how."""


def read_folder(path: str, *, uid: str = "", calls: bool = True) -> tuple[list[Process], list[str]]:
    """The records of all files in this folder; and the problems met.

    uid    only those of processes that are or were in this communicator, or in another one with such a process, which
           it may wait for
    calls  with the calls of each, which are nearly all of it"""
    records, problems = _read_all(folder.files(path), calls and not uid)
    if uid:
        related = _related(records, uid)
        records = _read_all([one.path for one in related], True)[0] if calls else related
    return records, problems


def _read_all(paths: Iterable[str], calls: bool) -> tuple[list[Process], list[str]]:
    records, problems = [], []
    for one in paths:
        try:
            records.append(read_file(one, calls))
        except BadRecord as error:
            problems.append(str(error))
        except FileNotFoundError:
            continue  # its process has ended well meanwhile
        except OSError as error:
            problems.append(f"{one}: {error.strerror or error}")
    return records, problems


def _related(records: list[Process], uid: str) -> list[Process]:
    """Those with this communicator, or with another one of theirs."""
    inside = [(one, one.uids()) for one in records]
    wanted, size = {uid}, 0
    while len(wanted) > size:
        size = len(wanted)
        wanted = wanted.union(*(known for _, known in inside if known & wanted))
    return [one for one, known in inside if known & wanted]


def ranks(path: str, uid: str) -> set[int]:
    """Which ranks of the communicator have their records in this folder."""
    records, _ = read_folder(path, calls=False)
    return {comm.rank for one in records for comm in one.of(uid)}


def read_file(path: str, calls: bool = True) -> Process:
    """What the file says. BadRecord if it is none; OSError if it cannot be opened."""
    with open(path, "rb", buffering=0) as file:
        return _File(path, file.fileno()).process(calls)


def ask(processes: Iterable[Process]) -> bool:
    """Have those that run on this machine write down where their threads are, and wait for it; at most two seconds.
    Whether any did: then their files are to be read anew."""
    begun = time.monotonic()
    clock = bytes(ctypes.c_double(begun))
    asked = [one.path for one in processes if _can_answer(one) and folder.write_field(one.path, "asked", clock)]
    waiting = asked
    while waiting and time.monotonic() - begun < _ANSWER_SECONDS:
        time.sleep(_PAUSE)
        waiting = [path for path in waiting if not _has_answered(path, begun)]
    return len(waiting) < len(asked)


def _can_answer(one: Process) -> bool:
    """Not a process that is silent, or has just told, after its newest call."""
    if one.state != RUNNING or not one.path or one.pid == os.getpid() or one.now - one.heartbeat > _ANSWER_SECONDS:
        return False
    newest = max((comm.calls[-1].issued for comm in one.comms if comm.calls), default=0.0)
    return one.now - one.where_at > _ANSWER_SECONDS or one.where_at < newest


def _has_answered(path: str, begun: float) -> bool:
    with contextlib.suppress(OSError, BadRecord), open(path, "rb", buffering=0) as file:
        return bool(_File(path, file.fileno()).head.where_at >= begun)
    return True  # it has gone meanwhile


class _File:
    """An open file. It is read, never mapped: a file that shrinks would kill the reader."""

    def __init__(self, path: str, file: int) -> None:
        self.path, self._file = path, file
        self.head = layout.Header.from_buffer_copy(self._read(0, layout.STRINGS_AT))
        if self.head.magic != layout.MAGIC:
            raise BadRecord(f"{path}: no flight recorder of pynccl, or one that is only being made")
        if self.head.version != layout.VERSION:
            raise BadRecord(f"{path}: version {self.head.version} of the format, this pynccl reads {layout.VERSION}")
        self._strings = b""
        self._wall = self.head.wall - self.head.clock  # of the clock since then, unless it was set

    def _read(self, where: int, nbytes: int) -> bytes:
        data = os.pread(self._file, nbytes, where)
        if len(data) != nbytes:
            raise BadRecord(f"{self.path}: no flight recorder of pynccl, or cut short: {where + len(data):,} bytes")
        return data

    def comms(self) -> Iterator[tuple[Any, int]]:
        """The heads of the communicators, and where the slots of each begin."""
        for number in range(self.head.regions):
            at = layout.REGIONS_AT + number * layout.REGION_BYTES
            head = CommHead.from_buffer_copy(self._read(at, layout.REGION_HEAD))
            # Where the rank does not fit, the region is being reused this very moment.
            if head.state in (layout.LIVE, layout.ENDED) and 0 <= head.rank < head.size:
                yield head, at + layout.REGION_HEAD

    def process(self, calls: bool) -> Process:
        head = self.head
        here = get(head.machine) == folder.machine()
        return Process(
            pid=head.pid,
            host=get(head.host),
            machine=get(head.machine),
            job=get(head.job),
            command=get(head.command),
            rank=head.rank,
            path=self.path,
            born=head.born,
            started=head.wall,
            # By the clock of the file, also if the other was set.
            now=self._seconds(time.monotonic()) if here else time.time(),
            heartbeat=self._seconds(head.looked),
            where=get(head.where),
            where_at=self._seconds(head.where_at),
            stack=get(head.stack, lines=True),
            # What has said that it ends counts as gone, though it may still be closing what it has open.
            state=DEAD if head.ended else folder.state_of(head.pid, head.start) if here else UNKNOWN,
            end=get(head.end),
            end_site=get(head.end_site),
            end_at=self._seconds(head.ended),
            comms=[self._comm(comm, at, calls) for comm, at in self.comms()],
        )

    def _seconds(self, clock: float) -> float:
        """Of the machine's clock since the epoch; 0.0 for 0."""
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
            calls=self._calls(head, at) if calls else [],
            ended=get(head.ended) if head.state == layout.ENDED else "",
            ended_site=get(head.ended_site),
            ended_at=self._seconds(head.ended_at),
        )
        comm.entered = max((call.number for call in comm.calls), default=0)
        comm.completed = max((call.number for call in comm.calls if call.state == COMPLETED), default=0)
        return comm

    def _calls(self, head: Any, at: int) -> list[CallRecord]:
        """Those of the ring, oldest first, and how far each has come."""
        for _ in range(_READS):
            data = self._read(at, layout.CALLS * layout.SLOT.size)
            slots = sorted(slot for slot in layout.SLOT.iter_unpack(data) if slot[0] and slot[0] == slot[-1])
            if not slots or slots[-1][0] - slots[0][0] < len(slots):
                break  # else the ring went round meanwhile
        # After the slots: what they refer to was written before them.
        self._strings = self._read(layout.STRINGS_AT, layout.STRINGS * layout.STRING_BYTES)
        calls = [self._call(slot) for slot in slots]
        for call in calls:
            if call.state == FAILED:
                continue
            if call.returned:
                synchronous = not call.stream and get(head.device) == "cpu"
                call.state = COMPLETED if synchronous or call.entry <= head.completed else ISSUED
                if call.state == COMPLETED:
                    call.completed = call.returned if synchronous else self._seconds(head.completed_at)
            elif call is not calls[-1] and not (call.group and call.group == calls[-1].group):
                call.state = ISSUED  # a later call says that it has returned, unless they were issued together
        failed = [call for call in calls if call.state == FAILED]
        if failed and head.error:
            failed[-1].error = get(head.error)
        return calls

    def _call(self, slot: tuple[Any, ...]) -> CallRecord:
        entry, issued, returned, number, stream, group, *texts, flags, count, dtype, first, second, _ = slot
        operation, site, detail, function, forward = map(self._string, texts)
        _, names = layout.ARGUMENTS.get(operation, (0, ("peer",) if operation in layout.SIGNALS else ()))
        rest = dict(zip(names, (first, second), strict=False))
        op = rest.get("op", -1)
        return CallRecord(
            entry=entry,
            number=number,
            operation=operation or "call",
            count=-1 if count == layout.NO_COUNT else count,
            dtype=_name(DataType, dtype),
            op=_name(RedOp, op) or ("PRE_MUL_SUM" if op > 0 else ""),
            root=rest.get("root", -1),
            peer=rest.get("peer", -1),
            stream=stream,
            group=group,
            plan=bool(flags & layout.PLAN),
            site=site,
            function=function,
            forward_site=forward,
            detail=detail,
            issued=self._seconds(issued),
            returned=self._seconds(returned),
            state=FAILED if flags & layout.FAILED else INSIDE,
            error=_ended_by(flags),
        )

    def _string(self, number: int) -> str:
        at = number * layout.STRING_BYTES
        return get(self._strings[at : at + layout.STRING_BYTES])


def _ended_by(flags: int) -> str:
    """Of the last call there is a text; of the others this."""
    if flags & layout.GAVE_UP:
        return "NcclTimeout: its watchdog has ended it"
    return "it raised" if flags & layout.FAILED else ""


def _name(kind: Any, value: int) -> str:
    return str(kind(value).name) if value in kind._value2member_map_ else ""
