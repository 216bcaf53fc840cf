"""Inputs whose sums, products and means are exact in every data type on 1, 2 and 4 ranks, and what must come out."""

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
    """Rank `rank`'s input in float64 on the CPU: ones and twos, in an order of its own."""
    i = torch.arange(count, dtype=torch.float64)
    return (i * i + i * rank + (i + rank) // 2) % 2 + 1


def reduced(op: str, size: int, count: int, integer: bool) -> Tensor:
    """The reduction of all ranks' values, in float64 on the CPU. Integers are averaged downwards."""
    inputs = [values(rank, count) for rank in range(size)]
    if op in ("sum", "avg"):
        total = reduce(torch.add, inputs)
        mean = total / size
        return total if op == "sum" else mean.floor() if integer else mean
    return reduce({"prod": torch.mul, "min": torch.minimum, "max": torch.maximum}[op], inputs)


def plain(x: Tensor) -> Tensor:
    """Back in float64 on the CPU, once the GPU is done."""
    return x.cpu().to(torch.float64)


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
