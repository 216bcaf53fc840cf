"""broadcast, reduce, scatter, gather: collectives with a root.

broadcast under "sum" and reduce are adjoint to each other, and so are scatter and gather. Notation: see functions.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pynccl import Communicator

from . import raw
from .collective import Call, Collective
from .raw import Exchange
from .sums import Dtype, mean


class Broadcast(Collective):
    """Root's tensor, on every rank.

    forward    x [..] -> y [..]     y_r = x_root
    backward   g [..] -> [..]       root: sum_q g_q ("replicated": g)     others: 0
    """

    name = "broadcast"
    schema = "int root, str grad, ScalarType? reduce_dtype"
    grad_at = 1

    @staticmethod
    def exchange(x: Tensor, comm: Communicator, root: int, grad: str, reduce_dtype: Dtype) -> Exchange:
        return raw.broadcast(x, comm, root)

    @staticmethod
    def adjoint(g: Tensor, comm: Communicator, shape: torch.Size, root: int, grad: str, reduce_dtype: Dtype) -> Call:
        if grad == "sum":
            return Call(Reduce, g, (root, "sum", reduce_dtype))
        return Call(AtRoot, g, (root, reduce_dtype))


class AtRoot(Collective):
    """A replicated tensor, on root only.

    forward    x [..] -> y [..]     root: x     others: 0
    backward   g [..] -> [..]       broadcast(g)
    """

    name = "at_root"
    schema = "int root, ScalarType? reduce_dtype"

    @staticmethod
    def exchange(x: Tensor, comm: Communicator, root: int, reduce_dtype: Dtype) -> Exchange:
        return raw.at_root(x, comm, root)

    @staticmethod
    def adjoint(g: Tensor, comm: Communicator, shape: torch.Size, root: int, reduce_dtype: Dtype) -> Call:
        return Call(Broadcast, g, (root, "replicated", reduce_dtype))


class Reduce(Collective):
    """Sum (or mean) over ranks, on root.

    forward    x [..] -> y [..]     root: sum_q x_q     others: 0       avg: / N
    backward   g [..] -> [..]       broadcast(g)                        avg: / N
    """

    name = "reduce"
    schema = "int root, str op, ScalarType? reduce_dtype"

    @staticmethod
    def exchange(x: Tensor, comm: Communicator, root: int, op: str, reduce_dtype: Dtype) -> Exchange:
        return raw.reduce(x, comm, root, op, reduce_dtype)

    @staticmethod
    def adjoint(g: Tensor, comm: Communicator, shape: torch.Size, root: int, op: str, reduce_dtype: Dtype) -> Call:
        return Call(Broadcast, mean(g, op, comm), (root, "sum", reduce_dtype))


class Scatter(Collective):
    """Slice r of root's tensor along `dim`, on rank r.

    forward    x [.., S, ..] -> y [.., s_r, ..]     y_r = x_root[slice r]
    backward   g [.., s_r, ..] -> [.., S, ..]       root: gather(g)     others: 0
    """

    name = "scatter"
    schema = "int root, int dim, SymInt[] splits"

    @staticmethod
    def exchange(x: Tensor, comm: Communicator, root: int, dim: int, splits: Sequence[int]) -> Exchange:
        return raw.scatter(x, comm, root, dim, splits)

    @staticmethod
    def adjoint(g: Tensor, comm: Communicator, shape: torch.Size, root: int, dim: int, splits: Sequence[int]) -> Call:
        return Call(Gather, g, (root, dim, splits, shape[dim]))

    @staticmethod
    def batched(root: int, dim: int, *params: Any) -> tuple[Any, ...]:
        return root, dim + 1, *params


class Gather(Collective):
    """All ranks' tensors, concatenated along `dim`, on root.

    forward    x [.., s_r, ..] -> y     root: concat_q x_q [.., S, ..]      others: 0 [.., rest, ..]
    backward   g -> [.., s_r, ..]       g_root[slice r]
    """

    name = "gather"
    schema = "int root, int dim, SymInt[] splits, SymInt rest"

    @staticmethod
    def exchange(x: Tensor, comm: Communicator, root: int, dim: int, splits: Sequence[int], rest: int) -> Exchange:
        return raw.gather(x, comm, root, dim, splits, rest)

    @staticmethod
    def adjoint(
        g: Tensor, comm: Communicator, shape: torch.Size, root: int, dim: int, splits: Sequence[int], rest: int
    ) -> Call:
        return Call(Scatter, g, (root, dim, splits))

    @staticmethod
    def batched(root: int, dim: int, *params: Any) -> tuple[Any, ...]:
        return root, dim + 1, *params
