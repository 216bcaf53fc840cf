"""Calls of the host library's C functions, and ranks that run as threads, for the test_host_* files."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pynccl import Communicator, host
from pynccl.bindings import abi
from pynccl.bindings.abi import DataType, RedOp, Result
from pynccl.host.comm import find
from pynccl.host.shared import SharedMemory

JOIN_SECONDS = 60.0
TRANSPORT = "PYNCCL_HOST_TRANSPORT"

FLOAT8 = {DataType.FLOAT8_E4M3: torch.float8_e4m3fn, DataType.FLOAT8_E5M2: torch.float8_e5m2}
TORCH_TYPES = {dtype: FLOAT8.get(dtype) or getattr(torch, dtype.name.lower()) for dtype in DataType}


class CallFailed(Exception):
    """A C function did not return ncclSuccess."""

    def __init__(self, name: str, code: Result, text: str) -> None:
        super().__init__(f"{name}: {code.name}: {text}")
        self.code = code
        self.text = text


def call(name: str, *arguments: Any) -> None:
    code = host.function(name)(*arguments)
    if code:
        raise CallFailed(name, Result(code), last_error())


def check_fails(code: Result, text: str, name: str, *arguments: Any) -> None:
    """Check that the call returns `code` and that the pattern `text` matches the last error."""
    with pytest.raises(CallFailed, match=text) as caught:
        call(name, *arguments)
    assert caught.value.code is code, caught.value


def last_error(comm: int | None = None) -> str:
    return host.function("ncclGetLastError")(comm).decode()


def unique_id() -> abi.UniqueId:
    out = abi.UniqueId()
    call("ncclGetUniqueId", ctypes.byref(out))
    return out


def init_rank(size: int, identity: abi.UniqueId, rank: int) -> int:
    out = ctypes.c_void_p()
    call("ncclCommInitRank", ctypes.byref(out), size, identity, rank)
    assert out.value
    return out.value


def init_all(size: int) -> list[int]:
    out = (ctypes.c_void_p * size)()
    call("ncclCommInitAll", out, size, None)
    return [handle for handle in out if handle]


def split(comm: int, color: int, key: int) -> int | None:
    out = ctypes.c_void_p()
    call("ncclCommSplit", comm, color, key, ctypes.byref(out), None)
    return out.value


def all_reduced(comm: int, value: float) -> float:
    data = torch.full((3,), value)
    call("ncclAllReduce", data.data_ptr(), data.data_ptr(), 3, DataType.FLOAT32, RedOp.SUM, comm, None)
    return float(data[0])


def allocate(nbytes: int) -> int:
    out = ctypes.c_void_p(1)
    call("ncclMemAlloc", ctypes.byref(out), nbytes)
    return out.value or 0


def register(comm: int, pointer: int | None, nbytes: int, flags: int = 0) -> int:
    """Register a window and return its handle. A failed call must set the handle to NULL."""
    out = ctypes.c_void_p(1)
    try:
        call("ncclCommWindowRegister", comm, pointer, nbytes, ctypes.byref(out), flags)
    except CallFailed:
        assert out.value is None
        raise
    return out.value or 0


def in_threads(size: int, body: Callable[[int], Any]) -> list[Any]:
    """Run body(rank) on `size` threads and return the results in order. Raises the first exception."""
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_SECONDS)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results


class Ranks:
    """`size` communicators, each used by its own thread."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.comms = init_all(size)

    def run(self, body: Callable[[int, int], Any]) -> list[Any]:
        """Run body(rank, comm) on all ranks at once."""
        return in_threads(self.size, lambda rank: body(rank, self.comms[rank]))

    def destroy(self) -> None:
        for comm in self.comms:
            call("ncclCommDestroy", comm)


def address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def get_int(name: str, comm: int) -> int:
    """Return an int property of comm, such as ncclCommCount."""
    out = ctypes.c_int(-1)
    call(name, comm, ctypes.byref(out))
    return out.value


def row(rank: int, count: int) -> Tensor:
    """Return values that differ by rank and position."""
    return torch.arange(count, dtype=torch.int32) + 1000 * rank


def shared_of(comm: Communicator) -> SharedMemory | None:
    return find(comm.handle).shared


def child_over(comm: Communicator, mode: str) -> Communicator:
    """Return a communicator of the same ranks over the transport `mode`."""
    os.environ[TRANSPORT] = mode
    child = comm.split(0, comm.rank)
    assert child is not None
    return child
