"""The file of a flight recorder, byte by byte: for the recorder, and for the reader, who trusts nothing in it.

    header     4,096 bytes: who the process is, when its watchdog last looked, where its main thread was, how it ended
    strings    STRINGS rows of STRING_BYTES: names of operations, lines of code, descriptions; row 0 is ""
    regions    one a communicator, see `Region`

Numbers are of the machine's byte order, which the header names. All is fixed in size: nothing grows with the calls.

The calls of a communicator lie in a ring of slots, cut into segments. A segment is cleared when the writer comes to
it, and its number is written then, with the numbers of calls before it; so the newest call is the last slot of the
newest segment that is not 0, and to record a call takes one store of two bytes. What a slot holds is the row that
describes the call: of the table, where what is called again and again is described once; or INLINE, of the slot's own.
The reader takes a copy, and takes another one where the segment has changed meanwhile.
"""

from __future__ import annotations

import struct
import sys
from typing import NamedTuple

MAGIC = b"pynccl flight recorder\n\0"
VERSION = 1
ORDER = 0x0102030405060708  # as read with the wrong byte order it is another number
SUFFIX = ".watch"

HEADER_BYTES = 4096
STRINGS, STRING_BYTES = 2048, 160
REGIONS_AT = HEADER_BYTES + STRINGS * STRING_BYTES
PAGE = 4096
MOST_REGIONS = 4096

# The header: magic, version, byte order, then what is written once. Times are seconds of the machine's monotonic clock.
FIXED = struct.Struct("=24sIQ")
# pid, its start in ticks, rank, world, wall and monotonic clock of one moment, slots, segments, rows, strings
IDENTITY = struct.Struct("=IQiiddIIII")
IDENTITY_AT = 64
BORN = struct.Struct("=d")  # wall clock when the process began, before it imported anything; 0: not known
BORN_AT = 120
TEXTS = {"host": (192, 64), "machine": (256, 128), "job": (384, 128), "command": (512, 256), "library": (768, 128)}

# What changes: by the watchdog at each look, and at the end.
LOOK = struct.Struct("=ddI")  # monotonic clock of the look; of what `where` says; number of regions
LOOK_AT = 896
ASKED = struct.Struct("=d")  # by another process: the monotonic clock when it wanted to know where the threads are
ASKED_AT = 920
WHERE_AT, WHERE_BYTES = 928, 160
STACK_AT, STACK_BYTES = 1088, 2048
END = struct.Struct("=dI")  # monotonic clock of the end, 0: none; kind
END_AT = 3136
END_TEXT_AT, END_TEXT_BYTES = 3152, 640
END_SITE_AT, END_SITE_BYTES = 3792, 160
CLEAN, EXCEPTION = 1, 2  # kinds of end

# A region: its head, and behind it the arrays. Head: state, then texts.
REGION_HEAD = 1536
LIVE, ENDED = 1, 2  # 0: nobody's
COMM = struct.Struct("=Iiiid")  # state, rank, size, the same plus 1 as a check, monotonic clock when made
RING = struct.Struct("=QQQdd")  # newest segment; newest entry that has returned, that has completed; when each was seen
RING_AT = 64
WAITS = struct.Struct("=d")  # monotonic clock of the last look that saw its streams wait for calls before that
WAITS_AT = 104
COMM_END = struct.Struct("=d")
COMM_END_AT = 112
COMM_TEXTS = {
    "uid": (128, 64),
    "alias": (192, 64),
    "name": (256, 128),
    "device": (384, 32),
    "made_at": (416, 160),
    "parent": (576, 64),
    "ended": (640, 96),
    "ended_site": (736, 160),
    "error": (896, 512),
}

# A description. Operation and detail are strings; op and rank: -1 where there is none; weight: collective calls in it.
ROW = struct.Struct("=HHBbHiiIQQH")  # operation, detail, flags, data type, weight, op, rank, group, count, stream, site
PLAN, ROOT, PEER = 1, 2, 4
NO_COUNT = 0xFFFFFFFFFFFFFFFF

# What a slot holds. Its high byte says how many collective calls it counts as, so that a segment of them is counted by
# counting bytes: rows of the table that count as one, as none, as another number; and slots that describe themselves.
ONE, NONE, OTHER = range(1, 0x300), range(0x300, 0x400), range(0x400, 0x500)
ROWS = OTHER.stop
INLINE, INLINE_UNNUMBERED = 0x600, 0x700  # as one, as none
HIGH = 1 if sys.byteorder == "little" else 0  # where the high byte is

SEGMENTS = 3  # one of which is being written
CALLS = 2048  # that are kept at least
MARKS = 64  # the last looks of the watchdog, from which calls that did not read the clock have their time


class Region(NamedTuple):
    """Where the arrays of a region begin, in bytes; slots is a multiple of the segments."""

    slots: int
    segments: int
    ring: int  # H: 0, a row, or INLINE
    issued: int  # d: 0 where the clock was not read
    returned: int  # d
    site: int  # H: string
    function: int  # H: string: the autograd function
    forward: int  # H: string: its forward line
    failed: int  # B: 1: it raised
    bases: int  # Q, Q a segment: entries before it, collective calls before it
    marks: int  # d, Q a mark: at this time this was the newest entry
    table: int
    inline: int
    nbytes: int  # of it all, whole pages

    @property
    def segment(self) -> int:
        return self.slots // self.segments

    def written(self) -> tuple[tuple[int, int], ...]:
        """Where the arrays begin that each call writes to, and the bytes of an entry."""
        return (self.ring, 2), (self.issued, 8)

    def seldom(self) -> tuple[tuple[int, int], ...]:
        """The same of those that few calls write to, unless tracks are careful."""
        short = (self.site, self.function, self.forward)
        return (*((at, 2) for at in short), (self.returned, 8), (self.failed, 1))

    def short(self) -> dict[str, int]:
        """Where the arrays of two bytes a slot begin."""
        return {"ring": self.ring, "site": self.site, "function": self.function, "forward": self.forward}

    def clocks(self) -> dict[str, int]:
        """Where those of eight bytes a slot begin."""
        return {"issued": self.issued, "returned": self.returned}


def region(calls: int = CALLS, segments: int = SEGMENTS) -> Region:
    """The region whose ring keeps at least so many calls."""
    slots = -(-calls // (segments - 1)) * segments
    at, places = REGION_HEAD, []
    for nbytes in (
        2 * slots,
        8 * slots,
        8 * slots,
        *[2 * slots] * 3,
        slots,
        16 * segments,
        16 * MARKS,
        ROW.size * ROWS,
    ):
        places.append(at)
        at += -(-nbytes // 16) * 16
    places.append(at)
    at += ROW.size * slots
    return Region._make((slots, segments, *places, -(-at // PAGE) * PAGE))


def put(memory: memoryview, at: int, nbytes: int, text: str) -> None:
    """Write a text, cut where it is too long: never in the middle of a character."""
    data = text.encode("utf-8", "replace")[: nbytes - 1].decode("utf-8", "ignore").encode()
    memory[at : at + nbytes] = data.ljust(nbytes, b"\0")


def get(memory: memoryview | bytes, at: int, nbytes: int, lines: bool = False) -> str:
    """The text there, up to its end, as `printable`."""
    return printable(bytes(memory[at : at + nbytes]).partition(b"\0")[0].decode("utf-8", "replace"), lines)


def printable(text: str, lines: bool = False) -> str:
    """A text that somebody else has written, as it may be shown: without what a terminal obeys or a reader cannot see.
    For all that is read, where it is read. lines: it may have several."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or (lines and one == "\n") else "?" for one in text)
