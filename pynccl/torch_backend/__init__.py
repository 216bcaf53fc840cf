"""init_process_group("pynccl"): run torch.distributed code over this library, unchanged.

    import pynccl.torch_backend
    import torch.distributed as dist

    dist.init_process_group("pynccl")

The import registers the backend for cpu and cuda; torch 2.14 and later find it without the import. CPU tensors use the
host library, CUDA tensors libnccl. DDP, FSDP2, DTensor, distributed checkpoints and functional collectives work as with
gloo or NCCL. For the details of each call and the differences see docs/torch_backend.md.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from ..bindings.library import host_module
from ..bindings.listing import public_dir
from ..bootstrap import stores
from ..bootstrap.env import agent_serves
from ..comm.communicator import Communicator
from ..watch.recorder import recorder
from . import c10d
from .backend import PyncclBackend

__all__ = ["PyncclBackend", "register"]

__dir__ = public_dir(globals())


def _make(opts: Any, backend_options: Any = None) -> PyncclBackend:
    """Create the backend of a new group; torch.distributed calls it on each rank of the group."""
    ranks, rank = opts.global_ranks_in_group, opts.group_rank  # empty: all ranks
    name = f"group {opts.group_id}" if ranks else "world"
    if not ranks and (flight_recorder := recorder()) is not None and flight_recorder.head.rank < 0:
        flight_recorder.head.rank = rank  # for messages: RANK is not set
    serves = (ranks[rank] if ranks else rank) == 0 and not agent_serves()
    default = _first_backend() if ranks else None
    try:
        made = PyncclBackend(opts.store, rank, opts.group_size, opts.timeout, name, ranks, serves, default)
        if ranks and default is None and len(ranks) == dist.get_world_size():
            made.stays_connected = True
            _first[:] = [(dist.group.WORLD, made)]
        return made
    except BaseException:
        if not ranks:  # the next init_process_group must have the same name on ranks that did not try this one
            c10d.name_groups_anew()
        raise


# If the default group has another backend: that group, and the first of its groups with all ranks.
_first: list[tuple[Any, PyncclBackend]] = []


def _first_backend() -> PyncclBackend | None:
    """Return the group that the ranks of a new group connect through; None: they meet."""
    if not dist.is_initialized():
        return None
    world = dist.group.WORLD
    if isinstance(found := c10d.backend_of(world, "cpu"), PyncclBackend):
        return found
    return next((made for default, made in _first if default is world), None)


def register() -> None:
    """Register the "pynccl" backend with torch.distributed. Importing this package does it."""
    c10d.register(_make)


def _own_communicator(group: Any) -> Communicator | None:
    """Return the communicator of a process group of this backend; None for other backends."""
    backend = c10d.backend_of(group, "cpu")
    return backend.communicator() if isinstance(backend, PyncclBackend) else None


if torch.version.cuda is None or os.environ.get("PYNCCL_LIBRARY") == "host":
    host_module()  # here, not in init_process_group: slow imports
    import pynccl.watch.diagnosis  # noqa: F401
register()
stores.own_communicators.append(_own_communicator)
