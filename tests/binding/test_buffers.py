"""Anything that owns memory is described as (pointer, count, type, device), or refused with what to pass instead."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bad_calls import CudaArray

import pynccl
from pynccl import DataType
from pynccl.interop.buffers import ANY_DEVICE, CPU, adapter, data_type

TORCH_TYPES = {
    torch.int8: DataType.INT8,
    torch.uint8: DataType.UINT8,
    torch.int32: DataType.INT32,
    torch.uint32: DataType.UINT32,
    torch.int64: DataType.INT64,
    torch.uint64: DataType.UINT64,
    torch.float16: DataType.FLOAT16,
    torch.float32: DataType.FLOAT32,
    torch.float64: DataType.FLOAT64,
    torch.bfloat16: DataType.BFLOAT16,
    torch.float8_e4m3fn: DataType.FLOAT8_E4M3,
    torch.float8_e5m2: DataType.FLOAT8_E5M2,
}


class OnlyDlpack:
    """What another array library shows of itself: a tensor behind the two DLPack methods."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, index = self.tensor.__dlpack_device__()
        return int(kind), index


def describe(x: Any) -> tuple[int, int, int, int]:
    return adapter(x).describe(x)


@pytest.mark.parametrize("dtype", TORCH_TYPES, ids=str)
def test_torch_tensors_of_all_types_are_described(dtype: torch.dtype) -> None:
    x = torch.zeros(3, 5, dtype=dtype)
    assert describe(x) == (x.data_ptr(), 15, TORCH_TYPES[dtype], CPU)


def test_parameters_and_views_are_tensors_too() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 2))
    assert describe(parameter) == (parameter.data_ptr(), 8, DataType.FLOAT32, CPU)
    rows = torch.zeros(4, 2)[1:3]
    assert describe(rows) == (rows.data_ptr(), 4, DataType.FLOAT32, CPU)
    assert describe(torch.zeros(()))[1] == 1
    assert describe(torch.zeros(0, 7))[1] == 0


@pytest.mark.parametrize(
    "name", ["int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"]
)
def test_numpy_arrays_are_described(name: str) -> None:
    x = np.zeros((2, 3), dtype=name)
    assert describe(x) == (x.ctypes.data, 6, DataType[name.upper()], CPU)


def test_raw_memory_is_taken_at_its_word() -> None:
    assert describe((1 << 46, 3 << 31, "bfloat16")) == (1 << 46, 3 << 31, DataType.BFLOAT16, ANY_DEVICE)
    assert describe((0, 0, DataType.INT8)) == (0, 0, DataType.INT8, ANY_DEVICE)
    assert describe((64, 2, torch.float16))[2] == DataType.FLOAT16
    assert describe((64, 2, np.dtype("int64")))[2] == DataType.INT64
    assert describe((64, 2, np.float64))[2] == DataType.FLOAT64


@pytest.mark.parametrize("raw", [(1, 2), (1.5, 2, "int8"), (-8, 2, "int8"), (8, -2, "int8"), ("x", 2, "int8")])
def test_a_malformed_tuple_says_what_a_raw_buffer_is(raw: Any) -> None:
    with pytest.raises(TypeError) as caught:
        describe(raw)
    assert str(caught.value) == f"a raw buffer is (pointer, count in elements, dtype); got {raw!r}"


@pytest.mark.parametrize(
    "dtype", [t for t in TORCH_TYPES if t not in (torch.float8_e4m3fn, torch.float8_e5m2)], ids=str
)
def test_dlpack_objects_are_described(dtype: torch.dtype) -> None:
    x = torch.zeros(4, 3, dtype=dtype)
    assert describe(OnlyDlpack(x)) == (x.data_ptr(), 12, TORCH_TYPES[dtype], CPU)
    assert describe(OnlyDlpack(x[2:])) == (x[2:].data_ptr(), 6, TORCH_TYPES[dtype], CPU)


def test_describing_leaves_a_dlpack_object_alive() -> None:
    x = torch.arange(1000.0)
    wrapped = OnlyDlpack(x)
    pointers = {describe(wrapped)[0] for _ in range(100)}
    assert pointers == {x.data_ptr()}
    assert x.sum() == 499500.0


class Offset:
    """A DLPack object whose data begins `byte_offset` after its pointer, which torch never makes."""

    def __init__(self, byte_offset: int) -> None:
        self.shape = (ctypes.c_int64 * 2)(3, 5)
        self.struct = dlpack_tensor(4096, 2, self.shape, byte_offset)

    def __dlpack__(self, **options: Any) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.struct), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def dlpack_tensor(data: int, ndim: int, shape: Any, byte_offset: int) -> Any:
    """DLTensor of float32 on the CPU, as dlpack.h lays it out, without strides: they are those of a dense array."""
    layout = struct.pack("PiiiBBHPPQ", data, 1, 0, ndim, 2, 32, 1, ctypes.addressof(shape), 0, byte_offset)
    return ctypes.create_string_buffer(layout)


def test_dlpack_data_begins_at_its_offset() -> None:
    assert describe(Offset(0)) == (4096, 15, DataType.FLOAT32, CPU)
    assert describe(Offset(64)) == (4160, 15, DataType.FLOAT32, CPU)


def test_cuda_arrays_are_described() -> None:
    assert describe(CudaArray()) == (4096, 12, DataType.FLOAT32, ANY_DEVICE)
    assert describe(CudaArray(typestr="|u1", strides=(3, 1)))[1:3] == (12, DataType.UINT8)
    assert describe(CudaArray(shape=(), data=(64, False)))[1] == 1
    assert describe(CudaArray(shape=(0, 5), data=(None, False)))[:2] == (0, 0)
    on_gpu_3 = CudaArray()
    on_gpu_3.device = SimpleNamespace(id=3)  # type: ignore[attr-defined]
    assert describe(on_gpu_3)[3] == 3


NOT_CONTIGUOUS = {
    "torch": (torch.zeros(4, 6).t(), "shape (6, 4) and strides (1, 6) is not contiguous; pass x.contiguous()"),
    "numpy": (np.zeros((4, 6), "f4")[:, ::2], "strides (24, 8) is not contiguous; pass numpy.ascontiguousarray(x)"),
    "cuda array": (CudaArray(strides=(4, 16)), "shape (4, 3) and byte strides (4, 16) is not contiguous; pass a copy"),
    "dlpack": (OnlyDlpack(torch.zeros(4, 6)[:, :3]), "byte strides (24, 4) is not contiguous; pass a copy"),
}


@pytest.mark.parametrize("kind", NOT_CONTIGUOUS)
def test_gaps_in_memory_are_refused(kind: str) -> None:
    x, message = NOT_CONTIGUOUS[kind]
    with pytest.raises(ValueError) as caught:
        describe(x)
    assert message in str(caught.value)


NO_TYPE = {
    "complex": (
        torch.zeros(2, dtype=torch.complex64),
        "torch.complex64 has no NCCL data type",
        "torch.view_as_real(x)",
    ),
    "complex numpy": (np.zeros(2, "c16"), "complex128 has no NCCL data type", "view it as real"),
    "bool": (torch.zeros(2, dtype=torch.bool), "torch.bool has no NCCL data type", "x.view(torch.uint8)"),
    "short": (torch.zeros(2, dtype=torch.int16), "torch.int16 has no NCCL data type", "convert it to int32"),
    "text": (np.array(["a"]), "has no NCCL data type", "NCCL knows bfloat16, "),
    "cuda array": (CudaArray(typestr="<c8"), "typestr '<c8' has no NCCL data type", "view it as another"),
    "dlpack": (OnlyDlpack(torch.zeros(2, dtype=torch.complex64)), "DLPack type (code 5, 64 bits", "no NCCL data type"),
}


@pytest.mark.parametrize("kind", NO_TYPE)
def test_types_that_nccl_lacks_are_refused_with_a_way_out(kind: str) -> None:
    x, what, instead = NO_TYPE[kind]
    with pytest.raises(TypeError) as caught:
        describe(x)
    assert what in str(caught.value) and instead in str(caught.value)


NO_BUFFER: list[Any] = [[1.0, 2.0], None, 3, "abc", b"abc", {}, ctypes.c_int(1)]


@pytest.mark.parametrize("x", NO_BUFFER, ids=repr)
def test_other_objects_are_refused_with_a_list_of_buffers(x: Any) -> None:
    with pytest.raises(TypeError) as caught:
        adapter(x)
    assert f"a {type(x).__module__}.{type(x).__name__} is no buffer" in str(caught.value)
    assert "torch tensor, a NumPy or CuPy array" in str(caught.value)


@pytest.mark.parametrize("x", [torch.zeros(3, device="meta"), torch.zeros(3).to_sparse()], ids=["meta", "sparse"])
def test_tensors_without_dense_memory_are_refused(x: torch.Tensor) -> None:
    with pytest.raises(TypeError, match=r"tensor on .* owns no dense memory; pass a dense tensor"):
        describe(x)


def test_read_only_memory_is_refused_as_recv() -> None:
    array = np.zeros(3)
    adapter(array).check_writable(array)
    array.flags.writeable = False
    with pytest.raises(ValueError, match=r"array of shape \(3,\) is read-only"):
        adapter(array).check_writable(array)
    with pytest.raises(ValueError, match="read-only"):
        adapter(CudaArray()).check_writable(CudaArray(data=(4096, True)))


def test_an_allocated_result_is_like_the_input() -> None:
    tensor = torch.zeros(4, 2, dtype=torch.bfloat16)
    result = adapter(tensor).empty(tensor, (8, 2))
    assert (result.shape, result.dtype, result.device) == ((8, 2), torch.bfloat16, tensor.device)
    array = adapter(np.zeros(1, "u8")).empty(np.zeros(1, "u8"), (5,))
    assert (array.shape, array.dtype) == ((5,), np.dtype("u8"))
    for x in ((64, 4, "int8"), CudaArray(), OnlyDlpack(torch.zeros(2))):
        with pytest.raises(TypeError, match=r"cannot allocate the result like a .*: pass recv="):
            adapter(x).empty(x, (4,))


def test_memory_without_a_stream_of_its_own_asks_for_one() -> None:
    assert adapter(torch.zeros(1)).current_stream(torch.zeros(1), CPU) == 0
    assert adapter(np.zeros(1)).current_stream(np.zeros(1), CPU) == 0
    assert adapter(CudaArray()).current_stream(CudaArray(stream=77), 0) == 77
    for x in ((64, 4, "int8"), CudaArray()):
        with pytest.raises(TypeError, match=r"has no current stream: pass stream="):
            adapter(x).current_stream(x, 0)


def test_types_are_named_in_many_ways() -> None:
    for spelling in ("float8_e4m3fn", "float8_e4m3", torch.float8_e4m3fn, DataType.FLOAT8_E4M3):
        assert data_type(spelling) is DataType.FLOAT8_E4M3
    assert data_type(np.float32) is data_type("float32") is data_type(torch.float) is pynccl.DataType.FLOAT32


def test_what_is_equal_to_a_data_type_is_none() -> None:
    for known in (torch.float32, np.dtype("f4"), "float32", pynccl.DataType.FLOAT32):
        assert data_type(known) is data_type(known) is pynccl.DataType.FLOAT32
    for other in (7, 7.0, np.int64(7), np.dtype(">f4"), ["float32"]):
        with pytest.raises(TypeError, match=r"no NCCL data type|byte order"):
            data_type(other)


@pytest.mark.parametrize(
    ("name", "given", "hint"),
    [
        ("broadcast", 0, "broadcast(send, root=0)"),
        ("all_reduce", "max", "all_reduce(send, op='max')"),
        ("reduce", pynccl.RedOp.MIN, "reduce(send, op='min')"),
        ("all_gather", 0, None),
        ("all_reduce", 0, None),
    ],
)
def test_what_others_have_in_the_place_of_recv_is_told_by_its_name(name: str, given: Any, hint: str | None) -> None:
    (comm,) = pynccl.init_all(1)
    with comm, pytest.raises(TypeError, match=r"recv: a .* is no buffer") as caught:
        getattr(comm, name)(np.ones(4, "float32"), given)
    said = str(caught.value)
    assert said.endswith(f"; what is not recv goes by its name: {hint}") if hint else "by its name" not in said
