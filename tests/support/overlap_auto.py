"""Short races of schedules for small layers, a record of the chosen schedules, and clocks that a test controls."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd.overlap import choose, saved, schedules, tune
from pynccl_autograd.overlap.lanes import Observer, observing

ROWS = 288  # of the full input: enough for 8 slices, and divisible by 2, 3 and 4 ranks
IN, OUT = 24, 48
STARTS = (0, 12)  # the rounds of a short race
MAX_CALLS = 24  # of a short race
FUNCTIONS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "copy_matmul")
# Patterns with races on a CPU, and their candidates.
FORWARD = {
    "all_gather_matmul": ["off", "bulk", "slices 2", "slices 4", "slices 8", "ring"],
    "matmul_reduce_scatter": ["off", "slices 2", "slices 4", "slices 8", "ring"],
    "matmul_all_reduce": ["off", "slices 2", "slices 4", "slices 8", "ring"],
}
BACKWARD = {
    "column_backward": ["off", "bulk", "slices 2", "slices 4", "slices 8", "ring"],
    "row_backward": ["off", "bulk", "slices 2", "slices 4", "slices 8", "ring"],
    "copy_backward": ["off", "bulk", "slices 2", "slices 4", "slices 8", "ring"],
}
PATTERNS = {**FORWARD, **BACKWARD}


class RandomClock:
    """Each pass takes a random time."""

    def __init__(self, seed: int) -> None:
        self._draw, self._now = random.Random(seed), 0

    def mark(self, like: Tensor) -> int:
        self._now += self._draw.randrange(1_000, 1_000_000)
        return self._now


@contextlib.contextmanager
def tune_small_layers(clock: RandomClock | GivenClock | None = None) -> Iterator[None]:
    """Context manager that enables short races for layers of any size and forgets earlier decisions of this process.

    clock  None: the real one
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedules, "MIN_FLOP", 0.0)
        patch.setattr(tune, "STARTS", STARTS)
        patch.setattr(tune, "mark", tune.mark if clock is None else clock.mark)
        patch.setattr(saved, "won", {})
        patch.setattr(saved, "from_files", {})
        patch.setattr(choose, "Passes", type("Passes", (choose.Passes,), {}))  # of another type: none exists
        yield


class ChosenSchedule(NamedTuple):
    """The schedule chosen for a pass."""

    pattern: str
    schedule: str
    settled: bool


class Schedules(Observer):
    """Records the chosen schedules of all calls, in order."""

    def __init__(self) -> None:
        self.chosen: list[ChosenSchedule] = []

    def decided(self, owner: Any, decision: Any) -> None:
        """See Observer."""
        self.chosen.append(ChosenSchedule(decision.pattern, decision.schedule, decision.settled))


class GivenClock(Observer):
    """A clock by which a pass takes seconds(decision)."""

    def __init__(self, seconds: Callable[[ad.overlap.Decision], float]) -> None:
        self._seconds, self._now, self._under_way = seconds, 0, False
        self._decision: Any = None

    def decided(self, owner: Any, decision: Any) -> None:
        """See Observer."""
        self._decision = decision

    def mark(self, like: Tensor) -> int:
        if self._under_way:
            self._now += round(self._seconds(self._decision) * 1e9)
        self._under_way = not self._under_way
        return self._now


@contextlib.contextmanager
def tune_with_times(seconds: Callable[[ad.overlap.Decision], float]) -> Iterator[None]:
    """Context manager that enables short races for layers of any size, with times given by `seconds` on this rank."""
    clock = GivenClock(seconds)
    with tune_small_layers(clock), observing(clock):
        yield


def make_call(comm: Communicator, name: str, owner: Any = None, **options: Any) -> Any:
    """Return a function that runs one of the four operations forward and backward, with the same tensors at each call,
    and returns (y, dx, dw, dbias)."""
    torch.manual_seed(comm.rank)
    x = torch.randn(ROWS // comm.size if name == "all_gather_matmul" else ROWS, IN, dtype=torch.float64)
    w, bias = torch.randn(OUT, IN, dtype=torch.float64), torch.randn(OUT, dtype=torch.float64)
    if name == "copy_matmul":
        comm.broadcast(x, x, 0)
    leaves = [t.requires_grad_() for t in (x, w, bias)]

    def call() -> tuple[Tensor, ...]:
        y = getattr(ad, name)(leaves[0], leaves[1], comm, leaves[2], owner=owner, **options)
        grads = torch.autograd.grad(y, leaves, torch.ones_like(y))
        return (y.detach(), *grads)

    return call


def chosen_by_races(owner: Any) -> dict[str, str]:
    """Return the schedules chosen by races, by pattern."""
    return {
        decision.pattern: decision.schedule
        for decision in ad.overlap.decisions(owner)
        if decision.settled and decision.tried
    }
