"""Run an operation and its adjoint on ranks inside this process, so that every number drawn is a real result.

It calls the collectives of `Communicator` on the host library. The moves drawn between the numbers come from moves.py;
tests compare them with the numbers.
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

Values = list[list[int]]  # one list per rank


class Pass(NamedTuple):
    """The forward or the adjoint.

    labels         names of the values before and after
    before, after  values of all ranks
    method         method of Communicator; "": sends and receives, or no communication
    """

    labels: tuple[str, str]
    before: Values
    after: Values
    moves: list[Move]
    method: str

    @property
    def text(self) -> str:
        """Short description of the communication."""
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
    """Run the forward and the adjoint of operation `name` on these ranks."""
    row, replicated, ranks = OPERATIONS[name], grad == REPLICATED, len(comms)
    before, after = sizes(name, ranks)
    x, g = _numbered(before, row.replicated_input), _numbered(after, replicated)
    if name == "halo_exchange":
        x = [[0, *values[:-2], 0] for values in x]
    moves, adjoint_moves = forward(name, ranks), backward(name, ranks, replicated, row.replicated_input)
    method, adjoint = row.method(name), "" if replicated else row.adjoint
    return Run(
        name,
        grad,
        ranks,
        Pass(("x", "y"), x, _execute(comms, method, moves, x, after), moves, method),
        Pass(("g", "x.grad"), g, _execute(comms, adjoint, adjoint_moves, g, before), adjoint_moves, adjoint),
    )


def _numbered(counts: list[int], replicated: bool) -> Values:
    """Return 10 r + 1, 10 r + 2, .. for rank r, or 1, 2, .. for every rank if replicated."""
    return [[10 * rank * (not replicated) + i + 1 for i in range(count)] for rank, count in enumerate(counts)]


def _execute(comms: list[Communicator], method: str, moves: list[Move], inputs: Values, counts: list[int]) -> Values:
    """Run the communication and return the values of all ranks afterwards. Unwritten elements stay 0."""
    import torch

    sends = [torch.tensor(values, dtype=torch.int64) for values in inputs]
    recvs = [torch.zeros(count, dtype=torch.int64) for count in counts]
    if method:
        _call(comms, method, sends, recvs)
    else:
        _messages(comms, moves, sends, recvs)
    return [recv.tolist() for recv in recvs]


def _call(comms: list[Communicator], method: str, sends: list[Any], recvs: list[Any]) -> None:
    """Call the collective on all ranks, as a user would."""
    keywords = {"root": 0} if method in ("reduce", "broadcast", "scatter", "gather") else {}
    with group():
        for comm, send, recv in zip(comms, sends, recvs, strict=True):
            x = None if comm.rank and method == "scatter" else send
            y = None if comm.rank and method == "gather" else recv
            getattr(comm, method)(x, y, **keywords)


def _messages(comms: list[Communicator], moves: list[Move], sends: list[Any], recvs: list[Any]) -> None:
    """Send each element that leaves its rank as a message, and add the received elements to recvs."""
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
