"""Races over simulated times: no communicator and no matmuls, a hundred thousand calls a second."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pynccl_autograd.overlap.config import AUTO
from pynccl_autograd.overlap.schedules import OFF, PassKey, Schedule
from pynccl_autograd.overlap.tune import Race

BULK, TWO, FOUR, EIGHT, RING = Schedule("bulk"), *(Schedule("slices", n) for n in (2, 4, 8)), Schedule("ring", 2)
WAYS = (OFF, BULK, TWO, FOUR, EIGHT, RING)
KEY = PassKey("all_gather_matmul", 1024, 512, 1024, torch.float32, AUTO, False, None, 2, True)
Seconds = Callable[[Schedule, int], float]  # of a schedule, in a call
Noise = Callable[[random.Random], float]  # factor of the slowest rank's time


class Ranks:
    """Stands for a communicator whose ranks all measure the same.   gpu: times are exchanged a round later"""

    device, size = "cpu", 2

    def __init__(self, gpu: bool = False) -> None:
        self.library = SimpleNamespace(is_host=not gpu)

    def all_gather(self, send: Tensor, recv: Tensor) -> Tensor:
        return send.expand_as(recv)


class DeferredRead:
    """As `DeferredCheck` on a GPU: the numbers of a call are used in the next one."""

    def __init__(self) -> None:
        self._last: Any = None

    def __call__(self, numbers: Tensor, check: Callable[[list[Any]], object]) -> None:
        last, self._last = self._last, (numbers.tolist(), check)
        if last is not None:
            last[1](last[0])


class Called(NamedTuple):
    """One call.   timed: whether its time counts"""

    schedule: Schedule
    timed: bool
    seconds: float


def start(ways: tuple[Schedule, ...] = WAYS, gpu: bool = False) -> tuple[Race, Any]:
    race: Any = Race(KEY._replace(on_cpu=not gpu), ways)
    if gpu:
        race._read = DeferredRead()
    return race, Ranks(gpu)


def play(
    race: Race,
    ranks: Any,
    calls: int,
    seconds: Seconds,
    noise: Noise = lambda draw: 1.0,
    seed: int = 0,
    change: float = 1.15,
) -> Iterator[Called]:
    """Make calls.   change: factor of the first call after a change to another schedule than "off\""""
    draw, last = random.Random(seed), None
    for call in range(calls):
        decision, timed_by = race.next(ranks)
        assert decision is not None
        schedule = Schedule(decision.method, decision.chunks)
        took = seconds(schedule, call) * noise(draw) * (change if schedule not in (last, OFF) else 1.0)
        if timed_by is not None:
            timed_by.marks[decision.schedule] = 0, round(took * 1e9)
        last = schedule
        yield Called(schedule, timed_by is not None, took)


def quiet(draw: random.Random) -> float:
    """3% of noise, and now and then a call that takes up to twice as long."""
    return 1 + abs(draw.gauss(0, 0.03)) + (draw.random() < 0.03) * draw.random()


def noisy(draw: random.Random) -> float:
    """8% of noise, and every seventh call takes half as long again, or several times as long."""
    return (1 + abs(draw.gauss(0, 0.08))) * (1 + (draw.random() < 0.15) * draw.expovariate(1 / 0.6))
