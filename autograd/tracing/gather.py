"""The traces of all ranks come to rank 0, on a communicator of their own that is split from the user's.

So whatever goes wrong at the end of the block, the user's communicator is as it was: a rank that waits too long aborts
this one.
"""

from __future__ import annotations

import contextlib
import gzip
import json
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pynccl import Communicator, NcclTimeout
from pynccl.bindings.workers import Clock, Wait

from ..agreement import gathered
from .recording import Lane, Slice, now

_ROUNDS = 20
_END_SECONDS = 5.0


@dataclass
class RankTrace:
    """What one rank contributes: its own slices, and the events of its profiler.

    begin, end  of the block
    raised      the exception that ended the block, or ""
    comms       uid -> name, rank, size
    offset      seconds that this rank's clock is ahead of rank 0's"""

    rank: int
    host: str
    pid: int
    device: str
    begin: float
    end: float
    raised: str
    comms: dict[str, tuple[str, int, int]]
    slices: list[Slice]
    events: list[dict[str, Any]]
    offset: float = 0.0

    def to_bytes(self) -> bytes:
        return gzip.compress(json.dumps(asdict(self), allow_nan=False).encode(), 1)

    @staticmethod
    def from_bytes(data: bytes) -> RankTrace:
        values = json.loads(gzip.decompress(data))
        slices = [Slice(**{**one, "lane": Lane(*one["lane"]), "keys": tuple(one["keys"])}) for one in values["slices"]]
        return RankTrace(**{**values, "slices": slices})


class Gathering:
    """Made by every rank of the communicator at the begin of the block."""

    def __init__(self, comm: Communicator) -> None:
        made = comm.split(0, comm.rank)
        assert made is not None
        self._comm = made
        self._offset = clock_offset(made)

    def gather(self, trace: RankTrace, seconds: float) -> list[RankTrace]:
        """The traces of all ranks on rank 0, [] on the others. Raises what kept them from coming within the time."""

        def late() -> NcclTimeout:
            return NcclTimeout(f"the other ranks did not come to the end of the block within {seconds:g} s")

        trace.offset = self._offset
        found = Wait(Clock(seconds)).beside(lambda: self._gather(trace), late)
        self._comm.timeout = _END_SECONDS
        with contextlib.suppress(Exception):
            self._comm.destroy()
        return found

    def _gather(self, trace: RankTrace) -> list[RankTrace]:
        comm = self._comm
        if comm.device.startswith("cuda"):
            torch.cuda.set_device(comm.device)  # of this thread
        data = trace.to_bytes()
        counts = [row[0] for row in gathered(comm, [len(data)])]
        send = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(comm.device)
        received = send.new_empty(sum(counts)) if comm.rank == 0 else None
        comm.gather_v(send, received, 0, counts=counts)
        found = [] if received is None else [one.numpy().tobytes() for one in received.cpu().split(counts)]
        gathered(comm, [0])  # rank 0 has all of it
        return [RankTrace.from_bytes(one) for one in found]

    def close(self) -> None:
        if self._comm.alive:
            self._comm.abort()


def clock_offset(comm: Communicator) -> float:
    """Seconds that the clock of this rank is ahead of rank 0's; 0.0 where both may be the clock of one machine.

    No all_gather ends before all ranks have begun it, so each one bounds the difference from both sides."""
    lower, upper, begun, ended = float("-inf"), float("inf"), 0, 0
    for number in range(_ROUNDS + 1):
        rows = gathered(comm, [round(now() * 1e9), ended])
        ended = round(now() * 1e9)
        if number:  # rows[0][1]: when rank 0 saw the end of the one before
            lower = max(lower, begun - rows[0][1])
        begun = rows[comm.rank][0]
        upper = min(upper, ended - rows[0][0])
    return 0.0 if lower <= 0 <= upper else (lower + upper) / 2e9
