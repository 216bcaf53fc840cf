"""Differentiable collectives with exact adjoints, and parallel layers, over pynccl. Imported as `pynccl_autograd`."""

if __name__ == "autograd":
    raise ImportError(
        "this folder is the package pynccl_autograd: write `import pynccl_autograd`, after `pip install -e .` "
        "(the folder's own name would shadow the PyPI package autograd)"
    )

from . import nn, operators, testing
from .anchor import anchor
from .asynchronous import Handle, start
from .collective import Collective, key_of
from .exchanges import AllToAll, HaloExchange, HaloReduce, Permute
from .extremes import Extremum, Product
from .functions import (
    PreMul,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    copy,
    gather,
    halo_exchange,
    permute,
    reduce,
    reduce_scatter,
    scatter,
    send_recv,
    split,
)
from .linear import ColumnParallelLinear, RowParallelLinear
from .rooted import AtRoot, Broadcast, Gather, Reduce, Scatter
from .sums import AllGather, AllReduce, Copy, ReduceScatter, Split

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "AtRoot",
    "Broadcast",
    "Collective",
    "ColumnParallelLinear",
    "Copy",
    "Extremum",
    "Gather",
    "HaloExchange",
    "HaloReduce",
    "Handle",
    "Permute",
    "PreMul",
    "Product",
    "Reduce",
    "ReduceScatter",
    "RowParallelLinear",
    "Scatter",
    "Split",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "anchor",
    "broadcast",
    "copy",
    "gather",
    "halo_exchange",
    "key_of",
    "nn",
    "operators",
    "permute",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send_recv",
    "split",
    "start",
    "testing",
]
