"""Checks of the arguments of differentiable collectives, before anything is launched.

What is wrong here is wrong in the same way on all ranks that run the same program, so all of them raise.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from pynccl import Communicator, RedOp
from pynccl.bindings.values import attribute, listed, shown

from .inputs import check_comm
from .wire import is_addable

Grad = Literal["sum", "replicated"]
Splits = Sequence[int] | None
Halo = int | tuple[int, int] | Sequence[tuple[int, int]]
SUM_OPS = ("sum", "avg")


def check_op(operation: str, op: Any, allowed: tuple[str, ...] = SUM_OPS) -> Any:
    """The name of the operator."""
    if type(op) is str and op in allowed:
        return op
    name = op.name.lower() if isinstance(op, RedOp) else op
    if not isinstance(name, str) or name not in allowed:
        scaled = attribute(op, "code") is not None and "max" in allowed
        premul = "; of a pre-multiplied sum, ad.PreMul(scale)" if scaled else ""
        raise ValueError(f"{operation}: op is {shown(op)}, expected {_any_of(allowed)}{premul}")
    return name


def check_grad(operation: str, grad: object) -> None:
    if not isinstance(grad, str) or grad not in ("sum", "replicated"):
        raise ValueError(
            f"{operation}: grad is {shown(grad)}, expected 'sum' (the loss is the sum of the ranks' losses) or "
            "'replicated' (every rank computes the same loss from the output)"
        )


def as_int(value: Any) -> Any:
    """`value` as an int, if it is an integer of any library; else None. Symbolic sizes stay what they are."""
    if type(value) is int or isinstance(value, torch.SymInt):
        return value
    if isinstance(value, bool) or attribute(value, "dtype") is torch.bool:
        return None
    try:
        return operator.index(value)
    except Exception:  # also what an object of the user's raises
        return None


def check_dim(operation: str, x: Tensor, dim: Any, name: str = "dim") -> int:
    """`dim` as a number >= 0."""
    found = as_int(dim)
    if found is None:
        raise TypeError(f"{operation}: {name} is {shown(dim)}, expected a dimension of x, an integer")
    if not -x.dim() <= found < x.dim():
        raise ValueError(f"{operation}: {name} is {dim}, but the tensor has shape {tuple(x.shape)}")
    return int(found % x.dim())


def check_rank(operation: str, comm: Communicator, rank: Any, name: str = "root") -> int:
    """`rank` as an int."""
    check_comm(operation, comm)
    found = as_int(rank)
    if found is None or not 0 <= found < comm.size:
        raise ValueError(f"{operation}: {name} is {shown(rank)}, expected a rank in 0..{comm.size - 1}")
    return int(found)


def check_divisible(operation: str, x: Tensor, dim: int, comm: Communicator, remedy: str = "pass splits=") -> None:
    if x.shape[dim] % comm.size:
        raise ValueError(
            f"{operation}: dimension {dim} of {tuple(x.shape)} has {x.shape[dim]} rows, not divisible by {comm.size} "
            f"ranks; pad it or {remedy}"
        )


def check_splits(operation: str, splits: Splits, comm: Communicator, name: str = "splits") -> tuple[int, ...] | None:
    """`splits` as a tuple: one size per rank, none below 0."""
    if splits is None:
        return None
    given: Any = splits
    if attribute(given, "tolist") is not None:  # a tensor, a NumPy array
        given = given.tolist()
    if isinstance(given, (str, bytes, dict)) or not isinstance(given, Iterable):
        raise TypeError(f"{operation}: {name} is {shown(splits)}, expected one size, an integer, for each rank")
    given = tuple(given)
    sizes = tuple(as_int(size) for size in given)
    if None in sizes:
        raise TypeError(f"{operation}: {name} is {given}, expected integers, one for each rank")
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


def check_exchange(
    x: Tensor, comm: Communicator, split_dim: int, concat_dim: int, send_splits: Splits, recv_splits: Splits
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """(send_splits, recv_splits) of an all-to-all; along one dimension both are given, or none."""
    sends = check_splits("all_to_all", send_splits, comm, "send_splits")
    recvs = check_splits("all_to_all", recv_splits, comm, "recv_splits")
    if sends is None:
        check_divisible("all_to_all", x, split_dim, comm, "pass send_splits=")
        if recvs is None:
            return None, None
        sends = (x.shape[split_dim] // comm.size,) * comm.size
    check_total("all_to_all", x, split_dim, sends, "send_splits")
    if split_dim != concat_dim:
        recvs = (x.shape[concat_dim],) * comm.size if recvs is None else recvs
        check_own("all_to_all", x, concat_dim, recvs, comm, "recv_splits")
    return sends, recvs


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


def check_halo(
    x: Tensor, dim: int, halo: Halo, comm: Communicator
) -> tuple[int, int] | tuple[int, int, tuple[int, int]]:
    """This rank's (left, right), and where they may differ by rank, what the neighbours have next to it."""
    halos, one = _halos(halo, comm)
    left, right = halos[comm.rank]
    to_left = halos[comm.rank - 1][1] if comm.rank else 0
    to_right = halos[comm.rank + 1][0] if comm.rank + 1 < comm.size else 0
    needed = max(left, right) if one else max(to_left, to_right)
    interior = x.shape[dim] - left - right
    if min(min(pair) for pair in halos) < 0 or interior < needed:
        raise ValueError(
            f"halo_exchange: halo is {halo} and dimension {dim} of {tuple(x.shape)} on rank {comm.rank} has "
            f"{x.shape[dim]} rows, of which {interior} are the interior; expected widths >= 0, and an interior of at "
            f"least {needed}, as wide as the halos next to it, so that a halo comes from one neighbour"
        )
    return (left, right) if one else (left, right, (to_left, to_right))


def _halos(halo: Any, comm: Communicator) -> tuple[list[tuple[int, int]], bool]:
    """(left, right) of every rank, and whether that was given once for all."""
    given = halo.tolist() if attribute(halo, "tolist") is not None else halo
    both = as_int(given)
    one = (both, both) if both is not None else _pair(given)
    if one is not None:
        return [one] * comm.size, True
    pairs = [_pair(pair) for pair in given] if isinstance(given, (list, tuple)) else [None]
    if None in pairs:
        raise TypeError(
            f"halo_exchange: halo is {shown(halo)}, expected a width, or a pair (left, right) of them, or a list of "
            "such pairs, one for each rank"
        )
    if len(pairs) != comm.size:
        raise ValueError(f"halo_exchange: halo is {halo}, expected a pair (left, right) for each of {comm.size} ranks")
    return [pair for pair in pairs if pair is not None], False


def _pair(given: Any) -> tuple[int, int] | None:
    sizes = tuple(map(as_int, given)) if isinstance(given, Iterable) else ()
    if len(sizes) != 2 or sizes[0] is None or sizes[1] is None:
        return None
    return sizes[0], sizes[1]


def is_tracing() -> bool:
    """Whether tensors have no values now: torch.compile, fake tensors, make_fx."""
    if torch.compiler.is_compiling():
        return True
    if not torch._C._len_torch_dispatch_stack():
        return False
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.FAKE, keys.PROXY))


def _any_of(names: Sequence[str]) -> str:
    *most, last = [repr(name) for name in names]
    return f"{', '.join(most)} or {last}"
