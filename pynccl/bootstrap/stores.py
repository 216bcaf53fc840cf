"""Ranks that share a torch.distributed store, a process group, which has one, or a file system."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import stat
import time
from collections.abc import Callable
from typing import Any

from ..bindings.errors import NcclError, NcclInvalidUsage, NcclSystemError, NcclTimeout
from ..bindings.library import Library
from ..bindings.structs import CommConfig
from ..bindings.values import attribute, instance, methods, shown
from ..bindings.workers import Clock
from ..comm.base import DEFAULT_TIMEOUT
from ..comm.communicator import Communicator, bootstrap
from ..comm.init import check_rank_of
from ..watch.layout import SUFFIX
from ..watch.recorder import recorder
from .env import agent_serves, read_local_rank
from .join import init_at, watch_at
from .rendezvous import Rendezvous, first_line

_WATCH_SECONDS = 1.5  # for the lock of the file in which ranks that are stuck ask each other
_LONGEST_NAME = 1 << 16  # of a key in torch's FileStore, which begins with the length of one

_SERVER = "the process that serves it"
_AGAIN = "every process needs a rank of its own, and every call a store of its own, or PrefixStore(name, store)"
_AGAIN_IN_A_GROUP = "every rank of a process group calls from_process_group as often as the others"


@bootstrap
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
    """The communicator of ranks 0..nranks-1 that share a torch.distributed store, which serves this one call.

    timeout  seconds for the rendezvous and NCCL's init together, whatever the store's own timeout. What the store does
             not return from is left behind in a thread.

    Raises as `from_env` does.
    """
    clock = Clock(timeout)
    check_rank_of(rank, nranks)
    methods(store, ("add", "get", "set", "check"), "store", "a torch.distributed store, such as TCPStore")
    return init_at(Rendezvous(store, rank, nranks, clock, _SERVER, _AGAIN), library, device, local_rank, config)


# ---------------------------------------------------------------------------------------------- a process group


own_communicators: list[Callable[[Any], Communicator | None]] = []  # pynccl.torch_backend adds its own, of its groups


@bootstrap
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
    timeout  seconds for the rendezvous at the group's store and NCCL's init together, whatever the group's own timeout

    All ranks of the group must call it equally often. Raises as `from_env` does; ValueError for a group without a
    store, such as one of MPI.

    Of a group of `pynccl.torch_backend` it is the group's own one, which ends with the group, unless a device, config
    or library is asked for.
    """
    import torch.distributed as dist

    clock = Clock(timeout)
    group = _group_of(group)
    if device is None and config is None and library is None:
        for find in own_communicators:
            if (own := find(group)) is not None:
                return own
    rank, nranks = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("this process is not in the process group: only its ranks may call from_process_group")
    shared = group.get_group_store()
    if shared is None:
        raise ValueError(f"from_process_group: {shown(group)} has no store; of MPI's ranks there is from_mpi")
    store = dist.PrefixStore("pynccl", shared)
    rendezvous = Rendezvous(store, rank, nranks, clock, _SERVER, _AGAIN_IN_A_GROUP)
    rendezvous.next_part(dist.PrefixStore)
    try:
        local = read_local_rank()
    except NcclInvalidUsage as error:
        rendezvous.report(error)
        raise
    return init_at(rendezvous, library, device, local, config, serves=dist.get_rank() == 0 and not agent_serves())


def _group_of(group: Any) -> Any:
    """A process group that torch.distributed knows; None stands for the default one."""
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
    return dist.group.WORLD if group is None else group


# ------------------------------------------------------------------------------------------------------- a file


@bootstrap
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
    something else. Ranks that are stuck ask each other in a second file, `path`.UID.watch, which goes when the job has
    ended well, else with the next run.
    """
    clock = Clock(timeout)
    check_rank_of(rank, nranks)
    instance(path, (str, bytes, os.PathLike), "from_file: path", "the path of a file, a string")
    path = os.fsdecode(path)
    store = _file_store(path, clock)
    server = f"the file system of {path}"
    again = f"every process needs a rank of its own; or {path} is left over from an earlier run: remove it"

    def met() -> None:
        if store.add("left", 1) == nranks:
            with contextlib.suppress(OSError):
                os.unlink(path)

    rendezvous = Rendezvous(store, rank, nranks, clock, server, again, met)
    comm = init_at(rendezvous, library, device, local_rank, config, watch=False)
    watch_at(comm, _WatchFile(path, comm))
    return comm


class _WatchFile:
    """torch's FileStore, made when a rank has something to say. Ranks poll it by add(key, 0), which torch's would write
    down."""

    def __init__(self, path: str, comm: Communicator) -> None:
        path = os.path.abspath(path)
        self._path = f"{path}.{comm.uid[:12]}{SUFFIX}"
        if comm.rank == 0:
            for old in glob.glob(f"{glob.escape(path)}.*{SUFFIX}"):  # of runs that have failed
                if old != self._path:
                    with contextlib.suppress(OSError):
                        os.unlink(old)
        if (own := recorder()) is not None:
            own.beside.append(self._path)
        self._made: Any = None

    def _store(self) -> Any:
        self._made = self._made or _file_store(self._path, Clock(_WATCH_SECONDS))
        return self._made

    def check(self, keys: list[str]) -> bool:
        return os.path.exists(self._path) and bool(self._store().check(keys))

    def get(self, key: str) -> bytes:
        return bytes(self._store().get(key))

    def add(self, key: str, amount: int) -> int:
        if amount:
            return int(self._store().add(key, amount))
        return int(self.get(key)) if self.check([key]) else 0

    def set(self, key: str, value: str | bytes) -> None:
        self._store().set(key, value)


def _file_store(path: str, clock: Clock) -> Any:
    """torch's FileStore, whose constructor keeps the GIL while it waits for a folder, for a lock, or for the rest of a
    file that is no store: so the file is made, locked and looked at here first. Only its user may read it."""
    from torch.distributed import FileStore

    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        with open(file, "rb") as found:
            _wait_for_lock(file, path, clock)
            usable = stat.S_ISREG(os.fstat(file).st_mode) and int.from_bytes(found.read(4), "little") <= _LONGEST_NAME
        if usable:
            return FileStore(path)
    except (OSError, RuntimeError) as error:  # no space is left, or a file system without locks
        if isinstance(error, NcclError):
            raise
        raise NcclSystemError(
            f"the ranks cannot meet in the file {path}: {getattr(error, 'strerror', None) or first_line(error)}\n"
            "  pass a path in a folder that exists, that all ranks share, and that they may write to"
        ) from error
    raise NcclInvalidUsage(f"{path} is no meeting of ranks: pass the path of a file that does not exist yet")


def _wait_for_lock(file: int, path: str, clock: Clock) -> None:
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if clock.left() <= 0:
                raise NcclTimeout(
                    f"the lock of {path}, where the ranks meet, was not free within {clock.seconds()}: a process that "
                    "holds it is stopped, or its machine is gone"
                ) from None
            time.sleep(0.01)
