"""Memory from ncclMemAlloc: views, lifetime, registration and windows."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from libraries import Stub

import pynccl
from pynccl import DataType, Memory, mem_alloc
from pynccl.interop import dlpack

NAMES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64")


def alloc(stub: Stub, shape: Any, dtype: Any = "float32") -> Memory:
    return mem_alloc(shape, dtype, library=stub.cpu_library)


def test_mem_alloc_size_and_single_free() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    with alloc(stub, (2, 3), "float16") as memory:
        assert (memory.shape, memory.nbytes, memory.dtype) == ((2, 3), 12, DataType.FLOAT16)
        address = memory.pointer
    memory.free()
    assert [(call.name, *call.args.values()) for call in stub.calls()] == [
        ("ncclMemAlloc", 12),
        ("ncclMemFree", address),
    ]
    stub.clear()
    assert mem_alloc(100, library=stub.cpu_library).nbytes == 100  # without a dtype, the shape is in bytes
    assert (alloc(stub, np.int64(5)).shape, alloc(stub, ()).nbytes, alloc(stub, (3, 0)).nbytes) == ((5,), 4, 0)
    assert [call.args["size"] for call in stub.calls()] == [100, 20, 4, 1]  # NCCL cannot allocate 0 bytes
    for use in (torch.from_dlpack, np.asarray, comm.all_reduce, comm.register, comm.window):
        with pytest.raises(ValueError, match=r"this memory \(shape \(2, 3\), FLOAT16\) was freed"):
            use(memory)


INVALID: list[tuple[Any, Any, type[Exception], str]] = [
    ((2, -3), "float32", ValueError, r"mem_alloc: shape is .*, expected sizes >= 0"),
    ((2, 1.5), "float32", TypeError, r"mem_alloc: shape is .*, expected an integer or a sequence of integers"),
    *((kind, "float32", TypeError, "mem_alloc: shape is") for kind in (True, (2, True), {2, 3}, torch.tensor(True))),
    ("4", "float32", TypeError, r"mem_alloc: shape is .*, expected an integer or a sequence of integers"),
    (4, torch.complex64, TypeError, "complex64 has no NCCL data type"),
]


def test_invalid_mem_alloc_raises() -> None:
    stub = Stub()
    for shape, dtype, kind, message in INVALID:
        with pytest.raises(kind, match=message):
            alloc(stub, shape, dtype)
    assert stub.names() == []
    stub.fail("ncclMemAlloc", 1)
    with pytest.raises(pynccl.NcclUnhandledCudaError, match=r"^ncclMemAlloc\(4096 bytes\) failed"):
        alloc(stub, 1024)


@pytest.mark.parametrize("name", [*NAMES, "bfloat16"])
def test_torch_and_numpy_views_share_and_keep_memory(name: str) -> None:
    memory, before = alloc(Stub(), (2, 3), name), len(dlpack._exported)
    view, capsule = torch.from_dlpack(memory), memory.__dlpack__()
    assert (view.shape, view.data_ptr(), view.device.type) == ((2, 3), memory.pointer, "cpu")
    assert pynccl.interop.buffers.data_type(view.dtype) is memory.dtype
    view.fill_(1)
    if name in NAMES:
        array = np.asarray(memory)
        assert (array.shape, array.dtype, array.ctypes.data) == ((2, 3), np.dtype(name), memory.pointer)
        assert (array == 1).all() and (np.from_dlpack(memory) == 1).all()
    del memory
    gc.collect()
    assert len(dlpack._exported) >= before + 2 and (view == 1).all()
    del view, capsule
    gc.collect()
    assert len(dlpack._exported) == before


def test_registration_and_window_close_with_block() -> None:
    stub = Stub()
    comm, x = stub.comm(cpu=True), torch.zeros(6, dtype=torch.float64)
    with comm.register(x) as registered:
        assert (registered.nbytes, registered.buf) == (48, x)
    registered.close()
    assert [(call.name, call.args) for call in stub.calls()] == [
        ("ncclCommRegister", {"rank": 1, "buffer": x.data_ptr(), "size": 48}),
        ("ncclCommDeregister", {"rank": 1, "handle": 0x5000}),
    ]
    stub.clear()
    with comm.window(x) as window:
        assert (window.handle, window.nbytes, window.user_pointer()) == (0x6000, 48, 0x7000)
    window.close()
    assert [(call.name, call.args) for call in stub.calls()] == [
        ("ncclCommWindowRegister", {"rank": 1, "buffer": x.data_ptr(), "size": 48, "flags": 1}),  # symmetric
        ("ncclWinGetUserPtr", {"rank": 1, "window": 0x6000}),
        ("ncclCommWindowDeregister", {"rank": 1, "window": 0x6000}),
    ]
    with pytest.raises(ValueError, match="this window of 48 bytes was closed"):
        _ = window.handle
    open_handles = comm.register(x), comm.window(x, flags=0)
    comm.destroy()
    stub.clear()
    for handle in open_handles:  # NCCL has freed them with the communicator
        handle.close()
    assert stub.names() == []
