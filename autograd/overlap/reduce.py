"""Sums of partial products over the ranks, while the products are computed: by slices, ring, exchange, or in bulk.

N ranks, this rank r. A reduce-scatter sums N*m rows, of which rank r keeps its m; an all-reduce sums any number M.
Without overlap, the sums have one part with all rows.

    sums = reduce_scatter(p, out, dtype)                    # allocates, launches nothing
    for part in sums:
        lane = sums.lane()
        lane.run(linear_rows, part.of(x), w.t(), out=part.data)
        sums.launch(part, lane)
    sums.finish()                                           # of a reduce-scatter; complete when the lanes are joined
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .gather import Block, blocks_of, bounds, by_rank
from .lanes import Lane, Pass, Point, Serial
from .matmul import add, copy, sum_in_order


class Sums:
    """out = the sum over the ranks, communicated in `dtype`; None: that of out. Iterate over the parts, the Blocks of
    which this rank computes a product next, into `data`."""

    def __init__(self, p: Pass, out: Tensor, dtype: torch.dtype | None) -> None:
        self.p: Any = p  # `Lanes` for a ring
        self.out, self.dtype = out, dtype or out.dtype
        self.rows, self.columns = out.shape
        self.converts = self.dtype is not out.dtype

    def buffer(self, role: str, *shape: int) -> Tensor:
        """Return a buffer [*shape, n] of the data type in which sums are communicated."""
        return self.p.buffers.empty(role, (*shape, self.columns), self.out, self.dtype)

    def total(self) -> Tensor:
        """Return the buffer for the sums: `out`, or one that is converted to it afterwards."""
        return self.buffer("total", self.rows) if self.converts else self.out

    def __iter__(self) -> Iterator[Block]:
        raise NotImplementedError

    def lane(self) -> Lane | Serial:
        """Return the lane for the next product."""
        return self.p.compute()

    def launch(self, part: Block, lane: Lane | Serial) -> slice | None:
        """Launch the sums of a part whose product has been issued on the lane. An all-reduce returns the rows of `out`
        that are complete after the work issued on the communication lane, if any."""
        raise NotImplementedError

    def finish(self) -> None:
        """Issue what should come after the other work of the pass: the last addition of a ring."""


class _Ring(Sums):
    """In step i, compute the partial product for rank r-1-i, add the sum from the previous rank, and send it on."""

    arriving: Tensor
    _arrived: Point | None = None

    def lane(self) -> Lane | Serial:
        return self.p.main

    def add_arrived(self, product: Tensor) -> None:
        if self._arrived is not None:
            self.p.main.wait(self._arrived)
            self.p.main.run(add, self.arriving[: product.shape[0]], product, out=product)

    def send_on(self, product: Tensor, rows: int) -> None:
        """Send to the next rank, and receive this number of rows from the previous one."""
        self.p.comm.wait_lane(self.p.main)
        self.p.send_recv(product, self.arriving[:rows])
        self._arrived = self.p.comm.record()


# ---------------------------------------------------------------------------------------------- reduce-scatter


def reduce_scatter(p: Pass, out: Tensor, dtype: torch.dtype | None) -> Sums:
    """Return the sums of this rank's rows, out [m, n], by the schedule of p."""
    kind = {"off": ReduceScatter, "ring": RingReduceScatter}.get(p.method, SlicedReduceScatter)
    return kind(p, out, dtype)


class ReduceScatter(Sums):
    """Without overlap: one part with all rows."""

    def __iter__(self) -> Iterator[Block]:
        rows = self.p.size * self.rows
        yield Block(self.buffer("partial", rows), slice(0, rows))

    def launch(self, part: Block, lane: Lane | Serial) -> None:
        total = self.total()
        self.p.collective("reduce_scatter", part.data, total)
        if self.converts:
            lane.run(copy, total, out=self.out)


class SlicedReduceScatter(Sums):
    """Each slice contains rows of every rank, so its sums can start when its product is complete. One slice: "bulk"."""

    def __init__(self, p: Pass, out: Tensor, dtype: torch.dtype | None) -> None:
        super().__init__(p, out, dtype)
        self._partial = self.buffer("partial", p.size * self.rows)
        self._received = self.buffer("received", p.size * self.rows) if p.method == "exchange" else None
        self._in_window = p.buffers.window  # then sums are received in the window too, in place: see gather_rows
        self._total = out if p.method == "exchange" or self._in_window else self.total()

    def __iter__(self) -> Iterator[Block]:
        for at in bounds(self.rows, self.p.chunks):
            yield Block(self._of_all_ranks(self._partial, at), at, slice(0, self.p.size), self.p.size)

    def _of_all_ranks(self, buffer: Tensor, at: slice) -> Tensor:
        return by_rank(buffer[self.p.size * at.start : self.p.size * at.stop], self.p.size)

    def launch(self, part: Block, lane: Lane | Serial) -> None:
        comm = self.p.comm
        comm.wait_lane(lane)
        if self._received is not None:
            received = self._of_all_ranks(self._received, part.at)
            self.p.collective("all_to_all", part.data, received)
            comm.run(sum_in_order, received, out=self.out[part.at])
            return
        summed = part.data[self.p.rank] if self._in_window else self._total[part.at]
        self.p.collective("reduce_scatter", part.data, summed)
        if self._in_window or self.converts:
            comm.run(copy, summed, out=self.out[part.at])


class RingReduceScatter(_Ring):
    """This rank's own rows come last. Two buffers alternate: one is sent while the other is computed, and the sum that
    arrives is added only after that."""

    def __init__(self, p: Pass, out: Tensor, dtype: torch.dtype | None) -> None:
        super().__init__(p, out, dtype)
        self._products = self.buffer("partial", 2, self.rows)
        self.arriving = self.buffer("received", self.rows)
        self._total = self.total()

    def __iter__(self) -> Iterator[Block]:
        for step in range(self.p.size):
            target = (self.p.rank - 1 - step) % self.p.size
            into = self._total if target == self.p.rank else self._products[step % 2]
            yield Block(into[None], slice(0, self.rows), slice(target, target + 1), self.p.size)

    def launch(self, part: Block, lane: Lane | Serial) -> None:
        if part.ranks != slice(self.p.rank, self.p.rank + 1):  # the own rows: see finish
            self.add_arrived(part.data[0])
            self.send_on(part.data[0], self.rows)

    def finish(self) -> None:
        self.add_arrived(self._total)
        if self.converts:
            self.p.main.run(copy, self._total, out=self.out)


# ---------------------------------------------------------------------------------------------- all-reduce


def all_reduce(p: Pass, out: Tensor, dtype: torch.dtype | None) -> Sums:
    """Return the sums of all rows, out [M, n], by the schedule of p."""
    kind = {"exchange": ExchangeAllReduce, "ring": RingAllReduce}.get(p.method, AllReduce)
    return kind(p, out, dtype)


class AllReduce(Sums):
    """Each slice is summed in place, in `out` or in a buffer that is copied to it."""

    def __iter__(self) -> Iterator[Block]:
        total = self.buffer("partial", self.rows) if self.p.buffers.window else self.total()
        for at in bounds(self.rows, self.p.chunks):
            yield Block(total[at] if self.p.chunks > 1 else total, at)

    def launch(self, part: Block, lane: Lane | Serial) -> slice:
        self.p.comm.wait_lane(lane)
        self.p.collective("all_reduce", part.data, part.data)
        if self.converts or self.p.buffers.window:
            self.p.comm.run(copy, part.data, out=self.out[part.at])
        return part.at


class ExchangeAllReduce(Sums):
    """Each rank sums its shard of a slice; an all-gather distributes the result.

    Shards have equal sizes: the last one may end with uninitialized rows, which do not reach `out`."""

    def __init__(self, p: Pass, out: Tensor, dtype: torch.dtype | None) -> None:
        super().__init__(p, out, dtype)
        self._slices = bounds(self.rows, p.chunks)
        self._shard = -(-max(at.stop - at.start for at in self._slices) // p.size)  # rows
        rows, padded = len(self._slices) * self._shard, p.size * self._shard
        self._partial = self.buffer("partial", p.size * rows)
        self._received = self.buffer("received", p.size * rows)
        self._summed = p.buffers.empty("total", (rows, self.columns), out)
        fits = p.size * rows == self.rows and not p.buffers.window  # then the sums are gathered into `out`
        self._gathered = None if fits else p.buffers.empty("gathered", (padded, self.columns), out)
        self._done = 0  # rows of the shards

    def __iter__(self) -> Iterator[Block]:
        for at in self._slices:
            yield Block(self._partial[self.p.size * self._done :][: at.stop - at.start], at)
            self._done += self._shard

    def launch(self, part: Block, lane: Lane | Serial) -> slice:
        p, comm = self.p, self.p.comm
        mine = slice(self._done, self._done + self._shard)
        here = slice(p.size * mine.start, p.size * mine.stop)
        received, summed = by_rank(self._received[here], p.size), self._summed[mine]
        comm.wait_lane(lane)
        p.collective("all_to_all", self._partial[here], received)
        comm.run(sum_in_order, received, out=summed)
        p.collective("all_gather", summed, self.out[part.at] if self._gathered is None else self._gathered)
        if self._gathered is not None:
            comm.run(copy, self._gathered[: part.data.shape[0]], out=self.out[part.at])
        return part.at


class RingAllReduce(_Ring):
    """A ring reduce-scatter, then a ring all-gather of the sums. Sizes of blocks differ by at most one row."""

    def __init__(self, p: Pass, out: Tensor, dtype: torch.dtype | None) -> None:
        super().__init__(p, out, dtype)
        self._total = self.total()
        self._blocks = blocks_of(self.rows, p.size)
        self.arriving = self.buffer("received", max(block.stop - block.start for block in self._blocks))
        self._step = 0

    def _block(self, steps: int) -> slice:
        """Return the rows that rank r - steps keeps after the reduce-scatter."""
        return self._blocks[(self.p.rank - steps) % self.p.size]

    def __iter__(self) -> Iterator[Block]:
        for step in range(self.p.size):
            self._step, at = step, self._block(1 + step)
            yield Block(self._total[at], at)

    def launch(self, part: Block, lane: Lane | Serial) -> slice | None:
        p, after = self.p, self._block(2 + self._step)
        self.add_arrived(part.data)
        if self._step < p.size - 1:
            self.send_on(part.data, after.stop - after.start)
            return None
        p.comm.wait_lane(p.main)
        for step in range(p.size - 1):
            p.send_recv(self._total[self._block(step)], self._total[self._block(step + 1)])
        if self.converts:
            p.comm.run(copy, self._total, out=self.out)
        return slice(0, self.rows)
