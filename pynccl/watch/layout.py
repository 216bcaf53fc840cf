"""The file format of the flight recorder: the recorder maps these structures into memory, and the reader copies them.

    Header     identity of the process, heartbeat of its watchdog, where its main thread was, how it ended
    strings    STRINGS rows of STRING_BYTES: names of operations, lines of code, descriptions; row 0 is ""
    regions    one per communicator: a CommHead, then a ring buffer of slots, padded to full pages

All sizes are fixed and independent of the number of calls. Call number `entry` of a communicator is in slot
`entry % CALLS` of its ring buffer. A slot begins and ends with `entry`: the reader skips a slot where they differ,
because it is being written. Times are seconds of the node's monotonic clock; 0 means not yet.
"""

from __future__ import annotations

import ctypes
import struct
from ctypes import c_char, c_double, c_int32, c_uint8, c_uint32, c_uint64
from enum import IntEnum
from typing import Any, NamedTuple

MAGIC = b"pynccl flight recorder"
VERSION = 8
SUFFIX = ".watch"

PAGE = 1 << 16  # alignment of a memory map that every architecture accepts
STRINGS, STRING_BYTES = 2048, 160
STRINGS_AT = 1 << 13
REGIONS_AT = -(-(STRINGS_AT + STRINGS * STRING_BYTES) // PAGE) * PAGE
REGION_HEAD = 7168
LISTED_RANKS = 1024  # a communicator of up to this many ranks can list their global ranks
CALLS = 2048  # kept per communicator


class ProcessEnd(IntEnum):
    """How a process ended. EXIT: by sys.exit with a code. CALL_FAILED: by the error of a call, or one raised from that.
    KILLED: it is gone without a word."""

    RUNNING = 0
    CLEAN = 1
    EXIT = 2
    EXCEPTION = 3
    CALL_FAILED = 4
    INTERRUPTED = 5
    KILLED = 6


class CommEnd(IntEnum):
    """How a communicator ended. REVOKED: a peer died, so all ranks ended the communicators of this generation, to meet
    again and make new ones (not by ncclCommRevoke)."""

    LIVE = 0
    DESTROYED = 1
    ABORTED = 2
    ABORTED_BY_WATCHDOG = 3
    AT_EXIT = 4
    FORKED = 5
    NEVER_MADE = 6
    REVOKED = 7


ENDED_AS = {  # for messages
    CommEnd.LIVE: "alive",
    CommEnd.DESTROYED: "destroyed",
    CommEnd.ABORTED: "aborted",
    CommEnd.ABORTED_BY_WATCHDOG: "aborted by the watchdog",
    CommEnd.AT_EXIT: "aborted at exit",
    CommEnd.FORKED: "inherited through a fork, where NCCL cannot work",
    CommEnd.NEVER_MADE: "never made",
    CommEnd.REVOKED: "revoked",
}


class Header(ctypes.Structure):
    """The process. Other processes write `stack_requested` and `message`; it writes the rest."""

    _fields_ = (
        ("magic", c_char * 24),
        ("version", c_uint32),
        ("pid", c_uint32),
        ("start", c_uint64),  # start of the process, in clock ticks since boot
        ("rank", c_int32),
        ("regions", c_uint32),
        ("wall", c_double),  # wall clock and monotonic clock, read together
        ("clock", c_double),
        ("process_started", c_double),  # wall clock when the process started; 0: unknown
        ("heartbeat", c_double),  # of the watchdog
        ("where_at", c_double),  # when `where` and `stack` were written
        ("stack_requested", c_double),  # when another process last requested them
        ("ended", c_double),
        ("ending", c_int32),  # a ProcessEnd, the Outcome of the call that failed, and the detail of either
        ("outcome", c_int32),
        ("code", c_int32),
        ("host", c_char * 64),
        ("machine", c_char * 128),
        ("job", c_char * 128),
        ("command", c_char * 256),
        ("where", c_char * 160),
        ("stack", c_char * 2048),
        ("end", c_char * 640),
        ("end_site", c_char * 160),
        ("message", c_char * 4096),  # from other ranks that wait for this process; its watchdog prints it
    )


class CommHead(ctypes.Structure):
    """A communicator."""

    _fields_ = (
        ("valid", c_uint32),  # 0: the region is unused
        ("ended", c_int32),  # a CommEnd
        ("rank", c_int32),
        ("size", c_int32),
        ("made", c_double),
        ("completed", c_uint64),  # newest entry known to have completed, and when that was observed
        ("completed_at", c_double),
        ("waits_at", c_double),  # when its streams were last observed waiting for calls issued earlier
        ("awaited_at", c_double),  # since when the program waits for its posted calls; see CallRecord.posted
        ("ended_at", c_double),
        ("uid", c_char * 64),
        ("name", c_char * 128),
        ("device", c_char * 32),
        ("made_at", c_char * 160),
        ("parent", c_char * 64),
        ("ended_site", c_char * 160),
        ("error", c_char * 512),
        ("ranks", c_int32 * LISTED_RANKS),  # global rank of each of its ranks; all 0: unknown
        ("excluded", c_uint8 * LISTED_RANKS),  # 1 for each rank that its last shrink excludes
    )


# A slot: entry; times at which the call was issued and returned; collective number, 0: not a collective; stream; group;
# strings: operation, line, detail, autograd function and its forward line; flags; outcome; count, data type and the C
# arguments that follow them (see ARGUMENTS); detail of the outcome; entry.
SLOT = struct.Struct("=QddQQIHHHHHBBQiiiiQ")
RETURNED_AT, NUMBER_AT, STREAM_AT, FLAGS_AT, OUTCOME_AT, CODE_AT = 16, 24, 32, 54, 55, 76  # offsets in a slot
REGION_BYTES = -(-(REGION_HEAD + CALLS * SLOT.size) // PAGE) * PAGE
PLAN = 1  # flags
POSTED = 2  # made by a thread of its own: the program went on
UNKNOWN_STREAM = 4  # nothing tells whether it has run: see pynccl/interop/handles.py
NO_COUNT = 0xFFFFFFFFFFFFFFFF

# Operation -> index of its count among the C arguments (the data type follows it), and the arguments after that. The
# number of a message or signal is none of them: the recorder counts.
ARGUMENTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "all_reduce": (2, ("op",)),
    "reduce_scatter": (2, ("op",)),
    "reduce": (2, ("op", "root")),
    "broadcast": (2, ("root",)),
    "gather": (2, ("root",)),
    "scatter": (2, ("root",)),
    "all_gather": (2, ()),
    "all_to_all": (2, ()),
    "send": (1, ("peer", "message")),
    "recv": (1, ("peer", "message")),
    "put_signal": (1, ("peer", "message")),
}
SIGNALS = ("signal", "wait_signal")  # without count and data type, but with a peer


class Half(NamedTuple):
    """What one of two ranks calls for a message, or for a signal.   sends: its half comes first"""

    channel: str
    sends: bool


MESSAGES = {  # not collective: only some ranks make these calls
    "send": Half("message", True),
    "recv": Half("message", False),
    "signal": Half("signal", True),
    "put_signal": Half("signal", True),
    "wait_signal": Half("signal", False),
}


def put(head: ctypes.Structure, field: str, text: str) -> None:
    """Write a text field of a Header or CommHead, truncated to fit."""
    kind: Any = getattr(type(head), field)
    setattr(head, field, cut(text, kind.size))


def cut(text: str, nbytes: int) -> bytes:
    """Encode the text in fewer than `nbytes` bytes, truncated at a character boundary."""
    return text.encode("utf-8", "replace")[: nbytes - 1].decode("utf-8", "ignore").encode()


def get(data: bytes, lines: bool = False) -> str:
    """Decode the NUL-terminated text at the start of `data` and make it printable."""
    return printable(data.partition(b"\0")[0].decode("utf-8", "replace"), lines)


def printable(text: str, lines: bool = False) -> str:
    """Replace control and invisible characters by "?".   lines: keep newlines"""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or (lines and char == "\n") else "?" for char in text)
