"""Sums of partial products over the ranks, while the products are computed: by slices, ring, exchange, or in bulk.

N ranks, this rank r. A reduce-scatter sums N*m rows, of which rank r keeps its m; an all-reduce sums any number M.
Without overlap, the sums have one part with all rows.

    sums = reduce_scatter(p, out, dtype)                    # allocates, launches nothing
    for part in sums:
        lane = sums.lane()
        lane.run(linear_rows, part.of(x), w.t(), out=part.partial)
        sums.launch(part, lane)
    sums.finish()                                           # of a reduce-scatter; complete when the lanes are joined
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .gather import blocks_of, bounds, by_rank
from .lanes import Lane, Pass, Point, Serial
from .matmul import add, copy, sum_in_order


class Part(NamedTuple):
    """The rows of which this rank computes a product next, into `partial` [.., out].

    Those at `rows` of q neighboring ranks out of `size`, partial [q, rows, out]; ranks None: those at `rows` of the
    whole tensor, partial [rows, out]"""

    partial: Tensor
    rows: slice
    ranks: slice | None = None
    size: int = 1

    def of(self, full: Tensor) -> Tensor:
        """Return these rows of a tensor [M, k]."""
        if self.ranks is not None:
            return by_rank(full, self.size)[self.ranks, self.rows]
        return full if self.rows.stop - self.rows.start == full.shape[0] else full[self.rows]


class Sums:
    """out = the sum over the ranks, communicated in `dtype`; None: that of out."""

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

    def lane(self) -> Lane | Serial:
        """Return the lane for the next product."""
        return self.p.compute()


# ---------------------------------------------------------------------------------------------- reduce-scatter


def reduce_scatter(p: Pass, out: Tensor, dtype: torch.dtype | None) -> ReduceScatter:
    """Return the sums of this rank's rows, out [m, n], by the schedule of p."""
    if p.method == "off":
        return ReduceScatter(p, out, dtype)
    return (RingReduceScatter if p.method == "ring" else SlicedReduceScatter)(p, out, dtype)


class ReduceScatter(Sums):
    """Without overlap: one part with all rows."""

    def __init__(self, p: Pass, out: Tensor, dtype: torch.dtype | None) -> None:
        super().__init__(p, out, dtype)
        self._partial = self.buffer("partial", p.size * self.rows)

    def __iter__(self) -> Iterator[Part]:
        yield Part(self._partial, slice(0, self.p.size * self.rows))

    def launch(self, part: Part, lane: Lane | Serial) -> None:
        """Launch the sums of a part whose product has been issued on the lane."""
        total = self.total()
        self.p.collective("reduce_scatter", part.partial, total)
        if self.converts:
            self.p.comm.run(copy, total, out=self.out)

    def finish(self) -> None:
        """Issue what should come after the caller's other work: the last addition of a ring."""


class SlicedReduceScatter(ReduceScatter):
    """Each slice contains rows of every rank, so its sums can start when its product is complete. One slice: "bulk"."""

    def __init__(self, p: Pass, out: Tensor, dtype: torch.dtype | None) -> None:
        super().__init__(p, out, dtype)
        self._received = self.buffer("received", p.size * self.rows) if p.method == "exchange" else None
        self._in_window = p.buffers.window  # then sums are received in the window too, in place: see gather_rows
        self._total = out if p.method == "exchange" or self._in_window else self.total()

    def __iter__(self) -> Iterator[Part]:
        for at in bounds(self.rows, self.p.chunks):
            yield Part(self._of_all_ranks(self._partial, at), at, slice(0, self.p.size), self.p.size)

    def _of_all_ranks(self, buffer: Tensor, at: slice) -> Tensor:
        return by_rank(buffer[self.p.size * at.start : self.p.size * at.stop], self.p.size)

    def launch(self, part: Part, lane: Lane | Serial) -> None:
        comm = self.p.comm
        comm.wait_lane(lane)
        if self._received is not None:
            received = self._of_all_ranks(self._received, part.rows)
            self.p.collective("all_to_all", part.partial, received)
            comm.run(sum_in_order, received, out=self.out[part.rows])
            return
        summed = part.partial[self.p.rank] if self._in_window else self._total[part.rows]
        self.p.collective("reduce_scatter", part.partial, summed)
        if self._in_window or self.converts:
            comm.run(copy, summed, out=self.out[part.rows])


class RingReduceScatter(ReduceScatter):
    """In step i, compute the partial product for rank r-1-i, add the sum from the previous rank, and send it on.

    This rank's own rows come last. Two buffers alternate: one is sent while the other is computed."""

    def __init__(self, p: Pass, out: Tensor, dtype: torch.dtype | None) -> None:
        Sums.__init__(self, p, out, dtype)
        self._products = self.buffer("partial", 2, self.rows)
        self._arriving = self.buffer("received", self.rows)
        self._total = self.total()
        self._arrived: Point | None = None

    def __iter__(self) -> Iterator[Part]:
        for step in range(self.p.size):
            target = (self.p.rank - 1 - step) % self.p.size
            into = self._total if target == self.p.rank else self._products[step % 2]
            yield Part(into[None], slice(0, self.rows), slice(target, target + 1), self.p.size)

    def lane(self) -> Lane | Serial:
        return self.p.main

    def launch(self, part: Part, lane: Lane | Serial) -> None:
        if part.ranks == slice(self.p.rank, self.p.rank + 1):
            return  # see finish
        self._add_arrived(part.partial[0])
        self.p.comm.wait_lane(self.p.main)
        self.p.send_recv(part.partial[0], self._arriving)
        self._arrived = self.p.comm.record()

    def _add_arrived(self, product: Tensor) -> None:
        if self._arrived is not None:
            self.p.main.wait(self._arrived)
            self.p.main.run(add, self._arriving, product, out=product)

    def finish(self) -> None:
        self._add_arrived(self._total)
        if self.converts:
            self.p.main.run(copy, self._total, out=self.out)


# ---------------------------------------------------------------------------------------------- all-reduce


def all_reduce(p: Pass, out: Tensor, dtype: torch.dtype | None) -> AllReduce:
    """Return the sums of all rows, out [M, n], by the schedule of p."""
    if p.method == "exchange":
        return ExchangeAllReduce(p, out, dtype)
    return (RingAllReduce if p.method == "ring" else AllReduce)(p, out, dtype)


class AllReduce(Sums):
    """Each slice is summed in place, in `out` or in a buffer that is copied to it."""

    def __init__(self, p: Pass, out: Tensor, dtype: torch.dtype | None) -> None:
        super().__init__(p, out, dtype)
        self._copies = p.buffers.window or self.converts
        self._total = self.buffer("partial", self.rows) if p.buffers.window else self.total()

    def __iter__(self) -> Iterator[Part]:
        for at in bounds(self.rows, self.p.chunks):
            yield Part(self._total[at] if self.p.chunks > 1 else self._total, at)

    def launch(self, part: Part, lane: Lane | Serial) -> slice | None:
        """Launch the sums of a part whose product has been issued on the lane. Return the rows of `out` that are
        complete after the work issued on the communication lane, if any."""
        self.p.comm.wait_lane(lane)
        self.p.collective("all_reduce", part.partial, part.partial)
        if self._copies:
            self.p.comm.run(copy, part.partial, out=self.out[part.rows])
        return part.rows


class ExchangeAllReduce(AllReduce):
    """Each rank sums its shard of a slice; an all-gather distributes the result.

    Shards have equal sizes: the last one may end with uninitialized rows, which are not read."""

    def __init__(self, p: Pass, out: Tensor, dtype: torch.dtype | None) -> None:
        Sums.__init__(self, p, out, dtype)
        self._slices = bounds(self.rows, p.chunks)
        self._shards = [-(-(at.stop - at.start) // p.size) for at in self._slices]
        rows = sum(self._shards)
        apart = [shard for at, shard in zip(self._slices, self._shards, strict=True) if not self._fits(at, shard)]
        self._partial = self.buffer("partial", p.size * rows)
        self._received = self.buffer("received", p.size * rows)
        self._summed = p.buffers.empty("total", (rows, out.shape[1]), out)
        self._gathered = p.buffers.empty("gathered", (p.size * max(apart, default=0), out.shape[1]), out)
        self._done = 0  # rows of the shards

    def _fits(self, at: slice, shard: int) -> bool:
        """Return whether the sums of a slice can be gathered into `out`."""
        return at.stop - at.start == self.p.size * shard and not self.p.buffers.window

    def __iter__(self) -> Iterator[Part]:
        for at, shard in zip(self._slices, self._shards, strict=True):
            sent = self._partial[self.p.size * self._done :][: at.stop - at.start]
            yield Part(sent, at)
            self._done += shard

    def launch(self, part: Part, lane: Lane | Serial) -> slice | None:
        p, at = self.p, part.rows
        shard = -(-(at.stop - at.start) // p.size)
        here = slice(p.size * self._done, p.size * (self._done + shard))
        received, summed = self._received[here].unflatten(0, (p.size, -1)), self._summed[self._done :][:shard]
        p.comm.wait_lane(lane)
        p.collective("all_to_all", self._partial[here], received)
        p.comm.run(sum_in_order, received, out=summed)
        if self._fits(at, shard):
            p.collective("all_gather", summed, self.out[at])
        else:
            gathered = self._gathered[: p.size * shard]
            p.collective("all_gather", summed, gathered)
            p.comm.run(copy, gathered[: at.stop - at.start], out=self.out[at])
        return at


class RingAllReduce(AllReduce):
    """A ring reduce-scatter, then a ring all-gather of the sums. Sizes of blocks differ by at most one row."""

    def __init__(self, p: Pass, out: Tensor, dtype: torch.dtype | None) -> None:
        Sums.__init__(self, p, out, dtype)
        self._total = self.total()
        self._blocks = blocks_of(self.rows, p.size)
        self._arriving = self.buffer("received", max(block.stop - block.start for block in self._blocks))
        self._arrived: Point | None = None
        self._step = 0

    def _block(self, steps: int) -> slice:
        """Return the rows that rank r - steps keeps after the reduce-scatter."""
        return self._blocks[(self.p.rank - steps) % self.p.size]

    def __iter__(self) -> Iterator[Part]:
        for step in range(self.p.size):
            self._step, at = step, self._block(1 + step)
            yield Part(self._total[at], at)

    def lane(self) -> Lane | Serial:
        return self.p.main

    def launch(self, part: Part, lane: Lane | Serial) -> slice | None:
        p, product, after = self.p, part.partial, self._block(2 + self._step)
        if self._arrived is not None:
            p.main.wait(self._arrived)
            p.main.run(add, self._arriving[: product.shape[0]], product, out=product)
        p.comm.wait_lane(p.main)
        if self._step < p.size - 1:
            p.send_recv(product, self._arriving[: after.stop - after.start])
            self._arrived = p.comm.record()
            return None
        for step in range(p.size - 1):
            p.send_recv(self._total[self._block(step)], self._total[self._block(step + 1)])
        if self.converts:
            p.comm.run(copy, self._total, out=self.out)
        return slice(0, self.rows)
