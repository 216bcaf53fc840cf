"""Collectives through shared memory: what a rank puts into its slots, and what it does with those of others.

An operation goes in pieces, one a step, which fit into a slot; a rank fills its slot for the next piece before it waits
for this one, so it copies while others still do. What is reduced is read in place in the slots of all ranks, in their
order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import memmove
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..bindings.abi import ITEMSIZE
from .memory import STORAGE, tensor_at, view
from .operation import Operation
from .reduction import combine
from .segment import LARGE_BYTES, SLOTS, SMALL_BYTES
from .shared import SharedMemory

ALIGNMENT = 64
# Up to here every rank of an all_reduce reduces everything: half the steps.
DIRECT_BYTES = 64 << 10
# Reads a piece once the peers' parts of it are there. Arguments: the slot's number; start and bytes of the piece.
Read = Callable[[int, int, int], None]


class _Copy(NamedTuple):
    """Bytes of a user's buffer that go into a slot or come from one: as many for each rank, in pieces."""

    rank: int  # from whose slot they come, if they do
    block: int  # where in the slot
    address: int


class _Slots(NamedTuple):
    """The slots of one operation, and how what goes through them is cut."""

    shared: SharedMemory
    large: bool
    stride: int  # bytes of a block
    pieces: Sequence[tuple[int, int]]  # start and bytes of each

    def block(self, rank: int, slot: int, block: int) -> int:
        """Its address."""
        return self.shared.segments[rank].slot(self.large, slot) + block * self.stride


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@lru_cache(256)
def cut(nbytes: int, most: int) -> tuple[int, list[tuple[int, int]]]:
    """As few pieces as can be, of at most `most` bytes and of about the same size: the bytes of a piece, a multiple of
    what a cache line has; start and length of each."""
    most = most // ALIGNMENT * ALIGNMENT
    piece = min(aligned(-(-nbytes // max(-(-nbytes // most), 1))), most) or ALIGNMENT
    return piece, [(start, min(piece, nbytes - start)) for start in range(0, nbytes, piece)]


def block_of(owner: int, reader: int) -> int:
    """Where in the slot of `owner` is what it has for `reader`: it has nothing there for itself."""
    return reader - (reader > owner)


def _begin(op: Operation) -> bool:
    """Begin the call; whether there is anything to do. Calls of no elements count, and ask nothing of others."""
    assert op.comm.shared is not None
    op.comm.shared.begin(op.label(), op.nbytes)
    return op.count > 0


def _slots(op: Operation, nbytes: int, blocks: int) -> _Slots:
    """For so many bytes in each of `blocks` of a slot."""
    shared = op.comm.shared
    assert shared is not None
    if large := aligned(nbytes) * blocks > SMALL_BYTES:
        shared.reserve_large()
    return _Slots(shared, large, *cut(nbytes, (LARGE_BYTES if large else SMALL_BYTES) // blocks))


def _run(
    slots: _Slots, put: Sequence[_Copy], waited: Sequence[int], read: Read, local: tuple[int, int] | None = None
) -> None:
    """Put each piece into this rank's slot, and read it once the ranks `waited` have put theirs.

    local: target and source of a copy that this rank makes for itself, if they differ"""
    shared, pieces = slots.shared, slots.pieces

    def fill(start: int, n: int) -> None:
        slot = shared.room()
        for copy in put:
            memmove(slots.block(shared.rank, slot, copy.block), copy.address + start, n)

    fill(*pieces[0])
    for at, (start, n) in enumerate(pieces):
        slot = shared.post()
        if at + 1 < len(pieces):
            fill(*pieces[at + 1])
        if local is not None and local[0] != local[1]:
            memmove(local[0] + start, local[1] + start, n)
        if waited:
            shared.wait(waited)
            read(slot, start, n)


# Those that copy


def _copy(
    op: Operation, blocks: int, put: Sequence[_Copy], get: Sequence[_Copy], local: tuple[int, int] | None = None
) -> None:
    """op.nbytes each into this rank's slots and out of others'."""
    if not _begin(op):
        return
    slots = _slots(op, op.nbytes, blocks)

    def read(slot: int, start: int, n: int) -> None:
        for copy in get:
            memmove(copy.address + start, slots.block(copy.rank, slot, copy.block), n)

    _run(slots, put, [copy.rank for copy in get], read, local)


def broadcast(op: Operation) -> None:
    if op.comm.rank == op.peer:
        _copy(op, 1, [_Copy(0, 0, op.send_ptr)], [], (op.recv_ptr, op.send_ptr))
    else:
        _copy(op, 1, [], [_Copy(op.peer, 0, op.recv_ptr)])


def all_gather(op: Operation) -> None:
    comm, n = op.comm, op.nbytes
    get = [_Copy(peer, 0, op.recv_ptr + peer * n) for peer in comm.peers]
    _copy(op, 1, [_Copy(0, 0, op.send_ptr)], get, (op.recv_ptr + comm.rank * n, op.send_ptr))


def all_to_all(op: Operation) -> None:
    comm, n, me = op.comm, op.nbytes, op.comm.rank
    put = [_Copy(0, block_of(me, peer), op.send_ptr + peer * n) for peer in comm.peers]
    get = [_Copy(peer, block_of(peer, me), op.recv_ptr + peer * n) for peer in comm.peers]
    _copy(op, comm.size - 1, put, get, (op.recv_ptr + me * n, op.send_ptr + me * n))


def gather(op: Operation) -> None:
    comm, n = op.comm, op.nbytes
    if comm.rank != op.peer:
        _copy(op, 1, [_Copy(0, 0, op.send_ptr)], [])
        return
    get = [_Copy(peer, 0, op.recv_ptr + peer * n) for peer in comm.peers]
    _copy(op, 1, [], get, (op.recv_ptr + comm.rank * n, op.send_ptr))


def scatter(op: Operation) -> None:
    comm, n = op.comm, op.nbytes
    if comm.rank != op.peer:
        _copy(op, comm.size - 1, [], [_Copy(op.peer, block_of(op.peer, comm.rank), op.recv_ptr)])
        return
    put = [_Copy(0, block_of(comm.rank, peer), op.send_ptr + peer * n) for peer in comm.peers]
    _copy(op, comm.size - 1, put, [], (op.recv_ptr, op.send_ptr + comm.rank * n))


# Those that reduce


class _Contribution(NamedTuple):
    """What this rank adds: its send buffer, times the scalar of a pre-multiplied sum."""

    address: int
    dtype: torch.dtype  # in which it travels
    itemsize: int
    product: Tensor | None = None  # whose memory it is, if it is not the user's


def _contribution(op: Operation, blocks: int) -> _Contribution:
    if op.premul is None:
        return _Contribution(op.send_ptr, STORAGE[op.dtype], ITEMSIZE[op.dtype])
    own = op.premul.apply(view(op.send_ptr, op.count * blocks, op.dtype))
    return _Contribution(own.data_ptr(), own.dtype, own.element_size(), own)


def _combine(op: Operation, own: _Contribution, parts: Sequence[int], target: int, nbytes: int) -> None:
    """Reduce so many bytes at the addresses `parts`, one of each rank, to the address `target`."""
    count = nbytes // own.itemsize
    tensors = [tensor_at(part, count, own.dtype) for part in parts]
    combine(tensors, view(target, count, op.dtype), op.dtype, op.op)


def _reduce(
    op: Operation, own: _Contribution, blocks: int, put: Sequence[int], mine: int, reads: Sequence[int]
) -> None:
    """op.count elements of all ranks.

    put: the blocks of the contribution that go into the slot; mine: the one that this rank reduces itself
    reads: the block in each rank's slot; none if it reduces nothing"""
    nbytes, narrow = op.count * own.itemsize, ITEMSIZE[op.dtype]
    slots = _slots(op, nbytes, blocks)

    def read(slot: int, start: int, n: int) -> None:
        parts = [slots.block(rank, slot, block) for rank, block in enumerate(reads)]
        parts[op.comm.rank] = own.address + mine * nbytes + start
        _combine(op, own, parts, op.recv_ptr + start // own.itemsize * narrow, n)

    copies = [_Copy(0, block, own.address + source * nbytes) for block, source in enumerate(put)]
    _run(slots, copies, slots.shared.peers if reads else (), read)


def reduce(op: Operation) -> None:
    if _begin(op):
        root = op.comm.rank == op.peer
        _reduce(op, _contribution(op, 1), 1, [] if root else [0], 0, [0] * op.comm.size if root else ())


def reduce_scatter(op: Operation) -> None:
    if _begin(op):
        comm = op.comm
        reads = [block_of(rank, comm.rank) for rank in range(comm.size)]  # unused for this rank itself
        _reduce(op, _contribution(op, comm.size), comm.size - 1, comm.peers, comm.rank, reads)


def all_reduce(op: Operation) -> None:
    """Between two ranks a reduction of everything by both moves as much as one of a half by each."""
    if not _begin(op):
        return
    own = _contribution(op, 1)
    if op.comm.size == 2 or op.nbytes <= DIRECT_BYTES:
        _reduce(op, own, 1, [0], 0, [0] * op.comm.size)
    else:
        _all_reduce_shards(op, own)


def _all_reduce_shards(op: Operation, own: _Contribution) -> None:
    """Each rank reduces its shard of a piece, and the others fetch it a step later.

    A slot has a block for each rank: what this rank adds to that rank's shard of the piece; and in this rank's own
    block its result for the piece before."""
    me, ranks, narrow = op.comm.rank, op.comm.size, ITEMSIZE[op.dtype]
    nbytes = op.count * own.itemsize
    slots = _slots(op, aligned(-(-nbytes // ranks)), ranks)
    shared, stride, last = slots.shared, slots.stride, len(slots.pieces)

    def shard(piece: int, rank: int) -> tuple[int, int]:
        """Its first byte and its bytes in the contribution."""
        start = (piece * ranks + rank) * stride
        return start, max(min(stride, nbytes - start), 0)

    def fill(piece: int) -> None:
        slot = shared.room()
        for peer in op.comm.peers if piece < last else ():
            start, n = shard(piece, peer)
            memmove(slots.block(me, slot, peer), own.address + start, n)

    def fetch(piece: int, slot: int) -> None:
        for peer in op.comm.peers:
            start, n = (nbytes // own.itemsize * narrow for nbytes in shard(piece, peer))
            memmove(op.recv_ptr + start, slots.block(peer, slot, peer), n)

    def add(piece: int, slot: int) -> None:
        start, n = shard(piece, me)
        if n:
            parts = [slots.block(rank, slot, me) for rank in range(ranks)]
            parts[me] = own.address + start
            target = op.recv_ptr + start // own.itemsize * narrow
            _combine(op, own, parts, target, n)
            memmove(slots.block(me, (slot + 1) % SLOTS, me), target, n // own.itemsize * narrow)

    fill(0)
    for piece in range(last + 1):
        slot = shared.post()
        if piece < last:
            fill(piece + 1)
        shared.wait(shared.peers)
        if piece < last:
            add(piece, slot)
        if piece:
            fetch(piece - 1, slot)
