"""The collectives, and send and recv. Those with a count per rank: collectives_v.py.

Each validates on this rank what can be validated there, then issues one C call (or a group of sends and receives on
libraries that lack the function). `send` and `recv` are buffers as in `buffers`; recv=None allocates like `send`;
sizes are counted in elements. N is the number of ranks, and `stream=None` the current stream of the library that owns
the buffer. Every method returns `recv`, whose contents are defined in the order of the stream.

Buffers may be dropped once the call has returned, on the current stream, on streams of pynccl and of torch. On another
library's stream, or where only its handle is passed, keep them until it has run: docs/streams.md. A torch tensor that
is received into has its version counted, as by an operation of torch, so that a backward pass that saved it says so.

Errors, all before anything is launched: TypeError (no buffer, no NCCL data type, no stream), ValueError (size, device,
contiguity, overlap, rank out of range, unknown operator, a buffer that requires grad, under grad mode),
NcclInvalidUsage (a communicator that has ended).
"""

from __future__ import annotations

from typing import Any

from ..bindings.abi import ITEMSIZE
from ..bindings.structs import CollConfig
from ..interop.buffers import Buffer
from .argcheck import check_buffer, check_buffers, check_rank, check_writable
from .base import Comm
from .enqueue import enqueue, enqueue_p2p
from .groups import group
from .redop import Op, op_code


def all_reduce(
    self: Comm,
    send: Buffer,
    recv: Buffer | None = None,
    op: Op = "sum",
    *,
    stream: Any = None,
    config: CollConfig | None = None,
) -> Buffer:
    """recv on every rank: the reduction of all ranks' send.  send [n] -> recv [n]; in place if recv is send."""
    send_ptr, recv_ptr, count, dtype, recv, stream = check_buffers(self, "all_reduce", send, recv, stream)
    args = (send_ptr, recv_ptr, count, dtype, op_code(op, self, "all_reduce", dtype))
    enqueue(self, "all_reduce", "ncclAllReduce", args, stream, send, recv, config, op)
    return recv


def broadcast(
    self: Comm,
    send: Buffer,
    recv: Buffer | None = None,
    root: int = 0,
    *,
    stream: Any = None,
    config: CollConfig | None = None,
) -> Buffer:
    """recv on every rank: root's send.  send [n] -> recv [n]; in place if recv is send."""
    root = check_rank("broadcast: root", root, self.size)
    send_ptr, recv_ptr, count, dtype, recv, stream = check_buffers(self, "broadcast", send, recv, stream)
    args = (send_ptr, recv_ptr, count, dtype, root)
    enqueue(self, "broadcast", "ncclBroadcast", args, stream, send, recv, config)
    return recv


def reduce(
    self: Comm,
    send: Buffer,
    recv: Buffer | None = None,
    op: Op = "sum",
    root: int = 0,
    *,
    stream: Any = None,
    config: CollConfig | None = None,
) -> Buffer | None:
    """recv on root: the reduction of all ranks' send; other ranks need no recv and get None.  [n] -> [n]"""
    root = check_rank("reduce: root", root, self.size)
    if self.rank == root:
        send_ptr, recv_ptr, count, dtype, recv, stream = check_buffers(self, "reduce", send, recv, stream)
    else:  # recv is not written
        send_ptr, count, dtype, stream = check_buffer(self, "reduce", "send", send, stream)
        recv_ptr, recv = 0, None
    args = (send_ptr, recv_ptr, count, dtype, op_code(op, self, "reduce", dtype), root)
    enqueue(self, "reduce", "ncclReduce", args, stream, send, recv, config, op)
    return recv


def all_gather(
    self: Comm, send: Buffer, recv: Buffer | None = None, *, stream: Any = None, config: CollConfig | None = None
) -> Buffer:
    """recv on every rank: all ranks' send, one after the other.  send [n] -> recv [N*n].

    In place: send is the part of recv that starts at element rank*n."""
    send_ptr, recv_ptr, count, dtype, recv, stream = check_buffers(self, "all_gather", send, recv, stream, self.size)
    args = (send_ptr, recv_ptr, count, dtype)
    enqueue(self, "all_gather", "ncclAllGather", args, stream, send, recv, config)
    return recv


def reduce_scatter(
    self: Comm,
    send: Buffer,
    recv: Buffer | None = None,
    op: Op = "sum",
    *,
    stream: Any = None,
    config: CollConfig | None = None,
) -> Buffer:
    """recv on rank r: block r of the reduction of all ranks' send.  send [N*n] -> recv [n].

    In place: recv is the part of send that starts at element rank*n."""
    send_ptr, recv_ptr, count, dtype, recv, stream = check_buffers(
        self, "reduce_scatter", send, recv, stream, 1, self.size
    )
    args = (send_ptr, recv_ptr, count // self.size, dtype, op_code(op, self, "reduce_scatter", dtype))
    enqueue(self, "reduce_scatter", "ncclReduceScatter", args, stream, send, recv, config, op)
    return recv


def all_to_all(
    self: Comm, send: Buffer, recv: Buffer | None = None, *, stream: Any = None, config: CollConfig | None = None
) -> Buffer:
    """Block j of send goes to rank j, to block `rank` of its recv.  send [N*n] -> recv [N*n]; never in place."""
    send_ptr, recv_ptr, count, dtype, recv, stream = check_buffers(
        self, "all_to_all", send, recv, stream, 1, 1, self.size
    )
    n = count // self.size
    if self.library.supports("ncclAlltoAll"):
        args = (send_ptr, recv_ptr, n, dtype)
        enqueue(self, "all_to_all", "ncclAlltoAll", args, stream, send, recv, config)
        return recv
    step = n * ITEMSIZE[dtype]
    with group():
        for peer in range(self.size):
            enqueue_p2p(self, "ncclSend", send_ptr + peer * step, n, dtype, peer, stream, send, config)
            enqueue_p2p(self, "ncclRecv", recv_ptr + peer * step, n, dtype, peer, stream, recv, config)
    return recv


def gather(
    self: Comm,
    send: Buffer,
    recv: Buffer | None = None,
    root: int = 0,
    *,
    stream: Any = None,
    config: CollConfig | None = None,
) -> Buffer | None:
    """recv on root: all ranks' send, one after the other; other ranks need no recv and get None.  [n] -> [N*n]"""
    root = check_rank("gather: root", root, self.size)
    if self.rank == root:
        send_ptr, recv_ptr, count, dtype, recv, stream = check_buffers(self, "gather", send, recv, stream, self.size)
    else:  # recv is not written
        send_ptr, count, dtype, stream = check_buffer(self, "gather", "send", send, stream)
        recv_ptr, recv = 0, None
    if self.library.supports("ncclGather"):
        args = (send_ptr, recv_ptr, count, dtype, root)
        enqueue(self, "gather", "ncclGather", args, stream, send, recv, config)
        return recv
    step = count * ITEMSIZE[dtype]
    with group():
        enqueue_p2p(self, "ncclSend", send_ptr, count, dtype, root, stream, send, config)
        for peer in range(self.size if self.rank == root else 0):
            enqueue_p2p(self, "ncclRecv", recv_ptr + peer * step, count, dtype, peer, stream, recv, config)
    return recv


def scatter(
    self: Comm,
    send: Buffer | None,
    recv: Buffer | None = None,
    root: int = 0,
    *,
    stream: Any = None,
    config: CollConfig | None = None,
) -> Buffer:
    """recv on rank r: block r of root's send.  send [N*n] -> recv [n].

    Other ranks than root need no send; with recv=None they pass one of root's shape and type all the same, to say
    what to allocate."""
    root = check_rank("scatter: root", root, self.size)
    if self.rank != root and recv is not None:
        send = None  # not read
    if self.rank == root or recv is None:
        if send is None:
            raise TypeError(f"scatter: rank {self.rank} passed neither send nor recv; pass recv=")
        send_ptr, recv_ptr, count, dtype, recv, stream = check_buffers(
            self, "scatter", send, recv, stream, 1, self.size
        )
        n = count // self.size
    else:
        recv_ptr, n, dtype, stream = check_buffer(self, "scatter", "recv", recv, stream)
        check_writable("scatter", recv)
        send_ptr = 0
    if self.library.supports("ncclScatter"):
        args = (send_ptr, recv_ptr, n, dtype, root)
        enqueue(self, "scatter", "ncclScatter", args, stream, send, recv, config)
        return recv
    step = n * ITEMSIZE[dtype]
    with group():
        for peer in range(self.size if self.rank == root else 0):
            enqueue_p2p(self, "ncclSend", send_ptr + peer * step, n, dtype, peer, stream, send, config)
        enqueue_p2p(self, "ncclRecv", recv_ptr, n, dtype, root, stream, recv, config)
    return recv


def send(self: Comm, buf: Any, peer: int, *, stream: Any = None) -> None:
    """Send buf to rank peer, which must recv as many elements of the same type. See `pynccl.group`."""
    peer = check_rank("send: peer", peer, self.size)
    pointer, count, dtype, stream = check_buffer(self, "send", "buf", buf, stream)
    enqueue_p2p(self, "ncclSend", pointer, count, dtype, peer, stream, buf)


def recv(self: Comm, buf: Buffer, peer: int, *, stream: Any = None) -> Buffer:
    """Receive into buf what rank peer sends. See `pynccl.group`."""
    peer = check_rank("recv: peer", peer, self.size)
    pointer, count, dtype, stream = check_buffer(self, "recv", "buf", buf, stream)
    check_writable("recv", buf)
    enqueue_p2p(self, "ncclRecv", pointer, count, dtype, peer, stream, buf)
    return buf


# Collectives of which one of the two buffers has a block per rank.
PARTED = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")


def bus_factor(operation: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth: the part of the full buffer that crosses the busiest link.

    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md"""
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if operation in PARTED else 1.0
