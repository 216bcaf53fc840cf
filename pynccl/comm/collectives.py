"""The operations a communicator offers: eight collectives, send and recv. Those with a count per rank: `uneven`.

Each validates on this rank what can be validated there, then issues one C call (or a group of sends and receives on
libraries that lack the function). `send` and `recv` are buffers as in `buffers`; recv=None allocates like `send`;
sizes are counted in elements. N is the number of ranks, and `stream=None` the current stream of the library that owns
the buffer. Every method returns `recv`, whose contents are defined in the order of the stream.

Buffers may be dropped once the call has returned, on the current stream, on streams of pynccl and of torch. On another
library's stream, or where only its handle is passed, keep them until it has run: docs/streams.md. A torch tensor that
is received into has its version counted, as by an operation of torch, so that a backward pass that saved it says so.

Errors, all before anything is launched: TypeError (no buffer, no NCCL data type, no stream), ValueError (size, device,
contiguity, overlap, rank out of range, unknown operator, a recv that requires grad under grad mode),
NcclInvalidUsage (a communicator that has ended).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..bindings.abi import ITEMSIZE
from .argcheck import Launcher
from .groups import fused
from .redop import op_code

if TYPE_CHECKING:
    from ..bindings.structs import CollConfig


class Collectives(Launcher):
    """The part of `Communicator` that moves data."""

    def all_reduce(
        self, send: Any, recv: Any = None, op: Any = "sum", *, stream: Any = None, config: CollConfig | None = None
    ) -> Any:
        """recv on every rank: the reduction of all ranks' send.  send [n] -> recv [n]; in place if recv is send."""
        again = self._again["all_reduce"] if config is None else None
        if again is not None and (done := again.launch(send, recv, op, None, stream)) is not None:
            return done
        source, target, count, dtype, recv, at = self._pair("all_reduce", send, recv, stream)
        args = (source, target, count, dtype, op_code(op, self, "all_reduce", dtype))
        self._issue("all_reduce", "ncclAllReduce", args, at, send, recv, config, op, again=again)
        return recv

    def broadcast(
        self, send: Any, recv: Any = None, root: int = 0, *, stream: Any = None, config: CollConfig | None = None
    ) -> Any:
        """recv on every rank: root's send.  send [n] -> recv [n]; in place if recv is send."""
        root = self._rank("broadcast", "root", root)
        again = self._again["broadcast"] if config is None else None
        if again is not None and (done := again.launch(send, recv, None, root, stream)) is not None:
            return done
        source, target, count, dtype, recv, at = self._pair("broadcast", send, recv, stream)
        self._issue(
            "broadcast",
            "ncclBroadcast",
            (source, target, count, dtype, root),
            at,
            send,
            recv,
            config,
            again=again,
            root=root,
        )
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
        root = self._rank("reduce", "root", root)
        if self.rank != root:
            recv = None  # not written
        again = self._again["reduce"] if config is None else None
        if (
            again is not None
            and (done := again.launch(send, recv if self.rank == root else send, op, root, stream)) is not None
        ):
            return done if self.rank == root else None
        if self.rank == root:
            source, target, count, dtype, recv, at = self._pair("reduce", send, recv, stream)
        else:
            source, count, dtype, at = self._one("reduce", "send", send, stream)
            target = 0
        args = (source, target, count, dtype, op_code(op, self, "reduce", dtype), root)
        self._issue("reduce", "ncclReduce", args, at, send, recv, config, op, again=again, root=root)
        return recv

    def all_gather(self, send: Any, recv: Any = None, *, stream: Any = None, config: CollConfig | None = None) -> Any:
        """recv on every rank: all ranks' send, one after the other.  send [n] -> recv [N*n].

        In place: send is the part of recv that starts at element rank*n."""
        again = self._again["all_gather"] if config is None else None
        if again is not None and (done := again.launch(send, recv, None, None, stream)) is not None:
            return done
        source, target, count, dtype, recv, at = self._pair("all_gather", send, recv, stream, self.size)
        self._issue("all_gather", "ncclAllGather", (source, target, count, dtype), at, send, recv, config, again=again)
        return recv

    def reduce_scatter(
        self, send: Any, recv: Any = None, op: Any = "sum", *, stream: Any = None, config: CollConfig | None = None
    ) -> Any:
        """recv on rank r: block r of the reduction of all ranks' send.  send [N*n] -> recv [n].

        In place: recv is the part of send that starts at element rank*n."""
        again = self._again["reduce_scatter"] if config is None else None
        if again is not None and (done := again.launch(send, recv, op, None, stream)) is not None:
            return done
        source, target, count, dtype, recv, at = self._pair("reduce_scatter", send, recv, stream, 1, self.size)
        args = (source, target, count // self.size, dtype, op_code(op, self, "reduce_scatter", dtype))
        self._issue("reduce_scatter", "ncclReduceScatter", args, at, send, recv, config, op, again=again)
        return recv

    def all_to_all(self, send: Any, recv: Any = None, *, stream: Any = None, config: CollConfig | None = None) -> Any:
        """Block j of send goes to rank j, to block `rank` of its recv.  send [N*n] -> recv [N*n]; never in place."""
        again = self._again["all_to_all"] if config is None else None
        if again is not None and (done := again.launch(send, recv, None, None, stream)) is not None:
            return done
        source, target, count, dtype, recv, at = self._pair("all_to_all", send, recv, stream, 1, 1, self.size)
        n = count // self.size
        if self.library.supports("ncclAlltoAll"):
            self._issue("all_to_all", "ncclAlltoAll", (source, target, n, dtype), at, send, recv, config, again=again)
            return recv
        step = n * ITEMSIZE[dtype]
        with fused():
            for peer in range(self.size):
                self._p2p("ncclSend", source + peer * step, n, dtype, peer, at, send, config)
                self._p2p("ncclRecv", target + peer * step, n, dtype, peer, at, recv, config)
        return recv

    def gather(
        self, send: Any, recv: Any = None, root: int = 0, *, stream: Any = None, config: CollConfig | None = None
    ) -> Any:
        """recv on root: all ranks' send, one after the other; other ranks need no recv and get None.  [n] -> [N*n]"""
        root = self._rank("gather", "root", root)
        if self.rank != root:
            recv = None  # not written
        again = self._again["gather"] if config is None else None
        if (
            again is not None
            and (done := again.launch(send, recv if self.rank == root else send, None, root, stream)) is not None
        ):
            return done if self.rank == root else None
        if self.rank == root:
            source, target, count, dtype, recv, at = self._pair("gather", send, recv, stream, self.size)
        else:
            source, count, dtype, at = self._one("gather", "send", send, stream)
            target = 0
        if self.library.supports("ncclGather"):
            self._issue(
                "gather",
                "ncclGather",
                (source, target, count, dtype, root),
                at,
                send,
                recv,
                config,
                again=again,
                root=root,
            )
            return recv
        step = count * ITEMSIZE[dtype]
        with fused():
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
        root = self._rank("scatter", "root", root)
        if self.rank != root and recv is not None:
            send = None  # not read
        again = self._again["scatter"] if config is None else None
        if (
            again is not None
            and (done := again.launch(recv if send is None else send, recv, None, root, stream)) is not None
        ):
            return done
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
            self._issue(
                "scatter",
                "ncclScatter",
                (source, target, n, dtype, root),
                at,
                send,
                recv,
                config,
                again=again,
                root=root,
            )
            return recv
        step = n * ITEMSIZE[dtype]
        with fused():
            for peer in range(self.size if self.rank == root else 0):
                self._p2p("ncclSend", source + peer * step, n, dtype, peer, at, send, config)
            self._p2p("ncclRecv", target, n, dtype, root, at, recv, config)
        return recv

    def send(self, buf: Any, peer: int, *, stream: Any = None) -> None:
        """Send buf to rank peer, which must recv as many elements of the same type. See `pynccl.group`."""
        peer = self._rank("send", "peer", peer)
        again = self._again["send"]
        if again.launch(buf, buf, None, peer, stream) is not None:
            return
        pointer, count, dtype, at = self._one("send", "buf", buf, stream)
        self._p2p("ncclSend", pointer, count, dtype, peer, at, buf, again=again)

    def recv(self, buf: Any, peer: int, *, stream: Any = None) -> Any:
        """Receive into buf what rank peer sends. See `pynccl.group`."""
        peer = self._rank("recv", "peer", peer)
        again = self._again["recv"]
        if (done := again.launch(buf, buf, None, peer, stream)) is not None:
            return done
        pointer, count, dtype, at = self._one("recv", "buf", buf, stream)
        self._check_writable("recv", buf)
        self._p2p("ncclRecv", pointer, count, dtype, peer, at, buf, again=again)
        return buf
