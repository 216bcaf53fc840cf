"""Communicator: birth, properties, split, end."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from . import check
from .abi import SPLIT_NOCOLOR, UNIQUE_ID_BYTES, Config, DataType, RedOp, Result, ScalarResidence, UniqueId
from .buffers import CPU, adapter, data_type, device_name
from .collectives import Collectives
from .config import CommConfig
from .errors import NcclInvalidUsage, NcclTimeout
from .library import Library, gpu_count, load
from .plan import Planner
from .streams import create_stream, current_device, device_ordinal, set_device

DEFAULT_TIMEOUT = 60.0  # seconds that a birth waits for the other ranks

T = TypeVar("T")


def get_unique_id(library: Library | None = None) -> UniqueId:
    """A new id, to be given to all ranks of one communicator. `bytes(id)` travels; `Communicator.init` takes both."""
    library = library or load()
    unique_id = UniqueId()
    library.check(library.ncclGetUniqueId(ctypes.byref(unique_id)), "ncclGetUniqueId")
    return unique_id


class PreMulSum:
    """An operator made by `Communicator.pre_mul_sum`; use it as `op=`, then destroy() it (or `with` it)."""

    def __init__(self, comm: Communicator, code: int, keep: Any) -> None:
        self.comm, self.code, self._keep = comm, code, keep

    def destroy(self) -> None:
        """Free it; calls that were already made with it are not affected."""
        if self.code >= 0 and self.comm.alive:
            library = self.comm.library
            library.check(library.ncclRedOpDestroy(self.code, self.comm._handle), "ncclRedOpDestroy")
        self.code = -1

    def __enter__(self) -> PreMulSum:
        return self

    def __exit__(self, *exc: object) -> None:
        self.destroy()


class Communicator(Collectives):
    """One rank's handle on a clique of ranks.

    rank     this rank, 0..size-1
    size     number of ranks, N
    device   "cuda:1", or "cpu" with the host library
    library  the `Library` that carries it
    plan     its operations, prepared instead of launched: `comm.plan.all_reduce(x, x)` (see plan.py)

    A context manager: destroyed on a clean exit, aborted on an exception. Methods that move data: `Collectives`.
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
        self._scratch: _Scratch | None = None
        self._prepare_launches()
        self.plan = Planner(self)

    # Birth

    @classmethod
    def init(
        cls,
        nranks: int,
        unique_id: UniqueId | bytes,
        rank: int,
        device: Any = None,
        config: CommConfig | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
        library: Library | None = None,
    ) -> Communicator:
        """Join rank `rank` of `nranks`; returns when all ranks have joined with the same id.

        device   ordinal or name of this rank's GPU; None: the current one. The host library has the CPU only.
        timeout  seconds to wait for the other ranks; None: for ever.

        Raises ValueError for bad arguments, NcclTimeout if a rank never comes, NcclSystemError without a driver.
        """
        if not isinstance(nranks, int) or nranks < 1:
            raise ValueError(f"nranks is {nranks!r}, expected a number of ranks >= 1")
        if not isinstance(rank, int) or not 0 <= rank < nranks:
            raise ValueError(f"rank is {rank!r}, expected 0..{nranks - 1} for {nranks} ranks")
        identity = _as_unique_id(unique_id)
        library = library or load()
        ordinal = _choose_device(library, device)
        handle = ctypes.c_void_p()

        def join() -> int:
            if ordinal is not None:
                set_device(ordinal)  # here, because the current device belongs to the thread
            if config is None:
                return int(library.ncclCommInitRank(ctypes.byref(handle), nranks, identity, rank))
            struct = config.to_struct(library)
            return int(library.ncclCommInitRankConfig(ctypes.byref(handle), nranks, identity, rank, struct))

        if ordinal is not None:
            set_device(ordinal)
        code = _within(timeout, join, library, f"ncclCommInitRank (rank {rank} of {nranks})")
        library.check(code, f"ncclCommInitRank(rank={rank}, nranks={nranks})")
        return cls(handle.value or 0, library, timeout)

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
        if not library.is_host:
            set_device(ordinals[0])
        n = len(ordinals)
        handles = (ctypes.c_void_p * n)()
        library.check(library.ncclCommInitAll(handles, n, (ctypes.c_int * n)(*ordinals)), f"ncclCommInitAll({n})")
        return [cls(handle or 0, library) for handle in handles]

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

    def split(self, color: int | None, key: int = 0, config: CommConfig | None = None) -> Communicator | None:
        """The communicator of all ranks that pass the same color, ordered by key, then by rank here.

        Every rank must call it. color=None (or NCCL_SPLIT_NOCOLOR, -1): this rank is in none and gets None.
        """
        self.check_alive()
        number = SPLIT_NOCOLOR if color is None else color
        if not isinstance(number, int) or number < SPLIT_NOCOLOR:
            raise ValueError(f"split: color is {color!r}, expected an integer >= 0, or None for no communicator")
        handle = ctypes.c_void_p()
        struct: Config | None = config.to_struct(self.library) if config else None

        def divide() -> int:
            if not self.library.is_host:
                set_device(self.device_index)
            with self.lock:
                return int(self.library.ncclCommSplit(self._handle, number, key, ctypes.byref(handle), struct))

        code = _within(self.timeout, divide, self.library, f"ncclCommSplit (rank {self.rank} of {self.size})")
        self.library.check(code, f"ncclCommSplit(color={number}, key={key})", self._handle)
        return type(self)(handle.value, self.library, self.timeout) if handle.value else None

    # State

    @property
    def alive(self) -> bool:
        """Whether it can still be used: neither destroyed nor aborted."""
        return self._handle is not None

    @property
    def checking(self) -> bool:
        """Whether calls are compared across ranks (PYNCCL_CHECK=1 when it was born)."""
        return self._check

    def check_alive(self) -> None:
        if self._handle is None:
            raise NcclInvalidUsage(
                f"this communicator (rank {self.rank} of {self.size} on {self.device}) was {self._end}; "
                "make a new one with Communicator.init"
            )

    def async_error(self) -> Result:
        """What went wrong since the launch: SUCCESS, IN_PROGRESS (nonblocking), or an error code."""
        self.check_alive()
        code = ctypes.c_int()
        self.library.check(
            self.library.ncclCommGetAsyncError(self._handle, ctypes.byref(code)), "ncclCommGetAsyncError", self._handle
        )
        return Result(code.value)

    def check_async_error(self) -> None:
        """Raise what `async_error` reports, if it is an error."""
        code = self.async_error()
        if code not in (Result.SUCCESS, Result.IN_PROGRESS):
            raise self.library.error(code, "an operation in flight", self._handle)

    def pre_mul_sum(self, scalar: Any, dtype: Any = None) -> PreMulSum:
        """The operator sum_q scalar_q * send_q, for buffers of `dtype`; each rank may give its own scalar.

        scalar  a number, read now (then dtype is required), or a buffer of one element on the communicator's device,
                read when the operation runs
        """
        self.check_alive()
        if isinstance(scalar, (int, float)):
            if dtype is None:
                raise TypeError("pre_mul_sum: a Python number needs dtype=, the data type of the buffers")
            keep = _host_scalar(scalar, data_type(dtype))
            pointer, residence, code = keep.data_ptr(), ScalarResidence.HOST_IMMEDIATE, int(data_type(dtype))
        else:
            keep = scalar
            pointer, count, code, device = adapter(scalar).describe(scalar)
            residence = ScalarResidence.DEVICE
            if count != 1 or device not in (self._ordinal, CPU):
                raise ValueError(
                    f"pre_mul_sum: scalar has {count} elements on {device_name(device)}, expected 1 on {self.device}"
                )
            if device != self._ordinal:
                residence = ScalarResidence.HOST_IMMEDIATE
        op = ctypes.c_int()
        result = self.library.ncclRedOpCreatePreMulSum(ctypes.byref(op), pointer, code, int(residence), self._handle)
        self.library.check(result, "ncclRedOpCreatePreMulSum", self._handle)
        return PreMulSum(self, op.value, keep)

    def barrier(self) -> None:
        """Block the caller until every rank has called it."""
        self.check_alive()
        memory = self.scratch(4)
        code = self.library.ncclAllReduce(
            memory, memory, 1, int(DataType.INT32), int(RedOp.SUM), self._handle, self.scratch_stream()
        )
        self.library.check(code, "barrier", self._handle)
        self.scratch_wait()

    # End

    def finalize(self) -> None:
        """Flush what is in flight; afterwards only destroy() is left to do."""
        self.check_alive()
        with self.lock:
            self.library.check(self.library.ncclCommFinalize(self._handle), "ncclCommFinalize", self._handle)

    def destroy(self) -> None:
        """Finish what is in flight and free the communicator. Twice is harmless."""
        self._finish("ncclCommDestroy", "destroyed")

    def abort(self) -> None:
        """Stop what is in flight, also from another thread, and free the communicator. Twice is harmless."""
        self._finish("ncclCommAbort", "aborted")

    def _finish(self, function: str, end: str) -> None:
        # No lock: abort() is there to free a thread that holds it.
        handle, self._handle = self._handle, None
        if handle is None:
            return
        self._end = end
        self._c_handle = None  # NULL, which every library refuses
        self._scratch = None
        self.library.check(getattr(self.library, function)(handle), function)

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is None:
            self.destroy()
        else:
            self.abort()

    def __repr__(self) -> str:
        state = "" if self.alive else f", {self._end}"
        return f"<pynccl.Communicator rank {self.rank} of {self.size} on {self.device}{state}>"

    # A little memory of its own, which both the host and NCCL can read: for barrier() and check.py

    def scratch(self, nbytes: int) -> int:
        """Address of at least `nbytes` bytes."""
        if self._scratch is None or self._scratch.nbytes < nbytes:
            self._scratch = _Scratch(nbytes, self._ordinal, self.library)
        return self._scratch.address

    def scratch_stream(self) -> int:
        """The stream for operations on the scratch memory."""
        return self._scratch.stream.handle if self._scratch and self._scratch.stream else 0

    def scratch_wait(self) -> None:
        """Block until the operations on the scratch memory are done."""
        if self._scratch and self._scratch.stream:
            self._scratch.stream.synchronize()

    def _property(self, function: str) -> int:
        value = ctypes.c_int()
        self.library.check(getattr(self.library, function)(self._handle, ctypes.byref(value)), function, self._handle)
        return value.value


class _Scratch:
    """Host memory that NCCL can use too: plain memory for the host library, pinned memory and a stream on a GPU."""

    def __init__(self, nbytes: int, ordinal: int, library: Library) -> None:
        self.nbytes = nbytes
        if library.is_host:
            self.stream: Any = None
            self._memory: Any = ctypes.create_string_buffer(nbytes)
            self.address = ctypes.addressof(self._memory)
            return
        from cuda.core import LegacyPinnedMemoryResource

        self.stream = create_stream(ordinal, library=library)
        self._memory = LegacyPinnedMemoryResource().allocate(nbytes)
        self.address = int(self._memory.handle)


def _within(timeout: float | None, call: Callable[[], T], library: Library, what: str) -> T:
    """`call()`, or NcclTimeout after `timeout` seconds.

    A blocking NCCL call cannot be interrupted, so it runs in a thread that is left behind when the deadline passes."""
    if timeout is None:
        return call()
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, name=f"pynccl {what}", daemon=True)
    started = time.monotonic()
    thread.start()
    thread.join(timeout)
    if not outcome:
        waited = time.monotonic() - started
        detail = library.last_error()
        raise NcclTimeout(
            f"{what} did not return within {waited:.0f} s (timeout={timeout:g})"
            + (f": {detail}" if detail else "")
            + "\n  a rank is missing or unreachable: were all ranks started, with the same world size and id?"
        )
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def _as_unique_id(unique_id: UniqueId | bytes) -> UniqueId:
    if isinstance(unique_id, UniqueId):
        return unique_id
    if isinstance(unique_id, (bytes, bytearray)) and len(unique_id) == UNIQUE_ID_BYTES:
        return UniqueId.from_buffer_copy(unique_id)
    raise ValueError(
        f"unique_id is {type(unique_id).__name__}"
        + (f" of {len(unique_id)} bytes" if isinstance(unique_id, (bytes, bytearray)) else "")
        + f", expected what get_unique_id() returned, or its {UNIQUE_ID_BYTES} bytes"
    )


def _choose_device(library: Library, device: Any) -> int | None:
    """CUDA ordinal to make current before the birth; None where there is nothing to choose."""
    if library.is_host:
        if device is not None and not isinstance(device, int) and not str(device).startswith("cpu"):
            raise ValueError(
                f"device is {device!r}, but the host library works on the CPU; pass device=None, or unset "
                "PYNCCL_LIBRARY on a machine with a GPU"
            )
        return None
    if device is not None and str(device).startswith("cpu"):
        raise ValueError(f"device is {device!r}, but {library.path} works on GPUs; set PYNCCL_LIBRARY=host for the CPU")
    return current_device() if device is None else device_ordinal(device)


def _host_scalar(scalar: float, dtype: DataType) -> Any:
    """One element of `dtype` in CPU memory. Torch rounds to the small floats; nothing in the standard library does."""
    import torch

    names = {DataType.FLOAT8_E4M3: "float8_e4m3fn", DataType.FLOAT8_E5M2: "float8_e5m2"}
    held = torch.tensor([scalar]).to(getattr(torch, names.get(dtype, dtype.name.lower())))
    if not held.dtype.is_floating_point and held.item() != scalar:
        raise ValueError(f"pre_mul_sum: {scalar} is no {dtype.name} and would become {held.item()}; pass one that is")
    return held
