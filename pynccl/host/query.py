"""Query functions: the version, errors, and the properties and state of a communicator."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from functools import partial
from typing import Any

from ..bindings.abi import MemStat, Result, version_code
from .argcheck import check_range
from .comm import Comm, find
from .exports import export, export_plain
from .failure import REASONS, HostFailure, last_error
from .version import VERSION


@export
def ncclGetVersion(version: Any) -> None:
    version[0] = version_code(VERSION)


_reasons = {code: ctypes.create_string_buffer(text.encode()) for code, text in REASONS.items()}
_unknown = ctypes.create_string_buffer(b"unknown result code")


@export_plain
def ncclGetErrorString(code: int) -> int:
    return ctypes.addressof(_reasons.get(code, _unknown))


class _LastErrorBuffer(threading.local):
    """The buffer that ncclGetLastError returns to this thread; valid until its next call."""

    def __init__(self) -> None:
        self.chars = ctypes.create_string_buffer(8192)


_buffer = _LastErrorBuffer()


def failure_of(comm: int | None) -> HostFailure | None:
    """Return the failure of this communicator, else that of the last C function that failed."""
    with contextlib.suppress(HostFailure):
        if comm and (failure := find(comm).failure) is not None:
            return failure
    return last_error.failure


@export_plain
def ncclGetLastError(comm: int | None) -> int:
    try:
        failure = find(comm).failure if comm else None
    except HostFailure:
        failure = None
    text = failure.text if failure is not None else last_error.text
    _buffer.chars.value = text.encode("utf-8", "replace")[: len(_buffer.chars) - 1]
    return ctypes.addressof(_buffer.chars)


@export
def ncclCommGetAsyncError(comm: Comm, code: Any) -> None:
    with contextlib.suppress(HostFailure):
        comm.poll("ncclCommGetAsyncError")
    code[0] = int(Result.SUCCESS if comm.failure is None else comm.failure.code)


def _get(attribute: str, comm: int | None, out: Any) -> None:
    out[0] = getattr(find(comm), attribute)


for _name, _attribute in (("ncclCommCount", "size"), ("ncclCommCuDevice", "device"), ("ncclCommUserRank", "rank")):
    export(partial(_get, _attribute), _name)


@export
def ncclCommMemStats(comm: Comm, stat: int, value: Any) -> None:
    check_range("ncclCommMemStats", "stat", stat, 0, max(MemStat))
    dynamic, static = comm.scratch.nbytes, comm.static_bytes
    value[0] = {
        MemStat.GPU_MEM_SUSPEND: dynamic,
        MemStat.GPU_MEM_SUSPENDED: int(comm.suspended),
        MemStat.GPU_MEM_PERSIST: static,
        MemStat.GPU_MEM_TOTAL: dynamic + static,
    }[MemStat(stat)]
