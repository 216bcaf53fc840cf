"""Connections of destroyed communicators, kept until the peers part too, so that ncclCommDestroy need not wait."""

from __future__ import annotations

import threading
import time

from .transport import Transport

_PATIENCE_SECONDS = 10.0

_parting: dict[threading.Thread, Transport] = {}


def part(transport: Transport) -> None:
    """Take leave of the peers in the background."""

    def body() -> None:
        try:
            transport.part(_PATIENCE_SECONDS)
        finally:
            _parting.pop(threading.current_thread(), None)

    thread = threading.Thread(target=body, name="pynccl-host-farewell", daemon=True)
    _parting[thread] = transport
    thread.start()


def finish(timeout: float) -> None:
    """At exit: wait `timeout` seconds in all for peers to part, then close without them."""
    deadline = time.monotonic() + timeout
    for thread, transport in list(_parting.items()):
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            transport.shut()
            thread.join(timeout)
