"""The eight collectives through shared memory: what a rank puts into its slots, and what it reads in those of others.

Each function prepares one operation, as those of `algorithms` do. What fits into a small slot takes one step, with all
addresses and views made beforehand. More goes in pieces, one a step; a rank fills its slot for the next piece before it
waits for this one, so it copies while others still do. A large all_reduce reduces a shard per rank of each piece and
puts the result beside its part of the next piece, from where the others fetch it. Reductions read the peers' slots in
place, in the order of the ranks.
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
from .reduction import prepared
from .segment import SLOTS
from .shared import ALL, NOBODY, SharedMemory

# Up to here every rank of an all_reduce reduces everything: half the steps.
DIRECT_BYTES = 64 << 10
_ALIGNMENT = 64
_KEPT_PARTS = 512  # of slots, as tensors
Run = Callable[[], None]


class _Copy(NamedTuple):
    """Bytes of a user's buffer that go into a slot or come from one: so many for each rank, in pieces."""

    rank: int  # from whose slot they come, if they do
    block: int  # where in the slot
    address: int


def _shared(op: Operation) -> SharedMemory:
    shared = op.comm.shared
    assert shared is not None
    return shared


def _nothing(op: Operation) -> Run:
    """Calls of no elements count as calls, and ask nothing of others."""
    return lambda: _begin(_shared(op), op, NOBODY)


def _begin(shared: SharedMemory, op: Operation, needed: int) -> None:
    shared.begin(op.label(), op.nbytes, needed)


def _move(
    op: Operation, blocks: int, put: Sequence[_Copy], get: Sequence[_Copy], needed: int, local: tuple[int, int] | None
) -> Run:
    """Copies into this rank's slots and out of others': of op.nbytes each, beside each other in `blocks` of a slot.

    local: target and source of a copy that this rank makes for itself, if they differ"""
    shared, n = _shared(op), op.nbytes
    if not n:
        return _nothing(op)
    waited = tuple(sorted({copy.rank for copy in get}))
    if local is not None and local[0] == local[1]:
        local = None
    stride = _aligned(n)
    fits, is_large = _fits(shared, stride * blocks)
    own = shared.segments[shared.rank]
    puts = [(c.block * stride, c.address) for c in put]
    gets = [(c.address, shared.segments[c.rank], c.block * stride) for c in get]

    def move() -> None:
        shared.begin(op.label(), n, needed)
        if is_large and (not shared.large() or not fits):
            _move_pieces(op, blocks, put, get, waited, local)
            return
        base = own.slot(is_large, shared.room())
        for offset, source in puts:
            memmove(base + offset, source, n)
        slot = shared.post()
        if local is not None:
            memmove(local[0], local[1], n)
        if waited:
            shared.wait(waited)
            for target, segment, offset in gets:
                memmove(target, segment.slot(is_large, slot) + offset, n)
        if is_large:
            shared.end_large()

    return move


def _move_pieces(
    op: Operation, blocks: int, put: Sequence[_Copy], get: Sequence[_Copy], waited: tuple[int, ...],
    local: tuple[int, int] | None,
) -> None:  # fmt: skip
    """The same, of more than a slot holds."""
    shared = _shared(op)
    segments, own, large = shared.segments, shared.segments[shared.rank], shared.large()
    stride, pieces = _cut(op.nbytes, shared.slot_bytes(large) // blocks)

    def fill(at: int) -> None:
        start, n = pieces[at]
        base = own.slot(large, shared.room())
        for copy in put:
            memmove(base + copy.block * stride, copy.address + start, n)
        if local is not None:
            memmove(local[0] + start, local[1] + start, n)

    fill(0)
    for at, (start, n) in enumerate(pieces):
        slot = shared.post()
        if at + 1 < len(pieces):
            fill(at + 1)
        if waited:
            shared.wait(waited)
            for copy in get:
                memmove(copy.address + start, segments[copy.rank].slot(large, slot) + copy.block * stride, n)
    shared.end_large()


def _fits(shared: SharedMemory, nbytes: int) -> tuple[bool, bool]:
    """(whether it fits into one slot, whether that is a large one)"""
    return nbytes <= shared.slot_bytes(True), nbytes > shared.slot_bytes(False)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _cut(nbytes: int, most: int) -> tuple[int, list[tuple[int, int]]]:
    """As few pieces as can be, of at most `most` bytes and of about the same size: the bytes of a piece, a multiple of
    what a cache line has; start and length of each."""
    most = most // _ALIGNMENT * _ALIGNMENT
    piece = min(_aligned(-(-nbytes // -(-nbytes // most))), most)
    return piece, [(start, min(piece, nbytes - start)) for start in range(0, nbytes, piece)]


def _block(owner: int, reader: int) -> int:
    """Where in the slot of `owner` is what it has for `reader`: it has nothing there for itself."""
    return reader - (reader > owner)


# Copies


def broadcast(op: Operation) -> Run:
    if op.comm.rank == op.peer:
        return _move(op, 1, [_Copy(0, 0, op.send_ptr)], [], NOBODY, (op.recv_ptr, op.send_ptr))
    return _move(op, 1, [], [_Copy(op.peer, 0, op.recv_ptr)], op.peer, None)


def all_gather(op: Operation) -> Run:
    comm, n = op.comm, op.nbytes
    get = [_Copy(peer, 0, op.recv_ptr + peer * n) for peer in comm.peers]
    return _move(op, 1, [_Copy(0, 0, op.send_ptr)], get, ALL, (op.recv_ptr + comm.rank * n, op.send_ptr))


def all_to_all(op: Operation) -> Run:
    comm, n = op.comm, op.nbytes
    me = comm.rank
    put = [_Copy(0, _block(me, peer), op.send_ptr + peer * n) for peer in comm.peers]
    get = [_Copy(peer, _block(peer, me), op.recv_ptr + peer * n) for peer in comm.peers]
    return _move(op, comm.size - 1, put, get, ALL, (op.recv_ptr + comm.rank * n, op.send_ptr + comm.rank * n))


def gather(op: Operation) -> Run:
    comm, n = op.comm, op.nbytes
    if comm.rank != op.peer:
        return _move(op, 1, [_Copy(0, 0, op.send_ptr)], [], NOBODY, None)
    get = [_Copy(peer, 0, op.recv_ptr + peer * n) for peer in comm.peers]
    return _move(op, 1, [], get, ALL, (op.recv_ptr + comm.rank * n, op.send_ptr))


def scatter(op: Operation) -> Run:
    comm, n = op.comm, op.nbytes
    if comm.rank != op.peer:
        block = _block(op.peer, comm.rank)
        return _move(op, comm.size - 1, [], [_Copy(op.peer, block, op.recv_ptr)], op.peer, None)
    put = [_Copy(0, _block(comm.rank, peer), op.send_ptr + peer * n) for peer in comm.peers]
    return _move(op, comm.size - 1, put, [], NOBODY, (op.recv_ptr, op.send_ptr + comm.rank * n))


# Reductions


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
    put = [(_block(me, peer), peer) for peer in range(ranks) if peer != me]
    reads = tuple(_block(rank, me) if rank != me else 0 for rank in range(ranks))
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
    shared, n, needed = _shared(op), op.nbytes, ALL if how.reads else NOBODY
    own, stride = shared.segments[shared.rank], _aligned(n)
    fits, is_large = _fits(shared, stride * how.blocks)
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
    shared = _shared(op)
    large = shared.large()
    source = _contribution(op, how.own, blocks)
    mine, size = source.mine, source.itemsize
    n = op.count * size
    stride, pieces = _cut(n, shared.slot_bytes(large) // how.blocks)
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
    return _reduction(op, _to_root(op), 1) if op.count else _nothing(op)


def reduce_scatter(op: Operation) -> Run:
    return _reduction(op, _to_each(op), op.comm.size) if op.count else _nothing(op)


def all_reduce(op: Operation) -> Run:
    """Every rank reduces everything where that is little, or where half the steps are worth more: between two ranks it
    moves as much as if each reduced a half for both."""
    if not op.count:
        return _nothing(op)
    if op.comm.size == 2 or (op.premul is None and op.nbytes <= DIRECT_BYTES):
        return _reduction(op, _to_all(op), 1)

    def in_pieces() -> None:
        shared = _shared(op)
        _begin(shared, op, ALL)
        _AllReducePieces(op, shared.large()).run()
        shared.end_large()

    return in_pieces


class _AllReducePieces:
    """A slot has a block for each rank: what this rank adds to that rank's shard of the piece; and in this rank's own
    block, the result for its shard of the piece before."""

    def __init__(self, op: Operation, large: bool) -> None:
        self._op, self._comm, self._shared, self._large = op, op.comm, _shared(op), large
        source = _contribution(op, 0, 1)
        self._source, self._out = source.mine, view(op.recv_ptr, op.count, op.dtype)
        self._wide, self._size, self._narrow = source.address, source.itemsize, ITEMSIZE[op.dtype]
        self._slots = [segment.slot for segment in self._shared.segments]
        nbytes, ranks = self._source.nbytes, op.comm.size
        most = self._shared.slot_bytes(large) // ranks // _ALIGNMENT * _ALIGNMENT
        piece, _ = _cut(nbytes, most * ranks)
        self._stride = min(_aligned(-(-piece // ranks)), most)  # of a block, hence of a shard
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
