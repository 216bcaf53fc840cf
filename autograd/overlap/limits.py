"""How much of the GPU communication may take from the matmuls beside it: NCCL's maxCTAs."""

from __future__ import annotations

import weakref

import torch

from pynccl import CollConfig, CommConfig, Communicator, NcclInvalidUsage

from ..streams import is_capturing, share_side_streams
from .config import OverlapConfig

COLL_CONFIG_SINCE = (2, 31)  # collectives have a configuration of their own

_capped: weakref.WeakKeyDictionary[Communicator, dict[int, Communicator]] = weakref.WeakKeyDictionary()


def prepare(comm: Communicator, config: OverlapConfig) -> None:
    """Make the communicators that this configuration needs besides: a collective of all ranks, which blocks."""
    if comm.size == 1:
        return
    for one in (config, config.backward):
        if one.method != "off":
            limited(comm, one, "ring" if one.method == "auto" else one.method)


def limited(comm: Communicator, config: OverlapConfig, method: str) -> tuple[Communicator, CollConfig | None]:
    """(communicator, configuration of each collective) that keep to the limit.

    Before NCCL 2.31, and of send and recv, the limit is that of a communicator, which is split off when it is first
    asked for, works on the side streams of the first, and ends with it."""
    most = config.num_comm_ctas
    if most is None:
        return comm, None
    if comm.library.version >= COLL_CONFIG_SINCE and method != "ring":
        return comm, CollConfig(max_ctas=most)
    return _with_cap(comm, most), None


def _with_cap(comm: Communicator, most: int) -> Communicator:
    if comm.config is not None and comm.config.max_ctas == most:
        return comm
    made = _capped.setdefault(comm, {})
    if most not in made:
        if not comm.library.is_host and is_capturing(torch.device(comm.device)):
            raise NcclInvalidUsage(
                f"num_comm_ctas={most} needs a communicator of its own, which cannot be made in the capture of a CUDA "
                "graph: run one pass before it"
            )
        child = comm.split(0, comm.rank, CommConfig(max_ctas=most))
        assert child is not None
        share_side_streams(comm, child)
        comm.dependents += (child,)
        made[most] = child
    return made[most]
