"""The file of a flight recorder -> a ProcessRecord. Whoever wrote it may have been killed at any moment, may still be
writing, or may be an enemy: nothing in it is trusted, nothing is run, and what makes no sense is a `BadRecord`.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
import time
from collections.abc import Iterable, Iterator
from typing import Any

from ..bindings.abi import DataType, RedOp
from . import folder, layout
from .records import COMPLETED, DEAD, FAILED, INSIDE, ISSUED, RUNNING, STOPPED, UNKNOWN, CallRecord, CommRecord
from .records import ProcessRecord as Process

_MOST_BYTES = 1 << 31
_MOST_FILES = 20_000
_MOST_SECONDS = 1e11
_SLACK_SECONDS = 120.0  # memory that is written to reaches the times of its file late
_ANSWER_SECONDS = 1.0  # in which a process says where its threads are; its watchdog looks twice a second
_PAUSE = 0.02
_FIRST = struct.Struct("=Q")


class BadRecord(ValueError):
    """A file that is no flight recorder's, or was cut short, or damaged; says which, and how."""


def read_folder(path: str, *, uid: str = "", since: float = 0.0, calls: bool = True) -> tuple[list[Process], list[str]]:
    """The records of all files in this folder, and in the folders of jobs in it; and the problems met.

    uid    only those of processes that are or were in this communicator, or in another one with such a process, which
           it may wait for
    calls  with the calls of each, which are nearly all of it
    since  when that was made: what was left before is not looked into"""
    records, problems = [], []
    paths = [path] if not os.path.isdir(path) else sorted(_paths(path, since))
    related = _related(paths[:_MOST_FILES], uid) if uid else set(paths)
    for one in paths[:_MOST_FILES]:
        try:
            if one in related:
                records.append(read_file(one, calls))
        except BadRecord as error:
            problems.append(str(error))
        except FileNotFoundError:
            continue  # its process has ended well meanwhile
        except OSError as error:
            problems.append(f"{one}: {error.strerror or error}")
    if len(paths) > _MOST_FILES:
        problems.append(f"{path}: {len(paths)} files, of which the first {_MOST_FILES} were read")
    return records, problems


def _paths(path: str, since: float = 0.0) -> Iterator[str]:
    for job in (path, *folder.jobs(path)):
        for one in folder.files(job):
            with contextlib.suppress(OSError):
                if os.stat(one).st_mtime > since - _SLACK_SECONDS or folder.alive(one):
                    yield one


_of_the_dead: dict[str, set[str]] = {}  # what is in a file that nobody writes any more


def _related(paths: list[str], uid: str) -> set[str]:
    """The files with this communicator, or with another one of theirs; and what cannot be looked into, to be told."""
    inside = {path: _uids_in(path, uid) for path in paths}
    wanted, found = {uid}, set[str]()
    while more := {path for path, known in inside.items() if path not in found and known & wanted}:
        found |= more
        wanted |= {one for path in more for one in inside[path]}
    return found


def _uids_in(path: str, uid: str) -> set[str]:
    known = _of_the_dead.get(path)
    if known is None:
        try:
            known = uids(path)
        except (OSError, BadRecord):
            return {uid}  # read_file says what is wrong with it
        if not folder.alive(path):
            _of_the_dead[path] = known
    return known


def uids(path: str) -> set[str]:
    """The names of the communicators in the file: a quick look at the heads of its regions."""
    with _Bytes(path) as data:
        return {data.text(at, what) for at in data.regions() for what in ("uid", "alias")} - {""}


def ranks(path: str, uid: str, since: float = 0.0) -> set[int]:
    """Which ranks of the communicator have their records in this folder, or in the folders of jobs in it."""
    found: set[int] = set()
    for one in list(_paths(path, since))[:_MOST_FILES]:
        with contextlib.suppress(OSError, BadRecord), _Bytes(one) as data:
            found |= {data.rank(at) for at in data.regions() if uid in (data.text(at, "uid"), data.text(at, "alias"))}
    return found


def read_file(path: str, calls: bool = True) -> Process:
    """What the file says. BadRecord if it is none; OSError if it cannot be opened."""
    with _Bytes(path) as data:
        return data.process(calls)


def ask(processes: Iterable[Process]) -> bool:
    """Have those that run on this machine write down where their threads are, and wait for it; at most a second.
    Whether any did: then their files are to be read anew."""
    begun = time.monotonic()
    asked = [one.path for one in processes if _can_answer(one) and _ask(one.path, begun)]
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


def _ask(path: str, begun: float) -> bool:
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return os.pwrite(file, layout.ASKED.pack(begun), layout.ASKED_AT) == layout.ASKED.size
        finally:
            os.close(file)
    return False


def _has_answered(path: str, begun: float) -> bool:
    with contextlib.suppress(OSError, BadRecord), _Bytes(path) as data:
        _, where_at, _ = layout.LOOK.unpack_from(data.head, layout.LOOK_AT)
        return bool(where_at >= begun)
    return True  # it has gone meanwhile


class _Bytes:
    """A file that is looked at with care. It is read, never mapped: a file that shrinks would kill the reader."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            self._check()
        except BaseException:
            os.close(self.file)
            raise

    def __enter__(self) -> _Bytes:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.file)

    def bad(self, why: str) -> BadRecord:
        return BadRecord(f"{self.path}: {why}")

    def _check(self) -> None:
        found = os.fstat(self.file)
        if not stat.S_ISREG(found.st_mode):
            raise self.bad("no regular file")
        if found.st_size > _MOST_BYTES:
            raise self.bad(f"{found.st_size:,} bytes, which is more than a flight recorder writes")
        self.nbytes = found.st_size
        if self.nbytes < layout.REGIONS_AT:
            raise self.bad(f"no flight recorder of pynccl, or cut short: {self.nbytes:,} bytes")
        self.head = self.at(0, layout.HEADER_BYTES)
        self._strings = b""  # read when the first one is asked for
        magic, version, order = layout.FIXED.unpack_from(self.head)
        if magic.rstrip(b"\0") != layout.MAGIC.rstrip(b"\0"):
            raise self.bad("no flight recorder of pynccl, or one that is only being made")
        if order != layout.ORDER:
            raise self.bad("written on a machine of the other byte order; read it there")
        if version != layout.VERSION:
            raise self.bad(f"version {version} of the format, this pynccl reads version {layout.VERSION}")
        self.identity = layout.IDENTITY.unpack_from(self.head, layout.IDENTITY_AT)
        slots, strings = self.identity[6:]
        self.calls = slots - layout.MARGIN
        if not (self.calls > 0 and slots <= 1 << 16):
            raise self.bad(f"damaged: {slots} slots")
        if strings != layout.STRINGS:
            raise self.bad(f"damaged: {strings} strings")
        self.region = layout.region(self.calls)
        self.wall = self.identity[4] - self.identity[5]  # of the clock since then, unless it was set

    def at(self, where: int, nbytes: int) -> bytes:
        data = os.pread(self.file, nbytes, where)
        if len(data) != nbytes:
            raise self.bad(f"cut short: {where + len(data):,} bytes")
        return data

    def regions(self) -> Iterator[int]:
        """Where the regions begin."""
        _, _, count = layout.LOOK.unpack_from(self.head, layout.LOOK_AT)
        room = (self.nbytes - layout.REGIONS_AT) // self.region.nbytes
        for number in range(min(count, room, layout.MOST_REGIONS)):
            yield layout.REGIONS_AT + number * self.region.nbytes

    def text(self, region: int, what: str) -> str:
        where, nbytes = layout.COMM_TEXTS[what]
        return layout.get(self.at(region + where, nbytes), 0, nbytes)

    def rank(self, region: int) -> int:
        """Of a communicator that is there, or has ended; -1: neither."""
        kind, rank, size, check, _ = layout.COMM.unpack(self.at(region, layout.COMM.size))
        return rank if kind in (layout.LIVE, layout.ENDED) and check == size + 1 else -1

    def seconds(self, clock: float) -> float:
        """Of the machine's clock since the epoch; 0.0 for 0, and for nonsense."""
        found = clock + self.wall if 0 < clock < _MOST_SECONDS else 0.0
        return found if 0 < found < _MOST_SECONDS else 0.0

    def string(self, number: int) -> str:
        if not 0 < number < layout.STRINGS:
            return ""
        text = layout.get(self._strings, number * layout.STRING_BYTES, layout.STRING_BYTES)
        if not text:  # not read so far, or written since
            self._strings = self.at(layout.HEADER_BYTES, layout.STRINGS * layout.STRING_BYTES)
            text = layout.get(self._strings, number * layout.STRING_BYTES, layout.STRING_BYTES)
        return text

    def process(self, calls: bool) -> Process:
        pid, start, rank, _, wall, *_ = self.identity
        seen, where_at, _ = layout.LOOK.unpack_from(self.head, layout.LOOK_AT)
        ended, kind = layout.END.unpack_from(self.head, layout.END_AT)
        (born,) = layout.BORN.unpack_from(self.head, layout.BORN_AT)
        texts = {name: layout.get(self.head, *place) for name, place in layout.TEXTS.items()}
        end = layout.get(self.head, layout.END_TEXT_AT, layout.END_TEXT_BYTES)
        record = Process(
            pid=pid,
            host=texts["host"],
            machine=texts["machine"],
            job=texts["job"],
            command=texts["command"],
            rank=rank,
            path=self.path,
            born=born if 0 < born < _MOST_SECONDS else 0.0,
            started=wall if 0 < wall < _MOST_SECONDS else 0.0,
            now=time.time(),
            heartbeat=self.seconds(seen),
            where=layout.get(self.head, layout.WHERE_AT, layout.WHERE_BYTES),
            where_at=self.seconds(where_at),
            stack=layout.get(self.head, layout.STACK_AT, layout.STACK_BYTES, lines=True),
            end=end or ("exit" if ended and kind == layout.CLEAN else ""),
            end_site=layout.get(self.head, layout.END_SITE_AT, layout.END_SITE_BYTES),
            end_at=self.seconds(ended),
        )
        here = texts["machine"] == folder.machine()
        # What has said that it ends counts as gone, though it may still be closing what it has open.
        record.state = DEAD if ended else state_of(pid, start) if here else UNKNOWN
        if here:
            record.now = self.seconds(time.monotonic())  # by the clock of the file, also if the other was set
        record.comms = [comm for at in self.regions() if (comm := self.comm(at, calls)) is not None]
        return record

    def comm(self, at: int, calls: bool) -> CommRecord | None:
        """The communicator of the region there; None where there is none."""
        nbytes = self.region.nbytes if calls else layout.REGION_HEAD
        before, data = self.at(at, nbytes), self.at(at, nbytes)
        kind, rank, size, check, made = layout.COMM.unpack_from(data)
        if kind not in (layout.LIVE, layout.ENDED) or check != size + 1:
            return None  # free, or only being made
        if not 0 <= rank < size:
            raise self.bad(f"damaged: rank {rank} of {size}")
        texts = {what: layout.get(data, *place) for what, place in layout.COMM_TEXTS.items()}
        (ended_at,) = layout.COMM_END.unpack_from(data, layout.COMM_END_AT)
        comm = CommRecord(
            uid=texts["uid"],
            name=texts["name"],
            rank=rank,
            size=size,
            device=texts["device"],
            made_at=texts["made_at"],
            made=self.seconds(made),
            parent=texts["parent"],
            aliases=(texts["alias"],) if texts["alias"] else (),
            waits_at=self.seconds(layout.WAITS.unpack_from(data, layout.WAITS_AT)[0]),
            ended=texts["ended"] if kind == layout.ENDED else "",
            ended_site=texts["ended_site"],
            ended_at=self.seconds(ended_at),
        )
        if calls:
            self._calls(before, data, comm, texts["error"])
        comm.entered = max((call.number for call in comm.calls), default=0)
        done = [call.number for call in comm.calls if call.state == COMPLETED]
        comm.completed = max(done, default=0)
        return comm

    def _calls(self, before: bytes, data: bytes, comm: CommRecord, error: str) -> None:
        """Fill in the calls of the ring, oldest first, that two copies have alike."""
        completed, completed_at = layout.COMPLETED.unpack_from(data, layout.COMPLETED_AT)
        places = [self.region.at(entry) for entry in range(1, self.region.slots + 1)]
        entries = sorted((entry, at) for at in places if (entry := _entry(data, at)) and entry == _entry(before, at))
        for entry, at in entries[-self.calls :]:
            call = self._call(data, at)
            if call.state != FAILED and call.returned:
                synchronous = not call.stream and comm.device == "cpu"
                call.state = COMPLETED if synchronous or entry <= completed else ISSUED
                if call.state == COMPLETED:
                    call.completed = call.returned if synchronous else self.seconds(completed_at)
            comm.calls.append(call)
        self._settle(comm.calls, error)

    def _settle(self, calls: list[CallRecord], error: str) -> None:
        """What later calls say of those before them: they have returned, unless they were issued together."""
        newest = calls[-1] if calls else None
        for call in calls[:-1]:
            if newest is not None and call.state == INSIDE and not (call.group and call.group == newest.group):
                call.state = ISSUED
        failed = [call for call in calls if call.state == FAILED]
        if failed and error:
            failed[-1].error = error

    def _call(self, data: bytes, at: int) -> CallRecord:
        """What the slot there says."""
        entry, issued, returned, number, stream, group, *texts, flags, count, dtype, first, second, _ = (
            layout.SLOT.unpack_from(data, at)
        )
        operation, site, detail, function, forward = map(self.string, texts)
        _, names = layout.ARGUMENTS.get(operation, (0, ("peer",) if operation in layout.SIGNALS else ()))
        rest = dict(zip(names, (first, second), strict=False))
        op = rest.get("op", -1)
        return CallRecord(
            entry=entry,
            number=number,
            operation=operation or "call",
            count=count if count < 1 << 63 else -1,
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
            issued=self.seconds(issued),
            returned=self.seconds(returned),
            state=FAILED if flags & layout.FAILED else INSIDE,
            error="it raised" if flags & layout.FAILED else "",
        )


def _entry(data: bytes, at: int) -> int:
    """Of the call in the slot there; 0: none is, or it is being written."""
    first: int = _FIRST.unpack_from(data, at)[0]
    return first if _FIRST.unpack_from(data, at + layout.SLOT_BYTES - _FIRST.size)[0] == first else 0


def state_of(pid: int, start: int) -> str:
    """What the process with this number, started at that tick, is doing on this machine."""
    try:
        words = folder.words_of(pid)
    except OSError:  # no descriptor is left here, which says nothing of that process
        return UNKNOWN
    if not words or int(words[19]) != start or words[0] in (b"Z", b"X"):
        return DEAD
    return STOPPED if words[0] in (b"T", b"t") else RUNNING


def _name(kind: Any, value: int) -> str:
    return str(kind(value).name) if value in kind._value2member_map_ else ""
