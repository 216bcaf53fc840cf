"""The arithmetic of reductions: 12 data types x 5 operators, and the pre-multiplied sum.

Inputs are combined in rank order, so every rank computes bitwise equal results. Types narrower than float32 accumulate
in float32 and round once. Integers wrap; their average is the wrapped sum divided by the number of ranks, truncated.
max and min propagate NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..bindings.abi import DataType, RedOp
from .memory import view

_NARROW = {torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
_FP8 = {torch.float8_e4m3fn, torch.float8_e5m2}
_UNSIGNED = {int(DataType.UINT32), int(DataType.UINT64)}

_STEPS: dict[int, Callable[..., Tensor]] = {
    int(RedOp.SUM): torch.add,
    int(RedOp.PROD): torch.mul,
    int(RedOp.MAX): torch.maximum,
    int(RedOp.MIN): torch.minimum,
}

# Elements per block of a float32 accumulation, which keeps the accumulator in the cache and its memory bounded.
_BLOCK = 1 << 16


class PreMulSum:
    """A scalar that multiplies this rank's input. Unless `immediate`, `address` is read when the operation runs."""

    def __init__(self, address: int, dtype: int, immediate: bool) -> None:
        self.dtype = dtype
        self._address = address
        self._value = view(address, 1, dtype).clone() if immediate else None

    def apply(self, own: Tensor) -> Tensor:
        """Return own * scalar: in float32 for types that accumulate in float32, else in the type itself."""
        scalar = self._value if self._value is not None else view(self._address, 1, self.dtype)
        if own.dtype in _NARROW:
            return own.float() * scalar.float()
        return own * scalar


def combine(parts: Sequence[Tensor], out: Tensor, dtype: int, op: int) -> None:
    """Reduce `parts` in order into `out`, which may be one of them. Parts may have a wider type than `out`."""
    op = int(RedOp.SUM) if op > RedOp.AVG else op
    if out.numel() == 0:
        return
    if out.dtype in _NARROW and not (op in (RedOp.MAX, RedOp.MIN) and out.dtype not in _FP8):
        for start in range(0, out.numel(), _BLOCK):
            _combine_wide([part[start : start + _BLOCK] for part in parts], out[start : start + _BLOCK], op)
    elif dtype in _UNSIGNED and op in (RedOp.MAX, RedOp.MIN):
        sign = torch.iinfo(out.dtype).min  # flipping the sign bit maps unsigned order to signed order
        flipped = [part ^ sign for part in parts]
        _fold(flipped, flipped[0], op)
        torch.bitwise_xor(flipped[0], sign, out=out)
    else:
        _fold(parts, out, op)
        if op == RedOp.AVG:
            _divide(out, len(parts), dtype in _UNSIGNED)


def _fold(parts: Sequence[Tensor], out: Tensor, op: int) -> None:
    if len(parts) == 1:
        if parts[0].data_ptr() != out.data_ptr():
            out.copy_(parts[0])
        return
    # In an in-place call of rank >= 2, `out` is a later part, which the first step must not overwrite.
    target = out
    if any(part.data_ptr() == out.data_ptr() for part in parts[2:]):
        target = torch.empty_like(out)
    step = _STEPS.get(op, torch.add)
    step(parts[0], parts[1], out=target)
    for part in parts[2:]:
        step(target, part, out=target)
    if target is not out:
        out.copy_(target)


def _combine_wide(parts: Sequence[Tensor], out: Tensor, op: int) -> None:
    wide = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        other = part.float() if part.dtype in _FP8 else part
        if op == RedOp.PROD:
            wide.mul_(other)
        elif op == RedOp.MAX:
            torch.maximum(wide, other, out=wide)
        elif op == RedOp.MIN:
            torch.minimum(wide, other, out=wide)
        else:
            wide.add_(other)
    if op == RedOp.AVG:
        wide.div_(len(parts))
    out.copy_(wide)


def _divide(total: Tensor, ranks: int, unsigned: bool) -> None:
    """total /= ranks, in place."""
    if total.is_floating_point():
        total.div_(ranks)
    elif unsigned:
        # torch has no unsigned division: halve, so that the value is not negative; divide; double; fix the last bit.
        half = (total >> 1) & torch.iinfo(total.dtype).max
        quotient = half.div_(ranks, rounding_mode="trunc").mul_(2)
        rest = total - quotient * ranks
        total.copy_(quotient.add_(rest >= ranks))
    elif total.element_size() == 1:  # the number of ranks may not fit into the type
        total.copy_(total.to(torch.int32).div_(ranks, rounding_mode="trunc"))
    else:
        total.div_(ranks, rounding_mode="trunc")
