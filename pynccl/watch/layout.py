"""The file of a flight recorder: the structures that the recorder maps into memory and the reader copies.

    Header     who the process is, when its watchdog last looked, where its main thread was, how it ended
    strings    STRINGS rows of STRING_BYTES: names of operations, lines of code, descriptions; row 0 is ""
    regions    one per communicator: a CommHead, then a ring of slots, in whole pages

All is fixed in size: nothing grows with the calls. Call number `entry` of a communicator is in slot
`entry % CALLS` of its ring. A slot begins and ends with the entry, so that the reader leaves out one that is
being written. Times are seconds of the machine's monotonic clock, 0: not yet.
"""

from __future__ import annotations

import ctypes
import struct
from ctypes import c_char, c_double, c_int32, c_uint32, c_uint64
from typing import Any

MAGIC = b"pynccl flight recorder"
VERSION = 5
SUFFIX = ".watch"

PAGE = 1 << 16  # where a map may begin, on every machine
STRINGS, STRING_BYTES = 2048, 160
STRINGS_AT = 1 << 13
REGIONS_AT = -(-(STRINGS_AT + STRINGS * STRING_BYTES) // PAGE) * PAGE
REGION_HEAD = 1536
CALLS = 2048  # that are kept of each communicator

CLEAN, EXCEPTION = 1, 2  # how a process ends
LIVE, ENDED = 1, 2  # CommHead.state; 0: the region is free


class Header(ctypes.Structure):
    """Of the process. Other processes write `asked` and `told`, it writes the rest."""

    _fields_ = (
        ("magic", c_char * 24),
        ("version", c_uint32),
        ("pid", c_uint32),
        ("start", c_uint64),  # of the process, in ticks
        ("rank", c_int32),
        ("regions", c_uint32),
        ("wall", c_double),  # wall clock and monotonic clock of one moment
        ("clock", c_double),
        ("born", c_double),  # wall clock when the process began, before it imported anything; 0: not known
        ("looked", c_double),  # the watchdog
        ("where_at", c_double),  # when `where` and `stack` were written
        ("asked", c_double),  # when another process wanted to know them
        ("ended", c_double),
        ("host", c_char * 64),
        ("machine", c_char * 128),
        ("job", c_char * 128),
        ("command", c_char * 256),
        ("where", c_char * 160),
        ("stack", c_char * 2048),
        ("end", c_char * 640),
        ("end_site", c_char * 160),
        ("told", c_char * 4096),  # that others wait for this process, for its watchdog to print
    )


class CommHead(ctypes.Structure):
    """Of a communicator."""

    _fields_ = (
        ("state", c_uint32),
        ("rank", c_int32),
        ("size", c_int32),
        ("made", c_double),
        ("completed", c_uint64),  # the newest entry that has completed, as far as is known, and when that was seen
        ("completed_at", c_double),
        ("waits_at", c_double),  # when its streams were last seen to wait for calls before that
        ("ended_at", c_double),
        ("uid", c_char * 64),
        ("name", c_char * 128),
        ("device", c_char * 32),
        ("made_at", c_char * 160),
        ("parent", c_char * 64),
        ("ended", c_char * 96),
        ("ended_site", c_char * 160),
        ("error", c_char * 512),
    )


# A slot: entry; when the call was issued and has returned; number among the collective calls, 0: it is none; stream;
# group; strings: operation, line, detail, autograd function and its forward line; flags; then count, data type and what
# follows them among the C arguments (see ARGUMENTS); entry.
SLOT = struct.Struct("=QddQQIHHHHHBxQiii4xQ")
RETURNED_AT, NUMBER_AT, STREAM_AT, FLAGS_AT = 16, 24, 32, 54  # in a slot
REGION_BYTES = -(-(REGION_HEAD + CALLS * SLOT.size) // PAGE) * PAGE
PLAN, FAILED, GAVE_UP = 1, 2, 4  # flags; the last of a call that its watchdog has ended
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


def put(head: ctypes.Structure, field: str, text: str) -> None:
    """Write a text of a Header or CommHead, cut where it is too long."""
    kind: Any = getattr(type(head), field)
    setattr(head, field, cut(text, kind.size))


def cut(text: str, nbytes: int) -> bytes:
    """The text in fewer than so many bytes, cut where it is too long: never in the middle of a character."""
    return text.encode("utf-8", "replace")[: nbytes - 1].decode("utf-8", "ignore").encode()


def get(data: bytes, lines: bool = False) -> str:
    """The text that begins these bytes, as `printable`."""
    return printable(data.partition(b"\0")[0].decode("utf-8", "replace"), lines)


def printable(text: str, lines: bool = False) -> str:
    """A text that was read, without what a terminal obeys or nobody sees.   lines: it may have several"""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or (lines and one == "\n") else "?" for one in text)
