"""permute, send_recv: point-to-point communication along directed edges. Notation: see ops/__init__.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

import pynccl
from pynccl import Communicator
from pynccl.bindings.values import listed, shown

from ..arguments import check_call, check_comm, check_rank
from ..collective import Collective, CollectiveCall, operation
from ..wire import Prepared, contiguous_copy, is_addable, recv_buffer_like, recv_from, send_to, sum_tensors, to_wire


@operation
def permute(x: Tensor, comm: Communicator, edges: Iterable[tuple[int, int]]) -> Any:
    """Send x along directed edges between ranks, and sum what arrives.

    forward    x [..] -> y [..]     y_r = sum of x_q over the edges (q, r); 0 on a rank that no edge leads to
    backward   g [..] -> [..]       the same with all edges reversed

    x      a tensor of the same shape and dtype on all ranks
    comm   communicator of the ranks that take part
    edges  pairs (source, target), the same on all ranks; a source may have several targets, a target several sources.
           An edge listed twice counts twice

    There is no grad=: the ranks' outputs differ, so the backward pass is always the exact adjoint (as grad="sum").

    ValueError or TypeError for wrong arguments, before anything is launched. Every rank must call it and run its
    backward pass. Notation: help(ad.ops).
    """
    check_call("permute", x, comm)
    pairs = check_edges(comm, edges)
    check_target_sums(x, pairs)
    targets = tuple(target for source, target in pairs if source == comm.rank)
    sources = tuple(source for source, target in pairs if target == comm.rank)
    return comm, CollectiveCall(Permute, x, (targets, sources))


@operation
def send_recv(x: Tensor, comm: Communicator, target: int | None = None, source: int | None = None) -> Any:
    """Send x to rank `target`, and return what rank `source` sends.

    forward    x [..] -> y [..]     y = x_source; 0 if `source` is None
    backward   g [..] -> [..]       g_target; 0 if `target` is None

    x       the tensor to send; what is received must have the same shape and dtype
    comm    communicator of the ranks that take part
    target  rank to send to; None: send nothing
    source  rank to receive from; None: receive nothing

    There is no grad=: the ranks' outputs differ, so the backward pass is always the exact adjoint (as grad="sum").

    Only the ranks that communicate call it, and each passes its own peers. The same ranks must run the backward pass.
    ValueError or TypeError for wrong arguments, before anything is launched. Notation: help(ad.ops).
    """
    check_call("send_recv", x, comm)
    targets = () if target is None else (check_rank("send_recv", comm, target, "target"),)
    sources = () if source is None else (check_rank("send_recv", comm, source, "source"),)
    return comm, CollectiveCall(Permute, x, (targets, sources))


class Permute(Collective):
    """Send x to `targets` and sum what the `sources` send. The Function behind `permute` and `send_recv`.

    forward    x [..] -> y [..]     y = sum of x_q over the sources q; 0 without a source
    backward   g [..] -> [..]       the edges reversed: sum of g_q over the targets q; 0 without a target
    """

    name = "permute"
    schema = "int[] targets, int[] sources"

    @staticmethod
    def adjoint(
        g: Tensor, comm: Communicator, shape: torch.Size, targets: Sequence[int], sources: Sequence[int]
    ) -> CollectiveCall:
        return CollectiveCall(Permute, g, (sources, targets))

    @staticmethod
    def prepare(x: Tensor, comm: Communicator, targets: Sequence[int], sources: Sequence[int]) -> Prepared:
        send = to_wire(x)
        received = [(source, recv_buffer_like(x, send)) for source in sources if source != comm.rank]
        loops = list(sources).count(comm.rank)  # edges from this rank to itself

        def launch(stream: Any) -> None:
            with pynccl.group():
                for target in targets:
                    if target != comm.rank:
                        send_to(comm, send, target, stream)
                for source, (recv, _) in received:
                    recv_from(comm, recv, source, stream)

        def result() -> Tensor:
            parts = [finish() for _, (_, finish) in received] + [contiguous_copy(x) for _ in range(loops)]
            return sum_tensors(parts) if parts else x.new_zeros(x.shape)

        return Prepared(launch, result)

    @staticmethod
    def on_one_rank(x: Tensor, targets: Sequence[int], sources: Sequence[int]) -> Tensor:
        return x * len(sources) if len(sources) > 1 else x.clone() if sources else torch.zeros_like(x)


def check_edges(comm: Communicator, edges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the edges as pairs of ints."""
    check_comm("permute", comm)
    pairs = []
    for edge in listed(edges, "permute: edges", "pairs (source, target)"):
        try:
            source, target = edge
        except Exception:  # raised by torch, or by a user's object
            raise ValueError(f"permute: edge is {shown(edge)}, expected a pair (source, target)") from None
        pairs.append(
            (
                check_rank("permute", comm, source, f"the source of edge {edge}"),
                check_rank("permute", comm, target, f"the target of edge {edge}"),
            )
        )
    return tuple(pairs)


def check_target_sums(x: Tensor, edges: Iterable[tuple[int, int]]) -> None:
    """Check that tensors like x can be summed if a rank is the target of several edges."""
    targets = [target for _, target in edges]
    if len(set(targets)) < len(targets) and not is_addable(x.dtype):
        raise TypeError(
            f"permute: {x.dtype} cannot be summed, and a rank is the target of several edges; pass x.to(torch.int32), "
            "or call permute several times with one edge per target"
        )
