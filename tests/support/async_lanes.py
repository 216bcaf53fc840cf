"""deferred_lanes and poisoned_buffers: run overlapped layers on a CPU asynchronously, as on a GPU."""

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
from pynccl_autograd.overlap import lanes as lanes_module
from pynccl_autograd.overlap.buffers import Buffers, Fresh
from pynccl_autograd.overlap.handoff import Slices
from pynccl_autograd.overlap.lanes import HostLane, Lane, Lanes, Observer, Point, observers, observing
from pynccl_autograd.streams import side_stream

_POISON = 0xFF  # with this in every byte, every floating-point type is NaN


class _LaneMaker:
    """Replaces `make_lanes`: every lane, including the caller's, gets a stream that is created on first use."""

    def __init__(self) -> None:
        self._made: weakref.WeakKeyDictionary[Communicator, dict[str, Any]] = weakref.WeakKeyDictionary()

    def lane(self, name: str, lanes: Lanes, comm: Communicator) -> HostLane:
        made = self._made.setdefault(comm, {})
        if name not in made:
            made[name] = pynccl.create_stream(library=comm.library)
        return HostLane(name, lanes, made[name])

    def make(self, lanes: Lanes, comm: Communicator, compute_streams: int, priority: int) -> list[Lane]:
        computing = [self.lane(name, lanes, comm) for name in ("main", "second")[:compute_streams]]
        comm_stream = side_stream(comm, priority).handle(lanes.kept)
        return [*computing, HostLane("comm", lanes, comm_stream, comm_stream)]


class _Delays(Observer):
    """An observer that makes lanes sleep for random times after each piece of work and each wait, so that other lanes
    overtake them."""

    def __init__(self, seed: int, max_delay: float) -> None:
        self._random, self._max_delay = random.Random(seed), max_delay

    def ran(self, lane: Lane, *_: Any) -> None:
        self._sleep(lane)

    def waited(self, lane: Lane, point: Point) -> None:
        self._sleep(lane)

    def _sleep(self, lane: Lane) -> None:
        if self._max_delay and self._random.random() < 0.5 and isinstance(lane, HostLane):
            lane.stream.submit(partial(time.sleep, self._random.uniform(0.0, self._max_delay)))


class _WaitForMain(Observer):
    """An observer that waits for the main lane at the end of a layer, since the caller's code does not."""

    def closed(self, lanes: Lanes) -> None:
        if isinstance(lanes.main, HostLane):
            lanes.main.stream.synchronize()


@contextmanager
def deferred_lanes(seed: int = 0, max_delay: float = 0.0) -> Iterator[None]:
    """Context manager in which overlapped layers on the host library run asynchronously, as on a GPU. The caller only
    enqueues work, also on the lane "main", and waits just before the layer returns (hand_off: before each slice is
    handed out). A missing wait therefore gives a wrong result.

    max_delay  longest sleep of a lane between pieces of its work in seconds, drawn at random from `seed`

    It applies to all threads. Read all `Slices` before leaving it."""
    wait_for_main, plain = _WaitForMain(), Slices._wait

    def wait(self: Slices) -> None:
        lanes = self._lanes
        plain(self)
        if lanes is not None:
            wait_for_main.closed(lanes)

    with pytest.MonkeyPatch.context() as patch, observing(wait_for_main), observing(_Delays(seed, max_delay)):
        observers.remove(wait_for_main)
        observers.insert(0, wait_for_main)  # first, so that the lanes are done when other observers are called
        patch.setattr(lanes_module, "make_lanes", _LaneMaker().make)
        patch.setattr(Slices, "_wait", wait)
        yield


@contextmanager
def poisoned_buffers() -> Iterator[None]:
    """Context manager that fills the buffers between collectives and matmuls with NaN before and after each operation,
    so that a read that is too early or too late shows in the result."""
    plain_make, plain_acquire = Buffers._make, Buffers.acquire

    def make(self: Buffers, *args: Any) -> Tensor:
        return plain_make(self, *args).fill_(_POISON)

    @contextmanager
    def acquire(self: Buffers, like: Tensor) -> Iterator[Buffers | Fresh]:
        with plain_acquire(self, like) as acquired:
            _poison(acquired)
            yield acquired
            _poison(acquired)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Buffers, "_make", make)
        patch.setattr(Buffers, "acquire", acquire)
        yield


def _poison(buffers: Buffers | Fresh) -> None:
    for buffer in buffers._buffers.values() if isinstance(buffers, Buffers) else ():
        buffer.fill_(_POISON)
