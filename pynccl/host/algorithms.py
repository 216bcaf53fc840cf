"""Algorithms of the collectives and of send/recv, and the table of all operations.

A collective is one round, in which ranks exchange blocks. A large all_reduce has two rounds: a reduce-scatter and an
all-gather. A round uses shared memory if the ranks have it (see `shared_collectives`), else messages. Reductions
combine in rank order, so all ranks get bitwise equal results.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import shared_collectives
from .comm import Comm, Work
from .connection import Form, Label
from .failure import invalid_usage
from .memory import STORAGE, bytes_at, tensor_at, view
from .operation import Kind, Operation, UsedOn
from .reduction import combine
from .shared_collectives import Block

# Up to this size, all_reduce sends its full input to every peer: half the rounds, but p/2 times the bytes of a ring
# ((p-1) V compared with 2 (p-1)/p V for p ranks and V bytes).
DIRECT_BYTES = 64 << 10


class _Round(NamedTuple):
    """One round of a call.

    per_peer: a rank sends each peer a different block, instead of the same block to all"""

    op: Operation
    label: Label
    per_peer: bool = False

    def move(self, sends: Sequence[Block], recvs: Sequence[Block], max_nbytes: int) -> None:
        """Send and receive blocks of at most `max_nbytes` bytes, which is equal on all ranks."""
        shared = self.op.comm.shared
        if not max_nbytes:  # an empty call is counted, but exchanges nothing
            return
        if shared is None:
            outgoing, incoming = (
                [(peer, bytes_at(address, nbytes)) for peer, address, nbytes in blocks] for blocks in (sends, recvs)
            )
            if outgoing or incoming:  # a single rank has no transport
                self.op.comm.transport.exchange(outgoing, incoming, self.label)
            return

        def read(start: int, n: int, at: Sequence[int]) -> None:
            for (_, address, nbytes), source in zip(recvs, at, strict=True):
                ctypes.memmove(address + start, source, max(min(n, nbytes - start), 0))

        shared_collectives.exchange(shared, self.per_peer, max_nbytes, sends, [peer for peer, _, _ in recvs], read)

    def reduce(self, own: Tensor, ranges: Sequence[tuple[int, int]], out: int) -> None:
        """Reduce elements ranges[rank][0] to ranges[rank][1] of all ranks' `own` into the address `out`."""
        op, comm, itemsize = self.op, self.op.comm, own.element_size()
        if not op.count:
            return
        base, length, sizes = own.data_ptr(), own.numel(), [(end - start) * itemsize for start, end in ranges]

        def part(address: int, count: int, dtype: torch.dtype = own.dtype) -> Tensor:  # making a view takes 2 us
            return own if address == base and count == length else tensor_at(address, count, dtype)

        def output(first: int, count: int) -> Tensor:
            return part(out + first * op.itemsize, count, STORAGE[op.dtype])

        begin, end = ranges[comm.rank]
        address, nbytes = base + begin * itemsize, sizes[comm.rank]
        sends = [(p, base + ranges[p][0] * itemsize, sizes[p]) for p in comm.peers if sizes[p]]
        if not comm.peers:
            combine([own], output(0, op.count), op.dtype, op.op)
            return
        if comm.shared is None:
            mine = own[begin:end]
            scratch = comm.scratch.take(len(comm.peers) * nbytes).view(own.dtype)
            others = scratch.chunk(len(comm.peers)) if nbytes else ()
            recvs = [(p, row.data_ptr(), nbytes) for p, row in zip(comm.peers, others, strict=False)]
            self.move(sends, recvs, op.count)
            if len(mine):
                in_order = [*others[: comm.rank], mine, *others[comm.rank :]]
                combine(in_order, output(0, len(mine)), op.dtype, op.op)
            return

        def read(start: int, n: int, at: Sequence[int]) -> None:
            count = max(min(n, nbytes - start), 0) // itemsize
            tensors = [part(source, count) for source in (*at[: comm.rank], address + start, *at[comm.rank :])]
            combine(tensors, output(start // itemsize, count), op.dtype, op.op)

        shared_collectives.exchange(comm.shared, self.per_peer, max(sizes), sends, comm.peers if nbytes else (), read)


def _begin(op: Operation, per_peer: bool = False) -> _Round:
    label = op.label()
    if op.comm.shared is not None:
        op.comm.shared.begin(label, op.nbytes)
    return _Round(op, label, per_peer)


def _contribution(op: Operation, blocks: int = 1) -> Tensor:
    """Return this rank's send buffer, multiplied by the scalar of a pre-multiplied sum."""
    own = view(op.send_ptr, op.count * blocks, op.dtype)
    return own if op.premul is None else op.premul.apply(own)


def all_reduce(op: Operation) -> None:
    """Two ranks with shared memory reduce directly, which moves as many bytes as the two rounds."""
    comm, own = op.comm, _contribution(op)
    if op.nbytes <= DIRECT_BYTES or (comm.shared is not None and comm.size == 2):
        _begin(op).reduce(own, [(0, op.count)] * comm.size, op.recv_ptr)
        return
    cuts = [op.count * rank // comm.size for rank in range(comm.size + 1)]
    shards = list(itertools.pairwise(cuts))
    blocks = [(op.recv_ptr + start * op.itemsize, (end - start) * op.itemsize) for start, end in shards]
    mine = blocks[comm.rank]
    round_ = _begin(op, per_peer=True)
    round_.reduce(own, shards, mine[0])
    max_nbytes = max(nbytes for _, nbytes in blocks)
    round_._replace(per_peer=False).move(
        [(p, *mine) for p in comm.peers], [(p, *blocks[p]) for p in comm.peers], max_nbytes
    )


def reduce_scatter(op: Operation) -> None:
    ranges = [(rank * op.count, (rank + 1) * op.count) for rank in range(op.comm.size)]
    _begin(op, per_peer=True).reduce(_contribution(op, op.comm.size), ranges, op.recv_ptr)


def reduce(op: Operation) -> None:
    ranges = [(0, op.count if rank == op.peer else 0) for rank in range(op.comm.size)]
    _begin(op).reduce(_contribution(op), ranges, op.recv_ptr)


def _blocks_by_rank(op: Operation, base: int) -> list[Block]:
    """Return the block of each peer in a buffer at `base` that has one block per rank."""
    return [(peer, base + peer * op.nbytes, op.nbytes) for peer in op.comm.peers]


def _copy_own(op: Operation, target: int, source: int) -> None:
    """Copy this rank's own block."""
    if target != source:
        ctypes.memmove(target, source, op.nbytes)


def broadcast(op: Operation) -> None:
    comm, n = op.comm, op.nbytes
    if comm.rank != op.peer:
        _begin(op).move([], [(op.peer, op.recv_ptr, n)], n)
        return
    _begin(op).move([(peer, op.send_ptr, n) for peer in comm.peers], [], n)
    _copy_own(op, op.recv_ptr, op.send_ptr)


def all_gather(op: Operation) -> None:
    comm, n = op.comm, op.nbytes
    _begin(op).move([(peer, op.send_ptr, n) for peer in comm.peers], _blocks_by_rank(op, op.recv_ptr), n)
    _copy_own(op, op.recv_ptr + comm.rank * n, op.send_ptr)


def all_to_all(op: Operation) -> None:
    comm, n, source = op.comm, op.nbytes, op.send_ptr
    if source == op.recv_ptr:  # nccl.h does not define in-place all-to-all, but support is cheap
        copy = view(source, op.count * comm.size, op.dtype).clone()
        source = copy.data_ptr()
    _begin(op, per_peer=True).move(_blocks_by_rank(op, source), _blocks_by_rank(op, op.recv_ptr), n)
    _copy_own(op, op.recv_ptr + comm.rank * n, source + comm.rank * n)


def gather(op: Operation) -> None:
    comm, n = op.comm, op.nbytes
    if comm.rank != op.peer:
        _begin(op).move([(op.peer, op.send_ptr, n)], [], n)
        return
    _begin(op).move([], _blocks_by_rank(op, op.recv_ptr), n)
    _copy_own(op, op.recv_ptr + comm.rank * n, op.send_ptr)


def scatter(op: Operation) -> None:
    comm, n = op.comm, op.nbytes
    if comm.rank != op.peer:
        _begin(op, per_peer=True).move([], [(op.peer, op.recv_ptr, n)], n)
        return
    _begin(op, per_peer=True).move(_blocks_by_rank(op, op.send_ptr), [], n)
    _copy_own(op, op.recv_ptr, op.send_ptr + comm.rank * n)


def _self_messages(ops: Sequence[Operation], kind: Kind) -> list[Operation]:
    return [op for op in ops if op.kind is kind and op.peer == op.comm.rank]


def check_self_messages(ops: Sequence[Operation]) -> None:
    """Check that the group has a matching receive for every send of a rank to itself."""
    sends, recvs = ([op.nbytes for op in _self_messages(ops, kind)] for kind in (SEND, RECV))
    if sends != recvs:
        raise invalid_usage(
            f"rank {ops[0].comm.rank} sends {sends} bytes to itself and receives {recvs} bytes from itself; expected "
            "both in one group, with the same sizes in the same order"
        )


class Messages:
    """All sends and receives of a group on one communicator."""

    def __init__(self, ops: Sequence[Operation]) -> None:
        self._ops = ops

    def describe(self) -> str:
        return ", ".join(op.describe() for op in self._ops)

    def traffic(self) -> tuple[int, float]:
        """Count one step for all messages; the link is full duplex."""
        moved = [(op.kind is SEND, op.nbytes) for op in self._ops if op.peer != op.comm.rank]
        sent = sum(nbytes for sending, nbytes in moved if sending)
        return (1 if moved else 0), float(max(sent, sum(nbytes for _, nbytes in moved) - sent))

    def run(self) -> None:
        """Run all messages at once. Messages of this rank to itself are copies, matched in order.

        A send completes when the receiver acknowledges it. So a send without a receive, or one of a different size, is
        an error on both ranks at every message size."""
        ops = self._ops
        sends, recvs = (_remote_messages(ops, kind) for kind in (SEND, RECV))
        if not sends and not recvs:  # a single rank has no transport
            self._copy()
            return
        memory = ops[0].comm.shared
        if memory is not None:
            self._copy()
            memory.exchange(
                [(op.peer, label.head(op.nbytes) + label.text, op.send_ptr, op.nbytes) for op, label in sends],
                [(op.peer, label.head(op.nbytes), op.recv_ptr, op.nbytes) for op, label in recvs],
            )
            return
        transport = ops[0].comm.transport
        sent = [transport.send(op.peer, bytes_at(op.send_ptr, op.nbytes), label) for op, label in sends]
        received = [
            transport.recv(op.peer, bytes_at(op.recv_ptr, op.nbytes), label, _ack_label(label)) for op, label in recvs
        ]
        acks = [transport.recv(op.peer, _NOTHING, _ack_label(label)) for op, label in sends]
        self._copy()
        transport.wait([*received, *acks, *sent])
        transport.wait([transfer.ack for transfer in received if transfer.ack is not None])

    def _copy(self) -> None:
        for source, target in zip(_self_messages(self._ops, SEND), _self_messages(self._ops, RECV), strict=True):
            ctypes.memmove(target.recv_ptr, source.send_ptr, target.nbytes)


_NOTHING = memoryview(b"")


def _ack_label(label: Label) -> Label:
    return label._replace(form=Form.ACK)


def _remote_messages(ops: Sequence[Operation], kind: Kind) -> list[tuple[Operation, Label]]:
    """Return the messages to peers, with labels. Empty messages are counted but not sent."""
    labelled = [
        (op, op.message_label(sending=kind is SEND)) for op in ops if op.kind is kind and op.peer != op.comm.rank
    ]
    return [(op, label) for op, label in labelled if op.count]


def _rooted_traffic(p: int, nbytes: int, is_root: bool) -> tuple[int, float]:
    return p - 1, float((p - 1) * nbytes if is_root else nbytes)


def _shard_traffic(p: int, nbytes: int, is_root: bool) -> tuple[int, float]:
    return p - 1, float((p - 1) * nbytes)


def _full_traffic(p: int, nbytes: int, is_root: bool) -> tuple[int, float]:
    return p - 1, float(nbytes)


def _all_reduce_traffic(p: int, nbytes: int, is_root: bool) -> tuple[int, float]:
    return 2 * (p - 1), 2 * (p - 1) / p * nbytes


def _p2p_traffic(p: int, nbytes: int, is_root: bool) -> tuple[int, float]:
    return 1, float(nbytes)


ALL_REDUCE = Kind("ncclAllReduce", all_reduce, _all_reduce_traffic, reduces=True)
REDUCE_SCATTER = Kind("ncclReduceScatter", reduce_scatter, _shard_traffic, reduces=True)
REDUCE = Kind("ncclReduce", reduce, _full_traffic, recv=UsedOn.ROOT, reduces=True, peer_is="root")
BROADCAST = Kind("ncclBroadcast", broadcast, _full_traffic, send=UsedOn.ROOT, peer_is="root")
ALL_GATHER = Kind("ncclAllGather", all_gather, _shard_traffic)
ALL_TO_ALL = Kind("ncclAlltoAll", all_to_all, _shard_traffic)
GATHER = Kind("ncclGather", gather, _rooted_traffic, recv=UsedOn.ROOT, peer_is="root")
SCATTER = Kind("ncclScatter", scatter, _rooted_traffic, send=UsedOn.ROOT, peer_is="root")
SEND = Kind("ncclSend", lambda op: Messages([op]).run(), _p2p_traffic, recv=UsedOn.NONE, peer_is="peer")
RECV = Kind("ncclRecv", lambda op: Messages([op]).run(), _p2p_traffic, send=UsedOn.NONE, peer_is="peer")


def _no_traffic(p: int, nbytes: int, is_root: bool) -> tuple[int, float]:
    return 0, 0.0


# Exchanges that create communicators or windows, which the simulated link does not delay.
SPLIT = Kind("ncclCommSplit", all_gather, _no_traffic)
WINDOW = Kind("ncclCommWindowRegister", all_gather, _no_traffic)
GROW = Kind("ncclCommGrow", all_gather, _no_traffic)


def gather_rows(comm: Comm, ticket: int, kind: Kind, row: Tensor) -> Tensor:
    """Gather one row per rank, in int64 or uint8, as the operation of `ticket`."""
    table = torch.empty(comm.size, row.numel(), dtype=row.dtype, device="cpu")
    dtype = STORAGE.index(row.dtype)
    comm.run(ticket, [Operation(kind, comm, row.data_ptr(), table.data_ptr(), row.numel(), dtype)])
    return table


_MESSAGES = frozenset((SEND, RECV))


def works_of(ops: Sequence[Operation]) -> list[Work]:
    """Return the units to execute in order: each collective, then all sends and receives together."""
    works: list[Work] = []
    messages: list[Operation] = []
    for op in ops:
        (messages if op.kind in _MESSAGES else works).append(op)
    return [*works, Messages(messages)] if messages else works
