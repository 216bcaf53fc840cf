"""Differentiable collectives with exact adjoints, and parallel layers, over pynccl. Imported as `pynccl_autograd`."""

if __name__ == "autograd":
    raise ImportError(
        "this folder is the package pynccl_autograd: write `import pynccl_autograd`, after `pip install -e .` "
        "(the folder's own name would shadow the PyPI package autograd)"
    )

from . import testing
from .functions import (
    AllGather,
    AllReduce,
    Copy,
    ReduceScatter,
    Split,
    all_gather,
    all_reduce,
    copy,
    reduce_scatter,
    split,
)
from .linear import ColumnParallelLinear, RowParallelLinear

__all__ = [
    "AllGather",
    "AllReduce",
    "ColumnParallelLinear",
    "Copy",
    "ReduceScatter",
    "RowParallelLinear",
    "Split",
    "all_gather",
    "all_reduce",
    "copy",
    "reduce_scatter",
    "split",
    "testing",
]
