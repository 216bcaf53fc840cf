"""Collectives of gradients in flight during a backward pass, and callbacks for the end of that pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pynccl import Communicator
from pynccl.bindings.resource import destructor

from ..agreement import check_not_in_group
from ..streams import KeepAliveList, side_stream
from ..torch_internals import queue_callback


class InFlight:
    """A collective that `launch(stream)` enqueued on the communicator's side stream. It keeps the buffers alive."""

    def __init__(self, comm: Communicator, launch: Callable[[Any], object]) -> None:
        check_not_in_group("DataParallelGradients")
        self._side, self._keep = side_stream(comm), KeepAliveList()
        self._launch_stream = self._side.wait_for_caller()
        launch(self._side.handle(self._keep))
        self._done = self._side.record()

    def wait(self) -> None:
        """Make the caller's stream wait for the collective. Raises its error, if it failed."""
        self._wait_stream = self._side.wait(self._done)

    def release(self) -> None:
        """Allow the buffers' memory to be reused. Call it after `wait`, when all kernels that read it are launched."""
        self._side.release(self._launch_stream, self._wait_stream, None)


class EndOfPass:
    """Calls `finish` at the end of the current backward pass, or `abandon` if that pass raises."""

    def __init__(self, finish: Callable[[], object], abandon: Callable[[], object]) -> None:
        self._finish, self._abandon = finish, abandon
        self._reached = False
        queue_callback(self._run)

    def _run(self) -> None:
        self._reached = True
        self._finish()

    @destructor
    def __del__(self) -> None:
        """Autograd holds the only reference, and drops it with the pass, also after an error."""
        if not self._reached:
            self._abandon()
