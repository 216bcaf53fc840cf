"""What is asked of torch's DTensors, as which FSDP2 keeps the parameters and gradients that it has cut.

A tensor of another type is its own part, and whole; so the layers' functions ask without a difference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_dtensor(x: Any) -> bool:
    """By its name: the type need not be loaded."""
    return any(base.__name__ == "DTensor" for base in type(x).__mro__)


@torch.no_grad()
def local_part(x: Any) -> Any:
    """What this rank has of it, in the same memory; None of None."""
    return x.to_local() if is_dtensor(x) else x


@torch.no_grad()
def full_tensor(x: Tensor) -> Tensor:
    """All of it. A collective of the ranks of its DeviceMesh, if it is a DTensor."""
    whole: Tensor = x.full_tensor() if is_dtensor(x) else x  # type: ignore[attr-defined]
    return whole


@torch.no_grad()
def cut_like(x: Tensor, like: Any) -> Tensor:
    """Of a tensor that is equal on all ranks of the mesh of `like`: what is cut as that is. No communication."""
    if not is_dtensor(like):
        return x
    from torch.distributed.tensor import distribute_tensor

    x = x.to(like.device, like.dtype)
    made: Tensor = distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None)
    return made


def groups_that_cut(x: Any) -> tuple[Any, ...]:
    """torch's process groups whose ranks have parts of it. NotImplementedError for sums that are not finished."""
    if not is_dtensor(x):
        return ()
    if any(placement.is_partial() for placement in x.placements):
        raise NotImplementedError(f"a DTensor with placements {x.placements}: finish its sum by redistribute() first")
    dims = [dim for dim, placement in enumerate(x.placements) if not placement.is_replicate()]
    return tuple(x.device_mesh.get_group(dim) for dim in dims)
