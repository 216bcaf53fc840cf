"""How much of the GPU communication may take from the matmuls beside it: NCCL's maxCTAs."""

from __future__ import annotations

import weakref

from pynccl import CollConfig, CommConfig, Communicator

from ..streams import share_side_streams
from .config import OverlapConfig

COLL_CONFIG_SINCE = (2, 31)  # collectives have a configuration of their own

_capped: weakref.WeakKeyDictionary[Communicator, dict[int, Communicator]] = weakref.WeakKeyDictionary()


def limited(comm: Communicator, config: OverlapConfig, method: str) -> tuple[Communicator, CollConfig | None]:
    """(communicator, configuration of each collective) that keep to the limit.

    Before NCCL 2.31, and of send and recv, the limit is that of a communicator, which is split off when it is first
    asked for, and works on the side streams of the first."""
    most = config.num_comm_ctas
    if most is None:
        return comm, None
    if comm.library.version >= COLL_CONFIG_SINCE and method != "ring":
        return comm, CollConfig(max_ctas=most)
    return _with_cap(comm, most), None


def _with_cap(comm: Communicator, most: int) -> Communicator:
    made = _capped.setdefault(comm, {})
    if most not in made:
        child = comm.split(0, comm.rank, CommConfig(max_ctas=most))
        assert child is not None
        share_side_streams(comm, child)
        made[most] = child
    return made[most]
