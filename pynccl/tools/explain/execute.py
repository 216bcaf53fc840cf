"""Run an operation and its adjoint on ranks inside this process, and check that the moves explain what came out.

The collectives are those of `Communicator`, on the host library: every number that is drawn is what they gave. A sum is
followed move by move; if its last value is not what the library wrote, that is a ResultError, not a picture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from math import isclose, prod
from operator import add, mul
from typing import Any, NamedTuple

from ...bindings.library import load
from ...comm.communicator import Communicator, init_all
from ...comm.groups import group
from ..command import FailedError
from .adjoints import ADJOINTS, Step
from .moves import HALO, WAYS, Cuts, Move, Setup, moves
from .operations import OPERATIONS, REPLICATED, SUM

Values = tuple[tuple[float, ...], ...]  # of each rank


class ResultError(FailedError):
    """What the library wrote is not what the moves say."""


class Landing(NamedTuple):
    """A move, when it is drawn (step: 0, 1, ..), and what the element at its end holds after it."""

    move: Move
    step: int
    value: float


@dataclass(frozen=True)
class Area:
    """What the ranks hold at one time."""

    label: str
    values: Values
    cuts: Cuts


@dataclass(frozen=True)
class Stage:
    """What leads from an area to the next: a collective, messages, or what each rank does alone.

    text     what it is, in a few words
    op       of a collective that reduces; of a scale the kind of its factors
    factors  of a scale: what each element is multiplied by
    """

    text: str
    op: str
    landings: tuple[Landing, ...]
    is_collective: bool = False
    factors: Values = ()

    @property
    def is_local(self) -> bool:
        own = (landing.move.source == landing.move.target for landing in self.landings)
        return not self.is_collective and all(own)

    @property
    def steps(self) -> int:
        return max((landing.step for landing in self.landings), default=-1) + 1


@dataclass(frozen=True)
class Pass:
    """Forward or adjoint; stages[i] leads from areas[i] to areas[i + 1]."""

    areas: tuple[Area, ...]
    stages: tuple[Stage, ...]

    @property
    def result(self) -> Values:
        return self.areas[-1].values


@dataclass(frozen=True)
class Run:
    name: str
    op: str
    grad: str
    setup: Setup
    forward: Pass
    adjoint: Pass


def number(value: float) -> str:
    """A small number as it is read: whole, or a fraction."""
    found = Fraction(value).limit_denominator(1000)
    return str(found) if abs(float(found) - value) < 1e-9 else f"{value:.3g}"


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
    before, after = WAYS[row.way].before(setup), WAYS[row.way].after(setup)
    xs = _values(inputs if inputs is not None else example_input(name, op, before))
    gs = _values(cotangents if cotangents is not None else example_cotangent(op, grad, after))
    stage, ys = _stage(comms, row.way, op, setup, xs)
    forward = Pass((Area("x", xs, before), Area("y", ys, after)), (stage,))

    steps = ADJOINTS[row.way, op, grad].steps
    areas, stages = [Area("g", gs, after)], []
    for step in steps:
        held = areas[-1]
        label = "x.grad" if step is steps[-1] else "G" if step.op == "sum" else "g / N"
        if step.way == "scale":
            stage, values = _scale(step, held.values, xs, ys)
            areas.append(Area(label, values, held.cuts))
        else:
            stage, values = _stage(comms, *step, setup, held.values)
            areas.append(Area(label, values, WAYS[step.way].after(setup)))
        stages.append(stage)
    return Run(name, op, grad, setup, forward, Pass(tuple(areas), tuple(stages)))


# ------------------------------------------------------------------------------------------------- the example


def example_input(name: str, op: str, cuts: Cuts) -> list[list[float]]:
    """Rank r's elements are 10 r + 1, 10 r + 2, ..: each says where it comes from. Others where that would hide the
    point: equal on all ranks where the input is one value, ties for max and min, zeros for a product, empty halos."""
    row = OPERATIONS[name]
    if op in ("max", "min"):
        sign = 1 if op == "max" else -1
        return [[float(5 + sign * _height(rank, i)) for i in range(sum(own))] for rank, own in enumerate(cuts)]
    if op == "prod":
        return [[float(0 if rank < i % 3 else 1 + rank % 3) for i in range(sum(own))] for rank, own in enumerate(cuts)]
    values = _numbered(cuts, row.replicated_input)
    if row.way == "halo_exchange":
        return [[0.0] * HALO + own[: len(own) - 2 * HALO] + [0.0] * HALO for own in values]
    return values


def _height(rank: int, i: int) -> int:
    """One rank is ahead, two ranks, all ranks, and again from the start."""
    return (int(rank == 1) * 3 + rank % 3, 4 if rank < 2 else 1, 2)[i % 3]


def example_cotangent(op: str, grad: str, cuts: Cuts) -> list[list[float]]:
    """Numbered like the input, times N for a mean, which divides by N; under "replicated" equal on all ranks."""
    factor = len(cuts) if op == "avg" and grad != SUM else 1
    return [[factor * value for value in own] for own in _numbered(cuts, grad == REPLICATED)]


def _numbered(cuts: Cuts, alike: bool) -> list[list[float]]:
    decade = 10 if max(map(sum, cuts)) < 10 else 100
    return [[float((0 if alike else decade * rank) + i + 1) for i in range(sum(own))] for rank, own in enumerate(cuts)]


def premul(rank: int) -> float:
    """The factor of a rank in the example of a pre-multiplied sum."""
    return float(rank + 1)


# ------------------------------------------------------------------------------------------------- what comes out


def _stage(comms: list[Communicator], way: str, op: str, setup: Setup, xs: Values) -> tuple[Stage, Values]:
    """What the ranks hold after a row of WAYS, and the moves that have led there."""
    import torch

    collective = WAYS[way].collective
    travels = list(moves(way, setup))
    sends = [torch.tensor(own, dtype=torch.float64) for own in xs]
    recvs = [torch.zeros(sum(own), dtype=torch.float64) for own in WAYS[way].after(setup)]
    if collective:
        call(comms, way, op, setup, sends, recvs)
    else:
        _messages(comms, travels, sends, recvs)
    ys = _values([recv.tolist() for recv in recvs])
    text = WAYS[way].text or collective + "_v" * setup.by_counts
    landings = _landings(way, op, setup, travels, xs, ys)
    return Stage(f"{text}, {op}" if op else text, op, landings, bool(collective)), ys


def call(comms: list[Communicator], way: str, op: str, setup: Setup, sends: list[Any], recvs: list[Any]) -> None:
    """The collective on all ranks, as a user calls it. What it does not write stays 0."""
    name = WAYS[way].collective
    before, after = WAYS[way].before(setup), WAYS[way].after(setup)
    with group():
        for comm, send, recv in zip(comms, sends, recvs, strict=True):
            given: list[Any] = [send, recv]
            keywords: dict[str, Any] = {"op": op} if op else {}
            if name in ("reduce", "broadcast", "scatter", "gather"):
                keywords["root"] = setup.root
            if comm.rank != setup.root and name in ("scatter", "gather"):
                given[0 if name == "scatter" else 1] = None
            if setup.by_counts and name == "all_to_all":
                keywords |= {"send_counts": before[comm.rank], "recv_counts": after[comm.rank]}
            elif setup.by_counts:
                keywords["counts"] = setup.counts
            method = getattr(comm, name + "_v" * setup.by_counts)
            if op == "premul":
                with comm.pre_mul_sum(premul(comm.rank), send.dtype) as scaled:
                    method(*given, **keywords | {"op": scaled})
            else:
                method(*given, **keywords)


def _messages(comms: list[Communicator], travels: list[Move], sends: list[Any], recvs: list[Any]) -> None:
    """A send and a recv for each pair of ranks that has moves; what arrives is added, on a rank itself too."""
    pairs: dict[tuple[int, int], list[Move]] = {}
    for move in travels:
        pairs.setdefault((move.source, move.target), []).append(move)
    arrived = []
    with group():
        for (source, target), part in pairs.items():
            sent = sends[source][[move.at for move in part]]
            if source != target:
                comms[source].send(sent, target)
                sent = comms[target].recv(sent.new_zeros(len(part)), source)
            arrived.append((recvs[target], [move.to for move in part], sent))
    for recv, places, values in arrived:
        recv[places] += values


_COMBINED: dict[str, Callable[[float, float], float]] = {"max": max, "min": min, "prod": mul}


def _landings(
    way: str, op: str, setup: Setup, travels: list[Move], before: Values, after: Values
) -> tuple[Landing, ...]:
    """The moves in the order in which they are drawn, and what has come together in an element after each of them.

    A rank's own part comes first, then that of the rank before it, and so on: for the eye; NCCL has its own orders.
    """
    ordered = sorted(travels, key=lambda move: (move.target - move.source) % setup.ranks)
    distances = sorted({(move.target - move.source) % setup.ranks for move in ordered})
    last = {move[2:]: at for at, move in enumerate(ordered)}
    held: dict[tuple[int, int], float] = {}
    found = []
    for at, move in enumerate(ordered):
        value = before[move.source][move.at] * (premul(move.source) if op == "premul" else 1)
        place = move[2:]
        held[place] = _COMBINED.get(op, add)(held[place], value) if place in held else value
        if last[place] == at and op == "avg":
            held[place] /= setup.ranks
        found.append(Landing(move, distances.index((move.target - move.source) % setup.ranks), held[place]))
    for rank, own in enumerate(after):
        for i, value in enumerate(own):
            expected = held.get((rank, i), 0.0)
            if not isclose(expected, value, rel_tol=1e-12, abs_tol=1e-12):
                raise ResultError(
                    f"{way}: element {i} of rank {rank} is {value}, and the moves say {expected}: "
                    "python -m pynccl doctor looks at the installation"
                )
    return tuple(found)


def _values(rows: Sequence[Sequence[float]]) -> Values:
    return tuple(tuple(map(float, own)) for own in rows)


# ------------------------------------------------------------------------------------------------- what ranks do alone

_SCALES = {
    "1/N": "divided by N",
    "premul": "times a_r",
    "max": "times 1 / ties where x is the largest, else 0",
    "min": "times 1 / ties where x is the smallest, else 0",
    "prod": "times the product of the others' x",
}


def _scale(step: Step, held: Values, xs: Values, ys: Values) -> tuple[Stage, Values]:
    """What a rank holds, times the derivative of y by its x."""
    factors = tuple(tuple(_factor(step.op, xs, ys, rank, i) for i in range(len(own))) for rank, own in enumerate(held))
    after = tuple(tuple(map(mul, own, by)) for own, by in zip(held, factors, strict=True))
    landings = tuple(
        Landing(Move(rank, i, rank, i), 0, value) for rank, own in enumerate(after) for i, value in enumerate(own)
    )
    return Stage(f"on each rank: {_SCALES[step.op]}", step.op, landings, factors=factors), after


def _factor(op: str, xs: Values, ys: Values, rank: int, i: int) -> float:
    if op == "1/N":
        return 1 / len(xs)
    if op == "premul":
        return premul(rank)
    if op == "prod":
        return prod(own[i] for other, own in enumerate(xs) if other != rank)
    attains = [own[i] == ys[rank][i] for own in xs]
    return attains[rank] / sum(attains)
