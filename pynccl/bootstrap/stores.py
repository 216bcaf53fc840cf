"""Ranks that share a torch.distributed store, or a file system."""

from __future__ import annotations

import os
from typing import Any

from ..bindings.library import Library
from ..bindings.structs import CommConfig
from ..bindings.values import instance, methods
from ..bindings.workers import Clock
from ..comm.base import DEFAULT_TIMEOUT
from ..comm.communicator import Communicator, bootstrap
from ..comm.init import check_rank_of
from .file_store import FileStore
from .join import init_at
from .rendezvous import Rendezvous, Wording

_AT_A_STORE = Wording(
    again="every process needs a rank of its own, and every call a store of its own, or PrefixStore(name, store)",
    size="nranks",
    server="the process that serves it",
)


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
    return init_at(Rendezvous(store, rank, nranks, clock, _AT_A_STORE), library, device, local_rank, config)


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
    something else.
    """
    clock = Clock(timeout)
    check_rank_of(rank, nranks)

    instance(path, (str, bytes, os.PathLike), "from_file: path", "the path of a file, a string")
    store = FileStore(path, clock)
    wording = Wording(
        again=f"every process needs a rank of its own; or {store.path} is left over from an earlier run: remove it",
        size="nranks",
        server=f"the file system of {store.path}",
    )
    rendezvous = Rendezvous(store, rank, nranks, clock, wording, met=lambda: store.leave(nranks))
    return init_at(rendezvous, library, device, local_rank, config)
