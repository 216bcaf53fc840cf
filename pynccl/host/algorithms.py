"""The collectives and send/recv, and the table of all operations.

A collective is one round in which every rank sends blocks and receives some; a large all_reduce has two, a
reduce-scatter and an all-gather. A round goes through memory where the ranks share it (see `shared_collectives`), else
as messages. What reduces does so in the order of the ranks, so all ranks end up with the same bits.
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
from .operation import Kind, Operation, Where
from .reduction import combine
from .shared_collectives import Block

# Up to here all_reduce sends everything to everybody: half the rounds, for (p-1)/2 times the bytes.
DIRECT_BYTES = 64 << 10


class _Round(NamedTuple):
    """A call that has begun.

    apart: a rank has another block for each of its peers, and not one for all of them"""

    op: Operation
    label: Label
    apart: bool = False

    def move(self, sends: Sequence[Block], recvs: Sequence[Block], most: int) -> None:
        """Send and receive blocks of at most `most` bytes, a number that is equal on all ranks."""
        shared = self.op.comm.shared
        if not most:  # calls of no elements count, and ask nothing of others
            return
        if shared is None:
            outgoing, incoming = (
                [(peer, bytes_at(address, nbytes)) for peer, address, nbytes in way] for way in (sends, recvs)
            )
            if outgoing or incoming:  # not where there is one rank, which has no transport
                self.op.comm.transport.exchange(outgoing, incoming, self.label)
            return

        def read(start: int, n: int, at: Sequence[int]) -> None:
            for (_, address, nbytes), source in zip(recvs, at, strict=True):
                ctypes.memmove(address + start, source, max(min(n, nbytes - start), 0))

        shared_collectives.exchange(shared, self.apart, most, sends, [peer for peer, _, _ in recvs], read)

    def reduce(self, own: Tensor, ranges: Sequence[tuple[int, int]], out: int) -> None:
        """Rank r reduces the elements from ranges[r][0] to ranges[r][1] of all ranks' `own`, to the address `out`."""
        op, comm, itemsize = self.op, self.op.comm, own.element_size()
        if not op.count:
            return
        base, sizes = own.data_ptr(), [(end - start) * itemsize for start, end in ranges]
        begin, end = ranges[comm.rank]
        address, nbytes = base + begin * itemsize, sizes[comm.rank]
        sends = [(p, base + ranges[p][0] * itemsize, sizes[p]) for p in comm.peers if sizes[p]]
        if not comm.peers:
            combine([own], view(out, op.count, op.dtype), op.dtype, op.op)
            return
        if comm.shared is None:
            mine = own[begin:end]
            room = comm.scratch.take(len(comm.peers) * nbytes).view(own.dtype)
            others = room.chunk(len(comm.peers)) if nbytes else ()
            recvs = [(p, row.data_ptr(), nbytes) for p, row in zip(comm.peers, others, strict=False)]
            self.move(sends, recvs, op.count)
            if len(mine):
                in_order = [*others[: comm.rank], mine, *others[comm.rank :]]
                combine(in_order, view(out, len(mine), op.dtype), op.dtype, op.op)
            return

        def read(start: int, n: int, at: Sequence[int]) -> None:
            first, count = start // itemsize, max(min(n, nbytes - start), 0) // itemsize
            addresses = [*at[: comm.rank], address + start, *at[comm.rank :]]
            tensors = [tensor_at(one, count, own.dtype) for one in addresses]
            combine(tensors, view(out + first * op.itemsize, count, op.dtype), op.dtype, op.op)

        shared_collectives.exchange(comm.shared, self.apart, max(sizes), sends, comm.peers if nbytes else (), read)


def _begin(op: Operation, apart: bool = False) -> _Round:
    label = op.label()
    if op.comm.shared is not None:
        op.comm.shared.begin(label, op.nbytes)
    return _Round(op, label, apart)


def _contribution(op: Operation, blocks: int = 1) -> Tensor:
    """What this rank adds: its send buffer, times the scalar of a pre-multiplied sum."""
    own = view(op.send_ptr, op.count * blocks, op.dtype)
    return own if op.premul is None else op.premul.apply(own)


def all_reduce(op: Operation) -> None:
    """Between two ranks that share memory, a reduction of everything by both moves as much as one of a half by each."""
    comm, own = op.comm, _contribution(op)
    if op.nbytes <= DIRECT_BYTES or (comm.shared is not None and comm.size == 2):
        _begin(op).reduce(own, [(0, op.count)] * comm.size, op.recv_ptr)
        return
    cuts = [op.count * rank // comm.size for rank in range(comm.size + 1)]
    shards = list(itertools.pairwise(cuts))
    blocks = [(op.recv_ptr + start * op.itemsize, (end - start) * op.itemsize) for start, end in shards]
    mine = blocks[comm.rank]
    round_ = _begin(op, apart=True)
    round_.reduce(own, shards, mine[0])
    most = max(nbytes for _, nbytes in blocks)
    round_._replace(apart=False).move([(p, *mine) for p in comm.peers], [(p, *blocks[p]) for p in comm.peers], most)


def reduce_scatter(op: Operation) -> None:
    ranges = [(rank * op.count, (rank + 1) * op.count) for rank in range(op.comm.size)]
    _begin(op, apart=True).reduce(_contribution(op, op.comm.size), ranges, op.recv_ptr)


def reduce(op: Operation) -> None:
    ranges = [(0, op.count if rank == op.peer else 0) for rank in range(op.comm.size)]
    _begin(op).reduce(_contribution(op), ranges, op.recv_ptr)


def _one_each(op: Operation, base: int) -> list[Block]:
    """A block for each peer, of those in the order of the ranks at an address."""
    return [(peer, base + peer * op.nbytes, op.nbytes) for peer in op.comm.peers]


def _copy(op: Operation, target: int, source: int) -> None:
    """What this rank has for itself."""
    if target != source:
        ctypes.memmove(target, source, op.nbytes)


def broadcast(op: Operation) -> None:
    comm, n = op.comm, op.nbytes
    if comm.rank != op.peer:
        _begin(op).move([], [(op.peer, op.recv_ptr, n)], n)
        return
    _begin(op).move([(peer, op.send_ptr, n) for peer in comm.peers], [], n)
    _copy(op, op.recv_ptr, op.send_ptr)


def all_gather(op: Operation) -> None:
    comm, n = op.comm, op.nbytes
    _begin(op).move([(peer, op.send_ptr, n) for peer in comm.peers], _one_each(op, op.recv_ptr), n)
    _copy(op, op.recv_ptr + comm.rank * n, op.send_ptr)


def all_to_all(op: Operation) -> None:
    comm, n, source = op.comm, op.nbytes, op.send_ptr
    if source == op.recv_ptr:  # nccl.h promises nothing for it, but it is cheap to get right
        whole = view(source, op.count * comm.size, op.dtype).clone()
        source = whole.data_ptr()
    _begin(op, apart=True).move(_one_each(op, source), _one_each(op, op.recv_ptr), n)
    _copy(op, op.recv_ptr + comm.rank * n, source + comm.rank * n)


def gather(op: Operation) -> None:
    comm, n = op.comm, op.nbytes
    if comm.rank != op.peer:
        _begin(op).move([(op.peer, op.send_ptr, n)], [], n)
        return
    _begin(op).move([], _one_each(op, op.recv_ptr), n)
    _copy(op, op.recv_ptr + comm.rank * n, op.send_ptr)


def scatter(op: Operation) -> None:
    comm, n = op.comm, op.nbytes
    if comm.rank != op.peer:
        _begin(op, apart=True).move([], [(op.peer, op.recv_ptr, n)], n)
        return
    _begin(op, apart=True).move(_one_each(op, op.send_ptr), [], n)
    _copy(op, op.recv_ptr, op.send_ptr + comm.rank * n)


def _to_itself(ops: Sequence[Operation], kind: Kind) -> list[Operation]:
    return [op for op in ops if op.kind is kind and op.peer == op.comm.rank]


def check_messages_to_itself(ops: Sequence[Operation]) -> None:
    """A rank's sends to itself need receives from itself in the same group, else nobody would ever complete them."""
    sends, recvs = ([op.nbytes for op in _to_itself(ops, kind)] for kind in (SEND, RECV))
    if sends != recvs:
        raise invalid_usage(
            f"rank {ops[0].comm.rank} sends {sends} bytes to itself and receives {recvs} from itself; "
            "both have to be in one group, in the same order and of the same sizes"
        )


class Messages:
    """All sends and receives of a group on one communicator at once."""

    def __init__(self, ops: Sequence[Operation]) -> None:
        self._ops = ops

    def describe(self) -> str:
        return ", ".join(op.describe() for op in self._ops)

    def traffic(self) -> tuple[int, float]:
        """They share one step; the link is full duplex."""
        moved = [(op.kind is SEND, op.nbytes) for op in self._ops if op.peer != op.comm.rank]
        sent = sum(nbytes for sending, nbytes in moved if sending)
        return (1 if moved else 0), float(max(sent, sum(nbytes for _, nbytes in moved) - sent))

    def run(self) -> None:
        """Those of this rank to itself are copies, matched in their order.

        A send is over when it has been received, as the receiver tells: so a send that nobody receives, or of another
        size than is expected, is an error of both ranks whatever its size."""
        ops = self._ops
        sends, recvs = (_to_others(ops, kind) for kind in (SEND, RECV))
        if not sends and not recvs:  # as always where there is one rank, which has no transport
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
            transport.recv(op.peer, bytes_at(op.recv_ptr, op.nbytes), label, _answer(label)) for op, label in recvs
        ]
        answers = [transport.recv(op.peer, _NOTHING, _answer(label)) for op, label in sends]
        self._copy()
        transport.wait([*received, *answers, *sent])
        transport.wait([transfer.answer for transfer in received if transfer.answer is not None])

    def _copy(self) -> None:
        for source, target in zip(_to_itself(self._ops, SEND), _to_itself(self._ops, RECV), strict=True):
            ctypes.memmove(target.recv_ptr, source.send_ptr, target.nbytes)


_NOTHING = memoryview(b"")


def _answer(label: Label) -> Label:
    return label._replace(form=Form.ANSWER)


def _to_others(ops: Sequence[Operation], kind: Kind) -> list[tuple[Operation, Label]]:
    """The messages that travel, each with its label. Empty ones are counted and do not travel."""
    labelled = [
        (op, op.message_label(sending=kind is SEND)) for op in ops if op.kind is kind and op.peer != op.comm.rank
    ]
    return [(op, label) for op, label in labelled if op.count]


def _rooted(p: int, nbytes: int, is_root: bool) -> tuple[int, float]:
    return p - 1, float((p - 1) * nbytes if is_root else nbytes)


def _shards(p: int, nbytes: int, is_root: bool) -> tuple[int, float]:
    return p - 1, float((p - 1) * nbytes)


def _whole(p: int, nbytes: int, is_root: bool) -> tuple[int, float]:
    return p - 1, float(nbytes)


def _twice(p: int, nbytes: int, is_root: bool) -> tuple[int, float]:
    return 2 * (p - 1), 2 * (p - 1) / p * nbytes


def _once(p: int, nbytes: int, is_root: bool) -> tuple[int, float]:
    return 1, float(nbytes)


ALL_REDUCE = Kind("ncclAllReduce", all_reduce, _twice, reduces=True)
REDUCE_SCATTER = Kind("ncclReduceScatter", reduce_scatter, _shards, reduces=True)
REDUCE = Kind("ncclReduce", reduce, _whole, recv=Where.ON_ROOT, reduces=True, peer_is="root")
BROADCAST = Kind("ncclBroadcast", broadcast, _whole, send=Where.ON_ROOT, peer_is="root")
ALL_GATHER = Kind("ncclAllGather", all_gather, _shards)
ALL_TO_ALL = Kind("ncclAlltoAll", all_to_all, _shards)
GATHER = Kind("ncclGather", gather, _rooted, recv=Where.ON_ROOT, peer_is="root")
SCATTER = Kind("ncclScatter", scatter, _rooted, send=Where.ON_ROOT, peer_is="root")
SEND = Kind("ncclSend", lambda op: Messages([op]).run(), _once, recv=Where.NOWHERE, peer_is="peer")
RECV = Kind("ncclRecv", lambda op: Messages([op]).run(), _once, send=Where.NOWHERE, peer_is="peer")


def _free(p: int, nbytes: int, is_root: bool) -> tuple[int, float]:
    return 0, 0.0


# What ranks tell each other to make something, outside of the modelled link.
SPLIT = Kind("ncclCommSplit", all_gather, _free)
WINDOW = Kind("ncclCommWindowRegister", all_gather, _free)
GROW = Kind("ncclCommGrow", all_gather, _free)


def gather_rows(comm: Comm, ticket: int, kind: Kind, row: Tensor) -> Tensor:
    """The rows of all ranks, one each, in the turn of `ticket`; `row` is of int64 or uint8."""
    table = torch.empty(comm.size, row.numel(), dtype=row.dtype)
    dtype = STORAGE.index(row.dtype)
    comm.run(ticket, [Operation(kind, comm, row.data_ptr(), table.data_ptr(), row.numel(), dtype)])
    return table


_MESSAGES = frozenset((SEND, RECV))


def works_of(ops: Sequence[Operation]) -> list[Work]:
    """What runs one after the other: collectives one by one, then all sends and receives at once."""
    works: list[Work] = []
    messages: list[Operation] = []
    for op in ops:
        (messages if op.kind in _MESSAGES else works).append(op)
    return [*works, Messages(messages)] if messages else works
