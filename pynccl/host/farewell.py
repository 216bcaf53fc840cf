"""Connections of destroyed communicators, kept until the peers part too, so that ncclCommDestroy need not wait."""

from __future__ import annotations

import threading
import time

from .transport import Transport

_PATIENCE_SECONDS = 10.0
_LAST_SECONDS = 2.0

_parting: dict[threading.Thread, Transport] = {}


def part(transport: Transport) -> None:
    """Take leave of the peers in the background."""
    for thread in [thread for thread in list(_parting) if not thread.is_alive()]:
        _parting.pop(thread, None)  # another thread may have been faster
    thread = threading.Thread(
        target=transport.part, args=(_PATIENCE_SECONDS,), name="pynccl-host-farewell", daemon=True
    )
    try:
        thread.start()
    except RuntimeError:  # the interpreter is ending and starts no more threads (Python 3.12)
        transport.part(_LAST_SECONDS)
        return
    _parting[thread] = transport


def finish(timeout: float) -> None:
    """At exit: wait `timeout` seconds in all for peers to part, then close without them."""
    deadline = time.monotonic() + timeout
    for thread in list(_parting):
        thread.join(max(0.0, deadline - time.monotonic()))
    for thread, transport in list(_parting.items()):
        if thread.is_alive():
            transport.shut()
            thread.join(_PATIENCE_SECONDS)
