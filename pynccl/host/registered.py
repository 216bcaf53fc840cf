"""Memory as the C functions see it: allocation, registration, windows."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import torch

from ..bindings.abi import WINDOW_ALIGNMENT, DataType
from . import algorithms, group
from .comm import Comm, Turn, find
from .failure import HostFailure, invalid_argument, invalid_usage
from .operation import Operation
from .registry import entry

_allocated: dict[int, mmap.mmap] = {}
_FLAGS = 0x03  # NCCL_WIN_COLL_SYMMETRIC, NCCL_WIN_STRICT_ORDERING
_MISPLACED = -1  # in place of a size
_FIRST_REGISTRATION = 0x4E610010


@entry
def ncclMemAlloc(pointer: Any, size: int) -> None:
    """Whole pages, so the address is a multiple of 4096, as windows need. Size 0 gives NULL, as with NCCL."""
    if not pointer:
        raise invalid_argument("ncclMemAlloc: ptr is NULL; expected where to store the address")
    pointer[0] = None
    if not size:
        return
    try:
        pages = mmap.mmap(-1, size)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"{size} bytes: {error}") from error
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    _allocated[address] = pages
    pointer[0] = address


@entry
def ncclMemFree(pointer: int | None) -> None:
    if not pointer:
        return
    pages = _allocated.pop(pointer, None)
    if pages is None:
        raise invalid_argument(f"ncclMemFree: ptr is {pointer:#x}; expected one that ncclMemAlloc returned, once")
    pages.close()


@entry
def ncclCommRegister(comm: int | None, buffer: int | None, size: int, handle: Any) -> None:
    """Nothing becomes faster by it on the CPU; it is there so that programs find their mistakes."""
    own = find(comm)
    own.check_usable()
    if not buffer or not size:
        raise invalid_argument(
            f"ncclCommRegister: {size} bytes at {buffer or 0:#x}; expected the address of 1 byte or more"
        )
    number = _FIRST_REGISTRATION
    while number in own.registrations:
        number += 0x10
    own.registrations[number] = (buffer, size)
    handle[0] = number


@entry
def ncclCommDeregister(comm: int | None, handle: int | None) -> None:
    if find(comm).registrations.pop(handle or 0, None) is None:
        raise invalid_argument(
            f"ncclCommDeregister: handle is {handle or 0:#x}; expected one that ncclCommRegister returned for this comm"
        )


@entry
def ncclCommWindowRegister(comm: int | None, buffer: int | None, size: int, window: Any, flags: int) -> None:
    """Every rank calls it. What one rank passes wrong is an error on all, so that none waits for another."""
    own = find(comm)
    own.check_usable()
    window[0] = None
    number = own.puts.add_window(buffer or 0, size)
    turn = Turn(own)

    def job() -> None:
        try:
            _agree(own, turn, number, buffer or 0, size, flags)
        except BaseException:
            own.puts.drop_window("ncclCommWindowRegister", number)
            window[0] = None
            raise

    window[0] = number
    group.bring_up(job, turn)


def _agree(own: Comm, turn: Turn, number: int, address: int, size: int, flags: int) -> None:
    """Tell the other ranks, hear from them, and raise the same error everywhere."""
    placed = size if address and size and address % WINDOW_ALIGNMENT == 0 else _MISPLACED
    mine = torch.tensor([number, placed, flags], dtype=torch.int64)
    table = torch.empty(own.size, 3, dtype=torch.int64)
    name, int64 = "ncclCommWindowRegister", int(DataType.INT64)
    turn.run(Operation(name, algorithms.WINDOW, own, mine.data_ptr(), table.data_ptr(), 3, int64))
    numbers, sizes, all_flags = table.T.tolist()
    for rank, (placed, given) in enumerate(zip(sizes, all_flags, strict=True)):
        if placed == _MISPLACED:
            raise invalid_argument(
                f"{name}: rank {rank} passes a buffer that is empty or does not start at a multiple of "
                f"{WINDOW_ALIGNMENT}; expected memory of ncclMemAlloc"
            )
        if given & ~_FLAGS:
            raise invalid_argument(f"{name}: rank {rank} passes winFlags {given:#x}; expected 0 to {_FLAGS}")
    if len(set(numbers)) > 1 or len(set(all_flags)) > 1:
        raise _disagreement(name, numbers, all_flags)
    own.puts.window(name, number).sizes = sizes
    if own.peers:
        own.puts.listen()


def _disagreement(name: str, numbers: list[int], flags: list[int]) -> HostFailure:
    return invalid_usage(
        f"{name}: the ranks disagree: windows so far {[number - min(numbers) for number in numbers]} (relative, times "
        f"16), winFlags {flags}; expected the same calls in the same order on every rank"
    )


@entry
def ncclCommWindowDeregister(comm: int | None, window: int | None) -> None:
    find(comm).puts.drop_window("ncclCommWindowDeregister", window)


@entry
def ncclWinGetUserPtr(comm: int | None, window: int | None, pointer: Any) -> None:
    pointer[0] = find(comm).puts.window("ncclWinGetUserPtr", window).address
