"""Run an operation and its adjoint on ranks inside this process: every number that is drawn is what they gave.

The collectives are those of `Communicator`, on the host library. The moves that are drawn between the numbers are those
of moves.py; tests hold them against the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from ...bindings.library import load
from ...comm.communicator import Communicator, init_all
from ...comm.groups import group
from .moves import Move, backward, forward, sizes
from .operations import OPERATIONS, REPLICATED

Values = list[list[int]]  # of each rank


class Pass(NamedTuple):
    """One direction.

    labels         of what the ranks hold before and after
    before, after  what they hold
    method         of Communicator; "": messages, or nothing is sent
    """

    labels: tuple[str, str]
    before: Values
    after: Values
    moves: list[Move]
    method: str

    @property
    def text(self) -> str:
        """What happens, in a few words."""
        if self.method:
            return self.method
        return "sends and receives" if any(move.source != move.target for move in self.moves) else "nothing is sent"


class Run(NamedTuple):
    name: str
    grad: str
    ranks: int
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


def run(comms: list[Communicator], name: str, grad: str) -> Run:
    """Forward and adjoint of operation `name` on these ranks."""
    row, alike, ranks = OPERATIONS[name], grad == REPLICATED, len(comms)
    before, after = sizes(name, ranks)
    x, g = _numbered(before, row.one_input), _numbered(after, alike)
    if name == "halo_exchange":
        x = [[0, *own[:-2], 0] for own in x]
    there, back = forward(name, ranks), backward(name, ranks, alike, row.one_input)
    method, adjoint = row.method(name), "" if alike else row.adjoint
    return Run(
        name,
        grad,
        ranks,
        Pass(("x", "y"), x, _moved(comms, method, there, x, after), there, method),
        Pass(("g", "x.grad"), g, _moved(comms, adjoint, back, g, before), back, adjoint),
    )


def _numbered(counts: list[int], alike: bool) -> Values:
    """Rank r's elements are 10 r + 1, 10 r + 2, ..: each says where it comes from. `alike`: equal on all ranks."""
    return [[10 * rank * (not alike) + i + 1 for i in range(count)] for rank, count in enumerate(counts)]


def _moved(comms: list[Communicator], method: str, moves: list[Move], held: Values, counts: list[int]) -> Values:
    """What the ranks hold afterwards. What nothing writes stays 0."""
    import torch

    sends = [torch.tensor(own, dtype=torch.int64) for own in held]
    recvs = [torch.zeros(count, dtype=torch.int64) for count in counts]
    if method:
        _call(comms, method, sends, recvs)
    else:
        _messages(comms, moves, sends, recvs)
    return [recv.tolist() for recv in recvs]


def _call(comms: list[Communicator], method: str, sends: list[Any], recvs: list[Any]) -> None:
    """The collective on all ranks, as a user calls it."""
    keywords = {"root": 0} if method in ("reduce", "broadcast", "scatter", "gather") else {}
    with group():
        for comm, send, recv in zip(comms, sends, recvs, strict=True):
            x = None if comm.rank and method == "scatter" else send
            y = None if comm.rank and method == "gather" else recv
            getattr(comm, method)(x, y, **keywords)


def _messages(comms: list[Communicator], moves: list[Move], sends: list[Any], recvs: list[Any]) -> None:
    """A message for each element that leaves its rank; what arrives is added."""
    arrived = []
    with group():
        for source, at, target, _ in moves:
            value = sends[source][at : at + 1]
            if source != target:
                comms[source].send(value, target)
                value = comms[target].recv(value.new_zeros(1), source)
            arrived.append(value)
    for (_, _, target, to), value in zip(moves, arrived, strict=True):
        recvs[target][to] += value[0]
