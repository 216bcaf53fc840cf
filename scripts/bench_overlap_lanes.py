"""Lanes for measuring: one stream, matmuls or communication alone, and both schedules under which nothing overlaps."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from pynccl import Communicator
from pynccl_autograd.overlap import passes
from pynccl_autograd.overlap.lanes import Lane, Lanes, Point


@contextlib.contextmanager
def passes_on(kind: type[Lanes]) -> Iterator[None]:
    """The passes of layers run on lanes of this kind."""
    hook = "Lanes"
    before = getattr(passes, hook)
    setattr(passes, hook, kind)
    try:
        yield
    finally:
        setattr(passes, hook, before)


class OneStream(Lanes):
    """All on the caller's stream, in the order of issue. The lane of communication is still another one, by name."""

    def __init__(self, comm: Communicator, **options: Any) -> None:
        super().__init__(comm, **{**options, "serial": True})
        self.comm = copy.copy(self.main)
        self.comm.name, self.comm.seen = "comm", {}


class _Idle(Lane):
    """Does nothing, at the moment at which another lane is."""

    def __init__(self, of: Lane, lanes: Lanes) -> None:
        super().__init__(of.name, lanes)
        self._of = of

    def run(self, work: Callable[..., object], *inputs: Any, out: Tensor) -> None:
        """Nothing."""

    def mark(self) -> Any:
        return self._of.mark()

    def _record(self) -> Any:
        return self._of._record()

    def _wait(self, event: Any) -> None:
        """Nothing to wait with."""


class MatmulsAlone(OneStream):
    """The matmuls of a pass, cut as they are, without its communication: on what was in the buffers before."""

    def __init__(self, comm: Communicator, **options: Any) -> None:
        super().__init__(comm, **options)
        self.comm = _Idle(self.comm, self)

    def _launch(self, name: str, reads: Sequence[Any], writes: Sequence[Any], launch: Callable[[], Any]) -> None:
        """Nothing."""


class CommunicationAlone(OneStream):
    """The communication of a pass, without its matmuls: of what was in the buffers before."""

    def __init__(self, comm: Communicator, **options: Any) -> None:
        super().__init__(comm, **options)
        self.main = _Idle(self.main, self)
        self._computing = [self.main]


class Apart(Lanes):
    """The lanes and events of an overlapped pass, but nothing of the one is under way during the other: matmuls wait
    for all that is gathered, and sums for the last matmul. For slices; a ring is one chain of both."""

    def __init__(self, comm: Communicator, **options: Any) -> None:
        super().__init__(comm, **options)
        self._gathered: Point | None = None
        self._later: list[Callable[[], Any]] = []
        side = self.comm
        issue = side._issue

        def later(*arguments: Any) -> None:
            self._later.append(lambda: issue(*arguments))

        hook = "_issue"
        setattr(side, hook, later)

    def _launch(self, name: str, reads: Sequence[Any], writes: Sequence[Any], launch: Callable[[], Any]) -> None:
        issue = super()._launch
        if name == "all_gather" and not self._later:
            issue(name, reads, writes, launch)
            self._gathered = self.comm.record()
        else:
            self._later.append(lambda: issue(name, reads, writes, launch))

    def compute(self, after: Point | None = None) -> Lane:
        lane = super().compute(after)
        if self._gathered is not None:
            lane.wait(self._gathered)
        return lane

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None and self._later:
            self.comm.wait(self.main.record())
            for work in self._later:
                work()
        super().__exit__(kind, error, trace)
