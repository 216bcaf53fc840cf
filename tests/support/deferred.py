"""deferred_lanes, poisoned_workspaces: overlapped layers on a CPU whose caller runs ahead, as on a GPU."""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

import pynccl
from pynccl import Communicator
from pynccl.comm.observing import Observer, observers, observing
from pynccl_autograd.overlap import lanes as lanes_module
from pynccl_autograd.overlap.lanes import HostLane, Lane, Lanes, Point, make_lanes
from pynccl_autograd.overlap.slices import Flight
from pynccl_autograd.overlap.workspace import Workspace
from pynccl_autograd.streams import side_stream

_POISON = 0xFF  # in every byte it is NaN in every type of floating-point numbers


class DeferredLane(HostLane):
    """A lane of the host library, the caller's too, whose thread does the work when it comes to it."""


class _Streams:
    """Those of a communicator beside its side stream; made on first use."""

    def __init__(self) -> None:
        self._made: weakref.WeakKeyDictionary[Communicator, dict[str, Any]] = weakref.WeakKeyDictionary()

    def lane(self, name: str, lanes: Lanes, comm: Communicator) -> DeferredLane:
        made = self._made.setdefault(comm, {})
        if name not in made:
            made[name] = pynccl.create_stream(library=comm.library)
        return DeferredLane(name, lanes, made[name])

    def make(
        self, lanes: Lanes, comm: Communicator, compute_streams: int, priority: int
    ) -> tuple[Lane, Lane, list[Lane]]:
        """In place of `make_lanes`."""
        if not comm.library.is_host:
            return make_lanes(lanes, comm, compute_streams, priority)
        main = self.lane("main", lanes, comm)
        second = [self.lane("second", lanes, comm)] if compute_streams > 1 else []
        return main, DeferredLane("comm", lanes, side_stream(comm, priority).handle(lanes.kept)), [main, *second]


class _Delays(Observer):
    """An observer that lets each lane sleep before what it is given next.

    It sleeps where other lanes are about to go by it: behind each point, and behind each wait."""

    def __init__(self, seed: int | None, delay: float | Mapping[str, float]) -> None:
        self._random = None if seed is None else random.Random(seed)
        self._delay = delay

    def recorded(self, lane: Lane, point: Point) -> None:
        self._sleep(lane)

    def waited(self, lane: Lane, point: Point) -> None:
        self._sleep(lane)

    def _sleep(self, lane: Lane) -> None:
        most = self._delay.get(lane.name, 0.0) if isinstance(self._delay, Mapping) else self._delay
        seconds = most if self._random is None else self._random.choice((0.0, self._random.uniform(0.0, most)))
        if seconds > 0 and isinstance(lane, DeferredLane):
            lane.stream.submit(partial(time.sleep, seconds))


class _Return(Observer):
    """An observer that lets the caller go on only when his lane is done: his own code does not wait for it.

    What failed on a lane that was waited for is raised here."""

    def __init__(self) -> None:
        self._waited: weakref.WeakKeyDictionary[Lanes, list[Any]] = weakref.WeakKeyDictionary()

    def waited(self, lane: Lane, point: Point) -> None:
        if lane is lane.lanes.main:
            self._waited.setdefault(lane.lanes, []).append(point.event)

    def closed(self, lanes: Lanes) -> None:
        if isinstance(lanes.main, DeferredLane):
            lanes.main.stream.synchronize()
            for event in self._waited.pop(lanes, []):
                if event.query():  # it has happened, if main waited for it as it said
                    event.synchronize()


@contextmanager
def deferred_lanes(seed: int | None = None, delay: float | Mapping[str, float] = 0.0) -> Iterator[None]:
    """Within, overlapped layers on the host library work as on a GPU: the caller issues everything and runs ahead, on
    the lane "main" too, and waits only before the layer returns (hand_off: before each slice is handed out). So a wait
    that is missing shows as a wrong result.

    delay  seconds that each lane sleeps before pieces of its work; or of each lane by name: {"comm": 0.002}
    seed   each sleep is drawn: none, or up to `delay`; None: each is `delay`

    It holds for all threads, and not for what is still under way when it ends: read all `Slices` within."""
    returning = _Return()
    before, plain = lanes_module.maker, Flight.wait

    def wait(self: Flight, at: int) -> None:
        lanes = self._lanes
        plain(self, at)
        if lanes is not None:
            returning.closed(lanes)

    lanes_module.maker, Flight.wait = _Streams().make, wait  # type: ignore[method-assign]
    try:
        with observing(returning), observing(_Delays(seed, delay)):
            observers.remove(returning)
            observers.insert(0, returning)  # first: when the others hear of an end, it has come
            yield
    finally:
        lanes_module.maker, Flight.wait = before, plain  # type: ignore[method-assign]


@contextmanager
def poisoned_workspaces() -> Iterator[None]:
    """Within, the buffers between collectives and matmuls are NaN whenever an operation gets them and when it lets them
    go: what is read too early or too late shows in the result."""
    plain_empty, plain_lent = Workspace.empty, Workspace.lent

    def empty(
        self: Workspace, role: str, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor:
        before = self._buffers.get(role)
        found = plain_empty(self, role, shape, like, dtype)
        if self._buffers[role] is not before:
            self._buffers[role].fill_(_POISON)
        return found

    @contextmanager
    def lent(self: Workspace, like: Tensor) -> Iterator[Workspace]:
        with plain_lent(self, like) as work:
            _poison(work)
            yield work
            _poison(work)

    Workspace.empty, Workspace.lent = empty, lent  # type: ignore[method-assign]
    try:
        yield
    finally:
        Workspace.empty, Workspace.lent = plain_empty, plain_lent  # type: ignore[method-assign]


def _poison(work: Workspace) -> None:
    for buffer in work._buffers.values():
        buffer.fill_(_POISON)
