"""Collectives with a number of elements per rank, as groups of sends and receives, broadcasts or reduces.

Buffers, streams and errors are those of `collectives`; send and recv must not overlap. A count may be 0. Everything is
checked before anything is launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from ..bindings.abi import ITEMSIZE, DataType
from ..bindings.values import integers, listed
from ..interop.buffers import Buffer, adapter
from .argcheck import check_buffer, check_rank, check_recv, check_writable
from .base import Comm
from .enqueue import enqueue, enqueue_p2p
from .groups import group
from .redop import Op, op_code

_MOST = 1 << 60  # elements: no machine has as many bytes, and no offset in bytes reaches what C cuts off


def all_to_all_v(
    self: Comm,
    send: Buffer,
    recv: Buffer | None = None,
    *,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    stream: Any = None,
) -> Buffer:
    """all_to_all with a number of elements per rank: the next send_counts[j] elements of send go to rank j, and
    recv_counts[i] come from rank i, one after the other.  send [sum(send_counts)] -> recv [sum(recv_counts)]"""
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
    """all_gather with a number of elements per rank: rank r gives counts[r].  [counts[rank]] -> [sum(counts)]

    As a group of one broadcast per rank, so counts has to be equal on all ranks."""
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
    """reduce_scatter with a number of elements per rank: rank r gets counts[r].  [sum(counts)] -> [counts[rank]]

    As a group of one reduce per rank, so counts has to be equal on all ranks."""
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
    """scatter with a number of elements per rank: rank r gets counts[r].  [sum(counts)] on root -> [counts[rank]]

    counts has to be equal on all ranks. Other ranks than root need no send; with recv=None they pass any buffer of
    root's type all the same, to say what to allocate."""
    operation = "scatter_v"
    root = check_rank(f"{operation}: root", root, self.size)
    counts = _counts(self, operation, "counts", counts)
    own = counts[self.rank]
    send_ptr = 0
    if self.rank == root:
        _check_given(self, operation, send, recv, "send")
        send_ptr, recv_ptr, dtype, recv, stream = _check_buffers_v(
            self, operation, send, recv, sum(counts), own, stream
        )
    else:
        if recv is None:
            _check_given(self, operation, send, recv, "recv")
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
    """gather with a number of elements per rank: rank r gives counts[r].  [counts[rank]] -> [sum(counts)] on root

    counts has to be equal on all ranks. Other ranks than root need no recv and get None."""
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
    """`counts` as ints; ValueError unless they are one number of elements per rank."""
    given = listed(counts, f"{operation}: {role}", f"{comm.size} numbers of elements >= 0")
    if len(given) != comm.size:
        raise ValueError(f"{operation}: {role} is {given}, expected {comm.size} numbers of elements >= 0")
    expected = f"{comm.size} numbers of elements >= 0, below 2**63 bytes"
    return integers(given, f"{operation}: {role}", expected, 0, _MOST)


def _check_buffers_v(
    comm: Comm, operation: str, send: Any, recv: Any, sent: int, received: int, stream: Any
) -> tuple[int, int, int, Any, int]:
    """(send pointer, recv pointer, data type, recv, stream handle) for so many elements, all checks made."""
    send_ptr, count, dtype, stream = check_buffer(comm, operation, "send", send, stream)
    if count != sent:
        raise ValueError(f"{operation}: send has {count} elements, the counts say {sent}")
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
    """(pointer, data type, stream handle) of the only buffer of this rank, which has to hold so many elements."""
    pointer, count, dtype, stream = check_buffer(comm, operation, role, x, stream)
    if count != expected:
        raise ValueError(f"{operation}: {role} has {count} elements, the counts say {expected}")
    return pointer, dtype, stream


def _check_given(comm: Comm, operation: str, send: Any, recv: Any, missing: str) -> None:
    if send is None:
        raise TypeError(
            f"{operation}: rank {comm.rank} passed no {missing}"
            + (" and no send like which to allocate it" if missing == "recv" else "")
            + f"; pass {missing}="
        )
