"""The collectives and send/recv, over tagged messages.

All are direct: one round of messages between everybody, or two (reduce-scatter, then all-gather) for a large
all_reduce. Whatever reduces does so in the order of the ranks, so all ranks end up with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from .failure import invalid_usage
from .memory import view
from .operation import Kind, Operation, Where
from .reduction import combine, wire_type
from .transport import Pending

if TYPE_CHECKING:
    from .comm import Comm

# Below this many bytes all_reduce sends everything to everybody: half the rounds, for (p-1)/2 times the bytes.
DIRECT_BYTES = 64 << 10
# Large reductions go in pieces, so that adding one piece overlaps with the transfer of the next.
PIECE_BYTES = 1 << 20


def _parts(data: Tensor, parts: int) -> list[Tensor]:
    """`data` cut into `parts` contiguous pieces whose sizes differ by at most one element."""
    n = data.numel()
    return [data[n * i // parts : n * (i + 1) // parts] for i in range(parts)]


def _copy(target: Tensor, source: Tensor) -> None:
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


def _contribution(op: Operation, count: int) -> Tensor:
    """What this rank adds: its send buffer, times the scalar of a pre-multiplied sum."""
    own = view(op.send, count, op.dtype)
    return own if (premul := op.premul) is None else premul.apply(own)


def _scratch(comm: Comm, op: Operation, rows: int, count: int) -> list[Tensor]:
    """`rows` buffers of `count` elements in the type in which contributions travel."""
    wire = wire_type(op.dtype, op.premul)
    flat = comm.scratch.take(rows * count * wire.itemsize).view(wire)
    return [flat[count * i : count * (i + 1)] for i in range(rows)]


def _gathered(comm: Comm, mine: Tensor, others: Sequence[Tensor]) -> list[Tensor]:
    """Contributions in the order of the ranks; `others` are in that order without this rank's."""
    return [*others[: comm.rank], mine, *others[comm.rank :]]


def all_reduce(comm: Comm, op: Operation) -> None:
    mine, out = _contribution(op, op.count), view(op.recv, op.count, op.dtype)
    if comm.size == 1:
        combine([mine], out, op.dtype, op.op)
    elif op.nbytes <= DIRECT_BYTES:
        others = _scratch(comm, op, comm.size - 1, op.count)
        comm.transport.exchange([(p, mine) for p in comm.peers], zip(comm.peers, others, strict=True), comm.tag(op))
        combine(_gathered(comm, mine, others), out, op.dtype, op.op)
    else:
        _reduce_shards(comm, op, _parts(mine, comm.size), _parts(out, comm.size)[comm.rank], _parts(out, comm.size))


def reduce_scatter(comm: Comm, op: Operation) -> None:
    mine, out = _contribution(op, op.count * comm.size), view(op.recv, op.count, op.dtype)
    if comm.size == 1:
        combine([mine], out, op.dtype, op.op)
    else:
        _reduce_shards(comm, op, _parts(mine, comm.size), out, None)


def _reduce_shards(
    comm: Comm, op: Operation, shards: list[Tensor], out: Tensor, everything: list[Tensor] | None
) -> None:
    """out = op over all ranks' shard of this rank; with `everything`, also gather all ranks' `out` into it.

    In place is safe: a peer's result of a piece can only arrive after that peer has received this rank's
    contribution to the same piece, which is what the result overwrites.
    """
    transport, rank, peers = comm.transport, comm.rank, comm.peers
    pieces = max(1, -(-max(shard.numel() for shard in shards) * shards[0].element_size() // PIECE_BYTES))
    others = _scratch(comm, op, len(peers), out.numel())
    cut = [_parts(shard, pieces) for shard in shards]
    incoming = [_parts(other, pieces) for other in others]
    results = _parts(out, pieces)
    targets = [_parts(shard, pieces) for shard in everything] if everything else []
    tag, gather_tag = comm.tag(op), comm.tag(op)
    sends: list[Pending] = []
    arrivals: list[list[Pending]] = []
    for k in range(pieces):
        sends += [transport.send(p, cut[p][k], tag) for p in peers if cut[p][k].numel()]
        rows = zip(peers, incoming, strict=True)
        arrivals.append([transport.recv(p, row[k], tag) for p, row in rows if row[k].numel()])
    gathers: list[Pending] = []
    for k in range(pieces):
        transport.wait(arrivals[k])
        combine(_gathered(comm, cut[rank][k], [row[k] for row in incoming]), results[k], op.dtype, op.op)
        if everything:
            sends += [transport.send(p, results[k], gather_tag) for p in peers if results[k].numel()]
            gathers += [transport.recv(p, targets[p][k], gather_tag) for p in peers if targets[p][k].numel()]
    transport.wait(gathers)
    transport.wait(sends)


def reduce(comm: Comm, op: Operation) -> None:
    mine = _contribution(op, op.count)
    if comm.rank != op.peer:
        comm.transport.exchange([(op.peer, mine)], [], comm.tag(op))
        return
    others = _scratch(comm, op, comm.size - 1, op.count)
    if comm.size > 1:
        comm.transport.exchange([], zip(comm.peers, others, strict=True), comm.tag(op))
    combine(_gathered(comm, mine, others), view(op.recv, op.count, op.dtype), op.dtype, op.op)


def broadcast(comm: Comm, op: Operation) -> None:
    out = view(op.recv, op.count, op.dtype)
    if comm.rank == op.peer:
        source = view(op.send, op.count, op.dtype)
        if comm.size > 1:
            comm.transport.exchange([(p, source) for p in comm.peers], [], comm.tag(op))
        _copy(out, source)
    else:
        comm.transport.exchange([], [(op.peer, out)], comm.tag(op))


def all_gather(comm: Comm, op: Operation) -> None:
    mine = view(op.send, op.count, op.dtype)
    rows = _parts(view(op.recv, op.count * comm.size, op.dtype), comm.size)
    if comm.size > 1:
        comm.transport.exchange([(p, mine) for p in comm.peers], [(p, rows[p]) for p in comm.peers], comm.tag(op))
    _copy(rows[comm.rank], mine)


def all_to_all(comm: Comm, op: Operation) -> None:
    source = view(op.send, op.count * comm.size, op.dtype)
    if (
        op.send == op.recv and op.count and comm.size > 1
    ):  # not in nccl.h's list of in-place calls, but cheap to get right
        source = source.clone()
    outgoing = _parts(source, comm.size)
    rows = _parts(view(op.recv, op.count * comm.size, op.dtype), comm.size)
    if comm.size > 1:
        comm.transport.exchange(
            [(p, outgoing[p]) for p in comm.peers], [(p, rows[p]) for p in comm.peers], comm.tag(op)
        )
    _copy(rows[comm.rank], outgoing[comm.rank])


def gather(comm: Comm, op: Operation) -> None:
    mine = view(op.send, op.count, op.dtype)
    if comm.rank != op.peer:
        comm.transport.exchange([(op.peer, mine)], [], comm.tag(op))
        return
    rows = _parts(view(op.recv, op.count * comm.size, op.dtype), comm.size)
    if comm.size > 1:
        comm.transport.exchange([], [(p, rows[p]) for p in comm.peers], comm.tag(op))
    _copy(rows[comm.rank], mine)


def scatter(comm: Comm, op: Operation) -> None:
    out = view(op.recv, op.count, op.dtype)
    if comm.rank != op.peer:
        comm.transport.exchange([], [(op.peer, out)], comm.tag(op))
        return
    rows = _parts(view(op.send, op.count * comm.size, op.dtype), comm.size)
    if comm.size > 1:
        comm.transport.exchange([(p, rows[p]) for p in comm.peers], [], comm.tag(op))
    _copy(out, rows[comm.rank])


def _alone(comm: Comm, op: Operation) -> None:
    point_to_point(comm, [op])


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


def point_to_point(comm: Comm, ops: Sequence[Operation]) -> None:
    """All sends and receives at once. Those of this rank to itself are copies, matched in their order."""
    works = []
    for op in (op for op in ops if op.kind is SEND and op.peer != comm.rank):
        tag = comm.message_tag(op.peer, op.nbytes, sending=True)
        if op.count:
            works.append(comm.transport.send(op.peer, _bytes(op.send, op), tag))
    for op in (op for op in ops if op.kind is RECV and op.peer != comm.rank):
        tag = comm.message_tag(op.peer, op.nbytes, sending=False)
        if op.count:
            works.append(comm.transport.recv(op.peer, _bytes(op.recv, op), tag))
    for source, target in zip(_to_itself(ops, SEND), _to_itself(ops, RECV), strict=True):
        _copy(_bytes(target.recv, target), _bytes(source.send, source))
    if works:
        comm.transport.wait(works)


def _bytes(address: int, op: Operation) -> Tensor:
    return view(address, op.nbytes, 1)


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


ALL_REDUCE = Kind(1, all_reduce, _twice, reduces=True)
REDUCE_SCATTER = Kind(2, reduce_scatter, _shards, reduces=True)
REDUCE = Kind(3, reduce, _whole, recv=Where.ON_ROOT, reduces=True, peer_is="root")
BROADCAST = Kind(4, broadcast, _whole, send=Where.ON_ROOT, peer_is="root")
ALL_GATHER = Kind(5, all_gather, _shards)
ALL_TO_ALL = Kind(6, all_to_all, _shards)
GATHER = Kind(7, gather, _rooted, recv=Where.ON_ROOT, peer_is="root")
SCATTER = Kind(8, scatter, _rooted, send=Where.ON_ROOT, peer_is="root")
SEND = Kind(9, _alone, _once, recv=Where.NOWHERE, peer_is="peer")
RECV = Kind(10, _alone, _once, send=Where.NOWHERE, peer_is="peer")
SPLIT = Kind(11, all_gather, lambda p, nbytes, is_root: (0, 0.0))

MESSAGES = (SEND, RECV)


def message_traffic(ops: Sequence[Operation]) -> tuple[int, float]:
    """A group's sends and receives share one step; the link is full duplex."""
    moved = [(op.kind is SEND, op.nbytes) for op in ops if op.peer != op.comm.rank]
    sent = sum(nbytes for sending, nbytes in moved if sending)
    return (1 if moved else 0), float(max(sent, sum(nbytes for _, nbytes in moved) - sent))
