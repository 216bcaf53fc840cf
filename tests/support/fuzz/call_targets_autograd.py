"""The fuzzed calls of pynccl_autograd with their backward passes. See call_kinds.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import pynccl_autograd as ad

from .call_kinds import Arguments, Right, Target
from .call_targets import right_all_gather, right_all_reduce, right_broadcast, right_reduce_scatter
from .call_values import numbers

X = ("tensor", "tensor")
GRAD, DIM, SPLITS, WIDE = ("grad", "sum"), ("dim", 0), ("splits", None), ("dtype", None)
AD_COMM = ("ad comm", "comm")


def function(name: str) -> Callable[[Any, Arguments], Any]:
    """Return a function that calls one of pynccl_autograd and runs the backward pass if the result requires grad."""

    def call(env: Any, args: Arguments) -> Any:
        y = getattr(ad, name)(**args)
        if isinstance(y, Tensor) and y.requires_grad:
            y.backward(torch.ones_like(y))  # not y.sum(), which some dtypes lack
        return y

    return call


def module(name: str) -> Callable[[Any, Arguments], Any]:
    return lambda env, args: getattr(ad.nn, name)(**args)(numbers(env.rank))


def _start(env: Any, args: Arguments) -> Any:
    return ad.start(args["operation"], numbers(env.rank), env.comm, grad="sum").wait()


def _x(rows: list[Arguments]) -> list[Arguments]:
    return [{**row, "send": row["x"]} for row in rows]


def _with_x(right: Right) -> Right:
    return lambda rows, rank, n: right(_x(rows), rank, n)


def _plain_splits(right: Right) -> Right:
    """Return None (unknown) if splits are passed."""
    return lambda rows, rank, n: right(rows, rank, n) if rows[0].get("splits") is None else None


AUTOGRAD = [
    Target("all_reduce", function("all_reduce"),
           {"x": X, "comm": AD_COMM, "op": ("ad op", "sum"), "grad": GRAD, "reduce_dtype": WIDE},
           _with_x(right_all_reduce)),
    Target("copy", function("copy"), {"x": X, "comm": AD_COMM, "reduce_dtype": WIDE}),
    Target("reduce_scatter", function("reduce_scatter"),
           {"x": X, "comm": AD_COMM, "dim": DIM, "op": ("ad op", "sum"), "splits": SPLITS, "reduce_dtype": WIDE},
           _plain_splits(_with_x(right_reduce_scatter))),
    Target("all_gather", function("all_gather"),
           {"x": X, "comm": AD_COMM, "dim": DIM, "grad": GRAD, "splits": SPLITS, "reduce_dtype": WIDE},
           _with_x(right_all_gather)),
    Target("split", function("split"), {"x": X, "comm": AD_COMM, "dim": DIM, "splits": SPLITS}),
    Target("broadcast", function("broadcast"),
           {"x": X, "comm": AD_COMM, "root": ("rank", 0), "grad": GRAD, "reduce_dtype": WIDE},
           _with_x(right_broadcast)),
    Target("reduce", function("reduce"),
           {"x": X, "comm": AD_COMM, "root": ("rank", 0), "op": ("ad op", "sum"), "reduce_dtype": WIDE}),
    Target("scatter", function("scatter"),
           {"x": X, "comm": AD_COMM, "root": ("rank", 0), "dim": DIM, "splits": ("no splits", None)}),
    Target("gather", function("gather"),
           {"x": X, "comm": AD_COMM, "root": ("rank", 0), "dim": DIM, "splits": SPLITS}),
    Target("all_to_all", function("all_to_all"),
           {"x": X, "comm": AD_COMM, "split_dim": DIM, "concat_dim": DIM, "send_splits": SPLITS,
            "recv_splits": SPLITS}),
    Target("permute", function("permute"), {"x": X, "comm": AD_COMM, "edges": ("edges", [(0, 1), (1, 0)])}),
    Target("send_recv", function("send_recv"),
           {"x": X, "comm": AD_COMM, "target": ("no rank", 9), "source": ("rank or none", None)}),
    Target("halo_exchange", function("halo_exchange"), {"x": X, "comm": AD_COMM, "dim": DIM, "halo": ("halo", 1)}),
    Target("anchor", lambda env, args: ad.anchor(args["loss"], args["output"]),
           {"loss": ("tensor", "leaf"), "output": ("tensor", "leaf")}),
    Target("start", _start, {"operation": ("nothing else", len)}),
    Target("nn.AllReduce", module("AllReduce"), {"comm": AD_COMM, "op": ("ad op", "sum"), "grad": GRAD},
           words=("all_reduce",)),
    Target("nn.ReduceScatter", module("ReduceScatter"),
           {"comm": AD_COMM, "dim": DIM, "op": ("ad op", "sum"), "splits": SPLITS}, words=("reduce_scatter",)),
    Target("nn.AllGather", module("AllGather"), {"comm": AD_COMM, "dim": DIM, "grad": GRAD, "splits": SPLITS},
           words=("all_gather",)),
    Target("nn.Broadcast", module("Broadcast"), {"comm": AD_COMM, "root": ("rank", 0), "grad": GRAD},
           words=("broadcast",)),
    Target("nn.Permute", module("Permute"), {"comm": AD_COMM, "edges": ("edges", [(0, 1), (1, 0)])},
           words=("permute",)),
    Target("nn.HaloExchange", module("HaloExchange"), {"comm": AD_COMM, "dim": DIM, "halo": ("halo", 1)},
           words=("halo_exchange",)),
    Target("nn.AllToAll", module("AllToAll"),
           {"comm": AD_COMM, "split_dim": DIM, "concat_dim": DIM, "send_splits": SPLITS, "recv_splits": SPLITS},
           words=("all_to_all",)),
    Target("ColumnParallelLinear", lambda env, args: ad.ColumnParallelLinear(**args),
           {"in_features": ("size", 4), "out_features": ("size", 4), "comm": AD_COMM, "bias": ("flag", True),
            "sequence_parallel": ("flag", False), "dtype": ("dtype", None)}),
    Target("RowParallelLinear", lambda env, args: ad.RowParallelLinear(4, 4, env.comm)(args["x"]),
           {"x": ("tensor", "2 elements")}, words=("Linear",)),
    Target("Partition", lambda env, args: ad.Partition(**args), {"comm": ("comm", "comm"),
           "ranks": ("integers", [0, 1])}),
    Target("CartesianPartition", lambda env, args: ad.CartesianPartition(**args),
           {"comm": ("comm", "comm"), "shape": ("size", [2]), "ranks": ("integers or none", None)}),
    Target("AllSumReduce", lambda env, args: ad.AllSumReduce(args["partition"], args["axes_reduce"]),
           {"partition": ("other", "partition"), "axes_reduce": ("integers", ())}, words=("axes",)),
    Target("AllSumReduce", lambda env, args: ad.AllSumReduce(env.partition, 0)(args["x"]), {"x": X}),
    Target("Repartition", lambda env, args: ad.Repartition(env.partition, args["P_y"]),
           {"P_y": ("other", "partition")}),
    Target("Repartition", lambda env, args: ad.Repartition(env.partition, env.partition)(args["x"]), {"x": X}),
    Target("check_adjoint", lambda env, args: ad.testing.check_adjoint(lambda t: t * 2, **args),
           {"x": X, "comm": AD_COMM, "tolerance": ("timeout", None), "seed": ("size", 0)}),
    Target("key_of", lambda env, args: ad.key_of(args["comm"]), {"comm": ("other", "comm")}),
]  # fmt: skip
