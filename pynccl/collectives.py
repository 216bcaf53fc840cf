"""The operations a communicator offers: eight collectives, send and recv.

Each validates on this rank what can be validated there, then issues one C call (or a group of sends and receives on
libraries that lack the function). `send` and `recv` are buffers as in `buffers`; recv=None allocates like `send`;
sizes are counted in elements. N is the number of ranks, and `stream=None` the current stream of the library that owns
the buffer. Every method returns `recv`, whose contents are defined in the order of the stream.
Nothing here holds the buffers after the call: keep a reference to both until the stream has passed it.

Errors, all before anything is launched: TypeError (no buffer, no NCCL data type, no stream), ValueError (size, device,
contiguity, overlap, rank out of range, unknown operator), NcclInvalidUsage (a communicator that has ended).
"""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Any

from .abi import ITEMSIZE, DataType, RedOp
from .buffers import ANY_DEVICE, Adapter, adapter, device_name
from .check import compare
from .group import Call, group, state
from .streams import stream_handle

if TYPE_CHECKING:
    from .config import CollConfig
    from .library import Library

_OPS: dict[Any, int] = {
    **{op.name.lower(): int(op) for op in RedOp},
    **{op: int(op) for op in RedOp},
}


def op_code(op: Any) -> int:
    """ncclRedOp_t of "sum", RedOp.SUM or a `PreMulSum`; ValueError that lists the operators."""
    try:
        return _OPS[op]
    except (KeyError, TypeError):
        code = getattr(op, "code", None)
        if isinstance(code, int):
            return code
        raise ValueError(
            f"unknown operator {op!r}; pass one of {', '.join(repr(o.name.lower()) for o in RedOp)}, a pynccl.RedOp, "
            "or comm.pre_mul_sum(scalar, dtype)"
        ) from None


class Collectives:
    """The part of `Communicator` that moves data."""

    rank: int
    size: int
    library: Library
    lock: threading.RLock
    _handle: int | None
    _ordinal: int  # CUDA ordinal of the device; buffers.CPU with the host library
    _check: bool  # PYNCCL_CHECK=1

    def check_alive(self) -> None:
        raise NotImplementedError

    def all_reduce(
        self, send: Any, recv: Any = None, op: Any = "sum", *, stream: Any = None, config: CollConfig | None = None
    ) -> Any:
        """recv on every rank: the reduction of all ranks' send.  send [n] -> recv [n]; in place if recv is send."""
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
        source, target, count, dtype, recv, at = self._pair("all_gather", send, recv, stream, grow=self.size)
        self._issue("all_gather", "ncclAllGather", (source, target, count, dtype), at, (send, recv), config)
        return recv

    def reduce_scatter(
        self, send: Any, recv: Any = None, op: Any = "sum", *, stream: Any = None, config: CollConfig | None = None
    ) -> Any:
        """recv on rank r: block r of the reduction of all ranks' send.  send [N*n] -> recv [n].

        In place: recv is the part of send that starts at element rank*n."""
        source, target, count, dtype, recv, at = self._pair("reduce_scatter", send, recv, stream, shrink=self.size)
        args = (source, target, count // self.size, dtype, op_code(op))
        self._issue("reduce_scatter", "ncclReduceScatter", args, at, (send, recv), config)
        return recv

    def all_to_all(self, send: Any, recv: Any = None, *, stream: Any = None, config: CollConfig | None = None) -> Any:
        """Block j of send goes to rank j, to block `rank` of its recv.  send [N*n] -> recv [N*n]; never in place."""
        source, target, count, dtype, recv, at = self._pair("all_to_all", send, recv, stream, blocks=self.size)
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
            source, target, count, dtype, recv, at = self._pair("gather", send, recv, stream, grow=self.size)
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
            source, target, count, dtype, recv, at = self._pair("scatter", send, recv, stream, shrink=self.size)
            n = count // self.size
        else:
            target, n, dtype, at = self._one("scatter", "recv", recv, stream)
            adapter(recv).check_writable(recv)
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

    def send(self, buf: Any, peer: int, *, stream: Any = None) -> None:
        """Send buf to rank peer, which must recv as many elements of the same type. See `pynccl.group`."""
        self._check_rank("send", "peer", peer)
        pointer, count, dtype, at = self._one("send", "buf", buf, stream)
        self._p2p("ncclSend", pointer, count, dtype, peer, at, buf)

    def recv(self, buf: Any, peer: int, *, stream: Any = None) -> Any:
        """Receive into buf what rank peer sends. See `pynccl.group`."""
        self._check_rank("recv", "peer", peer)
        adapter(buf).check_writable(buf)
        pointer, count, dtype, at = self._one("recv", "buf", buf, stream)
        self._p2p("ncclRecv", pointer, count, dtype, peer, at, buf)
        return buf

    # The two gates: arguments in, calls out

    def _one(self, operation: str, role: str, x: Any, stream: Any) -> tuple[int, int, int, int]:
        """(pointer, count, data type, stream handle) of the only buffer of a call."""
        self.check_alive()
        kind = adapter(x)
        try:
            pointer, count, dtype, device = kind.describe(x)
            handle = kind.current_stream(x, device) if stream is None else stream_handle(stream)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{operation}: {role}: {error}") from None
        if device not in (self._ordinal, ANY_DEVICE):
            raise self._wrong_device(operation, role, device)
        return pointer, count, dtype, handle

    def _pair(
        self, operation: str, send: Any, recv: Any, stream: Any, *, grow: int = 1, shrink: int = 1, blocks: int = 1
    ) -> tuple[int, int, int, int, Any, int]:
        """(send pointer, recv pointer, send count, data type, recv, stream handle), all checks made.

        recv has grow/shrink times as many elements as send, which has to divide into `shrink` or `blocks` parts."""
        source, count, dtype, at = self._one(operation, "send", send, stream)
        parts = shrink * blocks
        if count % parts:
            raise ValueError(
                f"{operation}: send has {count} elements, not divisible by {parts} ranks; pad it or send uneven parts"
            )
        if recv is send and grow == shrink and blocks == 1:
            adapter(send).check_writable(send)
            return source, source, count, dtype, recv, at
        if recv is None:
            recv = self._allocate(operation, adapter(send), send, grow, shrink)
        target, recv_count, recv_dtype, _ = self._one(operation, "recv", recv, at)
        adapter(recv).check_writable(recv)
        if recv_dtype != dtype:
            raise ValueError(
                f"{operation}: send is {DataType(dtype).name}, recv is {DataType(recv_dtype).name}; they must be equal"
            )
        expected = count * grow // shrink
        if recv_count != expected:
            raise ValueError(
                f"{operation}: recv has {recv_count} elements, expected {expected} for send of {count} on {self.size} "
                "ranks"
            )
        if source < target + expected * ITEMSIZE[dtype] and target < source + count * ITEMSIZE[dtype]:
            self._check_overlap(operation, source, target, min(count, expected) * ITEMSIZE[dtype], grow, shrink, blocks)
        return source, target, count, dtype, recv, at

    def _allocate(self, operation: str, kind: Adapter, send: Any, grow: int, shrink: int) -> Any:
        shape = kind.shape(send) or (1,)
        if grow == shrink:
            return kind.empty(send, kind.shape(send))
        if shape[0] % shrink:
            raise ValueError(
                f"{operation}: dimension 0 has {shape[0]} rows, not divisible by {shrink} ranks; pad it or pass recv="
            )
        return kind.empty(send, (shape[0] * grow // shrink, *shape[1:]))

    def _check_overlap(
        self, operation: str, source: int, target: int, block: int, grow: int, shrink: int, blocks: int
    ) -> None:
        """Overlapping buffers are in place in NCCL's sense, or an error. `block`: bytes of the smaller one."""
        offset = (source - target if grow > 1 else target - source) if grow != shrink else target - source
        in_place = self.rank * block if grow != shrink else 0
        if blocks > 1 or offset != in_place:
            where = "send and recv must not overlap" if blocks > 1 else f"in place means an offset of {in_place} bytes"
            raise ValueError(f"{operation}: send and recv overlap, {target - source} bytes apart; {where}")

    def _check_rank(self, operation: str, role: str, rank: int) -> None:
        if not isinstance(rank, int) or not 0 <= rank < self.size:
            raise ValueError(f"{operation}: {role} is {rank!r}, expected a rank in 0..{self.size - 1}")

    def _wrong_device(self, operation: str, role: str, device: int) -> ValueError:
        return ValueError(
            f"{operation}: {role} is on {device_name(device)}, the communicator on {device_name(self._ordinal)}; "
            f"move it there, or use a communicator of {device_name(device)}"
        )

    def _issue(
        self, operation: str, function: str, args: tuple[int, ...], stream: int, keep: Any, config: CollConfig | None
    ) -> None:
        """Launch one C call now, or record it if a group is open in this thread."""
        tail: tuple[Any, ...] = (self._handle, stream)
        if config is not None:
            struct = config.to_struct(self.library)
            function += "Config"
            tail = (*tail, ctypes.byref(struct))
            keep = (keep, struct)
        call = Call(self, operation, getattr(self.library, function), args + tail, keep)  # type: ignore[arg-type]
        if state.calls is not None:
            state.calls.append(call)
            return
        if self._check:
            compare([call])
        with self.lock:
            self.check_alive()
            code = call.function(*call.args)
        if code:
            raise self.library.error(code, call.text(), self._handle)

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
        self._issue(function[4:].lower(), function, (pointer, count, dtype, peer), stream, keep, None)
