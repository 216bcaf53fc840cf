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
def test_memory_of_all_types_is_described(dtype: torch.dtype) -> None:
    x, known = torch.zeros(4, 3, dtype=dtype), TORCH_TYPES[dtype]
    assert describe(x) == (x.data_ptr(), 12, known, CPU)
    if known.name.lower() in np.sctypeDict:
        array = np.zeros((2, 3), dtype=known.name.lower())
        assert describe(array) == (array.ctypes.data, 6, known, CPU)
    if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        for tensor in (x, x[2:]):
            wrapped = OnlyDlpack(tensor)
            pointers = {describe(wrapped) for _ in range(3)}  # which leaves it alive
            assert pointers == {(tensor.data_ptr(), tensor.numel(), known, CPU)}


def test_parameters_and_views_are_tensors_too() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 2))
    assert describe(parameter) == (parameter.data_ptr(), 8, DataType.FLOAT32, CPU)
    rows = torch.zeros(4, 2)[1:3]
    assert describe(rows) == (rows.data_ptr(), 4, DataType.FLOAT32, CPU)
    assert (describe(torch.zeros(()))[1], describe(torch.zeros(0, 7))[1]) == (1, 0)


def test_raw_memory_is_taken_at_its_word() -> None:
    assert describe((1 << 46, 3 << 31, "bfloat16")) == (1 << 46, 3 << 31, DataType.BFLOAT16, ANY_DEVICE)
    assert describe((0, 0, DataType.INT8)) == (0, 0, DataType.INT8, ANY_DEVICE)


@pytest.mark.parametrize("raw", [(1, 2), (1.5, 2, "int8"), (-8, 2, "int8"), (8, -2, "int8"), ("x", 2, "int8")])
def test_a_malformed_tuple_says_what_a_raw_buffer_is(raw: Any) -> None:
    with pytest.raises(TypeError) as caught:
        describe(raw)
    assert str(caught.value) == f"a raw buffer is (pointer, count in elements, dtype); got {raw!r}"


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


NO_TYPE, GAPS = "has no NCCL data type", "is not contiguous; pass"
REFUSED: list[tuple[Any, type[Exception], tuple[str, ...]]] = [
    (torch.zeros(4, 6).t(), ValueError, (f"shape (6, 4) and strides (1, 6) {GAPS} x.contiguous()",)),
    (np.zeros((4, 6), "f4")[:, ::2], ValueError, (f"strides (24, 8) {GAPS} numpy.ascontiguousarray(x)",)),
    (CudaArray(strides=(4, 16)), ValueError, (f"shape (4, 3) and byte strides (4, 16) {GAPS} a copy",)),
    (OnlyDlpack(torch.zeros(4, 6)[:, :3]), ValueError, (f"byte strides (24, 4) {GAPS} a copy",)),
    (torch.zeros(2, dtype=torch.complex64), TypeError, (f"torch.complex64 {NO_TYPE}", "torch.view_as_real(x)")),
    (np.zeros(2, "c16"), TypeError, (f"complex128 {NO_TYPE}", "view it as real")),
    (torch.zeros(2, dtype=torch.bool), TypeError, (f"torch.bool {NO_TYPE}", "x.view(torch.uint8)")),
    (torch.zeros(2, dtype=torch.int16), TypeError, (f"torch.int16 {NO_TYPE}", "convert it to int32")),
    (np.array(["a"]), TypeError, (NO_TYPE, "NCCL knows bfloat16, ")),
    (CudaArray(typestr="<c8"), TypeError, (f"typestr '<c8' {NO_TYPE}", "view it as another")),
    (OnlyDlpack(torch.zeros(2).cfloat()), TypeError, ("DLPack type (code 5, 64 bits", "no NCCL data type")),
    (torch.zeros(3, device="meta"), TypeError, ("tensor on meta owns no dense memory; pass a dense tensor",)),
    (torch.zeros(3).to_sparse(), TypeError, ("tensor on cpu owns no dense memory", "x.to_dense()")),
    *(
        (x, TypeError, (f"a {type(x).__module__}.{type(x).__name__} is no buffer", "torch tensor, a NumPy or CuPy ar"))
        for x in ([1.0, 2.0], None, 3, "abc", b"abc", {}, ctypes.c_int(1))
    ),
]


@pytest.mark.parametrize(("x", "error", "says"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_no_dense_memory_of_a_known_type_is_refused_with_a_way_out(
    x: Any, error: type[Exception], says: tuple[str, ...]
) -> None:
    with pytest.raises(error) as caught:
        describe(x)
    assert all(part in str(caught.value) for part in says)


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


def test_types_are_named_in_many_ways_but_not_by_what_is_equal_to_one() -> None:
    for spelling in ("float8_e4m3fn", "float8_e4m3", torch.float8_e4m3fn, DataType.FLOAT8_E4M3):
        assert data_type(spelling) is DataType.FLOAT8_E4M3
    for known in (torch.float32, np.float32, np.dtype("f4"), "float32", DataType.FLOAT32):
        assert data_type(known) is data_type(known) is DataType.FLOAT32
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
