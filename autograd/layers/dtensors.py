"""Helpers for torch's DTensors, in which FSDP2 keeps the parameters and gradients that it shards.

They accept other tensors too: such a tensor is both the local and the full one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_dtensor(x: Any) -> bool:
    """Return whether x is a DTensor. It compares names, to avoid importing torch.distributed.tensor."""
    return any(base.__name__ == "DTensor" for base in type(x).__mro__)


@torch.no_grad()
def local_tensor(x: Any) -> Any:
    """Return this rank's shard, which shares memory with x; None for None."""
    return x.to_local() if is_dtensor(x) else x


@torch.no_grad()
def full_tensor(x: Tensor) -> Tensor:
    """Return the full tensor. For a DTensor, a collective of the ranks of its DeviceMesh."""
    full: Tensor = x.full_tensor() if is_dtensor(x) else x  # type: ignore[attr-defined]
    return full


@torch.no_grad()
def distribute_like(x: Tensor, like: Any) -> Tensor:
    """Distribute x as the DTensor `like`. x must be equal on all ranks of its mesh; it does not communicate."""
    if not is_dtensor(like):
        return x
    from torch.distributed.tensor import distribute_tensor

    x = x.to(like.device, like.dtype)
    made: Tensor = distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None)
    return made


def from_local_like(local: Tensor, like: Any) -> Tensor:
    """Return this rank's shard as a DTensor that is sharded as `like`; it does not communicate."""
    if not is_dtensor(like):
        return local
    mesh, placements = like.device_mesh, like.placements
    made: Tensor = type(like).from_local(
        local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return made


def sharding_groups(x: Any) -> tuple[Any, ...]:
    """Return the process groups of torch over which x is sharded. NotImplementedError for partial placements."""
    if not is_dtensor(x):
        return ()
    if any(placement.is_partial() for placement in x.placements):
        raise NotImplementedError(f"a DTensor has partial placements {x.placements}; call redistribute() on it first")
    dims = [dim for dim, placement in enumerate(x.placements) if not placement.is_replicate()]
    return tuple(x.device_mesh.get_group(dim) for dim in dims)
