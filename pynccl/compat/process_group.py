"""What a communicator needs of a process group of torch.distributed: this rank's place, and bytes for all."""

from __future__ import annotations

from typing import Any

from ..bindings.errors import NcclInvalidUsage


def place_in(group: Any) -> tuple[int, int]:
    """(rank, number of ranks) in a process group of torch."""
    import torch.distributed as dist

    if not dist.is_initialized():
        raise NcclInvalidUsage(
            "PyNcclCommunicator: torch.distributed is not initialized: call init_process_group first, or pass a "
            "StatelessProcessGroup"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("PyNcclCommunicator: this process is not in the group: only its ranks may make it")
    if dist.get_backend(group) == dist.Backend.NCCL:
        raise ValueError(
            "PyNcclCommunicator: the group is NCCL's own; pass one of a CPU backend, over which the id travels"
        )
    return rank, dist.get_world_size(group)


def broadcast_bytes(group: Any, data: bytes) -> bytes:
    """The first rank's bytes."""
    import torch
    import torch.distributed as dist

    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.broadcast(tensor, src=dist.get_process_group_ranks(group)[0], group=group)
    return bytes(tensor.tolist())
