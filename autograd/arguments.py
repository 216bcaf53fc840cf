"""Checks of the arguments of differentiable collectives, before anything is launched.

What is wrong here is wrong in the same way on all ranks that run the same program, so all of them raise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from torch import Tensor

from pynccl import Communicator

Grad = Literal["sum", "replicated"]
SUM_OPS = ("sum", "avg")


def check_op(operation: str, op: object, allowed: tuple[str, ...] = SUM_OPS) -> None:
    if op not in allowed:
        raise ValueError(f"{operation}: op is {op!r}, expected {_any_of(allowed)}")


def check_grad(operation: str, grad: object) -> None:
    if grad not in ("sum", "replicated"):
        raise ValueError(
            f"{operation}: grad is {grad!r}, expected 'sum' (the loss is the sum of the ranks' losses) or 'replicated' "
            "(every rank computes the same loss from the output)"
        )


def check_dim(operation: str, x: Tensor, dim: int, name: str = "dim") -> int:
    """`dim` as a number >= 0."""
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{operation}: {name} is {dim}, but the tensor has shape {tuple(x.shape)}")
    return dim % x.dim()


def check_rank(operation: str, comm: Communicator, rank: object, name: str = "root") -> None:
    if not isinstance(rank, int) or not 0 <= rank < comm.size:
        raise ValueError(f"{operation}: {name} is {rank!r}, expected a rank in 0..{comm.size - 1}")


def check_divisible(operation: str, x: Tensor, dim: int, comm: Communicator, remedy: str = "pass splits=") -> None:
    if x.shape[dim] % comm.size:
        raise ValueError(
            f"{operation}: dimension {dim} of {tuple(x.shape)} has {x.shape[dim]} rows, not divisible by {comm.size} "
            f"ranks; pad it or {remedy}"
        )


def check_splits(
    operation: str, splits: Sequence[int] | None, comm: Communicator, name: str = "splits"
) -> tuple[int, ...] | None:
    """`splits` as a tuple: one size per rank, none below 0."""
    if splits is None:
        return None
    sizes = tuple(splits)
    if len(sizes) != comm.size:
        raise ValueError(f"{operation}: {name} is {sizes}, expected one size for each of {comm.size} ranks")
    if any(size < 0 for size in sizes):
        raise ValueError(f"{operation}: {name} is {sizes}, expected sizes >= 0")
    return sizes


def check_total(operation: str, x: Tensor, dim: int, splits: Sequence[int], name: str = "splits") -> None:
    """That x is as long along dim as the splits together."""
    if x.shape[dim] != sum(splits):
        raise ValueError(
            f"{operation}: dimension {dim} of {tuple(x.shape)} has {x.shape[dim]} rows, but {name} {tuple(splits)} add "
            f"up to {sum(splits)}"
        )


def check_own(operation: str, x: Tensor, dim: int, splits: Sequence[int], comm: Communicator, name: str) -> None:
    """That x is as long along dim as this rank's split."""
    if x.shape[dim] != splits[comm.rank]:
        raise ValueError(
            f"{operation}: dimension {dim} of {tuple(x.shape)} has {x.shape[dim]} rows, but {name} {tuple(splits)} "
            f"give rank {comm.rank} {splits[comm.rank]}"
        )


def check_edges(comm: Communicator, edges: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(targets of this rank, sources of this rank)."""
    targets, sources = [], []
    for edge in edges:
        try:
            source, target = edge
        except (TypeError, ValueError):
            raise ValueError(f"permute: edge {edge!r} is none, expected a pair (source, target)") from None
        check_rank("permute", comm, source, f"the source of edge {edge}")
        check_rank("permute", comm, target, f"the target of edge {edge}")
        if source == comm.rank:
            targets.append(target)
        if target == comm.rank:
            sources.append(source)
    return tuple(targets), tuple(sources)


def check_halo(x: Tensor, dim: int, halo: int | tuple[int, int]) -> tuple[int, int]:
    """(left, right)."""
    left, right = (halo, halo) if isinstance(halo, int) else halo
    interior = x.shape[dim] - left - right
    if left < 0 or right < 0 or interior < max(left, right):
        raise ValueError(
            f"halo_exchange: halo is {halo} and dimension {dim} of {tuple(x.shape)} has {x.shape[dim]} rows, of which "
            f"{interior} are the interior; the interior must be at least as wide as the halo, so that a halo comes "
            "from one neighbour"
        )
    return left, right


def _any_of(names: Sequence[str]) -> str:
    *most, last = [repr(name) for name in names]
    return f"{', '.join(most)} or {last}"
