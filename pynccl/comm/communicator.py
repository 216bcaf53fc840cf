"""Communicator: all that this folder has under one name."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from ..bindings.abi import DataType, MemStat, RedOp, Result
from ..bindings.errors import NcclInvalidUsage
from ..bindings.library import Library
from ..bindings.structs import CommConfig
from ..watch import watchdog
from ..watch.track import Identity, Track
from .base import DEFAULT_TIMEOUT, Origin
from .collectives import Collectives
from .collectives_v import CollectivesV
from .consistency import compare_texts, refuse_capture
from .deadline import wait_nonblocking
from .finalize import Finalize, register_open
from .init import Init
from .memory import Registration, Window
from .plan import Planner
from .redop import PreMulSum
from .rma import Rma

Way = TypeVar("Way", bound=Callable[..., Any])

_bootstrap: dict[str, Callable[..., Communicator]] = {}


def bootstrap(function: Way) -> Way:
    """Decorate a function of `pynccl.bootstrap`, which stands on this module: Communicator.from_env is its from_env."""
    _bootstrap[function.__name__] = function
    return function


class Communicator(Collectives, CollectivesV, Rma, Init, Finalize):
    """One rank's handle on a clique of ranks.

    rank     this rank, 0..size-1
    size     number of ranks, N
    device   "cuda:1", or "cpu" with the host library
    library  the `Library` that carries it
    timeout  seconds that a split, an end, a nonblocking call may take; None: for ever

    A context manager: destroyed on a clean exit, aborted on an exception. What is still open when the process ends is
    closed then. Methods that make it: `Init`; that move data: `Collectives`, `CollectivesV`, `Rma`; that end it:
    `Finalize`. copy() and deepcopy() give the same one, so that a module that holds it can be copied. What comes out of
    a pickle knows its rank and size alone: all else raises, and says what to do.
    """

    def __init__(
        self,
        handle: int,
        library: Library,
        timeout: float | None = DEFAULT_TIMEOUT,
        config: CommConfig | None = None,
        track: Track | Identity | None = None,
    ) -> None:
        """Take over an ncclComm_t (its integer value) that was made by `library`, with `config` if that is known.

        track  its place in the flight recorder, where it has one already"""
        super().__init__(handle, library, timeout, config, track)
        register_open(self)
        watchdog.prepare()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Unpickled, (self.origin,)

    # How the ranks find each other

    @classmethod
    def from_env(cls, **options: Any) -> Communicator:
        """The communicator of all ranks of a torchrun launch: see `bootstrap.from_env`."""
        return _bootstrap["from_env"](**options)

    @classmethod
    def from_store(cls, store: Any, rank: int, nranks: int, **options: Any) -> Communicator:
        """The communicator of ranks that share a torch.distributed store: see `bootstrap.from_store`."""
        return _bootstrap["from_store"](store, rank, nranks, **options)

    @classmethod
    def from_file(cls, path: str, rank: int, nranks: int, **options: Any) -> Communicator:
        """The communicator of ranks that share a file system: see `bootstrap.from_file`."""
        return _bootstrap["from_file"](path, rank, nranks, **options)

    @classmethod
    def from_process_group(cls, group: Any = None, **options: Any) -> Communicator:
        """The communicator of a torch.distributed process group: see `bootstrap.from_process_group`."""
        return _bootstrap["from_process_group"](group, **options)

    @classmethod
    def from_mpi(cls, mpi_comm: Any = None, **options: Any) -> Communicator:
        """The communicator of an mpi4py communicator: see `bootstrap.from_mpi`."""
        return _bootstrap["from_mpi"](mpi_comm, **options)

    # Operations beside those that move data

    @property
    def plan(self) -> Planner:
        """Its operations, prepared instead of launched: `plan = comm.plan.all_reduce(x, x); plan()`. See plan.py."""
        return Planner(self)

    def mem_stats(self) -> dict[str, int]:
        """NCCL's own memory on this device, in bytes (NCCL >= 2.29): suspend, suspended (0 or 1), persist, total."""
        stats, value = {}, ctypes.c_uint64()
        for stat in MemStat:
            self._status("ncclCommMemStats", int(stat), ctypes.byref(value))
            stats[stat.name.removeprefix("GPU_MEM_").lower()] = value.value
        return stats

    def revoke(self) -> None:
        """Fail what is in flight on this rank and refuse new operations, so that all can shrink() (NCCL >= 2.28)."""
        self._status("ncclCommRevoke", 0)
        self._finalized = True  # NCCL has nothing left to flush, and a finalize is invalid
        # It comes to rest in its own time, and must not be shrunk, split or destroyed before. How what was in flight
        # has ended is not our result.
        wait_nonblocking(self.library, self.handle, Result.IN_PROGRESS, self.timeout, "ncclCommRevoke")

    def suspend(self) -> None:
        """Give NCCL's dynamic memory back until resume(); no operation may run in between (NCCL >= 2.29)."""
        with self.lock, self._recorded("suspend", weight=0):
            self._status("ncclCommSuspend", 1)

    def resume(self) -> None:
        """End a suspend()."""
        with self.lock, self._recorded("resume", weight=0):
            self._status("ncclCommResume")

    def register(self, buf: Any) -> Registration:
        """Register a buffer with this communicator for zero-copy (NCCL >= 2.19). A context manager; close() ends it."""
        return Registration(self, buf)

    def window(self, buf: Any, *, flags: int | None = None) -> Window:
        """A memory window on a buffer of `mem_alloc`, registered by all ranks together (NCCL >= 2.27).

        For symmetric-memory collectives and `put_signal`. A context manager; close() ends it. See `memory.Window`."""
        return Window(self, buf, flags)

    def pre_mul_sum(self, scalar: Any, dtype: Any = None) -> PreMulSum:
        """The operator sum_q scalar_q * send_q, for buffers of `dtype`; each rank may give its own scalar.

        scalar  a number, read now (then dtype is required), or a buffer of one element on the communicator's device,
                read when the operation runs
        """
        self.check_alive()
        return PreMulSum(self, scalar, dtype)

    def barrier(self) -> None:
        """Block the caller until every rank has called it. Refused in the capture of a CUDA graph."""
        self.check_alive()
        refuse_capture(self.library, "barrier()", "Call it before the capture or after it")
        if self.checking:
            compare_texts({self: "barrier()"})
        with self.lock:  # to the end: a comparison of another thread goes through the same memory
            self.check_alive()
            scratch = self.scratch(4)
            args = (scratch.address, scratch.address, 1, int(DataType.INT32), int(RedOp.SUM))
            with self._recorded("barrier"):
                self._check_result(self.library.ncclAllReduce(*args, self.handle, scratch.stream), "barrier")
                scratch.wait()
            self.check_alive()  # an abort ends the wait too, and is no meeting of the ranks


def init_all(devices: int | Sequence[Any] | None = None, *, library: Library | None = None) -> list[Communicator]:
    """One communicator per device, all in this process: see `Communicator.init_all`. For notebooks and small jobs."""
    return Communicator.init_all(devices, library=library)


class Unpickled(Communicator):
    """What stands for a communicator that was pickled, in whatever had it: its rank, its size, its origin."""

    _handle = None

    def __init__(self, origin: Origin) -> None:
        self.rank, self.size, self.origin = origin.rank, origin.size, origin

    def check_alive(self) -> NoReturn:
        raise NcclInvalidUsage(
            f"this communicator was rank {self.rank} of {self.size} when it was pickled, and is connected with no "
            "other rank now: call pynccl_autograd.set_communicator(module, comm) on every rank, with the module "
            "that has it and a communicator of as many ranks; or make one with Communicator.init"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.check_alive()

    def __repr__(self) -> str:
        return f"<pynccl.Communicator rank {self.rank} of {self.size}, out of a pickle>"
