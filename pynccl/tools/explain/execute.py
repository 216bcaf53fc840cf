"""Run an operation and its adjoint on ranks inside this process, and check that the moves explain what came out.

The collectives are those of `Communicator`, on the host library: the numbers in every picture are what they gave. A sum
is followed move by move; if its last value is not what the library wrote, that is a ResultError, not a picture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isclose
from operator import add, mul
from typing import Any, NamedTuple

from ...bindings.library import load
from ...comm.communicator import Communicator, init_all
from ..command import FailedError
from .calls import call, premul
from .moves import HALO, LOCAL, WAYS, Cuts, Move, Setup
from .operations import ADJOINTS, OPERATIONS, REPLICATED, SUM, Step

Values = tuple[tuple[float, ...], ...]  # of each rank


class ResultError(FailedError):
    """What the library wrote is not what the moves say."""


class Landing(NamedTuple):
    """A move, when it is drawn, and what the element holds after it.  step: 0, 1, .. in the order of drawing."""

    move: Move
    step: int
    value: float


@dataclass(frozen=True)
class Stage:
    """One collective, or what each rank does alone: way, op as in `operations.Step`; values, cuts: afterwards."""

    way: str
    op: str
    landings: tuple[Landing, ...]
    values: Values
    cuts: Cuts
    factors: Values = ()  # of a scale

    @property
    def is_local(self) -> bool:
        return self.way in LOCAL

    @property
    def steps(self) -> int:
        return max((landing.step for landing in self.landings), default=-1) + 1


@dataclass(frozen=True)
class Pass:
    """Forward or adjoint: what the ranks hold before, and the stages."""

    values: Values
    cuts: Cuts
    stages: tuple[Stage, ...]
    is_adjoint: bool

    @property
    def result(self) -> Values:
        return self.stages[-1].values


@dataclass(frozen=True)
class Run:
    name: str
    op: str
    grad: str
    setup: Setup
    forward: Pass
    adjoint: Pass


@contextmanager
def ranks_of_this_process(ranks: int) -> Iterator[list[Communicator]]:
    comms = init_all(ranks, library=load("host"))
    try:
        yield comms
    finally:
        for comm in comms:
            comm.destroy()


def run(
    comms: list[Communicator],
    name: str,
    op: str,
    grad: str,
    setup: Setup,
    inputs: Sequence[Sequence[float]] | None = None,
    cotangents: Sequence[Sequence[float]] | None = None,
) -> Run:
    """Forward and adjoint of operation `name` on these ranks.

    inputs, cotangents  values of each rank; by default those of `example_input` and `example_cotangent`
    ResultError         if the library gives something else than the moves
    """
    row = OPERATIONS[name]
    way = WAYS[row.way]
    before, after = way.before(setup), way.after(setup)
    xs = _tensors(inputs if inputs is not None else example_input(name, op, before))
    gs = _tensors(cotangents if cotangents is not None else example_cotangent(op, grad, after))
    ys, landings = _stage(comms, Step(row.way, op), setup, xs, [])
    forward = Pass(_values(xs), before, (Stage(row.way, op, landings, _values(ys), after),), False)
    stages, held = [], gs
    for step in ADJOINTS[row.way, op, grad]:
        factors = FACTORS[step.op](comms, xs, ys) if step.way.startswith("scale") else []
        held, landings = _stage(comms, step, setup, held, factors)
        cuts = WAYS[step.way].after(setup)
        stages.append(Stage(step.way, step.op, landings, _values(held), cuts, _values(factors)))
    return Run(name, op, grad, setup, forward, Pass(_values(gs), after, tuple(stages), True))


# ------------------------------------------------------------------------------------------------- the example


def example_input(name: str, op: str, cuts: Cuts) -> list[list[float]]:
    """Rank r's elements are 10 r + 1, 10 r + 2, ..: each says where it comes from. Others where that would hide the
    point: equal on all ranks where the input is one value, ties for max and min, zeros for a product, empty halos."""
    row = OPERATIONS[name]
    if op in ("max", "min"):
        sign = 1 if op == "max" else -1
        return [
            [float(5 + sign * _height(rank, i, len(cuts))) for i in range(sum(own))] for rank, own in enumerate(cuts)
        ]
    if op == "prod":
        return [[float(0 if rank < i % 3 else 1 + rank % 3) for i in range(sum(own))] for rank, own in enumerate(cuts)]
    values = _numbered(cuts, row.replicated_input)
    if row.way == "halo_exchange":
        return [[0.0] * HALO + own[: len(own) - 2 * HALO] + [0.0] * HALO for own in values]
    return values


def _height(rank: int, i: int, ranks: int) -> int:
    """One rank is ahead, two ranks, all ranks, and again from the start."""
    return (int(rank == 1) * 3 + rank % 3, 4 if rank < 2 else 1, 2)[i % 3] if ranks > 1 else 0


def example_cotangent(op: str, grad: str, cuts: Cuts) -> list[list[float]]:
    """Numbered like the input, times N for a mean, which divides by N; under "replicated" equal on all ranks."""
    factor = len(cuts) if op == "avg" and grad != SUM else 1
    return [[factor * value for value in own] for own in _numbered(cuts, grad == REPLICATED)]


def _numbered(cuts: Cuts, alike: bool) -> list[list[float]]:
    decade = 10 if max(map(sum, cuts)) < 10 else 100
    return [[float((0 if alike else decade * rank) + i + 1) for i in range(sum(own))] for rank, own in enumerate(cuts)]


# ------------------------------------------------------------------------------------------------- what comes out


def _stage(
    comms: list[Communicator], step: Step, setup: Setup, xs: list[Any], factors: list[Any]
) -> tuple[list[Any], tuple[Landing, ...]]:
    """What the ranks hold after a step, and the moves that have led there."""
    way = WAYS[step.way]
    moves = list(way.moves(setup))
    if factors:
        ys = [x * factor for x, factor in zip(xs, factors, strict=True)]
    elif step.way in LOCAL:
        ys = [x.new_zeros(sum(own)) for x, own in zip(xs, way.after(setup), strict=True)]
        for move in moves:
            ys[move.target][move.to] = xs[move.source][move.at]
    else:
        ys = call(comms, step.way, step.op, setup, xs)
    return ys, _landings(step, setup, moves, _values(xs), _values(ys), _values(factors))


def _landings(
    step: Step, setup: Setup, moves: list[Move], before: Values, after: Values, factors: Values
) -> tuple[Landing, ...]:
    """The moves in the order in which they are drawn, and what has come together in an element after each of them.

    A rank's own part comes first, then that of the rank before it, and so on: for the eye; NCCL has its own orders.
    """
    distances = sorted({_distance(move, setup.ranks) for move in moves})
    ordered = sorted(moves, key=lambda move: _distance(move, setup.ranks))
    held: dict[tuple[int, int], float] = {}
    last = {move[2:]: at for at, move in enumerate(ordered)}
    found = []
    for at, move in enumerate(ordered):
        value = before[move.source][move.at]
        if step.op == "premul" and not factors:
            value *= premul(move.source)
        if factors:
            value *= factors[move.source][move.at]
        place = (move.target, move.to)
        held[place] = _COMBINED.get(step.op, add)(held[place], value) if place in held else value
        if last[place] == at:
            held[place] /= setup.ranks if step.op == "avg" else 1
            if not isclose(held[place], after[move.target][move.to], rel_tol=1e-12, abs_tol=1e-12):
                raise ResultError(_difference(step, move, held[place], after))
        found.append(Landing(move, distances.index(_distance(move, setup.ranks)), held[place]))
    for rank, own in enumerate(after):
        for i, value in enumerate(own):
            if (rank, i) not in held and value:
                raise ResultError(_difference(step, Move(rank, i, rank, i), 0.0, after))
    return tuple(found)


def _distance(move: Move, ranks: int) -> int:
    return (move.target - move.source) % ranks


# Of a step with factors there is one move to an element, so that nothing is combined.
_COMBINED: dict[str, Callable[[float, float], float]] = {"max": max, "min": min, "prod": mul}


def _difference(step: Step, move: Move, expected: float, after: Values) -> str:
    return (
        f"{step.way}: element {move.to} of rank {move.target} is {after[move.target][move.to]}, and the moves say "
        f"{expected}: python -m pynccl doctor looks at the installation"
    )


def _tensors(values: Sequence[Sequence[float]]) -> list[Any]:
    import torch

    return [torch.tensor(own, dtype=torch.float64) for own in values]


def _values(tensors: Sequence[Any]) -> Values:
    return tuple(tuple(tensor.tolist()) for tensor in tensors)


# ------------------------------------------------------------------------------------- factors of what ranks do alone


def _by_ranks(comms: list[Communicator], xs: list[Any], ys: list[Any]) -> list[Any]:
    """1/N, of a mean."""
    return [y.new_full(y.shape, 1 / len(comms)) for y in ys]


def _by_premul(comms: list[Communicator], xs: list[Any], ys: list[Any]) -> list[Any]:
    return [x.new_full(x.shape, premul(rank)) for rank, x in enumerate(xs)]


def _by_share(comms: list[Communicator], xs: list[Any], ys: list[Any]) -> list[Any]:
    """1 over the number of ranks that have the extremum, where this rank has it; 0 elsewhere."""
    attains = [(x == y).to(x.dtype) for x, y in zip(xs, ys, strict=True)]
    ties = call(comms, "all_reduce", "sum", _alike(comms, xs), attains)
    return [mine / all_of_them for mine, all_of_them in zip(attains, ties, strict=True)]


def _by_others(comms: list[Communicator], xs: list[Any], ys: list[Any]) -> list[Any]:
    """The product of the other ranks' elements: zeros are counted, so that nothing is divided by one."""
    setup = _alike(comms, xs)
    zeros = call(comms, "all_reduce", "sum", setup, [(x == 0).to(x.dtype) for x in xs])
    products = call(comms, "all_reduce", "prod", setup, [x.masked_fill(x == 0, 1.0) for x in xs])
    found = []
    for x, count, product in zip(xs, zeros, products, strict=True):
        others_have_none = count == (x == 0).to(x.dtype)
        found.append(product / x.masked_fill(x == 0, 1.0) * others_have_none)
    return found


def _alike(comms: list[Communicator], xs: list[Any]) -> Setup:
    return Setup(len(comms), (len(xs[0]),) * len(comms))


FACTORS: dict[str, Callable[[list[Communicator], list[Any], list[Any]], list[Any]]] = {
    "1/N": _by_ranks,
    "premul": _by_premul,
    "max": _by_share,
    "min": _by_share,
    "prod": _by_others,
}
