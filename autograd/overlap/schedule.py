"""One pass of a linear layer as pieces of communication and of matmuls: what is issued, and when it is done."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .machine import Device, Link, item_size


class Pattern(NamedTuple):
    """A matmul and its collective.

    operation  the collective; an all_gather goes before the matmul, a sum behind it
    travels    "k" or "n": the features of the tensor [m, k] or [m, n] that travels
    wgrad      whether the gradient of the weight comes along: "" no, "within" each slice, or "behind" all of them
    """

    operation: str
    travels: str
    wgrad: str = ""

    @property
    def gathers(self) -> bool:
        return self.operation == "all_gather"


TABLE = {
    "all_gather_matmul": Pattern("all_gather", "k"),
    "matmul_reduce_scatter": Pattern("reduce_scatter", "n"),
    "matmul_all_reduce": Pattern("all_reduce", "n"),
    "column_backward": Pattern("reduce_scatter", "k", wgrad="behind"),
    "row_backward": Pattern("all_gather", "n", wgrad="within"),
    "copy_backward": Pattern("all_reduce", "k", wgrad="behind"),
}
PATTERNS = tuple(TABLE)


def most_slices(pattern: str, m: int, ranks: int) -> int:
    """That m rows can be cut into: each takes some of every owner's, where rows have owners."""
    return m if TABLE[pattern].operation == "all_reduce" else m // ranks


COMM, COMPUTE = "comm", "compute"


class Piece(NamedTuple):
    """Something that keeps a lane busy. It starts when the pieces of its lane that stand before it are done, and those
    whose indices are in `after`."""

    lane: str
    seconds: float
    after: tuple[int, ...] = ()


def simulated(pieces: Iterable[Piece]) -> float:
    """When all the pieces are done."""
    free = {COMM: 0.0, COMPUTE: 0.0}
    ends: list[float] = []
    for lane, seconds, after in pieces:
        free[lane] = max([free[lane], *(ends[one] for one in after)]) + seconds
        ends.append(free[lane])
    return max(free.values())


def pipeline_seconds(comm_per_slice: float, matmul_per_slice: float, chunks: int) -> float:
    """A pipeline of two stages in closed form, T(k) = c + (k-1) max(c, g) + g: what slices of a sum have to come to."""
    c, g = comm_per_slice, matmul_per_slice
    return c + (chunks - 1) * max(c, g) + g


@dataclass(frozen=True)
class Work:
    """One layer's pass on one rank: m rows of all ranks, n output and k input features of this rank's forward matmul.

    regather  the input is gathered again beside the gradient of the input ("column_backward" with save_gathered=False)
    """

    pattern: str
    m: int
    n: int
    k: int
    dtype: str
    ranks: int
    link: Link
    device: Device
    regather: bool = False

    @cached_property
    def form(self) -> Pattern:
        return TABLE[self.pattern]

    @cached_property
    def nbytes(self) -> float:
        """Of the full tensor that travels."""
        return float(self.m * (self.k if self.form.travels == "k" else self.n) * item_size(self.dtype))

    @cached_property
    def matmul(self) -> float:
        """Seconds of one; forward, dgrad and wgrad are equally long."""
        return self.device.matmul(self.m, self.n, self.k, self.dtype)

    @cached_property
    def cut(self) -> float:
        """Seconds of what is cut into slices."""
        return self.matmul * (2 if self.form.wgrad == "within" else 1)

    @cached_property
    def t_mm(self) -> float:
        return self.matmul * (2 if self.form.wgrad else 1)

    @cached_property
    def t_comm(self) -> float:
        again = self.collective("all_gather") if self.regather else 0.0
        return self.collective(self.form.operation) + again

    @cached_property
    def rows(self) -> int:
        return most_slices(self.pattern, self.m, self.ranks)

    def collective(self, operation: str, parts: int = 1) -> float:
        return self.link.seconds(operation, self.nbytes / parts, self.ranks)

    def share(self, part: float) -> float:
        """Seconds of a slice of the matmul."""
        return self.cut * part + self.device.overhead

    def schedule(self, method: str, chunks: int, aggregate: bool = False) -> list[Piece]:
        """What is issued, in the order of issue."""
        parts = 1 if method == "bulk" else chunks
        if self.form.gathers:
            return _ring_of_gathers(self, aggregate) if method == "ring" else _slices_of_gathers(self, parts)
        first = [Piece(COMM, self.collective("all_gather"))] if self.regather else []
        if method == "ring":
            return _ring_of_sums(self, first)
        return _slices_of_sums(self, first, parts, exchange=method == "exchange")


def _slices_of_gathers(work: Work, chunks: int) -> list[Piece]:
    """The gathers are issued first. A rank's own rows need none, and hide the first."""
    own = 1 / work.ranks
    pieces = [Piece(COMM, work.collective("all_gather", chunks)) for _ in range(chunks)]
    pieces.append(Piece(COMPUTE, work.share(own)))
    return pieces + [Piece(COMPUTE, work.share((1 - own) / chunks), (one,)) for one in range(chunks)]


def _ring_of_gathers(work: Work, aggregate: bool) -> list[Piece]:
    """p-1 steps bring a block of rows each; with `aggregate` two are multiplied at a time."""
    steps, block = work.ranks - 1, 1 / work.ranks
    pieces = [Piece(COMM, work.collective("send_recv", work.ranks)) for _ in range(steps)]
    pieces.append(Piece(COMPUTE, work.share(block)))
    width = 2 if aggregate else 1
    for start in range(0, steps, width):
        end = min(start + width, steps)
        pieces.append(Piece(COMPUTE, work.share(block * (end - start)), (end - 1,)))
    return pieces


def _slices_of_sums(work: Work, first: list[Piece], chunks: int, exchange: bool) -> list[Piece]:
    """Each slice travels as soon as it is multiplied; wgrad hides the rest. An exchange is added up at the end."""
    operations = [work.form.operation]
    if exchange:
        operations = ["all_to_all", "all_gather"] if work.form.operation == "all_reduce" else ["all_to_all"]
    pieces = list(first)
    for _ in range(chunks):
        pieces.append(Piece(COMPUTE, work.share(1 / chunks) if chunks > 1 else work.cut))
        made = len(pieces) - 1
        pieces += [Piece(COMM, work.collective(one, chunks), (made,)) for one in operations]
    arrived = len(pieces) - 1
    pieces += _wgrad(work)
    if exchange:  # a block of every rank is read, one is written
        nbytes = (work.ranks + 1) / work.ranks * work.nbytes
        pieces.append(Piece(COMPUTE, nbytes / work.device.memory_bandwidth, (arrived,)))
    return pieces


def _ring_of_sums(work: Work, first: list[Piece]) -> list[Piece]:
    """Block by block: multiply, add what has come from the left, send it to the right; a rank's own block is the last.

    An all_reduce then has the sums go round once more. wgrad hides what it can: the last step of a reduce_scatter, or
    the second round."""
    block, step = 1 / work.ranks, work.collective("send_recv", work.ranks)
    add = 3 * work.nbytes / work.ranks / work.device.memory_bandwidth  # two are read, one is written
    reduces_all = work.form.operation == "all_reduce"
    pieces = list(first)
    for number in range(work.ranks):
        came = len(pieces) - 1
        pieces.append(Piece(COMPUTE, work.share(block)))
        last = number == work.ranks - 1
        if last and not reduces_all:
            pieces += _wgrad(work)
        if number:
            pieces.append(Piece(COMPUTE, add, (came,)))
        if not last:
            pieces.append(Piece(COMM, step, (len(pieces) - 1,)))
    if reduces_all:
        added = len(pieces) - 1
        pieces += [Piece(COMM, step, (added,)) for _ in range(work.ranks - 1)]
        pieces += _wgrad(work)
    return pieces


def _wgrad(work: Work) -> list[Piece]:
    """Behind the slices; it waits for what is gathered again, which was issued before all else."""
    return [Piece(COMPUTE, work.matmul, (0,) if work.regather else ())] if work.form.wgrad == "behind" else []
