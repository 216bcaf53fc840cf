"""Where the threads of this process are, in lines of code."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

from .frames import is_between, outwards, user_frame

_MOST_FRAMES = 60


def main_frame() -> FrameType | None:
    """The innermost frame of the main thread."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def frame_inside(comm: Any) -> FrameType | None:
    """The innermost frame of the thread that is in a call of this communicator; else the main thread's."""
    own = threading.get_ident()
    for thread, innermost in sys._current_frames().items():
        if thread == own:
            continue
        for number, frame in enumerate(outwards(innermost)):
            if number > _MOST_FRAMES:
                break
            values = frame.f_locals if "comm" in frame.f_code.co_filename else {}
            if values.get("self") is comm or values.get("comm") is comm or values.get("first") is comm:
                return innermost
    return main_frame()


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
