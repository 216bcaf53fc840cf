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
    if stride * blocks > shared.slot_bytes(False):
        return _move_pieces(op, blocks, put, get, needed, waited, local)
    own = shared.segments[shared.rank]
    puts = [[(own.slot(False, s) + c.block * stride, c.address) for c in put] for s in range(SLOTS)]
    gets = [[(c.address, shared.segments[c.rank].slot(False, s) + c.block * stride) for c in get] for s in range(SLOTS)]

    def move() -> None:
        shared.begin(op.label(), n, needed)
        for target, source in puts[shared.room()]:
            memmove(target, source, n)
        slot = shared.post()
        if local is not None:
            memmove(local[0], local[1], n)
        if waited:
            shared.wait(waited)
            for target, source in gets[slot]:
                memmove(target, source, n)

    return move


def _move_pieces(
    op: Operation, blocks: int, put: Sequence[_Copy], get: Sequence[_Copy], needed: int, waited: tuple[int, ...],
    local: tuple[int, int] | None,
) -> Run:  # fmt: skip
    shared = _shared(op)
    segments, own = shared.segments, shared.segments[shared.rank]

    def move() -> None:
        _begin(shared, op, needed)
        large = shared.large()
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

    return move


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
    reads: Callable[[int], int] | None  # block of the slot of a peer; None if this rank reduces nothing


def _to_all(op: Operation) -> _Sum:
    return _Sum(1, [(0, 0)], 0, lambda peer: 0)


def _to_root(op: Operation) -> _Sum:
    return _Sum(1, [], 0, lambda peer: 0) if op.comm.rank == op.peer else _Sum(1, [(0, 0)], 0, None)


def _to_each(op: Operation) -> _Sum:
    me, peers = op.comm.rank, op.comm.peers
    return _Sum(len(peers), [(_block(me, peer), peer) for peer in peers], me, lambda peer: _block(peer, me))


def _parts(
    shared: SharedMemory, large: bool, slot: int, how: _Sum, dtype: torch.dtype, stride: int, count: int
) -> list[Tensor]:
    """What there is in each rank's slot, in the order of the ranks, with this one's slot for its own part."""
    assert how.reads is not None
    found = []
    for rank, segment in enumerate(shared.segments):
        start = 0 if rank == shared.rank else how.reads(rank) * stride // dtype.itemsize
        found.append(segment.view(large, slot, dtype)[start : start + count])
    return found


def _contribution(op: Operation, blocks: int) -> Tensor:
    """What this rank adds: its send buffer, times the scalar of a pre-multiplied sum."""
    own = view(op.send_ptr, op.count * blocks, op.dtype)
    return own if op.premul is None else op.premul.apply(own)


def _reduction(op: Operation, how: _Sum, blocks: int) -> Run:
    """blocks: of op.count elements that the contribution has"""
    if op.premul is None and _aligned(op.nbytes) * how.blocks <= _shared(op).slot_bytes(False):
        return _reduce_at_once(op, how, blocks)
    return lambda: _reduce_pieces(op, how, blocks)


def _reduce_at_once(op: Operation, how: _Sum, blocks: int) -> Run:
    """One step, with everything prepared."""
    shared, n = _shared(op), op.nbytes
    own, stride = shared.segments[shared.rank], _aligned(n)
    puts = [
        [(own.slot(False, s) + block * stride, op.send_ptr + source * n) for block, source in how.put]
        for s in range(SLOTS)
    ]
    if how.reads is None:

        def send() -> None:
            shared.begin(op.label(), n, NOBODY)
            for target, source in puts[shared.room()]:
                memmove(target, source, n)
            shared.post()

        return send
    out = view(op.recv_ptr, op.count, op.dtype)
    mine = _contribution(op, blocks)[how.own * op.count :][: op.count]
    combines = []
    for slot in range(SLOTS):
        parts = _parts(shared, False, slot, how, mine.dtype, stride, op.count)
        parts[shared.rank] = mine
        combines.append(prepared(parts, out, op.dtype, op.op))
    peers = shared.peers

    def reduce() -> None:
        shared.begin(op.label(), n, ALL)
        for target, source in puts[shared.room()]:
            memmove(target, source, n)
        slot = shared.post()
        shared.wait(peers)
        combines[slot]()

    return reduce


def _reduce_pieces(op: Operation, how: _Sum, blocks: int) -> None:
    shared = _shared(op)
    _begin(shared, op, NOBODY if how.reads is None else ALL)
    large = shared.large()
    source = _contribution(op, blocks)
    size, wide = source.element_size(), source.data_ptr()
    n = op.count * size
    stride, pieces = _cut(n, shared.slot_bytes(large) // how.blocks)
    own = shared.segments[shared.rank]
    mine = source[how.own * op.count :][: op.count]
    out = view(op.recv_ptr, op.count, op.dtype) if how.reads is not None else mine
    ready: dict[tuple[int, int], list[Tensor]] = {}  # by slot and count

    def fill(at: int) -> None:
        start, length = pieces[at]
        base = own.slot(large, shared.room())
        for block, which in how.put:
            memmove(base + block * stride, wide + which * n + start, length)

    fill(0)
    for at, (start, length) in enumerate(pieces):
        slot = shared.post()
        if at + 1 < len(pieces):
            fill(at + 1)
        if how.reads is not None:
            first, count = start // size, length // size
            shared.wait(shared.peers)
            if (slot, count) not in ready:
                ready[slot, count] = _parts(shared, large, slot, how, source.dtype, stride, count)
            parts = ready[slot, count]
            parts[shared.rank] = mine[first : first + count]
            prepared(parts, out[first : first + count], op.dtype, op.op)()
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
        self._source, self._out = _contribution(op, 1), view(op.recv_ptr, op.count, op.dtype)
        self._wide, self._size, self._narrow = (
            self._source.data_ptr(),
            self._source.element_size(),
            ITEMSIZE[op.dtype],
        )
        self._slots = [segment.slot for segment in self._shared.segments]
        nbytes, ranks = self._source.nbytes, op.comm.size
        most = self._shared.slot_bytes(large) // ranks // _ALIGNMENT * _ALIGNMENT
        piece, _ = _cut(nbytes, most * ranks)
        self._stride = min(_aligned(-(-piece // ranks)), most)  # of a block, hence of a shard
        piece = self._stride * ranks
        self._pieces = [(start, min(piece, nbytes - start)) for start in range(0, nbytes, piece)]
        self._how = _Sum(ranks, [], 0, lambda peer: op.comm.rank)
        self._ready: dict[tuple[int, int], list[Tensor]] = {}  # by slot and count

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
        if (slot, count) not in self._ready:
            self._ready[slot, count] = _parts(
                self._shared, self._large, slot, self._how, self._source.dtype, self._stride, count
            )
        parts = self._ready[slot, count]
        parts[me] = self._source[first : first + count]
        result = self._out[first : first + count]
        prepared(parts, result, op.dtype, op.op)()
        target = self._slots[me](self._large, (slot + 1) % SLOTS) + me * self._stride
        memmove(target, op.recv_ptr + first * self._narrow, count * self._narrow)
