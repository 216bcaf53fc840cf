"""The collectives and send/recv over tagged messages, and the table of all operations.

A collective is one round of messages between everybody; a large all_reduce has two, a reduce-scatter and an all-gather.
What reduces does so in the order of the ranks, so all ranks end up with the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from . import shared_collectives as shared
from .comm import Comm, Work
from .connection import Form, Label
from .failure import invalid_usage
from .memory import STORAGE, bytes_at, bytes_of, view
from .operation import Kind, Operation, Where
from .reduction import PreMulSum, combine, wire_type

# Up to here all_reduce sends everything to everybody: half the rounds, for (p-1)/2 times the bytes.
DIRECT_BYTES = 64 << 10


def _parts(data: Tensor, parts: int) -> list[Tensor]:
    """`data` cut into `parts` contiguous pieces whose sizes differ by at most one element."""
    n = data.numel()
    return [data[n * i // parts : n * (i + 1) // parts] for i in range(parts)]


def _sent(op: Operation, blocks: int = 1) -> Tensor:
    return view(op.send_ptr, op.count * blocks, op.dtype)


def _received(op: Operation, blocks: int = 1) -> Tensor:
    return view(op.recv_ptr, op.count * blocks, op.dtype)


def _contribution(own: Tensor, premul: PreMulSum | None) -> Tensor:
    """What this rank adds: its send buffer, times the scalar of a pre-multiplied sum."""
    return own if premul is None else premul.apply(own)


def _scratch(op: Operation, rows: int, count: int) -> list[Tensor]:
    """`rows` buffers of `count` elements in the type in which contributions travel."""
    wire = wire_type(op.dtype, op.premul)
    flat = op.comm.scratch.take(rows * count * wire.itemsize).view(wire)
    return [flat[count * i : count * (i + 1)] for i in range(rows)]


def _in_rank_order(comm: Comm, mine: Tensor, others: Sequence[Tensor]) -> list[Tensor]:
    """`others` are in the order of the ranks without this one."""
    return [*others[: comm.rank], mine, *others[comm.rank :]]


def _exchange(
    op: Operation, label: Label, sends: Iterable[tuple[int, Tensor]], recvs: Iterable[tuple[int, Tensor]]
) -> None:
    """One round of messages. Empty tensors travel in neither direction."""
    outgoing, incoming = ([(peer, bytes_of(data)) for peer, data in way if data.numel()] for way in (sends, recvs))
    if outgoing or incoming:
        op.comm.transport.exchange(outgoing, incoming, label)


def _reduce_blocks(op: Operation, label: Label, blocks: Sequence[Tensor], out: Tensor) -> None:
    """Rank p gets blocks[p] of everybody, and reduces what it has got."""
    comm, mine = op.comm, blocks[op.comm.rank]
    others = _scratch(op, len(comm.peers), mine.numel())
    _exchange(op, label, [(p, blocks[p]) for p in comm.peers], zip(comm.peers, others, strict=True))
    combine(_in_rank_order(comm, mine, others), out, op.dtype, op.op)


def all_reduce(op: Operation) -> None:
    comm, out, label = op.comm, _received(op), op.label()
    own = _contribution(_sent(op), op.premul)
    if op.nbytes <= DIRECT_BYTES:
        _reduce_blocks(op, label, [own] * comm.size, out)
        return
    shards = _parts(out, comm.size)
    mine = shards[comm.rank]
    _reduce_blocks(op, label, _parts(own, comm.size), mine)
    _exchange(op, label, [(p, mine) for p in comm.peers], [(p, shards[p]) for p in comm.peers])


def reduce_scatter(op: Operation) -> None:
    own = _contribution(_sent(op, op.comm.size), op.premul)
    _reduce_blocks(op, op.label(), _parts(own, op.comm.size), _received(op))


def reduce(op: Operation) -> None:
    comm, own = op.comm, _contribution(_sent(op), op.premul)
    if comm.rank != op.peer:
        _exchange(op, op.label(), [(op.peer, own)], [])
        return
    others = _scratch(op, len(comm.peers), op.count)
    _exchange(op, op.label(), [], zip(comm.peers, others, strict=True))
    combine(_in_rank_order(comm, own, others), _received(op), op.dtype, op.op)


def broadcast(op: Operation) -> None:
    comm, out = op.comm, _received(op)
    if comm.rank != op.peer:
        _exchange(op, op.label(), [], [(op.peer, out)])
        return
    source = _sent(op)
    _exchange(op, op.label(), [(p, source) for p in comm.peers], [])
    _copy(source, out)


def _copy(source: Tensor, target: Tensor) -> None:
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


def all_gather(op: Operation) -> None:
    comm, mine = op.comm, _sent(op)
    rows = _parts(_received(op, comm.size), comm.size)
    _exchange(op, op.label(), [(p, mine) for p in comm.peers], [(p, rows[p]) for p in comm.peers])
    _copy(mine, rows[comm.rank])


def all_to_all(op: Operation) -> None:
    comm, source = op.comm, _sent(op, op.comm.size)
    if op.send_ptr == op.recv_ptr:  # nccl.h promises nothing for it, but it is cheap to get right
        source = source.clone()
    blocks, rows = (_parts(whole, comm.size) for whole in (source, _received(op, comm.size)))
    _exchange(op, op.label(), [(p, blocks[p]) for p in comm.peers], [(p, rows[p]) for p in comm.peers])
    _copy(blocks[comm.rank], rows[comm.rank])


def gather(op: Operation) -> None:
    comm, mine = op.comm, _sent(op)
    if comm.rank != op.peer:
        _exchange(op, op.label(), [(op.peer, mine)], [])
        return
    rows = _parts(_received(op, comm.size), comm.size)
    _exchange(op, op.label(), [], [(p, rows[p]) for p in comm.peers])
    _copy(mine, rows[comm.rank])


def scatter(op: Operation) -> None:
    comm, out = op.comm, _received(op)
    if comm.rank != op.peer:
        _exchange(op, op.label(), [], [(op.peer, out)])
        return
    rows = _parts(_sent(op, comm.size), comm.size)
    _exchange(op, op.label(), [(p, rows[p]) for p in comm.peers], [])
    _copy(rows[comm.rank], out)


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


def _either(
    over_sockets: Callable[[Operation], None], in_memory: Callable[[Operation], None]
) -> Callable[[Operation], None]:
    """Through memory where the ranks share it."""
    return lambda op: over_sockets(op) if op.comm.shared is None else in_memory(op)


ALL_REDUCE = Kind("ncclAllReduce", _either(all_reduce, shared.all_reduce), _twice, reduces=True)
REDUCE_SCATTER = Kind("ncclReduceScatter", _either(reduce_scatter, shared.reduce_scatter), _shards, reduces=True)
REDUCE = Kind("ncclReduce", _either(reduce, shared.reduce), _whole, recv=Where.ON_ROOT, reduces=True, peer_is="root")
BROADCAST = Kind("ncclBroadcast", _either(broadcast, shared.broadcast), _whole, send=Where.ON_ROOT, peer_is="root")
ALL_GATHER = Kind("ncclAllGather", _either(all_gather, shared.all_gather), _shards)
ALL_TO_ALL = Kind("ncclAlltoAll", _either(all_to_all, shared.all_to_all), _shards)
GATHER = Kind("ncclGather", _either(gather, shared.gather), _rooted, recv=Where.ON_ROOT, peer_is="root")
SCATTER = Kind("ncclScatter", _either(scatter, shared.scatter), _rooted, send=Where.ON_ROOT, peer_is="root")
SEND = Kind("ncclSend", lambda op: Messages([op]).run(), _once, recv=Where.NOWHERE, peer_is="peer")
RECV = Kind("ncclRecv", lambda op: Messages([op]).run(), _once, send=Where.NOWHERE, peer_is="peer")


def _free(p: int, nbytes: int, is_root: bool) -> tuple[int, float]:
    return 0, 0.0


# What ranks tell each other to make something, outside of the modelled link.
SPLIT = Kind("ncclCommSplit", _either(all_gather, shared.all_gather), _free)
WINDOW = Kind("ncclCommWindowRegister", _either(all_gather, shared.all_gather), _free)
GROW = Kind("ncclCommGrow", _either(all_gather, shared.all_gather), _free)


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
