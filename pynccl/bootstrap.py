"""How the ranks of a job find each other: torchrun's environment, a process group, MPI, a store, a shared file.

Every way ends in `Communicator.init` with an id made by rank 0. A rank that cannot go on says so to the others before
they would wait for it, and a rank that never comes is named.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

from .communicator import DEFAULT_TIMEOUT, Communicator, get_unique_id
from .config import CommConfig
from .errors import NcclInvalidUsage, NcclRemoteError, NcclTimeout
from .library import Library, gpu_count, load


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
    launch = _launch(rank, timeout)
    from torch.distributed import PrefixStore

    return from_store(
        PrefixStore(str(next(launch.births)), launch.store),
        rank,
        nranks,
        device=device,
        config=config,
        timeout=timeout,
        library=library,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
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
    try:
        part = _prepare(library, device, local_rank, rank)
    except Exception as error:
        store.set("error", _could_not_start(rank, error))
        raise
    identity = _meet(store, rank, nranks, part.identity, deadline, timeout)
    left = max(deadline - time.monotonic(), 1.0)
    comm = Communicator.init(nranks, identity, rank, part.device, config, left, part.library)
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
    local = os.environ.get("LOCAL_RANK")

    def exchange(word: Any) -> list[Any]:
        words = [None] * nranks
        dist.all_gather_object(words, word, group=group)
        return words

    part, identity = _agree(exchange, library, device, int(local) if local else None, rank)
    return Communicator.init(nranks, identity, rank, part.device, config, timeout, part.library)


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
    rank, nranks = mpi_comm.Get_rank(), mpi_comm.Get_size()
    node = mpi_comm.Split_type(MPI.COMM_TYPE_SHARED)
    local_rank = node.Get_rank()
    node.Free()
    part, identity = _agree(mpi_comm.allgather, library, device, local_rank, rank)
    return Communicator.init(nranks, identity, rank, part.device, config, timeout, part.library)


class _Part(NamedTuple):
    """What a rank brings to the meeting; only rank 0 brings the id."""

    library: Library
    device: Any
    identity: bytes


def _prepare(library: Library | None, device: Any, local_rank: int | None, rank: int) -> _Part:
    """All that can fail on one rank alone, and so has to be done before the others wait for it."""
    library = library or load()
    device = _default_device(library, device, local_rank)
    return _Part(library, device, bytes(get_unique_id(library)) if rank == 0 else b"")


def _agree(
    exchange: Callable[[Any], list[Any]], library: Library | None, device: Any, local_rank: int | None, rank: int
) -> tuple[_Part, bytes]:
    """This rank's part and rank 0's id; `exchange` gives each rank all ranks' words. Raises if any rank failed."""
    try:
        part = _prepare(library, device, local_rank, rank)
    except Exception as error:
        exchange(_could_not_start(rank, error))
        raise
    words = exchange(part.identity)
    for word in words:
        if isinstance(word, str):
            raise NcclRemoteError(word)
    return part, words[0]


def _could_not_start(rank: int, error: Exception) -> str:
    return f"rank {rank} could not start: {type(error).__name__}: {error}"


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


class _Launch:
    """What the ranks of one launch share: the store, and the number of communicators already born from it."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.births = itertools.count()


# Kept until the process ends: rank 0's store may be the server of all the others, which may be a birth behind.
_launches: dict[tuple[str | None, ...], _Launch] = {}


def _launch(rank: int, timeout: float) -> _Launch:
    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    key = tuple(os.environ.get(name) for name in names)
    if key not in _launches:
        from torch.distributed import PrefixStore

        prefix = f"pynccl/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"  # the agent's store outlives a restart
        _launches[key] = _Launch(PrefixStore(prefix, _environment_store(rank, timeout)))
    return _launches[key]


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


def _meet(store: Any, rank: int, nranks: int, identity: bytes, deadline: float, timeout: float) -> bytes:
    """Wait until all ranks are there; return the id. Raises for ranks that are missing or could not start."""
    from torch.distributed import DistError

    try:
        if rank == 0:
            store.set("id", identity)
        store.set(f"rank/{rank}", b"here")
        if store.add("arrived", 1) == nranks:
            store.set("all", b"here")
        _wait_for_all(store, rank, nranks, deadline, timeout)
        met: bytes = store.get("id")
    except DistError as error:
        raise NcclRemoteError(
            f"rank {rank} of {nranks} lost the store at which the ranks meet: the process that serves it (rank 0, or "
            f"torchrun's agent) has ended; look for its first error ({error})"
        ) from error
    return met


def _wait_for_all(store: Any, rank: int, nranks: int, deadline: float, timeout: float) -> None:
    # Two questions a turn, whatever the number of ranks. Not store.wait(), which would not see an error, and warns.
    pause = 0.001
    while not store.check(["all"]):
        if store.check(["error"]):
            raise NcclRemoteError(store.get("error").decode())
        if time.monotonic() > deadline:
            missing = [r for r in range(nranks) if not store.check([f"rank/{r}"])]
            raise NcclTimeout(
                f"rank {rank} of {nranks} waited {timeout:g} s: ranks {missing} never came\n"
                "  look for their first error; a longer timeout= helps if they are only slow"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


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
