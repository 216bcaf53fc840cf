"""Process groups of torch.distributed for the ranks of a pool, and integer-valued tensors whose sums are exact."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pynccl import Communicator


@contextlib.contextmanager
def gloo_group(comm: Communicator, path: str) -> Iterator[None]:
    """Context manager with a default gloo group of the same ranks as comm."""
    with process_group("gloo", comm, path):
        yield


@contextlib.contextmanager
def process_group(backend: str, place: Any, path: str, timeout: float = 60.0) -> Iterator[None]:
    """Context manager with a default process group; `place` has rank and size."""
    import pynccl.torch_backend  # noqa: F401

    store, limit = dist.FileStore(path, place.size), timedelta(seconds=timeout)
    dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=limit)
    try:
        yield
    finally:
        dist.destroy_process_group()


def numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.Generator().manual_seed(100 + rank)
    return torch.randint(-8, 9, shape, generator=made).to(dtype)
