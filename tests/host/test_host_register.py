"""Memory, registration and windows of the host library, as C functions."""

from __future__ import annotations

import ctypes

import pytest
import torch
from host_calls import CallFailed, Ranks, allocate, call, refuses, register

from pynccl.bindings.abi import WINDOW_ALIGNMENT, Result

INVALID = Result.INVALID_ARGUMENT


def test_memory_is_aligned_writable_and_freed_once() -> None:
    for nbytes in (1, 4096, 10_000_001):
        pointer = allocate(nbytes)
        assert pointer and pointer % WINDOW_ALIGNMENT == 0
        ctypes.memset(pointer, 7, nbytes)
        assert ctypes.string_at(pointer + nbytes - 1, 1) == b"\7"
        call("ncclMemFree", pointer)
        refuses(INVALID, f"ptr is {pointer:#x}; expected one that ncclMemAlloc returned", "ncclMemFree", pointer)
    assert allocate(0) == 0
    call("ncclMemFree", None)
    for nbytes in (1 << 60, (1 << 64) - 1):
        refuses(Result.SYSTEM_ERROR, "out of memory", "ncclMemAlloc", ctypes.byref(ctypes.c_void_p()), nbytes)


def test_registrations_belong_to_their_communicator(pair: Ranks) -> None:
    data, handles = torch.zeros(4), [ctypes.c_void_p(), ctypes.c_void_p()]
    for handle in handles:
        call("ncclCommRegister", pair.comms[0], data.data_ptr(), 16, ctypes.byref(handle))
    assert handles[0].value != handles[1].value
    text = "ncclCommRegister returned for this comm"
    refuses(INVALID, text, "ncclCommDeregister", pair.comms[1], handles[0])
    for handle in handles:
        call("ncclCommDeregister", pair.comms[0], handle)
    refuses(INVALID, text, "ncclCommDeregister", pair.comms[0], handles[0])
    refuses(INVALID, "16 bytes at 0x0", "ncclCommRegister", pair.comms[0], None, 16, ctypes.byref(handles[0]))


def test_windows_have_the_same_numbers_everywhere(pair: Ranks) -> None:
    pointers = [allocate(4096) for _ in range(2)]
    numbers = [pair.run(lambda rank, comm: register(comm, pointers[rank], 4096)) for _ in range(3)]
    out = [ctypes.c_void_p() for _ in range(2)]
    call("ncclGroupStart")  # one thread for both ranks
    for comm, pointer, handle in zip(pair.comms, pointers, out, strict=True):
        call("ncclCommWindowRegister", comm, pointer, 4096, ctypes.byref(handle), 0)
    call("ncclGroupEnd")
    numbers.append([handle.value for handle in out])
    assert all(a == b for a, b in numbers)
    assert len({a for a, _ in numbers}) == 4
    found = ctypes.c_void_p()
    for rank, comm in enumerate(pair.comms):
        call("ncclWinGetUserPtr", comm, numbers[1][rank], ctypes.byref(found))
        assert found.value == pointers[rank]
        call("ncclCommWindowDeregister", comm, numbers[1][rank])
        for name, *more in (("ncclCommWindowDeregister",), ("ncclWinGetUserPtr", ctypes.byref(found))):
            refuses(INVALID, "which this communicator does not have", name, comm, numbers[1][rank], *more)
    for pointer in pointers:
        call("ncclMemFree", pointer)


def test_what_one_rank_does_wrong_is_an_error_on_all(pair: Ranks) -> None:
    one, other = (allocate(4096) for _ in range(2))
    cases = [
        ([(one, 4096, 0), (other + 64, 4, 0)], "rank 1 passes a buffer that is empty or does not start"),
        ([(None, 4096, 0), (other, 4096, 0)], "rank 0 passes a buffer that is empty"),
        ([(one, 4096, 8), (other, 4096, 0)], "rank 0 passes winFlags 0x8; expected 0 to 3"),
        ([(one, 4096, 1), (other, 4096, 0)], r"the ranks disagree.*winFlags \[1, 0\]"),
    ]

    def body(rank: int, comm: int) -> int:
        for arguments, text in cases:
            with pytest.raises(CallFailed, match=text):
                register(comm, *arguments[rank])
        return register(comm, (one, other)[rank], 4096)

    assert len(set(pair.run(body))) == 1  # still in step
    for pointer in (one, other):
        call("ncclMemFree", pointer)
