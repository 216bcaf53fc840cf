"""Layers of which the ways are tried although they are small, what their calls took, and clocks that say what a test
wants."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl.comm.observing import Observer, observing
from pynccl_autograd.overlap import passes, routes as remembered, trials
from pynccl_autograd.torch_internals import backward_pass

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
    """What a pass was decided to take. owner: a number, in the order in which they were first seen"""

    owner: int
    pattern: str
    way: str
    settled: bool


class Ways(Observer):
    """Of every call whose way was decided, in order."""

    def __init__(self) -> None:
        self.owners: list[Any] = []
        self.took: list[Took] = []

    def decided(self, owner: Any, decision: Any) -> None:
        """See Observer."""
        if not any(owner is one for one in self.owners):
            self.owners.append(owner)
        number = next(at for at, one in enumerate(self.owners) if one is owner)
        self.took.append(Took(number, decision.pattern, decision.way, decision.settled))

    def of(self, pattern: str) -> list[str]:
        """The ways of a pattern."""
        return [took.way for took in self.took if took.pattern == pattern]


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


def calling(
    comm: Communicator, name: str, owner: Any = None, dtype: torch.dtype = torch.float64, **options: Any
) -> Any:
    """A function of no arguments that calls one of the four forwards and backwards, with the same tensors at each call:
    (y, dx, dw, dbias)."""
    torch.manual_seed(comm.rank)
    gathers = name == "all_gather_matmul"
    x = torch.randn(ROWS // comm.size if gathers else ROWS, IN).to(dtype)
    w, bias = torch.randn(OUT, IN).to(dtype), torch.randn(OUT).to(dtype)
    if name == "copy_matmul":
        comm.broadcast(x, x, 0)
    leaves = [t.requires_grad_() for t in (x, w, bias)]
    g: list[Tensor] = []

    def call() -> tuple[Tensor, ...]:
        y = getattr(ad, name)(leaves[0], leaves[1], comm, leaves[2], owner=owner, **options)
        if not g:
            torch.manual_seed(9)
            g.append(torch.randn(y.shape).to(dtype))
        grads = torch.autograd.grad(y, leaves, g[0])
        return (y.detach(), *grads)

    return call


class Route(NamedTuple):
    """How a forward call of a layer went. way: None where it communicates nothing"""

    layer: int
    way: str | None
    composed: bool


class Routes:
    """Forward calls of layers: of first passes, and of what is computed anew in a backward pass, by what `at` says
    meanwhile."""

    def __init__(self) -> None:
        self.at: Any = None
        self.first: dict[Any, list[Route]] = {}
        self.anew: dict[Any, list[Route]] = {}
        self._layers: list[Any] = []

    def add(self, layer: Any, route: Any) -> None:
        """As it was chosen."""
        if not any(layer is one for one in self._layers):
            self._layers.append(layer)
        number = next(at for at, one in enumerate(self._layers) if one is layer)
        decision = route.turn.decision
        into = self.anew if backward_pass() >= 0 else self.first
        into.setdefault(self.at, []).append(Route(number, decision and decision.way, route.composed))


@contextlib.contextmanager
def routes() -> Iterator[Routes]:
    """Tells how the forward calls of the block went."""
    found, chosen = Routes(), passes.route_of  # type: ignore[attr-defined]

    def noted(comm: Communicator, owner: Any, forward: Any, backward: Any) -> Any:
        route = chosen(comm, owner, forward, backward)
        found.add(owner, route)
        return route

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "route_of", noted)
        yield found


def settled(owner: Any) -> dict[str, str]:
    """The ways of what has been decided by a trial, by pattern."""
    return {one.pattern: one.way for one in ad.overlap.decisions(owner) if one.settled and one.tried}


def mlp(comm: Communicator, sequence_parallel: bool, **options: Any) -> nn.Sequential:
    torch.manual_seed(3)
    options = {"dtype": torch.float64, "sequence_parallel": sequence_parallel, **options}
    column, row = ad.ColumnParallelLinear, ad.RowParallelLinear
    return nn.Sequential(
        column(IN, OUT, comm, **options), nn.GELU(), row(OUT, IN, comm, **options), column(IN, OUT, comm, **options)
    )
