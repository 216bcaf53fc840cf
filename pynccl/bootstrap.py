"""How the ranks of a job find each other: torchrun's environment, a process group, MPI, a store, a shared file.

Every way ends in `Communicator.init` with an id made by rank 0. A rank that cannot go on says so to the others before
they would wait for it, and a rank that never comes is named.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from datetime import timedelta
from typing import Any

from .abi import UNIQUE_ID_BYTES
from .communicator import DEFAULT_TIMEOUT, Communicator, get_unique_id
from .config import CommConfig
from .errors import NcclError, NcclInvalidUsage, NcclRemoteError, NcclTimeout
from .library import Library, gpu_count, load

_births = itertools.count()  # from_env calls of this process; the same number on every rank


def from_env(
    *,
    device: Any = None,
    config: CommConfig | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    library: Library | None = None,
) -> Communicator:
    """The communicator of all ranks of a `torchrun` launch (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT).

    device   this rank's GPU; None: number LOCAL_RANK. The host library has the CPU only.
    timeout  seconds to wait for the other ranks

    Every rank must call it equally often. Raises NcclInvalidUsage outside a launch, NcclTimeout naming the ranks that
    never came, NcclRemoteError with the reason if another rank could not go on.
    """
    rank, nranks = _from_environment()
    store = _environment_store(rank, timeout)
    from torch.distributed import PrefixStore

    name = f"pynccl/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_births)}"
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    return from_store(
        PrefixStore(name, store),
        rank,
        nranks,
        device=device,
        config=config,
        timeout=timeout,
        library=library,
        local_rank=local_rank,
    )


def from_store(
    store: Any,
    rank: int,
    nranks: int,
    *,
    device: Any = None,
    config: CommConfig | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    library: Library | None = None,
    local_rank: int | None = None,
) -> Communicator:
    """The communicator of ranks 0..nranks-1 that share a torch.distributed store, which serves this one birth."""
    if not 0 <= rank < nranks:
        raise ValueError(f"rank is {rank}, expected 0..{nranks - 1} for {nranks} ranks")
    deadline = time.monotonic() + timeout
    identity = b""
    try:
        library = library or load()
        device = _default_device(library, device, local_rank)
        if rank == 0:
            identity = bytes(get_unique_id(library))
    except Exception as error:
        store.set(f"rank/{rank}", f"error: {type(error).__name__}: {error}")
        raise
    store.set(f"rank/{rank}", b"ready" + identity)
    identity = _meet(store, rank, nranks, deadline, timeout)
    left = max(deadline - time.monotonic(), 1.0)
    comm = Communicator.init(nranks, identity, rank, device, config, left, library)
    comm.timeout = timeout
    return comm


def from_file(path: str, rank: int, nranks: int, **options: Any) -> Communicator:
    """The communicator of ranks that share a file system; `path` must not exist yet. Options: `from_store`."""
    from torch.distributed import FileStore

    return from_store(FileStore(path, nranks), rank, nranks, **options)


def from_process_group(
    group: Any = None,
    *,
    device: Any = None,
    config: CommConfig | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    library: Library | None = None,
) -> Communicator:
    """The communicator of the ranks of a torch.distributed process group, or of a one-dimensional DeviceMesh.

    group   None: the default group
    device  None: LOCAL_RANK's GPU if set, else the current one
    """
    import torch.distributed as dist

    if hasattr(group, "get_group"):
        group = group.get_group()
    rank, nranks = dist.get_rank(group), dist.get_world_size(group)
    root = dist.get_global_rank(group, 0) if group is not None else 0
    library = library or load()
    message: list[Any] = [_id_or_error(library) if rank == 0 else None]
    dist.broadcast_object_list(message, src=root, group=group)
    local = os.environ.get("LOCAL_RANK")
    device = _default_device(library, device, int(local) if local else None)
    return Communicator.init(nranks, _unwrap(message[0]), rank, device, config, timeout, library)


def from_mpi(
    mpi_comm: Any = None,
    *,
    device: Any = None,
    config: CommConfig | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    library: Library | None = None,
) -> Communicator:
    """The communicator of the ranks of an mpi4py communicator (None: COMM_WORLD).

    device  None: the rank's number among the ranks of its node
    """
    from mpi4py import MPI

    mpi_comm = mpi_comm or MPI.COMM_WORLD
    library = library or load()
    rank, nranks = mpi_comm.Get_rank(), mpi_comm.Get_size()
    message = mpi_comm.bcast(_id_or_error(library) if rank == 0 else None, root=0)
    local_rank = None
    if device is None and not library.is_host:
        node = mpi_comm.Split_type(MPI.COMM_TYPE_SHARED)
        local_rank = node.Get_rank()
        node.Free()
    device = _default_device(library, device, local_rank)
    return Communicator.init(nranks, _unwrap(message), rank, device, config, timeout, library)


def _from_environment() -> tuple[int, int]:
    """(rank, world size), or an error with the line that would have worked."""
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    line = "torchrun --standalone --nproc-per-node=2 " + " ".join([sys.argv[0] or "train.py", *sys.argv[1:]])
    if missing:
        raise NcclInvalidUsage(
            f"{', '.join(missing)} not set: this process was not started by torchrun. Start it with\n  {line}\n"
            "or pass rank, size and id yourself to Communicator.init"
        )
    try:
        rank, nranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except ValueError:
        rank, nranks = -1, 0
    if not 0 <= rank < nranks:
        raise NcclInvalidUsage(
            f"RANK={os.environ['RANK']!r}, WORLD_SIZE={os.environ['WORLD_SIZE']!r}: expected integers with 0 <= RANK < "
            f"WORLD_SIZE. torchrun sets both:\n  {line}"
        )
    return rank, nranks


def _environment_store(rank: int, timeout: float) -> Any:
    """The store at MASTER_ADDR:MASTER_PORT: torchrun's own if its agent serves one, else rank 0 serves it."""
    from torch.distributed import DistError, TCPStore

    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        return TCPStore(
            host,
            int(port),
            is_master=rank == 0 and not agent,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=True,  # torch.distributed may serve its store at the same port in this process
        )
    except (DistError, RuntimeError) as error:
        server = "torchrun's agent" if agent else "rank 0"
        raise NcclTimeout(
            f"rank {rank} reached no store at {host}:{port} within {timeout:g} s: has {server} started there? ({error})"
        ) from error


def _meet(store: Any, rank: int, nranks: int, deadline: float, timeout: float) -> bytes:
    """Wait until all ranks are there; return the id. Raises for the ranks that are missing or could not go on."""
    keys = [f"rank/{r}" for r in range(nranks)]
    # In slices, because one wait would hide the error of a rank behind another that is missing.
    while not _wait(store, keys, min(0.5, deadline - time.monotonic())):
        _raise_errors(store, [key for key in keys if store.check([key])])
        if time.monotonic() > deadline:
            missing = [r for r in range(nranks) if not store.check([keys[r]])]
            raise NcclTimeout(
                f"rank {rank} of {nranks} waited {timeout:g} s: ranks {missing} never came\n"
                "  look for their first error; a longer timeout= helps if they are only slow"
            )
    _raise_errors(store, keys)
    identity: bytes = store.get(keys[0]).removeprefix(b"ready")
    return identity


def _wait(store: Any, keys: list[str], seconds: float) -> bool:
    from torch.distributed import DistStoreError

    try:
        store.wait(keys, timedelta(seconds=max(seconds, 0.001)))
    except (DistStoreError, RuntimeError):
        return False
    return True


def _raise_errors(store: Any, keys: list[str]) -> None:
    for key in keys:
        value = store.get(key)
        if value.startswith(b"error: "):
            raise NcclRemoteError(f"rank {key.partition('/')[2]} could not start: {value[7:].decode()}")


def _id_or_error(library: Library) -> bytes | str:
    try:
        return bytes(get_unique_id(library))
    except NcclError as error:
        return f"{type(error).__name__}: {error}"


def _unwrap(message: Any) -> bytes:
    if isinstance(message, bytes) and len(message) == UNIQUE_ID_BYTES:
        return message
    raise NcclRemoteError(f"rank 0 could not make an id: {message}")


def _default_device(library: Library, device: Any, local_rank: int | None) -> Any:
    """`device`, else this rank's own GPU."""
    if device is not None or library.is_host or local_rank is None:
        return device
    count = gpu_count()
    if count and local_rank >= count:
        raise ValueError(
            f"LOCAL_RANK is {local_rank}, but this process sees {count} GPUs: start --nproc-per-node={count}, or pass "
            "device= to share one"
        )
    return local_rank
