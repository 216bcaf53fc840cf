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
from .argcheck import ArgCheck, check_rank
from .enqueue import Enqueue
from .groups import group
from .redop import Op, op_code


class Collectives(ArgCheck, Enqueue):
    """The part of `Communicator` that moves data."""

    def all_reduce(
        self,
        send: Buffer,
        recv: Buffer | None = None,
        op: Op = "sum",
        *,
        stream: Any = None,
        config: CollConfig | None = None,
    ) -> Buffer:
        """recv on every rank: the reduction of all ranks' send.  send [n] -> recv [n]; in place if recv is send."""
        fast = self._fast["all_reduce"]
        if config is None and (done := fast.launch(send, recv, op, None, stream)) is not None:
            return done
        send_ptr, recv_ptr, count, dtype, recv, stream = self._check_buffers("all_reduce", send, recv, stream)
        args = (send_ptr, recv_ptr, count, dtype, op_code(op, self, "all_reduce", dtype))
        self._enqueue("all_reduce", "ncclAllReduce", args, stream, send, recv, config, op, fast=fast)
        return recv

    def broadcast(
        self,
        send: Buffer,
        recv: Buffer | None = None,
        root: int = 0,
        *,
        stream: Any = None,
        config: CollConfig | None = None,
    ) -> Buffer:
        """recv on every rank: root's send.  send [n] -> recv [n]; in place if recv is send."""
        root = check_rank("broadcast: root", root, self.size)
        fast = self._fast["broadcast"]
        if config is None and (done := fast.launch(send, recv, None, root, stream)) is not None:
            return done
        send_ptr, recv_ptr, count, dtype, recv, stream = self._check_buffers("broadcast", send, recv, stream)
        args = (send_ptr, recv_ptr, count, dtype, root)
        self._enqueue("broadcast", "ncclBroadcast", args, stream, send, recv, config, fast=fast, root=root)
        return recv

    def reduce(
        self,
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
        if self.rank != root:
            recv = None  # not written
        fast = self._fast["reduce"]
        other = recv if self.rank == root else send
        if config is None and (done := fast.launch(send, other, op, root, stream)) is not None:
            return done if self.rank == root else None
        if self.rank == root:
            send_ptr, recv_ptr, count, dtype, recv, stream = self._check_buffers("reduce", send, recv, stream)
        else:
            send_ptr, count, dtype, stream = self._check_buffer("reduce", "send", send, stream)
            recv_ptr = 0
        args = (send_ptr, recv_ptr, count, dtype, op_code(op, self, "reduce", dtype), root)
        self._enqueue("reduce", "ncclReduce", args, stream, send, recv, config, op, fast=fast, root=root)
        return recv

    def all_gather(
        self, send: Buffer, recv: Buffer | None = None, *, stream: Any = None, config: CollConfig | None = None
    ) -> Buffer:
        """recv on every rank: all ranks' send, one after the other.  send [n] -> recv [N*n].

        In place: send is the part of recv that starts at element rank*n."""
        fast = self._fast["all_gather"]
        if config is None and (done := fast.launch(send, recv, None, None, stream)) is not None:
            return done
        send_ptr, recv_ptr, count, dtype, recv, stream = self._check_buffers(
            "all_gather", send, recv, stream, self.size
        )
        args = (send_ptr, recv_ptr, count, dtype)
        self._enqueue("all_gather", "ncclAllGather", args, stream, send, recv, config, fast=fast)
        return recv

    def reduce_scatter(
        self,
        send: Buffer,
        recv: Buffer | None = None,
        op: Op = "sum",
        *,
        stream: Any = None,
        config: CollConfig | None = None,
    ) -> Buffer:
        """recv on rank r: block r of the reduction of all ranks' send.  send [N*n] -> recv [n].

        In place: recv is the part of send that starts at element rank*n."""
        fast = self._fast["reduce_scatter"]
        if config is None and (done := fast.launch(send, recv, op, None, stream)) is not None:
            return done
        send_ptr, recv_ptr, count, dtype, recv, stream = self._check_buffers(
            "reduce_scatter", send, recv, stream, 1, self.size
        )
        args = (send_ptr, recv_ptr, count // self.size, dtype, op_code(op, self, "reduce_scatter", dtype))
        self._enqueue("reduce_scatter", "ncclReduceScatter", args, stream, send, recv, config, op, fast=fast)
        return recv

    def all_to_all(
        self, send: Buffer, recv: Buffer | None = None, *, stream: Any = None, config: CollConfig | None = None
    ) -> Buffer:
        """Block j of send goes to rank j, to block `rank` of its recv.  send [N*n] -> recv [N*n]; never in place."""
        fast = self._fast["all_to_all"]
        if config is None and (done := fast.launch(send, recv, None, None, stream)) is not None:
            return done
        send_ptr, recv_ptr, count, dtype, recv, stream = self._check_buffers(
            "all_to_all", send, recv, stream, 1, 1, self.size
        )
        n = count // self.size
        if self.library.supports("ncclAlltoAll"):
            args = (send_ptr, recv_ptr, n, dtype)
            self._enqueue("all_to_all", "ncclAlltoAll", args, stream, send, recv, config, fast=fast)
            return recv
        step = n * ITEMSIZE[dtype]
        with group():
            for peer in range(self.size):
                self._enqueue_p2p("ncclSend", send_ptr + peer * step, n, dtype, peer, stream, send, config)
                self._enqueue_p2p("ncclRecv", recv_ptr + peer * step, n, dtype, peer, stream, recv, config)
        return recv

    def gather(
        self,
        send: Buffer,
        recv: Buffer | None = None,
        root: int = 0,
        *,
        stream: Any = None,
        config: CollConfig | None = None,
    ) -> Buffer | None:
        """recv on root: all ranks' send, one after the other; other ranks need no recv and get None.  [n] -> [N*n]"""
        root = check_rank("gather: root", root, self.size)
        if self.rank != root:
            recv = None  # not written
        fast = self._fast["gather"]
        other = recv if self.rank == root else send
        if config is None and (done := fast.launch(send, other, None, root, stream)) is not None:
            return done if self.rank == root else None
        if self.rank == root:
            send_ptr, recv_ptr, count, dtype, recv, stream = self._check_buffers(
                "gather", send, recv, stream, self.size
            )
        else:
            send_ptr, count, dtype, stream = self._check_buffer("gather", "send", send, stream)
            recv_ptr = 0
        if self.library.supports("ncclGather"):
            args = (send_ptr, recv_ptr, count, dtype, root)
            self._enqueue("gather", "ncclGather", args, stream, send, recv, config, fast=fast, root=root)
            return recv
        step = count * ITEMSIZE[dtype]
        with group():
            self._enqueue_p2p("ncclSend", send_ptr, count, dtype, root, stream, send, config)
            for peer in range(self.size if self.rank == root else 0):
                self._enqueue_p2p("ncclRecv", recv_ptr + peer * step, count, dtype, peer, stream, recv, config)
        return recv

    def scatter(
        self,
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
        fast = self._fast["scatter"]
        other = recv if send is None else send
        if config is None and (done := fast.launch(other, recv, None, root, stream)) is not None:
            return done
        if self.rank == root or recv is None:
            if send is None:
                raise TypeError(f"scatter: rank {self.rank} passed neither send nor recv; pass recv=")
            send_ptr, recv_ptr, count, dtype, recv, stream = self._check_buffers(
                "scatter", send, recv, stream, 1, self.size
            )
            n = count // self.size
        else:
            recv_ptr, n, dtype, stream = self._check_buffer("scatter", "recv", recv, stream)
            self._check_writable("scatter", recv)
            send_ptr = 0
        if self.library.supports("ncclScatter"):
            args = (send_ptr, recv_ptr, n, dtype, root)
            self._enqueue("scatter", "ncclScatter", args, stream, send, recv, config, fast=fast, root=root)
            return recv
        step = n * ITEMSIZE[dtype]
        with group():
            for peer in range(self.size if self.rank == root else 0):
                self._enqueue_p2p("ncclSend", send_ptr + peer * step, n, dtype, peer, stream, send, config)
            self._enqueue_p2p("ncclRecv", recv_ptr, n, dtype, root, stream, recv, config)
        return recv

    def send(self, buf: Any, peer: int, *, stream: Any = None) -> None:
        """Send buf to rank peer, which must recv as many elements of the same type. See `pynccl.group`."""
        peer = check_rank("send: peer", peer, self.size)
        fast = self._fast["send"]
        if fast.launch(buf, buf, None, peer, stream) is not None:
            return
        pointer, count, dtype, stream = self._check_buffer("send", "buf", buf, stream)
        self._enqueue_p2p("ncclSend", pointer, count, dtype, peer, stream, buf, fast=fast)

    def recv(self, buf: Buffer, peer: int, *, stream: Any = None) -> Buffer:
        """Receive into buf what rank peer sends. See `pynccl.group`."""
        peer = check_rank("recv: peer", peer, self.size)
        fast = self._fast["recv"]
        if (done := fast.launch(buf, buf, None, peer, stream)) is not None:
            return done
        pointer, count, dtype, stream = self._check_buffer("recv", "buf", buf, stream)
        self._check_writable("recv", buf)
        self._enqueue_p2p("ncclRecv", pointer, count, dtype, peer, stream, buf, fast=fast)
        return buf
