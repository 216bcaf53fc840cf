"""Communicator: birth, properties, split, shrink and grow."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..bindings.abi import SPLIT_NOCOLOR, DataType, MemStat, RedOp, Result, UniqueId
from ..bindings.errors import NcclInvalidUsage
from ..bindings.library import Library, chosen, gpu_count
from ..bindings.resource import Shared
from ..bindings.structs import CommConfig, struct_of
from ..bindings.values import INT_MAX, INT_MIN, integer, listed, seconds
from ..interop.buffers import CPU, device_name
from ..interop.devices import device_ordinal
from . import consistency, init, lifecycle
from .collectives import Collectives
from .collectives_v import Uneven
from .finalize import Finalize
from .init import get_unique_id
from .memory import Registration, Window
from .plan import Planner
from .redop import PreMulSum
from .rma import OneSided
from .scratch import Scratch

_MOST_DEVICES = 1 << 16
DEFAULT_TIMEOUT = 60.0  # seconds that a birth or an end waits for the other ranks

__all__ = ["DEFAULT_TIMEOUT", "Communicator", "get_unique_id"]


class Communicator(Collectives, Uneven, OneSided, Finalize, Shared):
    """One rank's handle on a clique of ranks.

    rank     this rank, 0..size-1
    size     number of ranks, N
    device   "cuda:1", or "cpu" with the host library
    library  the `Library` that carries it
    timeout  seconds that a split, an end, a nonblocking call may take; None: for ever

    A context manager: destroyed on a clean exit, aborted on an exception. What is still open when the process ends is
    closed then. Methods that move data: `Collectives`, `Uneven`, `OneSided`; those that end it: `Finalize`. copy() and
    deepcopy() give the same one, so that a module that holds it can be copied; it cannot be pickled.
    """

    def __init__(
        self,
        handle: int,
        library: Library,
        timeout: float | None = DEFAULT_TIMEOUT,
        config: CommConfig | None = None,
    ) -> None:
        """Take over an ncclComm_t (its integer value) that was made by `library`, with `config` if that is known."""
        self._handle: int | None = handle
        self.library = library
        self._config = config
        self.lock = threading.RLock()
        self.timeout = timeout
        self.rank = self._property("ncclCommUserRank")
        self.size = self._property("ncclCommCount")
        self.device_index = self._property("ncclCommCuDevice")
        self._ordinal = CPU if library.is_host else self.device_index
        self.device = device_name(self._ordinal)
        self._check = consistency.enabled()
        self._end = ""
        self._finalized = False
        self._scratch: Scratch | None = None
        self._unused_operators: list[int] = []  # nobody holds them any more: see operators.Made
        self._site = consistency.call_site()
        self._prepare_launches()
        lifecycle.opened(self)

    # Birth

    @classmethod
    def init(
        cls,
        nranks: int,
        unique_id: UniqueId | bytes | Sequence[UniqueId | bytes],
        rank: int,
        device: Any = None,
        config: CommConfig | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
        library: Library | None = None,
    ) -> Communicator:
        """Join rank `rank` of `nranks`; returns when all ranks have joined with the same id.

        unique_id  from get_unique_id() on one rank; or a list of ids made on several ranks, equal everywhere, which
                   speeds up the birth of large communicators (NCCL >= 2.23)
        device     ordinal or name of this rank's GPU; None or "cuda": the current one. The host library has the CPU
                   only. The thread's current GPU stays what it is: pass device=comm.device to what makes tensors, or
                   call torch.cuda.set_device(comm.device).
        timeout    seconds to wait for the other ranks; None: for ever.

        Raises ValueError for bad arguments, NcclTimeout if a rank never comes, NcclSystemError without a driver.
        """
        rank, nranks = init.check_rank(rank, nranks)
        timeout = seconds(timeout)
        ids = [init.as_unique_id(one) for one in (unique_id if isinstance(unique_id, (list, tuple)) else [unique_id])]
        if not 1 <= len(ids) <= nranks:
            raise ValueError(f"unique_id is a list of {len(ids)} ids, expected 1 to {nranks} for {nranks} ranks")
        library = chosen(library)
        ordinal = init.choose_device(library, device)
        return cls(init.join(library, nranks, ids, rank, ordinal, config, timeout), library, timeout, config)

    @classmethod
    def init_all(
        cls, devices: int | Sequence[Any] | None = None, *, library: Library | None = None
    ) -> list[Communicator]:
        """One communicator per device of this process, rank i on devices[i].

        devices  a number of devices, a list of ordinals or names, or None for all GPUs. The host library takes a
                 number: so many ranks in one process (None: 1).

        Calls to several of them from one thread belong in one `pynccl.group`.
        """
        library = chosen(library)
        if devices is None:
            devices = 1 if library.is_host else gpu_count()
        if isinstance(devices, Sequence) and not isinstance(devices, (str, bytes, bytearray)):
            ordinals = [device_ordinal(device, "devices: device") for device in devices]
        else:
            ordinals = list(range(integer(devices, "devices", 0, _MOST_DEVICES, "a number of devices, or a list")))
        if not ordinals:
            raise ValueError(f"devices is {devices!r}, expected at least one")
        return [cls(handle, library) for handle in init.init_all(library, ordinals)]

    @classmethod
    def join_grown(
        cls,
        nranks: int,
        unique_id: UniqueId | bytes,
        rank: int,
        device: Any = None,
        config: CommConfig | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
        library: Library | None = None,
    ) -> Communicator:
        """Enter, as new rank `rank`, a communicator that its members `grow` to `nranks` (NCCL >= 2.29)."""
        rank, nranks = init.check_rank(rank, nranks)
        timeout = seconds(timeout)
        library = chosen(library)
        ordinal = init.choose_device(library, device)
        struct = struct_of(config, CommConfig, library)
        identity = init.as_unique_id(unique_id)
        return cls(init.grow(library, 0, nranks, identity, rank, ordinal, struct, timeout), library, timeout, config)

    @classmethod
    def from_env(cls, **options: Any) -> Communicator:
        """The communicator of all ranks of a torchrun launch: see `bootstrap.from_env`."""
        from ..bootstrap import from_env

        return from_env(**options)

    @classmethod
    def from_process_group(cls, group: Any = None, **options: Any) -> Communicator:
        """The communicator of a torch.distributed process group: see `bootstrap.from_process_group`."""
        from ..bootstrap import from_process_group

        return from_process_group(group, **options)

    @classmethod
    def from_mpi(cls, mpi_comm: Any = None, **options: Any) -> Communicator:
        """The communicator of an mpi4py communicator: see `bootstrap.from_mpi`."""
        from ..bootstrap import from_mpi

        return from_mpi(mpi_comm, **options)

    # Relatives

    def split(self, color: int | None, key: int = 0, config: CommConfig | None = None) -> Communicator | None:
        """The communicator of all ranks that pass the same color, ordered by key, then by rank here.

        Every rank must call it. color=None (or NCCL_SPLIT_NOCOLOR, -1): this rank is in none and gets None.
        """
        colors = f"an integer >= 0, up to {INT_MAX}, or None for no communicator"
        number = SPLIT_NOCOLOR if color is None else integer(color, "split: color", SPLIT_NOCOLOR, INT_MAX, colors)
        key = integer(key, "split: key", INT_MIN, INT_MAX)
        if self.checking:
            consistency.compare_texts({self: "split()"})
        struct = struct_of(config, CommConfig, self.library, "split")
        return self._derive(
            lambda new: self.library.ncclCommSplit(self.handle, number, key, new, struct),
            f"ncclCommSplit(color={number}, key={key}) on rank {self.rank} of {self.size}",
            config,
        )

    def shrink(self, exclude: Sequence[int], *, abort: bool = False, config: CommConfig | None = None) -> Communicator:
        """The communicator of all ranks but `exclude`, which do not call it (NCCL >= 2.27).

        abort  first stop what is in flight here: for when an excluded rank has failed
        """
        given = listed(exclude, "shrink: exclude", "the ranks to leave out, a list of them")
        ranks = [self._rank("shrink", "exclude", rank) for rank in given]
        if not ranks or self.rank in ranks or len(set(ranks)) != len(ranks):
            raise ValueError(f"shrink: exclude is {ranks} on rank {self.rank}, expected other ranks, each once")
        struct = struct_of(config, CommConfig, self.library, "shrink")
        array = (ctypes.c_int * len(ranks))(*ranks)
        made = self._derive(
            lambda new: self.library.ncclCommShrink(self.handle, array, len(ranks), new, struct, int(abort)),
            f"ncclCommShrink(exclude={ranks}) on rank {self.rank} of {self.size}",
            config,
        )
        assert made is not None  # only a split leaves ranks without
        return made

    def grow_id(self) -> UniqueId:
        """The id for one `grow` of this communicator: give it to the new ranks, and to grow() on this rank."""
        unique_id = UniqueId()
        with self.lock:
            self._status("ncclCommGetUniqueId", ctypes.byref(unique_id))
        return unique_id

    def grow(
        self, nranks: int, unique_id: UniqueId | bytes | None = None, *, config: CommConfig | None = None
    ) -> Communicator:
        """This communicator with new ranks, size..nranks-1, which call `join_grown` meanwhile (NCCL >= 2.29).

        unique_id  what grow_id() returned, on the rank that called it; None on the other members
        """
        more = f"more than the {self.size} ranks that there are, up to {INT_MAX}"
        nranks = integer(nranks, "grow: nranks", self.size + 1, INT_MAX, more)
        struct = struct_of(config, CommConfig, self.library, "grow")
        identity = None if unique_id is None else init.as_unique_id(unique_id)
        with self.lock:
            handle = init.grow(
                self.library, self.handle, nranks, identity, -1, self._own_ordinal(), struct, self.timeout
            )
        return type(self)(handle, self.library, self.timeout, config or self._config)

    def _derive(self, call: Callable[[Any], int], what: str, config: CommConfig | None) -> Communicator | None:
        self.check_alive()
        with self.lock:
            handle = init.make(self.library, call, what, self._own_ordinal(), self.timeout, self.handle)
        return type(self)(handle, self.library, self.timeout, config or self._config) if handle else None

    def _own_ordinal(self) -> int | None:
        return None if self.library.is_host else self.device_index

    # State

    @property
    def alive(self) -> bool:
        """Whether it can still be used: neither destroyed nor aborted."""
        return self._handle is not None

    @property
    def ordinal(self) -> int:
        """CUDA ordinal of the device; -1 for the CPU."""
        return self._ordinal

    @property
    def checking(self) -> bool:
        """Whether calls are compared across ranks (PYNCCL_CHECK=1 when it was born)."""
        return self._check

    @property
    def plan(self) -> Planner:
        """Its operations, prepared instead of launched: `plan = comm.plan.all_reduce(x, x); plan()`. See plan.py."""
        return Planner(self)

    def check_alive(self) -> None:
        if self._handle is None:
            raise NcclInvalidUsage(
                f"this communicator (rank {self.rank} of {self.size} on {self.device}) was {self._end}; "
                "make a new one with Communicator.init"
            )

    def async_error(self) -> Result:
        """What went wrong since the launch: SUCCESS, IN_PROGRESS (nonblocking), or an error code."""
        code = ctypes.c_int()
        self._status("ncclCommGetAsyncError", ctypes.byref(code))
        return Result(code.value)

    def check_async_error(self) -> None:
        """Raise what `async_error` reports, if it is an error."""
        code = self.async_error()
        if code not in (Result.SUCCESS, Result.IN_PROGRESS):
            raise self.library.error(code, "an operation in flight", self._handle)

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
        lifecycle.settle(self.library, self.handle, Result.IN_PROGRESS, self.timeout, "ncclCommRevoke")

    def suspend(self) -> None:
        """Give NCCL's dynamic memory back until resume(); no operation may run in between (NCCL >= 2.29)."""
        with self.lock:
            self._status("ncclCommSuspend", 1)

    def resume(self) -> None:
        """End a suspend()."""
        with self.lock:
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
        consistency.refuse_capture(self.library, "barrier()", "Call it before the capture or after it")
        if self.checking:
            consistency.compare_texts({self: "barrier()"})
        with self.lock:  # to the end: a comparison of another thread goes through the same memory
            self.check_alive()
            scratch = self.scratch(4)
            args = (scratch.address, scratch.address, 1, int(DataType.INT32), int(RedOp.SUM))
            self._check_result(self.library.ncclAllReduce(*args, self.handle, scratch.stream), "barrier")
            scratch.wait()
            self.check_alive()  # an abort ends the wait too, and is no meeting of the ranks

    def scratch(self, nbytes: int) -> Scratch:
        """At least `nbytes` bytes for the communicator's own operations; for the holder of its lock."""
        if self._scratch is None or self._scratch.nbytes < nbytes:
            self._scratch = Scratch(nbytes, self._ordinal, self.library)
        return self._scratch

    def __repr__(self) -> str:
        state = "" if self.alive else f", {self._end}"
        return f"<pynccl.Communicator rank {self.rank} of {self.size} on {self.device}{state}>"

    def _property(self, function: str) -> int:
        value = ctypes.c_int()
        self._status(function, ctypes.byref(value))
        return value.value

    def _status(self, function: str, *args: Any) -> None:
        """A C call on this communicator that launches nothing."""
        handle = self.handle
        code = getattr(self.library, function)(handle, *args)
        if code:
            self.library.check(lifecycle.settle(self.library, handle, code, self.timeout, function), function, handle)
