"""Differentiable collectives with exact adjoints, and parallel layers, on pynccl. Import it as `pynccl_autograd`.

    import pynccl
    import pynccl_autograd as ad
    comm = pynccl.init()                          # under torchrun
    y = ad.all_reduce(x, comm, grad="sum")        # x.grad is the all-reduce of the gradient of y

Notation    r: this rank, q: any rank, N: number of ranks, g: the gradient of the loss with respect to y (the cotangent)

Contents (see help() of each):

collectives        all_reduce, all_gather, reduce_scatter, broadcast, reduce, gather, scatter, all_to_all, permute,
                   send_recv, halo_exchange; copy, split (for replicated tensors); PreMul, an operator
asynchronous       start, Work, set_side_stream; anchor, for outputs that a rank does not use
overlapped matmul  all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce, copy_matmul; OverlapConfig
layers             ColumnParallelLinear, RowParallelLinear, KeyValueLinear, VocabParallelEmbedding, VocabParallelHead,
                   Dropout; vocab_parallel_cross_entropy
models             parallelize, describe, DataParallelGradients, finish_gradients, finish_gradients_in_backward,
                   FinishedInBackward, clip_grad_norm_, GradScaler; Shard, set_shard, keep_shards, Mesh
checkpoints        full_state_dict, load_full_state_dict, save_full_state_dict, full_optimizer_state_dict,
                   load_full_optimizer_state_dict, dcp_state_dict, dcp_optimizer_state_dict; IncompatibleKeys
partitions         Partition, CartesianPartition, AllSumReduce, SumReduce, Repartition, zero_volume_tensor
tracing            trace, Tracing
modules            nn (the collectives as modules), overlap, partition, plans, rng, operators, testing
autograd.Function  AllReduce, Copy, Extremum, Product, AllGather, ReduceScatter, Split, Broadcast, Reduce, Gather,
                   Scatter, AtRoot, AllToAll, Permute, HaloExchange, HaloReduce, Coalesced; Collective, key_of
TransformerEngine  CommOverlap, CommOverlapP2P, CommOverlapHelper
"""

if __name__ == "autograd":
    raise ImportError(
        "this folder is the package pynccl_autograd: write `import pynccl_autograd`, after `pip install -e .` "
        "(the folder's own name would shadow the PyPI package autograd)"
    )

import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING

try:
    from pynccl import Communicator as _Communicator
except Exception as _error:  # of another project, whose package has replaced ours
    from pathlib import Path as _Path
    from runpy import run_path as _run_path

    _file = _Path(__file__).parents[1] / "pynccl" / "bindings" / "installed.py"
    if _file.exists() and (_text := _run_path(str(_file))["sentence"]()):
        raise ImportError(_text) from _error
    raise
from pynccl.bindings.listing import public_dir as _public_dir
from pynccl.bindings.torch_names import FUNCTIONS as _FUNCTIONS, no_attribute as _no_attribute

from . import nn, operators, overlap, partition, plans, rng, testing
from .checks import anchor
from .collective import Collective, key_of
from .layers import (
    ColumnParallelLinear,
    DataParallelGradients,
    Dropout,
    FinishedInBackward,
    GradScaler,
    IncompatibleKeys,
    KeyValueLinear,
    RowParallelLinear,
    Shard,
    VocabParallelEmbedding,
    VocabParallelHead,
    clip_grad_norm_,
    dcp_optimizer_state_dict,
    dcp_state_dict,
    describe,
    finish_gradients,
    finish_gradients_in_backward,
    full_optimizer_state_dict,
    full_state_dict,
    keep_shards,
    load_full_optimizer_state_dict,
    load_full_state_dict,
    parallelize,
    save_full_state_dict,
    set_shard,
    vocab_parallel_cross_entropy,
)
from .mesh import Mesh
from .ops.all_gather import AllGather, ReduceScatter, Split, all_gather, reduce_scatter, split
from .ops.all_reduce import AllReduce, Copy, PreMul, all_reduce, copy
from .ops.all_to_all import AllToAll, all_to_all
from .ops.coalesced import Coalesced
from .ops.extremes import Extremum, Product
from .ops.halo import HaloExchange, HaloReduce, halo_exchange
from .ops.permute import Permute, permute, send_recv
from .ops.rooted import AtRoot, Broadcast, Gather, Reduce, Scatter, broadcast, gather, reduce, scatter
from .overlap import (
    CommOverlap,
    CommOverlapHelper,
    CommOverlapP2P,
    OverlapConfig,
    all_gather_matmul,
    copy_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from .partition import AllSumReduce, CartesianPartition, Partition, Repartition, SumReduce, zero_volume_tensor
from .streams import set_side_stream
from .tracing import Tracing, trace
from .work import Work, start

__version__ = "0.1.0"

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
    "CommOverlap",
    "CommOverlapHelper",
    "CommOverlapP2P",
    "Copy",
    "DataParallelGradients",
    "Dropout",
    "FinishedInBackward",
    "Extremum",
    "Gather",
    "GradScaler",
    "HaloExchange",
    "HaloReduce",
    "IncompatibleKeys",
    "KeyValueLinear",
    "Mesh",
    "OverlapConfig",
    "Partition",
    "Permute",
    "PreMul",
    "Product",
    "Reduce",
    "ReduceScatter",
    "Repartition",
    "RowParallelLinear",
    "Scatter",
    "Shard",
    "Split",
    "SumReduce",
    "Tracing",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "Work",
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "all_to_all",
    "anchor",
    "broadcast",
    "clip_grad_norm_",
    "copy",
    "copy_matmul",
    "dcp_optimizer_state_dict",
    "dcp_state_dict",
    "describe",
    "finish_gradients",
    "finish_gradients_in_backward",
    "full_optimizer_state_dict",
    "full_state_dict",
    "keep_shards",
    "gather",
    "halo_exchange",
    "key_of",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "nn",
    "operators",
    "overlap",
    "parallelize",
    "partition",
    "permute",
    "plans",
    "reduce",
    "reduce_scatter",
    "rng",
    "save_full_state_dict",
    "scatter",
    "send_recv",
    "set_shard",
    "set_side_stream",
    "split",
    "start",
    "testing",
    "trace",
    "vocab_parallel_cross_entropy",
    "zero_volume_tensor",
]

__dir__ = _public_dir(globals())

if not _TYPE_CHECKING:  # a type checker would accept every name

    def __getattr__(name: str) -> object:
        raise _no_attribute(_sys.modules.get(__name__), name, _FUNCTIONS, _Communicator)
