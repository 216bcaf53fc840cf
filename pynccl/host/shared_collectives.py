"""Collectives through shared memory: what a rank puts into its slots, and what it reads in those of others. Those that
reduce are in `shared_reductions`.

Each function prepares one operation, as those of `algorithms` do. What fits into one slot takes one step, with all
addresses made beforehand. More goes in pieces, one a step; a rank fills its slot for the next piece before it waits for
this one, so it copies while others still do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import memmove
from typing import NamedTuple

from .operation import Operation
from .shared import ALL, NOBODY, SharedMemory

ALIGNMENT = 64
Run = Callable[[], None]


class _Copy(NamedTuple):
    """Bytes of a user's buffer that go into a slot or come from one: so many for each rank, in pieces."""

    rank: int  # from whose slot they come, if they do
    block: int  # where in the slot
    address: int


def shared_of(op: Operation) -> SharedMemory:
    shared = op.comm.shared
    assert shared is not None
    return shared


def nothing(op: Operation) -> Run:
    """Calls of no elements count as calls, and ask nothing of others."""
    return lambda: begin(shared_of(op), op, NOBODY)


def begin(shared: SharedMemory, op: Operation, needed: int) -> None:
    shared.begin(op.label(), op.nbytes, needed)


def _move(
    op: Operation, blocks: int, put: Sequence[_Copy], get: Sequence[_Copy], needed: int, local: tuple[int, int] | None
) -> Run:
    """Copies into this rank's slots and out of others': of op.nbytes each, beside each other in `blocks` of a slot.

    local: target and source of a copy that this rank makes for itself, if they differ"""
    shared, n = shared_of(op), op.nbytes
    if not n:
        return nothing(op)
    waited = tuple(sorted({copy.rank for copy in get}))
    if local is not None and local[0] == local[1]:
        local = None
    stride = aligned(n)
    fits, is_large = fits_slot(shared, stride * blocks)
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
    shared = shared_of(op)
    segments, own, large = shared.segments, shared.segments[shared.rank], shared.large()
    stride, pieces = cut(op.nbytes, shared.slot_bytes(large) // blocks)

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


def fits_slot(shared: SharedMemory, nbytes: int) -> tuple[bool, bool]:
    """(whether it fits into one slot, whether that is a large one)"""
    return nbytes <= shared.slot_bytes(True), nbytes > shared.slot_bytes(False)


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def cut(nbytes: int, most: int) -> tuple[int, list[tuple[int, int]]]:
    """As few pieces as can be, of at most `most` bytes and of about the same size: the bytes of a piece, a multiple of
    what a cache line has; start and length of each."""
    most = most // ALIGNMENT * ALIGNMENT
    piece = min(aligned(-(-nbytes // -(-nbytes // most))), most)
    return piece, [(start, min(piece, nbytes - start)) for start in range(0, nbytes, piece)]


def block_of(owner: int, reader: int) -> int:
    """Where in the slot of `owner` is what it has for `reader`: it has nothing there for itself."""
    return reader - (reader > owner)


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
    put = [_Copy(0, block_of(me, peer), op.send_ptr + peer * n) for peer in comm.peers]
    get = [_Copy(peer, block_of(peer, me), op.recv_ptr + peer * n) for peer in comm.peers]
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
        block = block_of(op.peer, comm.rank)
        return _move(op, comm.size - 1, [], [_Copy(op.peer, block, op.recv_ptr)], op.peer, None)
    put = [_Copy(0, block_of(comm.rank, peer), op.send_ptr + peer * n) for peer in comm.peers]
    return _move(op, comm.size - 1, put, [], NOBODY, (op.recv_ptr, op.send_ptr + comm.rank * n))
