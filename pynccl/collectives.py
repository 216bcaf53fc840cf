"""The operations a communicator offers: eight collectives, three with a count per rank, send and recv.

Each validates on this rank what can be validated there, then issues one C call (or a group of sends and receives on
libraries that lack the function). `send` and `recv` are buffers as in `buffers`; recv=None allocates like `send`;
sizes are counted in elements. N is the number of ranks, and `stream=None` the current stream of the library that owns
the buffer. Every method returns `recv`, whose contents are defined in the order of the stream.
Nothing here holds the buffers after the call: keep a reference to both until the stream has passed it.

Errors, all before anything is launched: TypeError (no buffer, no NCCL data type, no stream), ValueError (size, device,
contiguity, overlap, rank out of range, unknown operator), NcclInvalidUsage (a communicator that has ended).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from .abi import ITEMSIZE
from .buffers import TORCH, adapter, tensor_types, torch_types
from .group import group, to_pointer
from .launch import Launcher
from .operators import op_code

if TYPE_CHECKING:
    from .config import CollConfig

_known_type = torch_types.get  # DataType of a torch.dtype, None if it was not met yet


class Collectives(Launcher):
    """The part of `Communicator` that moves data."""

    def all_reduce(
        self, send: Any, recv: Any = None, op: Any = "sum", *, stream: Any = None, config: CollConfig | None = None
    ) -> Any:
        """recv on every rank: the reduction of all ranks' send.  send [n] -> recv [n]; in place if recv is send."""
        # In place on a tensor is the call of a training loop. Written out, it takes half the time of the general way,
        # to which it leaves whatever is not plain. Finished C values are passed, as in plan.py: converting is slow.
        if recv is send and stream is None and config is None and type(send) in tensor_types and not self._detours:
            device, dtype = send.get_device(), _known_type(send.dtype)
            if device == self._ordinal and dtype is not None and send.is_contiguous():
                code = 0 if op == "sum" else op_code(op)
                current = to_pointer(TORCH.raw_stream(device)) if device >= 0 else None
                if pointer := send.data_ptr():
                    c_buffer, c_count = to_pointer(pointer), to_pointer(send.numel())
                    self._acquire()
                    try:
                        result = self._all_reduce(c_buffer, c_buffer, c_count, dtype, code, self._c_handle, current)
                    finally:
                        self._release()
                    if result:
                        self._fail(result, "all_reduce", (pointer, pointer, send.numel(), dtype, code))
                    return recv
        source, target, count, dtype, recv, at = self._pair("all_reduce", send, recv, stream)
        self._issue(
            "all_reduce", "ncclAllReduce", (source, target, count, dtype, op_code(op)), at, (send, recv), config
        )
        return recv

    def broadcast(
        self, send: Any, recv: Any = None, root: int = 0, *, stream: Any = None, config: CollConfig | None = None
    ) -> Any:
        """recv on every rank: root's send.  send [n] -> recv [n]; in place if recv is send."""
        self._check_rank("broadcast", "root", root)
        source, target, count, dtype, recv, at = self._pair("broadcast", send, recv, stream)
        self._issue("broadcast", "ncclBroadcast", (source, target, count, dtype, root), at, (send, recv), config)
        return recv

    def reduce(
        self,
        send: Any,
        recv: Any = None,
        op: Any = "sum",
        root: int = 0,
        *,
        stream: Any = None,
        config: CollConfig | None = None,
    ) -> Any:
        """recv on root: the reduction of all ranks' send; other ranks need no recv and get None.  [n] -> [n]"""
        self._check_rank("reduce", "root", root)
        if self.rank == root:
            source, target, count, dtype, recv, at = self._pair("reduce", send, recv, stream)
        else:
            source, count, dtype, at = self._one("reduce", "send", send, stream)
            target, recv = 0, None
        args = (source, target, count, dtype, op_code(op), root)
        self._issue("reduce", "ncclReduce", args, at, (send, recv), config)
        return recv

    def all_gather(self, send: Any, recv: Any = None, *, stream: Any = None, config: CollConfig | None = None) -> Any:
        """recv on every rank: all ranks' send, one after the other.  send [n] -> recv [N*n].

        In place: send is the part of recv that starts at element rank*n."""
        source, target, count, dtype, recv, at = self._pair("all_gather", send, recv, stream, self.size)
        self._issue("all_gather", "ncclAllGather", (source, target, count, dtype), at, (send, recv), config)
        return recv

    def reduce_scatter(
        self, send: Any, recv: Any = None, op: Any = "sum", *, stream: Any = None, config: CollConfig | None = None
    ) -> Any:
        """recv on rank r: block r of the reduction of all ranks' send.  send [N*n] -> recv [n].

        In place: recv is the part of send that starts at element rank*n."""
        source, target, count, dtype, recv, at = self._pair("reduce_scatter", send, recv, stream, 1, self.size)
        args = (source, target, count // self.size, dtype, op_code(op))
        self._issue("reduce_scatter", "ncclReduceScatter", args, at, (send, recv), config)
        return recv

    def all_to_all(self, send: Any, recv: Any = None, *, stream: Any = None, config: CollConfig | None = None) -> Any:
        """Block j of send goes to rank j, to block `rank` of its recv.  send [N*n] -> recv [N*n]; never in place."""
        source, target, count, dtype, recv, at = self._pair("all_to_all", send, recv, stream, 1, 1, self.size)
        n = count // self.size
        if self.library.supports("ncclAlltoAll"):
            self._issue("all_to_all", "ncclAlltoAll", (source, target, n, dtype), at, (send, recv), config)
            return recv
        step = n * ITEMSIZE[dtype]
        with group():
            for peer in range(self.size):
                self._p2p("ncclSend", source + peer * step, n, dtype, peer, at, send, config)
                self._p2p("ncclRecv", target + peer * step, n, dtype, peer, at, recv, config)
        return recv

    def gather(
        self, send: Any, recv: Any = None, root: int = 0, *, stream: Any = None, config: CollConfig | None = None
    ) -> Any:
        """recv on root: all ranks' send, one after the other; other ranks need no recv and get None.  [n] -> [N*n]"""
        self._check_rank("gather", "root", root)
        if self.rank == root:
            source, target, count, dtype, recv, at = self._pair("gather", send, recv, stream, self.size)
        else:
            source, count, dtype, at = self._one("gather", "send", send, stream)
            target, recv = 0, None
        if self.library.supports("ncclGather"):
            self._issue("gather", "ncclGather", (source, target, count, dtype, root), at, (send, recv), config)
            return recv
        step = count * ITEMSIZE[dtype]
        with group():
            self._p2p("ncclSend", source, count, dtype, root, at, send, config)
            for peer in range(self.size if self.rank == root else 0):
                self._p2p("ncclRecv", target + peer * step, count, dtype, peer, at, recv, config)
        return recv

    def scatter(
        self, send: Any, recv: Any = None, root: int = 0, *, stream: Any = None, config: CollConfig | None = None
    ) -> Any:
        """recv on rank r: block r of root's send.  send [N*n] -> recv [n].

        Other ranks than root need no send; with recv=None they pass one of root's shape and type all the same, to say
        what to allocate."""
        self._check_rank("scatter", "root", root)
        if self.rank == root or recv is None:
            if send is None:
                raise TypeError(f"scatter: rank {self.rank} passed neither send nor recv; pass recv=")
            source, target, count, dtype, recv, at = self._pair("scatter", send, recv, stream, 1, self.size)
            n = count // self.size
        else:
            target, n, dtype, at = self._one("scatter", "recv", recv, stream)
            self._check_writable("scatter", recv)
            source = 0
        if self.library.supports("ncclScatter"):
            self._issue("scatter", "ncclScatter", (source, target, n, dtype, root), at, (send, recv), config)
            return recv
        step = n * ITEMSIZE[dtype]
        with group():
            for peer in range(self.size if self.rank == root else 0):
                self._p2p("ncclSend", source + peer * step, n, dtype, peer, at, send, config)
            self._p2p("ncclRecv", target, n, dtype, root, at, recv, config)
        return recv

    def all_to_all_v(
        self,
        send: Any,
        recv: Any = None,
        *,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        stream: Any = None,
    ) -> Any:
        """all_to_all with a number of elements per rank: the next send_counts[j] elements of send go to rank j, and
        recv_counts[i] come from rank i, one after the other.  send [sum(send_counts)] -> recv [sum(recv_counts)]"""
        operation = "all_to_all_v"
        self._check_counts(operation, "send_counts", send_counts)
        self._check_counts(operation, "recv_counts", recv_counts)
        source, target, dtype, recv, at = self._uneven(
            operation, send, recv, sum(send_counts), sum(recv_counts), stream
        )
        starts = zip(accumulate(send_counts, initial=0), accumulate(recv_counts, initial=0), strict=True)
        size = ITEMSIZE[dtype]
        with group():
            for peer, (send_at, recv_at) in zip(range(self.size), starts, strict=False):
                self._p2p("ncclSend", source + send_at * size, send_counts[peer], dtype, peer, at, send)
                self._p2p("ncclRecv", target + recv_at * size, recv_counts[peer], dtype, peer, at, recv)
        return recv

    def all_gather_v(self, send: Any, recv: Any = None, *, counts: Sequence[int], stream: Any = None) -> Any:
        """all_gather with a number of elements per rank: rank r gives counts[r].  [counts[rank]] -> [sum(counts)]

        As a group of one broadcast per rank, so counts has to be equal on all ranks."""
        operation = "all_gather_v"
        self._check_counts(operation, "counts", counts)
        source, target, dtype, recv, at = self._uneven(operation, send, recv, counts[self.rank], sum(counts), stream)
        starts = list(accumulate(counts, initial=0))
        with group():
            for root, count in enumerate(counts):
                part = target + starts[root] * ITEMSIZE[dtype]
                inputs = (source if root == self.rank else part, part, count, dtype, root)
                self._issue("broadcast", "ncclBroadcast", inputs, at, (send, recv))
        return recv

    def reduce_scatter_v(
        self, send: Any, recv: Any = None, op: Any = "sum", *, counts: Sequence[int], stream: Any = None
    ) -> Any:
        """reduce_scatter with a number of elements per rank: rank r gets counts[r].  [sum(counts)] -> [counts[rank]]

        As a group of one reduce per rank, so counts has to be equal on all ranks."""
        operation = "reduce_scatter_v"
        self._check_counts(operation, "counts", counts)
        source, target, dtype, recv, at = self._uneven(operation, send, recv, sum(counts), counts[self.rank], stream)
        starts = list(accumulate(counts, initial=0))
        with group():
            for root, count in enumerate(counts):
                part = source + starts[root] * ITEMSIZE[dtype]
                inputs = (part, target if root == self.rank else 0, count, dtype, op_code(op), root)
                self._issue("reduce", "ncclReduce", inputs, at, (send, recv))
        return recv

    def send(self, buf: Any, peer: int, *, stream: Any = None) -> None:
        """Send buf to rank peer, which must recv as many elements of the same type. See `pynccl.group`."""
        self._check_rank("send", "peer", peer)
        pointer, count, dtype, at = self._one("send", "buf", buf, stream)
        self._p2p("ncclSend", pointer, count, dtype, peer, at, buf)

    def recv(self, buf: Any, peer: int, *, stream: Any = None) -> Any:
        """Receive into buf what rank peer sends. See `pynccl.group`."""
        self._check_rank("recv", "peer", peer)
        pointer, count, dtype, at = self._one("recv", "buf", buf, stream)
        self._check_writable("recv", buf)
        self._p2p("ncclRecv", pointer, count, dtype, peer, at, buf)
        return buf

    def _check_counts(self, operation: str, role: str, counts: Sequence[int]) -> None:
        if len(counts) != self.size or any(not isinstance(count, int) or count < 0 for count in counts):
            raise ValueError(f"{operation}: {role} is {list(counts)}, expected {self.size} numbers of elements >= 0")

    def _uneven(
        self, operation: str, send: Any, recv: Any, sent: int, received: int, stream: Any
    ) -> tuple[int, int, int, Any, int]:
        """(send pointer, recv pointer, data type, recv, stream handle) for so many elements, all checks made."""
        source, count, dtype, at = self._one(operation, "send", send, stream)
        if count != sent:
            raise ValueError(f"{operation}: send has {count} elements, the counts say {sent}")
        if recv is None:
            recv = adapter(send).empty(send, (received,))
        target = self._describe_recv(operation, recv, received, dtype, sent)
        size = ITEMSIZE[dtype]
        if sent and received and source < target + received * size and target < source + sent * size:
            raise ValueError(
                f"{operation}: send and recv overlap, {target - source} bytes apart; pass separate buffers"
            )
        return source, target, dtype, recv, at

    def _p2p(
        self,
        function: str,
        pointer: int,
        count: int,
        dtype: int,
        peer: int,
        stream: int,
        keep: Any,
        config: CollConfig | None = None,
    ) -> None:
        if config is not None:
            raise ValueError("config= needs NCCL >= 2.31; this library carries the operation by sends and receives")
        self._issue(function[4:].lower(), function, (pointer, count, dtype, peer), stream, keep)
