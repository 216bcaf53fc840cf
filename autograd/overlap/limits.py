"""Limit how much of the GPU the communication takes from concurrent matmuls: NCCL's maxCTAs."""

from __future__ import annotations

import torch

from pynccl import CollConfig, CommConfig, Communicator, NcclInvalidUsage

from ..state import state_of
from ..streams import is_capturing, share_side_streams
from .config import OverlapConfig

COLL_CONFIG_SINCE = (2, 31)  # NCCL version with a configuration per collective


class CappedChildren(dict[int, Communicator]):
    """Those of a communicator by their maximum number of CTAs."""


def prepare(comm: Communicator, config: OverlapConfig) -> None:
    """Create the additional communicators that this configuration needs. A blocking collective."""
    for each in (config, config.backward):
        if comm.size > 1 and each.method != "off":
            limited(comm, each, "ring" if each.method == "auto" else each.method)


def limited(comm: Communicator, config: OverlapConfig, method: str) -> tuple[Communicator, CollConfig | None]:
    """Return (communicator, configuration of each collective) that enforce the limit.

    Before NCCL 2.31, and for send and recv, the limit belongs to a communicator. A child communicator is split off on
    first use; it shares the side streams of its parent, and ends with it."""
    max_ctas = config.num_comm_ctas
    if max_ctas is None or (comm.config is not None and comm.config.max_ctas == max_ctas):
        return comm, None
    if comm.library.version >= COLL_CONFIG_SINCE and method != "ring":
        return comm, CollConfig(max_ctas=max_ctas)
    children = state_of(comm, CappedChildren)
    if max_ctas not in children:
        if comm.device != "cpu" and is_capturing(torch.device(comm.device)):
            raise NcclInvalidUsage(
                f"num_comm_ctas={max_ctas} needs a child communicator, which cannot be created during a CUDA graph "
                "capture; run one pass before the capture"
            )
        child = children[max_ctas] = split_off(comm, CommConfig(max_ctas=max_ctas))
        comm._dependents += (child,)
    return children[max_ctas], None


def split_off(comm: Communicator, config: CommConfig) -> Communicator:
    """Split off a communicator of the same ranks with this configuration. It shares the side streams of `comm`."""
    child = comm.split(0, comm.rank, config)
    share_side_streams(comm, child)
    return child
