"""Rendezvous of an MPI launch, by mpi4py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

from ..bindings.errors import NcclError, NcclRemoteError, NcclTimeout
from ..bindings.library import Library
from ..bindings.structs import CommConfig
from ..bindings.values import methods
from ..bindings.workers import Clock, Wait
from ..comm.base import DEFAULT_TIMEOUT
from ..comm.communicator import Communicator, bootstrap
from .join import init, prepare
from .rendezvous import could_not_start

T = TypeVar("T")


@bootstrap
def from_mpi(
    mpi_comm: Any = None,
    *,
    device: Any = None,
    config: CommConfig | None = None,
    timeout: float | None = DEFAULT_TIMEOUT,
    library: Library | None = None,
) -> Communicator:
    """Create the communicator of the ranks of an mpi4py communicator (None: COMM_WORLD).

    device   None or "cuda": the GPU whose number is the rank's index on its node
    timeout  seconds for the MPI exchange and NCCL's init together. The exchange has no deadline without
             MPI_THREAD_MULTIPLE, which mpi4py requests by default.
    """
    try:
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"from_mpi: {error}; install mpi4py", name=error.name) from None
    clock = Clock(timeout, "from_mpi: timeout")
    mpi_comm = MPI.COMM_WORLD if mpi_comm is None else mpi_comm
    needed = ("Get_rank", "Get_size", "Split_type", "allgather")
    methods(mpi_comm, needed, "from_mpi: mpi_comm", "an mpi4py communicator, or None for COMM_WORLD")
    rank, nranks = mpi_comm.Get_rank(), mpi_comm.Get_size()
    threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE

    def timeout_error() -> NcclTimeout:
        return NcclTimeout(
            f"rank {rank} of {nranks} in the MPI communicator waited {clock.seconds()} for the others: a rank has not "
            "made this call, is stopped, or has exited\n"
            "  look for its first error; if it is only slow, pass a longer timeout="
        )

    def by_deadline(call: Callable[[], T]) -> T:
        return Wait(clock).run_in_worker(call, timeout_error) if threads else call()

    def number_on_node() -> int:
        node = mpi_comm.Split_type(MPI.COMM_TYPE_SHARED)
        number: int = node.Get_rank()
        node.Free()
        return number

    local_rank = by_deadline(number_on_node)
    try:
        setup = prepare("from_mpi", library, device, local_rank, rank, config)
    except Exception as error:
        with contextlib.suppress(NcclError):  # this rank's own error is more useful
            text = could_not_start(rank, error)
            by_deadline(lambda: mpi_comm.allgather(text))
        raise
    # From each rank: the id (rank 0), b"" (others), or an error text.
    replies = by_deadline(lambda: mpi_comm.allgather(setup.identity))
    for reply in replies:
        if isinstance(reply, str):
            raise NcclRemoteError(reply)
    return init(nranks, replies[0], rank, setup, config, clock)
