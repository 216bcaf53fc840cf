"""Differentiable collectives with exact adjoints, and parallel layers, over pynccl. Imported as `pynccl_autograd`."""

if __name__ == "autograd":
    raise ImportError(
        "this folder is the package pynccl_autograd: write `import pynccl_autograd`, after `pip install -e .` "
        "(the folder's own name would shadow the PyPI package autograd)"
    )

from . import nn, operators, partition, testing
from .anchor import anchor
from .asynchronous import Handle, start
from .coalesced import Coalesced
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
from .partition import AllSumReduce, CartesianPartition, Partition, Repartition, SumReduce, zero_volume_tensor
from .rooted import AtRoot, Broadcast, Gather, Reduce, Scatter
from .sums import AllGather, AllReduce, Copy, ReduceScatter, Split

__all__ = [
    "AllGather",
    "AllReduce",
    "AllSumReduce",
    "AllToAll",
    "AtRoot",
    "Broadcast",
    "CartesianPartition",
    "Coalesced",
    "Collective",
    "ColumnParallelLinear",
    "Copy",
    "Extremum",
    "Gather",
    "HaloExchange",
    "HaloReduce",
    "Handle",
    "Partition",
    "Permute",
    "PreMul",
    "Product",
    "Reduce",
    "ReduceScatter",
    "Repartition",
    "RowParallelLinear",
    "Scatter",
    "Split",
    "SumReduce",
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
    "partition",
    "permute",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send_recv",
    "split",
    "start",
    "testing",
    "zero_volume_tensor",
]
