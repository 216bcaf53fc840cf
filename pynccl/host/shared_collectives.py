"""Collectives through shared memory: what a rank puts into its slots, and what it does with those of others.

Each function prepares one operation, as those of `algorithms` do. An operation goes in pieces, one a step, which fit
into a slot; a rank fills its slot for the next piece before it waits for this one, so it copies while others still do.
What is reduced is read in place in the slots of all ranks, in their order.

A small all_reduce is reduced by every rank as a whole, in half the steps; a larger one is a reduce_scatter and an
all_gather, which between two ranks would move as much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import memmove
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from ..bindings.abi import ITEMSIZE
from .memory import view
from .operation import Operation
from .reduction import prepared
from .shared import SharedMemory

ALIGNMENT = 64
# Up to here every rank of an all_reduce reduces everything.
DIRECT_BYTES = 64 << 10
Run = Callable[[], None]
# What reads a piece from a slot, made while the peers are on their way. Arguments: whether it is a large slot, its
# number; start and bytes of the piece; bytes of a block.
Reader = Callable[[bool, int, int, int, int], Callable[[], object]]


class _Copy(NamedTuple):
    """Bytes of a user's buffer that go into a slot or come from one: as many for each rank, in pieces."""

    rank: int  # from whose slot they come, if they do
    block: int  # where in the slot
    address: int


def _shared(op: Operation) -> SharedMemory:
    shared = op.comm.shared
    assert shared is not None
    return shared


def _call(op: Operation, *phases: Run) -> Run:
    """One call, in these phases. Calls of no elements count as calls, and ask nothing of others."""
    shared, nbytes = _shared(op), op.nbytes

    def call() -> None:
        shared.begin(op.label(), nbytes)
        for phase in phases if nbytes else ():
            phase()

    return call


def _steps(
    op: Operation, nbytes: int, blocks: int, put: Sequence[_Copy], waited: Sequence[int], reader: Reader,
    local: tuple[int, int] | None = None,
) -> Run:  # fmt: skip
    """A phase: so many bytes for each of `blocks` in a slot, put there, and read once the ranks `waited` have theirs.

    local: target and source of a copy that this rank makes for itself, if they differ"""
    shared = _shared(op)
    own, is_large = shared.segments[shared.rank], aligned(nbytes) * blocks > shared.slot_bytes(False)
    copies = [(copy.block, copy.address) for copy in put]
    if local is not None and local[0] == local[1]:
        local = None
    small = cut(nbytes, shared.slot_bytes(False) // blocks)

    def fill(large: bool, stride: int, start: int, n: int) -> None:
        base = own.slot(large, shared.room())
        for block, source in copies:
            memmove(base + block * stride, source + start, n)

    def run() -> None:
        large = is_large and shared.large()
        stride, pieces = cut(nbytes, shared.slot_bytes(True) // blocks) if large else small
        fill(large, stride, *pieces[0])
        for at, (start, n) in enumerate(pieces):
            slot = shared.post()
            if local is not None:
                memmove(local[0] + start, local[1] + start, n)
            if at + 1 < len(pieces):
                fill(large, stride, *pieces[at + 1])
            if waited:
                read = reader(large, slot, start, n, stride)
                shared.wait(waited)
                read()
        if is_large:
            shared.end_large()

    return run


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


# Those that copy


def _copy(
    op: Operation, blocks: int, put: Sequence[_Copy], get: Sequence[_Copy], local: tuple[int, int] | None = None
) -> Run:
    """A phase: op.nbytes each into this rank's slots and out of others'."""
    segments = _shared(op).segments
    copies = [(segments[copy.rank], copy.block, copy.address) for copy in get]

    def reader(large: bool, slot: int, start: int, n: int, stride: int) -> Run:
        def read() -> None:
            for segment, block, target in copies:
                memmove(target + start, segment.slot(large, slot) + block * stride, n)

        return read

    return _steps(op, op.nbytes, blocks, put, tuple(sorted({copy.rank for copy in get})), reader, local)


def broadcast(op: Operation) -> Run:
    if op.comm.rank == op.peer:
        return _call(op, _copy(op, 1, [_Copy(0, 0, op.send_ptr)], [], (op.recv_ptr, op.send_ptr)))
    return _call(op, _copy(op, 1, [], [_Copy(op.peer, 0, op.recv_ptr)]))


def _all_gather(op: Operation) -> Run:
    comm, n = op.comm, op.nbytes
    get = [_Copy(peer, 0, op.recv_ptr + peer * n) for peer in comm.peers]
    return _copy(op, 1, [_Copy(0, 0, op.send_ptr)], get, (op.recv_ptr + comm.rank * n, op.send_ptr))


def all_gather(op: Operation) -> Run:
    return _call(op, _all_gather(op))


def all_to_all(op: Operation) -> Run:
    comm, n = op.comm, op.nbytes
    me = comm.rank
    put = [_Copy(0, block_of(me, peer), op.send_ptr + peer * n) for peer in comm.peers]
    get = [_Copy(peer, block_of(peer, me), op.recv_ptr + peer * n) for peer in comm.peers]
    return _call(op, _copy(op, comm.size - 1, put, get, (op.recv_ptr + me * n, op.send_ptr + me * n)))


def gather(op: Operation) -> Run:
    comm, n = op.comm, op.nbytes
    if comm.rank != op.peer:
        return _call(op, _copy(op, 1, [_Copy(0, 0, op.send_ptr)], []))
    get = [_Copy(peer, 0, op.recv_ptr + peer * n) for peer in comm.peers]
    return _call(op, _copy(op, 1, [], get, (op.recv_ptr + comm.rank * n, op.send_ptr)))


def scatter(op: Operation) -> Run:
    comm, n = op.comm, op.nbytes
    if comm.rank != op.peer:
        block = block_of(op.peer, comm.rank)
        return _call(op, _copy(op, comm.size - 1, [], [_Copy(op.peer, block, op.recv_ptr)]))
    put = [_Copy(0, block_of(comm.rank, peer), op.send_ptr + peer * n) for peer in comm.peers]
    return _call(op, _copy(op, comm.size - 1, put, [], (op.recv_ptr, op.send_ptr + comm.rank * n)))


# Those that reduce


def _reduce(
    op: Operation, source: Tensor, count: int, blocks: int, put: Sequence[tuple[int, int]], own: int,
    reads: Sequence[int], out: Tensor,
) -> Run:  # fmt: skip
    """A phase: `out` is the reduction of so many elements of all ranks' contributions.

    source: this rank's contribution. put: block of a slot, and the element of `source` from which on it goes there.
    own: the first element that this rank reduces. reads: the block in each rank's slot; none if it reduces nothing"""
    shared, size = _shared(op), source.element_size()
    mine = source[own : own + count]
    copies = [_Copy(0, block, source.data_ptr() + first * size) for block, first in put]
    known: dict[tuple[bool, int, int], Callable[[], object]] = {}

    def prepare(large: bool, slot: int, start: int, n: int, stride: int) -> Callable[[], object]:
        first, length = start // size, n // size
        parts = [
            segment.view(large, slot, mine.dtype)[block * stride // size :][:length]
            for segment, block in zip(shared.segments, reads, strict=True)
        ]
        parts[shared.rank] = mine[first : first + length]
        return prepared(parts, out[first : first + length], op.dtype, op.op)

    def reader(large: bool, slot: int, start: int, n: int, stride: int) -> Callable[[], object]:
        combine = known.get((large, slot, start))
        if combine is None:
            combine = prepare(large, slot, start, n, stride)
            if op.is_kept:
                known[large, slot, start] = combine
        return combine

    return _steps(op, count * size, blocks, copies, shared.peers if reads else (), reader)


def _reduction(op: Operation, blocks: int, phases: Callable[[Tensor], Sequence[Run]]) -> Run:
    """A call that reduces; blocks: of op.count elements in the send buffer. phases(this rank's contribution)"""
    sent, premul = view(op.send_ptr, op.count * blocks, op.dtype), op.premul
    if premul is None:
        return _call(op, *phases(sent))

    def multiplied() -> None:
        for phase in phases(premul.apply(sent)):
            phase()

    return _call(op, multiplied)


def _out(op: Operation) -> Tensor:
    return view(op.recv_ptr, op.count, op.dtype)


def _reduce_to_each(op: Operation, source: Tensor, count: int, out: Tensor) -> Run:
    """A phase: of the blocks of the contribution, one for each rank, this rank reduces its own."""
    me, peers = op.comm.rank, op.comm.peers
    put = [(block_of(me, peer), peer * count) for peer in peers]
    reads = [block_of(rank, me) if rank != me else 0 for rank in range(op.comm.size)]
    return _reduce(op, source, count, op.comm.size - 1, put, me * count, reads, out)


def reduce(op: Operation) -> Run:
    if op.comm.rank != op.peer:
        return _reduction(op, 1, lambda source: [_reduce(op, source, op.count, 1, [(0, 0)], 0, (), source)])
    reads = [0] * op.comm.size
    return _reduction(op, 1, lambda source: [_reduce(op, source, op.count, 1, [], 0, reads, _out(op))])


def reduce_scatter(op: Operation) -> Run:
    return _reduction(op, op.comm.size, lambda source: [_reduce_to_each(op, source, op.count, _out(op))])


def all_reduce(op: Operation) -> Run:
    comm, out = op.comm, _out(op)
    reads = [0] * comm.size
    if comm.size == 2 or op.nbytes <= DIRECT_BYTES:
        return _reduction(op, 1, lambda source: [_reduce(op, source, op.count, 1, [(0, 0)], 0, reads, out)])
    shard = op.count // comm.size
    first, rest = comm.rank * shard, comm.size * shard
    gathered = replace(op, send_ptr=op.recv_ptr + first * ITEMSIZE[op.dtype], count=shard)

    def phases(source: Tensor) -> list[Run]:
        shards = [_reduce_to_each(op, source, shard, out[first : first + shard]), _all_gather(gathered)]
        if rest == op.count:
            return shards
        return [*shards, _reduce(op, source, op.count - rest, 1, [(0, rest)], rest, reads, out[rest:])]

    return _reduction(op, 1, phases)
