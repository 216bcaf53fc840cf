"""Where the threads of this process are, in lines of code."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from types import FrameType
from typing import Any

from .frames import is_between, outwards, user_frame

_MOST_FRAMES = 60
# Where communicators are told by the variables of a frame. Of no other: to look at them keeps what they hold alive for
# as long as the frame runs, before Python 3.13.
_COMM = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "comm") + os.sep
_MAKES = os.path.join("pynccl", "comm", "init.py")


def main_frame() -> FrameType | None:
    """The innermost frame of the main thread."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def frame_inside(comm: Any) -> FrameType | None:
    """The innermost frame of the thread that is in a call of this communicator; else the main thread's.

    None stands for one that is being made.
    Of two, the one that the user's lines lead to: a call with a deadline runs beside its caller."""
    own, found = threading.get_ident(), None
    for thread, innermost in sys._current_frames().items():
        if thread != own and _is_inside(innermost, comm):
            if user_frame(innermost) is not None:
                return innermost
            found = innermost
    return found or main_frame()


def _is_inside(innermost: FrameType, comm: Any) -> bool:
    for frame in itertools.islice(outwards(innermost), _MOST_FRAMES):
        file = frame.f_code.co_filename
        if comm is None:
            if file.endswith(_MAKES):
                return True
        elif file.startswith(_COMM) and any(frame.f_locals.get(name) is comm for name in ("self", "comm", "first")):
            return True
    return False


def is_users(frame: FrameType) -> bool:
    """Whether the line is the user's, not one of pynccl, torch or what they generate."""
    return not is_between(frame)


def where(frame: FrameType | None) -> str:
    """ "file:line function" of the user's innermost line from this frame outwards; "" where there is none."""
    frame = user_frame(frame)
    return "" if frame is None else line(frame)


def site(frame: FrameType | None) -> str:
    """ "file:line" of the same."""
    frame = user_frame(frame)
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"


def users_stack(frame: FrameType | None) -> list[str]:
    """The same without what lies below the call of this package that the user's code has made."""
    lines, frames = [], list(outwards(frame))
    while len(frames) > 1 and not is_users(frames[1]):
        frames.pop(0)
    for one in reversed(frames[:_MOST_FRAMES]):
        lines.append(line(one))
    return lines


def stack(frame: FrameType | None, most: int = 2000) -> str:
    """One line per frame, outermost first, of at most so many characters: the innermost ones."""
    lines: list[str] = []
    for one in outwards(frame):
        most -= len(line(one)) + 1
        if most < 0:
            lines.append("...")
            break
        lines.append(line(one))
    return "\n".join(reversed(lines))
