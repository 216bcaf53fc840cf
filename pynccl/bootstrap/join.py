"""The steps common to all rendezvous methods: local setup, exchange of rank 0's id, communicator init."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..bindings import share_gpu
from ..bindings.abi import UniqueId
from ..bindings.errors import NcclError, NcclRemoteError, NcclTimeout
from ..bindings.library import Library, chosen, gpu_count, host_module
from ..bindings.structs import CommConfig, struct_of
from ..bindings.values import INT_MAX, counted, instance, integer
from ..bindings.workers import Clock
from ..comm.base import comm_name
from ..comm.communicator import Communicator
from ..comm.init import choose_device, comm_init_rank, get_unique_id, recorded_init
from ..interop.devices import names_no_ordinal
from ..watch.layout import CommEnd
from ..watch.recorder import recorder
from ..watch.track import Identity, Track, new_track, uid_of
from .rendezvous import Rendezvous

_OF_OTHERS = (NcclRemoteError, NcclTimeout)  # failures of other ranks, which no line of this one explains
_MIN_INIT_SECONDS = 1.0  # for NCCL's init, if the rendezvous used up the timeout


class RankSetup(NamedTuple):
    """The result of a rank's local setup; only rank 0 has the id (`identity`)."""

    library: Library
    device: Any
    ordinal: int | None  # of the CUDA device; None: the CPU
    identity: bytes


def prepare(
    operation: str, library: Library | None, device: Any, local_rank: int | None, rank: int, config: CommConfig | None
) -> RankSetup:
    """Do everything that can fail on this rank alone, so that it fails before the other ranks wait for it."""
    library = chosen(library, operation)
    recorder()  # raises for invalid PYNCCL_WATCH* variables
    if local_rank is not None:
        local_rank = integer(
            local_rank, f"{operation}: local_rank", 0, INT_MAX, "the index of this rank on its node, or None"
        )
    device = default_device(library, device, local_rank)
    ordinal = choose_device(library, device, f"{operation}: device")
    struct_of(config, CommConfig, library, operation)
    return RankSetup(library, device, ordinal, bytes(get_unique_id(library)) if rank == 0 else b"")


def init_at(
    operation: str,
    rendezvous: Rendezvous,
    library: Library | None,
    device: Any,
    local_rank: int | None,
    config: CommConfig | None,
    serves: bool = False,
    watch: bool = True,
    elastic: bool = False,
) -> Communicator:
    """Run the rendezvous and create the communicator.

    serves   this process serves the store, which ends with it
    watch    use the store for hang diagnosis: blocked ranks exchange their positions through it
    elastic  begin generation 0 with it: see generation.py"""
    try:
        instance(elastic, bool, f"{operation}: elastic", "True or False")
        setup = prepare(operation, library, device, local_rank, rendezvous.rank, config)
    except BaseException as error:
        rendezvous.report(error)
        raise
    rank, nranks, clock = rendezvous.rank, rendezvous.nranks, rendezvous.clock
    try:
        with _joined(rendezvous, setup.identity, config) as (track, identity):
            id_ = UniqueId.from_buffer_copy(identity)
            launch = None
            if elastic:
                from .generation import Launch, Setup  # which few programs use

                kept = Setup(setup.library, setup.ordinal, config, _timeout(clock), serves)
                launch = Launch(rendezvous.store, rank, kept)
            handle = comm_init_rank(setup.library, nranks, [id_], rank, setup.ordinal, config, _left(clock))
    except _OF_OTHERS as error:
        raise error.with_traceback(None) from None
    comm = Communicator(handle, setup.library, _timeout(clock), config, track)
    if watch:
        watch_at(comm, rendezvous.store, serves)
    if launch is not None:
        launch.begin(comm, 0, range(nranks), "")
    return comm


class Children:
    """Makes communicators of ranks of `parent`, one of the host library, even once it has ended. See host.Family."""

    def __init__(self, parent: Communicator) -> None:
        self.family = host_module().Family(parent.handle)
        self._track, self._rank = parent._track, parent.rank
        self._library, self._timeout = parent.library, parent.timeout

    def make(self, members: Sequence[int], name: str, config: CommConfig) -> Communicator:
        """Return a communicator whose ranks connect at its first call.   name: used once, equal on all members"""
        own, track = self._track, None
        if own is not None:
            identity = Identity(self.uid(name), comm_name(config, "child"), own.uid)
            ranks = [own.ranks[member] for member in members] if own.ranks else list(members)
            track = new_track(identity, members.index(self._rank), len(members), ranks)
        return Communicator(self.family.communicator(members, name), self._library, self._timeout, config, track)

    def uid(self, *names: object) -> str:
        """Return a uid for the flight recorder that all ranks derive from the same names."""
        return uid_of(self._track.uid if self._track is not None else "", *map(str, names))


def meet(rendezvous: Rendezvous, config: CommConfig | None) -> Any:
    """Run the rendezvous without a communicator. Return a store with keys that no other rendezvous uses."""
    try:
        with _joined(rendezvous, b"", config) as (track, _):
            pass
    except _OF_OTHERS as error:
        raise error.with_traceback(None) from None
    if track is not None:
        track.end(CommEnd.DESTROYED)
    return rendezvous.store


@contextlib.contextmanager
def _joined(rendezvous: Rendezvous, identity: bytes, config: CommConfig | None) -> Iterator[tuple[Track | None, bytes]]:
    """Run the rendezvous and yield (track, id). The flight recorder has it and the block as one init."""
    with recorded_init("", rendezvous.rank, rendezvous.nranks, config, rendezvous.ranks) as track:
        if track is not None:
            rendezvous.on_name = lambda name: track.write_uid(uid_of(name))
        try:
            identity = rendezvous.join(identity)
        except NcclError:
            raise
        except BaseException as error:  # of a signal handler
            rendezvous.report(error)
            raise
        yield track, identity


def watch_at(comm: Communicator, store: Any, serves: bool = False) -> None:
    """Use this store for hang diagnosis: blocked ranks exchange their positions through it. serves: as in `init_at`."""
    if comm._track is not None and comm.size > 1:
        try:
            from ..watch.diagnosis import enable_cross_node  # a slow import
        except OSError:  # out of file descriptors: no diagnosis across nodes
            return
        enable_cross_node(comm._track, store, serves)


def init(
    nranks: int, identity: bytes, rank: int, setup: RankSetup, config: CommConfig | None, clock: Clock
) -> Communicator:
    """Create the communicator; the id has been exchanged."""
    comm = Communicator.init(nranks, identity, rank, setup.device, config, _left(clock), setup.library)
    comm.timeout = _timeout(clock)
    return comm


def _left(clock: Clock) -> float | None:
    """Return how long NCCL's init may take."""
    return max(clock.left(), _MIN_INIT_SECONDS) if clock.timeout < math.inf else None


def _timeout(clock: Clock) -> float | None:
    return clock.timeout if clock.timeout < math.inf else None


def default_device(library: Library, device: Any, local_rank: int | None) -> Any:
    """Return `device`, or this rank's GPU for None and for "cuda" without an ordinal."""
    if library.is_host or local_rank is None or not (device is None or names_no_ordinal(device)):
        return device
    count = gpu_count()
    if count and share_gpu.is_shared():
        return local_rank % count
    if count and local_rank >= count:
        raise ValueError(
            f"this rank takes GPU {local_rank} (LOCAL_RANK, or RANK if that is not set), but this process sees only "
            f"{counted(count, 'GPU')}; use --nproc-per-node={count}; pass device=0 if each rank sees a GPU of its own; "
            f"or set {share_gpu.VARIABLE}=1 on all ranks to share GPUs"
        )
    return local_rank
