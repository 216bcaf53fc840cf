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

from typing import TYPE_CHECKING, Any

from .abi import ITEMSIZE, RedOp
from .buffers import TORCH, tensor_types, torch_types
from .group import group, to_pointer
from .launch import Launcher

if TYPE_CHECKING:
    from .config import CollConfig

_OPS: dict[Any, int] = {
    **{op.name.lower(): int(op) for op in RedOp},
    **{op: int(op) for op in RedOp},
}
_known_type = torch_types.get  # DataType of a torch.dtype, None if it was not met yet


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
