"""NCCLLibrary: NCCL's C functions as methods on raw pointers and handles, with vLLM's names.

It uses `bindings.Library`, so calling a function that the loaded NCCL lacks raises an error that names the required
release, and everything also runs on the host library.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Any

from ..bindings import abi
from ..bindings.library import load
from ..comm.communicator import Communicator
from ..interop.buffers import data_type

ncclResult_t = ctypes.c_int
ncclComm_t = ctypes.c_void_p
ncclWindow_t = ctypes.c_void_p
cudaStream_t = ctypes.c_void_p
buffer_type = ctypes.c_void_p
ncclDataType_t = ctypes.c_int
ncclRedOp_t = ctypes.c_int

NCCL_UNIQUE_ID_BYTES = abi.UNIQUE_ID_BYTES


class ncclUniqueId(ctypes.Structure):
    """128 opaque bytes in `internal`, whose elements are readable and writable."""

    _fields_ = [("internal", ctypes.c_byte * NCCL_UNIQUE_ID_BYTES)]


class ncclDataTypeEnum:
    """The values of ncclDataType_t."""

    ncclInt8 = ncclChar = 0
    ncclUint8 = 1
    ncclInt32 = ncclInt = 2
    ncclUint32 = 3
    ncclInt64 = 4
    ncclUint64 = 5
    ncclFloat16 = ncclHalf = 6
    ncclFloat32 = ncclFloat = 7
    ncclFloat64 = ncclDouble = 8
    ncclBfloat16 = 9
    ncclFloat8e4m3 = 10
    ncclFloat8e5m2 = 11
    ncclNumTypes = 12

    @classmethod
    def from_torch(cls, dtype: Any) -> int:
        """Return the ncclDataType_t of a torch.dtype; ValueError if NCCL does not have it."""
        try:
            return int(data_type(dtype))
        except TypeError as error:
            raise ValueError(f"Unsupported dtype: {error}") from None

    @classmethod
    def try_from_torch(cls, dtype: Any) -> int | None:
        """Return the ncclDataType_t of a torch.dtype; None if NCCL does not have it."""
        try:
            return cls.from_torch(dtype)
        except ValueError:
            return None

    @classmethod
    def supports_torch_dtype(cls, dtype: Any) -> bool:
        return cls.try_from_torch(dtype) is not None


class ncclRedOpTypeEnum:
    """The values of ncclRedOp_t."""

    ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg = range(5)
    ncclNumOps = 5

    @classmethod
    def from_torch(cls, op: Any) -> int:
        """Return the ncclRedOp_t of a torch ReduceOp or pynccl.RedOp; ValueError if NCCL does not have it."""
        if isinstance(op, abi.RedOp):
            return int(op)
        from torch.distributed import ReduceOp

        known = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.AVG)
        for number, kind in enumerate(known):
            if op == kind:  # in this order: ReduceOp.__eq__ accepts its kinds, but not vice versa
                return number
        raise ValueError(f"Unsupported op: {op!r}; expected ReduceOp.SUM, PRODUCT, MAX, MIN or AVG")


def operator_of(op: Any) -> abi.RedOp:
    """Return the RedOp of a torch.distributed.ReduceOp or a RedOp."""
    return op if type(op) is abi.RedOp else abi.RedOp(ncclRedOpTypeEnum.from_torch(op))


owners: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()  # by ncclComm_t


class NCCLLibrary:
    """One loaded libnccl, with its functions as methods.

    so_file  path of a libnccl, or "host" for the host library; None: VLLM_NCCL_SO_PATH if set, otherwise pynccl.load()

    Pointers, handles and streams are integers or ctypes.c_void_p; counts are in elements. Result codes raise
    pynccl.NcclError, a RuntimeError. Arguments are not checked: use pynccl.Communicator for that.
    """

    path_variable = "VLLM_NCCL_SO_PATH"

    def __init__(self, so_file: str | None = None) -> None:
        self.lib = load(so_file or os.environ.get(self.path_variable) or None)

    def has_symbol(self, name: str) -> bool:
        """Return whether the loaded library has this function of nccl.h."""
        return name in abi.FUNCTIONS and self.lib.supports(name)

    def ncclGetErrorString(self, result: int) -> str:
        return self.lib.error_string(_integer(result))

    def ncclGetLastError(self) -> str | None:
        return self.lib.last_error() or None

    def NCCL_CHECK(self, result: int) -> None:
        """Raise unless `result` is ncclSuccess (0)."""
        self._check(result, "an NCCL call")

    def _check(self, result: Any, call: str) -> None:
        if code := _integer(result):
            error = self.lib.error(code, call)
            error.args = (f"NCCL error: {error}",)
            raise error

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self.lib, name)(*arguments):
            self._check(code, name)

    def ncclGetRawVersion(self) -> int:
        """Return the version code as in nccl.h: 22703 is 2.27.3."""
        version = ctypes.c_int()
        self._call("ncclGetVersion", ctypes.byref(version))
        return version.value

    def ncclGetVersion(self) -> str:
        return ".".join(map(str, self.lib.version))

    def ncclGetUniqueId(self) -> ncclUniqueId:
        identity = abi.UniqueId()
        self._call("ncclGetUniqueId", ctypes.byref(identity))
        return ncclUniqueId.from_buffer_copy(identity)

    def unique_id_from_bytes(self, data: bytes) -> ncclUniqueId:
        if len(data) != NCCL_UNIQUE_ID_BYTES:
            raise ValueError(f"Expected {NCCL_UNIQUE_ID_BYTES} bytes for ncclUniqueId, got {len(data)} bytes")
        return ncclUniqueId.from_buffer_copy(bytes(data))

    def ncclCommInitRank(self, world_size: int, unique_id: ncclUniqueId, rank: int) -> ctypes.c_void_p:
        comm = ncclComm_t()
        identity = abi.UniqueId.from_buffer_copy(unique_id)
        code = self.lib.ncclCommInitRank(ctypes.byref(comm), world_size, identity, rank)
        self._check(code, f"ncclCommInitRank(rank {rank} of {world_size})")
        return comm

    def ncclAllReduce(
        self, sendbuff: Any, recvbuff: Any, count: int, datatype: int, op: int, comm: Any, stream: Any
    ) -> None:
        self._call("ncclAllReduce", sendbuff, recvbuff, count, datatype, op, comm, stream)

    def ncclReduce(
        self, sendbuff: Any, recvbuff: Any, count: int, datatype: int, op: int, root: int, comm: Any, stream: Any
    ) -> None:
        self._call("ncclReduce", sendbuff, recvbuff, count, datatype, op, root, comm, stream)

    def ncclReduceScatter(
        self, sendbuff: Any, recvbuff: Any, count: int, datatype: int, op: int, comm: Any, stream: Any
    ) -> None:
        self._call("ncclReduceScatter", sendbuff, recvbuff, count, datatype, op, comm, stream)

    def ncclAllGather(self, sendbuff: Any, recvbuff: Any, count: int, datatype: int, comm: Any, stream: Any) -> None:
        self._call("ncclAllGather", sendbuff, recvbuff, count, datatype, comm, stream)

    def ncclSend(self, sendbuff: Any, count: int, datatype: int, dest: int, comm: Any, stream: Any) -> None:
        self._call("ncclSend", sendbuff, count, datatype, dest, comm, stream)

    def ncclRecv(self, recvbuff: Any, count: int, datatype: int, src: int, comm: Any, stream: Any) -> None:
        self._call("ncclRecv", recvbuff, count, datatype, src, comm, stream)

    def ncclBroadcast(
        self, sendbuff: Any, recvbuff: Any, count: int, datatype: int, root: int, comm: Any, stream: Any
    ) -> None:
        self._call("ncclBroadcast", sendbuff, recvbuff, count, datatype, root, comm, stream)

    def ncclCommDestroy(self, comm: Any) -> None:
        owner = owners.get(_integer(comm))
        if owner is not None:  # otherwise the owner would destroy it again at exit
            owner.destroy()
        else:
            self._call("ncclCommDestroy", comm)

    def ncclCommAbort(self, comm: Any) -> None:
        owner = owners.get(_integer(comm))
        if owner is not None:
            owner.abort()
        else:
            self._call("ncclCommAbort", comm)

    def ncclCommSuspend(self, comm: Any, flags: int) -> None:
        self._call("ncclCommSuspend", comm, flags)

    def ncclCommResume(self, comm: Any) -> None:
        self._call("ncclCommResume", comm)

    def ncclGroupStart(self) -> None:
        self._call("ncclGroupStart")

    def ncclGroupEnd(self) -> None:
        self._call("ncclGroupEnd")

    def ncclCommWindowRegister(self, comm: Any, buff: Any, size: int, win_flags: int) -> ctypes.c_void_p:
        window = ncclWindow_t()
        code = self.lib.ncclCommWindowRegister(comm, buff, size, ctypes.byref(window), win_flags)
        self._check(code, f"ncclCommWindowRegister({size} bytes)")
        return window

    def ncclCommWindowDeregister(self, comm: Any, window: Any) -> None:
        self._call("ncclCommWindowDeregister", comm, window)

    def ncclMemAlloc(self, size: int) -> int:
        """Allocate `size` bytes on the current device and return their address. (Only SGLang's wrapper has this.)"""
        pointer = ctypes.c_void_p()
        self._check(self.lib.ncclMemAlloc(ctypes.byref(pointer), size), f"ncclMemAlloc({size} bytes)")
        return pointer.value or 0

    def ncclMemFree(self, ptr: int) -> None:
        self._call("ncclMemFree", ptr)


def _integer(value: Any) -> int:
    """Return the value of an integer, a ctypes object or None (0)."""
    return getattr(value, "value", value) or 0
