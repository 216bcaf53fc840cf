"""Every buffer is described as (pointer, count, dtype, device), or raises an error that says what to pass instead."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bad_calls import CudaArray
from libraries import Stub
from reference import DTYPES

from pynccl import DataType
from pynccl.interop import buffers, streams
from pynccl.interop.buffers import ANY_DEVICE, CPU, adapter, data_type


class OnlyDlpack:
    """A tensor that is accessible only through DLPack, like an array of another library."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, index = self.tensor.__dlpack_device__()
        return int(kind), index


def describe(x: Any) -> tuple[int, int, int, int]:
    return adapter(x).describe(x)


def test_describe_all_dtypes() -> None:
    for name, dtype in DTYPES.items():
        x, known = torch.zeros(4, 3, dtype=dtype), DataType[name.upper()]
        assert describe(x) == (x.data_ptr(), 12, known, CPU)
        assert data_type(name) is data_type(dtype) is known
        if name in np.sctypeDict:
            array = np.zeros((2, 3), dtype=name)
            assert describe(array) == (array.ctypes.data, 6, known, CPU)
        if not name.startswith("float8"):
            wrapped = OnlyDlpack(x[2:])
            pointers = {describe(wrapped) for _ in range(3)}  # describing it leaves it alive
            assert pointers == {(x[2:].data_ptr(), 6, known, CPU)}
    parameter = torch.nn.Parameter(torch.zeros(4, 2))
    assert describe(parameter) == (parameter.data_ptr(), 8, DataType.FLOAT32, CPU)
    assert (describe(torch.zeros(()))[1], describe(torch.zeros(0, 7))[1]) == (1, 0)
    assert describe((1 << 46, 3 << 31, "bfloat16")) == (1 << 46, 3 << 31, DataType.BFLOAT16, ANY_DEVICE)
    for other in (7, 7.0, np.int64(7), np.dtype(">f4"), ["float32"]):
        with pytest.raises(TypeError, match=r"no NCCL data type|byte order"):
            data_type(other)


def test_describe_arrays_of_other_libraries() -> None:
    assert describe(CudaArray()) == (4096, 12, DataType.FLOAT32, ANY_DEVICE)
    assert describe(CudaArray(typestr="|u1", strides=(3, 1)))[1:3] == (12, DataType.UINT8)
    assert describe(CudaArray(shape=(), data=(64, False)))[1] == 1
    assert describe(CudaArray(shape=(0, 5), data=(None, False)))[:2] == (0, 0)
    assert adapter(CudaArray()).current_stream(CudaArray(stream=77), 0) == 77


NO_TYPE, GAPS = "has no NCCL data type", "is not contiguous; pass"
INVALID: list[tuple[Any, type[Exception], tuple[str, ...]]] = [
    (np.zeros((4, 6), "f4")[:, ::2], ValueError, (f"strides (24, 8) {GAPS} numpy.ascontiguousarray(x)",)),
    (CudaArray(strides=(4, 16)), ValueError, (f"shape (4, 3) and byte strides (4, 16) {GAPS} a copy",)),
    (OnlyDlpack(torch.zeros(4, 6)[:, :3]), ValueError, (f"byte strides (24, 4) {GAPS} a copy",)),
    (torch.zeros(2, dtype=torch.complex64), TypeError, (f"torch.complex64 {NO_TYPE}", "torch.view_as_real(x)")),
    (np.zeros(2, "c16"), TypeError, (f"complex128 {NO_TYPE}", "view it as real")),
    (torch.zeros(2, dtype=torch.int16), TypeError, (f"torch.int16 {NO_TYPE}", "convert it to int32")),
    (np.array(["a"]), TypeError, (NO_TYPE, "NCCL knows bfloat16, ")),
    (CudaArray(typestr="<c8"), TypeError, (f"typestr '<c8' {NO_TYPE}", "view it as another")),
    (
        OnlyDlpack(torch.zeros(2, dtype=torch.complex64)),
        TypeError,
        ("DLPack type (code 5, 64 bits", "no NCCL data type"),
    ),
    (torch.zeros(3, device="meta"), TypeError, ("tensor on meta owns no dense memory; pass a dense tensor",)),
    *(
        (x, TypeError, (f"buffer is {kind}, expected a torch tensor, a NumPy or",))
        for x, kind in (([1.0, 2.0], "a list"), (None, "None"), (3, "an int"), ("abc", "a str"), (b"abc", "a bytes"))
    ),
    *(
        (x, TypeError, (f"a raw buffer is (pointer, count in elements, dtype); got {x!r}",))
        for x in ((1, 2), (1.5, 2, "int8"), (-8, 2, "int8"), (8, -2, "int8"))
    ),
]


@pytest.mark.parametrize(("x", "error", "parts"), INVALID, ids=range(len(INVALID)))
def test_unsupported_buffer_raises_with_remedy(x: Any, error: type[Exception], parts: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        describe(x)
    assert all(part in str(caught.value) for part in parts)


def test_read_only_cuda_array_interface() -> None:
    adapter(CudaArray()).check_writable(CudaArray())
    with pytest.raises(ValueError, match="read-only"):
        adapter(CudaArray()).check_writable(CudaArray(data=(4096, True)))


# CuPy needs a GPU, so a fake module with its signatures replaces it.


class Array(CudaArray):
    """The attributes of a cupy.ndarray that are used."""

    def __init__(self, device: int | None) -> None:
        super().__init__(shape=(4,))
        self.shape, self.dtype = (4,), "float32"
        if device is not None:
            self.device = SimpleNamespace(id=device)


Array.__module__ = "cupy"


def test_cupy_array_uses_cupy_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("cupy")  # in CuPy, -1 means the current GPU; None is invalid
    module.cuda = SimpleNamespace(  # type: ignore[attr-defined]
        get_current_stream=lambda device=-1: SimpleNamespace(ptr=0x200 + device)
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(buffers, "adapters", dict(buffers.adapters))
    for device, handle in ((3, 0x203), (ANY_DEVICE, 0x1FF)):
        x = Array(None if device == ANY_DEVICE else device)
        assert (describe(x)[3], adapter(x).current_stream(x, device)) == (device, handle)
    stub = Stub()
    stub.comm().all_reduce(Array(0), Array(None))
    assert stub.calls()[0].args["stream"] == 0x200
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    assert streams._current_handle(2) == 0x202
