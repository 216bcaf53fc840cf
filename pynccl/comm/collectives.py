"""The collectives, send and recv. For collectives with a different count per rank see collectives_v.py.

Each method validates its arguments on this rank, then makes one C call (or a group of sends and receives, if the
library lacks the function). In shapes, N is the number of ranks, and sizes are in elements. The arguments and errors
that all methods share are documented at `all_reduce`.

You can drop the buffers once the call has returned if it runs on the current stream, a torch stream or a pynccl
stream. With another library's stream, or a bare stream handle, keep them until it has run (docs/streams.md). Receiving
into a torch tensor bumps its version counter, so autograd detects a tensor that was saved for backward and overwritten.
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
    """Reduce send over all ranks and store the result in recv on every rank.

    Shapes: send [n], recv [n], equal on all ranks.
    In place: pass the same buffer as send and recv.

    send, recv  contiguous buffers on the communicator's device: torch tensors, CuPy or NumPy arrays, `Memory`, objects
                with DLPack or `__cuda_array_interface__`, or (pointer, count, dtype). recv=None: allocated like send.
    op          "sum", "prod", "min", "max", "avg", a `RedOp`, or an operator from `pre_mul_sum`
    stream      where the operation runs; None: the current stream of the library that owns send
    config      a `CollConfig` for this call (NCCL >= 2.31)

    Enqueues the operation and returns recv, whose contents are valid in stream order.

    Raises, before anything is launched, TypeError (not a buffer or stream, or a data type that NCCL lacks), ValueError
    (size, device, contiguity, overlap, rank out of range, unknown op, or a tensor that requires grad while grad
    mode is on) or NcclInvalidUsage (the communicator was destroyed or aborted)."""
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
    """Copy send of rank root to recv on every rank.

    Shapes: send [n], recv [n]. Ranks other than root pass a send of the same size and data type; it is not read.
    In place: pass the same buffer as send and recv. For stream, recv=None and errors see `all_reduce`."""
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
    """Reduce send over all ranks and store the result in recv on rank root.

    Shapes: send [n] on all ranks, recv [n] on root.
    In place: on root, pass the same buffer as send and recv.

    Returns recv on root and None on the other ranks, where recv is ignored. For op, stream, recv=None and errors see
    `all_reduce`."""
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
    """Concatenate send of all ranks, in rank order, in recv on every rank.

    Shapes: send [n], equal on all ranks; recv [N*n].
    In place: send is the slice of recv that starts at element rank*n.

    recv=None allocates a buffer like send whose dimension 0 is N times as large. For stream and errors see
    `all_reduce`."""
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
    """Reduce send over all ranks and store block r of the result in recv on rank r.

    Shapes: send [N*n], equal on all ranks; recv [n].
    In place: recv is the slice of send that starts at element rank*n.

    recv=None allocates a buffer like send whose dimension 0 is 1/N as large. Raises ValueError if the size of send is
    not divisible by N. For op, stream and other errors see `all_reduce`."""
    send_ptr, recv_ptr, count, dtype, recv, stream = check_buffers(
        self, "reduce_scatter", send, recv, stream, 1, self.size
    )
    args = (send_ptr, recv_ptr, count // self.size, dtype, op_code(op, self, "reduce_scatter", dtype))
    enqueue(self, "reduce_scatter", "ncclReduceScatter", args, stream, send, recv, config, op)
    return recv


def all_to_all(
    self: Comm, send: Buffer, recv: Buffer | None = None, *, stream: Any = None, config: CollConfig | None = None
) -> Buffer:
    """Send block j of send to rank j and receive block i of recv from rank i.

    Shapes: send [N*n], recv [N*n], equal on all ranks.
    In place: not supported; send and recv must not overlap.

    Raises ValueError if the size of send is not divisible by N. For stream, recv=None and other errors see
    `all_reduce`."""
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
    """Concatenate send of all ranks, in rank order, in recv on rank root.

    Shapes: send [n], equal on all ranks; recv [N*n] on root.
    In place: on root, send is the slice of recv that starts at element root*n.

    Returns recv on root and None on the other ranks, where recv is ignored. recv=None on root allocates a buffer like
    send whose dimension 0 is N times as large. For stream and errors see `all_reduce`."""
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
    """Send block r of send on rank root to recv on rank r.

    Shapes: send [N*n] on root; recv [n] on all ranks.
    In place: on root, recv is the slice of send that starts at element root*n.

    Ranks other than root can pass send=None together with a recv. With recv=None every rank passes a send of root's
    shape and data type, and recv is allocated like send with dimension 0 1/N as large. For stream and errors see
    `all_reduce`."""
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
    """Send buf to rank peer, which must call `recv` with the same number of elements and data type.

    Point-to-point calls that must progress together, such as a send and a recv with the same peer, belong in one
    `pynccl.group`. For stream and errors see `all_reduce`."""
    peer = check_rank("send: peer", peer, self.size)
    pointer, count, dtype, stream = check_buffer(self, "send", "buf", buf, stream)
    enqueue_p2p(self, "ncclSend", pointer, count, dtype, peer, stream, buf)


def recv(self: Comm, buf: Buffer, peer: int, *, stream: Any = None) -> Buffer:
    """Receive into buf from rank peer, which must call `send` with the same number of elements and data type.

    Returns buf. Point-to-point calls that must progress together belong in one `pynccl.group`. For stream and errors
    see `all_reduce`."""
    peer = check_rank("recv: peer", peer, self.size)
    pointer, count, dtype, stream = check_buffer(self, "recv", "buf", buf, stream)
    check_writable("recv", buf)
    enqueue_p2p(self, "ncclRecv", pointer, count, dtype, peer, stream, buf)
    return buf


# Collectives in which one of the two buffers holds one block per rank.
BLOCK_COLLECTIVES = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")


def bus_factor(operation: str, ranks: int) -> float:
    """Return busbw / algbw: the fraction of the full buffer that crosses the busiest link.

    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md"""
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if operation in BLOCK_COLLECTIVES else 1.0
