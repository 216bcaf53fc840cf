"""Ranks that can exchange words already: those of a torch.distributed process group, or of MPI."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any, TypeVar

from ..bindings.abi import UNIQUE_ID_BYTES
from ..bindings.errors import NcclError, NcclRemoteError, NcclTimeout
from ..bindings.library import Library
from ..bindings.structs import CommConfig
from ..bindings.values import attribute, methods, shown
from ..bindings.workers import Clock, Wait
from ..comm.base import DEFAULT_TIMEOUT
from ..comm.communicator import Communicator, bootstrap
from ..watch.track import uid_of
from .join import Brought, init, prepare, watch_at
from .rendezvous import could_not_start, first_line

T = TypeVar("T")
Word = bytes | str | None  # rank 0's id, why a rank could not start, or nothing to say
_WORD_BYTES = 4096


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
    timeout  seconds for the exchange in the group and NCCL's init together; the group's own timeout may end it earlier.
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
    on_cpu = "cpu:" in dist.get_backend_config(group)
    home = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())

    def exchange(word: Word) -> list[Word]:
        sent = torch.tensor(list(_packed(word)), dtype=torch.uint8, device=home)
        received = [torch.empty_like(sent) for _ in range(nranks)]
        if not on_cpu:
            torch.cuda.set_device(home)  # which every thread has its own of
        dist.all_gather(received, sent, group=group)
        return [_unpacked(bytes(one.tolist())) for one in received]

    patient = _patient(exchange, f"rank {rank} of the process group's {nranks}", clock)
    part, identity = _agree(patient, library, device, int(local) if local else None, rank, config)
    comm = init(nranks, identity, rank, part, config, clock)
    store = _store_of_torch(uid_of(identity))
    if store is not None:
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        watch_at(comm, store, serves=dist.get_rank() == 0 and not agent)
    return comm


def _store_of_torch(uid: str) -> Any:
    """A part of the default group's store, for the questions of ranks that are stuck. torch has no public name for it:
    where it is gone, ranks on other machines are not asked."""
    with contextlib.suppress(Exception):
        from torch.distributed import PrefixStore, distributed_c10d

        return PrefixStore(f"pynccl/{uid}", distributed_c10d._get_default_store())
    return None


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
    needed = ("Get_rank", "Get_size", "Split_type", "Allgather")
    methods(mpi_comm, needed, "from_mpi: mpi_comm", "an mpi4py communicator, or None for COMM_WORLD")
    rank, nranks = mpi_comm.Get_rank(), mpi_comm.Get_size()
    threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
    who = f"rank {rank} of the MPI communicator's {nranks}"

    def number_on_node(_: Any) -> int:
        node = mpi_comm.Split_type(MPI.COMM_TYPE_SHARED)
        number: int = node.Get_rank()
        node.Free()
        return number

    local_rank = (_patient(number_on_node, who, clock) if threads else number_on_node)(None)

    def exchange(word: Word) -> list[Word]:
        received = bytearray(_WORD_BYTES * nranks)
        mpi_comm.Allgather(bytearray(_packed(word)), received)
        return [_unpacked(bytes(received[at : at + _WORD_BYTES])) for at in range(0, len(received), _WORD_BYTES)]

    patient = _patient(exchange, who, clock) if threads else exchange
    part, identity = _agree(patient, library, device, local_rank, rank, config)
    return init(nranks, identity, rank, part, config, clock)


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


def _packed(word: Word) -> bytes:
    """As many bytes for every word, since buffers are exchanged, not pickles."""
    text = b"" if word is None else b"=" + word if isinstance(word, bytes) else b"!" + word.encode(errors="replace")
    return text[:_WORD_BYTES].ljust(_WORD_BYTES, b"\0")


def _unpacked(data: bytes) -> Word:
    if data[:1] == b"=":
        return data[1 : 1 + UNIQUE_ID_BYTES]
    return data[1:].rstrip(b"\0").decode(errors="replace") if data[:1] == b"!" else None


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
    exchange: Callable[[Word], list[Word]],
    library: Library | None,
    device: Any,
    local_rank: int | None,
    rank: int,
    config: CommConfig | None,
) -> tuple[Brought, bytes]:
    """This rank's part and rank 0's id; `exchange` gives each rank all ranks' words. Raises if any rank failed."""
    try:
        part = prepare(library, device, local_rank, rank, config)
    except Exception as error:
        with contextlib.suppress(NcclError):  # this rank's own error says more
            exchange(could_not_start(rank, error))
        raise
    words = exchange(part.identity)
    for word in words:
        if isinstance(word, str):
            raise NcclRemoteError(word)
    assert isinstance(words[0], bytes)
    return part, words[0]
