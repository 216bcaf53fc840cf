"""The file of a flight recorder, byte by byte: for the recorder, and for the reader, who trusts nothing in it.

    header     4,096 bytes: who the process is, when its watchdog last looked, where its main thread was, how it ended
    strings    STRINGS rows of STRING_BYTES: names of operations, lines of code, descriptions; row 0 is ""
    regions    one a communicator, see `Region`

Numbers are of the machine's byte order, which the header names. All is fixed in size: nothing grows with the calls.

The calls of a communicator lie in a ring of slots, each of which says all of one call; call number `entry` is in slot
`(entry - 1) % slots`. A slot begins and ends with the entry, so a reader sees one that is being written: where the two
differ, or change between two copies, the slot is left out.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

MAGIC = b"pynccl flight recorder\n\0"
VERSION = 2
ORDER = 0x0102030405060708  # as read with the wrong byte order it is another number
SUFFIX = ".watch"

HEADER_BYTES = 4096
STRINGS, STRING_BYTES = 2048, 160
REGIONS_AT = HEADER_BYTES + STRINGS * STRING_BYTES
PAGE = 4096
MOST_REGIONS = 4096

# The header: magic, version, byte order, then what is written once. Times are seconds of the machine's monotonic clock.
FIXED = struct.Struct("=24sIQ")
# pid, its start in ticks, rank, world, wall and monotonic clock of one moment, slots, strings
IDENTITY = struct.Struct("=IQiiddII")
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

# A region: its head, and behind it the slots. Head: state, then texts.
REGION_HEAD = 1536
LIVE, ENDED = 1, 2  # 0: nobody's
COMM = struct.Struct("=Iiiid")  # state, rank, size, the same plus 1 as a check, monotonic clock when made
COMPLETED = struct.Struct("=Qd")  # newest entry that has completed, as far as is known; when that was seen
COMPLETED_AT = 64
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

# A slot: entry; monotonic clocks when it was issued and has returned, 0: not yet; number among the collective calls, 0:
# it is none; stream; group; strings: operation, line, detail, autograd function and its forward line; flags; then
# count, data type and what follows them among the C arguments (see ARGUMENTS); entry.
SLOT = struct.Struct("=QddQQIHHHHHBxQiii4xQ")
SLOT_BYTES = SLOT.size
RETURNED_AT, NUMBER_AT, STREAM_AT, FLAGS_AT = 16, 24, 32, 54  # in a slot
# The same for a call that is about to be made, without the autograd function, which few calls have.
ENTERED = struct.Struct("=Qd8xQQIHHH4xBxQiii4xQ")
FUNCTION = struct.Struct("=HH")
FUNCTION_AT = 50
PLAN, FAILED = 1, 2  # flags
NO_COUNT = 0xFFFFFFFFFFFFFFFF

# Which C argument of an operation is its count, behind which is the data type, and what follows that.
ARGUMENTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "all_reduce": (2, ("op",)),
    "reduce_scatter": (2, ("op",)),
    "reduce": (2, ("op", "root")),
    "broadcast": (2, ("root",)),
    "gather": (2, ("root",)),
    "scatter": (2, ("root",)),
    "all_gather": (2, ()),
    "all_to_all": (2, ()),
    "send": (1, ("peer",)),
    "recv": (1, ("peer",)),
    "put_signal": (1, ("peer",)),
}
SIGNALS = ("signal", "wait_signal")  # which have neither, but a peer
UNNUMBERED = ("send", "recv", "put_signal", *SIGNALS)  # calls that not every rank of a communicator makes

CALLS = 2048  # that are kept of each communicator
MARGIN = 16  # slots more than that, of which the oldest ones may be being written when they are read


class Region(NamedTuple):
    """The memory of a communicator: so many slots behind its head, in whole pages."""

    slots: int
    nbytes: int

    def at(self, entry: int) -> int:
        """Where the slot of this call begins, in bytes."""
        return REGION_HEAD + (entry - 1) % self.slots * SLOT_BYTES


def region(calls: int = CALLS) -> Region:
    """The region whose ring keeps at least so many calls."""
    slots = calls + MARGIN
    return Region(slots, -(-(REGION_HEAD + slots * SLOT_BYTES) // PAGE) * PAGE)


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
