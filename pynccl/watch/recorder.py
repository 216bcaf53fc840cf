"""The flight recorder of this process: its file, with what is true of the whole process. Calls are written by track.py.

The file is mapped into memory, so what was written is there after kill -9, os._exit or a crash. It is made with the
first communicator, and grows with each, its room taken from the file system at once. What cannot be had - room, a
folder, a descriptor - is done without, in memory that nobody else sees, with one warning: it ends no job.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import sys
import threading
import time
import warnings
from typing import Any

from . import folder, layout
from .settings import settings

now = time.monotonic
_FORGOTTEN = 8  # communicators that have ended stay in the file until so many more have
_TOUCH_SECONDS = 10.0


class Strings(dict[str, int]):
    """Text -> its row in the file, written when it is first asked for; that of "(...)" where the table is full."""

    def __init__(self, rows: memoryview) -> None:
        super().__init__({"": 0})
        self.rows = rows
        self._free = itertools.count(1)  # threads that ask at once for one text take a row each, which is harmless

    def __missing__(self, text: str) -> int:
        number, nbytes = min(next(self._free), layout.STRINGS - 1), layout.STRING_BYTES
        full = number == layout.STRINGS - 1
        self.rows[number * nbytes :][:nbytes] = layout.cut("(...)" if full else text, nbytes).ljust(nbytes, b"\0")
        if not full:
            self[text] = number
        return number

    def of_detail(self, text: str) -> int:
        """The row of what may be another text at every call: at most half of the table is theirs."""
        return self[text] if text in self or len(self) < layout.STRINGS // 2 else self["(...)"]


class Recorder:
    """The file of this process.

    path  of the file; "": all is in memory alone
    head  its header
    """

    def __init__(self) -> None:
        self.settings = settings()
        self.tracks: list[Any] = []  # of the communicators that are alive
        self.exchange: Any = None  # the newest one with ranks on other machines: there the end is told, too
        self.sharing = threading.Lock()  # of what all threads share: the exchange, the watchdog
        self.ended = 0  # how, once this process is about to end
        self.beside: list[str] = []  # other files that go when the job has ended well
        self._ended: list[Any] = []  # tracks of communicators that have ended, oldest first
        self._lock = threading.Lock()
        self._warned = False
        self._touched = -_TOUCH_SECONDS
        self.path, self._file, memory = self._open()
        self.head = layout.Header.from_buffer(memory)
        self.strings = Strings(memory[layout.STRINGS_AT : layout.REGIONS_AT])
        self._write_head()

    def _open(self) -> tuple[str, int, memoryview]:
        """Path and descriptor of the file, and its part before the regions; ("", -1, memory) where it cannot be had."""
        where = folder.base()
        try:
            folder.remove_old(where)
            return folder.create(_rank())
        except Exception as error:
            self._do_without(error, where, "this process's calls")
            return "", -1, memoryview(mmap.mmap(-1, layout.REGIONS_AT))

    def _do_without(self, error: Exception, path: str, what: str) -> None:
        """Say so, once, and go on."""
        if self._warned:
            return
        self._warned = True
        path = getattr(error, "filename", None) or path
        text = (
            f"{path}: {getattr(error, 'strerror', None) or error}: the flight recorder goes on in memory alone, so "
            f"`python -m pynccl hang` and the other ranks do not see {what}\n"
            "  make room, set PYNCCL_WATCH_DIR to a private folder that this user may write to, or PYNCCL_WATCH=off"
        )
        try:
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        except RuntimeWarning:  # -W error; but what it warns of must not end the job
            print(f"RuntimeWarning: {text}", file=sys.stderr, flush=True)

    def _write_head(self) -> None:
        head = self.head
        head.pid, head.start, head.rank = os.getpid(), folder.started(), _rank()
        head.wall, head.clock, head.born = time.time(), now(), folder.born()
        head.looked = now()
        layout.put(head, "host", os.uname().nodename)
        layout.put(head, "machine", folder.machine())
        layout.put(head, "job", folder.job())
        layout.put(head, "command", " ".join(map(str, sys.orig_argv[:1] + sys.argv)) or "python")
        head.version = layout.VERSION
        head.magic = layout.MAGIC  # last: from now on it can be read

    def new_region(self) -> tuple[memoryview, bool]:
        """Memory for one more communicator, and whether it is in the file: of one that has ended long ago, else at the
        end of the file."""
        with self._lock:
            if len(self._ended) > _FORGOTTEN:
                track = self._ended.pop(0)
                memory: memoryview = track.memory
                track.detach()
                memory[:] = bytes(len(memory))
                return memory, True
            nbytes = layout.REGION_BYTES
            at = layout.REGIONS_AT + self.head.regions * nbytes
            try:
                if self._file >= 0:
                    memory = folder.grow(self._file, at, nbytes)
                    self.head.regions += 1
                    return memory, True
            except OSError as error:
                self._do_without(error, self.path, "communicators that are made from now on")
            return memoryview(mmap.mmap(-1, nbytes)), False

    def look(self) -> None:
        """The watchdog has looked. Now and then the time of the file says so, too: what is written through a map does
        not change it on every file system."""
        self.head.looked = now()
        if self._file >= 0 and now() - self._touched > _TOUCH_SECONDS:
            self._touched = now()
            with contextlib.suppress(OSError):
                os.utime(self._file)

    def write_where(self, where: str, stack: str) -> None:
        """The main thread is there now, and this is the stack of the thread that matters."""
        layout.put(self.head, "where", where)
        layout.put(self.head, "stack", stack)
        self.head.looked = self.head.where_at = now()

    def is_asked(self) -> bool:
        """Whether another process has asked where the threads are since that was last written: see reader.ask."""
        return bool(self.head.asked > self.head.where_at)

    def told(self) -> str:
        """What others have left for this process, once: see folder.tell."""
        text = layout.get(self.head.told, lines=True)
        if text:
            self.head.told = b""
        return text

    def end(self, kind: int, text: str, site: str) -> None:
        """The process is about to end."""
        layout.put(self.head, "end", text)
        layout.put(self.head, "end_site", site)
        self.ended = kind
        self.head.ended = now()

    def free(self, track: Any) -> None:
        """The communicator has ended; its region may be used again, once some more have."""
        with self._lock:
            if track in self.tracks:
                self.tracks.remove(track)
                if track.kept:
                    self._ended.append(track)

    def detach(self) -> None:
        """This is a forked child, the file is the parent's: what is still written goes nowhere."""
        self.head = layout.Header()
        self.strings.rows = memoryview(bytearray(len(self.strings.rows)))
        for track in (*self.tracks, *self._ended):
            track.detach()

    @property
    def mine(self) -> bool:
        """Whether this is still the process that made it, not a forked child."""
        return _recorder is self


_recorder: Recorder | None = None
_starting = threading.Lock()


def recorder() -> Recorder | None:
    """That of this process, started if it is the first time; None with PYNCCL_WATCH=off."""
    global _recorder
    if not settings().on:
        return None
    if _recorder is None:
        with _starting:
            if _recorder is None:
                _recorder = Recorder()
    return _recorder


def started() -> Recorder | None:
    """That of this process, if there is one."""
    return _recorder


def _rank() -> int:
    try:
        return int(os.environ.get("RANK", "-1"))
    except ValueError:
        return -1


def _after_fork_in_child() -> None:
    global _recorder
    if _recorder is not None:
        _recorder.detach()
    _recorder = None
    _starting._at_fork_reinit()  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_after_fork_in_child)
