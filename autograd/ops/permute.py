"""permute, send_recv: tensors travel along directed edges between ranks. Notation: see ops/__init__.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

import pynccl
from pynccl import Communicator
from pynccl.bindings.values import listed, shown

from ..arguments import check_call, check_comm, check_rank
from ..collective import Call, Collective, operation
from ..wire import Prepared, added, is_addable, own, recv_buffer_like, recv_from, send_to, to_wire


@operation
def permute(x: Tensor, comm: Communicator, edges: Iterable[tuple[int, int]]) -> Any:
    """y_r = sum of x_q over the edges (q, r), zeros without one.  [..] -> [..], the same on all ranks.  See `Permute`.

    edges  pairs (source, target), the same on all ranks; a source may have several targets and a target several sources
    """
    check_call("permute", x, comm)
    pairs = check_edges(comm, edges)
    check_meetings(x, pairs)
    targets = tuple(target for source, target in pairs if source == comm.rank)
    sources = tuple(source for source, target in pairs if target == comm.rank)
    return comm, Call(Permute, x, (targets, sources))


@operation
def send_recv(x: Tensor, comm: Communicator, target: int | None = None, source: int | None = None) -> Any:
    """x goes to rank `target`; y is what rank `source` sends, zeros if None.  [..] -> [..].  See `Permute`.

    Only the ranks that are named need to call it, each naming its own partners; backwards the same."""
    check_call("send_recv", x, comm)
    targets = () if target is None else (check_rank("send_recv", comm, target, "target"),)
    sources = () if source is None else (check_rank("send_recv", comm, source, "source"),)
    return comm, Call(Permute, x, (targets, sources))


class Permute(Collective):
    """Tensors travel along directed edges between ranks; this rank's are given by its targets and its sources.

    forward    x [..] -> y [..]     y = sum of x_q over the sources q; 0 without a source
    backward   g [..] -> [..]       the edges reversed: sum of g_q over the targets q; 0 without a target
    """

    name = "permute"
    schema = "int[] targets, int[] sources"

    @staticmethod
    def adjoint(
        g: Tensor, comm: Communicator, shape: torch.Size, targets: Sequence[int], sources: Sequence[int]
    ) -> Call:
        return Call(Permute, g, (sources, targets))

    @staticmethod
    def prepare(x: Tensor, comm: Communicator, targets: Sequence[int], sources: Sequence[int]) -> Prepared:
        send = to_wire(x)
        received = [(source, recv_buffer_like(x, send)) for source in sources if source != comm.rank]
        loops = list(sources).count(comm.rank)  # a rank's own edges stay there

        def launch(stream: Any) -> None:
            with pynccl.group():
                for target in targets:
                    if target != comm.rank:
                        send_to(comm, send, target, stream)
                for source, (recv, _) in received:
                    recv_from(comm, recv, source, stream)

        def result() -> Tensor:
            parts = [one() for _, (_, one) in received] + [own(x) for _ in range(loops)]
            return added(parts) if parts else x.new_zeros(x.shape)

        return Prepared(launch, result)

    @staticmethod
    def alone(x: Tensor, targets: Sequence[int], sources: Sequence[int]) -> Tensor:
        return x * len(sources) if len(sources) > 1 else x.clone() if sources else torch.zeros_like(x)


def check_edges(comm: Communicator, edges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The edges as pairs of ints."""
    check_comm("permute", comm)
    if isinstance(edges, (str, bytes, dict)) or not isinstance(edges, Iterable):
        raise TypeError(f"permute: edges is {shown(edges)}, expected pairs (source, target)")
    pairs = []
    for edge in listed(edges, "permute: edges", "pairs (source, target)"):
        try:
            source, target = edge
        except (TypeError, ValueError):
            raise ValueError(f"permute: edge {shown(edge)} is none, expected a pair (source, target)") from None
        pairs.append(
            (
                check_rank("permute", comm, source, f"the source of edge {edge}"),
                check_rank("permute", comm, target, f"the target of edge {edge}"),
            )
        )
    return tuple(pairs)


def check_meetings(x: Tensor, edges: Iterable[tuple[int, int]]) -> None:
    """That tensors like x can be added, where some rank is the target of more than one edge."""
    targets = [target for _, target in edges]
    if len(set(targets)) < len(targets) and not is_addable(x.dtype):
        raise TypeError(
            f"permute: {x.dtype} has no sum, and a rank is the target of several edges; pass x.to(torch.int32), or "
            "several permutes of one edge per target"
        )
