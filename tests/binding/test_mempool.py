"""Memory pools for torch's allocator: it gets C functions, which never wait for the GIL."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from libraries import Stub

import pynccl
from pynccl.comm import mempool

SIZES = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


def test_mempool_allocator_calls_nccl() -> None:
    stub = Stub()
    functions = mempool.allocator_functions(stub.library)
    alloc: Any = ctypes.CFUNCTYPE(ctypes.c_void_p, *SIZES)(functions[0])
    free: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *SIZES)(functions[1])
    pointer = alloc(1 << 13, 3, 0xC0DE)
    ctypes.memset(pointer, 1, 1 << 13)
    free(pointer, 1 << 13, 3, 0xC0DE)
    assert [(call.name, *call.args.values()) for call in stub.calls()] == [
        ("ncclMemAlloc", 1 << 13),
        ("ncclMemFree", pointer),
    ]
    stub.fail("ncclMemAlloc", 1)  # the pointer that the stub then sets must be ignored
    assert alloc((1 << 45) + 8, 0, None) is None
    assert stub.calls()[-1].args["size"] == (1 << 45) + 8  # sizes above 32 bits are not truncated


def test_mem_pool_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="the host library has no GPU memory; allocate CPU tensors as usual"):
        pynccl.mem_pool(Stub().cpu_library)
    with pytest.raises(pynccl.NcclVersionError, match=r"ncclMemAlloc needs NCCL >= 2\.19"):
        pynccl.mem_pool(Stub((2, 18, 3)).library)
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(mempool, "_compiled", {})
    with pytest.raises(RuntimeError, match=r"could not be compiled: .*\n  install a C compiler \(apt install gcc\)"):
        pynccl.mem_pool(Stub().library)
