"""init_process_group("pynccl"): torch.distributed code runs over this library, unchanged.

    import pynccl.torch_backend
    import torch.distributed as dist

    dist.init_process_group("pynccl")

The import registers the backend for cpu and cuda; from torch 2.14 on it is found without. CPU tensors go through the
host library, CUDA tensors through libnccl. DDP, FSDP2, DTensor, distributed checkpoints and functional collectives use
it as they use gloo or NCCL. What each call does, and what is different: docs/torch_backend.md.
"""

from __future__ import annotations

from typing import Any

from ..bootstrap import stores
from ..bootstrap.env import agent_serves
from ..comm.communicator import Communicator
from ..watch.recorder import recorder
from . import c10d
from .backend import PyncclBackend

__all__ = ["PyncclBackend", "register"]


def _make(opts: Any, backend_options: Any = None) -> PyncclBackend:
    """What torch.distributed calls for each new group, on each of its ranks."""
    ranks, rank = opts.global_ranks_in_group, opts.group_rank  # no ranks: all of them
    name = f"group {opts.group_id}" if ranks else "world"
    if not ranks and (own := recorder()) is not None and own.head.rank < 0:
        own.head.rank = rank  # by which messages call this process, where no RANK says it
    serves = (ranks[rank] if ranks else rank) == 0 and not agent_serves()
    return PyncclBackend(opts.store, rank, opts.group_size, opts.timeout, name, serves)


def register() -> None:
    """Make "pynccl" known to torch.distributed; the import does it."""
    c10d.register(_make)


def _own_communicator(group: Any) -> Communicator | None:
    """That of a process group of this backend."""
    backend = c10d.backend_of(group, "cpu")
    return backend.communicator() if isinstance(backend, PyncclBackend) else None


register()
stores.own_communicators.append(_own_communicator)
