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
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .frames import is_between

_COMM = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "comm") + os.sep
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


class Line(NamedTuple):
    """A frame: "file:line function"."""

    file: str
    number: str
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number} {self.function}"


Stacks = Mapping[int, list[Line]]  # of each thread the frames, innermost first


def take() -> Stacks:
    """Of all threads, now; {} where they cannot be had."""
    try:
        with open(os.memfd_create("pynccl stacks"), "w+b", buffering=0) as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            return parsed(file.read().decode(errors="replace"))
    except (OSError, AttributeError):  # no descriptor is left, or there is no memfd
        return {}


def parsed(text: str) -> Stacks:
    """What faulthandler has written."""
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
    return text.encode("ascii", "replace").decode("unicode_escape", "replace")


def of_main(threads: Stacks) -> list[Line]:
    """The stack of the main thread."""
    return threads.get(threading.main_thread().ident or 0, [])


def of_call(threads: Stacks, thread: int) -> list[Line]:
    """The stack of the thread that is in a call of a communicator: `thread`, which made the newest one, else any that
    is in one, else the main thread. A call with a deadline runs beside its caller, whose lines are the user's."""
    others = [frames for one, frames in threads.items() if one != threading.get_ident()]
    in_calls = [frames for frames in others if any(one.file.startswith(_COMM) for one in frames)]
    candidates = [threads.get(thread, []), *in_calls]
    return next((frames for frames in candidates if users_line(frames)), of_main(threads))


def users_line(frames: Sequence[Line]) -> str:
    """ "file:line function" of the user's innermost line; "" where there is none."""
    return next((str(one) for one in frames if not is_between(one.file)), "")


def users_stack(frames: Sequence[Line]) -> list[str]:
    """One line per frame, outermost first, without what lies below the call of this package that the user has made."""
    inner = next((number for number, one in enumerate(frames) if not is_between(one.file)), len(frames))
    return [str(one) for one in reversed(frames[max(inner - 1, 0) :])]


def stack(frames: Sequence[Line], most: int = 2000) -> str:
    """One line per frame, outermost first, of at most so many characters: the innermost ones."""
    text = "\n".join(str(one) for one in reversed(frames))
    return text if len(text) <= most else "...\n" + text[-most:].partition("\n")[2]
