"""Reduction operators: the five of NCCL, and sums of pre-multiplied contributions."""

from __future__ import annotations

import ctypes
from typing import Any, Literal

from ..bindings.abi import ELEMENTS, DataType, RedOp, ScalarResidence
from ..bindings.resource import Resource, Shared
from ..bindings.values import shown
from ..interop.buffers import CPU, TORCH, adapter, data_type, device_name
from ..interop.tensors import check_not_in_graph
from .base import Comm

_OPS: dict[Any, int] = {
    **{op.name.lower(): int(op) for op in RedOp},
    **{op: int(op) for op in RedOp},
}


def op_code(op: Any, comm: Comm, operation: str, dtype: int) -> int:
    """ncclRedOp_t of "sum", RedOp.SUM or a `PreMulSum` of this communicator and data type; ValueError for others."""
    if type(op) is str and (code := _OPS.get(op)) is not None:
        return code
    if type(op) is PreMulSum:
        return op.code_for(comm, operation, dtype)
    if type(op) in (RedOp, int) and (code := _OPS.get(op)) is not None:  # nothing else that is equal to one
        return code
    raise ValueError(
        f"{operation}: unknown operator {shown(op)}; pass one of {', '.join(repr(o.name.lower()) for o in RedOp)}, "
        "a pynccl.RedOp, or comm.pre_mul_sum(scalar, dtype)"
    )


class OpHandle:
    """An operator as the library has it. Whoever may still issue a call with it holds one of these.

    It goes when nobody does: the communicator then frees it in C at its next operator, group or plan, since garbage
    collection, which may be what lets go of it, never calls into NCCL."""

    def __init__(self, comm: Comm, code: int, scalar: Any) -> None:
        self.comm, self.code = comm, code
        self.scalar = scalar  # memory that is read when the operation runs

    def __del__(self) -> None:
        self.comm._unused_operators.append(self.code)


def free_unused(comm: Comm) -> None:
    """Free in C the operators of this communicator that nobody holds any more."""
    unused = comm._unused_operators
    while unused and comm.alive:
        code, library = unused.pop(), comm.library
        with comm.lock:
            result = library.ncclRedOpDestroy(code, comm.handle)
        comm._check_result(result, "ncclRedOpDestroy")


class PreMulSum(Resource, Shared):
    """An operator made by `Communicator.pre_mul_sum`; use it as `op=`, then close() it (or `with` it).

    comm, dtype  the communicator and the data type that it is for
    """

    def __init__(self, comm: Comm, scalar: Any, dtype: Any) -> None:
        if isinstance(scalar, (int, float)):
            if dtype is None:
                raise TypeError("pre_mul_sum: a Python number needs dtype=, the data type of the buffers")
            keep = _host_scalar(scalar, data_type(dtype))
            pointer, code, residence = keep.data_ptr(), int(data_type(dtype)), ScalarResidence.HOST_IMMEDIATE
        else:
            keep = scalar
            kind = adapter(scalar, "pre_mul_sum", "scalar")
            pointer, count, code, device = kind.describe(scalar)
            if kind is TORCH and scalar.requires_grad:
                check_not_in_graph("pre_mul_sum", "scalar", scalar)
            if count != 1 or device not in (comm.ordinal, CPU):
                raise ValueError(
                    f"pre_mul_sum: scalar has {count} elements on {device_name(device)}, expected 1 on {comm.device}"
                )
            if dtype is not None and data_type(dtype) != code:
                raise ValueError(
                    f"pre_mul_sum: scalar is {DataType(code).name}, dtype is {data_type(dtype).name}; pass the same"
                )
            residence = ScalarResidence.DEVICE if device == comm.ordinal else ScalarResidence.HOST_IMMEDIATE
        free_unused(comm)
        self.comm, self.dtype = comm, DataType(code)
        op = ctypes.c_int()
        library = comm.library
        with comm.lock:
            result = library.ncclRedOpCreatePreMulSum(ctypes.byref(op), pointer, code, int(residence), comm.handle)
        comm._check_result(result, "ncclRedOpCreatePreMulSum")
        self._op_handle: OpHandle | None = OpHandle(comm, op.value, keep)

    @property
    def code(self) -> int:
        """ncclRedOp_t; -1 once it was destroyed."""
        return -1 if self._op_handle is None else self._op_handle.code

    @property
    def op_handle(self) -> OpHandle:
        """What a call has to hold until it was issued."""
        if self._op_handle is None:
            raise ValueError("op is a pre_mul_sum that was destroyed; make a new one")
        return self._op_handle

    @property
    def scalar(self) -> Any:
        """The buffer that is read when the operation runs, for whoever holds buffers."""
        return None if self._op_handle is None else self._op_handle.scalar

    def code_for(self, comm: Comm, operation: str, dtype: int) -> int:
        """Its number, for a call of `comm` on buffers of `dtype`. ValueError where it is not for them."""
        code = self.op_handle.code
        if self.comm is not comm:
            raise ValueError(
                f"{operation}: op was made by {self.comm!r}, the call is one of {comm!r}; make the operator with "
                "pre_mul_sum of the communicator that uses it"
            )
        if self.dtype != dtype:
            raise ValueError(
                f"{operation}: op was made for {self.dtype.name}, the buffers are {DataType(dtype).name}; make one "
                f"with pre_mul_sum(scalar, {DataType(dtype).name.lower()!r})"
            )
        return code

    def close(self) -> None:
        """Refuse further calls, and free it. Calls that were already made with it are not affected: what a group has
        recorded, and plans, hold the operator, which is freed after the last of them has gone. Twice is harmless."""
        self._op_handle = None
        free_unused(self.comm)

    destroy = close  # as NCCL calls it


# What `op=` takes, so that a type checker sees a misspelt name; `op_code` is what checks it when it runs.
Op = Literal["sum", "prod", "min", "max", "avg"] | RedOp | PreMulSum


def _host_scalar(scalar: float, dtype: DataType) -> Any:
    """One element of `dtype` in CPU memory. Torch rounds to the small floats; nothing in the standard library does."""
    import torch

    wanted = getattr(torch, ELEMENTS[dtype].name)
    try:
        held = torch.tensor([float(scalar) if wanted.is_floating_point else scalar]).to(wanted)
    except (ValueError, RuntimeError, OverflowError):  # of torch and Python, for an integer that is too large
        raise ValueError(
            f"pre_mul_sum: scalar is {shown(scalar)}, which {dtype.name} does not hold; pass a smaller one"
        ) from None
    if not held.dtype.is_floating_point and held.item() != scalar:
        raise ValueError(f"pre_mul_sum: {scalar} is no {dtype.name} and would become {held.item()}; pass one that is")
    return held
