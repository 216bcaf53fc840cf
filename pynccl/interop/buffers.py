"""Convert buffers to (pointer, count, data type, device).

Supports torch tensors, NumPy and CuPy arrays, `__cuda_array_interface__`, DLPack, and `(pointer, count, dtype)`. Each
kind of object has an `Adapter`, found by type: describing a tensor costs one dictionary lookup and four attributes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from ..bindings.abi import ELEMENTS, ITEMSIZE, DataType, RedOp
from ..bindings.torch_names import PAGE, is_operator, operator_hint
from ..bindings.values import SIZE_MAX, attribute, integer, shown, type_of
from . import dlpack
from .handles import handle_of, of_torch, vouched
from .tensors import is_wrapper, negative_bit_error, why_no_memory

# (address, number of elements, DataType as int, CUDA ordinal). A plain tuple, since every call builds one.
Description = tuple[int, int, int, int]

Buffer = TypeVar("Buffer")  # for type checkers: the result has the type of the argument

CPU = -1  # the "ordinal" of CPU memory, as in torch.Tensor.get_device()
ANY_DEVICE = -2  # a raw pointer: the caller is responsible for its device

_BY_NAME: dict[str, DataType] = {
    **{element.name: element.dtype for element in ELEMENTS},
    "float8_e4m3": DataType.FLOAT8_E4M3,  # as NCCL and ml_dtypes name it
}
_BY_TYPESTR: dict[str, DataType] = {element.typestr: element.dtype for element in ELEMENTS if element.typestr}
_KNOWN: dict[tuple[type, Any], DataType] = {}  # cache of `data_type`
_TYPESTR_ORDERS = ("|", "=", "<" if sys.byteorder == "little" else ">")
_REMEDIES: dict[str, str] = {
    "complex": "view it as real (torch.view_as_real(x), or torch.view_as_real(x.resolve_conj()); x.view('f4'))",
    "bool": "view it as uint8 (x.view(torch.uint8))",
    "16": "convert it to int32",
}


def data_type(dtype: Any, name: str = "dtype") -> DataType:
    """Return the `DataType` of a torch or NumPy dtype, a name such as "bfloat16", or a `DataType`.

    Raises TypeError with a remedy for a type that NCCL does not have.   name: of the argument, for messages"""
    if isinstance(dtype, DataType):
        return dtype
    try:
        return _KNOWN[type(dtype), dtype]  # keyed by type too: 7 == FLOAT32, but 7 is not a data type
    except Exception:  # not known yet; without a hash; raised by the user's object
        pass
    if attribute(dtype, "isnative", True) is False:
        raise TypeError(
            f"{dtype!r} is not in this machine's byte order, which NCCL requires; convert it: "
            "x.astype(x.dtype.newbyteorder('='))"
        )
    text = shown(dtype, str) or "''"
    known = attribute(dtype, "name") or attribute(dtype, "__name__") or text.removeprefix("torch.")
    found = _BY_NAME.get(known) if isinstance(known, str) else None
    if found is None and isinstance(dtype, str):
        raise TypeError(f"{name} is {shown(dtype)}, expected one of {', '.join(sorted(_BY_NAME))}")
    if found is None:
        remedy = next((hint for part, hint in _REMEDIES.items() if part in str(known)), "convert it")
        raise TypeError(f"{name} {text} has no NCCL data type; NCCL knows {', '.join(sorted(_BY_NAME))}: {remedy}")
    if type(dtype).__module__.partition(".")[0] in ("numpy", "torch", "builtins"):  # types with a reliable __eq__
        _KNOWN[type(dtype), dtype] = found
    return found


class _TorchTypes(dict[Any, int]):
    """torch.dtype -> DataType, filled on first use, since the set of dtypes depends on the torch version."""

    def __missing__(self, dtype: Any) -> int:
        self[dtype] = int(data_type(dtype))
        return self[dtype]


torch_types = _TorchTypes()
tensor_types: set[type] = set()  # torch.Tensor and Parameter once seen; subclasses may override anything


class Adapter:
    """Access to one kind of buffer object."""

    def describe(self, x: Any) -> Description:
        raise NotImplementedError

    def shape(self, x: Any) -> tuple[int, ...]:
        return tuple(x.shape)

    def empty(self, x: Any, shape: tuple[int, ...] | None = None) -> Any:
        """Return an uninitialized buffer like `x`, of `shape` (None: the shape of `x`)."""
        raise TypeError(f"cannot allocate the result like a {type(x).__name__}: pass recv=")

    def current_stream(self, x: Any, device: int) -> int:
        """Return the handle of the current stream on `device` of the library that owns `x`."""
        raise TypeError(f"{type(x).__name__} has no current stream: pass stream= (a handle, 0 for the default stream)")

    def check_writable(self, x: Any) -> None:
        """Raise if `x` is read-only."""

    def mark_written(self, x: Any) -> None:
        """Record that C code writes to `x`, which its library does not notice."""


def _no_cuda(device: int) -> int:
    raise TypeError(f"this torch was built without CUDA, so there is no current stream on cuda:{device}: pass stream=")


class _Torch(Adapter):
    def __init__(self) -> None:
        self.raw_stream: Callable[[int], int] = _no_cuda  # cudaStream_t of torch's current stream on a device
        self.empty_like: Callable[[Any], Any]
        self.bump_versions: Callable[[tuple[Any, ...]], object] = tuple  # bumps the version counter of each tensor

    def register(self, kind: type) -> None:
        """Register a tensor type. torch is loaded by then."""
        torch = sys.modules["torch"]
        self.raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _no_cuda)
        self.empty_like = torch.empty_like
        self.bump_versions = getattr(torch._C, "_increment_version", torch.autograd.graph.increment_version)
        if kind in (torch.Tensor, torch.nn.Parameter):
            tensor_types.add(kind)

    def describe(self, x: Any) -> Description:
        try:
            pointer = x.data_ptr()
        except RuntimeError:  # raised by torch for a tensor without storage
            raise TypeError(why_no_memory(x)) from None
        if not x.is_contiguous():
            raise ValueError(
                f"tensor of shape {tuple(x.shape)} and strides {x.stride()} is not contiguous; pass x.contiguous()"
            )
        if x.is_neg():
            raise ValueError(negative_bit_error(x))
        count = x.numel()
        if not pointer and count:
            raise TypeError(why_no_memory(x))
        return pointer, count, torch_types[x.dtype], x.get_device()

    def shape(self, x: Any) -> tuple[int, ...]:
        if x.is_nested:
            raise TypeError("cannot allocate the result like a nested tensor: pass recv=")
        return tuple(x.shape)

    def empty(self, x: Any, shape: tuple[int, ...] | None = None) -> Any:
        return self.empty_like(x) if shape is None else x.new_empty(shape)  # empty_like is twice as fast

    def current_stream(self, x: Any, device: int) -> int:
        handle = self.raw_stream(device) if device >= 0 else 0
        return of_torch(handle, device) if handle else 0

    def mark_written(self, x: Any) -> None:
        self.bump_versions((x,))


class _NoMemory(Adapter):
    """Tensor subclasses whose memory, if any, does not hold their values."""

    def describe(self, x: Any) -> Description:
        raise TypeError(why_no_memory(x))


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


class _Masked(Adapter):
    """`numpy.ma` arrays, whose memory also holds the masked elements."""

    def describe(self, x: Any) -> Description:
        raise TypeError(f"a numpy {type(x).__name__} has masked elements; pass x.filled(value), or x.data")


class _CudaArray(Adapter):
    """`__cuda_array_interface__`, version 3: CuPy, Numba, pynccl.Memory."""

    def describe(self, x: Any) -> Description:
        interface = x.__cuda_array_interface__
        pointer, shape, typestr = _parts(interface)
        dtype = _BY_TYPESTR.get(typestr[1:]) if typestr[:1] in _TYPESTR_ORDERS else None
        if dtype is None:
            swapped = typestr[:1] not in _TYPESTR_ORDERS
            what = "is not in this machine's byte order; convert it" if swapped else "has no NCCL data type; view it as"
            raise TypeError(f"__cuda_array_interface__ typestr {typestr!r} {what}{'' if swapped else ' another'}")
        if interface.get("mask") is not None:
            raise TypeError("__cuda_array_interface__ has a mask; pass an array without one")
        _check_strides(shape, interface.get("strides"), ITEMSIZE[dtype])
        device = getattr(getattr(x, "device", None), "id", ANY_DEVICE)
        return pointer, math.prod(shape), int(dtype), device

    def empty(self, x: Any, shape: tuple[int, ...] | None = None) -> Any:
        if type(x).__module__.partition(".")[0] != "cupy":
            return super().empty(x, shape)
        return sys.modules["cupy"].empty(x.shape if shape is None else shape, dtype=x.dtype)

    def current_stream(self, x: Any, device: int) -> int:
        if type(x).__module__.partition(".")[0] == "cupy":
            current = sys.modules["cupy"].cuda.get_current_stream(max(device, -1))  # -1: CuPy's current GPU
            handle = handle_of(current)
            return vouched(handle, None, handle.source) if handle else 0
        stream = x.__cuda_array_interface__.get("stream")
        return int(stream) if stream else super().current_stream(x, device)

    def check_writable(self, x: Any) -> None:
        if x.__cuda_array_interface__["data"][1]:
            raise ValueError("__cuda_array_interface__ is read-only; pass a writable buffer as recv")


def _parts(interface: Any) -> tuple[int, tuple[int, ...], str]:
    """Return (pointer, shape, typestr) of a `__cuda_array_interface__`, validated."""
    fields = interface if isinstance(interface, dict) else {}
    shape, typestr, data = fields.get("shape"), fields.get("typestr"), fields.get("data")
    try:
        if isinstance(typestr, str) and isinstance(shape, (tuple, list)) and isinstance(data, (tuple, list)):
            sizes = tuple(integer(size, "size", 0, SIZE_MAX) for size in shape)
            pointer, _ = data
            return integer(pointer or 0, "pointer", 0, SIZE_MAX), sizes, typestr
    except ValueError:
        pass
    raise TypeError(
        f"__cuda_array_interface__ has shape {shown(shape)}, typestr {shown(typestr)} and data {shown(data)}, expected "
        "a tuple of sizes >= 0, a string such as '<f4', and (pointer, read-only)"
    )


class _Dlpack(Adapter):
    def describe(self, x: Any) -> Description:
        place = x.__dlpack_device__()
        if not isinstance(place, tuple) or len(place) != 2:
            raise TypeError(f"__dlpack_device__() returned {shown(place)}, expected (device type, device id)")
        on_gpu = place[0] == dlpack.CUDA
        found = dlpack.read(x.__dlpack__(**({"stream": -1} if on_gpu else {})))  # -1: no synchronization
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
        if len(x) == 3 and type(x[0]) is int and type(x[1]) is int and x[0] >= 0 and x[1] >= 0:
            dtype = data_type(x[2])
            if x[0] + x[1] * ITEMSIZE[dtype] <= SIZE_MAX:
                return x[0], x[1], int(dtype), ANY_DEVICE
        if x and hasattr(type(x[-1]), "data_ptr"):
            raise TypeError(
                f"got a tuple of tensors; pass one tensor (torch.cat), or each in a `with pynccl.group():`; {PAGE}"
            )
        if len(x) != 3 or any(isinstance(n, bool) or not hasattr(type(n), "__index__") or n < 0 for n in x[:2]):
            raise TypeError(f"a raw buffer is (pointer, count in elements, dtype); got {shown(x)}")
        dtype = data_type(x[2])
        pointer = integer(x[0], "pointer", 0, SIZE_MAX)
        count = integer(x[1], "count", 0, (SIZE_MAX - pointer) // ITEMSIZE[dtype])
        return pointer, count, int(dtype), ANY_DEVICE

    def shape(self, x: Any) -> tuple[int, ...]:
        return (x[1],)


TORCH = _Torch()
adapters: dict[type, Adapter] = {tuple: _Raw()}  # by type, filled on first use


# Arguments that other libraries take in recv's position: dist.broadcast(x, 0), dist.all_reduce(x, op)
_TAKES_KEYWORD = {
    "op": ("all_reduce", "reduce", "reduce_scatter"),
    "root": ("broadcast", "reduce", "gather", "scatter"),
}


def adapter(x: Any, operation: str = "", role: str = "") -> Adapter:
    """Return the adapter for the type of `x`. Raises TypeError that lists the accepted types."""
    found = adapters.get(type(x))
    if found is None:
        try:
            found = adapters[type(x)] = _choose(x)
        except TypeError as error:
            hint = _list_hint(operation) if isinstance(x, list) else _recv_hint(operation, x) if role == "recv" else ""
            raise TypeError(f"{operation}: {role} {error}{hint}" if operation else f"buffer {error}") from None
    return found


def _list_hint(operation: str) -> str:
    """Return what to pass instead of a list of buffers."""
    if any(word in operation for word in ("gather", "scatter", "to_all")):
        how = "torch.cat(list) makes it, chunk() returns its parts"
        return f"; pass one tensor with the blocks of all ranks, send before recv: {how}; {PAGE}"
    return "; for several buffers, one call each in a `with pynccl.group():`"


def _recv_hint(operation: str, x: Any) -> str:
    """Return a hint if op or root was passed in recv's position. Other objects are not inspected: they may raise."""
    if is_operator(x) and operation in _TAKES_KEYWORD["op"]:
        return f"; op comes after recv, or by keyword{operator_hint(x, [op.name.lower() for op in RedOp])}"
    if type(x) is int:
        name, value = "root", str(x)
    elif type(x) is str or isinstance(x, RedOp):
        name, value = "op", repr(x.name.lower() if isinstance(x, RedOp) else x)
    else:
        return ""
    if operation not in _TAKES_KEYWORD[name]:
        return ""
    return f"; pass {name} by keyword: {operation}(send, {name}={value})"


def _choose(x: Any) -> Adapter:
    roots = {base.__module__.partition(".")[0]: base.__name__ for base in type(x).__mro__}
    if roots.get("torch") in ("Tensor", "TensorBase", "Parameter", "_TensorBase"):
        TORCH.register(type(x))
        return _NoMemory() if is_wrapper(type(x)) else TORCH
    if roots.get("numpy") == "ndarray":
        return _Masked() if hasattr(x, "mask") and hasattr(x, "filled") else _Numpy()
    if attribute(x, "__cuda_array_interface__") is not None:
        return _CudaArray()
    if attribute(x, "__dlpack__") is not None and attribute(x, "__dlpack_device__") is not None:
        return _Dlpack()
    raise TypeError(
        f"is {type_of(x)}, expected a torch tensor, a NumPy or CuPy array, an object with "
        "__cuda_array_interface__ or __dlpack__, or (pointer, count, dtype)"
    )


def device_name(ordinal: int) -> str:
    """Return "cpu" or "cuda:1", for messages and for `Communicator.device`."""
    return "cpu" if ordinal == CPU else f"cuda:{ordinal}"


def _check_strides(shape: tuple[int, ...], strides: tuple[int, ...] | None, itemsize: int) -> None:
    """Raise unless the byte `strides` are C-contiguous (None means C-contiguous)."""
    if strides is None or 0 in shape:
        return
    if len(strides) != len(shape):
        raise ValueError(f"buffer of shape {shape} has byte strides {strides}, expected one per dimension")
    expected = itemsize
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            raise ValueError(f"buffer of shape {shape} and byte strides {strides} is not contiguous; pass a copy")
        expected *= size
