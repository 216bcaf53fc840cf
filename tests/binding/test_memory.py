"""Memory of NCCL's own: what views of it share, when it goes, and what registration and windows are given."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from libraries import Stub

import pynccl
from pynccl import DataType, Memory, mem_alloc
from pynccl.bindings import abi
from pynccl.interop import dlpack

NAMES = {"int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"}


def alloc(stub: Stub, shape: Any, dtype: Any = "float32") -> Memory:
    return mem_alloc(shape, dtype, library=stub.cpu_library)


def on_gpu(stub: Stub, dtype: DataType = DataType.FLOAT32) -> Memory:
    """As mem_alloc makes it on GPU 1; the address is of no memory here."""
    return Memory(0x7000, (2, 3), dtype, 1, stub.library)


# Allocation


def test_it_is_as_large_as_its_shape_and_type_say() -> None:
    stub = Stub()
    with alloc(stub, (2, 3), "bfloat16") as memory:
        assert (memory.shape, memory.nbytes, memory.dtype) == ((2, 3), 12, DataType.BFLOAT16)
        assert (memory.device, memory.pointer > 0) == ("cpu", True)
        assert repr(memory) == "<pynccl.Memory BFLOAT16 (2, 3) on cpu>"
    assert [(call.name, call.args.get("size")) for call in stub.calls()] == [
        ("ncclMemAlloc", 12),
        ("ncclMemFree", None),
    ]
    stub.clear()
    assert mem_alloc(100, library=stub.cpu_library).nbytes == 100  # bytes, where no type is given
    assert alloc(stub, np.int64(5)).shape == (5,)
    assert alloc(stub, ()).nbytes == 4
    assert alloc(stub, (3, 0)).nbytes == 0
    assert [call.args["size"] for call in stub.calls()] == [100, 20, 4, 1]  # NCCL has no memory of no bytes


def test_free_is_once() -> None:
    stub = Stub()
    memory = alloc(stub, 4)
    address = memory.pointer
    stub.clear()
    memory.free()
    memory.free()
    assert [(call.name, call.args["pointer"]) for call in stub.calls()] == [("ncclMemFree", address)]
    assert repr(memory) == "<pynccl.Memory FLOAT32 (4,) on cpu, freed>"


def test_freed_memory_cannot_be_used() -> None:
    stub = Stub()
    comm, memory = stub.comm(cpu=True), alloc(stub, 4)
    memory.free()
    stub.clear()
    uses = (torch.from_dlpack, np.from_dlpack, np.asarray, comm.all_reduce, comm.register, comm.window)
    for use in uses:
        with pytest.raises(ValueError, match=r"this memory \(shape \(4,\), FLOAT32\) was freed"):
            use(memory)
    assert stub.names() == []


def test_running_out_of_memory_is_an_error_and_never_a_pointer() -> None:
    stub = Stub()
    stub.fail("ncclMemAlloc", 1)
    with pytest.raises(pynccl.NcclUnhandledCudaError, match=r"^ncclMemAlloc\(4096 bytes\) failed"):
        alloc(stub, 1024)


@pytest.mark.parametrize("shape", [-1, (2, -3)])
def test_a_negative_size_is_refused(shape: Any) -> None:
    stub = Stub()
    with pytest.raises(ValueError, match=r"mem_alloc: shape is .*, expected sizes >= 0"):
        alloc(stub, shape)
    assert stub.names() == []


@pytest.mark.parametrize("shape", [2.5, (2, 1.5), "4", bytes(3), None])
def test_a_shape_is_whole_numbers(shape: Any) -> None:
    stub = Stub()
    with pytest.raises(TypeError, match=r"mem_alloc: shape is .*, expected a whole number or a sequence of them"):
        alloc(stub, shape)
    assert stub.names() == []


def test_a_type_that_nccl_lacks_is_refused() -> None:
    with pytest.raises(TypeError, match="complex64 has no NCCL data type"):
        alloc(Stub(), 4, torch.complex64)


def test_an_old_library_says_what_it_lacks() -> None:
    stub = Stub((2, 18, 3))
    with pytest.raises(pynccl.NcclVersionError, match=r"ncclMemAlloc"):
        alloc(stub, 4)
    with pytest.raises(pynccl.NcclVersionError) as caught:
        _ = stub.library.ncclMemAlloc
    assert str(caught.value) == f"ncclMemAlloc needs NCCL >= 2.19; loaded 2.18.3 from {stub.path}"


# Views


@pytest.mark.parametrize("dtype", [d for d in DataType if d.name.lower() in NAMES or d is DataType.BFLOAT16], ids=str)
def test_torch_sees_the_memory_itself(dtype: DataType) -> None:
    memory = alloc(Stub(), (2, 3), dtype)
    view = torch.from_dlpack(memory)
    assert (view.shape, view.data_ptr(), view.device.type) == ((2, 3), memory.pointer, "cpu")
    assert pynccl.interop.buffers.data_type(view.dtype) is dtype
    view.fill_(1)
    assert (torch.from_dlpack(memory) == 1).all()


@pytest.mark.parametrize("name", sorted(NAMES))
def test_numpy_sees_the_memory_itself(name: str) -> None:
    memory = alloc(Stub(), (2, 3), name)
    view = np.asarray(memory)
    assert (view.shape, view.dtype, view.ctypes.data) == ((2, 3), np.dtype(name), memory.pointer)
    view[...] = 7
    assert (np.from_dlpack(memory) == 7).all()


def test_a_view_keeps_its_memory_until_it_goes() -> None:
    before = len(dlpack._exported)
    memory = alloc(Stub(), 8)
    views = [torch.from_dlpack(memory), np.from_dlpack(memory)]
    assert len(dlpack._exported) == before + 2
    assert sys.getrefcount(memory) > 3
    del views
    gc.collect()
    assert len(dlpack._exported) == before


def test_a_capsule_that_nobody_takes_leaves_nothing_behind() -> None:
    before = len(dlpack._exported)
    memory = alloc(Stub(), 8)
    capsule = memory.__dlpack__()
    assert len(dlpack._exported) == before + 1
    del capsule
    gc.collect()
    assert len(dlpack._exported) == before


def test_an_interface_is_there_for_the_device_that_it_describes() -> None:
    stub = Stub()
    host, device = alloc(stub, (2, 3)), on_gpu(stub)
    assert not hasattr(host, "__cuda_array_interface__") and not hasattr(device, "__array_interface__")
    wanted = {"shape": (2, 3), "typestr": "<f4", "data": (0x7000, False), "version": 3, "strides": None}
    assert device.__cuda_array_interface__ == wanted
    assert host.__array_interface__ == {**wanted, "data": (host.pointer, False)}
    assert (host.__dlpack_device__(), device.__dlpack_device__()) == ((1, 0), (2, 1))
    assert device.device == "cuda:1"
    assert not hasattr(on_gpu(stub, DataType.BFLOAT16), "__cuda_array_interface__")  # which has no name for it


def test_it_is_a_buffer_of_every_type_on_every_device_in_any_order() -> None:
    stub = Stub()
    cpu = stub.comm(cpu=True)
    gpu = pynccl.Communicator.init_all([1], library=stub.cpu_library)[0]  # rank 0 of GPU 1
    gpu._ordinal = 1
    for dtype in (DataType.FLOAT32, DataType.BFLOAT16, DataType.FLOAT32):
        for comm, memory, stream in ((gpu, on_gpu(stub, dtype), 5), (cpu, alloc(stub, (2, 3), dtype), None)):
            stub.clear()
            assert comm.all_reduce(memory, memory, stream=stream) is memory
            (call,) = stub.calls()
            assert (call.args["send"], call.args["count"], call.args["dtype"]) == (memory.pointer, 6, int(dtype))
            assert call.args["stream"] == (stream or 0)
    with pytest.raises(ValueError, match=r"recv is on cuda:1, the communicator on cpu"):
        cpu.all_reduce(torch.zeros(6), on_gpu(stub))
    with pytest.raises(TypeError, match="Memory has no current stream: pass stream="):
        gpu.all_reduce(on_gpu(stub), on_gpu(stub))


# Registration and windows


def test_a_registration_lasts_as_long_as_its_block() -> None:
    stub = Stub()
    comm, x = stub.comm(cpu=True), torch.zeros(6, dtype=torch.float64)
    with comm.register(x) as registered:
        assert (registered.nbytes, registered.buf) == (48, x)
        (made,) = stub.calls()
        assert (made.name, made.args) == ("ncclCommRegister", {"rank": 1, "buffer": x.data_ptr(), "size": 48})
        stub.clear()
    registered.close()
    assert [(call.name, call.args) for call in stub.calls()] == [("ncclCommDeregister", {"rank": 1, "handle": 0x5000})]


def test_what_nccl_did_not_register_needs_no_deregistering() -> None:
    stub = Stub()
    stub.null("ncclCommRegister")  # as where registration is off
    stub.comm(cpu=True).register(torch.zeros(6)).close()
    assert stub.names() == ["ncclCommRegister"]


def test_a_window_lasts_as_long_as_its_block() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    memory = alloc(stub, 1024)
    stub.clear()
    with comm.window(memory) as window:
        assert (window.handle, window.nbytes, window.user_pointer()) == (0x6000, 4096, 0x7000)
        made, asked = stub.calls()
        symmetric = {"rank": 1, "buffer": memory.pointer, "size": 4096, "flags": 1}
        assert (made.name, made.args) == ("ncclCommWindowRegister", symmetric)
        assert (asked.name, asked.args) == ("ncclWinGetUserPtr", {"rank": 1, "window": 0x6000})
        stub.clear()
    window.close()
    assert [(c.name, c.args) for c in stub.calls()] == [("ncclCommWindowDeregister", {"rank": 1, "window": 0x6000})]
    with pytest.raises(ValueError, match="this window of 4096 bytes was closed"):
        _ = window.handle
    stub.clear()
    comm.window(memory, flags=0)
    assert stub.calls()[0].args["flags"] == 0


def test_a_buffer_that_nccl_declines_is_an_error_that_says_what_it_wants() -> None:
    stub = Stub()
    stub.null("ncclCommWindowRegister")
    with pytest.raises(ValueError, match=r"NCCL declined the buffer of 64 bytes: it must be of pynccl\.mem_alloc"):
        stub.comm(cpu=True).window(torch.zeros(16))


def test_what_is_closed_after_its_communicator_calls_nothing() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    registered, window = comm.register(torch.zeros(4)), comm.window(torch.zeros(4))
    comm.destroy()
    stub.clear()
    registered.close()
    window.close()
    assert stub.names() == []
    for make in (comm.register, comm.window):
        with pytest.raises(pynccl.NcclInvalidUsage, match="was destroyed"):
            make(torch.zeros(4))


def test_a_registration_that_fails_says_how_large_it_was() -> None:
    stub = Stub()
    for name, make in (("ncclCommRegister", "register"), ("ncclCommWindowRegister", "window")):
        stub.fail(name, 5)
        with pytest.raises(pynccl.NcclInvalidUsage, match=rf"^{name}\(64 bytes\) failed"):
            getattr(stub.comm(cpu=True), make)(torch.zeros(16))


@pytest.mark.parametrize("make", ["register", "window"])
def test_a_view_with_gaps_is_refused(make: str) -> None:
    stub = Stub()
    with pytest.raises(ValueError, match="is not contiguous"):
        getattr(stub.comm(cpu=True), make)(torch.zeros(4, 4)[:, 0])
    assert stub.names() == []


def test_older_libraries_say_what_they_lack() -> None:
    with pytest.raises(pynccl.NcclVersionError, match=r"ncclCommRegister needs NCCL >= 2\.19; loaded 2\.18\.3"):
        Stub((2, 18, 3)).comm().register((64, 1, "int8"))
    with pytest.raises(pynccl.NcclVersionError, match=r"ncclCommWindowRegister needs NCCL >= 2\.27; loaded 2\.26\.5"):
        Stub((2, 26, 5)).comm().window((64, 1, "int8"))


def test_a_process_without_torch_may_begin_with_memory_of_a_gpu(tmp_path: Path) -> None:
    source = """
import sys, ctypes
sys.modules["torch"] = None
import pynccl
from pynccl.interop.buffers import adapter
library = pynccl.load(sys.argv[1])
for dtype in (pynccl.DataType.FLOAT32, pynccl.DataType.BFLOAT16):  # of which only the first has an interface
    memory = pynccl.Memory(0x7000, (2, 3), dtype, 1, library)
    assert adapter(memory).describe(memory) == (0x7000, 6, int(dtype), 1)
library.is_host = True
with pynccl.mem_alloc(8, "float32", library=library) as memory:
    interface = memory.__array_interface__
    assert interface["data"][0] == memory.pointer and memory.__dlpack__() is not None
print(memory)
"""
    done = subprocess.run(
        [sys.executable, "-c", source, Stub().path],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(pynccl.__file__).parent.parent,
    )
    assert (done.stdout, done.stderr) == ("<pynccl.Memory FLOAT32 (8,) on cpu, freed>\n", "")
    assert abi.FUNCTIONS["ncclMemAlloc"].since == (2, 19)
