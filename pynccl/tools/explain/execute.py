"""Run an operation and its adjoint on ranks inside this process: every number that is drawn is what they gave.

The collectives are those of `Communicator`, on the host library. A sum is followed move by move; if its last value is
not what the library wrote, there is an error and no picture.
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
from .moves import HALO, WAYS, Cuts, Move, Setup, backward, forward
from .operations import OPERATIONS, REPLICATED

Values = tuple[tuple[float, ...], ...]  # of each rank


class Landing(NamedTuple):
    """A move, when it is drawn (step: 0, 1, ..), and what the element at its end holds after it."""

    move: Move
    step: int
    value: float


@dataclass(frozen=True)
class Area:
    """What the ranks hold at one time, and what has led there from the area before.

    cuts        for each rank, the sizes of the blocks in its memory
    text        what happened, in a few words; "" for the first area
    op          of a collective that reduces
    collective  False: messages, or what each rank does alone
    factors     of what each rank does alone: by what each element was multiplied
    """

    label: str
    values: Values
    cuts: Cuts
    text: str = ""
    op: str = ""
    collective: bool = False
    landings: tuple[Landing, ...] = ()
    factors: Values = ()

    @property
    def is_local(self) -> bool:
        return not self.collective and all(move.source == move.target for move, _, _ in self.landings)


class Run(NamedTuple):
    """forward: x and y; adjoint: the cotangent g of y, .., the gradient of x."""

    name: str
    op: str
    grad: str
    setup: Setup
    forward: list[Area]
    adjoint: list[Area]


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
    FailedError         if the library gives something else than the moves
    """
    row, alike = OPERATIONS[name], grad == REPLICATED
    before, after = WAYS[name].before(setup), WAYS[name].after(setup)
    x = Area("x", _values(inputs if inputs is not None else example_input(name, op, before)), before)
    y = _moved(comms, row.method(name), op, setup, forward(name, setup), x, "y", after)
    g = Area("g", _values(cotangents if cotangents is not None else example_cotangent(op, grad, after)), after)
    back = [g]
    if op == "avg":
        back.append(_scaled(op, g, x, y, "x.grad" if alike else "g / N"))
    if not alike or op not in _SCALES:
        method = "" if alike else row.adjoint
        combined = "sum" if method.endswith(("reduce", "reduce_scatter")) else ""
        label = "G" if op in _EXTREMES else "x.grad"
        travels = backward(name, setup, alike, row.one_input)
        back.append(_moved(comms, method, combined, setup, travels, back[-1], label, before))
    if op in _EXTREMES:
        back.append(_scaled(op, back[-1], x, y, "x.grad"))
    return Run(name, op, grad, setup, [x, y], back)


# ------------------------------------------------------------------------------------------------- the example


def example_input(name: str, op: str, cuts: Cuts) -> list[list[float]]:
    """Rank r's elements are 10 r + 1, 10 r + 2, ..: each says where it comes from. Others where that would hide the
    point: equal on all ranks where the input is one value, ties for max and min, zeros for a product, empty halos."""
    if op in ("max", "min"):
        sign = 1 if op == "max" else -1
        return [[float(5 + sign * _height(rank, i)) for i in range(sum(own))] for rank, own in enumerate(cuts)]
    if op == "prod":
        return [[float(0 if rank < i % 3 else 1 + rank % 2) for i in range(sum(own))] for rank, own in enumerate(cuts)]
    values = _numbered(cuts, OPERATIONS[name].one_input)
    if name == "halo_exchange":
        return [[0.0] * HALO + own[: len(own) - 2 * HALO] + [0.0] * HALO for own in values]
    return values


def _height(rank: int, i: int) -> int:
    """One rank is ahead, two ranks, all ranks, and again from the start."""
    return (int(rank == 1) * 3 + rank % 3, 4 if rank < 2 else 1, 2)[i % 3]


def example_cotangent(op: str, grad: str, cuts: Cuts) -> list[list[float]]:
    """Numbered like the input, times N for a mean, which divides by N; under "replicated" equal on all ranks."""
    factor = len(cuts) if op == "avg" else 1
    return [[factor * value for value in own] for own in _numbered(cuts, grad == REPLICATED)]


def _numbered(cuts: Cuts, alike: bool) -> list[list[float]]:
    decade = 10 if max(map(sum, cuts)) < 10 else 100
    return [[float((0 if alike else decade * rank) + i + 1) for i in range(sum(own))] for rank, own in enumerate(cuts)]


# ------------------------------------------------------------------------------------------------- what comes out

_COMBINED: dict[str, Callable[[float, float], float]] = {"max": max, "min": min, "prod": mul}


def _moved(
    comms: list[Communicator],
    method: str,
    op: str,
    setup: Setup,
    travels: list[Move],
    held: Area,
    label: str,
    cuts: Cuts,
) -> Area:
    """What the ranks hold after these moves, made by a method of Communicator, or by messages where that is ""."""
    import torch

    sends = [torch.tensor(own, dtype=torch.float64) for own in held.values]
    recvs = [torch.zeros(sum(own), dtype=torch.float64) for own in cuts]
    if method:
        text = method + "_v" * setup.uneven
        call(comms, text, op, setup, (held.cuts, cuts), sends, recvs)
    else:
        text = "sends and receives" if any(move.source != move.target for move in travels) else "nothing is sent"
        _messages(comms, travels, sends, recvs)
    values = _values([recv.tolist() for recv in recvs])
    landings = _landings(text, op, setup.ranks, travels, held.values, values)
    return Area(label, values, cuts, f"{text}, {op}" if op else text, op, bool(method), landings)


def call(
    comms: list[Communicator], method: str, op: str, setup: Setup, cuts: tuple[Cuts, Cuts], sends: Any, recvs: Any
) -> None:
    """The collective on all ranks, as a user calls it. What it does not write stays 0."""
    kind = method.removesuffix("_v")
    keywords: dict[str, Any] = {"op": op} if op else {}
    if kind in ("reduce", "broadcast", "scatter", "gather"):
        keywords["root"] = setup.root
    if setup.uneven and kind != "all_to_all":
        keywords["counts"] = setup.counts
    with group():
        for comm, send, recv in zip(comms, sends, recvs, strict=True):
            other = comm.rank != setup.root
            given = [None if other and kind == "scatter" else send, None if other and kind == "gather" else recv]
            if method == "all_to_all_v":
                keywords |= {"send_counts": cuts[0][comm.rank], "recv_counts": cuts[1][comm.rank]}
            getattr(comm, method)(*given, **keywords)


def _messages(comms: list[Communicator], travels: list[Move], sends: list[Any], recvs: list[Any]) -> None:
    """A message for each element that leaves its rank; what arrives is added."""
    arrived = []
    with group():
        for source, at, target, _ in travels:
            value = sends[source][at : at + 1]
            if source != target:
                comms[source].send(value, target)
                value = comms[target].recv(value.new_zeros(1), source)
            arrived.append(value)
    for (_, _, target, to), value in zip(travels, arrived, strict=True):
        recvs[target][to] += value[0]


def _landings(
    text: str, op: str, ranks: int, travels: list[Move], before: Values, after: Values
) -> tuple[Landing, ...]:
    """The moves in the order in which they are drawn, and what has come together in an element after each of them.

    A rank's own part comes first, then that of the rank before it, and so on: for the eye; NCCL has its own orders.
    """
    ordered = sorted(travels, key=lambda move: (move.target - move.source) % ranks)
    distances = sorted({(move.target - move.source) % ranks for move in ordered})
    last = {move[2:]: at for at, move in enumerate(ordered)}
    held: dict[tuple[int, int], float] = {}
    found = []
    for at, move in enumerate(ordered):
        place, value = move[2:], before[move.source][move.at]
        held[place] = _COMBINED.get(op, add)(held[place], value) if place in held else value
        if last[place] == at and op == "avg":
            held[place] /= ranks
        found.append(Landing(move, distances.index((move.target - move.source) % ranks), held[place]))
    for rank, own in enumerate(after):
        for i, value in enumerate(own):
            if not isclose(held.get((rank, i), 0.0), value, rel_tol=1e-12, abs_tol=1e-12):
                said = f"{text}: element {i} of rank {rank} is {value}, and the moves say {held.get((rank, i), 0.0)}"
                raise FailedError(f"{said}: python -m pynccl doctor looks at the installation")
    return tuple(found)


def _values(rows: Sequence[Sequence[float]]) -> Values:
    return tuple(tuple(map(float, own)) for own in rows)


# ------------------------------------------------------------------------------------------------- what ranks do alone

_SCALES = {
    "avg": "divided by N",
    "max": "times 1 / ties where x is the largest, else 0",
    "min": "times 1 / ties where x is the smallest, else 0",
    "prod": "times the product of the others' x",
}
_EXTREMES = ("max", "min", "prod")  # what is scaled after the cotangents are added


def _scaled(op: str, held: Area, x: Area, y: Area, label: str) -> Area:
    """What a rank holds, times the derivative of y by its x."""
    places = [[(rank, i) for i in range(len(own))] for rank, own in enumerate(held.values)]
    factors = _values([[_factor(op, x.values, y.values, *place) for place in own] for own in places])
    after = tuple(tuple(map(mul, own, by)) for own, by in zip(held.values, factors, strict=True))
    landings = tuple(Landing(Move(*place, *place), 0, after[place[0]][place[1]]) for own in places for place in own)
    return Area(label, after, held.cuts, f"on each rank: {_SCALES[op]}", op, False, landings, factors)


def _factor(op: str, xs: Values, ys: Values, rank: int, i: int) -> float:
    if op == "avg":
        return 1 / len(xs)
    if op == "prod":
        return prod(own[i] for other, own in enumerate(xs) if other != rank)
    attains = [own[i] == ys[rank][i] for own in xs]
    return attains[rank] / sum(attains)
