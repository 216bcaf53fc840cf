"""What every way ends in: what a rank brings, rank 0's id, and the communicator that the ranks then make."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..bindings.library import Library, chosen, gpu_count
from ..bindings.structs import CommConfig, struct_of
from ..bindings.values import INT_MAX, integer
from ..bindings.workers import Clock
from ..comm.communicator import Communicator
from ..comm.init import choose_device, get_unique_id
from ..interop.devices import names_no_ordinal
from ..watch.recorder import recorder
from .rendezvous import Rendezvous

_LEAST_SECONDS = 1.0  # for NCCL's init, where the rendezvous took the whole timeout


class Brought(NamedTuple):
    """What a rank brings to the rendezvous; only rank 0 brings the id."""

    library: Library
    device: Any
    identity: bytes


def prepare(
    library: Library | None, device: Any, local_rank: int | None, rank: int, config: CommConfig | None
) -> Brought:
    """All that can fail on one rank alone, and so has to be done before the others wait for it."""
    library = chosen(library)
    recorder()  # which says what is wrong with PYNCCL_WATCH and its relatives
    if local_rank is not None:
        local_rank = integer(local_rank, "local_rank", 0, INT_MAX, "the number of this rank on its node, or None")
    device = default_device(library, device, local_rank)
    choose_device(library, device)
    struct_of(config, CommConfig, library)
    return Brought(library, device, bytes(get_unique_id(library)) if rank == 0 else b"")


def init_at(
    rendezvous: Rendezvous,
    library: Library | None,
    device: Any,
    local_rank: int | None,
    config: CommConfig | None,
    serves: bool = False,
    watch: bool = True,
) -> Communicator:
    """The communicator of the ranks that meet there.

    serves  the store goes with this process
    watch   ranks that are stuck ask each other at the store where they are"""
    try:
        part = prepare(library, device, local_rank, rendezvous.rank, config)
    except BaseException as error:
        rendezvous.report(error)
        raise
    try:
        identity = rendezvous.join(part.identity)
    except KeyboardInterrupt as error:
        rendezvous.report(error)
        raise
    comm = init(rendezvous.nranks, identity, rendezvous.rank, part, config, rendezvous.clock)
    if watch:
        watch_at(comm, rendezvous.store, serves)
    return comm


def watch_at(comm: Communicator, store: Any, serves: bool = False) -> None:
    """Ranks that are stuck ask each other at this store where they are.   serves: it goes with this process"""
    if comm._track is not None and comm.size > 1:
        try:
            from ..watch.diagnosis import meet  # what it imports takes long
        except OSError:  # no descriptor is left: ranks on other machines are not asked
            return
        meet(comm._track, store, serves)


def init(
    nranks: int, identity: bytes, rank: int, part: Brought, config: CommConfig | None, clock: Clock
) -> Communicator:
    left = max(clock.left(), _LEAST_SECONDS) if clock.timeout < math.inf else None
    comm = Communicator.init(nranks, identity, rank, part.device, config, left, part.library)
    comm.timeout = clock.timeout if clock.timeout < math.inf else None
    return comm


def default_device(library: Library, device: Any, local_rank: int | None) -> Any:
    """`device`, else this rank's own GPU: also for "cuda", which says that it is one, but not which."""
    if library.is_host or local_rank is None or not (device is None or names_no_ordinal(device)):
        return device
    count = gpu_count()
    if count and local_rank >= count:
        raise ValueError(
            f"LOCAL_RANK is {local_rank}, but this process sees {count} GPUs: start --nproc-per-node={count}, or pass "
            "device= to share one"
        )
    return local_rank
