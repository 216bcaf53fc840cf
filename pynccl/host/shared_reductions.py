"""The collectives that reduce, through shared memory. Peers' slots are read in place, in the order of the ranks.

reduce and reduce_scatter go as the copies do, see `shared_collectives`: each rank reduces what is its own. So does a
small all_reduce, of which each rank reduces everything. A larger one is cut into pieces, and goes in one of two ways:

    shards   each rank reduces its shard of a piece, and the others fetch it. Two steps of a pipeline.
    chain    a piece is handed on from rank to rank, in one slot, where each adds its part, and fetched at the end. That
             takes fewer copies, but as many steps as there are ranks and pieces: for many pieces. It is faster for a
             large reduce_scatter too, and slower for a reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import memmove
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..bindings.abi import ITEMSIZE
from .memory import view
from .operation import Operation
from .reduction import Running, prepared
from .segment import SLOTS
from .shared import ALL, NOBODY, SharedMemory
from .shared_collectives import ALIGNMENT, Run, aligned, begin, block_of, cut, fits_slot, nothing, shared_of

# Up to here every rank of an all_reduce reduces everything: half the steps.
DIRECT_BYTES = 64 << 10
# Pieces for each rank from which on a chain is faster. It begins and ends with steps in which only some ranks work.
CHAIN_PIECES = 4
_KEPT_PARTS = 512  # of slots, as tensors


class _Sum(NamedTuple):
    """What a rank puts into its slot, and what it reduces: its own part with that in each peer's slot."""

    blocks: int  # of a slot
    put: Sequence[tuple[int, int]]  # block, and which block of the contribution goes there
    own: int  # block of the contribution
    reads: tuple[int, ...]  # block of each rank's slot; nothing if this rank reduces nothing


def _to_all(op: Operation) -> _Sum:
    return _Sum(1, [(0, 0)], 0, (0,) * op.comm.size)


def _to_root(op: Operation) -> _Sum:
    return _Sum(1, [], 0, (0,) * op.comm.size) if op.comm.rank == op.peer else _Sum(1, [(0, 0)], 0, ())


def _to_each(op: Operation) -> _Sum:
    return _to_each_of(op.comm.rank, op.comm.size)


@lru_cache(64)
def _to_each_of(me: int, ranks: int) -> _Sum:
    put = [(block_of(me, peer), peer) for peer in range(ranks) if peer != me]
    reads = tuple(block_of(rank, me) if rank != me else 0 for rank in range(ranks))
    return _Sum(ranks - 1, put, me, reads)


def _parts(
    shared: SharedMemory, large: bool, slot: int, reads: tuple[int, ...], dtype: torch.dtype, stride: int, mine: Tensor
) -> list[Tensor]:
    """What there is in each rank's slot, in the order of the ranks; `mine` instead of this rank's."""
    count = mine.numel()
    key = large, slot, reads, dtype, stride, count
    known = shared.parts.get(key)
    if known is None:
        if len(shared.parts) >= _KEPT_PARTS:
            shared.parts.clear()
        known = shared.parts[key] = [
            segment.view(large, slot, dtype)[block * stride // dtype.itemsize :][:count]
            for segment, block in zip(shared.segments, reads, strict=True)
        ]
    parts = known.copy()
    parts[shared.rank] = mine
    return parts


class _Contribution(NamedTuple):
    """What this rank adds: so many blocks of its send buffer, times the scalar of a pre-multiplied sum."""

    address: int
    itemsize: int
    mine: Tensor  # the block that it reduces itself
    whole: Tensor | None  # which holds the memory, if it is no user's


def _contribution(op: Operation, own: int, blocks: int) -> _Contribution:
    if op.premul is None:
        address = op.send_ptr + own * op.nbytes
        return _Contribution(op.send_ptr, ITEMSIZE[op.dtype], view(address, op.count, op.dtype), None)
    whole = op.premul.apply(view(op.send_ptr, op.count * blocks, op.dtype))
    mine = whole[own * op.count :][: op.count]
    return _Contribution(whole.data_ptr(), whole.element_size(), mine, whole)


def _part(whole: Tensor, start: int, count: int) -> Tensor:
    return whole if count == whole.numel() else whole[start : start + count]


def _reduction(op: Operation, how: _Sum, blocks: int) -> Run:
    """blocks: of op.count elements that the contribution has"""
    shared, n, needed = shared_of(op), op.nbytes, ALL if how.reads else NOBODY
    own, stride = shared.segments[shared.rank], aligned(n)
    fits, is_large = fits_slot(shared, stride * how.blocks)
    put = [(block * stride, op.send_ptr + source * n) for block, source in how.put]
    combines: list[Callable[[], object] | None] = [None] * SLOTS  # made when they are first needed
    at_once, peers = fits and op.premul is None, shared.peers

    def reduce() -> None:
        shared.begin(op.label(), n, needed)
        if not at_once or (is_large and not shared.large()):
            _reduce_pieces(op, how, blocks)
            return
        base = own.slot(is_large, shared.room())
        for offset, source in put:
            memmove(base + offset, source, n)
        slot = shared.post()
        if how.reads:
            combine = combines[slot]
            if combine is None:  # while the peers are on their way
                mine = _contribution(op, how.own, blocks).mine
                parts = _parts(shared, is_large, slot, how.reads, mine.dtype, stride, mine)
                combine = combines[slot] = prepared(parts, view(op.recv_ptr, op.count, op.dtype), op.dtype, op.op)
            shared.wait(peers)
            combine()
        if is_large:
            shared.end_large()

    return reduce


def _reduce_pieces(op: Operation, how: _Sum, blocks: int) -> None:
    """The same, of more than a slot holds, or with a scalar."""
    shared = shared_of(op)
    large = shared.large()
    source = _contribution(op, how.own, blocks)
    mine, size = source.mine, source.itemsize
    n = op.count * size
    stride, pieces = cut(n, shared.slot_bytes(large) // how.blocks)
    own = shared.segments[shared.rank]
    out = view(op.recv_ptr, op.count, op.dtype) if how.reads else mine

    def fill(at: int) -> None:
        start, length = pieces[at]
        base = own.slot(large, shared.room())
        for block, which in how.put:
            memmove(base + block * stride, source.address + which * n + start, length)

    fill(0)
    for at, (start, length) in enumerate(pieces):
        slot = shared.post()
        if at + 1 < len(pieces):
            fill(at + 1)
        if how.reads:
            first, count = start // size, length // size
            shared.wait(shared.peers)
            parts = _parts(shared, large, slot, how.reads, mine.dtype, stride, _part(mine, first, count))
            prepared(parts, _part(out, first, count), op.dtype, op.op)()
    shared.end_large()


def reduce(op: Operation) -> Run:
    return _reduction(op, _to_root(op), 1) if op.count else nothing(op)


def reduce_scatter(op: Operation) -> Run:
    if not op.count:
        return nothing(op)
    return _chain(op, range(op.comm.size)) or _reduction(op, _to_each(op), op.comm.size)


def all_reduce(op: Operation) -> Run:
    """Every rank reduces everything where that is little, or where half the steps are worth more: between two ranks it
    moves as much as if each reduced a half for both."""
    if not op.count:
        return nothing(op)
    if op.comm.size == 2 or (op.premul is None and op.nbytes <= DIRECT_BYTES):
        return _reduction(op, _to_all(op), 1)

    def in_pieces() -> None:
        shared = shared_of(op)
        begin(shared, op, ALL)
        _Shards(op, shared.large()).run()
        shared.end_large()

    return _chain(op, [ALL]) or in_pieces


class _Shards:
    """A slot has a block for each rank: what this rank adds to that rank's shard of the piece; and in this rank's own
    block, the result for its shard of the piece before."""

    def __init__(self, op: Operation, large: bool) -> None:
        self._op, self._comm, self._shared, self._large = op, op.comm, shared_of(op), large
        source = _contribution(op, 0, 1)
        self._source, self._out = source.mine, view(op.recv_ptr, op.count, op.dtype)
        self._wide, self._size, self._narrow = source.address, source.itemsize, ITEMSIZE[op.dtype]
        self._slots = [segment.slot for segment in self._shared.segments]
        nbytes, ranks = self._source.nbytes, op.comm.size
        most = self._shared.slot_bytes(large) // ranks // ALIGNMENT * ALIGNMENT
        piece, _ = cut(nbytes, most * ranks)
        self._stride = min(aligned(-(-piece // ranks)), most)  # of a block, hence of a shard
        piece = self._stride * ranks
        self._pieces = [(start, min(piece, nbytes - start)) for start in range(0, nbytes, piece)]
        self._reads = (op.comm.rank,) * ranks

    def run(self) -> None:
        shared, last = self._shared, len(self._pieces)
        before = 0
        self._fill(0)
        for step in range(last + 1):
            slot = shared.post()
            if step >= 2:
                self._fetch(step - 2, before)
            if step + 1 < last:
                self._fill(step + 1)
            elif step < last:
                shared.room()
            shared.wait(shared.peers)
            if step < last:
                self._add(step, slot)
            before = slot
        self._fetch(last - 1, before)

    def _shard(self, piece: int, rank: int) -> tuple[int, int]:
        """Its first byte and its bytes in the source."""
        start, length = self._pieces[piece]
        return start + rank * self._stride, max(min(self._stride, length - rank * self._stride), 0)

    def _fill(self, piece: int) -> None:
        base = self._slots[self._comm.rank](self._large, self._shared.room())
        for peer in self._comm.peers:
            start, n = self._shard(piece, peer)
            memmove(base + peer * self._stride, self._wide + start, n)

    def _fetch(self, piece: int, slot: int) -> None:
        """The peers' results of a piece."""
        size, narrow = self._size, self._narrow
        for peer in self._comm.peers:
            start, n = self._shard(piece, peer)
            result = self._slots[peer](self._large, slot) + peer * self._stride
            memmove(self._op.recv_ptr + start // size * narrow, result, n // size * narrow)

    def _add(self, piece: int, slot: int) -> None:
        """Reduce this rank's shard of a piece, and put it beside the next one."""
        me, op = self._comm.rank, self._op
        start, n = self._shard(piece, me)
        if not n:
            return
        first, count = start // self._size, n // self._size
        mine = self._source[first : first + count]
        parts = _parts(self._shared, self._large, slot, self._reads, mine.dtype, self._stride, mine)
        result = self._out[first : first + count]
        prepared(parts, result, op.dtype, op.op)()
        target = self._slots[me](self._large, (slot + 1) % SLOTS) + me * self._stride
        memmove(target, op.recv_ptr + first * self._narrow, count * self._narrow)


def _chain(op: Operation, readers: Sequence[int]) -> Run | None:
    """readers: for each block of the send buffer the rank that gets its sum, or ALL. None where a chain is slower."""
    shared, ranks = shared_of(op), op.comm.size
    running = Running.of(op.dtype, op.op)
    enough = len(readers) * op.nbytes >= CHAIN_PIECES * ranks * shared.slot_bytes(True)
    if ranks == 2 or not enough or op.premul is not None or running is None:
        return None

    def in_chain() -> None:
        begin(shared, op, ALL)
        _Chain(op, shared.large(), running, readers).run()
        shared.end_large()

    return in_chain


class _Piece(NamedTuple):
    """A part of the send buffer, in elements; who gets its sum, and where in the receive buffer."""

    start: int
    elements: int
    reader: int
    to: int


class _Chain:
    """The slots of all ranks are used in turn, by all of them: hence everybody waits for everybody in each step, and
    before the first one, when what was in the slots has been read."""

    def __init__(self, op: Operation, large: bool, running: Running, readers: Sequence[int]) -> None:
        self._op, self._shared, self._large, self._running = op, shared_of(op), large, running
        self._source = view(op.send_ptr, op.count * len(readers), op.dtype)
        reads = any(reader in (ALL, op.comm.rank) for reader in readers)
        self._out = view(op.recv_ptr, op.count, op.dtype) if reads else None
        size = running.dtype.itemsize
        cuts = cut(op.count * size, self._shared.slot_bytes(large))[1]
        self._pieces = [
            _Piece(block * op.count + start // size, nbytes // size, reader, start // size)
            for block, reader in enumerate(readers)
            for start, nbytes in cuts
        ]
        self._totals: dict[tuple[int, int], Tensor] = {}

    def run(self) -> None:
        shared, ranks, last = self._shared, self._op.comm.size, len(self._pieces)
        self._step()
        for step in range(last + ranks):
            if 0 <= step - shared.rank < last:
                self._add(step - shared.rank)
            if step >= ranks:
                self._fetch(step - ranks)
            self._step()

    def _step(self) -> None:
        self._shared.room()
        self._shared.post()
        self._shared.wait(self._shared.peers)

    def _total(self, piece: int) -> Tensor:
        """Where it is handed on."""
        segments = self._shared.segments
        at, count = piece % (len(segments) * SLOTS), self._pieces[piece].elements
        if (at, count) not in self._totals:
            slot, rank = divmod(at, len(segments))
            self._totals[at, count] = segments[rank].view(self._large, slot, self._running.dtype)[:count]
        return self._totals[at, count]

    def _add(self, piece: int) -> None:
        start, count, _, _ = self._pieces[piece]
        total, own = self._total(piece), self._source[start : start + count]
        if self._shared.rank == 0:
            total.copy_(own)
            return
        self._running.add(total, own)
        if self._shared.rank == len(self._shared.peers):
            self._running.end(total, self._op.comm.size)

    def _fetch(self, piece: int) -> None:
        _, count, reader, to = self._pieces[piece]
        if self._out is not None and reader in (ALL, self._shared.rank):
            self._out[to : to + count].copy_(self._total(piece))
