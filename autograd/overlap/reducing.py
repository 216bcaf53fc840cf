"""Partial products, summed over the ranks as they are made: by slices, around the ring, by exchange, or all at once.

N ranks, this rank r. The whole are N*m rows (reduce-scatter: rank r keeps its m) or any number of rows M (all-reduce).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .gathering import Cut, bounds
from .lanes import Lane, Lanes, Point
from .matmul import add, copy, linear_plus, linear_rows, sum_in_order
from .workspace import Workspace


class Sums(NamedTuple):
    """out = sum over the ranks of a @ w_t + more.

    a      [N, m, k] of a reduce-scatter, [1, M, k] of an all-reduce; more [.., n] alike, or None
    w_t    [k, n]
    out    [m, n] of a reduce-scatter, [M, n] of an all-reduce
    dtype  in which the sums travel"""

    lanes: Lanes
    work: Workspace
    a: Tensor
    w_t: Tensor
    out: Tensor
    dtype: torch.dtype
    more: Tensor | None = None

    def multiply(self, lane: Lane, ranks: slice, at: slice, into: Tensor) -> None:
        """Make this rank's partial product of some rows.   into [q, n, ..]"""
        if self.more is None:
            lane.run(linear_rows, self.a[ranks, at], self.w_t, out=into)
        else:
            lane.run(linear_plus, self.a[ranks, at], self.w_t, self.more[ranks, at], out=into)

    def send(self, at: slice, into: Tensor) -> None:
        """Make it of a slice of all ranks' rows; the lane of communication then waits for it."""
        lane = self.lanes.compute()
        self.multiply(lane, slice(0, len(self.a)), at, into)
        self.lanes.comm.wait(lane.record())

    @property
    def converts(self) -> bool:
        return self.dtype is not self.out.dtype

    def buffer(self, role: str, *shape: int) -> Tensor:
        """Memory [*shape, n] in the type that travels."""
        return self.work.empty(role, (*shape, self.out.shape[1]), self.out, self.dtype)

    def total(self) -> Tensor:
        """Where the sums arrive: `out`, or what is to be converted to it."""
        return self.buffer("total", len(self.out)) if self.converts else self.out


def nothing() -> None:
    """No other work."""


def reduce_scatter(
    sums: Sums, cut: Cut, meanwhile: Callable[[], None] = nothing, begin: Callable[[], None] = nothing
) -> None:
    """The sums of this rank's rows, when the lanes have been joined.

    meanwhile()  issues other work of the caller's, which hides the last of the sums
    begin()      launches what is to travel before the sums; all buffers are there"""
    if cut.method == "ring":
        _scatter_around_the_ring(sums, meanwhile, begin)
    else:
        _scatter_by_slices(sums, bounds(len(sums.out), cut.chunks), cut.method == "exchange", begin)
        meanwhile()


def _scatter_by_slices(sums: Sums, chunks: list[slice], exchange: bool, begin: Callable[[], None]) -> None:
    """Each slice is cut out of every rank's rows, so that all ranks' sums of it can begin."""
    lanes, size = sums.lanes, sums.lanes.nccl.size
    partial = sums.buffer("partial", size * len(sums.out))
    received = sums.buffer("received", size * len(sums.out)) if exchange else partial
    window = sums.work.window  # then a call's result arrives in one too, in place: see from_window
    total = sums.out if exchange or window else sums.total()
    begin()
    for at in chunks:
        here = slice(size * at.start, size * at.stop)
        sent = partial[here].unflatten(0, (size, -1))
        sums.send(at, sent)
        if exchange:
            parts = received[here].unflatten(0, (size, -1))
            lanes.collective("all_to_all", sent, parts)
            lanes.comm.run(sum_in_order, parts, out=total[at])
        else:
            summed = sent[lanes.nccl.rank] if window else total[at]
            lanes.collective("reduce_scatter", sent, summed)
            if window or sums.converts:
                lanes.comm.run(copy, summed, out=sums.out[at])


def _scatter_around_the_ring(sums: Sums, meanwhile: Callable[[], None], begin: Callable[[], None]) -> None:
    """Step i makes the partial product for rank r-1-i, adds what the rank before has summed for it, and passes it on.

    The own rows come last. Two buffers take turns: one is sent while the next is made."""
    lanes, rank, size = sums.lanes, sums.lanes.nccl.rank, sums.lanes.nccl.size
    whole = slice(0, len(sums.out))
    made = sums.buffer("partial", 2, len(sums.out))
    received = sums.buffer("received", len(sums.out))
    total = sums.total()
    begin()
    arrived: Point | None = None
    main = lanes.main
    for step in range(size):
        target = (rank - 1 - step) % size
        last = step == size - 1
        into = total if last else made[step % 2]
        sums.multiply(main, slice(target, target + 1), whole, into[None])
        if last:
            meanwhile()
        if arrived is not None:
            main.wait(arrived)
            main.run(add, received, into, out=into)
        if not last:
            lanes.comm.wait(main.record())
            lanes.send_recv(into, (rank + 1) % size, received, (rank - 1) % size)
            arrived = lanes.comm.record()
        elif sums.converts:
            main.run(copy, into, out=sums.out)


def all_reduce(sums: Sums, cut: Cut, there: Callable[[slice], None] = lambda at: None) -> None:
    """The sums of all rows, when the lanes have been joined.

    there(rows)  called when all that makes some rows of `out` was issued on the lane of communication"""
    if cut.method == "ring":
        _reduce_around_the_ring(sums)
        there(slice(0, len(sums.out)))
        return
    chunks = bounds(len(sums.out), cut.chunks)
    if cut.method == "exchange":
        _reduce_by_exchange(sums, chunks, there)
        return
    lanes, window = sums.lanes, sums.work.window
    total = sums.buffer("partial", len(sums.out)) if window else sums.total()
    for at in chunks:
        sums.send(at, total[at][None])
        lanes.collective("all_reduce", total[at], total[at])
        if window or sums.converts:
            lanes.comm.run(copy, total[at], out=sums.out[at])
        there(at)


def _reduce_by_exchange(sums: Sums, chunks: list[slice], there: Callable[[slice], None]) -> None:
    """Each rank sums its share of a slice, and gives it to the others. Shares are of equal size: the last may have rows
    that nobody has made and nobody reads."""
    lanes, size = sums.lanes, sums.lanes.nccl.size
    shares = [-(-(at.stop - at.start) // size) for at in chunks]
    partial = sums.buffer("partial", size * sum(shares))
    received = sums.buffer("received", size * sum(shares))
    own = sums.work.empty("total", (sum(shares), sums.out.shape[1]), sums.out, sums.out.dtype)
    window = sums.work.window
    apart = [share for at, share in zip(chunks, shares, strict=True) if window or at.stop - at.start < size * share]
    gathered = sums.work.empty("gathered", (size * max(apart, default=0), sums.out.shape[1]), sums.out)
    done = 0
    for at, share in zip(chunks, shares, strict=True):
        here, rows = slice(size * done, size * (done + share)), at.stop - at.start
        sent, parts = partial[here], received[here].unflatten(0, (size, -1))
        sums.send(at, sent[:rows][None])
        lanes.collective("all_to_all", sent, parts)
        mine = own[done : done + share]
        lanes.comm.run(sum_in_order, parts, out=mine)
        if rows == size * share and not window:
            lanes.collective("all_gather", mine, sums.out[at])
        else:
            whole = gathered[: size * share]
            lanes.collective("all_gather", mine, whole)
            lanes.comm.run(copy, whole[:rows], out=sums.out[at])
        there(at)
        done += share


def _reduce_around_the_ring(sums: Sums) -> None:
    """The reduce-scatter around the ring, and the sums around it once more. Blocks of rows may differ by a row."""
    lanes, rank, size = sums.lanes, sums.lanes.nccl.rank, sums.lanes.nccl.size
    main, total = lanes.main, sums.total()
    blocks = _blocks(len(total), size)
    received = sums.buffer("received", max(block.stop - block.start for block in blocks))
    arrived: Point | None = None
    for step in range(size):
        at, after = blocks[(rank - 1 - step) % size], blocks[(rank - 2 - step) % size]
        sums.multiply(main, slice(0, 1), at, total[at][None])
        if arrived is not None:
            main.wait(arrived)
            main.run(add, received[: at.stop - at.start], total[at], out=total[at])
        lanes.comm.wait(main.record())
        into = received[: after.stop - after.start] if step < size - 1 else total[blocks[(rank - 1) % size]]
        lanes.send_recv(total[at], (rank + 1) % size, into, (rank - 1) % size)
        arrived = lanes.comm.record() if step < size - 1 else None
    for step in range(1, size - 1):
        sent, taken = blocks[(rank - step) % size], blocks[(rank - step - 1) % size]
        lanes.send_recv(total[sent], (rank + 1) % size, total[taken], (rank - 1) % size)
    if sums.converts:
        lanes.comm.run(copy, total, out=sums.out)


def _blocks(rows: int, size: int) -> list[slice]:
    """One for each rank; some are empty if there are fewer rows than ranks."""
    ends = [rows * j // size for j in range(size + 1)]
    return [slice(begin, end) for begin, end in itertools.pairwise(ends)]
