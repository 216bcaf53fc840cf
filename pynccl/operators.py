"""Reduction operators: the five of NCCL, and sums of pre-multiplied contributions."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from .abi import DataType, RedOp, ScalarResidence
from .buffers import CPU, adapter, data_type, device_name

if TYPE_CHECKING:
    from .communicator import Communicator

_OPS: dict[Any, int] = {
    **{op.name.lower(): int(op) for op in RedOp},
    **{op: int(op) for op in RedOp},
}


def op_code(op: Any) -> int:
    """ncclRedOp_t of "sum", RedOp.SUM or a `PreMulSum`; ValueError that lists the operators."""
    try:
        return _OPS[op]
    except (KeyError, TypeError):
        code = getattr(op, "code", None)
        if isinstance(code, int) and code >= 0:
            return code
        if code is not None:
            raise ValueError("op is a pre_mul_sum that was destroyed; make a new one") from None
        raise ValueError(
            f"unknown operator {op!r}; pass one of {', '.join(repr(o.name.lower()) for o in RedOp)}, a pynccl.RedOp, "
            "or comm.pre_mul_sum(scalar, dtype)"
        ) from None


class PreMulSum:
    """An operator made by `Communicator.pre_mul_sum`; use it as `op=`, then destroy() it (or `with` it)."""

    def __init__(self, comm: Communicator, scalar: Any, dtype: Any) -> None:
        if isinstance(scalar, (int, float)):
            if dtype is None:
                raise TypeError("pre_mul_sum: a Python number needs dtype=, the data type of the buffers")
            self._keep = _host_scalar(scalar, data_type(dtype))
            pointer, code, residence = self._keep.data_ptr(), int(data_type(dtype)), ScalarResidence.HOST_IMMEDIATE
        else:
            self._keep = scalar
            pointer, count, code, device = adapter(scalar).describe(scalar)
            if count != 1 or device not in (comm.ordinal, CPU):
                raise ValueError(
                    f"pre_mul_sum: scalar has {count} elements on {device_name(device)}, expected 1 on {comm.device}"
                )
            residence = ScalarResidence.DEVICE if device == comm.ordinal else ScalarResidence.HOST_IMMEDIATE
        self.comm = comm
        op = ctypes.c_int()
        library = comm.library
        result = library.ncclRedOpCreatePreMulSum(ctypes.byref(op), pointer, code, int(residence), comm.handle)
        library.check(result, "ncclRedOpCreatePreMulSum", comm.handle)
        self.code = op.value

    def destroy(self) -> None:
        """Free it; calls that were already made with it are not affected."""
        if self.code >= 0 and self.comm.alive:
            library = self.comm.library
            library.check(library.ncclRedOpDestroy(self.code, self.comm.handle), "ncclRedOpDestroy")
        self.code = -1

    def __enter__(self) -> PreMulSum:
        return self

    def __exit__(self, *exc: object) -> None:
        self.destroy()


def _host_scalar(scalar: float, dtype: DataType) -> Any:
    """One element of `dtype` in CPU memory. Torch rounds to the small floats; nothing in the standard library does."""
    import torch

    names = {DataType.FLOAT8_E4M3: "float8_e4m3fn", DataType.FLOAT8_E5M2: "float8_e5m2"}
    held = torch.tensor([scalar]).to(getattr(torch, names.get(dtype, dtype.name.lower())))
    if not held.dtype.is_floating_point and held.item() != scalar:
        raise ValueError(f"pre_mul_sum: {scalar} is no {dtype.name} and would become {held.item()}; pass one that is")
    return held
