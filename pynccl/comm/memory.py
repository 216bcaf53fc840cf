"""Memory that NCCL can use without copies: allocation, registration, windows.

`mem_alloc` gives memory that every zero-copy path of NCCL accepts; torch, CuPy and NumPy view it without a copy. For
torch's own tensors in it see mempool.py.
"""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Sequence
from typing import Any, NoReturn

from ..bindings.abi import ELEMENTS, ITEMSIZE, DataType
from ..bindings.library import Library, chosen
from ..bindings.resource import Resource, Shared
from ..bindings.values import INT_MAX, attribute, integer, listed, shown
from ..interop.buffers import CPU as CPU_MEMORY, Adapter, Description, adapter, adapters, data_type
from ..interop.devices import core_device, on_device
from ..interop.dlpack import CPU, CUDA, export
from .base import Comm

COLL_SYMMETRIC = 0x01  # NCCL_WIN_COLL_SYMMETRIC
_MOST_BYTES = (1 << 63) - 1


class Memory(Resource):
    """An array in memory of ncclMemAlloc, as `mem_alloc` returns it.

    pointer, nbytes, shape, dtype, device
    Views without a copy: torch.from_dlpack(m), cupy.from_dlpack(m), numpy.from_dlpack(m) (host library), or by
    `__cuda_array_interface__` / `__array_interface__`; also a buffer for pynccl itself. close() it when no view is
    left, or use it as a context manager.
    """

    def __init__(self, pointer: int, shape: tuple[int, ...], dtype: DataType, device: int, library: Library) -> None:
        self.pointer, self.shape, self.dtype, self.library = pointer, shape, dtype, library
        self.nbytes = math.prod(shape) * ITEMSIZE[dtype]
        self._device = device
        self.device = "cpu" if device == CPU_MEMORY else f"cuda:{device}"

    def close(self) -> None:
        """Give the memory back. Views of it must not be used any more. Twice is harmless."""
        pointer, self.pointer = self.pointer, 0
        if pointer:
            self.library.check(self.library.ncclMemFree(pointer), "ncclMemFree")

    free = close  # as NCCL calls it

    def describe(self) -> Description:
        """What `buffers` wants to know of it."""
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

    def _interface(self, wanted: bool, name: str) -> dict[str, Any]:
        element = ELEMENTS[self.dtype]
        if not wanted or not element.typestr:  # not there for this device or type, as hasattr() should find
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
        raise TypeError("a pynccl.Memory has one owner, who frees it; make another with mem_alloc and copy into it")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__copy__()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a pynccl.Memory cannot be pickled: save a copy, as torch.from_dlpack(memory).clone() is")

    def __repr__(self) -> str:
        return f"<pynccl.Memory {self.dtype.name} {self.shape} on {self.device}{'' if self.pointer else ', freed'}>"


class _Own(Adapter):
    """An adapter goes by type, while the interfaces that Memory has go by its device and data type."""

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
    device  "cuda:1" or 1; None or "cuda": the current GPU, which stays the current one whatever is named here

    Raises NcclError if there is not enough memory, TypeError or ValueError for a bad shape.
    """
    library = chosen(library)
    kind = data_type(dtype)
    try:
        given: Any = shape
        single = attribute(given, "__index__") is not None and not attribute(given, "ndim")
        dims = (operator.index(given),) if single else tuple(map(operator.index, listed(given, "shape", "a sequence")))
    except Exception:  # also what an object of the user's raises
        raise TypeError(f"mem_alloc: shape is {shown(shape)}, expected a whole number or a sequence of them") from None
    if any(dim < 0 for dim in dims) or isinstance(shape, bool) or math.prod(dims) * ITEMSIZE[kind] > _MOST_BYTES:
        raise ValueError(f"mem_alloc: shape is {shown(shape)}, expected sizes >= 0, of at most 2**63-1 bytes together")
    if isinstance(shape, (set, frozenset)):
        raise TypeError(f"mem_alloc: shape is {shown(shape)}, expected a sequence, which has an order")
    ordinal = None if library.is_host else int(core_device(device).device_id)
    nbytes = math.prod(dims) * ITEMSIZE[kind]
    with on_device(ordinal):  # which is where NCCL allocates
        pointer = _allocate(library, max(nbytes, 1))
    return Memory(pointer, dims, kind, CPU_MEMORY if ordinal is None else ordinal, library)


def _allocate(library: Library, nbytes: int) -> int:
    pointer = ctypes.c_void_p()
    library.check(library.ncclMemAlloc(ctypes.byref(pointer), nbytes), f"ncclMemAlloc({nbytes} bytes)")
    return pointer.value or 0


def _described(operation: str, buf: Any) -> Description:
    kind = adapter(buf, operation, "buf")
    try:
        return kind.describe(buf)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{operation}: buf: {error}") from None


class Registration(Resource, Shared):
    """A buffer registered with a communicator (ncclCommRegister), until close() or the end of a with block."""

    def __init__(self, comm: Comm, buf: Any) -> None:
        pointer, count, dtype, _ = _described("register", buf)
        handle = ctypes.c_void_p()
        nbytes = count * ITEMSIZE[dtype]
        with comm.lock, comm.on_own_device():
            code = comm.library.ncclCommRegister(comm.handle, pointer, nbytes, ctypes.byref(handle))
        comm._check_result(code, f"ncclCommRegister({nbytes} bytes)")
        self.comm, self.buf, self.nbytes = comm, buf, nbytes
        self._handle = handle.value

    def close(self) -> None:
        """Deregister. Twice is harmless, and so is a communicator that has ended: that freed it."""
        handle, self._handle = self._handle, None
        if handle is not None and self.comm.alive:
            # NCCL itself leaves it current where the buffer is registered once more
            with self.comm.lock, self.comm.on_own_device():
                code = self.comm.library.ncclCommDeregister(self.comm.handle, handle)
            self.comm._check_result(code, "ncclCommDeregister")


class Window(Resource, Shared):
    """A memory window (ncclCommWindowRegister): the same call on every rank, on buffers of the same size.

    handle  ncclWindow_t as an integer     nbytes  of the buffer here     buf  the buffer
    """

    def __init__(self, comm: Comm, buf: Any, flags: int | None = None) -> None:
        pointer, count, dtype, _ = _described("window", buf)
        self.comm, self.buf, self.nbytes = comm, buf, count * ITEMSIZE[dtype]
        kind = COLL_SYMMETRIC if flags is None else integer(flags, "window: flags", 0, INT_MAX)
        handle = ctypes.c_void_p()
        with comm.lock, comm.on_own_device():
            code = comm.library.ncclCommWindowRegister(comm.handle, pointer, self.nbytes, ctypes.byref(handle), kind)
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
            raise ValueError(f"this window of {self.nbytes} bytes was closed; make another with comm.window(buf)")
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
            with self.comm.lock, self.comm.on_own_device():
                code = self.comm.library.ncclCommWindowDeregister(self.comm.handle, handle)
            self.comm._check_result(code, "ncclCommWindowDeregister")
