"""Sums of partial products over the ranks, while the products are computed: by slices, ring, exchange, or in bulk.

N ranks, this rank r. A reduce-scatter sums N*m rows, of which rank r keeps its m; an all-reduce sums any number M.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .gathering import Chunking, bounds
from .lanes import Lane, Lanes, Point
from .matmul import add, copy, linear_plus, linear_rows, sum_in_order
from .workspace import Workspace


class Sums(NamedTuple):
    """out = sum over the ranks of a @ w_t + more.

    a      reduce-scatter [N, m, k], all-reduce [1, M, k]
    more   reduce-scatter [N, m, n], all-reduce [1, M, n]; or None
    w_t    [k, n]
    out    reduce-scatter [m, n], all-reduce [M, n]
    dtype  in which the sums are communicated"""

    lanes: Lanes
    work: Workspace
    a: Tensor
    w_t: Tensor
    out: Tensor
    dtype: torch.dtype
    more: Tensor | None = None

    def multiply(self, lane: Lane, ranks: slice, at: slice, into: Tensor) -> None:
        """Compute this rank's partial product of some rows.   into [q, n, ..]"""
        if self.more is None:
            lane.run(linear_rows, self.a[ranks, at], self.w_t, out=into)
        else:
            lane.run(linear_plus, self.a[ranks, at], self.w_t, self.more[ranks, at], out=into)

    def send(self, at: slice, into: Tensor) -> None:
        """Compute the partial product of a slice of all ranks' rows, and let the communication lane wait for it."""
        lane = self.lanes.compute()
        self.multiply(lane, slice(0, len(self.a)), at, into)
        self.lanes.comm.wait(lane.record())

    @property
    def converts(self) -> bool:
        return self.dtype is not self.out.dtype

    def buffer(self, role: str, *shape: int) -> Tensor:
        """Return a buffer [*shape, n] of the data type in which sums are communicated."""
        return self.work.empty(role, (*shape, self.out.shape[1]), self.out, self.dtype)

    def total(self) -> Tensor:
        """Return the buffer for the sums: `out`, or one that is converted to it afterwards."""
        return self.buffer("total", len(self.out)) if self.converts else self.out


def no_op() -> None:
    """Do no_op."""


def reduce_scatter(
    sums: Sums, chunking: Chunking, meanwhile: Callable[[], None] = no_op, begin: Callable[[], None] = no_op
) -> None:
    """Launch the sums of this rank's rows. They are complete when the lanes have been joined.

    meanwhile()  issues other work of the caller, which hides the last sums
    begin()      launches the communication that precedes the sums, after all buffers have been allocated"""
    if chunking.method == "ring":
        _scatter_around_the_ring(sums, meanwhile, begin)
    else:
        _scatter_by_slices(sums, bounds(len(sums.out), chunking.chunks), chunking.method == "exchange", begin)
        meanwhile()


def _scatter_by_slices(sums: Sums, chunks: list[slice], exchange: bool, begin: Callable[[], None]) -> None:
    """Each slice contains rows of every rank, so that the sums for all ranks can start."""
    lanes, size = sums.lanes, sums.lanes.nccl.size
    partial = sums.buffer("partial", size * len(sums.out))
    received = sums.buffer("received", size * len(sums.out)) if exchange else partial
    window = sums.work.window  # then results are received in the window too, in place: see from_window
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
    """In step i, compute the partial product for rank r-1-i, add the sum from the previous rank, and send it on.

    This rank's own rows come last. Two buffers alternate: one is sent while the other is computed."""
    lanes, rank, size = sums.lanes, sums.lanes.nccl.rank, sums.lanes.nccl.size
    full = slice(0, len(sums.out))
    products = sums.buffer("partial", 2, len(sums.out))
    received = sums.buffer("received", len(sums.out))
    total = sums.total()
    begin()
    arrived: Point | None = None
    main = lanes.main
    for step in range(size):
        target = (rank - 1 - step) % size
        last = step == size - 1
        into = total if last else products[step % 2]
        sums.multiply(main, slice(target, target + 1), full, into[None])
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


def all_reduce(sums: Sums, chunking: Chunking, on_issued: Callable[[slice], None] = lambda at: None) -> None:
    """Launch the sums of all rows. They are complete when the lanes have been joined.

    on_issued(rows)  called when all work that produces these rows of `out` has been issued on the communication lane"""
    if chunking.method == "ring":
        _reduce_around_the_ring(sums)
        on_issued(slice(0, len(sums.out)))
        return
    chunks = bounds(len(sums.out), chunking.chunks)
    if chunking.method == "exchange":
        _reduce_by_exchange(sums, chunks, on_issued)
        return
    lanes, window = sums.lanes, sums.work.window
    total = sums.buffer("partial", len(sums.out)) if window else sums.total()
    for at in chunks:
        sums.send(at, total[at][None])
        lanes.collective("all_reduce", total[at], total[at])
        if window or sums.converts:
            lanes.comm.run(copy, total[at], out=sums.out[at])
        on_issued(at)


def _reduce_by_exchange(sums: Sums, chunks: list[slice], on_issued: Callable[[slice], None]) -> None:
    """Each rank sums its shard of a slice; an all-gather distributes the result.

    Shards have equal sizes: the last one may end with uninitialized rows, which are not read."""
    lanes, size = sums.lanes, sums.lanes.nccl.size
    shards = [-(-(at.stop - at.start) // size) for at in chunks]
    partial = sums.buffer("partial", size * sum(shards))
    received = sums.buffer("received", size * sum(shards))
    local = sums.work.empty("total", (sum(shards), sums.out.shape[1]), sums.out, sums.out.dtype)
    window = sums.work.window
    apart = [shard for at, shard in zip(chunks, shards, strict=True) if window or at.stop - at.start < size * shard]
    gathered = sums.work.empty("gathered", (size * max(apart, default=0), sums.out.shape[1]), sums.out)
    done = 0
    for at, shard in zip(chunks, shards, strict=True):
        here, rows = slice(size * done, size * (done + shard)), at.stop - at.start
        sent, parts = partial[here], received[here].unflatten(0, (size, -1))
        sums.send(at, sent[:rows][None])
        lanes.collective("all_to_all", sent, parts)
        summed = local[done : done + shard]
        lanes.comm.run(sum_in_order, parts, out=summed)
        if rows == size * shard and not window:
            lanes.collective("all_gather", summed, sums.out[at])
        else:
            full = gathered[: size * shard]
            lanes.collective("all_gather", summed, full)
            lanes.comm.run(copy, full[:rows], out=sums.out[at])
        on_issued(at)
        done += shard


def _reduce_around_the_ring(sums: Sums) -> None:
    """A ring reduce-scatter, then a ring all-gather of the sums. Sizes of blocks differ by at most one row."""
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
    """Return one block per rank; some are empty if there are fewer rows than ranks."""
    ends = [rows * j // size for j in range(size + 1)]
    return [slice(begin, end) for begin, end in itertools.pairwise(ends)]
