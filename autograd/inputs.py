"""Checks of what is passed as x, comm and reduce_dtype, before anything is launched.

A tensor that has no plain memory of its own on the communicator's device is refused by the name of its type, with what
to pass instead. What only has a shape (meta and fake tensors) is let through: it communicates nothing.
"""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from pynccl import Communicator
from pynccl.bindings.values import integer, shown

from .tracing import has_no_values, is_traced
from .wire import CARRIED, REAL_OF, is_paired

_PLAIN: frozenset[type] = frozenset((Tensor, torch.nn.Parameter))
_TAKE_LISTS = "ad.all_reduce, ad.all_gather and ad.reduce_scatter take lists, ad.start does not"
# By the name of a type: what is to be passed instead. Names, since most of these need not be loaded.
_INSTEAD = {
    "DTensor": "x.to_local(), this rank's part",
    "AsyncCollectiveTensor": "x.wait(), its result",
    "NestedTensor": "x.values(), and give the lengths to all ranks as splits=",
    "ndarray": "torch.from_numpy(x)",
    "list": f"its tensors one by one; {_TAKE_LISTS}",
    "tuple": f"its tensors one by one; {_TAKE_LISTS}",
    "ProcessGroup": "pynccl.Communicator.from_process_group(group)",
    "NoneType": "pynccl.init()",
    "Proxy": "a tensor to torch.fx.experimental.proxy_tensor.make_fx or torch.export, which trace with tensors",
}
_LARGEST_SEED = 1 << 40
_NUMBERS = (bool, int, float, complex)


def check_call(operation: str, x: Tensor, comm: Communicator) -> None:
    """That x is a tensor that can travel over comm, and comm a communicator that is alive."""
    if type(x) not in _PLAIN:
        check_tensor_type(operation, x)
    if type(comm) is not Communicator:
        check_comm(operation, comm)
    if torch.compiler.is_compiling():
        return
    if not comm.alive:
        comm.check_alive()
    if x.layout is not torch.strided or x.is_quantized or x.is_nested:
        _refuse_layout(operation, x)
    if lost_its_memory(x):
        raise TypeError(
            f"{operation}: x is a tensor {tuple(x.shape)} whose storage was freed (by resize_(0), as FSDP does); "
            "pass it while it has its memory"
        )
    if x.get_device() != comm.ordinal and not x.is_meta and type(x) in _PLAIN:
        raise ValueError(
            f"{operation}: x is on {x.device}, the communicator on {comm.device}; pass x.to({comm.device!r}), or use a "
            "communicator of x's device"
        )


def lost_its_memory(x: Tensor) -> bool:
    """Whether x has elements, but memory no more: torch reads there all the same, which ends the process."""
    try:
        if type(x) not in _PLAIN or x.data_ptr() or not x.numel() or x.is_meta or x._is_zerotensor():
            return False
        tracing = torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active()
        return not tracing and not x.untyped_storage().nbytes()
    except RuntimeError:  # of what stands for a tensor within a transform
        return False


def check_tensor_type(operation: str, x: object) -> None:
    """That x is a tensor that owns memory, or a fake one."""
    kind: Any = type(x)
    if not isinstance(x, Tensor):
        instead = _INSTEAD.get(kind.__name__) or ("torch.tensor(x)" if isinstance(x, _NUMBERS) else "a tensor")
        raise TypeError(f"{operation}: x is a {_name(kind)}, expected a torch.Tensor; pass {instead}")
    if kind.__torch_dispatch__ is Tensor.__torch_dispatch__ or is_traced(x):
        return
    instead = _INSTEAD.get(kind.__name__, "the plain tensors that it is made of, one by one")
    raise TypeError(
        f"{operation}: x is a {_name(kind)}, which is no plain tensor with memory of its own; pass {instead}"
    )


def check_comm(operation: str, comm: object) -> None:
    if not isinstance(comm, Communicator):
        known = next((_INSTEAD[base.__name__] for base in type(comm).__mro__ if base.__name__ in _INSTEAD), None)
        raise TypeError(
            f"{operation}: comm is {shown(comm)}, expected a pynccl.Communicator; pass "
            + (known or "one, of pynccl.init()")
        )


def check_values(operation: str, x: Tensor, comm: Communicator) -> None:
    """That x is a tensor of numbers that have derivatives, with memory that holds them."""
    check_call(operation, x, comm)
    if x.numel() and not (x.is_floating_point() or x.is_complex()):
        raise TypeError(f"{operation}: x is {x.dtype}, which has no derivative; pass x.to(torch.float64)")
    if has_no_values(x):
        raise TypeError(
            f"{operation}: x is a {_name(type(x))} on {x.device} without values; pass a tensor that has some"
        )


def check_seed(operation: str, seed: Any) -> int:
    """`seed` as an int, of which torch's generators take multiples."""
    return integer(seed, f"{operation}: seed", -_LARGEST_SEED, _LARGEST_SEED)


def check_tolerance(operation: str, tolerance: Any) -> float | None:
    real = isinstance(tolerance, numbers.Real) and not isinstance(tolerance, bool)
    if tolerance is not None and not (real and tolerance >= 0):
        raise ValueError(f"{operation}: tolerance is {shown(tolerance)}, expected a number >= 0, or None")
    return None if tolerance is None else float(tolerance)


def check_reduction(operation: str, x: Tensor, op: str, reduce_dtype: Any) -> torch.dtype | None:
    """`reduce_dtype` as the type in which NCCL reduces x, None for the tensor's own; TypeError if NCCL has none."""
    dtype = x.dtype
    if reduce_dtype is None and dtype in CARRIED:  # nearly always
        return None
    if dtype is torch.bool:
        if op in ("max", "min"):
            return None
        ways = ', or op="max" (logical or), op="min" (logical and)' if operation == "all_reduce" else ""
        raise TypeError(f"{operation}: bool has no {op!r}; pass a number per element, x.to(torch.int32){ways}")
    if reduce_dtype is not None:
        return check_reduce_dtype(operation, x, reduce_dtype)
    if dtype in CARRIED or is_paired(dtype):
        return None
    wide = "torch.float32" if dtype.is_floating_point else "torch.int32"
    remedy = f"pass reduce_dtype={wide}" if dtype.itemsize <= 2 and not x.is_complex() else "convert x"
    raise TypeError(f"{operation}: NCCL has no reduction of {dtype}, the type of x; {remedy}")


def check_reduce_dtype(operation: str, x: Tensor, reduce_dtype: Any) -> torch.dtype | None:
    """The type in which sums of tensors like x travel. Of complex x the type of its real part may be meant."""
    if reduce_dtype is None:
        return None
    if not isinstance(reduce_dtype, torch.dtype):
        raise TypeError(f"{operation}: reduce_dtype is {reduce_dtype!r}, expected a torch.dtype, e.g. torch.float32")
    if x.is_complex():
        reduce_dtype = REAL_OF.get(reduce_dtype, reduce_dtype)
    exact = reduce_dtype.is_floating_point or not (x.is_floating_point() or x.is_complex())
    if reduce_dtype not in CARRIED or not exact:
        raise TypeError(
            f"{operation}: reduce_dtype is {reduce_dtype} for x of {x.dtype}, expected "
            + ("a floating-point type" if not exact else "a type that NCCL has")
            + ", e.g. torch.float32"
        )
    return reduce_dtype


def _refuse_layout(operation: str, x: Tensor) -> None:
    if x.is_nested:
        kind, instead = "nested", "x.to_padded_tensor(0), or its parts by x.unbind()"
    elif x.is_quantized:
        kind, instead = f"quantized ({x.dtype})", "x.int_repr(), or x.dequantize()"
    else:
        kind, instead = f"sparse ({x.layout})", "x.to_dense()"
    raise TypeError(f"{operation}: x is a {kind} tensor, expected a dense one; pass {instead}")


def _name(kind: Any) -> str:
    return str(kind.__name__) if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
