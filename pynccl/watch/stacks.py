"""Where the threads of this process are, in lines of code, as faulthandler tells them.

To be asked when a call is overdue or another rank wants to know, never in a healthy program. faulthandler walks all
threads in C without giving up the interpreter's lock. A walk in Python (sys._current_frames, f_back) gives it up
between two steps: the frames go on meanwhile, and the walk ends in a segmentation fault.
"""

from __future__ import annotations

import faulthandler
import os
import re
import threading
from collections.abc import Sequence
from typing import NamedTuple

from .frames import is_between

_COMM = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "comm") + os.sep
_MOST_BYTES = 1 << 22  # faulthandler tells of at most 100 threads, of 100 frames each
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
_ESCAPED = re.compile(r"\\x[0-9a-f]{2}|\\u[0-9a-f]{4}|\\U[0-9a-f]{8}")


class Line(NamedTuple):
    """A frame: "file:line function"."""

    file: str
    number: str
    function: str

    @property
    def site(self) -> str:
        return f"{self.file}:{self.number}"

    def __str__(self) -> str:
        return f"{self.site} {self.function}"


class Stacks:
    """The stacks of all threads, innermost frame first, when it was made; empty where they cannot be had."""

    def __init__(self, file: int) -> None:
        """file  a descriptor that is written to and read back, such as that of a memfd; -1: there is none"""
        self.threads: dict[int, list[Line]] = parsed(_dumped(file)) if file >= 0 else {}

    def main(self) -> list[Line]:
        """Of the main thread."""
        return self.threads.get(threading.main_thread().ident or 0, [])

    def inside(self, thread: int = 0) -> list[Line]:
        """Of the thread that is in a call of a communicator: `thread`, which made the newest one, else any that is in
        one, else the main thread. A call with a deadline runs beside its caller, whose lines are the user's."""
        own = threading.get_ident()
        callers = [found for one, found in self.threads.items() if one != own and _calls(found)]
        if thread in self.threads and thread != own:
            callers.insert(0, self.threads[thread])
        return next((one for one in callers if users_line(one)), self.main())


def open_file() -> int:
    """A file in memory for `Stacks`; -1 where the system gives none."""
    try:
        return os.memfd_create("pynccl stacks", os.MFD_CLOEXEC)
    except (OSError, AttributeError):
        return -1


def _dumped(file: int) -> str:
    try:
        os.lseek(file, 0, os.SEEK_SET)
        os.ftruncate(file, 0)
        faulthandler.dump_traceback(file, all_threads=True)
        return os.pread(file, _MOST_BYTES, 0).decode(errors="replace")
    except OSError:
        return ""


def parsed(text: str) -> dict[int, list[Line]]:
    """What faulthandler has written: the frames of each thread, innermost first."""
    threads: dict[int, list[Line]] = {}
    frames: list[Line] = []
    for line in text.splitlines():
        if found := _THREAD.match(line):
            frames = threads[int(found[1], 16)] = []
        elif found := _FRAME.fullmatch(line):
            frames.append(Line(_unescaped(found[1]), found[2], _unescaped(found[3])))
    return threads


def _unescaped(text: str) -> str:
    """Letters that are not ASCII come as \\xe4, \\u1234, \\U00012345."""
    return _ESCAPED.sub(lambda found: chr(min(int(found[0][2:], 16), 0x10FFFF)), text)


def _calls(frames: Sequence[Line]) -> bool:
    return any(one.file.startswith(_COMM) for one in frames)


def users_line(frames: Sequence[Line]) -> Line | None:
    """The user's innermost line; None where there is none."""
    return next((one for one in frames if not is_between(one.file)), None)


def where(frames: Sequence[Line]) -> str:
    """ "file:line function" of the user's innermost line; "" where there is none."""
    return str(users_line(frames) or "")


def users_stack(frames: Sequence[Line]) -> list[str]:
    """One line per frame, outermost first, without what lies below the call of this package that the user has made."""
    inner = next((number for number, one in enumerate(frames) if not is_between(one.file)), len(frames))
    return [str(one) for one in reversed(frames[max(inner - 1, 0) :])]


def stack(frames: Sequence[Line], most: int = 2000) -> str:
    """One line per frame, outermost first, of at most so many characters: the innermost ones."""
    lines: list[str] = []
    for one in frames:
        most -= len(str(one)) + 1
        if most < 0:
            lines.append("...")
            break
        lines.append(str(one))
    return "\n".join(reversed(lines))
