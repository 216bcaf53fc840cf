"""How much of the GPU communication may take from the matmuls beside it: NCCL's maxCTAs, and a margin of SMs."""

from __future__ import annotations

import contextlib
import weakref

from pynccl import CollConfig, CommConfig, Communicator

from ..streams import share_side_streams
from ..torch_internals import sm_carveout
from .config import OverlapConfig

COLL_CONFIG_SINCE = (2, 31)  # collectives have a configuration of their own

_capped: weakref.WeakKeyDictionary[Communicator, dict[int, Communicator]] = weakref.WeakKeyDictionary()


def limited(
    comm: Communicator, config: OverlapConfig, method: str
) -> tuple[Communicator, CollConfig | None, contextlib.AbstractContextManager[object]]:
    """(communicator, configuration of each collective, context of the matmuls) that keep to the limits.

    Before NCCL 2.31, and of send and recv, the limit is that of a communicator, which is split off when it is first
    asked for, and works on the side streams of the first."""
    most = config.num_comm_ctas
    if most is None:
        return comm, None, contextlib.nullcontext()
    margin = sm_carveout(most) if config.set_sm_margin and not comm.library.is_host else contextlib.nullcontext()
    if comm.library.version >= COLL_CONFIG_SINCE and method != "ring":
        return comm, CollConfig(max_ctas=most), margin
    return _with_cap(comm, most), None, margin


def _with_cap(comm: Communicator, most: int) -> Communicator:
    made = _capped.setdefault(comm, {})
    if most not in made:
        child = comm.split(0, comm.rank, CommConfig(max_ctas=most))
        assert child is not None
        share_side_streams(comm, child)
        made[most] = child
    return made[most]
