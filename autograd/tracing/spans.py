"""What one rank has recorded: spans on lanes, bounded in number; and the same as plain values, for rank 0."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# Lanes, from above: the caller's own spans, what is computed, and communicators.
STEP, COMPUTE, COMM = "step", "compute", "comm"


class Lane(NamedTuple):
    """kind     STEP, COMPUTE or COMM
    comm     of COMM: the uid of a communicator
    rank     this rank's number there
    number   which of several: streams, threads; -1: the CPU, which waits
    beside   of COMPUTE: the second stream of an overlapped matmul; of COMM: what is computed does not wait for it"""

    kind: str
    comm: str = ""
    rank: int = 0
    number: int = 0
    beside: bool = False


@dataclass
class Span:
    """begin, end  marks; end is None while it is under way
    keys        of collectives and messages: the same on all ranks that take part
    blocks      whether what is computed waits for it"""

    lane: Lane
    name: str
    begin: Any
    end: Any = None
    args: dict[str, Any] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    blocks: bool = False


class Spans:
    """The first `limit` spans of this rank; of those that come later, how many."""

    def __init__(self, limit: int) -> None:
        self.limit, self.dropped = limit, 0
        self.found: list[Span] = []
        self._lock = threading.Lock()

    def add(self, span: Span) -> Span:
        with self._lock:
            if len(self.found) < self.limit:
                self.found.append(span)
            else:
                self.dropped += 1
        return span


class Piece(NamedTuple):
    """A span whose times are known: seconds of perf_counter() of its rank. done: whether its end was recorded."""

    lane: Lane
    name: str
    begin: float
    end: float
    args: dict[str, Any]
    keys: tuple[str, ...]
    blocks: bool
    done: bool = True


@dataclass
class Part:
    """What a rank gives to the trace. begin, end: of the block; comms: uid -> name, rank, size."""

    rank: int
    host: str
    pid: int
    device: str
    begin: float
    end: float
    uncertainty: float = 0.0  # seconds: of times of the GPU against this clock
    raised: str = ""  # by the block
    dropped: int = 0
    captured: int = 0  # spans without times, of what was captured into a CUDA graph
    comms: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)


def resolved(spans: list[Span], time_of: Callable[[Any], float | None], end: float) -> tuple[list[Piece], int]:
    """(the spans with their times, how many had none). What has not ended goes on to the end of the block."""
    pieces, without = [], 0
    for span in spans:
        begun, ended = time_of(span.begin), time_of(span.end)
        if begun is None:
            without += 1
            continue
        done = ended is not None
        last = ended if ended is not None else max(end, begun)
        pieces.append(Piece(span.lane, span.name, begun, last, span.args, span.keys, span.blocks, done))
    return pieces, without


def to_json(part: Part) -> dict[str, Any]:
    """As plain values for json.dumps."""
    return {**part.__dict__, "pieces": [tuple(piece) for piece in part.pieces]}


def from_json(values: dict[str, Any]) -> Part:
    """The part of what `to_json` gave."""
    pieces = [
        Piece(Lane(*lane), name, begin, end, args, tuple(keys), blocks, done)
        for lane, name, begin, end, args, keys, blocks, done in values["pieces"]
    ]
    comms = {uid: (str(name), int(rank), int(size)) for uid, (name, rank, size) in values["comms"].items()}
    return Part(**{**values, "pieces": pieces, "comms": comms})
