"""deferred_lanes, poisoned_workspaces: overlapped layers on a CPU whose caller runs ahead, as on a GPU."""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from torch import Tensor

import pynccl
from pynccl import Communicator
from pynccl.comm.observers import Observer, observers, observing
from pynccl_autograd.overlap import lanes as lanes_module
from pynccl_autograd.overlap.lanes import HostLane, Lane, Lanes, Point
from pynccl_autograd.overlap.slices import Flight
from pynccl_autograd.overlap.workspace import Workspace
from pynccl_autograd.streams import side_stream

_POISON = 0xFF  # in every byte it is NaN in every type of floating-point numbers


class _Maker:
    """In place of `make_lanes`: a stream for each lane, the caller's too, made on first use."""

    def __init__(self) -> None:
        self._made: weakref.WeakKeyDictionary[Communicator, dict[str, Any]] = weakref.WeakKeyDictionary()

    def lane(self, name: str, lanes: Lanes, comm: Communicator) -> HostLane:
        made = self._made.setdefault(comm, {})
        if name not in made:
            made[name] = pynccl.create_stream(library=comm.library)
        return HostLane(name, lanes, made[name])

    def make(
        self, lanes: Lanes, comm: Communicator, compute_streams: int, priority: int
    ) -> tuple[Lane, Lane, list[Lane]]:
        main = self.lane("main", lanes, comm)
        second = [self.lane("second", lanes, comm)] if compute_streams > 1 else []
        return main, HostLane("comm", lanes, side_stream(comm, priority).handle(lanes.kept)), [main, *second]


class _Delays(Observer):
    """An observer that lets each lane sleep before what it is given next.

    It sleeps where other lanes are about to go by it: behind each point, and behind each wait."""

    def __init__(self, seed: int, most: float) -> None:
        self._random, self._most = random.Random(seed), most

    def recorded(self, lane: Lane, point: Point) -> None:
        self._sleep(lane)

    def waited(self, lane: Lane, point: Point) -> None:
        self._sleep(lane)

    def _sleep(self, lane: Lane) -> None:
        if self._most and self._random.random() < 0.5 and isinstance(lane, HostLane):
            lane.stream.submit(partial(time.sleep, self._random.uniform(0.0, self._most)))


class _Return(Observer):
    """An observer that lets the caller go on only when his lane is done: his own code does not wait for it."""

    def closed(self, lanes: Lanes) -> None:
        if isinstance(lanes.main, HostLane):
            lanes.main.stream.synchronize()


@contextmanager
def deferred_lanes(seed: int = 0, most: float = 0.0) -> Iterator[None]:
    """Within, overlapped layers on the host library work as on a GPU: the caller issues everything and runs ahead, on
    the lane "main" too, and waits only before the layer returns (hand_off: before each slice is handed out). So a wait
    that is missing shows as a wrong result.

    most  seconds that a lane sleeps before pieces of its work: none, or up to this, as drawn from the seed

    It holds for all threads, and not for what is still under way when it ends: read all `Slices` within."""
    returning, plain = _Return(), Flight.wait

    def wait(self: Flight, at: int) -> None:
        lanes = self._lanes
        plain(self, at)
        if lanes is not None:
            returning.closed(lanes)

    with pytest.MonkeyPatch.context() as patch, observing(returning), observing(_Delays(seed, most)):
        observers.remove(returning)
        observers.insert(0, returning)  # first: when the others hear of an end, it has come
        patch.setattr(lanes_module, "maker", _Maker().make)
        patch.setattr(Flight, "wait", wait)
        yield


@contextmanager
def poisoned_workspaces() -> Iterator[None]:
    """Within, the buffers between collectives and matmuls are NaN whenever an operation gets them and when it lets them
    go: what is read too early or too late shows in the result."""
    plain_make, plain_lent = Workspace._make, Workspace.lent

    def make(self: Workspace, role: str, *args: Any) -> None:
        plain_make(self, role, *args)
        self._buffers[role].fill_(_POISON)

    @contextmanager
    def lent(self: Workspace, like: Tensor) -> Iterator[Workspace]:
        with plain_lent(self, like) as work:
            _poison(work)
            yield work
            _poison(work)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workspace, "_make", make)
        patch.setattr(Workspace, "lent", lent)
        yield


def _poison(work: Workspace) -> None:
    for buffer in work._buffers.values():
        buffer.fill_(_POISON)
