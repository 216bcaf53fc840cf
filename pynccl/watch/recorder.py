"""The flight recorder of this process: its file, with what is true of the whole process. Calls are written by track.py.

The file is mapped into memory, so what was written is there after kill -9, os._exit or a crash. It is made with the
first communicator, and grows with each, its room taken from the file system at once. What cannot be had - room, a
folder, a descriptor - is done without, in memory that nobody else sees, with one warning: it ends no job.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
import warnings
import weakref
from typing import Any

from . import folder, layout
from .settings import OFF, settings

now = time.monotonic
_FORGOTTEN = 8  # communicators that have ended stay in the file until so many more have


class Strings(dict[str, int]):
    """Text -> its row in the file, written when it is first asked for; that of "(...)" where the table is full."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__({"": 0})
        self._recorder = recorder
        self._lock = threading.RLock()  # a handler of a signal may make a call, too

    def __missing__(self, text: str) -> int:
        with self._lock:
            if text in self:  # another thread was faster
                return self[text]
            number = min(len(self), layout.STRINGS - 1)
            if number < layout.STRINGS - 1:
                self[text] = number
            else:
                text = "(...)"
            at = layout.HEADER_BYTES + number * layout.STRING_BYTES
            layout.put(self._recorder.head, at, layout.STRING_BYTES, text)
            return number

    def of_detail(self, text: str) -> int:
        """The row of what may be another text at every call: at most half of the table is theirs."""
        return self[text] if text in self or len(self) < layout.STRINGS // 2 else self["(...)"]


class Recorder:
    """The file of this process."""

    def __init__(self) -> None:
        chosen = settings()
        self.settings, self.pid = chosen, os.getpid()
        self.region = layout.region(chosen.calls)
        self.tracks: list[Any] = []  # of the communicators that are alive
        self.exchanges: weakref.WeakSet[Any] = weakref.WeakSet()  # with which ranks on other machines are asked
        self.last_asked: Any = None  # the last track that ranks elsewhere ask, kept: there the end is told, too
        self.sharing = threading.Lock()  # of what all threads share: the exchanges, the watchdog
        self._lock = threading.Lock()
        self.strings = Strings(self)
        self._regions = 0
        self.ended = 0  # how, once this process is about to end
        self.beside: list[str] = []  # other files that go when the job has ended well
        self._ended: list[Any] = []  # tracks of communicators that have ended, oldest first
        self._warned = False
        self.path, self._file = self._open()
        self.head = self._map_head()
        self._write_head()

    def _open(self) -> tuple[str, int]:
        """The path of the file and its descriptor; ("", -1): in memory alone."""
        where = folder.base()
        try:
            folder.remove_old(where)
            return folder.create(folder.name_of_file(_rank(), self.pid, folder.started()))
        except Exception as error:
            self._do_without(error, where, "this process's calls")
            return "", -1

    def _map(self, at: int, nbytes: int) -> memoryview:
        """This part of the file, which it is made longer for; OSError where that cannot be."""
        if self._file < 0:
            return memoryview(mmap.mmap(-1, nbytes))
        folder.reserve(self._file, at, nbytes)
        return memoryview(mmap.mmap(self._file, nbytes, offset=at))

    def _map_head(self) -> memoryview:
        try:
            return self._map(0, layout.REGIONS_AT)
        except OSError as error:  # no descriptor is left: a map takes another one
            os.close(self._file)
            folder.remove(self.path)
            self._do_without(error, self.path, "this process's calls")
            self.path, self._file = "", -1
            return self._map(0, layout.REGIONS_AT)

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
        head, region = self.head, self.region
        texts = {
            "host": os.uname().nodename,
            "machine": folder.machine(),
            "job": folder.job(),
            "command": " ".join(map(str, sys.orig_argv[:1] + sys.argv)) or "python",
        }
        for name, text in texts.items():
            layout.put(head, *layout.TEXTS[name], text)
        layout.IDENTITY.pack_into(
            head,
            layout.IDENTITY_AT,
            self.pid,
            folder.started(),
            _rank(),
            _integer("WORLD_SIZE"),
            time.time(),
            now(),
            region.slots,
            layout.STRINGS,
        )
        layout.BORN.pack_into(head, layout.BORN_AT, folder.born())
        layout.LOOK.pack_into(head, layout.LOOK_AT, now(), 0, 0)
        layout.FIXED.pack_into(head, 0, layout.MAGIC, layout.VERSION, layout.ORDER)  # last: from now on it can be read

    def new_region(self) -> memoryview | None:
        """Memory for one more communicator: of one that has ended long ago, else at the end of the file. None: there is
        none for it."""
        with self._lock:
            if len(self._ended) > _FORGOTTEN:
                track = self._ended.pop(0)
                memory: memoryview = track.memory
                track.detach()
                memory[:] = bytes(len(memory))
                return memory
            if self._regions >= layout.MOST_REGIONS:
                return None
            try:
                memory = self._map(layout.REGIONS_AT + self._regions * self.region.nbytes, self.region.nbytes)
            except OSError as error:
                self._do_without(error, self.path, "communicators that are made from now on")
                return None
            self._regions += 1
            seen, where, _ = layout.LOOK.unpack_from(self.head, layout.LOOK_AT)
            layout.LOOK.pack_into(self.head, layout.LOOK_AT, seen, where, self._regions)
            return memory

    def look(self) -> None:
        """The watchdog has looked."""
        _, where_at, _ = layout.LOOK.unpack_from(self.head, layout.LOOK_AT)
        layout.LOOK.pack_into(self.head, layout.LOOK_AT, now(), where_at, self._regions)

    def write_where(self, where: str, stack: str) -> None:
        """The main thread is there now, and this is the stack of the thread that matters."""
        layout.put(self.head, layout.WHERE_AT, layout.WHERE_BYTES, where)
        layout.put(self.head, layout.STACK_AT, layout.STACK_BYTES, stack)
        layout.LOOK.pack_into(self.head, layout.LOOK_AT, now(), now(), self._regions)

    def is_asked(self) -> bool:
        """Whether another process has asked where the threads are since that was last written: see reader.ask."""
        (asked,) = layout.ASKED.unpack_from(self.head, layout.ASKED_AT)
        _, where_at, _ = layout.LOOK.unpack_from(self.head, layout.LOOK_AT)
        return bool(asked > where_at)

    def end(self, kind: int, text: str, site: str) -> None:
        """The process is about to end."""
        self.ended = kind
        layout.put(self.head, layout.END_TEXT_AT, layout.END_TEXT_BYTES, text)
        layout.put(self.head, layout.END_SITE_AT, layout.END_SITE_BYTES, site)
        layout.END.pack_into(self.head, layout.END_AT, now(), kind)

    def free(self, track: Any) -> None:
        """The communicator has ended; its region may be used again, once some more have."""
        with self._lock:
            if track in self.tracks:
                self.tracks.remove(track)
                if track.kept:
                    self._ended.append(track)

    @property
    def mine(self) -> bool:
        """Whether this is still the process that made it, not a forked child."""
        return _recorder is self


_recorder: Recorder | None = None
_starting = threading.Lock()


def recorder() -> Recorder | None:
    """That of this process, started if it is the first time; None with PYNCCL_WATCH=off."""
    global _recorder
    if settings().mode == OFF:
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
    return _integer("RANK")


def _integer(name: str) -> int:
    try:
        return int(os.environ.get(name, "-1"))
    except ValueError:
        return -1


def _after_fork_in_child() -> None:
    """The file is the parent's."""
    global _recorder
    if _recorder is not None:
        _recorder.head = memoryview(bytearray(layout.REGIONS_AT))
        for track in _recorder.tracks:
            track.detach()
    _recorder = None
    _starting._at_fork_reinit()  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_after_fork_in_child)
