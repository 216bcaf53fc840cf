"""Memory, registration and windows of the host library, as C functions."""

from __future__ import annotations

import ctypes

import pytest
import torch
from host_calls import CallFailed, Ranks, call

from pynccl.bindings.abi import WINDOW_ALIGNMENT, Result


def allocate(nbytes: int) -> int | None:
    out = ctypes.c_void_p(1)
    call("ncclMemAlloc", ctypes.byref(out), nbytes)
    return out.value


def window(comm: int, pointer: int | None, nbytes: int, flags: int = 0) -> int | None:
    out = ctypes.c_void_p(1)
    try:
        call("ncclCommWindowRegister", comm, pointer, nbytes, ctypes.byref(out), flags)
    finally:
        last.value = out.value
    return out.value


last = ctypes.c_void_p()  # what the last failed registration left in the caller's variable


def test_memory_is_aligned_writable_and_freed_once() -> None:
    for nbytes in (1, 4096, 10_000_001):
        pointer = allocate(nbytes)
        assert pointer and pointer % WINDOW_ALIGNMENT == 0
        ctypes.memset(pointer, 7, nbytes)
        assert ctypes.string_at(pointer + nbytes - 1, 1) == b"\7"
        call("ncclMemFree", pointer)
        with pytest.raises(CallFailed, match=f"ptr is {pointer:#x}; expected one that ncclMemAlloc returned") as e:
            call("ncclMemFree", pointer)
        assert e.value.code is Result.INVALID_ARGUMENT
    assert allocate(0) is None
    call("ncclMemFree", None)
    for nbytes in (1 << 60, (1 << 64) - 1):
        with pytest.raises(CallFailed, match="out of memory") as e:
            allocate(nbytes)
        assert e.value.code is Result.SYSTEM_ERROR


def test_registrations(pair: Ranks) -> None:
    data, handles = torch.zeros(4), [ctypes.c_void_p(), ctypes.c_void_p()]
    for handle in handles:
        call("ncclCommRegister", pair.comms[0], data.data_ptr(), 16, ctypes.byref(handle))
    assert handles[0].value != handles[1].value
    with pytest.raises(CallFailed, match="ncclCommRegister returned for this comm") as refused:
        call("ncclCommDeregister", pair.comms[1], handles[0])
    assert refused.value.code is Result.INVALID_ARGUMENT
    for handle in handles:
        call("ncclCommDeregister", pair.comms[0], handle)
    with pytest.raises(CallFailed, match="ncclCommRegister returned for this comm"):
        call("ncclCommDeregister", pair.comms[0], handles[0])
    with pytest.raises(CallFailed, match="16 bytes at 0x0"):
        call("ncclCommRegister", pair.comms[0], None, 16, ctypes.byref(handles[0]))


def test_windows_have_the_same_numbers_everywhere(pair: Ranks) -> None:
    pointers = [allocate(4096) for _ in range(2)]
    numbers = [pair.run(lambda rank, comm: window(comm, pointers[rank], 4096)) for _ in range(3)]
    assert all(a == b for a, b in numbers)
    assert len({a for a, _ in numbers}) == 3
    found = ctypes.c_void_p()
    for rank, comm in enumerate(pair.comms):
        call("ncclWinGetUserPtr", comm, numbers[1][rank], ctypes.byref(found))
        assert found.value == pointers[rank]
        call("ncclCommWindowDeregister", comm, numbers[1][rank])
        for name, *out in (("ncclCommWindowDeregister",), ("ncclWinGetUserPtr", ctypes.byref(found))):
            with pytest.raises(CallFailed, match="which this communicator does not have") as refused:
                call(name, comm, numbers[1][rank], *out)
            assert refused.value.code is Result.INVALID_ARGUMENT
    for pointer in pointers:
        call("ncclMemFree", pointer)


def test_one_thread_registers_for_several_ranks_in_a_group(pair: Ranks) -> None:
    pointers, out = [allocate(4096) for _ in range(2)], [ctypes.c_void_p() for _ in range(2)]
    call("ncclGroupStart")
    for comm, pointer, handle in zip(pair.comms, pointers, out, strict=True):
        call("ncclCommWindowRegister", comm, pointer, 4096, ctypes.byref(handle), 0)
    call("ncclGroupEnd")
    assert out[0].value == out[1].value is not None
    for pointer in pointers:
        call("ncclMemFree", pointer)


def test_what_one_rank_does_wrong_is_an_error_on_all(pair: Ranks) -> None:
    pointers = [allocate(4096) or 0 for _ in range(2)]
    cases = [
        ([(pointers[0], 4096, 0), (pointers[1] + 64, 4, 0)], "rank 1 passes a buffer that is empty or does not start"),
        ([(None, 4096, 0), (pointers[1], 4096, 0)], "rank 0 passes a buffer that is empty"),
        ([(pointers[0], 4096, 8), (pointers[1], 4096, 0)], "rank 0 passes winFlags 0x8; expected 0 to 3"),
        ([(pointers[0], 4096, 1), (pointers[1], 4096, 0)], r"the ranks disagree.*winFlags \[1, 0\]"),
    ]
    for arguments, text in cases:

        def body(rank: int, comm: int, arguments=arguments, text=text) -> None:  # type: ignore[no-untyped-def]
            with pytest.raises(CallFailed, match=text):
                window(comm, *arguments[rank])

        pair.run(body)
        assert last.value is None
    assert len(set(pair.run(lambda rank, comm: window(comm, pointers[rank], 4096)))) == 1  # still in step
    for pointer in pointers:
        call("ncclMemFree", pointer)
