"""Torch tensors over the caller's memory, by address; and reusable scratch memory.

A view holds no reference to the memory. As with libnccl, the caller must keep buffers alive until the operation has
completed on its stream.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..bindings.abi import ELEMENTS
from .failure import invalid_argument

# By number of ncclDataType_t. uint32 and uint64 are stored as their signed counterparts, since torch has hardly any
# arithmetic for them; `reduction` handles the three operators for which the sign matters.
STORAGE: tuple[torch.dtype, ...] = tuple(getattr(torch, element.bits_as) for element in ELEMENTS)

_KEEP_BYTES = 64 << 20
_MANY_ELEMENTS = 1 << 48

# The memory of this process, from address 1 on. Slicing it is four times as fast as making a memoryview by ctypes.
_memory: memoryview = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)(1, sys.maxsize - 1, 0x200)  # PyBUF_WRITE


def view(address: int, count: int, dtype: int) -> Tensor:
    """Return `count` elements of ncclDataType_t `dtype` at `address` as a tensor, without a copy."""
    return tensor_at(address, count, STORAGE[dtype])


def tensor_at(address: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return `count` elements at `address`. Do not keep it: a small object in memory that the user has freed keeps the
    allocator from reusing the memory for the next large buffer."""
    if torch.is_inference_mode_enabled():
        with normal_tensors():
            return tensor_at(address, count, dtype)
    if count == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    if count > _MANY_ELEMENTS:
        _check_size(count * dtype.itemsize)
    return torch.frombuffer(_memory, dtype=dtype, count=count, offset=address - 1)


def normal_tensors() -> Any:
    """Return a context that leaves inference mode, whose tensors cannot be modified outside of it."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def bytes_of(data: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor. Like `view`, it holds no reference."""
    return bytes_at(data.data_ptr(), data.nbytes)


def bytes_at(address: int, nbytes: int) -> memoryview:
    """Return `nbytes` bytes at `address`. Like `view`, without a reference."""
    if not nbytes:
        return memoryview(b"")
    _check_size(nbytes)
    return _memory[address - 1 : address - 1 + nbytes]


def _check_size(nbytes: int) -> None:
    if nbytes > sys.maxsize:
        raise invalid_argument(f"the buffer has {nbytes} bytes, which are more than an address space holds")


class Scratch:
    """Grow-only scratch memory of one communicator, whose operations run one at a time.

    New pages cost about 0.25 ms per MB, as much as moving the data, so up to 64 MB are kept for reuse.
    """

    def __init__(self) -> None:
        self._kept = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, nbytes: int) -> Tensor:
        """Return `nbytes` bytes, which may be the same memory as before."""
        if self._kept.numel() < nbytes:
            with normal_tensors():
                fresh = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            if nbytes > _KEEP_BYTES:
                return fresh
            self._kept = fresh
        return self._kept[:nbytes]

    @property
    def nbytes(self) -> int:
        return self._kept.nbytes

    def release(self) -> None:
        self._kept = torch.empty(0, dtype=torch.uint8, device="cpu")
