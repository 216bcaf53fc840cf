"""What one rank gives to a trace, as plain values: slices on lanes."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

# Lanes, from above: the caller's own spans, what is computed, what the CPU does for a GPU, communicators.
STEP, COMPUTE, CPU, COMM = "step", "compute", "cpu", "comm"
EXPOSED = "exposed"  # category of a slice in which what is computed waits for communication
BY_CPU = -1  # number of a communicator's lane: what the CPU of a rank with a GPU does itself


class Lane(NamedTuple):
    """kind     STEP, COMPUTE, CPU or COMM
    comm     of COMM: the uid of a communicator
    rank     this rank's number there
    number   which of several: streams, threads
    beside   of COMM: what is computed does not wait for it"""

    kind: str
    comm: str = ""
    rank: int = 0
    number: int = 0
    beside: bool = False


class Slice(NamedTuple):
    """A slice: seconds of perf_counter() of its rank.

    category  as in the file: "step", "compute", "comm", EXPOSED, "cpu_op", "kernel"
    keys      of collectives and messages: the same on all ranks that take part"""

    lane: Lane
    name: str
    category: str
    begin: float
    end: float
    args: dict[str, Any]
    keys: tuple[str, ...] = ()


@dataclass
class RankPart:
    """What a rank gives to the trace. begin, end: of the block; comms: uid -> name, rank, size; offset, uncertainty:
    seconds that its clock is ahead of that of rank 0, and by how much that may be wrong"""

    rank: int
    host: str
    pid: int
    device: str
    begin: float
    end: float
    offset: float = 0.0
    uncertainty: float = 0.0
    raised: str = ""  # by the block
    dropped: int = 0
    captured: int = 0  # calls that were captured into a CUDA graph, which have no times
    comms: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    pieces: list[Slice] = field(default_factory=list)


def to_bytes(part: RankPart) -> bytes:
    return gzip.compress(json.dumps(asdict(part), allow_nan=False).encode(), 1)


def from_bytes(data: bytes) -> RankPart:
    values = json.loads(gzip.decompress(data))
    pieces = [
        Slice(Lane(*lane), name, category, begin, end, args, tuple(keys))
        for lane, name, category, begin, end, args, keys in values["pieces"]
    ]
    comms = {uid: (name, rank, size) for uid, (name, rank, size) in values["comms"].items()}
    return RankPart(**{**values, "pieces": pieces, "comms": comms})
