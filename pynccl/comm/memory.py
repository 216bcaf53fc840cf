"""Memory that NCCL can use without copies: allocation, registration, windows.

`mem_alloc` returns memory that every zero-copy path of NCCL accepts and that torch, CuPy and NumPy can view without a
copy. To make torch allocate its tensors from such memory see mempool.py.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NoReturn

from ..bindings.abi import ELEMENTS, ITEMSIZE, DataType
from ..bindings.library import Library, chosen
from ..bindings.resource import Resource, Shared
from ..bindings.values import INT_MAX, as_int, integer, ordered, shown
from ..interop.buffers import CPU as CPU_MEMORY, Adapter, Description, adapter, adapters, data_type
from ..interop.devices import core_device, on_device
from ..interop.dlpack import CPU, CUDA, export
from .base import Comm

COLL_SYMMETRIC = 0x01  # NCCL_WIN_COLL_SYMMETRIC
_MAX_BYTES = (1 << 63) - 1


class Memory(Resource):
    """An array in memory of ncclMemAlloc, returned by `mem_alloc`.

    Attributes: pointer, nbytes, shape, dtype, device.

    pynccl accepts it as a buffer. To view it without a copy use torch.from_dlpack(m), cupy.from_dlpack(m),
    numpy.from_dlpack(m) (host library), `__cuda_array_interface__` or `__array_interface__`. Views do not keep the
    memory allocated: close() it after the last use of a view, or use it as a context manager.
    """

    def __init__(self, pointer: int, shape: tuple[int, ...], dtype: DataType, device: int, library: Library) -> None:
        self.pointer, self.shape, self.dtype, self.library = pointer, shape, dtype, library
        self.nbytes = math.prod(shape) * ITEMSIZE[dtype]
        self._device = device
        self.device = "cpu" if device == CPU_MEMORY else f"cuda:{device}"

    def close(self) -> None:
        """Free the memory; views of it become invalid. Does nothing if it is already freed."""
        pointer, self.pointer = self.pointer, 0
        if pointer:
            self.library.check(self.library.ncclMemFree(pointer), "ncclMemFree")

    free = close  # NCCL's name

    def describe(self) -> Description:
        """Return (pointer, count, data type, device), as an `interop.buffers` adapter does."""
        return self._live(), math.prod(self.shape), int(self.dtype), self._device

    def _live(self) -> int:
        if not self.pointer:
            raise ValueError(
                f"this memory (shape {self.shape}, {self.dtype.name}) was freed; make another with pynccl.mem_alloc"
            )
        return self.pointer

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        return export(self._live(), self.shape, self.dtype, self.__dlpack_device__(), keep=self)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CPU, 0) if self._device == CPU_MEMORY else (CUDA, self._device)

    def _interface(self, available: bool, name: str) -> dict[str, Any]:
        element = ELEMENTS[self.dtype]
        if not available or not element.typestr:  # so that hasattr() is False for this device or data type
            raise AttributeError(name)
        typestr = ("|" if element.itemsize == 1 else "<") + element.typestr
        return {"shape": self.shape, "typestr": typestr, "data": (self._live(), False), "version": 3, "strides": None}

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._interface(self._device != CPU_MEMORY, "__cuda_array_interface__")

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._interface(self._device == CPU_MEMORY, "__array_interface__")

    def __copy__(self) -> NoReturn:
        raise TypeError("a pynccl.Memory has one owner, which frees it; make another with mem_alloc and copy into it")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__copy__()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a pynccl.Memory cannot be pickled; save a copy, such as torch.from_dlpack(memory).clone()")

    def __repr__(self) -> str:
        return f"<pynccl.Memory {self.dtype.name} {self.shape} on {self.device}{'' if self.pointer else ', freed'}>"


class _MemoryAdapter(Adapter):
    """Adapter of Memory. Adapters are chosen by type, but the interfaces of a Memory depend on its device and dtype."""

    def describe(self, x: Memory) -> Description:
        return x.describe()

    def current_stream(self, x: Memory, device: int) -> int:
        return 0 if device == CPU_MEMORY else super().current_stream(x, device)


adapters[Memory] = _MemoryAdapter()


def mem_alloc(
    shape: int | Sequence[int], dtype: Any = "uint8", *, device: Any = None, library: Library | None = None
) -> Memory:
    """Allocate uninitialized memory with ncclMemAlloc (NCCL >= 2.19), suitable for `Communicator.register`,
    `Communicator.window` and NVLink SHARP.

    shape   shape of the array; a number n means (n,)
    dtype   data type of the elements; with the default "uint8", shape is a size in bytes
    device  "cuda:1" or 1; None or "cuda": the current GPU. The current GPU does not change.

    Returns a `Memory`. Raises NcclError if memory is exhausted, TypeError or ValueError for a bad shape.
    """
    library = chosen(library, "mem_alloc")
    kind = data_type(dtype, "mem_alloc: dtype")
    single, expected = as_int(shape), "an integer or a sequence of integers"
    sizes = [single] if single is not None else list(map(as_int, ordered(shape, "mem_alloc: shape", expected)))
    dims = tuple(size for size in sizes if size is not None)
    if len(dims) < len(sizes):
        raise TypeError(f"mem_alloc: shape is {shown(shape)}, expected {expected}")
    if any(dim < 0 for dim in dims) or math.prod(dims) * ITEMSIZE[kind] > _MAX_BYTES:
        raise ValueError(f"mem_alloc: shape is {shown(shape)}, expected sizes >= 0, at most 2**63-1 bytes in total")
    ordinal = None if library.is_host else int(core_device(device).device_id)
    nbytes = math.prod(dims) * ITEMSIZE[kind]
    with on_device(ordinal):  # NCCL allocates on the current GPU
        pointer = _allocate(library, max(nbytes, 1))
    return Memory(pointer, dims, kind, CPU_MEMORY if ordinal is None else ordinal, library)


def _allocate(library: Library, nbytes: int) -> int:
    pointer = ctypes.c_void_p()
    library.check(library.ncclMemAlloc(ctypes.byref(pointer), nbytes), f"ncclMemAlloc({nbytes} bytes)")
    return pointer.value or 0


def _describe(operation: str, buf: Any) -> Description:
    kind = adapter(buf, operation, "buf")
    try:
        return kind.describe(buf)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{operation}: buf: {error}") from None


class Registration(Resource, Shared):
    """A buffer registered with a communicator (ncclCommRegister), until close() or the end of a with block.

    comm, buf  the communicator and the buffer
    nbytes     size of the buffer
    """

    def __init__(self, comm: Comm, buf: Any) -> None:
        pointer, count, dtype, _ = _describe("register", buf)
        handle = ctypes.c_void_p()
        nbytes = count * ITEMSIZE[dtype]
        with comm._lock, comm._on_own_device():
            code = comm.library.ncclCommRegister(comm.handle, pointer, nbytes, ctypes.byref(handle))
        comm._check_result(code, f"ncclCommRegister({nbytes} bytes)")
        self.comm, self.buf, self.nbytes = comm, buf, nbytes
        self._handle = handle.value

    def close(self) -> None:
        """Deregister the buffer. Does nothing if it is already deregistered or the communicator was closed."""
        handle, self._handle = self._handle, None
        if handle is not None and self.comm.alive:
            # on_own_device: NCCL leaves its GPU current if the buffer is still registered elsewhere
            with self.comm._lock, self.comm._on_own_device():
                code = self.comm.library.ncclCommDeregister(self.comm.handle, handle)
            self.comm._check_result(code, "ncclCommDeregister")


class Window(Resource, Shared):
    """A memory window (ncclCommWindowRegister), made by all ranks together, on buffers of the same size.

    handle  ncclWindow_t as an integer; ValueError once closed
    buf     the buffer of this rank
    nbytes  size of the buffer
    """

    def __init__(self, comm: Comm, buf: Any, flags: int | None = None) -> None:
        pointer, count, dtype, _ = _describe("window", buf)
        self.comm, self.buf, self.nbytes = comm, buf, count * ITEMSIZE[dtype]
        kind = COLL_SYMMETRIC if flags is None else integer(flags, "window: flags", 0, INT_MAX)
        handle = ctypes.c_void_p()
        with comm._lock, comm._on_own_device():
            code = comm.library.ncclCommWindowRegister(comm.handle, pointer, self.nbytes, ctypes.byref(handle), kind)
        comm._check_result(code, f"ncclCommWindowRegister({self.nbytes} bytes)")
        if not handle.value:
            raise ValueError(
                f"window: NCCL declined the buffer of {self.nbytes} bytes: it must be pynccl.mem_alloc (or VMM) memory "
                "that starts at a multiple of 4096 bytes, and all ranks must be able to access each other's memory"
            )
        self._handle: int | None = handle.value

    @property
    def handle(self) -> int:
        if self._handle is None:
            raise ValueError(f"this window of {self.nbytes} bytes was closed; make another with comm.window(buf)")
        return self._handle

    def user_pointer(self) -> int:
        """Return the address of this rank's buffer, from ncclWinGetUserPtr (NCCL >= 2.29)."""
        pointer = ctypes.c_void_p()
        code = self.comm.library.ncclWinGetUserPtr(self.comm.handle, self.handle, ctypes.byref(pointer))
        self.comm.library.check(code, "ncclWinGetUserPtr", self.comm.handle)
        return pointer.value or 0

    def close(self) -> None:
        """Deregister the window; all ranks must call it. Does nothing if it is already closed."""
        handle, self._handle = self._handle, None
        if handle is not None and self.comm.alive:
            with self.comm._lock, self.comm._on_own_device():
                code = self.comm.library.ncclCommWindowDeregister(self.comm.handle, handle)
            self.comm._check_result(code, "ncclCommWindowDeregister")
