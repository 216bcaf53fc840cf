"""The ranks of a trace meet on a communicator of its own, split from the user's at the begin: their clocks are
compared there, and what each has recorded comes to rank 0 at the end.

Whatever goes wrong there does not touch the communicator of the user: a rank that waits too long aborts this one.
"""

from __future__ import annotations

import contextlib

import torch

from pynccl import Communicator, NcclTimeout
from pynccl.bindings.workers import Clock, Wait

from ..agreement import gathered
from .recording import now
from .spans import RankPart, from_bytes, to_bytes

_ROUNDS = 20
_END_SECONDS = 5.0


class TraceMeeting:
    """Every rank of the communicator makes one."""

    def __init__(self, comm: Communicator) -> None:
        made = comm.split(0, comm.rank)
        assert made is not None
        self._comm = made
        self._offset, self._uncertainty = compare(made)

    def gather(self, part: RankPart, seconds: float) -> list[RankPart]:
        """The parts of all ranks on rank 0, [] on the others; raises what kept them from coming in so many seconds."""

        def late() -> NcclTimeout:
            return NcclTimeout(f"the other ranks did not come to the end of the block within {seconds:g} s")

        try:
            found = Wait(Clock(seconds)).beside(lambda: self._gather(part), late)
        except BaseException:
            self._comm.abort()
            raise
        self._comm.timeout = _END_SECONDS
        with contextlib.suppress(Exception):
            self._comm.destroy()
        return found

    def _gather(self, part: RankPart) -> list[RankPart]:
        comm = self._comm
        if comm.device.startswith("cuda"):
            torch.cuda.set_device(comm.device)  # of this thread
        part.offset, part.uncertainty = self._offset, self._uncertainty
        data = to_bytes(part)
        counts = [row[0] for row in gathered(comm, [len(data)])]
        send = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(comm.device)
        received = send.new_empty(sum(counts)) if comm.rank == 0 else None
        comm.gather_v(send, received, 0, counts=counts)
        if received is None:
            gathered(comm, [0])  # rank 0 has it
            return []
        pieces = received.cpu().split(counts)
        gathered(comm, [0])
        return [from_bytes(piece.numpy().tobytes()) for piece in pieces]

    def close(self) -> None:
        """Without having gathered."""
        if self._comm.alive:
            self._comm.abort()


def compare(comm: Communicator) -> tuple[float, float]:
    """Seconds that the clock of this rank is ahead of that of rank 0, and by how much that may be wrong; 0 and 0 where
    both may be one clock, as on one machine.

    No all_gather ends before all ranks have begun it: so each one gives a bound from below and one from above."""
    lower, upper, begun, ended = float("-inf"), float("inf"), 0, 0
    for number in range(_ROUNDS + 1):
        rows = gathered(comm, [_nanoseconds(), ended])
        ended = _nanoseconds()
        if number:  # rows[0][1]: when rank 0 saw the end of the one before
            lower = max(lower, begun - rows[0][1])
        begun = rows[comm.rank][0]
        upper = min(upper, ended - rows[0][0])
    if lower <= 0 <= upper:
        return 0.0, 0.0
    return (lower + upper) / 2e9, (upper - lower) / 2e9


def _nanoseconds() -> int:
    return round(now() * 1e9)
