"""Communicator: birth, properties, split, shrink and grow, end."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from . import birth, check, lifecycle
from .abi import SPLIT_NOCOLOR, DataType, MemStat, RedOp, Result, UniqueId
from .birth import get_unique_id
from .buffers import CPU, device_name
from .collectives import Collectives
from .config import CommConfig
from .errors import NcclError, NcclInvalidUsage, NcclTimeout
from .library import Library, gpu_count, load
from .memory import Registration, Window
from .onesided import OneSided
from .operators import PreMulSum
from .plan import Planner
from .scratch import Scratch
from .streams import device_ordinal, set_device

DEFAULT_TIMEOUT = 60.0  # seconds that a birth or an end waits for the other ranks

__all__ = ["DEFAULT_TIMEOUT", "Communicator", "get_unique_id"]


class Communicator(Collectives, OneSided):
    """One rank's handle on a clique of ranks.

    rank     this rank, 0..size-1
    size     number of ranks, N
    device   "cuda:1", or "cpu" with the host library
    library  the `Library` that carries it
    timeout  seconds that a split, an end, a nonblocking call may take; None: for ever

    A context manager: destroyed on a clean exit, aborted on an exception. What is still open when the process ends is
    closed then. Methods that move data: `Collectives`, `OneSided`.
    """

    def __init__(self, handle: int, library: Library, timeout: float | None = DEFAULT_TIMEOUT) -> None:
        """Take over an ncclComm_t (its integer value) that was made by `library`."""
        self._handle: int | None = handle
        self.library = library
        self.lock = threading.RLock()
        self.timeout = timeout
        self.rank = self._property("ncclCommUserRank")
        self.size = self._property("ncclCommCount")
        self.device_index = self._property("ncclCommCuDevice")
        self._ordinal = CPU if library.is_host else self.device_index
        self.device = device_name(self._ordinal)
        self._check = check.enabled()
        self._end = ""
        self._finalized = False
        self._scratch: Scratch | None = None
        self._site = check.call_site()
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
        device     ordinal or name of this rank's GPU; None: the current one. The host library has the CPU only.
        timeout    seconds to wait for the other ranks; None: for ever.

        Raises ValueError for bad arguments, NcclTimeout if a rank never comes, NcclSystemError without a driver.
        """
        birth.check_rank(rank, nranks)
        ids = [birth.as_unique_id(one) for one in (unique_id if isinstance(unique_id, (list, tuple)) else [unique_id])]
        if not 1 <= len(ids) <= nranks:
            raise ValueError(f"unique_id is a list of {len(ids)} ids, expected 1 to {nranks} for {nranks} ranks")
        library = library or load()
        ordinal = birth.choose_device(library, device)
        return cls(birth.join(library, nranks, ids, rank, ordinal, config, timeout), library, timeout)

    @classmethod
    def init_all(
        cls, devices: int | Sequence[Any] | None = None, *, library: Library | None = None
    ) -> list[Communicator]:
        """One communicator per device of this process, rank i on devices[i].

        devices  a number of devices, a list of ordinals or names, or None for all GPUs. The host library takes a
                 number: so many ranks in one process (None: 1).

        Calls to several of them from one thread belong in one `pynccl.group`.
        """
        library = library or load()
        if devices is None:
            devices = 1 if library.is_host else gpu_count()
        ordinals = list(range(devices)) if isinstance(devices, int) else [device_ordinal(d) for d in devices]
        if not ordinals:
            raise ValueError(f"devices is {devices!r}, expected at least one")
        return [cls(handle, library) for handle in birth.init_all(library, ordinals)]

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
        birth.check_rank(rank, nranks)
        library = library or load()
        ordinal = birth.choose_device(library, device)
        struct = config.to_struct(library) if config else None
        identity = birth.as_unique_id(unique_id)
        return cls(birth.grow(library, 0, nranks, identity, rank, ordinal, struct, timeout), library, timeout)

    @classmethod
    def from_env(cls, **options: Any) -> Communicator:
        """The communicator of all ranks of a torchrun launch: see `bootstrap.from_env`."""
        from .bootstrap import from_env

        return from_env(**options)

    @classmethod
    def from_process_group(cls, group: Any = None, **options: Any) -> Communicator:
        """The communicator of a torch.distributed process group: see `bootstrap.from_process_group`."""
        from .bootstrap import from_process_group

        return from_process_group(group, **options)

    @classmethod
    def from_mpi(cls, mpi_comm: Any = None, **options: Any) -> Communicator:
        """The communicator of an mpi4py communicator: see `bootstrap.from_mpi`."""
        from .bootstrap import from_mpi

        return from_mpi(mpi_comm, **options)

    # Relatives

    def split(self, color: int | None, key: int = 0, config: CommConfig | None = None) -> Communicator | None:
        """The communicator of all ranks that pass the same color, ordered by key, then by rank here.

        Every rank must call it. color=None (or NCCL_SPLIT_NOCOLOR, -1): this rank is in none and gets None.
        """
        number = SPLIT_NOCOLOR if color is None else color
        if not isinstance(number, int) or number < SPLIT_NOCOLOR:
            raise ValueError(f"split: color is {color!r}, expected an integer >= 0, or None for no communicator")
        struct = config.to_struct(self.library) if config else None
        return self._derive(
            lambda new: self.library.ncclCommSplit(self.handle, number, key, new, struct),
            f"ncclCommSplit(color={number}, key={key}) on rank {self.rank} of {self.size}",
        )

    def shrink(self, exclude: Sequence[int], *, abort: bool = False, config: CommConfig | None = None) -> Communicator:
        """The communicator of all ranks but `exclude`, which do not call it (NCCL >= 2.27).

        abort  first stop what is in flight here: for when an excluded rank has failed
        """
        ranks = list(exclude)
        for rank in ranks:
            self._check_rank("shrink", "exclude", rank)
        if not ranks or self.rank in ranks or len(set(ranks)) != len(ranks):
            raise ValueError(f"shrink: exclude is {ranks} on rank {self.rank}, expected other ranks, each once")
        struct = config.to_struct(self.library) if config else None
        array = (ctypes.c_int * len(ranks))(*ranks)
        made = self._derive(
            lambda new: self.library.ncclCommShrink(self.handle, array, len(ranks), new, struct, int(abort)),
            f"ncclCommShrink(exclude={ranks}) on rank {self.rank} of {self.size}",
        )
        assert made is not None  # only a split leaves ranks without
        return made

    def grow_id(self) -> UniqueId:
        """The id for one `grow` of this communicator: give it to the new ranks, and to grow() on this rank."""
        unique_id = UniqueId()
        code = self.library.ncclCommGetUniqueId(self.handle, ctypes.byref(unique_id))
        self.library.check(code, "ncclCommGetUniqueId", self._handle)
        return unique_id

    def grow(
        self, nranks: int, unique_id: UniqueId | bytes | None = None, *, config: CommConfig | None = None
    ) -> Communicator:
        """This communicator with new ranks, size..nranks-1, which call `join_grown` meanwhile (NCCL >= 2.29).

        unique_id  what grow_id() returned, on the rank that called it; None on the other members
        """
        if not isinstance(nranks, int) or nranks <= self.size:
            raise ValueError(f"grow: nranks is {nranks!r}, expected more than the {self.size} ranks that there are")
        struct = config.to_struct(self.library) if config else None
        identity = None if unique_id is None else birth.as_unique_id(unique_id)
        with self.lock:
            handle = birth.grow(
                self.library, self.handle, nranks, identity, -1, self._own_ordinal(), struct, self.timeout
            )
        return type(self)(handle, self.library, self.timeout)

    def _derive(self, call: Callable[[Any], int], what: str) -> Communicator | None:
        self.check_alive()
        with self.lock:
            handle = birth.make(self.library, call, what, self._own_ordinal(), self.timeout, self.handle)
        return type(self)(handle, self.library, self.timeout) if handle else None

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
        self._status("ncclCommSuspend", 1)

    def resume(self) -> None:
        """End a suspend()."""
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
        """Block the caller until every rank has called it."""
        self.check_alive()
        scratch = self.scratch(4)
        args = (scratch.address, scratch.address, 1, int(DataType.INT32), int(RedOp.SUM))
        with self.lock:
            code = self.library.ncclAllReduce(*args, self.handle, scratch.stream)
        self._check_result(code, "barrier")
        scratch.wait()

    def scratch(self, nbytes: int) -> Scratch:
        """At least `nbytes` bytes for the communicator's own operations."""
        if self._scratch is None or self._scratch.nbytes < nbytes:
            self._scratch = Scratch(nbytes, self._ordinal, self.library)
        return self._scratch

    # End

    def finalize(self) -> None:
        """Flush what is in flight; afterwards only destroy() is left to do."""
        with self.lock:
            self._flush(self.handle)
        self._finalized = True

    def destroy(self) -> None:
        """Finish what is in flight and free the communicator. Twice is harmless; one that has failed is aborted.

        Every rank should call it. Raises NcclTimeout after `timeout` seconds in which a peer, or a call of another
        thread, did not let it finish; a communicator that a peer holds up is aborted then.
        """
        if self._handle is None:
            return
        if self.async_error() not in (Result.SUCCESS, Result.IN_PROGRESS):
            self.abort()
            self._end = "destroyed"
            return
        what = f"ncclCommDestroy on rank {self.rank} of {self.size}"
        if not self.lock.acquire(timeout=-1 if self.timeout is None else self.timeout):
            raise NcclTimeout(f"{what}: a call of another thread has not returned for {self.timeout:g} s; abort() it")
        try:
            handle = self.surrender("destroyed")
        finally:
            self.lock.release()
        if handle is None:  # another thread was faster
            return
        try:
            if not self._finalized:
                self._flush(handle)
        except NcclError as error:
            lifecycle.abort_handles(self.library, [handle])
            raise type(error)(f"{error}\n  the communicator was aborted instead") from None
        code = lifecycle.within(self.timeout, lambda: self.library.ncclCommDestroy(handle), self.library, what)
        self.library.check(code, what)

    def abort(self) -> None:
        """Stop what is in flight, also from another thread, and free the communicator. Twice is harmless.

        For several communicators of one process, `pynccl.abort(comms)`, which also says what happens to CUDA graphs."""
        lifecycle.abort([self])

    def surrender(self, end: str) -> int | None:
        """Give up the handle; None if it is gone already. Takes no lock: abort() has to free a thread that holds it."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self._end = end
            self._c_handle = None  # NULL, which every library refuses
            self._scratch = None
        return handle

    def end_at_exit(self, failed: bool) -> None:
        """Close what the program left open; `failed` if it ends by an exception."""
        if failed:
            handle = self.surrender("aborted at exit")
            if handle is not None:
                self.library.ncclCommAbort(handle)
        else:
            self.timeout = None  # the end of the process has a deadline of its own
            self.destroy()

    def _flush(self, handle: int) -> None:
        """ncclCommFinalize until it is done. The thread that a deadline leaves behind does nothing afterwards, since
        the handle may be gone by then."""
        what = f"ncclCommFinalize on rank {self.rank} of {self.size}"
        code = lifecycle.within(self.timeout, lambda: self._finalize(handle), self.library, what)
        self.library.check(lifecycle.settle(self.library, handle, code, self.timeout, what), what, handle)

    def _finalize(self, handle: int) -> int:
        if not self.library.is_host and gpu_count():
            set_device(self.device_index)
        return int(self.library.ncclCommFinalize(handle))

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is None:
            self.destroy()
        else:
            self.abort()

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle is not None and hasattr(self, "_site") and not sys.is_finalizing():
            lifecycle.collected(self.library, handle, repr(self), self._site)

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
