"""How the ranks of a job find each other: torchrun's environment, a process group, MPI, a store, a shared file.

Every way ends in `Communicator.init` with an id made by rank 0, within one deadline. A rank that cannot go on says so
to the others before they would wait for it, and a rank that never comes is named.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..bindings.errors import NcclError, NcclRemoteError, NcclTimeout
from ..bindings.library import Library, chosen, gpu_count
from ..bindings.structs import CommConfig, struct_of
from ..bindings.values import INT_MAX, attribute, integer, methods, shown
from ..comm.base import DEFAULT_TIMEOUT
from ..comm.communicator import Communicator
from ..comm.deadline import Clock, Wait
from ..comm.init import check_rank_of, choose_device, get_unique_id
from ..interop.devices import names_no_ordinal
from .meeting import Manner, Meeting, could_not_start, first_line

if TYPE_CHECKING:
    from .master_store import Place

T = TypeVar("T")

_LEAST_SECONDS = 1.0  # for the birth itself, where the meeting took the whole timeout

_IN_A_LAUNCH = Manner(
    again="every process needs a RANK of its own, and calls from_env as often as the others",
    size="WORLD_SIZE",
    server="the process that serves it (rank 0, or torchrun's agent)",
)
_AT_A_STORE = Manner(
    again="every process needs a rank of its own, and every birth a store of its own, or PrefixStore(name, store)",
    size="nranks",
    server="the process that serves it",
)


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
             ranks, and for the birth, together. At most a second later there is an error; Ctrl-C ends it at once.
             None: for ever.

    Without torchrun, rank 0 serves the store: on the loopback alone if MASTER_ADDR is 127.0.0.1, ::1 or localhost, on
    MASTER_ADDR alone if that is an address of its machine, else on all interfaces.

    Every rank must call it equally often. Raises NcclInvalidUsage outside a launch, or if the ranks' RANK or WORLD_SIZE
    contradict each other; NcclTimeout naming the ranks that never came, or why the store was not reached;
    NcclSystemError if another program has the port; NcclRemoteError with the reason if another rank could not go on.
    """
    clock = Clock(timeout)
    from .master_store import read_environment  # which imports what only this way needs

    place = read_environment()
    store = _store_of_birth(place, clock)
    meeting = Meeting(store, place.rank, place.nranks, clock, _IN_A_LAUNCH)
    try:
        return _born(meeting, library, device, place.local_rank, config)
    except Exception:
        if place.serves:
            atexit.register(meeting.linger)
        raise


def from_store(
    store: Any,
    rank: int,
    nranks: int,
    *,
    device: Any = None,
    config: CommConfig | None = None,
    timeout: float | None = DEFAULT_TIMEOUT,
    library: Library | None = None,
    local_rank: int | None = None,
) -> Communicator:
    """The communicator of ranks 0..nranks-1 that share a torch.distributed store, which serves this one birth.

    timeout  seconds for the meeting and the birth together, whatever the timeout of the store. A call that the store
             does not return from is left behind in a thread.

    Raises as `from_env` does.
    """
    clock = Clock(timeout)
    check_rank_of(rank, nranks)
    methods(store, ("add", "get", "set", "check"), "store", "a torch.distributed store, such as TCPStore")
    return _born(Meeting(store, rank, nranks, clock, _AT_A_STORE), library, device, local_rank, config)


def from_file(
    path: str,
    rank: int,
    nranks: int,
    *,
    device: Any = None,
    config: CommConfig | None = None,
    timeout: float | None = DEFAULT_TIMEOUT,
    library: Library | None = None,
    local_rank: int | None = None,
) -> Communicator:
    """The communicator of ranks that share a file system.

    path  of a file that does not exist yet, in a folder that all ranks may write to. It is removed when all have met; a
          run that failed leaves it, and the next one says that it has to be removed.

    The rest as in `from_store`. Raises NcclSystemError if the file cannot be written, NcclInvalidUsage if it holds
    something else.
    """
    clock = Clock(timeout)
    check_rank_of(rank, nranks)
    from .file_store import FileStore

    store = FileStore(path, clock)
    manner = Manner(
        again=f"every process needs a rank of its own; or {store.path} is left over from an earlier run: remove it",
        size="nranks",
        server=f"the file system of {store.path}",
    )
    meeting = Meeting(store, rank, nranks, clock, manner, met=lambda: store.leave(nranks))
    return _born(meeting, library, device, local_rank, config)


def from_process_group(
    group: Any = None,
    *,
    device: Any = None,
    config: CommConfig | None = None,
    timeout: float | None = DEFAULT_TIMEOUT,
    library: Library | None = None,
) -> Communicator:
    """The communicator of the ranks of a torch.distributed process group, or of a one-dimensional DeviceMesh.

    group    None: the default group
    device   None or "cuda": LOCAL_RANK's GPU if set, else the current one
    timeout  seconds for the exchange in the group and the birth together; the group's own timeout may end it earlier.
             A group in which a rank did not answer cannot be used any more.
    """
    import torch
    import torch.distributed as dist

    clock = Clock(timeout)
    group = _group_of(group)
    rank, nranks = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("this process is not in the process group: only its ranks may call from_process_group")
    local = os.environ.get("LOCAL_RANK")
    gpu = torch.cuda.current_device() if "nccl" in dist.get_backend(group) else None

    def exchange(word: Any) -> list[Any]:
        if gpu is not None:
            torch.cuda.set_device(gpu)  # which every thread has its own of
        words = [None] * nranks
        dist.all_gather_object(words, word, group=group)
        return words

    patient = _patient(exchange, f"rank {rank} of the process group's {nranks}", clock)
    part, identity = _agree(patient, library, device, int(local) if local else None, rank, config)
    return _join(nranks, identity, rank, part, config, clock)


def from_mpi(
    mpi_comm: Any = None,
    *,
    device: Any = None,
    config: CommConfig | None = None,
    timeout: float | None = DEFAULT_TIMEOUT,
    library: Library | None = None,
) -> Communicator:
    """The communicator of the ranks of an mpi4py communicator (None: COMM_WORLD).

    device   None or "cuda": the rank's number among the ranks of its node
    timeout  seconds for the exchange by MPI and the birth together. Without MPI_THREAD_MULTIPLE, which mpi4py asks for
             unless told otherwise, the exchange has no deadline.
    """
    from mpi4py import MPI

    clock = Clock(timeout)
    mpi_comm = mpi_comm or MPI.COMM_WORLD
    rank, nranks = mpi_comm.Get_rank(), mpi_comm.Get_size()
    threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
    who = f"rank {rank} of the MPI communicator's {nranks}"

    def number_on_node(_: Any) -> int:
        node = mpi_comm.Split_type(MPI.COMM_TYPE_SHARED)
        number: int = node.Get_rank()
        node.Free()
        return number

    local_rank = (_patient(number_on_node, who, clock) if threads else number_on_node)(None)
    exchange = _patient(mpi_comm.allgather, who, clock) if threads else mpi_comm.allgather
    part, identity = _agree(exchange, library, device, local_rank, rank, config)
    return _join(nranks, identity, rank, part, config, clock)


def _group_of(group: Any) -> Any:
    """A process group that torch.distributed knows, None for the default one."""
    import torch.distributed as dist

    if not isinstance(group, dist.ProcessGroup) and callable(find := attribute(group, "get_group")):
        group = find()
    none_here = dist.GroupMember.NON_GROUP_MEMBER  # what new_group() returns to ranks that it leaves out
    if group is not None and group is not none_here and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"from_process_group: group is {shown(group)}, expected a torch.distributed process group, a DeviceMesh of "
            "one dimension, or None for the default group"
        )
    if not dist.is_initialized():
        raise ValueError(
            "from_process_group: torch.distributed has no process group; call torch.distributed.init_process_group "
            "first, or use pynccl.init(), which needs none"
        )
    return group


class _Part(NamedTuple):
    """What a rank brings to the meeting; only rank 0 brings the id."""

    library: Library
    device: Any
    identity: bytes


def _prepare(
    library: Library | None, device: Any, local_rank: int | None, rank: int, config: CommConfig | None
) -> _Part:
    """All that can fail on one rank alone, and so has to be done before the others wait for it."""
    library = chosen(library)
    if local_rank is not None:
        local_rank = integer(local_rank, "local_rank", 0, INT_MAX, "the number of this rank on its node, or None")
    device = _default_device(library, device, local_rank)
    choose_device(library, device)
    struct_of(config, CommConfig, library)
    return _Part(library, device, bytes(get_unique_id(library)) if rank == 0 else b"")


def _born(
    meeting: Meeting,
    library: Library | None,
    device: Any,
    local_rank: int | None,
    config: CommConfig | None,
) -> Communicator:
    """What the meeting leads to."""
    try:
        part = _prepare(library, device, local_rank, meeting.rank, config)
    except BaseException as error:
        meeting.tell(error)
        raise
    try:
        identity = meeting.attend(part.identity)
    except KeyboardInterrupt as error:
        meeting.tell(error)
        raise
    return _join(meeting.nranks, identity, meeting.rank, part, config, meeting.clock)


def _join(
    nranks: int, identity: bytes, rank: int, part: _Part, config: CommConfig | None, clock: Clock
) -> Communicator:
    left = max(clock.left(), _LEAST_SECONDS) if clock.timeout < math.inf else None
    comm = Communicator.init(nranks, identity, rank, part.device, config, left, part.library)
    comm.timeout = clock.timeout if clock.timeout < math.inf else None
    return comm


def _patient(exchange: Callable[[Any], T], who: str, clock: Clock) -> Callable[[Any], T]:
    """`exchange` with the clock's deadline."""

    def late() -> NcclTimeout:
        return NcclTimeout(
            f"{who} waited {clock.seconds()} for the others to exchange their words: a rank has not made this call, is "
            "stopped, or has ended\n  look for its first error; a longer timeout= helps if it is only slow"
        )

    def failed(error: Exception) -> NcclTimeout | NcclRemoteError:
        said = first_line(error)
        kind = NcclTimeout if "timed out" in said.lower() or "timeout" in said.lower() else NcclRemoteError
        return kind(
            f"{who} could not exchange words with the others, after {clock.seconds()} of {clock.timeout:g} s: {said}\n"
            "  a rank has ended, or is late for the time limit of the group itself; look for its first error"
        )

    def patient(word: Any) -> T:
        try:
            return Wait(clock).beside(lambda: exchange(word), late)
        except (NcclError, ValueError, TypeError):
            raise
        except Exception as error:  # RuntimeError of torch, MPI.Exception
            raise failed(error) from error

    return patient


def _agree(
    exchange: Callable[[Any], list[Any]],
    library: Library | None,
    device: Any,
    local_rank: int | None,
    rank: int,
    config: CommConfig | None,
) -> tuple[_Part, bytes]:
    """This rank's part and rank 0's id; `exchange` gives each rank all ranks' words. Raises if any rank failed."""
    try:
        part = _prepare(library, device, local_rank, rank, config)
    except Exception as error:
        with contextlib.suppress(NcclError):  # this rank's own error says more
            exchange(could_not_start(rank, error))
        raise
    words = exchange(part.identity)
    for word in words:
        if isinstance(word, str):
            raise NcclRemoteError(word)
    return part, words[0]


class _Launch:
    """What the ranks of one launch share: the store, and the number of births so far, failed ones too."""

    def __init__(self) -> None:
        self.store: Any = None
        self.births = itertools.count()


# Kept until the process ends: rank 0's store may be the server of all the others, which may be a birth behind.
_launches: dict[tuple[str | None, ...], _Launch] = {}


def _store_of_birth(place: Place, clock: Clock) -> Any:
    """A part of the launch's store that no other birth uses."""
    from torch.distributed import PrefixStore

    from .master_store import open_store

    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    launch = _launches.setdefault(tuple(os.environ.get(name) for name in names), _Launch())
    birth = next(launch.births)  # counted first: the others count a birth in which this rank did not reach the store
    if launch.store is None:
        prefix = f"pynccl/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"  # the agent's store outlives a restart
        launch.store = PrefixStore(prefix, open_store(place, clock))
    return PrefixStore(str(birth), launch.store)


def _default_device(library: Library, device: Any, local_rank: int | None) -> Any:
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
