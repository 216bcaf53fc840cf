"""Run an operation and its adjoint on ranks inside this process: every number that is drawn is what they gave.

The collectives are those of `Communicator`, on the host library. A sum is followed move by move; if its last value is
not what the library wrote, there is an error and no picture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from math import isclose
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
    """

    label: str
    values: Values
    cuts: Cuts
    text: str = ""
    op: str = ""
    collective: bool = False
    landings: tuple[Landing, ...] = ()

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
    x = Area("x", _values(inputs if inputs is not None else example_input(name, before)), before)
    y = _moved(comms, row.method(name), op, setup, forward(name, setup), x, "y", after)
    g = Area("g", _values(cotangents if cotangents is not None else example_cotangent(op, grad, after)), after)
    back = [g]
    if op == "avg":
        back.append(_over_n(g, "x.grad" if alike else "g / N"))
    if op != "avg" or not alike:
        method = "" if alike else row.adjoint
        combined = "sum" if method.endswith(("reduce", "reduce_scatter")) else ""
        travels = backward(name, setup, alike, row.one_input)
        back.append(_moved(comms, method, combined, setup, travels, back[-1], "x.grad", before))
    return Run(name, op, grad, setup, [x, y], back)


# ------------------------------------------------------------------------------------------------- the example


def example_input(name: str, cuts: Cuts) -> list[list[float]]:
    """Rank r's elements are 10 r + 1, 10 r + 2, ..: each says where it comes from. Equal on all ranks where the input
    is one value; empty halos."""
    values = _numbered(cuts, OPERATIONS[name].one_input)
    if name == "halo_exchange":
        return [[0.0] * HALO + own[: len(own) - 2 * HALO] + [0.0] * HALO for own in values]
    return values


def example_cotangent(op: str, grad: str, cuts: Cuts) -> list[list[float]]:
    """Numbered like the input, times N for a mean, which divides by N; under "replicated" equal on all ranks."""
    factor = len(cuts) if op == "avg" else 1
    return [[factor * value for value in own] for own in _numbered(cuts, grad == REPLICATED)]


def _numbered(cuts: Cuts, alike: bool) -> list[list[float]]:
    decade = 10 if max(map(sum, cuts)) < 10 else 100
    return [[float((0 if alike else decade * rank) + i + 1) for i in range(sum(own))] for rank, own in enumerate(cuts)]


# ------------------------------------------------------------------------------------------------- what comes out


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
        held[place] = held.get(place, 0.0) + value
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


def _over_n(held: Area, label: str) -> Area:
    """What each rank does alone with the cotangent of a mean."""
    after = tuple(tuple(value / len(held.values) for value in own) for own in held.values)
    places = [(rank, i) for rank, own in enumerate(after) for i in range(len(own))]
    landings = tuple(Landing(Move(*place, *place), 0, after[place[0]][place[1]]) for place in places)
    return Area(label, after, held.cuts, "on each rank: divided by N", "avg", False, landings)
