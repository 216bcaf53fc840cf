"""The calls of each way: what `Communicator` is asked for on every rank of this process, in one group.

A call is written as a user writes it; `send` and `recv` are tensors, and recv is zeros before, which is what
pynccl_autograd gives where a collective writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...comm.communicator import Communicator
from ...comm.groups import group
from .moves import HALO, WAYS, Setup

Edges = list[tuple[int, int]]


def call(comms: list[Communicator], way: str, op: str, setup: Setup, sends: list[Any]) -> list[Any]:
    """What each rank has after one collective, or one group of sends and receives."""
    recvs = [send.new_zeros(sum(own)) for send, own in zip(sends, WAYS[way].after(setup), strict=True)]
    borders = []
    with group():
        for comm, send, recv in zip(comms, sends, recvs, strict=True):
            if way == "halo_reduce":
                borders += _send_halos_back(comm, send, recv)
            else:
                _CALLS[way](comm, send, recv, setup, op)
    for border, part in borders:
        border += part
    return recvs


def premul(rank: int) -> float:
    """By what the elements of a rank are multiplied in the example of a pre-multiplied sum."""
    return float(rank + 1)


def _all_reduce(comm: Communicator, send: Any, recv: Any, setup: Setup, op: Any) -> None:
    if op == "premul":
        with comm.pre_mul_sum(premul(comm.rank), send.dtype) as scaled:
            comm.all_reduce(send, recv, scaled)
    else:
        comm.all_reduce(send, recv, op)


def _reduce(comm: Communicator, send: Any, recv: Any, setup: Setup, op: Any) -> None:
    comm.reduce(send, recv, op, setup.root)


def _broadcast(comm: Communicator, send: Any, recv: Any, setup: Setup, op: Any) -> None:
    comm.broadcast(send, recv, setup.root)


def _reduce_scatter(comm: Communicator, send: Any, recv: Any, setup: Setup, op: Any) -> None:
    if setup.by_counts:
        comm.reduce_scatter_v(send, recv, op, counts=setup.counts)
    else:
        comm.reduce_scatter(send, recv, op)


def _all_gather(comm: Communicator, send: Any, recv: Any, setup: Setup, op: Any) -> None:
    if setup.by_counts:
        comm.all_gather_v(send, recv, counts=setup.counts)
    else:
        comm.all_gather(send, recv)


def _scatter(comm: Communicator, send: Any, recv: Any, setup: Setup, op: Any) -> None:
    given = send if comm.rank == setup.root else None
    if setup.by_counts:
        comm.scatter_v(given, recv, setup.root, counts=setup.counts)
    else:
        comm.scatter(given, recv, setup.root)


def _gather(comm: Communicator, send: Any, recv: Any, setup: Setup, op: Any) -> None:
    given = recv if comm.rank == setup.root else None
    if setup.by_counts:
        comm.gather_v(send, given, setup.root, counts=setup.counts)
    else:
        comm.gather(send, given, setup.root)


def _all_to_all(comm: Communicator, send: Any, recv: Any, setup: Setup, op: Any) -> None:
    if setup.by_counts:
        to = [setup.sent(comm.rank, peer) for peer in range(setup.ranks)]
        comes = [setup.sent(peer, comm.rank) for peer in range(setup.ranks)]
        comm.all_to_all_v(send, recv, send_counts=to, recv_counts=comes)
    else:
        comm.all_to_all(send, recv)


def _all_to_all_back(comm: Communicator, send: Any, recv: Any, setup: Setup, op: Any) -> None:
    if setup.by_counts:
        to = [setup.sent(peer, comm.rank) for peer in range(setup.ranks)]
        comes = [setup.sent(comm.rank, peer) for peer in range(setup.ranks)]
        comm.all_to_all_v(send, recv, send_counts=to, recv_counts=comes)
    else:
        comm.all_to_all(send, recv)


def _messages(comm: Communicator, send: Any, recv: Any, edges: Edges) -> None:
    for source, target in edges:
        if source == comm.rank:
            comm.send(send, target)
        if target == comm.rank:
            comm.recv(recv, source)


def _back(edges: Edges) -> Edges:
    return [(target, source) for source, target in edges]


def _halo_exchange(comm: Communicator, send: Any, recv: Any, setup: Setup, op: Any) -> None:
    recv.copy_(send)
    if comm.rank > 0:
        comm.send(send[HALO : 2 * HALO], comm.rank - 1)
        comm.recv(recv[:HALO], comm.rank - 1)
    if comm.rank < comm.size - 1:
        comm.send(send[-2 * HALO : -HALO], comm.rank + 1)
        comm.recv(recv[-HALO:], comm.rank + 1)


def _send_halos_back(comm: Communicator, send: Any, recv: Any) -> list[tuple[Any, Any]]:
    """(border, what is to be added to it once the group has run)."""
    recv.copy_(send)
    left = (comm.rank - 1, slice(0, HALO), slice(HALO, 2 * HALO))
    right = (comm.rank + 1, slice(-HALO, None), slice(-2 * HALO, -HALO))
    parts = []
    for peer, halo, border in (left, right):
        if 0 <= peer < comm.size:
            comm.send(send[halo], peer)
            recv[halo] = 0.0
            parts.append((recv[border], comm.recv(send.new_zeros(HALO), peer)))
    return parts


_CALLS: dict[str, Callable[[Communicator, Any, Any, Setup, Any], Any]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "scatter": _scatter,
    "gather": _gather,
    "all_to_all": _all_to_all,
    "all_to_all_back": _all_to_all_back,
    "permute": lambda comm, send, recv, setup, op: _messages(comm, send, recv, setup.edges),
    "permute_back": lambda comm, send, recv, setup, op: _messages(comm, send, recv, _back(setup.edges)),
    "send_recv": lambda comm, send, recv, setup, op: _messages(comm, send, recv, [setup.edge]),
    "send_recv_back": lambda comm, send, recv, setup, op: _messages(comm, send, recv, _back([setup.edge])),
    "halo_exchange": _halo_exchange,
}
