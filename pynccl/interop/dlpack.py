"""DLPack import and export, with the structs of dlpack.h 0.8."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..bindings.abi import ELEMENTS, DataType

CPU, CUDA = 1, 2  # kDLCPU, kDLCUDA

_TYPES: dict[tuple[int, int], DataType] = {element.dlpack: element.dtype for element in ELEMENTS}


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class DLManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", DLTensor), ("manager", ctypes.c_void_p), ("deleter", _Deleter)]


class Read(NamedTuple):
    """The tensor of a capsule; `strides` in bytes, None for C order."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: DataType
    device_type: int
    device_id: int


def read(capsule: Any) -> Read:
    """Read a "dltensor" capsule without consuming it; its reference is released when it is collected.

    Raises TypeError for an element type that NCCL does not have."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    try:
        address = get(capsule, b"dltensor")
    except ValueError:  # raised by CPython: not a capsule, or another name
        raise TypeError("__dlpack__() did not return an unused DLPack capsule; pass a new export") from None
    tensor = ctypes.cast(address, ctypes.POINTER(DLTensor)).contents
    dtype = _TYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        raise TypeError(
            f"DLPack type (code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes) has no NCCL data type"
        )
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(s * dtype.itemsize for s in tensor.strides[: tensor.ndim]) if tensor.strides else None
    pointer = (tensor.data or 0) + tensor.byte_offset
    return Read(pointer, shape, strides, dtype, tensor.device_type, tensor.device_id)


# Kept alive until the consumer deletes the exported tensor: struct, shape, owner of the memory.
_exported: dict[int, Any] = {}


@_Deleter
def _delete(address: int) -> None:
    _exported.pop(address, None)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _destroy_capsule(capsule: int) -> None:
    """Delete the tensor of an unconsumed capsule. Consumers rename the capsule."""
    valid = ctypes.pythonapi.PyCapsule_IsValid
    valid.restype, valid.argtypes = ctypes.c_int, [ctypes.c_void_p, ctypes.c_char_p]
    if valid(capsule, b"dltensor"):
        get = ctypes.PyDLL(None).PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]
        _delete(get(capsule, b"dltensor"))


def export(pointer: int, shape: Sequence[int], dtype: DataType, device: tuple[int, int], keep: Any) -> Any:
    """Return a "dltensor" capsule of C-ordered memory. `keep` stays alive until the consumer deletes the tensor."""
    dims = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    managed = DLManagedTensor()
    managed.tensor.data = pointer
    managed.tensor.device_type, managed.tensor.device_id = device
    managed.tensor.ndim = len(shape)
    managed.tensor.code, managed.tensor.bits = ELEMENTS[dtype].dlpack
    managed.tensor.lanes = 1
    managed.tensor.shape = ctypes.cast(dims, ctypes.POINTER(ctypes.c_int64))
    managed.deleter = _delete
    address = ctypes.addressof(managed)
    _exported[address] = (managed, dims, keep)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(address, _NAME, ctypes.cast(_destroy_capsule, ctypes.c_void_p))


_NAME = ctypes.c_char_p(b"dltensor")  # PyCapsule_New stores the pointer, so the string must stay alive
