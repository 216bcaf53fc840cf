"""Reduction operators: NCCL's five built-in ones, and PreMulSum."""

from __future__ import annotations

import ctypes
from typing import Any, Literal

from ..bindings.abi import ELEMENTS, DataType, RedOp, ScalarResidence
from ..bindings.resource import Resource, Shared, destructor
from ..bindings.torch_names import operator_hint
from ..bindings.values import shown
from ..interop.buffers import CPU, TORCH, adapter, data_type, device_name
from ..interop.tensors import check_not_in_graph
from .base import Comm

_OPS: dict[Any, int] = {
    **{op.name.lower(): int(op) for op in RedOp},
    **{op: int(op) for op in RedOp},
}


_FLOAT8 = (DataType.FLOAT8_E4M3, DataType.FLOAT8_E5M2)


def op_code(op: Any, comm: Comm, operation: str, dtype: int) -> int:
    """Return the ncclRedOp_t of "sum", RedOp.SUM, or a `PreMulSum` for this communicator and dtype; else ValueError."""
    if type(op) is PreMulSum:
        return op.code_for(comm, operation, dtype)
    if type(op) in (str, RedOp, int) and (code := _OPS.get(op)) is not None:  # by type: True == 1 must not pass
        return _OPS["sum"] if comm.size == 1 and code == RedOp.AVG else code  # NCCL has no float8 "avg" of one rank
    names = [each.name.lower() for each in RedOp]
    raise ValueError(
        f"{operation}: op is {shown(op)}, expected one of {', '.join(map(repr, names))}, "
        f"a pynccl.RedOp, or comm.pre_mul_sum(scalar, dtype){operator_hint(op, names)}"
    )


class OpHandle:
    """An ncclRedOp_t of the library. Everything that may still issue a call with the operator references its OpHandle.

    When the last reference is gone, the communicator frees the operator at its next operator, group or plan, not
    here: __del__ can run during garbage collection, which must never call into NCCL."""

    def __init__(self, comm: Comm, code: int, scalar: Any) -> None:
        self.comm, self.code = comm, code
        self.scalar = scalar  # buffer that is read when the operation runs

    @destructor
    def __del__(self) -> None:
        self.comm._unused_operators.append(self.code)


def free_unused(comm: Comm) -> None:
    """Free the operators of this communicator that nothing references any more."""
    unused = comm._unused_operators
    while unused and comm.alive:
        code, library = unused.pop(), comm.library
        with comm._lock:
            result = library.ncclRedOpDestroy(code, comm.handle)
        comm._check_result(result, "ncclRedOpDestroy")


class PreMulSum(Resource, Shared):
    """A reduction operator made by `Communicator.pre_mul_sum`. Pass it as `op=`; close() it after use, or use it as a
    context manager.

    comm   the communicator that can use it
    dtype  the data type of the buffers
    """

    def __init__(self, comm: Comm, scalar: Any, dtype: Any) -> None:
        if isinstance(scalar, (int, float)):
            if dtype is None:
                raise TypeError("pre_mul_sum: a Python number needs dtype=, the data type of the buffers")
            kind_of_all = data_type(dtype, "pre_mul_sum: dtype")
            keep = _host_scalar(scalar, kind_of_all)
            pointer, code, residence = keep.data_ptr(), int(kind_of_all), ScalarResidence.HOST_IMMEDIATE
        else:
            keep = scalar
            kind = adapter(scalar, "pre_mul_sum", "scalar")
            try:
                pointer, count, code, device = kind.describe(scalar)
            except (TypeError, ValueError) as error:
                raise type(error)(f"pre_mul_sum: scalar: {error}") from None
            if kind is TORCH and scalar.requires_grad:
                check_not_in_graph("pre_mul_sum", "scalar", scalar)
            if count != 1 or device not in (comm.ordinal, CPU):
                raise ValueError(
                    f"pre_mul_sum: scalar has {count} elements on {device_name(device)}, expected 1 on {comm.device}"
                )
            if dtype is not None and (wanted := data_type(dtype, "pre_mul_sum: dtype")) != code:
                names = (each.name.lower() for each in (DataType(code), wanted))
                raise ValueError(f"pre_mul_sum: scalar is {next(names)}, but dtype is {next(names)}; omit dtype")
            residence = ScalarResidence.DEVICE if device == comm.ordinal else ScalarResidence.HOST_IMMEDIATE
        free_unused(comm)
        self.comm, self.dtype = comm, DataType(code)
        op = ctypes.c_int()
        library = comm.library
        with comm._lock:
            result = library.ncclRedOpCreatePreMulSum(ctypes.byref(op), pointer, code, int(residence), comm.handle)
        comm._check_result(result, "ncclRedOpCreatePreMulSum")
        self._op_handle: OpHandle | None = OpHandle(comm, op.value, keep)

    @property
    def code(self) -> int:
        """The ncclRedOp_t; -1 once closed."""
        return -1 if self._op_handle is None else self._op_handle.code

    @property
    def op_handle(self) -> OpHandle:
        """The handle that a call must reference until it is issued. ValueError once closed."""
        if self._op_handle is None:
            raise ValueError("op is a pre_mul_sum that was destroyed; make a new one")
        return self._op_handle

    @property
    def scalar(self) -> Any:
        """The buffer that is read when the operation runs; None once closed."""
        return None if self._op_handle is None else self._op_handle.scalar

    def code_for(self, comm: Comm, operation: str, dtype: int) -> int:
        """Return its ncclRedOp_t. ValueError if it is for another communicator or data type."""
        code = self.op_handle.code
        if self.comm is not comm:
            raise ValueError(
                f"{operation}: op was made by {self.comm!r}, the call is on {comm!r}; make the operator with "
                "pre_mul_sum() of the communicator that uses it"
            )
        if self.dtype != dtype:
            raise ValueError(
                f"{operation}: op was made for {self.dtype.name.lower()}, the buffers are "
                f"{DataType(dtype).name.lower()}; make one with pre_mul_sum(scalar, {DataType(dtype).name.lower()!r})"
            )
        if dtype in _FLOAT8 and comm.size == 1 and not comm.library.is_host:
            raise ValueError(
                f"{operation}: op is a pre_mul_sum of {self.dtype.name.lower()} on one rank, which NCCL does not have; "
                "multiply the buffer yourself"
            )
        return code

    def close(self) -> None:
        """Free the operator. Later calls with it raise ValueError. Plans, and calls recorded in a group, keep it alive
        and still work. Does nothing if it is already closed."""
        self._op_handle = None
        free_unused(self.comm)

    destroy = close  # NCCL's name


# The type of `op=`, for type checkers. At run time `op_code` checks it.
Op = Literal["sum", "prod", "min", "max", "avg"] | RedOp | PreMulSum


def _host_scalar(scalar: float, dtype: DataType) -> Any:
    """Return one element of `dtype` in CPU memory. Uses torch, which can round to the 8 and 16 bit float types."""
    import torch

    torch_dtype = getattr(torch, ELEMENTS[dtype].name)
    try:
        element = torch.tensor([float(scalar) if torch_dtype.is_floating_point else scalar]).to(torch_dtype)
    except (ValueError, RuntimeError, OverflowError):  # an integer that is too large
        raise ValueError(
            f"pre_mul_sum: scalar is {shown(scalar)}, out of range for {dtype.name.lower()}; pass a smaller one"
        ) from None
    if not element.dtype.is_floating_point and element.item() != scalar:
        raise ValueError(
            f"pre_mul_sum: scalar {scalar} would become {element.item()} as {dtype.name.lower()}; pass an exact value"
        )
    return element
