"""One-sided communication (NCCL >= 2.29): write into a peer's window, signal it, wait for signals.

Signals are counters, identified by the index `signal` within the index `context`. NCCL provides one context with one
signal, unless CommConfig sets num_rma_ctx and num_rma_sig.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..bindings.abi import ITEMSIZE, WaitSignalDesc
from ..bindings.values import INT_MAX, SIZE_MAX, instance, integer, shown
from ..interop.streams import stream_handle
from .argcheck import check_buffer, check_rank
from .base import Comm
from .enqueue import enqueue
from .memory import Window


def put_signal(
    self: Comm,
    buf: Any,
    peer: int,
    window: Window,
    offset: int = 0,
    *,
    signal: int = 0,
    context: int = 0,
    stream: Any = None,
) -> None:
    """Write buf into the window of rank peer, then increment the peer's signal by one (NCCL >= 2.29).

    buf              a contiguous buffer on the communicator's device
    window           this rank's `Window`; the ranks made their windows together
    offset           destination in bytes from the start of the peer's window
    signal, context  which signal to increment
    stream           None: the current stream of the library that owns buf

    The peer does not take part; it calls `wait_signal` before it reads the data. buf must not be changed until the
    operation has run. Raises ValueError if buf does not fit into the window, before anything is launched.
    """
    peer = check_rank("put_signal: peer", peer, self.size)
    instance(window, Window, "put_signal: window", "a pynccl.Window; pass comm.window(buf)")
    pointer, count, dtype, stream = check_buffer(self, "put_signal", "buf", buf, stream)
    nbytes = count * ITEMSIZE[dtype]
    offset = integer(offset, "put_signal: offset", -SIZE_MAX, SIZE_MAX)
    if offset < 0 or offset + nbytes > window.nbytes:
        raise ValueError(
            f"put_signal: {nbytes} bytes at offset {offset} do not fit into the window of {window.nbytes} bytes"
        )
    signal, context = _indices("put_signal", signal, context)
    inputs = (pointer, count, dtype, peer, window.handle, offset, signal, context, 0)
    enqueue(self, "put_signal", "ncclPutSignal", inputs, stream, (buf, window), None)


def signal(self: Comm, peer: int, *, signal: int = 0, context: int = 0, stream: Any) -> None:
    """Increment the signal of rank peer by one, in stream order, without writing data (NCCL >= 2.29).

    signal, context  which signal to increment
    stream           required: no buffer implies one
    """
    peer = check_rank("signal: peer", peer, self.size)
    signal, context = _indices("signal", signal, context)
    self.check_alive()
    enqueue(
        self, "signal", "ncclSignal", (peer, signal, context, 0), stream_handle(stream, "signal: stream"), None, None
    )


def wait_signal(self: Comm, counts: Mapping[int, int] | int, *, signal: int = 0, context: int = 0, stream: Any) -> None:
    """Make the stream wait until peers have incremented this rank's signal (NCCL >= 2.29).

    counts           {peer: number of signals to wait for}; a single rank means one signal from it
    signal, context  which signal to wait for
    stream           required: no buffer implies one

    Later work on the stream sees the data of `put_signal` calls that were signaled. With the host library and
    stream=0 the caller waits.
    """
    items = list(counts.items()) if isinstance(counts, Mapping) else [(counts, 1)]
    if not items:
        raise ValueError("wait_signal: counts is empty, expected {peer: number of signals}")
    expected = {}
    for peer, count in items:
        peer = check_rank("wait_signal: counts: peer", peer, self.size)
        try:
            expected[peer] = integer(count, "wait_signal: counts", 1, INT_MAX)
        except ValueError:
            raise ValueError(
                f"wait_signal: counts has {shown(count)} signals from rank {peer}, expected 1 or more, up to {INT_MAX}"
            ) from None
    signal, context = _indices("wait_signal", signal, context)
    self.check_alive()
    rows = (WaitSignalDesc * len(expected))(*(WaitSignalDesc(n, peer, signal, context) for peer, n in expected.items()))
    inputs: Any = (len(expected), rows)
    enqueue(self, "wait_signal", "ncclWaitSignal", inputs, stream_handle(stream, "wait_signal: stream"), rows, None)


def _indices(operation: str, signal: Any, context: Any) -> tuple[int, int]:
    return integer(signal, f"{operation}: signal"), integer(context, f"{operation}: context")
