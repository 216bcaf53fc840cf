"""One-sided communication: write into a peer's window, raise its signals, wait for one's own (NCCL >= 2.29).

Signals are counters, numbered by `signal` within a `context`; NCCL has one of each unless CommConfig's num_rma_sig and
num_rma_ctx say otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..bindings.abi import ITEMSIZE, WaitSignalDesc
from ..bindings.values import INT_MAX, SIZE_MAX, integer
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
    """Write buf into rank peer's part of the window, then raise its signal.

    offset  in bytes, from the start of the peer's window
    """
    peer = check_rank("put_signal: peer", peer, self.size)
    pointer, count, dtype, stream = check_buffer(self, "put_signal", "buf", buf, stream)
    nbytes = count * ITEMSIZE[dtype]
    offset = integer(offset, "put_signal: offset", -SIZE_MAX, SIZE_MAX)
    if offset < 0 or offset + nbytes > window.nbytes:
        raise ValueError(
            f"put_signal: {nbytes} bytes at offset {offset} do not fit into the window of {window.nbytes} bytes"
        )
    signal, context = _numbers("put_signal", signal, context)
    inputs = (pointer, count, dtype, peer, window.handle, offset, signal, context, 0)
    enqueue(self, "put_signal", "ncclPutSignal", inputs, stream, (buf, window), None)


def signal(self: Comm, peer: int, *, signal: int = 0, context: int = 0, stream: Any) -> None:
    """Raise rank peer's signal by one."""
    peer = check_rank("signal: peer", peer, self.size)
    signal, context = _numbers("signal", signal, context)
    self.check_alive()
    enqueue(self, "signal", "ncclSignal", (peer, signal, context, 0), stream_handle(stream), None, None)


def wait_signal(self: Comm, counts: Mapping[int, int] | int, *, signal: int = 0, context: int = 0, stream: Any) -> None:
    """Hold the stream until ranks have raised this rank's signal so many times.

    counts  {peer: number of signals to wait for}, or a peer, for one signal of it
    """
    given = list(counts.items()) if isinstance(counts, Mapping) else [(counts, 1)]
    if not given:
        raise ValueError("wait_signal: counts is empty, expected {peer: number of signals}")
    wanted = {}
    for peer, count in given:
        peer = check_rank("wait_signal: peer", peer, self.size)
        try:
            wanted[peer] = integer(count, "count", 1, INT_MAX)
        except ValueError:
            raise ValueError(
                f"wait_signal: {count!r} signals of rank {peer}, expected 1 or more, up to {INT_MAX}"
            ) from None
    signal, context = _numbers("wait_signal", signal, context)
    self.check_alive()
    rows = (WaitSignalDesc * len(wanted))(*(WaitSignalDesc(n, peer, signal, context) for peer, n in wanted.items()))
    inputs: Any = (len(wanted), rows)
    enqueue(self, "wait_signal", "ncclWaitSignal", inputs, stream_handle(stream), rows, None)


def _numbers(operation: str, signal: Any, context: Any) -> tuple[int, int]:
    return integer(signal, f"{operation}: signal"), integer(context, f"{operation}: context")
