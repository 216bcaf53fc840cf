"""The ranks of an MPI launch, by mpi4py."""

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
    """The communicator of the ranks of an mpi4py communicator (None: COMM_WORLD).

    device   None or "cuda": the rank's number among the ranks of its node
    timeout  seconds for the exchange by MPI and NCCL's init together. Without MPI_THREAD_MULTIPLE, which mpi4py asks
             for unless told otherwise, the exchange has no deadline.
    """
    from mpi4py import MPI

    clock = Clock(timeout)
    mpi_comm = MPI.COMM_WORLD if mpi_comm is None else mpi_comm
    needed = ("Get_rank", "Get_size", "Split_type", "allgather")
    methods(mpi_comm, needed, "from_mpi: mpi_comm", "an mpi4py communicator, or None for COMM_WORLD")
    rank, nranks = mpi_comm.Get_rank(), mpi_comm.Get_size()
    threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE

    def late() -> NcclTimeout:
        return NcclTimeout(
            f"rank {rank} of the MPI communicator's {nranks} waited {clock.seconds()} for the others: a rank has not "
            "made this call, is stopped, or has ended\n"
            "  look for its first error; a longer timeout= helps if it is only slow"
        )

    def by_deadline(call: Callable[[], T]) -> T:
        return Wait(clock).beside(call, late) if threads else call()

    def number_on_node() -> int:
        node = mpi_comm.Split_type(MPI.COMM_TYPE_SHARED)
        number: int = node.Get_rank()
        node.Free()
        return number

    local_rank = by_deadline(number_on_node)
    try:
        part = prepare(library, device, local_rank, rank, config)
    except Exception as error:
        with contextlib.suppress(NcclError):  # this rank's own error says more
            text = could_not_start(rank, error)
            by_deadline(lambda: mpi_comm.allgather(text))
        raise
    # Rank 0's id, b"" of the others, or why a rank could not start.
    words = by_deadline(lambda: mpi_comm.allgather(part.identity))
    for word in words:
        if isinstance(word, str):
            raise NcclRemoteError(word)
    return init(nranks, words[0], rank, part, config, clock)
