"""The ranks of a torchrun launch: RANK, WORLD_SIZE, LOCAL_RANK, and the store at MASTER_ADDR:MASTER_PORT."""

from __future__ import annotations

import atexit
import itertools
import os
from typing import Any

from ..bindings.library import Library
from ..bindings.structs import CommConfig
from ..bindings.workers import Clock
from ..comm.base import DEFAULT_TIMEOUT
from ..comm.communicator import Communicator, bootstrap
from .join import init_at
from .master_store import Place, open_store, read_environment
from .rendezvous import Rendezvous, Wording

_IN_A_LAUNCH = Wording(
    again="every process needs a RANK of its own, and calls from_env as often as the others",
    size="WORLD_SIZE",
    server="the process that serves it (rank 0, or torchrun's agent)",
)


@bootstrap
def from_env(
    *,
    device: Any = None,
    config: CommConfig | None = None,
    timeout: float | None = DEFAULT_TIMEOUT,
    library: Library | None = None,
) -> Communicator:
    """The communicator of all ranks of a `torchrun` launch (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT).

    device   this rank's GPU; None or "cuda": number LOCAL_RANK. The host library has the CPU only. It does not become
             the thread's current GPU: that is torch.cuda.set_device(comm.device)'s to do.
    timeout  seconds until the communicator is there: for reaching the store at MASTER_ADDR:MASTER_PORT, for the other
             ranks, and for NCCL's init, together. At most a second later there is an error; Ctrl-C ends it at once.
             None: for ever.

    Without torchrun, rank 0 serves the store: on the loopback alone if MASTER_ADDR is 127.0.0.1, ::1 or localhost, on
    MASTER_ADDR alone if that is an address of its machine, else on all interfaces.

    Every rank must call it equally often. Raises NcclInvalidUsage outside a launch, or if the ranks' RANK or WORLD_SIZE
    contradict each other; NcclTimeout naming the ranks that never came, or why the store was not reached;
    NcclSystemError if another program has the port; NcclRemoteError with the reason if another rank could not go on.
    """
    clock = Clock(timeout)
    place = read_environment()
    store = _store_of_next(place, clock)
    rendezvous = Rendezvous(store, place.rank, place.nranks, clock, _IN_A_LAUNCH)
    try:
        return init_at(rendezvous, library, device, place.local_rank, config, place.serves)
    except Exception:
        if place.serves:
            atexit.register(rendezvous.linger)
        raise


class _Launch:
    """What the ranks of one launch share: the store, and the number of calls so far, failed ones too."""

    def __init__(self) -> None:
        self.store: Any = None
        self.calls = itertools.count()


# Kept until the process ends: rank 0's store may be the server of all the others, which may be a call behind.
_launches: dict[tuple[str | None, ...], _Launch] = {}


def _store_of_next(place: Place, clock: Clock) -> Any:
    """A part of the launch's store that no other call uses."""
    from torch.distributed import PrefixStore

    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    launch = _launches.setdefault(tuple(os.environ.get(name) for name in names), _Launch())
    number = next(launch.calls)  # counted first: the others count a call in which this rank did not reach the store
    if launch.store is None:
        prefix = f"pynccl/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"  # the agent's store outlives a restart
        launch.store = PrefixStore(prefix, open_store(place, clock))
    return PrefixStore(str(number), launch.store)
