"""The collectives and send/recv over tagged messages, and the table of all operations.

Each function prepares one operation: it makes the views of the buffers and returns what runs it. All are direct: one
round of messages between everybody, or two (reduce-scatter, then all-gather) for a large all_reduce. Whatever reduces
does so in the order of the ranks, so all ranks end up with the same bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from . import shared_collectives as shared
from . import shared_reductions as sums
from .comm import Comm, Work
from .connection import Label, Transfer
from .failure import invalid_usage
from .memory import STORAGE, bytes_at, bytes_of, view
from .operation import Kind, Operation, Where
from .reduction import PreMulSum, combine, wire_type

# Below this many bytes all_reduce sends everything to everybody: half the rounds, for (p-1)/2 times the bytes.
DIRECT_BYTES = 64 << 10
_ANSWERS = 1 << 31  # in a tag: the message before was received
# Large reductions go in pieces, so that adding one piece overlaps with the transfer of the next. In an all_reduce,
# gathering overlaps as well; without it pieces are larger, since each wakes threads (measured with 2 ranks on 2 cores).
PIECE_BYTES = 4 << 20
LONE_PIECE_BYTES = 16 << 20


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
    op: Operation, sends: Iterable[tuple[int, Tensor]], recvs: Iterable[tuple[int, Tensor]]
) -> Callable[[], None]:
    """One round of messages, prepared. Empty tensors travel in neither direction."""
    comm = op.comm
    if comm.size == 1:
        return lambda: None
    outgoing = [(peer, data) for peer, data in sends if data.numel()]
    incoming = [(peer, data) for peer, data in recvs if data.numel()]
    bytes_out, bytes_in = ([(peer, bytes_of(data)) for peer, data in way] for way in (outgoing, incoming))

    def exchange(tensors: object = (outgoing, incoming)) -> None:  # which own the memory
        comm.transport.exchange(bytes_out, bytes_in, op.label())

    return exchange


def _direct(op: Operation, sends: Sequence[Tensor], out: Tensor) -> Callable[[], None]:
    """Rank p gets sends[p] of everybody, in one round; each rank reduces what it has got."""
    comm, mine = op.comm, sends[op.comm.rank]
    others = [torch.empty_like(mine) for _ in comm.peers]  # its own, since a small operation is kept for the next time
    op.held = sum(other.nbytes for other in others)
    exchange = _exchange(op, [(p, sends[p]) for p in comm.peers], zip(comm.peers, others, strict=True))
    parts = _in_rank_order(comm, mine, others)

    def direct() -> None:
        exchange()
        combine(parts, out, op.dtype, op.op)

    return direct


def _is_direct(op: Operation) -> bool:
    return op.premul is None and op.comm.size > 1 and op.nbytes <= DIRECT_BYTES


def all_reduce(op: Operation) -> Callable[[], None]:
    p, own, out = op.comm.size, _sent(op), _received(op)
    if _is_direct(op):
        return _direct(op, [own] * p, out)

    def sharded() -> None:
        shards = _parts(out, p)
        _reduce_shards(op, _parts(_contribution(own, op.premul), p), shards[op.comm.rank], shards)

    return sharded


def reduce_scatter(op: Operation) -> Callable[[], None]:
    p, own, out = op.comm.size, _sent(op, op.comm.size), _received(op)
    if _is_direct(op):
        return _direct(op, _parts(own, p), out)
    return lambda: _reduce_shards(op, _parts(_contribution(own, op.premul), p), out, [])


def _reduce_shards(op: Operation, shards: list[Tensor], out: Tensor, everything: list[Tensor]) -> None:
    """out = op over all ranks' shard of this rank; with `everything`, also gather all ranks' `out` into it.

    In place is safe: a peer's result of a piece can only arrive after that peer has received this rank's
    contribution to the same piece, which is what the result overwrites.
    """
    comm = op.comm
    if comm.size == 1:
        combine(shards, out, op.dtype, op.op)
        return
    transport, peers = comm.transport, comm.peers
    largest = max(shard.numel() for shard in shards) * shards[0].element_size()
    pieces = max(1, -(-largest // (PIECE_BYTES if everything else LONE_PIECE_BYTES)))
    cut = [_parts(shard, pieces) for shard in shards]
    incoming = [_parts(other, pieces) for other in _receive_buffers(op, shards[comm.rank], out)]
    results = _parts(out, pieces)
    targets = [_parts(shard, pieces) for shard in everything]
    label, gather_label = op.label(), op.label()
    sends: list[Transfer] = []
    arrivals: list[list[Transfer]] = []
    for k in range(pieces):
        sends += _post(transport.send, [(p, cut[p][k]) for p in peers], label)
        arrivals.append(_post(transport.recv, zip(peers, [row[k] for row in incoming], strict=True), label))
    gathers: list[Transfer] = []
    for k in range(pieces):
        transport.wait(arrivals[k])
        parts = _in_rank_order(comm, cut[comm.rank][k], [row[k] for row in incoming])
        combine(parts, results[k], op.dtype, op.op)
        if targets:
            sends += _post(transport.send, [(p, results[k]) for p in peers], gather_label)
            gathers += _post(transport.recv, [(p, targets[p][k]) for p in peers], gather_label)
    transport.wait(gathers)
    transport.wait(sends)


def _post(post: Callable[..., Transfer], rows: Iterable[tuple[int, Tensor]], label: Label) -> list[Transfer]:
    return [post(peer, bytes_of(data), label) for peer, data in rows if data.numel()]


def _receive_buffers(op: Operation, mine: Tensor, out: Tensor) -> list[Tensor]:
    """Where the peers' contributions arrive: the first one in `out` if it is free, which saves memory traffic."""
    rows = len(op.comm.peers)
    if out.dtype != mine.dtype or out.data_ptr() == mine.data_ptr():
        return _scratch(op, rows, out.numel())
    return [out, *_scratch(op, rows - 1, out.numel())]


def reduce(op: Operation) -> Callable[[], None]:
    comm, own = op.comm, _sent(op)
    if comm.rank != op.peer:

        def elsewhere() -> None:
            _exchange(op, [(op.peer, _contribution(own, op.premul))], [])()

        return elsewhere
    out = _received(op)

    def at_root() -> None:
        others = _scratch(op, len(comm.peers), op.count)
        _exchange(op, [], zip(comm.peers, others, strict=True))()
        combine(_in_rank_order(comm, _contribution(own, op.premul), others), out, op.dtype, op.op)

    return at_root


def _then_copy(exchange: Callable[[], None], target: Tensor, source: Tensor) -> Callable[[], None]:
    if target.data_ptr() == source.data_ptr():
        return exchange

    def both() -> None:
        exchange()
        target.copy_(source)

    return both


def broadcast(op: Operation) -> Callable[[], None]:
    comm, out = op.comm, _received(op)
    if comm.rank != op.peer:
        return _exchange(op, [], [(op.peer, out)])
    source = _sent(op)
    return _then_copy(_exchange(op, [(p, source) for p in comm.peers], []), out, source)


def all_gather(op: Operation) -> Callable[[], None]:
    comm, mine = op.comm, _sent(op)
    rows = _parts(_received(op, comm.size), comm.size)
    exchange = _exchange(op, [(p, mine) for p in comm.peers], [(p, rows[p]) for p in comm.peers])
    return _then_copy(exchange, rows[comm.rank], mine)


def all_to_all(op: Operation) -> Callable[[], None]:
    comm, source = op.comm, _sent(op, op.comm.size)
    rows = _parts(_received(op, comm.size), comm.size)

    def exchange(blocks: list[Tensor]) -> Callable[[], None]:
        return _exchange(op, [(p, blocks[p]) for p in comm.peers], [(p, rows[p]) for p in comm.peers])

    if op.send_ptr == op.recv_ptr:  # nccl.h promises nothing for it, but it is cheap to get right

        def in_place() -> None:
            exchange(_parts(source.clone(), comm.size))()

        return in_place
    blocks = _parts(source, comm.size)
    return _then_copy(exchange(blocks), rows[comm.rank], blocks[comm.rank])


def gather(op: Operation) -> Callable[[], None]:
    comm, mine = op.comm, _sent(op)
    if comm.rank != op.peer:
        return _exchange(op, [(op.peer, mine)], [])
    rows = _parts(_received(op, comm.size), comm.size)
    return _then_copy(_exchange(op, [], [(p, rows[p]) for p in comm.peers]), rows[comm.rank], mine)


def scatter(op: Operation) -> Callable[[], None]:
    comm, out = op.comm, _received(op)
    if comm.rank != op.peer:
        return _exchange(op, [], [(op.peer, out)])
    rows = _parts(_sent(op, comm.size), comm.size)
    return _then_copy(_exchange(op, [(p, rows[p]) for p in comm.peers], []), out, rows[comm.rank])


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

    held = 0

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
    return label._replace(tag=label.tag ^ _ANSWERS)


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
    over_sockets: Callable[[Operation], Callable[[], None]], in_memory: Callable[[Operation], Callable[[], None]]
) -> Callable[[Operation], Callable[[], None]]:
    """Through memory where the ranks share it."""
    return lambda op: (over_sockets if op.comm.shared is None else in_memory)(op)


ALL_REDUCE = Kind("ncclAllReduce", 1, _either(all_reduce, sums.all_reduce), _twice, reduces=True)
REDUCE_SCATTER = Kind("ncclReduceScatter", 2, _either(reduce_scatter, sums.reduce_scatter), _shards, reduces=True)
REDUCE = Kind("ncclReduce", 3, _either(reduce, sums.reduce), _whole, recv=Where.ON_ROOT, reduces=True, peer_is="root")
BROADCAST = Kind("ncclBroadcast", 4, _either(broadcast, shared.broadcast), _whole, send=Where.ON_ROOT, peer_is="root")
ALL_GATHER = Kind("ncclAllGather", 5, _either(all_gather, shared.all_gather), _shards)
ALL_TO_ALL = Kind("ncclAlltoAll", 6, _either(all_to_all, shared.all_to_all), _shards)
GATHER = Kind("ncclGather", 7, _either(gather, shared.gather), _rooted, recv=Where.ON_ROOT, peer_is="root")
SCATTER = Kind("ncclScatter", 8, _either(scatter, shared.scatter), _rooted, send=Where.ON_ROOT, peer_is="root")
SEND = Kind("ncclSend", 9, lambda op: Messages([op]).run, _once, recv=Where.NOWHERE, peer_is="peer")
RECV = Kind("ncclRecv", 10, lambda op: Messages([op]).run, _once, send=Where.NOWHERE, peer_is="peer")


def _free(p: int, nbytes: int, is_root: bool) -> tuple[int, float]:
    return 0, 0.0


# What ranks tell each other to make something, outside of the modelled link.
SPLIT = Kind("ncclCommSplit", 11, _either(all_gather, shared.all_gather), _free)
WINDOW = Kind("ncclCommWindowRegister", 12, _either(all_gather, shared.all_gather), _free)
GROW = Kind("ncclCommGrow", 13, _either(all_gather, shared.all_gather), _free)


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
