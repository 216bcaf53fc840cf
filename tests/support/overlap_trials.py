"""Trials of schedules for small layers, a record of the chosen schedules, and clocks that a test controls."""

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
from pynccl.comm.observers import Observer, observing
from pynccl_autograd.overlap import routes as remembered, trials

ROWS = 288  # of the full input: enough for 8 slices, and divisible by 2, 3 and 4 ranks
IN, OUT = 24, 48
MAX_CALLS = 24  # upper limit of the calls that a trial takes
FUNCTIONS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "copy_matmul")
# Patterns with trials on a CPU, and their candidates.
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


@contextlib.contextmanager
def tune_small_layers(seed: int | None = None) -> Iterator[None]:
    """Context manager that enables trials for layers of any size and forgets earlier decisions of this process.

    seed  seed of random measured times, so that any schedule may be the fastest; None: use the real clock
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials, "MIN_FLOP", 0.0)
        patch.setattr(remembered, "_decided", {})
        patch.setattr(remembered, "_loaded", {})
        if seed is not None:
            draw, now = random.Random(seed), [0]

            def moment(like: Tensor) -> int:
                now[0] += draw.randrange(1_000, 1_000_000)
                return now[0]

            patch.setattr(trials, "_moment", moment)
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


class Clock(Observer):
    """A clock that makes a pass take seconds(decision, number of earlier calls of this schedule)."""

    def __init__(self, seconds: Callable[[ad.overlap.Decision, int], float]) -> None:
        self._seconds, self._now, self._under_way = seconds, 0, False
        self._decision: Any = None
        self._seen: dict[tuple[str, str], int] = {}

    def decided(self, owner: Any, decision: Any) -> None:
        """See Observer."""
        self._decision = decision

    def moment(self, like: Tensor) -> int:
        """Return the time at the begin or end of a pass."""
        if self._under_way:
            decision = self._decision
            number = self._seen.get((decision.pattern, decision.schedule), 0)
            self._seen[decision.pattern, decision.schedule] = number + 1
            self._now += round(self._seconds(decision, number) * 1e9)
        self._under_way = not self._under_way
        return self._now


@contextlib.contextmanager
def tune_with_times(seconds: Callable[[ad.overlap.Decision, int], float]) -> Iterator[None]:
    """Context manager that enables trials for layers of any size, with times given by `seconds` on this rank."""
    clock = Clock(seconds)
    with tune_small_layers(), pytest.MonkeyPatch.context() as patch, observing(clock):
        patch.setattr(trials, "_moment", clock.moment)
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


def chosen_by_trials(owner: Any) -> dict[str, str]:
    """Return the schedules chosen by trials, by pattern."""
    return {
        decision.pattern: decision.schedule
        for decision in ad.overlap.decisions(owner)
        if decision.settled and decision.tried
    }
