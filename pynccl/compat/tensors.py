"""Tensors as vLLM's programs pass them: which of their memory an operation moves, or an error before anything moves.

Parameters are moved as they are, also under grad mode: a trainer hands its weights over.
"""

from __future__ import annotations

from typing import Any


def dense(what: str, tensor: Any) -> Any:
    """The tensor with its dimensions in the order of memory, which elementwise operations do not care for, if it is
    the same on all ranks (channels_last); ValueError for one with gaps."""
    if not hasattr(tensor, "is_contiguous"):
        raise TypeError(f"{what} is {tensor!r}, expected a torch tensor")
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor
    return contiguous(what, tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))))


def contiguous(what: str, tensor: Any) -> Any:
    """The tensor, for operations that cut dimension 0; ValueError if it is not contiguous."""
    if not hasattr(tensor, "is_contiguous"):
        raise TypeError(f"{what} is {tensor!r}, expected a torch tensor")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{what} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous, and NCCL "
            "would move other memory than its own; pass x.contiguous()"
        )
    return tensor.detach()


def first(tensor: Any, count: int) -> Any:
    """The first `count` elements of a tensor that may have more."""
    return tensor.reshape(-1)[:count] if tensor.numel() > count else tensor


def as_bytes(tensor: Any) -> Any:
    """fp8 as bytes: what is sent is moved, whatever it means, and not every kind of fp8 has a type in NCCL."""
    if not str(tensor.dtype).startswith("torch.float8"):
        return tensor
    import torch

    return tensor.view(torch.uint8)
