"""Communicator: what can be done with one, by name. Its methods are functions of the files beside this one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, TypeVar

from ..bindings.abi import DataType, MemStat, RedOp, Result, UniqueId
from ..bindings.library import Library, chosen, gpu_count
from ..bindings.structs import CommConfig
from ..bindings.values import integer, seconds
from ..interop.devices import device_ordinal
from ..watch import watchdog
from ..watch.recorder import recorder
from ..watch.track import Identity, Track, uid_of
from . import collectives, collectives_v, finalize as ending, init as making, rma
from .base import DEFAULT_TIMEOUT, Comm
from .consistency import compare_texts, refuse_capture
from .deadline import wait_nonblocking
from .memory import Registration, Window
from .plan import Planner
from .redop import PreMulSum

Self = TypeVar("Self", bound="Communicator")
_MOST_DEVICES = 1 << 16
Way = TypeVar("Way", bound=Callable[..., Any])

_bootstrap: dict[str, Callable[..., Communicator]] = {}


def bootstrap(function: Way) -> Way:
    """Decorate a function of `pynccl.bootstrap`, which stands on this module: Communicator.from_env is its from_env."""
    _bootstrap[function.__name__] = function
    return function


class Communicator(Comm):
    """One rank's handle on a clique of ranks.

    rank     this rank, 0..size-1
    size     number of ranks, N
    device   "cuda:1", or "cpu" with the host library
    library  the `Library` that carries it
    timeout  seconds that a split, an end, a nonblocking call may take; None: for ever

    A context manager: destroyed on a clean exit, aborted on an exception. What is still open when the process ends is
    closed then. copy() and deepcopy() give the same one, so that a module that holds it can be copied. It cannot be
    pickled.
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
        ending.register_open(self)
        watchdog.prepare()

    # How it is made: init.py, and by what shares an id among the ranks: pynccl.bootstrap

    @classmethod
    def init(
        cls: type[Self],
        nranks: int,
        unique_id: UniqueId | bytes | Sequence[UniqueId | bytes],
        rank: int,
        device: Any = None,
        config: CommConfig | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
        library: Library | None = None,
    ) -> Self:
        """Join rank `rank` of `nranks`; returns when all ranks have joined with the same id.

        unique_id  from get_unique_id() on one rank; or a list of ids made on several ranks, equal everywhere, which
                   speeds up the init of large communicators (NCCL >= 2.23)
        device     ordinal or name of this rank's GPU; None or "cuda": the current one. The host library has the CPU
                   only. The thread's current GPU stays what it is: pass device=comm.device to what makes tensors, or
                   call torch.cuda.set_device(comm.device).
        timeout    seconds to wait for the other ranks; None: for ever.

        Raises ValueError for bad arguments, NcclTimeout if a rank never comes, NcclSystemError without a driver.
        """
        rank, nranks = making.check_rank_of(rank, nranks)
        timeout = seconds(timeout)
        recorder()
        ids = [making.as_unique_id(one) for one in (unique_id if isinstance(unique_id, (list, tuple)) else [unique_id])]
        if not 1 <= len(ids) <= nranks:
            raise ValueError(f"unique_id is a list of {len(ids)} ids, expected 1 to {nranks} for {nranks} ranks")
        library = chosen(library)
        ordinal = making.choose_device(library, device)
        with making.beginning(uid_of(*map(bytes, ids)), rank, nranks, library, config, "init") as track:
            handle = making.comm_init_rank(library, nranks, ids, rank, ordinal, config, timeout)
        return cls(handle, library, timeout, config, track)

    @classmethod
    def init_all(
        cls: type[Self], devices: int | Sequence[Any] | None = None, *, library: Library | None = None
    ) -> list[Self]:
        """One communicator per device of this process, rank i on devices[i].

        devices  a number of devices, a list of ordinals or names, or None for all GPUs. The host library takes a
                 number: so many ranks in one process (None: 1).

        Calls to several of them from one thread belong in one `pynccl.group`.
        """
        library = chosen(library)
        recorder()
        if devices is None:
            devices = 1 if library.is_host else gpu_count()
        if isinstance(devices, Sequence) and not isinstance(devices, (str, bytes, bytearray)):
            ordinals = [device_ordinal(device, "devices: device") for device in devices]
        else:
            ordinals = list(range(integer(devices, "devices", 0, _MOST_DEVICES, "a number of devices, or a list")))
        if not ordinals:
            raise ValueError(f"devices is {devices!r}, expected at least one")
        known = Identity(uid_of(), "world", "")
        return [cls(handle, library, track=known) for handle in making.comm_init_all(library, ordinals)]

    @classmethod
    def join_grown(
        cls: type[Self],
        nranks: int,
        unique_id: UniqueId | bytes,
        rank: int,
        device: Any = None,
        config: CommConfig | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
        library: Library | None = None,
    ) -> Self:
        """Enter, as new rank `rank`, a communicator that its members `grow` to `nranks` (NCCL >= 2.29)."""
        rank, nranks = making.check_rank_of(rank, nranks)
        timeout = seconds(timeout)
        library = chosen(library)
        recorder()
        ordinal = making.choose_device(library, device)
        struct = making.make_struct(config, library)
        identity = making.as_unique_id(unique_id)
        with making.beginning(uid_of(bytes(identity)), rank, nranks, library, config, "init") as track:
            handle = making.comm_grow(library, 0, nranks, identity, rank, ordinal, struct, timeout)
        return cls(handle, library, timeout, config, track)

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

    # Others of its ranks: init.py

    split = making.split
    shrink = making.shrink
    grow_id = making.grow_id
    grow = making.grow

    # What moves data: collectives.py, collectives_v.py, rma.py; prepared: plan.py

    all_reduce = collectives.all_reduce
    broadcast = collectives.broadcast
    reduce = collectives.reduce
    all_gather = collectives.all_gather
    reduce_scatter = collectives.reduce_scatter
    all_to_all = collectives.all_to_all
    gather = collectives.gather
    scatter = collectives.scatter
    send = collectives.send
    recv = collectives.recv
    all_to_all_v = collectives_v.all_to_all_v
    all_gather_v = collectives_v.all_gather_v
    reduce_scatter_v = collectives_v.reduce_scatter_v
    gather_v = collectives_v.gather_v
    scatter_v = collectives_v.scatter_v
    put_signal = rma.put_signal
    signal = rma.signal
    wait_signal = rma.wait_signal

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
        self.check_alive()
        with self.lock, self._recorded("suspend", weight=0):
            self._status("ncclCommSuspend", 1)

    def resume(self) -> None:
        """End a suspend()."""
        self.check_alive()
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
                code = self.library.ncclAllReduce(*args, self.handle, scratch.stream)
                self._check_result(code, "barrier", self._newest())
                scratch.wait()
            self.check_alive()  # an abort ends the wait too, and is no meeting of the ranks

    # How it ends: finalize.py

    finalize = ending.finalize
    destroy = ending.destroy
    _abort_late = ending.abort_late

    def abort(self) -> None:
        """Stop what is in flight, also from another thread, and free the communicator. Twice is harmless.

        For several communicators of one process, `pynccl.abort(comms)`, which also says what happens to CUDA graphs."""
        ending.abort([self])

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is None:
            self.destroy()
        else:
            self.abort()

    def __del__(self) -> None:
        ending.collected(self)


for _name, _method in vars(Communicator).items():  # so errors and help() call it by the name that users know
    if isinstance(_method, FunctionType) and "." not in _method.__qualname__:
        _method.__qualname__ = f"Communicator.{_name}"


def init_all(devices: int | Sequence[Any] | None = None, *, library: Library | None = None) -> list[Communicator]:
    """One communicator per device, all in this process: see `Communicator.init_all`. For notebooks and small jobs."""
    return Communicator.init_all(devices, library=library)
