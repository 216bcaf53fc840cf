"""One-sided communication: write into a peer's window, raise its signals, wait for one's own (NCCL >= 2.29)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .abi import ITEMSIZE, WaitSignalDesc
from .launch import Launcher
from .streams import stream_handle

if TYPE_CHECKING:
    from .memory import Window


class OneSided(Launcher):
    """The one-sided operations of `Communicator`.

    Signals are counters, numbered by `signal` within a `context`; NCCL has one of each unless CommConfig's num_rma_sig
    and num_rma_ctx say otherwise.
    """

    def put_signal(
        self,
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
        self._check_rank("put_signal", "peer", peer)
        pointer, count, dtype, at = self._one("put_signal", "buf", buf, stream)
        nbytes = count * ITEMSIZE[dtype]
        if offset < 0 or offset + nbytes > window.nbytes:
            raise ValueError(
                f"put_signal: {nbytes} bytes at offset {offset} do not fit into the window of {window.nbytes} bytes"
            )
        inputs = (pointer, count, dtype, peer, window.handle, offset, signal, context, 0)
        self._issue("put_signal", "ncclPutSignal", inputs, at, (buf, window))

    def signal(self, peer: int, *, signal: int = 0, context: int = 0, stream: Any) -> None:
        """Raise rank peer's signal by one."""
        self._check_rank("signal", "peer", peer)
        self.check_alive()
        self._issue("signal", "ncclSignal", (peer, signal, context, 0), stream_handle(stream), None)

    def wait_signal(self, counts: Mapping[int, int] | int, *, signal: int = 0, context: int = 0, stream: Any) -> None:
        """Hold the stream until ranks have raised this rank's signal so many times.

        counts  {peer: number of signals to wait for}, or a peer, for one signal of it
        """
        wanted = {counts: 1} if isinstance(counts, int) else dict(counts)
        if not wanted:
            raise ValueError("wait_signal: counts is empty, expected {peer: number of signals}")
        for peer, count in wanted.items():
            self._check_rank("wait_signal", "peer", peer)
            if count < 1:
                raise ValueError(f"wait_signal: {count} signals of rank {peer}, expected 1 or more")
        self.check_alive()
        rows = (WaitSignalDesc * len(wanted))(*(WaitSignalDesc(n, peer, signal, context) for peer, n in wanted.items()))
        self._issue("wait_signal", "ncclWaitSignal", (len(wanted), rows), stream_handle(stream), rows)  # type: ignore[arg-type]
