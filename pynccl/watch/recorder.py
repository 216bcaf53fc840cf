"""The flight recorder of this process: its file, and the state of the process as a whole. track.py records the calls.

The file is mapped into memory, so its contents survive kill -9, os._exit and crashes. It is created with the first
communicator and grows with each one; its disk space is allocated at once. If space, a folder or a descriptor is
missing, the recorder warns once and uses private memory instead: a recorder problem never ends a job.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import sys
import threading
import time
import warnings
from typing import Any, NamedTuple

from ..bindings.errors import Outcome
from . import folder, layout
from .folder import settings
from .layout import ProcessEnd

now = time.monotonic
_KEPT_ENDED_COMMS = 8  # ended communicators whose regions stay in the file before they are reused
_TOUCH_SECONDS = 10.0


class Ending(NamedTuple):
    """How a process ends.

    text, site  for people, and the user's line of the exception
    outcome     of the call whose error ended it; code: detail of the outcome, exit code, or signal; -1: none"""

    ending: ProcessEnd
    text: str
    site: str = ""
    outcome: Outcome = Outcome.PENDING
    code: int = -1


class Strings(dict[str, int]):
    """Text -> its row in the file, written on first use; the row of "(...)" once the table is full."""

    def __init__(self, rows: memoryview) -> None:
        super().__init__({"": 0})
        self.rows = rows
        self._free = itertools.count(1)  # two threads may each write a row for the same text, which is harmless

    def __missing__(self, text: str) -> int:
        number, nbytes = min(next(self._free), layout.STRINGS - 1), layout.STRING_BYTES
        full = number == layout.STRINGS - 1
        self.rows[number * nbytes :][:nbytes] = layout.cut("(...)" if full else text, nbytes).ljust(nbytes, b"\0")
        if not full:
            self[text] = number
        return number

    def of_detail(self, text: str) -> int:
        """Return the row of a text that may differ in every call. Such texts fill at most half of the table."""
        return self[text] if text in self or len(self) < layout.STRINGS // 2 else self["(...)"]


class Recorder:
    """The recorder of this process.

    path  of its file; "": it records into private memory only
    head  the header of the file
    """

    def __init__(self) -> None:
        self.settings = settings()
        self.tracks: list[Any] = []  # of live communicators
        self.exchange: Any = None  # the newest Exchange: the end of this process is reported there too
        self.sharing = threading.Lock()  # guards what all threads share: the exchange, the watchdog
        # The text, outcome and detail of the last call that failed: C++ code that an error passes keeps only its text.
        self.last_failure = ("", Outcome.PENDING, -1)
        self.extra_files: list[str] = []  # other files to remove when the job exits cleanly
        self._ended: list[Any] = []  # tracks of ended communicators, oldest first
        self._lock = threading.Lock()
        self._warned = False
        self._touched = -_TOUCH_SECONDS
        self.path, self._file, memory = self._open()
        self.head = layout.Header.from_buffer(memory)
        self.strings = Strings(memory[layout.STRINGS_AT : layout.REGIONS_AT])
        self._write_head()

    def _open(self) -> tuple[str, int, memoryview]:
        """Create the file. Return its path, descriptor and the part before the regions; ("", -1, memory) on failure."""
        where = folder.base()
        try:
            folder.remove_old(where)
            return folder.create(_rank())
        except Exception as error:
            self._fall_back_to_memory(error, where, "this process's calls")
            return "", -1, memoryview(mmap.mmap(-1, layout.REGIONS_AT))

    def _fall_back_to_memory(self, error: Exception, path: str, what: str) -> None:
        """Warn once that recording continues in memory."""
        if self._warned:
            return
        self._warned = True
        path = getattr(error, "filename", None) or path
        full = "free disk space, " if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) else ""
        text = (
            f"{path}: {getattr(error, 'strerror', None) or error}: the flight recorder uses memory only, so "
            f"`python -m pynccl hang` and the other ranks do not see {what}\n"
            f"  {full}set PYNCCL_WATCH_DIR to a private, writable folder, or set PYNCCL_WATCH=off"
        )
        try:
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        except RuntimeWarning:  # with -W error, the warning still must not end the job
            print(f"RuntimeWarning: {text}", file=sys.stderr, flush=True)

    def _write_head(self) -> None:
        head = self.head
        head.pid, head.start, head.rank = os.getpid(), folder.start_ticks(), _rank()
        head.wall, head.clock, head.process_started = time.time(), now(), folder.process_start_time()
        head.heartbeat, head.code = now(), -1
        layout.put(head, "host", os.uname().nodename)
        layout.put(head, "machine", folder.machine())
        layout.put(head, "job", folder.job())
        layout.put(head, "command", " ".join(map(str, sys.orig_argv[:1] + sys.argv)) or "python")
        head.version = layout.VERSION
        head.magic = layout.MAGIC  # written last: from now on the file is valid

    def new_region(self) -> tuple[memoryview, bool]:
        """Return memory for one more communicator, and whether it is in the file. Reuses the region of a communicator
        that ended long ago, else extends the file."""
        with self._lock:
            if len(self._ended) > _KEPT_ENDED_COMMS:
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
                self._fall_back_to_memory(error, self.path, "communicators created from now on")
            return memoryview(mmap.mmap(-1, nbytes)), False

    def beat(self) -> None:
        """Write the watchdog's heartbeat. Also touch the file every 10 s, because writes through a memory map do not
        update its modification time on every file system."""
        self.head.heartbeat = now()
        if self._file >= 0 and now() - self._touched > _TOUCH_SECONDS:
            self._touched = now()
            with contextlib.suppress(OSError):
                os.utime(self._file)

    def write_where(self, where: str, stack: str) -> None:
        """Write the current line of the main thread, and the stack of the thread that matters."""
        layout.put(self.head, "where", where)
        layout.put(self.head, "stack", stack)
        self.head.heartbeat = self.head.where_at = now()

    def stack_requested(self) -> bool:
        """Return whether another process has requested the stacks since they were last written: see reader.ask."""
        return bool(self.head.stack_requested > self.head.where_at)

    def take_message(self) -> str:
        """Return the message that another process left for this one, and clear it: see folder.leave_message."""
        text = layout.get(self.head.message, lines=True)
        if text:
            self.head.message = b""
        return text

    def end(self, how: Ending) -> None:
        """Record that the process is about to end."""
        layout.put(self.head, "end", how.text)
        layout.put(self.head, "end_site", how.site)
        self.head.ending, self.head.outcome, self.head.code = how.ending, how.outcome, how.code
        self.head.ended = now()

    def release(self, track: Any) -> None:
        """Record that a communicator has ended. Its region is reused once some more have ended."""
        with self._lock:
            if track in self.tracks:
                self.tracks.remove(track)
                if track.in_file:
                    self._ended.append(track)

    def detach(self) -> None:
        """In a forked child, whose parent owns the file: discard all further writes."""
        self.head = layout.Header()
        self.strings.rows = memoryview(bytearray(len(self.strings.rows)))
        for track in (*self.tracks, *self._ended):
            track.detach()

    @property
    def ending(self) -> ProcessEnd:
        """How this process is about to end."""
        return ProcessEnd(self.head.ending)

    @property
    def mine(self) -> bool:
        """Whether this is the process that created the recorder, not a forked child."""
        return _recorder is self


_recorder: Recorder | None = None
_starting = threading.Lock()


def recorder() -> Recorder | None:
    """Return the recorder of this process, creating it on first use; None with PYNCCL_WATCH=off."""
    global _recorder
    if not settings().on:
        return None
    if _recorder is None:
        with _starting:
            if _recorder is None:
                _recorder = Recorder()
    return _recorder


def started() -> Recorder | None:
    """Return the recorder of this process, if it exists."""
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
