"""Collectives with a different count per rank, as groups of sends and receives, broadcasts or reduces.

Buffers, streams and errors are as in `collectives`, but send and recv must not overlap. Counts are in elements and can
be 0. All checks run before anything is launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from ..bindings.abi import ITEMSIZE, DataType
from ..bindings.values import integers, ordered, shown
from ..interop.buffers import Buffer, adapter
from .argcheck import check_buffer, check_rank, check_recv, check_writable, count_of, swapped
from .base import Comm
from .enqueue import enqueue, enqueue_p2p
from .groups import group
from .redop import Op, op_code

_MAX_COUNT = 1 << 60  # elements; byte offsets then fit in 64 bits


def all_to_all_v(
    self: Comm,
    send: Buffer,
    recv: Buffer | None = None,
    *,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    stream: Any = None,
) -> Buffer:
    """Send the next send_counts[j] elements of send to each rank j, and receive recv_counts[i] from each rank i.

    Shapes: send [sum(send_counts)], recv [sum(recv_counts)], both packed in rank order. send_counts[j] on rank i must
    equal recv_counts[i] on rank j.
    In place: not supported; send and recv must not overlap.

    Returns recv; recv=None allocates it, one-dimensional. For stream and other errors see `all_reduce`."""
    operation = "all_to_all_v"
    send_counts = _counts(self, operation, "send_counts", send_counts)
    recv_counts = _counts(self, operation, "recv_counts", recv_counts)
    send_ptr, recv_ptr, dtype, recv, stream = _check_buffers_v(
        self, operation, send, recv, sum(send_counts), sum(recv_counts), stream
    )
    starts = zip(accumulate(send_counts, initial=0), accumulate(recv_counts, initial=0), strict=True)
    size = ITEMSIZE[dtype]
    with group():
        for peer, (send_at, recv_at) in zip(range(self.size), starts, strict=False):
            enqueue_p2p(self, "ncclSend", send_ptr + send_at * size, send_counts[peer], dtype, peer, stream, send)
            enqueue_p2p(self, "ncclRecv", recv_ptr + recv_at * size, recv_counts[peer], dtype, peer, stream, recv)
    return recv


def all_gather_v(
    self: Comm, send: Buffer, recv: Buffer | None = None, *, counts: Sequence[int], stream: Any = None
) -> Buffer:
    """Concatenate send of all ranks, in rank order, in recv on every rank; rank r contributes counts[r] elements.

    Shapes: send [counts[rank]], recv [sum(counts)].
    In place: not supported; send and recv must not overlap.

    Runs as a group of one broadcast per rank: counts must be equal on all ranks. Returns recv; recv=None allocates it,
    one-dimensional. For stream and other errors see `all_reduce`."""
    operation = "all_gather_v"
    counts = _counts(self, operation, "counts", counts)
    send_ptr, recv_ptr, dtype, recv, stream = _check_buffers_v(
        self, operation, send, recv, counts[self.rank], sum(counts), stream
    )
    starts = list(accumulate(counts, initial=0))
    with group():
        for root, count in enumerate(counts):
            part = recv_ptr + starts[root] * ITEMSIZE[dtype]
            inputs = (send_ptr if root == self.rank else part, part, count, dtype, root)
            enqueue(self, "broadcast", "ncclBroadcast", inputs, stream, send, recv)
    return recv


def reduce_scatter_v(
    self: Comm, send: Buffer, recv: Buffer | None = None, op: Op = "sum", *, counts: Sequence[int], stream: Any = None
) -> Buffer:
    """Reduce send over all ranks and store block r of the result, counts[r] elements, in recv on rank r.

    Shapes: send [sum(counts)], recv [counts[rank]].
    In place: not supported; send and recv must not overlap.

    Runs as a group of one reduce per rank: counts must be equal on all ranks. Returns recv; recv=None allocates it,
    one-dimensional. For op, stream and other errors see `all_reduce`."""
    operation = "reduce_scatter_v"
    counts = _counts(self, operation, "counts", counts)
    send_ptr, recv_ptr, dtype, recv, stream = _check_buffers_v(
        self, operation, send, recv, sum(counts), counts[self.rank], stream
    )
    starts = list(accumulate(counts, initial=0))
    code = op_code(op, self, operation, dtype)
    with group():
        for root, count in enumerate(counts):
            part = send_ptr + starts[root] * ITEMSIZE[dtype]
            inputs = (part, recv_ptr if root == self.rank else 0, count, dtype, code, root)
            enqueue(self, "reduce", "ncclReduce", inputs, stream, send, recv if root == self.rank else None, op=op)
    return recv


def scatter_v(
    self: Comm,
    send: Buffer | None,
    recv: Buffer | None = None,
    root: int = 0,
    *,
    counts: Sequence[int],
    stream: Any = None,
) -> Buffer:
    """Send block r of send on rank root, counts[r] elements, to recv on rank r.

    Shapes: send [sum(counts)] on root; recv [counts[rank]] on all ranks.
    In place: not supported; send and recv must not overlap.

    counts must be equal on all ranks. Ranks other than root can pass send=None together with a recv. With recv=None
    they pass any buffer of root's data type as send, and recv is allocated like it, one-dimensional. For stream and
    other errors see `all_reduce`."""
    operation = "scatter_v"
    root = check_rank(f"{operation}: root", root, self.size)
    counts = _counts(self, operation, "counts", counts)
    own = counts[self.rank]
    send_ptr = 0
    if self.rank == root:
        _require_send(self, operation, send, "send")
        send_ptr, recv_ptr, dtype, recv, stream = _check_buffers_v(
            self, operation, send, recv, sum(counts), own, stream
        )
    else:
        if recv is None:
            _require_send(self, operation, send, "recv")
            recv = adapter(send, operation, "send").empty(send, (own,))
        recv_ptr, dtype, stream = _check_buffer_v(self, operation, "recv", recv, own, stream)
        check_writable(operation, recv)
    text = f"scatter_v(counts={list(counts)}, {DataType(dtype).name}, root={root})"
    starts = list(accumulate(counts, initial=0))
    with group():
        for peer in range(self.size if self.rank == root else 0):
            part = send_ptr + starts[peer] * ITEMSIZE[dtype]
            enqueue_p2p(self, "ncclSend", part, counts[peer], dtype, peer, stream, send)
        enqueue_p2p(self, "ncclRecv", recv_ptr, own, dtype, root, stream, recv, compared=text)
    return recv


def gather_v(
    self: Comm, send: Buffer, recv: Buffer | None = None, root: int = 0, *, counts: Sequence[int], stream: Any = None
) -> Buffer | None:
    """Concatenate send of all ranks, in rank order, in recv on rank root; rank r contributes counts[r] elements.

    Shapes: send [counts[rank]] on all ranks; recv [sum(counts)] on root.
    In place: not supported; send and recv must not overlap.

    counts must be equal on all ranks. Returns recv on root (recv=None allocates it, one-dimensional) and None on the
    other ranks, where recv is ignored. For stream and other errors see `all_reduce`."""
    operation = "gather_v"
    root = check_rank(f"{operation}: root", root, self.size)
    counts = _counts(self, operation, "counts", counts)
    own = counts[self.rank]
    recv_ptr = 0
    if self.rank == root:
        send_ptr, recv_ptr, dtype, recv, stream = _check_buffers_v(
            self, operation, send, recv, own, sum(counts), stream
        )
    else:
        send_ptr, dtype, stream = _check_buffer_v(self, operation, "send", send, own, stream)
        recv = None
    text = f"gather_v(counts={list(counts)}, {DataType(dtype).name}, root={root})"
    starts = list(accumulate(counts, initial=0))
    with group():
        enqueue_p2p(self, "ncclSend", send_ptr, own, dtype, root, stream, send, compared=text)
        for peer in range(self.size if self.rank == root else 0):
            part = recv_ptr + starts[peer] * ITEMSIZE[dtype]
            enqueue_p2p(self, "ncclRecv", part, counts[peer], dtype, peer, stream, recv)
    return recv


def _counts(comm: Comm, operation: str, role: str, counts: Sequence[int]) -> list[int]:
    """Return `counts` as ints. ValueError unless there is one valid number of elements per rank."""
    values = ordered(counts, f"{operation}: {role}", f"a list of 1 count per rank ({comm.size} in all)")
    if len(values) != comm.size:
        raise ValueError(
            f"{operation}: {role} is {shown(values)}, expected 1 count per rank ({comm.size} in all), got {len(values)}"
        )
    expected = f"1 count per rank ({comm.size} in all), each >= 0 and below 2**63 bytes"
    return integers(values, f"{operation}: {role}", expected, 0, _MAX_COUNT)


def _check_buffers_v(
    comm: Comm, operation: str, send: Any, recv: Any, sent: int, received: int, stream: Any
) -> tuple[int, int, int, Any, int]:
    """Check buffers of `sent` and `received` elements; return (send pointer, recv pointer, data type, recv, stream)."""
    send_ptr, count, dtype, stream = check_buffer(comm, operation, "send", send, stream)
    if count != sent:
        hint = f"; {swapped(operation)}" if count == received and count_of(recv) == sent else ""
        raise ValueError(f"{operation}: send has {count} elements, expected {sent} by the counts{hint}")
    if recv is None:
        recv = adapter(send).empty(send, (received,))
    recv_ptr = check_recv(comm, operation, recv, received, dtype, sent)
    size = ITEMSIZE[dtype]
    if sent and received and send_ptr < recv_ptr + received * size and recv_ptr < send_ptr + sent * size:
        raise ValueError(
            f"{operation}: send and recv overlap, {recv_ptr - send_ptr} bytes apart; pass separate buffers"
        )
    return send_ptr, recv_ptr, dtype, recv, stream


def _check_buffer_v(comm: Comm, operation: str, role: str, x: Any, expected: int, stream: Any) -> tuple[int, int, int]:
    """Check the only buffer of this rank, of `expected` elements; return (pointer, data type, stream handle)."""
    pointer, count, dtype, stream = check_buffer(comm, operation, role, x, stream)
    if count != expected:
        raise ValueError(f"{operation}: {role} has {count} elements, expected {expected} by the counts")
    return pointer, dtype, stream


def _require_send(comm: Comm, operation: str, send: Any, missing: str) -> None:
    """TypeError if send is None. missing: the argument that the message names"""
    if send is None:
        raise TypeError(
            f"{operation}: rank {comm.rank} passed no {missing}"
            + (" and no send to allocate it from" if missing == "recv" else "")
            + f"; pass {missing}="
        )
