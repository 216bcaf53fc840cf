"""torch's own group over gloo beside the ranks of the pool, and numbers whose sums are exact."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from pynccl import Communicator


@contextlib.contextmanager
def gloo(comm: Communicator, path: str) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(path, comm.size), rank=comm.rank, world_size=comm.size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.Generator().manual_seed(100 + rank)
    return torch.randint(-8, 9, shape, generator=made).to(dtype)
