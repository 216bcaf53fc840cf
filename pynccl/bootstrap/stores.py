"""Rendezvous through a torch.distributed store, the store of a process group, or a shared file."""

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
from ..bindings.values import attribute, methods, path_of, shown
from ..bindings.workers import Clock
from ..comm.base import DEFAULT_TIMEOUT
from ..comm.communicator import Communicator, bootstrap
from ..comm.init import check_rank_of
from ..watch.layout import SUFFIX
from ..watch.recorder import recorder
from .env import agent_serves, read_local_rank
from .join import init_at, watch_at
from .rendezvous import Rendezvous, first_line

_WATCH_LOCK_SECONDS = 1.5  # for the lock of the hang diagnosis file
_MAX_KEY_BYTES = 1 << 16  # torch's FileStore begins with the length of its first key

_SERVER = "the process that serves it"
_DUPLICATE_HINT = (
    "every process needs its own rank; call it once at a time at a store, or pass PrefixStore(name, store)"
)
_DUPLICATE_HINT_GROUP = "all ranks of a process group must call from_process_group equally often"


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
    elastic: bool = False,
) -> Communicator:
    """Create the communicator of ranks 0..nranks-1 that share a torch.distributed store.

    A store can be used again, after a failure and by a later run too: by all ranks, one call at a time.

    timeout  seconds for the rendezvous and NCCL's init together; the store's own timeout is ignored. Store operations
             that block past the deadline are left running in a thread.
    elastic  True: the ranks can go on if some of them die, but not the process that serves the store: see
             `Communicator.survivors`

    Raises the same errors as `from_env`.
    """
    clock = Clock(timeout, "from_store: timeout")
    check_rank_of(rank, nranks, "from_store")
    needed = ("add", "get", "set", "check", *(["compare_set"] if elastic is True else []))
    methods(store, needed, "from_store: store", "a torch.distributed store, such as TCPStore")
    rendezvous = Rendezvous(store, rank, nranks, clock, _SERVER, _DUPLICATE_HINT)
    return init_at("from_store", rendezvous, library, device, local_rank, config, elastic=elastic)


# ---------------------------------------------------------------------------------------------- a process group


# Lookups of a group's own communicator; pynccl.torch_backend registers one.
own_communicators: list[Callable[[Any], Communicator | None]] = []


@bootstrap
def from_process_group(
    group: Any = None,
    *,
    device: Any = None,
    config: CommConfig | None = None,
    timeout: float | None = DEFAULT_TIMEOUT,
    library: Library | None = None,
) -> Communicator:
    """Create the communicator of the ranks of a torch.distributed process group or a one-dimensional DeviceMesh.

    group    None: the default group
    device   None or "cuda": the GPU number LOCAL_RANK if set, otherwise the current GPU
    timeout  seconds for the rendezvous at the group's store and NCCL's init together; the group's timeout is ignored

    All ranks of the group must call it equally often. Raises the same errors as `from_env`, and ValueError for a group
    without a store, such as an MPI group.

    For a group of `pynccl.torch_backend`, this returns the group's own communicator, which is destroyed with the group,
    unless you pass device, config or library.
    """
    import torch.distributed as dist

    clock = Clock(timeout, "from_process_group: timeout")
    group = _group_of(group)
    if device is None and config is None and library is None:
        for find in own_communicators:
            if (comm := find(group)) is not None:
                return comm
    rank, nranks = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("this process is not in the process group: only its ranks may call from_process_group")
    shared = group.get_group_store()
    if shared is None:
        raise ValueError(f"from_process_group: {shown(group)} has no store; use from_mpi for MPI ranks")
    store = dist.PrefixStore("pynccl", shared)
    ranks = dist.get_process_group_ranks(group)
    rendezvous = Rendezvous(store, rank, nranks, clock, _SERVER, _DUPLICATE_HINT_GROUP, ranks=ranks)
    try:
        local = read_local_rank()
    except NcclInvalidUsage as error:
        rendezvous.report(error)
        raise
    serves = dist.get_rank() == 0 and not agent_serves()
    return init_at("from_process_group", rendezvous, library, device, local, config, serves)


def _group_of(group: Any) -> Any:
    """Return the process group of `group`; the default group for None."""
    import torch.distributed as dist

    if not isinstance(group, dist.ProcessGroup) and callable(find := attribute(group, "get_group")):
        group = find()
    non_member = dist.GroupMember.NON_GROUP_MEMBER  # what new_group() returns on ranks outside the group
    if group is not None and group is not non_member and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"from_process_group: group is {shown(group)}, expected a torch.distributed process group, a "
            "one-dimensional DeviceMesh, or None for the default group"
        )
    if not dist.is_initialized():
        raise ValueError(
            "from_process_group: torch.distributed has no process group; call torch.distributed.init_process_group "
            "first, or use pynccl.init(), which does not need one"
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
    """Create the communicator of ranks that share a file system.

    path  a file that does not exist yet, in a folder that all ranks can write to. It is removed once all ranks have
          joined. A failed run leaves it behind, for the next run to use.

    The other arguments are those of `from_store`. Raises NcclSystemError if the file cannot be written, and
    NcclInvalidUsage if it has other contents. Blocked ranks exchange their positions in a second file,
    `path`.UID.watch, which is removed when the job exits cleanly, or by the next run.
    """
    clock = Clock(timeout, "from_file: timeout")
    check_rank_of(rank, nranks, "from_file")
    path = path_of(path, "from_file: path")
    store = _file_store(path, clock)
    server = f"the file system of {path}"
    duplicate_hint = "every process needs its own rank, and every job its own file"

    def remove_file() -> None:
        if rendezvous.store.add("left", 1) == nranks:
            with contextlib.suppress(OSError):
                os.unlink(path)

    rendezvous = Rendezvous(store, rank, nranks, clock, server, duplicate_hint, remove_file)
    comm = init_at("from_file", rendezvous, library, device, local_rank, config, watch=False)
    watch_at(comm, _WatchFile(path, comm))
    return comm


class _WatchFile:
    """torch's FileStore, created on the first write. Polling by add(key, 0) does not write, unlike in torch's."""

    def __init__(self, path: str, comm: Communicator) -> None:
        path = os.path.abspath(path)
        self._path = f"{path}.{comm.uid[:12]}{SUFFIX}"
        if comm.rank == 0:
            for old in glob.glob(f"{glob.escape(path)}.*{SUFFIX}"):  # of failed runs
                if old != self._path:
                    with contextlib.suppress(OSError):
                        os.unlink(old)
        if (own := recorder()) is not None:
            own.extra_files.append(self._path)
        self._made: Any = None

    def _store(self) -> Any:
        self._made = self._made or _file_store(self._path, Clock(_WATCH_LOCK_SECONDS))
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
    """Return torch's FileStore at `path`.

    The file is created, locked and checked first, because the constructor holds the GIL while it waits for a folder, a
    lock, or the rest of a file that is not a store. Only the current user can read the file."""
    from torch.distributed import FileStore

    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        with open(file, "rb") as found:
            _wait_for_lock(file, path, clock)
            usable = stat.S_ISREG(os.fstat(file).st_mode) and int.from_bytes(found.read(4), "little") <= _MAX_KEY_BYTES
        if usable:
            return FileStore(path)
    except (OSError, RuntimeError) as error:  # no space left, or a file system without locks
        if isinstance(error, NcclError):
            raise
        raise NcclSystemError(
            f"from_file: path is {shown(path)}, which cannot be the rendezvous file: "
            f"{getattr(error, 'strerror', None) or first_line(error)}\n"
            "  pass a path in an existing folder that all ranks share and can write to"
        ) from error
    raise NcclInvalidUsage(
        f"from_file: path {path} is not a rendezvous file: pass the path of a file that does not exist yet"
    )


def _wait_for_lock(file: int, path: str, clock: Clock) -> None:
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if clock.left() <= 0:
                raise NcclTimeout(
                    f"the lock of the rendezvous file {path} was not released within {clock.seconds()}: the process "
                    "that holds it is stopped, or its node is down"
                ) from None
            time.sleep(0.01)
