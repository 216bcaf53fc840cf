"""Communicator, the class that users see. Most methods are functions of the other modules of this package."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, TypeVar

from ..bindings import torch_names
from ..bindings.abi import DataType, MemStat, RedOp, Result, UniqueId
from ..bindings.library import Library, chosen, gpu_count
from ..bindings.resource import destructor
from ..bindings.structs import CommConfig
from ..bindings.values import counted, integer, seconds, shown
from ..interop.devices import device_ordinal
from ..watch import watchdog
from ..watch.recorder import recorder
from ..watch.track import Identity, Track, uid_of
from . import collectives, collectives_v, finalize as shutdown, init as creation, rma
from .base import DEFAULT_TIMEOUT, Comm
from .consistency import check_not_capturing, compare_texts
from .deadline import wait_nonblocking
from .memory import Registration, Window
from .plan import Planner
from .redop import PreMulSum

Self = TypeVar("Self", bound="Communicator")
_MAX_DEVICES = 1024
Function = TypeVar("Function", bound=Callable[..., Any])

_bootstrap: dict[str, Callable[..., Any]] = {}


def bootstrap(function: Function, name: str = "") -> Function:
    """Register a function of `pynccl.bootstrap`: Communicator.from_env calls its from_env. (It imports this module.)"""
    _bootstrap[name or function.__name__] = function
    return function


class Communicator(Comm):
    """An NCCL communicator: one rank's handle on a group of ranks.

    rank     this rank, 0..size-1
    size     number of ranks, N
    device   "cuda:1", or "cpu" with the host library
    library  the `Library` that runs its operations
    timeout  seconds that split, destroy and nonblocking calls wait for other ranks; None: no limit

    Use it as a context manager: it is destroyed on a clean exit and aborted on an exception. Communicators that are
    still open at process exit are closed then. copy() and deepcopy() return the same object, so that a module that
    holds one can be copied. Pickling raises TypeError.
    """

    def __init__(
        self,
        handle: int,
        library: Library,
        timeout: float | None = DEFAULT_TIMEOUT,
        config: CommConfig | None = None,
        track: Track | Identity | None = None,
    ) -> None:
        """Take ownership of an ncclComm_t (as an integer) of `library`, made with `config` if known.

        track  its entry in the flight recorder, if it already has one"""
        super().__init__(handle, library, timeout, config, track)
        shutdown.register_open(self)
        watchdog.prepare()

    # Creation: init.py; with an id exchange between the ranks: pynccl.bootstrap

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
        """Create a communicator as rank `rank` of `nranks`. Returns when all ranks have called it with the same id.

        unique_id  from get_unique_id() on one rank; or a list of ids made on several ranks, equal on all ranks, which
                   speeds up the init of large communicators (NCCL >= 2.23)
        device     ordinal or name of this rank's GPU; None or "cuda": the current GPU. The host library supports the
                   CPU only. The thread's current GPU does not change: create tensors with device=comm.device, or call
                   torch.cuda.set_device(comm.device).
        config     a `CommConfig`; None: NCCL's defaults
        timeout    seconds to wait for the other ranks; None: no limit. Also becomes `Communicator.timeout`.
        library    the `Library` to use; None: the default one

        Raises ValueError for bad arguments, NcclTimeout if a rank never joins, NcclSystemError without a driver.
        """
        rank, nranks = creation.check_rank_of(rank, nranks, "Communicator.init")
        timeout = seconds(timeout, "Communicator.init: timeout")
        recorder()
        values = unique_id if isinstance(unique_id, (list, tuple)) else [unique_id]
        ids = [creation.as_unique_id(value, "Communicator.init: unique_id") for value in values]
        if not 1 <= len(ids) <= nranks:
            found, ranks = counted(len(ids), "id"), counted(nranks, "rank")
            raise ValueError(f"Communicator.init: unique_id is a list of {found}, expected 1 to {nranks} for {ranks}")
        library = chosen(library, "Communicator.init")
        ordinal = creation.choose_device(library, device, "Communicator.init: device")
        with creation.recorded_init(uid_of(*map(bytes, ids)), rank, nranks, config) as track:
            handle = creation.comm_init_rank(library, nranks, ids, rank, ordinal, config, timeout)
        return cls(handle, library, timeout, config, track)

    @classmethod
    def init_all(
        cls: type[Self], devices: int | Sequence[Any] | None = None, *, library: Library | None = None
    ) -> list[Self]:
        """Create one communicator per device in this process and return them as a list; rank i is on devices[i].

        devices  a number of devices, a list of ordinals or names, or None for all GPUs. With the host library: the
                 number of ranks in this process (None: 1).

        Calls on several of them from one thread must be in one `pynccl.group`.
        """
        library = chosen(library, "init_all")
        recorder()
        if devices is None:
            devices = 1 if library.is_host else gpu_count()
        if isinstance(devices, Sequence) and not isinstance(devices, (str, bytes, bytearray)):
            for device in devices:
                creation.check_device_kind(library, device, "init_all: device")
            ordinals = [device_ordinal(device, "init_all: device") for device in devices]
        else:
            expected = f"a number of devices up to {_MAX_DEVICES}, or a list"
            ordinals = list(range(integer(devices, "init_all: devices", 0, _MAX_DEVICES, expected)))
        if not ordinals or len(set(ordinals)) < len(ordinals):
            raise ValueError(f"init_all: devices is {shown(devices)}, expected one or more, each once")
        known = Identity(uid_of(), "world", "")
        return [cls(handle, library, track=known) for handle in creation.comm_init_all(library, ordinals)]

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
        """Join, as new rank `rank`, a communicator that its members `grow` to `nranks` ranks (NCCL >= 2.29).

        Collective: all new ranks call it while all members call grow().

        unique_id  from grow_id() on a member. For the other arguments and the errors see `init`.
        """
        rank, nranks = creation.check_rank_of(rank, nranks, "join_grown")
        timeout = seconds(timeout, "join_grown: timeout")
        library = chosen(library, "join_grown")
        recorder()
        ordinal = creation.choose_device(library, device, "join_grown: device")
        struct = creation.make_struct(config, library, "join_grown")
        identity = creation.as_unique_id(unique_id, "join_grown: unique_id")
        with creation.recorded_init(uid_of(bytes(identity)), rank, nranks, config) as track:
            handle = creation.comm_grow(library, 0, nranks, identity, rank, ordinal, struct, timeout)
        return cls(handle, library, timeout, config, track)

    @classmethod
    def from_env(cls, **options: Any) -> Communicator:
        """Create the communicator of all ranks of a torchrun launch: see help(pynccl.init)."""
        return _bootstrap["from_env"](**options)

    @classmethod
    def from_store(cls, store: Any, rank: int, nranks: int, **options: Any) -> Communicator:
        """Create the communicator of ranks that share a torch.distributed store: see help(pynccl.from_store)."""
        return _bootstrap["from_store"](store, rank, nranks, **options)

    @classmethod
    def from_file(cls, path: str, rank: int, nranks: int, **options: Any) -> Communicator:
        """Create the communicator of ranks that share a file system: see help(pynccl.from_file)."""
        return _bootstrap["from_file"](path, rank, nranks, **options)

    @classmethod
    def from_process_group(cls, group: Any = None, **options: Any) -> Communicator:
        """Create the communicator of a torch.distributed process group: see
        help(pynccl.bootstrap.from_process_group)."""
        return _bootstrap["from_process_group"](group, **options)

    @classmethod
    def from_mpi(cls, mpi_comm: Any = None, **options: Any) -> Communicator:
        """Create the communicator of an mpi4py communicator: see help(pynccl.bootstrap.from_mpi)."""
        return _bootstrap["from_mpi"](mpi_comm, **options)

    # Derived communicators: init.py

    split = creation.split
    shrink = creation.shrink
    grow_id = creation.grow_id
    grow = creation.grow

    # Going on after a death: bootstrap/survivors.py

    @property
    def generation(self) -> int:
        """How often the ranks of an elastic communicator have gone on without those that died: 0, 1, .."""
        return 0 if self._generation is None else int(self._generation.number)

    @property
    def verdict(self) -> str:
        """Who was lost before this generation, at which line and why, one rank per line; "" in generation 0."""
        return "" if self._generation is None else str(self._generation.verdict)

    def survivors(self, timeout: float | None = 30.0) -> Communicator:
        """Return a new communicator of the ranks that are left, in the old order. This one must be elastic, as
        `pynccl.init(elastic=True)` makes it.

        Collective among those who come: call it where a call has raised NcclError because another rank died. All
        communicators made from this one (by split, a mesh, a partition) end with it, on every rank: a rank that is
        blocked in one of them, or uses it later, gets NcclRemoteError and comes too. Who comes within two thirds of the
        timeout is in; nobody waits for ranks that are known to be dead. A second call returns the same communicator.

        timeout  seconds for everything together, also if more ranks die meanwhile. None: no limit

        Raises NcclRemoteError if the others went on without this rank, which came too late (it was stopped, say), or if
        the store is gone; NcclTimeout if the others do not come, or if a CUDA graph that captured calls blocks the
        abort; NcclInvalidUsage if the communicator is not elastic. `verdict` of the new one says who was lost."""
        return _bootstrap["survivors"](self, timeout)

    def commit(self, timeout: float | None = 30.0) -> None:
        """Return once everything that was issued so far has run on every rank; raise if that fails on one.

        Collective. Call it before `optimizer.step()`: on a GPU calls return before they run, and after an abort the
        results are garbage. It waits for all streams of this rank's device, then for the other ranks.

        Raises NcclRemoteError if a rank was lost, NcclTimeout after `timeout` seconds; then call `survivors`."""
        _bootstrap["commit"](self, timeout)

    def agree(self, step: int, timeout: float | None = 30.0) -> int:
        """Return the largest `step` of all ranks, which pass their own: a rank can be a step ahead of one whose
        `commit` has raised. `sync_state` then copies the state from a rank that has it. Collective; raises as `commit`
        does. A rank whose `sync_state` has failed is behind, whatever it passes. RuntimeError, on all ranks, if only
        such are left: load a checkpoint."""
        return int(_bootstrap["agree"](self, step, timeout))

    def sync_state(self, *objects: Any, timeout: float | None = 600.0) -> None:
        """Copy the state of these objects to the ranks that `agree` found to be behind, from one that has the newest
        step. Does nothing if none is behind.

        Collective: all ranks pass the same objects.

        objects  torch tensors, or objects with state_dict() and load_state_dict(): modules, optimizers, schedulers

        TypeError for another object, or for a tensor that is sharded (DTensor) or not dense. Raises as `commit` does.
        """
        _bootstrap["sync_state"](self, objects, timeout)

    def check_generation(self) -> None:
        """Raise NcclRemoteError if the other ranks have gone on without this one: ask the store now.

        Not collective. Call it before an effect that must not come from a rank that was stopped and woke up, such as
        moving a checkpoint into place. Does nothing if the communicator is not elastic."""
        _bootstrap["check_generation"](self)

    # Communication: collectives.py, collectives_v.py, rma.py; plans: plan.py

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
        """The operations as reusable plans: `plan = comm.plan.all_reduce(x, x)`, then `plan()` for each launch. See
        `pynccl.Plan`."""
        return Planner(self)

    def mem_stats(self) -> dict[str, int]:
        """Return NCCL's memory use on this device (NCCL >= 2.29), with these keys:

        suspend    bytes that suspend() can release
        suspended  1 while suspended, else 0
        persist    bytes that suspend() cannot release
        total      all of it, in bytes"""
        stats, value = {}, ctypes.c_uint64()
        for stat in MemStat:
            self._status("ncclCommMemStats", int(stat), ctypes.byref(value))
            stats[stat.name.removeprefix("GPU_MEM_").lower()] = value.value
        return stats

    def revoke(self) -> None:
        """Fail the operations in flight on this rank and reject new ones, so that all can shrink() (NCCL >= 2.28).

        Not collective, but each rank that will shrink() must call it. Raises NcclTimeout if the operations do not end
        in time."""
        self._status("ncclCommRevoke", 0)
        self._finalized = True  # nothing is left to flush, and ncclCommFinalize would fail
        # The revoke completes asynchronously; until then, shrink, split and destroy are invalid. The result code is
        # that of the operations in flight, not of the revoke: ignore it.
        wait_nonblocking(self.library, self.handle, Result.IN_PROGRESS, self.timeout, "ncclCommRevoke")

    def suspend(self) -> None:
        """Release NCCL's dynamic memory until resume(). No operation can run in between (NCCL >= 2.29).

        Not collective, but all ranks must resume() before the next operation. Raises NcclError if NCCL rejects it."""
        self.check_alive()
        with self._lock, self._recorded("suspend", weight=0):
            self._status("ncclCommSuspend", 1)

    def resume(self) -> None:
        """Reallocate the memory that suspend() released. Raises NcclError, for example if memory is exhausted."""
        self.check_alive()
        with self._lock, self._recorded("resume", weight=0):
            self._status("ncclCommResume")

    def register(self, buf: Any) -> Registration:
        """Register a buffer for zero-copy transfers (NCCL >= 2.19) and return the `Registration`.

        Not collective. close() it, or use it as a context manager. Raises TypeError or ValueError for a bad buffer,
        NcclError if NCCL rejects it."""
        return Registration(self, buf)

    def window(self, buf: Any, *, flags: int | None = None) -> Window:
        """Register a memory window on a `mem_alloc` buffer and return the `Window` (NCCL >= 2.27).

        Collective: all ranks call it, with buffers of the same size. Symmetric-memory collectives and `put_signal` use
        windows. close() it, or use it as a context manager.

        flags  NCCL_WIN_*; None: NCCL_WIN_COLL_SYMMETRIC"""
        return Window(self, buf, flags)

    def pre_mul_sum(self, scalar: Any, dtype: Any = None) -> PreMulSum:
        """Create an operator for `op=`: the sum over all ranks q of scalar_q * send_q.

        Each rank can pass a different scalar.

        scalar  a number, read now (dtype is then required), or a buffer of one element. A buffer on the
                communicator's device is read when the operation runs; a CPU buffer of a GPU communicator is read now.
        dtype   data type of the buffers; None: that of the scalar buffer

        close() it after use, or use it as a context manager.
        """
        self.check_alive()
        return PreMulSum(self, scalar, dtype)

    def barrier(self) -> None:
        """Block the caller until every rank has called it.

        Collective: every rank must call it. Raises NcclInvalidUsage during CUDA graph capture, and NcclRemoteError if
        a rank has failed."""
        self.check_alive()
        check_not_capturing(self.library, "barrier()", "Call it before the capture or after it")
        if self.checking:
            compare_texts({self: "barrier()"})
        with self._lock:  # until the end: a comparison in another thread uses the same scratch memory
            self.check_alive()
            scratch = self._scratch(4)
            args = (scratch.address, scratch.address, 1, int(DataType.INT32), int(RedOp.SUM))
            with self._recorded("barrier"):
                code = self.library.ncclAllReduce(*args, self.handle, scratch.stream)
                self._check_result(code, "barrier", self._newest())
                scratch.wait()
            self._check_alive_after()  # an abort also ends the wait: raise then

    # Shutdown: finalize.py

    finalize = shutdown.finalize
    destroy = shutdown.destroy
    _abort_late = shutdown.abort_late

    def abort(self) -> None:
        """Abort the operations in flight and free the communicator. Does nothing if it is already closed.

        You can call it from any thread. To abort several communicators of one process, use `pynccl.abort(comms)`; its
        documentation also covers CUDA graphs."""
        shutdown.abort([self])

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in torch_names.CALLS]

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is None:
            self.destroy()
        else:
            self.abort()

    @destructor
    def __del__(self) -> None:
        shutdown.on_garbage_collected(self)


for _name, _method in vars(Communicator).items():  # errors and help() show the public name
    if isinstance(_method, FunctionType) and "." not in _method.__qualname__:
        _method.__qualname__ = f"Communicator.{_name}"
for _name in torch_names.CALLS:
    setattr(Communicator, _name, torch_names.NotHere(_name))


def init_all(devices: int | Sequence[Any] | None = None, *, library: Library | None = None) -> list[Communicator]:
    """Create one communicator per device in this process: see `Communicator.init_all`. For notebooks and small jobs."""
    return Communicator.init_all(devices, library=library)
