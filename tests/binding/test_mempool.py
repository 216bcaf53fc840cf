"""What torch's allocator is given for a pool of NCCL's memory: C functions, in which no thread waits for the GIL."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from libraries import Stub

import pynccl
from pynccl import Library
from pynccl.comm import mempool

SIZES = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


def c_allocator(library: Library) -> tuple[Any, Any]:
    """(alloc, free) as torch has them: by address, with its signatures."""
    alloc, free = mempool.allocator_functions(library)
    return ctypes.CFUNCTYPE(ctypes.c_void_p, *SIZES)(alloc), ctypes.CFUNCTYPE(None, ctypes.c_void_p, *SIZES)(free)


def test_torch_gets_ncclMemAllocs_memory_and_gives_it_back() -> None:
    stub = Stub()
    alloc, free = c_allocator(stub.library)
    pointers = [alloc(1 << 13, device, 0xC0DE) for device in (0, 3)]
    for pointer in pointers:
        ctypes.memset(pointer, 1, 1 << 13)
        free(pointer, 1 << 13, 0, 0xC0DE)
    assert [(call.name, *call.args.values()) for call in stub.calls()] == [
        *[("ncclMemAlloc", 1 << 13)] * 2,
        *[("ncclMemFree", pointer) for pointer in pointers],
    ]


def test_torch_gets_null_when_there_is_no_memory() -> None:
    stub = Stub()
    alloc, _ = c_allocator(stub.library)
    for code in (1, 7, -1):  # the pointer that the stub leaves there is none
        stub.fail("ncclMemAlloc", code)
        assert alloc((1 << 45) + 8, 0, None) is None
    assert stub.calls()[0].args["size"] == (1 << 45) + 8  # more than 32 bits arrive whole


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch, compiler: str) -> None:
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setattr(mempool, "_compiled", {})
    with pytest.raises(
        RuntimeError, match=r"could not be compiled: .*\n  install a C compiler \(apt install gcc\) or name"
    ):
        pynccl.mem_pool(Stub().library)


def test_a_pool_is_made_of_these_functions_which_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Stub().library
    functions = mempool.allocator_functions(library)
    monkeypatch.setattr(mempool, "_compile", lambda: 1 // 0)
    monkeypatch.setattr(torch._C, "_cuda_customAllocator", lambda *given: given, raising=False)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: ("pool", allocator))
    assert pynccl.mem_pool(library) == ("pool", functions)


def test_there_is_no_pool_on_the_host_library_or_an_old_one() -> None:
    with pytest.raises(RuntimeError, match="the host library has no GPU memory; allocate CPU tensors as usual"):
        pynccl.mem_pool(Stub().cpu_library)
    with pytest.raises(pynccl.NcclVersionError, match=r"ncclMemAlloc needs NCCL >= 2\.19"):
        pynccl.mem_pool(Stub((2, 18, 3)).library)
