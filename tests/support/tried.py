"""Layers of which the ways are tried although they are small, what their calls took, and clocks that say what a test
wants."""

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

ROWS = 288  # of the whole: enough for 8 slices, and divisible by 2, 3 and 4 ranks
IN, OUT = 24, 48
MOST_CALLS = 24  # of a trial
FUNCTIONS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "copy_matmul")
# Where on a CPU something is tried, and what: the ring and the bulk where the pattern has them.
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
def tried_small(seed: int | None = None) -> Iterator[None]:
    """Layers of any size are tried, and what this process knew of earlier ones is forgotten.

    seed  of a clock of random times, of this rank, so that any way may be the fastest; None: the clock of the machine
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials, "FEWEST_FLOP", 0.0)
        patch.setattr(remembered, "_found", {})
        patch.setattr(remembered, "_loaded", {})
        if seed is not None:
            draw, now = random.Random(seed), [0]

            def moment(like: Tensor) -> int:
                now[0] += draw.randrange(1_000, 1_000_000)
                return now[0]

            patch.setattr(trials, "_moment", moment)
        yield


class Took(NamedTuple):
    """What a pass was decided to take."""

    pattern: str
    way: str
    settled: bool


class Ways(Observer):
    """Of every call whose way was decided, in order."""

    def __init__(self) -> None:
        self.took: list[Took] = []

    def decided(self, owner: Any, decision: Any) -> None:
        """See Observer."""
        self.took.append(Took(decision.pattern, decision.way, decision.settled))


class Clock(Observer):
    """A clock by which a pass takes what `seconds` says of its decision, and of how many of that way there were."""

    def __init__(self, seconds: Callable[[ad.overlap.Decision, int], float]) -> None:
        self._seconds, self._now, self._under_way = seconds, 0, False
        self._decision: Any = None
        self._seen: dict[tuple[str, str], int] = {}

    def decided(self, owner: Any, decision: Any) -> None:
        """See Observer."""
        self._decision = decision

    def moment(self, like: Tensor) -> int:
        """The begin of a pass, or its end."""
        if self._under_way:
            decision = self._decision
            number = self._seen.get((decision.pattern, decision.way), 0)
            self._seen[decision.pattern, decision.way] = number + 1
            self._now += round(self._seconds(decision, number) * 1e9)
        self._under_way = not self._under_way
        return self._now


@contextlib.contextmanager
def timed_by(seconds: Callable[[ad.overlap.Decision, int], float]) -> Iterator[None]:
    """Small layers are tried, and take what `seconds` says on this rank."""
    clock = Clock(seconds)
    with tried_small(), pytest.MonkeyPatch.context() as patch, observing(clock):
        patch.setattr(trials, "_moment", clock.moment)
        yield


def calling(comm: Communicator, name: str, owner: Any = None, **options: Any) -> Any:
    """A function of no arguments that calls one of the four forwards and backwards, with the same tensors at each call:
    (y, dx, dw, dbias)."""
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


def settled(owner: Any) -> dict[str, str]:
    """The ways of what has been decided by a trial, by pattern."""
    return {one.pattern: one.way for one in ad.overlap.decisions(owner) if one.settled and one.tried}
