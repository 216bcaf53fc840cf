"""Text that came from a file or a socket, made safe for a terminal; times and lists of ranks in words."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable

# What a terminal obeys: sequences that begin with an escape (colors, titles, clipboard), as one or two bytes.
_SEQUENCES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?"
)


def line(text: str, most: int = 0) -> str:
    """As one line, without what a terminal obeys or a reader cannot see; cut to `most` characters, if given."""
    flat = _printable(" ".join(_SEQUENCES.sub("", text).split()))
    return cut(flat, most) if most else flat


def lines(text: str) -> list[str]:
    """Each of its lines, so cleaned; spaces are kept within."""
    return [_printable(one.rstrip()) for one in _SEQUENCES.sub("", text).expandtabs(4).splitlines()]


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(one if one.isprintable() else "?" for one in text)


def cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: max(most - 3, 0)] + "..."


def place(site: str) -> str:
    """ "/home/me/data.py:41 next_batch" -> "data.py:41 next_batch"."""
    path, colon, rest = line(site).rpartition(":")
    return path.rpartition("/")[2] + colon + rest


def seconds(value: float) -> str:
    """ "0.4 s", "12.3 s", "4 min 10 s", "3 h 5 min", "2 days"."""
    if not math.isfinite(value):
        return "?"
    value = max(value, 0.0)
    if value < 99.95:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} days" if whole >= 2 * 86400 else "1 day"


def clock(moment: float) -> str:
    """ "14:03:12.345", of this machine's zone; "" where the time is not known."""
    if not known(moment):
        return ""
    return time.strftime("%H:%M:%S", time.localtime(moment)) + f".{int(moment % 1 * 1000):03d}"


def known(moment: float) -> bool:
    """Whether it is a time: files may hold anything."""
    return math.isfinite(moment) and 0 < moment < 1e11


def ranks(numbers: Iterable[int], most: int = 0) -> str:
    """ "0-6, 8-15"; with `most`, what does not fit into so many characters is counted: "0, 2, 4, ... (512)"."""
    ordered = sorted(set(numbers))
    spans: list[list[int]] = []
    for number in ordered:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    words = [str(low) if low == high else f"{low}-{high}" for low, high in spans]
    text = ", ".join(words)
    if not most or len(text) <= most:
        return text
    end = f", ... ({len(ordered):,})"
    while len(words) > 1 and len(", ".join(words) + end) > most:
        words.pop()
    return ", ".join(words) + end
