"""Expected results of the collectives, computed in one process with Python integers or with float64 rounded once.

Inputs are random, but exact sums and products fit the accumulator (float32 for the small floats). Results of small
types are still rounded, so only an implementation that rounds once gets the reference's bits, in any order of addition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

DTYPES: dict[str, torch.dtype] = {
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "uint32": torch.uint32,
    "int64": torch.int64,
    "uint64": torch.uint64,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
OPS = ("sum", "prod", "min", "max", "avg")

# Significant bits of the inputs: those of the type, or fewer so that the sum of four is exact.
_BITS = {
    torch.float16: 11,
    torch.float32: 21,
    torch.float64: 50,
    torch.bfloat16: 8,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 3,
}
_FACTORS = torch.tensor([-3.0, -2.0, -1.5, -1.0, -0.5, 0.5, 1.0, 1.5, 2.0, 3.0], dtype=torch.float64)


def inputs(dtype: torch.dtype, op: str, count: int, nranks: int, seed: int = 0) -> list[torch.Tensor]:
    """Return one tensor of `count` elements per rank, the same in every process."""
    generator = torch.Generator().manual_seed(seed)

    def random_input() -> torch.Tensor:
        if not dtype.is_floating_point:
            raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
            return raw.view(dtype)
        if op == "prod":
            return _FACTORS[torch.randint(len(_FACTORS), (count,), generator=generator)].to(dtype)
        bound = 1 << _BITS[dtype]
        return (torch.randint(1 - bound, bound, (count,), generator=generator).double() / 8).to(dtype)

    return [random_input() for _ in range(nranks)]


def reduced(tensors: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Return the reduction of the ranks' tensors."""
    dtype = tensors[0].dtype
    if not dtype.is_floating_point:
        return _reduced_integers(tensors, op)
    values = torch.stack([x.double() for x in tensors])
    if op == "avg":  # exact sum, then one division in the accumulator's precision
        return (values.sum(0) / len(tensors)).to(dtype if dtype.itemsize >= 4 else torch.float32).to(dtype)
    if op == "sum":
        return values.sum(0).to(dtype)
    if op == "prod":
        return values.prod(0).to(dtype)
    return (values.amin(0) if op == "min" else values.amax(0)).to(dtype)


def _reduced_integers(tensors: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Reduce integers. Sums and products wrap around as in C; averages divide the wrapped sum, rounding to zero."""
    dtype = tensors[0].dtype
    columns = zip(*(x.tolist() for x in tensors), strict=True)
    bits = dtype.itemsize * 8
    signed = dtype.is_signed

    def wrap(value: int) -> int:
        value &= (1 << bits) - 1
        return value - (1 << bits) if signed and value >> (bits - 1) else value

    def reduce_values(values: tuple[int, ...]) -> int:
        if op == "prod":
            return wrap(int(np.prod(np.array(values, dtype=object))))
        if op in ("min", "max"):
            return min(values) if op == "min" else max(values)
        total = wrap(sum(values))
        if op == "sum":
            return total
        return abs(total) // len(values) * (1 if total >= 0 else -1)

    return torch.tensor([reduce_values(values) for values in columns], dtype=dtype)


def expect(got: Any, wanted: torch.Tensor, what: str) -> None:
    """Check that `got` has the shape, dtype and bits of `wanted`."""
    assert isinstance(got, torch.Tensor), f"{what}: got {got!r}"
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), f"{what}: {got.shape} {got.dtype}"
    differs = (bits(got) != bits(wanted)).flatten().nonzero().flatten()
    if len(differs):
        at = int(differs[0]) // wanted.element_size()
        pair = got.flatten()[at].item(), wanted.flatten()[at].item()
        raise AssertionError(f"{what}: element {at} is {pair[0]}, expected {pair[1]}; {len(differs)} bytes differ")


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor."""
    return x.detach().contiguous().flatten().view(torch.uint8)
