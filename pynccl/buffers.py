"""Anything that owns device memory -> (pointer, count, data type, device).

Torch tensors, NumPy and CuPy arrays, `__cuda_array_interface__`, DLPack, and `(pointer, count, dtype)`. Each kind of
object has one `Adapter`, found by its type, so that describing a tensor costs a dictionary look-up and four attributes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

from . import dlpack
from .abi import ITEMSIZE, DataType

# (address, number of elements, DataType as int, CUDA ordinal). A plain tuple: this is built on every call.
Description = tuple[int, int, int, int]

CPU = -1  # the "ordinal" of CPU memory, as torch.Tensor.get_device() has it
ANY_DEVICE = -2  # a raw pointer: the caller answers for where it lies

_BY_NAME: dict[str, DataType] = {
    "int8": DataType.INT8,
    "uint8": DataType.UINT8,
    "int32": DataType.INT32,
    "uint32": DataType.UINT32,
    "int64": DataType.INT64,
    "uint64": DataType.UINT64,
    "float16": DataType.FLOAT16,
    "float32": DataType.FLOAT32,
    "float64": DataType.FLOAT64,
    "bfloat16": DataType.BFLOAT16,
    "float8_e4m3": DataType.FLOAT8_E4M3,
    "float8_e4m3fn": DataType.FLOAT8_E4M3,
    "float8_e5m2": DataType.FLOAT8_E5M2,
}
_BY_TYPESTR: dict[str, DataType] = {
    "i1": DataType.INT8,
    "u1": DataType.UINT8,
    "i4": DataType.INT32,
    "u4": DataType.UINT32,
    "i8": DataType.INT64,
    "u8": DataType.UINT64,
    "f2": DataType.FLOAT16,
    "f4": DataType.FLOAT32,
    "f8": DataType.FLOAT64,
}
_INSTEAD: dict[str, str] = {
    "complex": "view it as real (torch.view_as_real(x), or x.view('f4'))",
    "bool": "view it as uint8 (x.view(torch.uint8))",
    "16": "convert it to int32",
}


def data_type(dtype: Any) -> DataType:
    """The `DataType` of a torch or NumPy dtype, a name such as "bfloat16", or a `DataType`.

    Raises TypeError, with what to do instead, for a type that NCCL does not have."""
    if isinstance(dtype, DataType):
        return dtype
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype).removeprefix("torch.")
    found = _BY_NAME.get(name)
    if found is None:
        remedy = next((text for part, text in _INSTEAD.items() if part in name), "convert it")
        raise TypeError(f"{dtype} has no NCCL data type; NCCL knows {', '.join(sorted(_BY_NAME))}: {remedy}")
    return found


class _TorchTypes(dict[Any, int]):
    """torch.dtype -> DataType, filled as dtypes are met: the torch of this process may know more or fewer."""

    def __missing__(self, dtype: Any) -> int:
        self[dtype] = int(data_type(dtype))
        return self[dtype]


torch_types = _TorchTypes()
tensor_types: set[type] = set()  # torch's own, once one was met: not subclasses, which may be anything


class Adapter:
    """What the binding needs to know about one kind of object."""

    may_be_read_only = True

    def describe(self, x: Any) -> Description:
        raise NotImplementedError

    def shape(self, x: Any) -> tuple[int, ...]:
        return tuple(x.shape)

    def empty(self, x: Any, shape: tuple[int, ...] | None = None) -> Any:
        """Uninitialised memory of `shape` (None: that of `x`), otherwise like `x`."""
        raise TypeError(f"cannot allocate the result like a {type(x).__name__}: pass recv=")

    def current_stream(self, x: Any, device: int) -> int:
        """Handle of the stream on which the library that owns `x` would launch its next kernel on `device`."""
        raise TypeError(f"{type(x).__name__} has no current stream: pass stream= (a handle, 0 for the default stream)")

    def check_writable(self, x: Any) -> None:
        """Raise if `x` cannot be received into."""


def _no_cuda(device: int) -> int:
    raise TypeError(f"this torch was built without CUDA, so there is no current stream on cuda:{device}: pass stream=")


class _Torch(Adapter):
    may_be_read_only = False

    def __init__(self) -> None:
        self.raw_stream: Callable[[int], int] = _no_cuda  # cudaStream_t of torch's current stream on a device
        self.strided: Any = None
        self.empty_like: Callable[[Any], Any]

    def meet(self, kind: type) -> None:
        """Learn of a tensor type; torch is loaded by then."""
        torch = sys.modules["torch"]
        self.raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _no_cuda)
        self.strided, self.empty_like = torch.strided, torch.empty_like
        if kind in (torch.Tensor, torch.nn.Parameter):
            tensor_types.add(kind)

    def describe(self, x: Any) -> Description:
        if x.layout is not self.strided:
            raise TypeError(f"{x.layout} tensor on {x.device} owns no dense memory; pass a dense tensor")
        if not x.is_contiguous():
            raise ValueError(
                f"tensor of shape {tuple(x.shape)} and strides {x.stride()} is not contiguous; pass x.contiguous()"
            )
        pointer, count = x.data_ptr(), x.numel()
        if not pointer and count:
            raise TypeError(f"{x.layout} tensor on {x.device} owns no dense memory; pass a dense tensor")
        return pointer, count, torch_types[x.dtype], x.get_device()

    def empty(self, x: Any, shape: tuple[int, ...] | None = None) -> Any:
        return self.empty_like(x) if shape is None else x.new_empty(shape)  # twice as fast where it serves

    def current_stream(self, x: Any, device: int) -> int:
        return int(self.raw_stream(device)) if device >= 0 else 0


class _Numpy(Adapter):
    def describe(self, x: Any) -> Description:
        if not x.flags.c_contiguous:
            raise ValueError(
                f"array of shape {x.shape} and strides {x.strides} is not contiguous; pass numpy.ascontiguousarray(x)"
            )
        return x.ctypes.data, x.size, int(data_type(x.dtype)), CPU

    def empty(self, x: Any, shape: tuple[int, ...] | None = None) -> Any:
        return sys.modules["numpy"].empty(x.shape if shape is None else shape, dtype=x.dtype)

    def current_stream(self, x: Any, device: int) -> int:
        return 0

    def check_writable(self, x: Any) -> None:
        if not x.flags.writeable:
            raise ValueError(f"array of shape {x.shape} is read-only; pass a writable copy as recv")


class _CudaArray(Adapter):
    """`__cuda_array_interface__`, version 3: CuPy, Numba, pynccl's own memory."""

    def describe(self, x: Any) -> Description:
        interface = x.__cuda_array_interface__
        shape, typestr = interface["shape"], interface["typestr"]
        dtype = _BY_TYPESTR.get(typestr.lstrip("<|="))
        if dtype is None:
            raise TypeError(f"__cuda_array_interface__ typestr {typestr!r} has no NCCL data type; view it as another")
        _check_strides(shape, interface.get("strides"), ITEMSIZE[dtype])
        device = getattr(getattr(x, "device", None), "id", ANY_DEVICE)
        return interface["data"][0] or 0, math.prod(shape), int(dtype), device

    def empty(self, x: Any, shape: tuple[int, ...] | None = None) -> Any:
        if type(x).__module__.partition(".")[0] != "cupy":
            return super().empty(x, shape)
        return sys.modules["cupy"].empty(x.shape if shape is None else shape, dtype=x.dtype)

    def current_stream(self, x: Any, device: int) -> int:
        if type(x).__module__.partition(".")[0] == "cupy":
            return int(sys.modules["cupy"].cuda.get_current_stream(device if device >= 0 else None).ptr)
        stream = x.__cuda_array_interface__.get("stream")
        return int(stream) if stream else super().current_stream(x, device)

    def check_writable(self, x: Any) -> None:
        if x.__cuda_array_interface__["data"][1]:
            raise ValueError("__cuda_array_interface__ says read-only; pass a writable buffer as recv")


class _Dlpack(Adapter):
    def describe(self, x: Any) -> Description:
        on_gpu = x.__dlpack_device__()[0] == dlpack.CUDA
        found = dlpack.read(x.__dlpack__(**({"stream": -1} if on_gpu else {})))  # -1: no synchronisation, we order
        _check_strides(found.shape, found.strides, found.dtype.itemsize)
        device = {dlpack.CPU: CPU, dlpack.CUDA: found.device_id}.get(found.device_type, ANY_DEVICE)
        return found.pointer, math.prod(found.shape), int(found.dtype), device

    def shape(self, x: Any) -> tuple[int, ...]:
        return (self.describe(x)[1],)

    def current_stream(self, x: Any, device: int) -> int:
        return 0 if device == CPU else super().current_stream(x, device)


class _Raw(Adapter):
    """`(pointer, count, dtype)`."""

    def describe(self, x: Any) -> Description:
        if len(x) != 3 or not isinstance(x[0], int) or not isinstance(x[1], int) or x[0] < 0 or x[1] < 0:
            raise TypeError(f"a raw buffer is (pointer, count in elements, dtype); got {x!r}")
        return x[0], x[1], int(data_type(x[2])), ANY_DEVICE

    def shape(self, x: Any) -> tuple[int, ...]:
        return (x[1],)


TORCH = _Torch()
adapters: dict[type, Adapter] = {tuple: _Raw()}  # by type, filled as types are met


def adapter(x: Any, operation: str = "", role: str = "") -> Adapter:
    """The adapter for objects like `x`; TypeError that lists what is accepted."""
    found = adapters.get(type(x))
    if found is None:
        try:
            found = adapters[type(x)] = _choose(x)
        except TypeError as error:
            raise TypeError(f"{operation}: {role}: {error}" if operation else str(error)) from None
    return found


def _choose(x: Any) -> Adapter:
    roots = {base.__module__.partition(".")[0]: base.__name__ for base in type(x).__mro__}
    if roots.get("torch") in ("Tensor", "TensorBase", "Parameter", "_TensorBase"):
        TORCH.meet(type(x))
        return TORCH
    if roots.get("numpy") == "ndarray":
        return _Numpy()
    if hasattr(x, "__cuda_array_interface__"):
        return _CudaArray()
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return _Dlpack()
    raise TypeError(
        f"a {type(x).__module__}.{type(x).__name__} is no buffer; pass a torch tensor, a NumPy or CuPy array, "
        "an object with __cuda_array_interface__ or __dlpack__, or (pointer, count, dtype)"
    )


def device_name(ordinal: int) -> str:
    """ "cpu", "cuda:1", for messages and for `Communicator.device`."""
    return "cpu" if ordinal == CPU else f"cuda:{ordinal}"


def _check_strides(shape: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int) -> None:
    """Raise unless byte `strides` are those of a C-contiguous array (None means that they are)."""
    if strides is None or 0 in shape:
        return
    expected = itemsize
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            raise ValueError(f"buffer of shape {shape} and byte strides {strides} is not contiguous; pass a copy")
        expected *= size
