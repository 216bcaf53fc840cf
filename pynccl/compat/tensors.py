"""Tensors as vLLM's programs pass them: what of their memory an operation moves, or a clear error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..bindings.values import integers


def flat(operation: str, role: str, tensor: Any) -> Any:
    """The memory of a tensor whose elements fill it without gaps, in whatever order of dimensions.

    Operations element by element do not care for that order, if it is the same on all ranks."""
    tensor = _memory_of(operation, role, tensor)
    if tensor.is_contiguous():
        return tensor
    whole = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim)))
    if not whole.is_contiguous():
        raise ValueError(_gaps(operation, role, tensor))
    return whole


def contiguous(operation: str, role: str, tensor: Any) -> Any:
    """The same for operations that cut dimension 0, which must come first in memory too."""
    tensor = _memory_of(operation, role, tensor)
    if not tensor.is_contiguous():
        raise ValueError(_gaps(operation, role, tensor))
    return tensor


def _memory_of(operation: str, role: str, tensor: Any) -> Any:
    """The same memory, without a graph: parameters are sent and received as they are, in vLLM's weight transfer, too,
    under grad mode."""
    if not hasattr(tensor, "is_contiguous"):
        raise TypeError(f"{operation}: {role} is {tensor!r}, expected a torch tensor")
    return tensor.detach() if getattr(tensor, "requires_grad", False) else tensor


def _gaps(operation: str, role: str, tensor: Any) -> str:
    return (
        f"{operation}: {role} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous, and NCCL "
        "would move other memory than its own; pass x.contiguous()"
    )


def empty_like(operation: str, tensor: Any) -> Any:
    """Memory for a result, laid out as `tensor` is."""
    _memory_of(operation, "in_tensor", tensor)
    import torch

    return torch.empty_like(tensor, requires_grad=False)


def elements(tensor: Any, count: int) -> Any:
    """The first `count` elements of one that may have more."""
    return tensor.reshape(-1)[:count] if tensor.numel() > count else tensor


def row_counts(operation: str, sizes: Sequence[int], tensor: Any, ranks: int) -> list[int]:
    """Elements per rank for sizes in rows, of which `tensor` has some."""
    counts = integers(sizes, f"{operation}: sizes", "a number of rows per rank")
    if len(counts) != ranks:
        raise ValueError(f"{operation}: sizes has {len(counts)} entries, expected one per rank, {ranks}")
    if tensor.dim() == 0:
        raise ValueError(f"{operation}: a tensor of no dimensions has no rows; pass x.reshape(1)")
    return [count * math.prod(tensor.shape[1:]) for count in counts]


def rows(operation: str, sizes: Sequence[int], tensor: Any, ranks: int, exact: bool = False) -> list[int]:
    """The same for a tensor that has to have all of those rows (exact: and no more)."""
    counts = row_counts(operation, sizes, tensor, ranks)
    given, needed = tensor.shape[0], sum(sizes)
    if given < needed or (exact and given > needed):
        raise ValueError(
            f"{operation}: sizes {list(sizes)} are {needed} rows, but the tensor has shape {tuple(tensor.shape)}"
        )
    return counts


def as_bytes(tensor: Any) -> Any:
    """fp8 as bytes: what is sent is moved, whatever it means, and not every kind of fp8 has a type in NCCL."""
    if not str(tensor.dtype).startswith("torch.float8"):
        return tensor
    import torch

    return tensor.view(torch.uint8)
