"""Collectives of gradients in flight beside a backward pass, and how that pass ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pynccl import Communicator

from ..streams import Kept, side_stream
from ..torch_internals import queue_callback


class InFlight:
    """What `launch(stream)` has enqueued on the communicator's side stream. It keeps the buffers while it lives."""

    def __init__(self, comm: Communicator, launch: Callable[[Any], object]) -> None:
        self._side, self._keep = side_stream(comm), Kept()
        self._home = self._side.wait_for_caller()
        launch(self._side.handle(self._keep))
        self._done = self._side.record()

    def wait(self) -> None:
        """Let the caller's stream wait for it. Raises what went wrong."""
        self._here = self._side.wait(self._done)

    def release(self) -> None:
        """After `wait`, once the caller has launched what reads the buffers: their memory may be used anew."""
        self._side.release(self._home, self._here, None)


class EndOfPass:
    """Calls `finish` at the end of the backward pass under way, or `abandon` if that raises."""

    def __init__(self, finish: Callable[[], object], abandon: Callable[[], object]) -> None:
        self._finish, self._abandon = finish, abandon
        self._reached = False
        queue_callback(self._run)

    def _run(self) -> None:
        self._reached = True
        self._finish()

    def __del__(self) -> None:
        """Autograd alone keeps this: it drops it with the pass, also with one that has raised."""
        if not self._reached:
            self._abandon()
