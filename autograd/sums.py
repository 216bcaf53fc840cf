"""all_reduce, copy, reduce_scatter, all_gather, split: the five of data, tensor and sequence parallelism.

Two pairs and one of its own are adjoint to each other: all_reduce under "sum" to itself, under "replicated" to copy;
all_gather under "sum" to reduce_scatter, under "replicated" to split. Notation: see functions.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pynccl import Communicator

from . import raw
from .collective import Call, Collective
from .raw import Exchange, Splits

Dtype = torch.dtype | None


class AllReduce(Collective):
    """Sum (or mean) over ranks, on every rank.

    forward    x [..] -> y [..]     y_r = sum_q x_q                 avg: / N
    backward   g [..] -> [..]       "sum": all_reduce(g)            avg: / N
                                    "replicated": g                 avg: / N
    """

    name = "all_reduce"
    schema = "str op, str grad, ScalarType? reduce_dtype"
    grad_at = 1

    @staticmethod
    def exchange(x: Tensor, comm: Communicator, op: str, grad: str, reduce_dtype: Dtype) -> Exchange:
        return raw.all_reduce(x, comm, op, reduce_dtype)

    @staticmethod
    def adjoint(g: Tensor, comm: Communicator, shape: torch.Size, op: str, grad: str, reduce_dtype: Dtype) -> Call:
        if grad == "sum":
            return Call(AllReduce, g, (op, "sum", reduce_dtype))
        return Call(Entered, mean(g, op, comm), (reduce_dtype,))


class Copy(Collective):
    """A replicated tensor enters a region in which the ranks' work differs.

    forward    x [..] -> y [..]     y_r = x, in memory of its own
    backward   g [..] -> [..]       all_reduce(g)
    """

    name = "copy"
    schema = "ScalarType? reduce_dtype"

    @staticmethod
    def exchange(x: Tensor, comm: Communicator, reduce_dtype: Dtype) -> Exchange:
        return raw.copy(x)

    @staticmethod
    def adjoint(g: Tensor, comm: Communicator, shape: torch.Size, reduce_dtype: Dtype) -> Call:
        return Call(AllReduce, g, ("sum", "replicated", reduce_dtype))


class Entered(Copy):
    """Copy without the copy, for what this package reads only: the output shares the memory of x.

    As an operator it is Copy, since an operator must not return its input."""

    @classmethod
    def forward(cls, x: Tensor, comm: Communicator, *params: Any) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def alone(x: Tensor, *params: Any) -> Tensor:
        return x


class ReduceScatter(Collective):
    """Sum (or mean) over ranks, of which rank r keeps slice r of dimension `dim`.

    forward    x [.., N*s, ..] -> y [.., s, ..]     y_r = (sum_q x_q)[slice r]      avg: / N
    backward   g [.., s, ..] -> [.., N*s, ..]       all_gather(g)                   avg: / N
    """

    name = "reduce_scatter"
    schema = "int dim, str op, SymInt[]? splits, ScalarType? reduce_dtype"

    @staticmethod
    def exchange(x: Tensor, comm: Communicator, dim: int, op: str, splits: Splits, reduce_dtype: Dtype) -> Exchange:
        return raw.reduce_scatter(x, comm, dim, op, splits, reduce_dtype)

    @staticmethod
    def adjoint(
        g: Tensor, comm: Communicator, shape: torch.Size, dim: int, op: str, splits: Splits, reduce_dtype: Dtype
    ) -> Call:
        return Call(AllGather, mean(g, op, comm), (dim, "sum", splits, reduce_dtype))

    @staticmethod
    def batched(dim: int, *params: Any) -> tuple[Any, ...]:
        return dim + 1, *params


class AllGather(Collective):
    """All ranks' tensors, concatenated along dimension `dim`, on every rank.

    forward    x [.., s, ..] -> y [.., N*s, ..]     y = concat_q x_q
    backward   g [.., N*s, ..] -> [.., s, ..]       "sum": reduce_scatter(g)    "replicated": g[slice r]
    """

    name = "all_gather"
    schema = "int dim, str grad, SymInt[]? splits, ScalarType? reduce_dtype"
    grad_at = 1

    @staticmethod
    def exchange(x: Tensor, comm: Communicator, dim: int, grad: str, splits: Splits, reduce_dtype: Dtype) -> Exchange:
        return raw.all_gather(x, comm, dim, splits)

    @staticmethod
    def adjoint(
        g: Tensor, comm: Communicator, shape: torch.Size, dim: int, grad: str, splits: Splits, reduce_dtype: Dtype
    ) -> Call:
        if grad == "sum":
            return Call(ReduceScatter, g, (dim, "sum", splits, reduce_dtype))
        return Call(Split, g, (dim, splits))

    @staticmethod
    def batched(dim: int, *params: Any) -> tuple[Any, ...]:
        return dim + 1, *params


class Split(Collective):
    """Rank r's slice of a replicated tensor.

    forward    x [.., N*s, ..] -> y [.., s, ..]     y_r = x[slice r]
    backward   g [.., s, ..] -> [.., N*s, ..]       all_gather(g)
    """

    name = "split"
    schema = "int dim, SymInt[]? splits"

    @staticmethod
    def exchange(x: Tensor, comm: Communicator, dim: int, splits: Splits) -> Exchange:
        return raw.split(x, comm, dim, splits)

    @staticmethod
    def adjoint(g: Tensor, comm: Communicator, shape: torch.Size, dim: int, splits: Splits) -> Call:
        return Call(AllGather, g, (dim, "replicated", splits, None))

    @staticmethod
    def batched(dim: int, *params: Any) -> tuple[Any, ...]:
        return dim + 1, *params


def mean(g: Tensor, op: str, comm: Communicator) -> Tensor:
    """g / N for the operator "avg", else g."""
    return g / comm.size if op == "avg" else g
