"""Inputs whose sums, products and means are exact in every data type on 1, 2 and 4 ranks, and the expected results."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

DTYPES = (
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
OPS = ("sum", "prod", "min", "max", "avg")


def values(rank: int, count: int) -> Tensor:
    """Return the input of a rank in float64 on the CPU: ones and twos, in a different order on each rank."""
    i = torch.arange(count, dtype=torch.float64)
    return (i * i + i * rank + (i + rank) // 2) % 2 + 1


def reduced(op: str, size: int, count: int, integer: bool) -> Tensor:
    """Return the reduction of all ranks' values in float64 on the CPU. Means of integers are rounded down."""
    inputs = [values(rank, count) for rank in range(size)]
    if op in ("sum", "avg"):
        total = reduce(torch.add, inputs)
        mean = total / size
        return total if op == "sum" else mean.floor() if integer else mean
    return reduce({"prod": torch.mul, "min": torch.minimum, "max": torch.maximum}[op], inputs)


def to_cpu_float64(x: Tensor) -> Tensor:
    """Return the tensor in float64 on the CPU, which waits for the GPU."""
    return x.cpu().to(torch.float64)


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
