"""Memory functions: allocation, registration with a communicator, windows."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import torch

from ..bindings.abi import WINDOW_ALIGNMENT, Result
from ..bindings.errors import disagreement
from . import group
from .algorithms import WINDOW, gather_rows
from .comm import Comm
from .exports import export
from .failure import HostFailure, invalid_argument
from .init import connect_rma
from .rma import rma_of

_allocated: dict[int, mmap.mmap] = {}
_FLAGS = 0x03  # NCCL_WIN_COLL_SYMMETRIC, NCCL_WIN_STRICT_ORDERING
_INVALID_BUFFER = -1  # sent instead of the size
_FIRST_REGISTRATION = 0x4E610010


@export
def ncclMemAlloc(pointer: Any, size: int) -> None:
    """Allocate full pages, since windows need addresses that are multiples of 4096. Size 0 gives NULL, as in NCCL."""
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


@export
def ncclMemFree(pointer: int | None) -> None:
    if not pointer:
        return
    pages = _allocated.pop(pointer, None)
    if pages is None:
        raise invalid_argument(f"ncclMemFree: ptr is {pointer:#x}; expected one that ncclMemAlloc returned, once")
    pages.close()


@export
def ncclCommRegister(comm: Comm, buffer: int | None, size: int, handle: Any) -> None:
    """Record a registration, to detect errors in programs. It has no effect on speed on the CPU."""
    comm.check_usable()
    if not buffer or not size:
        raise invalid_argument(
            f"ncclCommRegister: {size} bytes at {buffer or 0:#x}; expected the address of 1 byte or more"
        )
    number = _FIRST_REGISTRATION
    while number in comm.registrations:
        number += 0x10
    comm.registrations[number] = (buffer, size)
    handle[0] = number


@export
def ncclCommDeregister(comm: Comm, handle: int | None) -> None:
    if comm.registrations.pop(handle or 0, None) is None:
        raise invalid_argument(
            f"ncclCommDeregister: handle is {handle or 0:#x}; expected one that ncclCommRegister returned for this comm"
        )


@export
def ncclCommWindowRegister(comm: Comm, buffer: int | None, size: int, window: Any, flags: int) -> None:
    """Register a window, on every rank. A wrong argument on one rank is an error on all, so that none hangs."""
    comm.check_usable()
    window[0] = None
    rma = rma_of(comm)
    number = rma.add_window(buffer or 0, size)

    def job(ticket: int) -> None:
        try:
            _exchange_windows(comm, ticket, number, buffer or 0, size, flags)
        except BaseException:
            rma.drop_window("ncclCommWindowRegister", number)
            window[0] = None
            raise

    window[0] = number
    group.init(comm, job)


def _exchange_windows(comm: Comm, ticket: int, number: int, address: int, size: int, flags: int) -> None:
    """Exchange the arguments of all ranks, and raise the same error on all of them."""
    name = WINDOW.name
    valid_size = size if address and size and address % WINDOW_ALIGNMENT == 0 else _INVALID_BUFFER
    mine = torch.tensor([number, valid_size, flags], dtype=torch.int64, device="cpu")
    numbers, sizes, all_flags = gather_rows(comm, ticket, WINDOW, mine).T.tolist()
    for rank, (nbytes, rank_flags) in enumerate(zip(sizes, all_flags, strict=True)):
        if nbytes == _INVALID_BUFFER:
            raise invalid_argument(
                f"{name}: rank {rank} passes a buffer that is empty or does not start at a multiple of "
                f"{WINDOW_ALIGNMENT}; expected memory from ncclMemAlloc"
            )
        if rank_flags & ~_FLAGS:
            raise invalid_argument(f"{name}: rank {rank} passes winFlags {rank_flags:#x}; expected 0 to {_FLAGS}")
    if len(set(numbers)) > 1 or len(set(all_flags)) > 1:
        relative = [number - min(numbers) for number in numbers]
        rows = [f"windows so far {relative} (relative, times 16)", f"winFlags {all_flags}"]
        text = f"{name}: {disagreement(rows)}; expected the same calls in the same order on every rank"
        raise HostFailure(Result.INVALID_USAGE, text, mismatch=True)
    rma = rma_of(comm)
    rma.window(name, number).sizes = sizes
    if comm.peers:
        connect_rma(comm)
        rma.listen()


@export
def ncclCommWindowDeregister(comm: Comm, window: int | None) -> None:
    rma_of(comm).drop_window("ncclCommWindowDeregister", window)


@export
def ncclWinGetUserPtr(comm: Comm, window: int | None, pointer: Any) -> None:
    pointer[0] = rma_of(comm).window("ncclWinGetUserPtr", window).address
