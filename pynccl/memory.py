"""Memory that NCCL can use without copies: allocation, registration, windows.

`mem_alloc` gives memory that every zero-copy path of NCCL accepts; torch, CuPy and NumPy view it without a copy, and
`mem_pool` lets torch's own tensors live in it.
"""

from __future__ import annotations

import ctypes
import math
import operator
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .abi import ITEMSIZE, DataType
from .buffers import CPU as CPU_MEMORY
from .buffers import Adapter, Description, adapter, adapters, data_type
from .dlpack import CPU, CUDA, export
from .library import Library, load
from .streams import device_ordinal, set_device

if TYPE_CHECKING:
    from .communicator import Communicator

COLL_SYMMETRIC = 0x01  # NCCL_WIN_COLL_SYMMETRIC
STRICT_ORDERING = 0x02  # NCCL_WIN_STRICT_ORDERING

_TYPESTR = {
    DataType.INT8: "|i1",
    DataType.UINT8: "|u1",
    DataType.INT32: "<i4",
    DataType.UINT32: "<u4",
    DataType.INT64: "<i8",
    DataType.UINT64: "<u8",
    DataType.FLOAT16: "<f2",
    DataType.FLOAT32: "<f4",
    DataType.FLOAT64: "<f8",
}


class Memory:
    """An array in memory of ncclMemAlloc, as `mem_alloc` returns it.

    pointer, nbytes, shape, dtype, device
    Views without a copy: torch.from_dlpack(m), cupy.from_dlpack(m), numpy.from_dlpack(m) (host library), or by
    `__cuda_array_interface__` / `__array_interface__`; also a buffer for pynccl itself. free() it when no view is left,
    or use it as a context manager.
    """

    def __init__(self, pointer: int, shape: tuple[int, ...], dtype: DataType, device: int, library: Library) -> None:
        self.pointer, self.shape, self.dtype, self.library = pointer, shape, dtype, library
        self.nbytes = math.prod(shape) * ITEMSIZE[dtype]
        self._device = device
        self.device = "cpu" if library.is_host else f"cuda:{device}"

    def free(self) -> None:
        """Give the memory back. Views of it must not be used any more. Twice is harmless."""
        pointer, self.pointer = self.pointer, 0
        if pointer:
            self.library.check(self.library.ncclMemFree(pointer), "ncclMemFree")

    def describe(self) -> Description:
        """What `buffers` wants to know of it."""
        device = CPU_MEMORY if self.library.is_host else self._device
        return self._live(), math.prod(self.shape), int(self.dtype), device

    def _live(self) -> int:
        if not self.pointer:
            raise ValueError(f"this memory (shape {self.shape}, {self.dtype.name}) was freed")
        return self.pointer

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        return export(self._live(), self.shape, self.dtype, self.__dlpack_device__(), keep=self)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CPU, 0) if self.library.is_host else (CUDA, self._device)

    def _interface(self, wanted: bool, name: str) -> dict[str, Any]:
        typestr = _TYPESTR.get(self.dtype)
        if not wanted or typestr is None:  # not there for this device or type, as hasattr() should find
            raise AttributeError(name)
        return {"shape": self.shape, "typestr": typestr, "data": (self._live(), False), "version": 3, "strides": None}

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._interface(not self.library.is_host, "__cuda_array_interface__")

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._interface(self.library.is_host, "__array_interface__")

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *exc: object) -> None:
        self.free()

    def __repr__(self) -> str:
        return f"<pynccl.Memory {self.dtype.name} {self.shape} on {self.device}{'' if self.pointer else ', freed'}>"


class _Own(Adapter):
    """An adapter goes by type, while the interfaces that Memory has go by its device and data type."""

    may_be_read_only = False

    def describe(self, x: Memory) -> Description:
        return x.describe()

    def current_stream(self, x: Memory, device: int) -> int:
        return 0 if device == CPU_MEMORY else super().current_stream(x, device)


adapters[Memory] = _Own()


def mem_alloc(
    shape: int | Sequence[int], dtype: Any = "uint8", *, device: Any = None, library: Library | None = None
) -> Memory:
    """Uninitialised memory of ncclMemAlloc (NCCL >= 2.19), fit for `register`, `window` and NVLink SHARP.

    shape   of the array; a number n is (n,)
    dtype   as for buffers; "uint8" makes the shape a size in bytes
    device  None: the current GPU

    Raises NcclError if there is not enough memory, TypeError or ValueError for a bad shape.
    """
    library = library or load()
    kind = data_type(dtype)
    try:
        dims = (operator.index(shape),) if hasattr(shape, "__index__") else tuple(map(operator.index, shape))
    except TypeError:
        raise TypeError(f"mem_alloc: shape is {shape!r}, expected a whole number or a sequence of them") from None
    if any(dim < 0 for dim in dims):
        raise ValueError(f"mem_alloc: shape is {dims}, expected sizes >= 0")
    ordinal = 0
    if not library.is_host:
        from .streams import current_device

        ordinal = current_device() if device is None else device_ordinal(device)
        set_device(ordinal)
    nbytes = math.prod(dims) * ITEMSIZE[kind]
    return Memory(_allocate(library, max(nbytes, 1)), dims, kind, ordinal, library)


def _allocate(library: Library, nbytes: int) -> int:
    pointer = ctypes.c_void_p()
    library.check(library.ncclMemAlloc(ctypes.byref(pointer), nbytes), f"ncclMemAlloc({nbytes} bytes)")
    return pointer.value or 0


class Registration:
    """A buffer registered with a communicator (ncclCommRegister), until close() or the end of a with block."""

    def __init__(self, comm: Communicator, buf: Any) -> None:
        pointer, count, dtype, _ = adapter(buf).describe(buf)
        handle = ctypes.c_void_p()
        nbytes = count * ITEMSIZE[dtype]
        code = comm.library.ncclCommRegister(comm.handle, pointer, nbytes, ctypes.byref(handle))
        comm._check_result(code, f"ncclCommRegister({nbytes} bytes)")
        self.comm, self.buf, self.nbytes = comm, buf, nbytes
        self._handle = handle.value

    def close(self) -> None:
        """Deregister. Twice is harmless, and so is a communicator that has ended: that freed it."""
        handle, self._handle = self._handle, None
        if handle is not None and self.comm.alive:
            self.comm.library.check(
                self.comm.library.ncclCommDeregister(self.comm.handle, handle), "ncclCommDeregister", self.comm.handle
            )

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Window:
    """A memory window (ncclCommWindowRegister): the same call on every rank, on buffers of the same size.

    handle  ncclWindow_t as an integer     nbytes  of the buffer here     buf  the buffer
    """

    def __init__(self, comm: Communicator, buf: Any, flags: int | None = None) -> None:
        pointer, count, dtype, _ = adapter(buf).describe(buf)
        self.comm, self.buf, self.nbytes = comm, buf, count * ITEMSIZE[dtype]
        handle = ctypes.c_void_p()
        with comm.lock:
            code = comm.library.ncclCommWindowRegister(
                comm.handle, pointer, self.nbytes, ctypes.byref(handle), COLL_SYMMETRIC if flags is None else flags
            )
        comm._check_result(code, f"ncclCommWindowRegister({self.nbytes} bytes)")
        if not handle.value:
            raise ValueError(
                f"window: NCCL declined the buffer of {self.nbytes} bytes: it must be of pynccl.mem_alloc (or "
                "VMM memory), start at a multiple of 4096 bytes, and every rank must reach every other's memory"
            )
        self._handle: int | None = handle.value

    @property
    def handle(self) -> int:
        if self._handle is None:
            raise ValueError(f"this window of {self.nbytes} bytes was closed")
        return self._handle

    def user_pointer(self) -> int:
        """Address of the buffer here, as NCCL has it (NCCL >= 2.29)."""
        pointer = ctypes.c_void_p()
        code = self.comm.library.ncclWinGetUserPtr(self.comm.handle, self.handle, ctypes.byref(pointer))
        self.comm.library.check(code, "ncclWinGetUserPtr", self.comm.handle)
        return pointer.value or 0

    def close(self) -> None:
        """Deregister, on every rank. Twice is harmless."""
        handle, self._handle = self._handle, None
        if handle is not None and self.comm.alive:
            code = self.comm.library.ncclCommWindowDeregister(self.comm.handle, handle)
            self.comm._check_result(code, "ncclCommWindowDeregister")

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def allocator_callbacks(library: Library) -> tuple[Any, Any]:
    """(alloc, free) as C function pointers with the signatures of torch's pluggable CUDA allocator.

    alloc returns NULL when NCCL has no memory or anything else fails, which torch reports as out of memory."""

    def alloc(nbytes: int, device: int, stream: int) -> int | None:
        try:
            return _allocate(library, nbytes) or None
        except BaseException as error:  # nothing may cross into C
            print(f"pynccl.mem_pool: {error}", file=sys.stderr)
            return None

    def free(pointer: int, nbytes: int, device: int, stream: int) -> None:
        library.ncclMemFree(pointer)

    alloc_type: Callable[..., Any] = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    free_type: Callable[..., Any] = ctypes.CFUNCTYPE(
        None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p
    )
    return alloc_type(alloc), free_type(free)


_pools: list[Any] = []  # the callbacks of pools live as long as the process: torch may free late


def mem_pool(library: Library | None = None) -> Any:
    """A torch.cuda.MemPool whose memory is ncclMemAlloc's: `with torch.cuda.use_mem_pool(pool): x = torch.empty(...)`.

    Needs no compiler. Raises RuntimeError with the host library, whose tensors are ordinary CPU tensors."""
    import torch

    library = library or load()
    if library.is_host:
        raise RuntimeError("mem_pool: the host library has no GPU memory; allocate CPU tensors as usual")
    alloc, free = allocator_callbacks(library)
    addresses = [ctypes.cast(callback, ctypes.c_void_p).value or 0 for callback in (alloc, free)]
    allocator = torch._C._cuda_customAllocator(*addresses)
    _pools.append((alloc, free, allocator))
    return torch.cuda.MemPool(allocator)
