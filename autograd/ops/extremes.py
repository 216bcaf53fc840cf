"""all_reduce with max, min and prod: nonlinear reductions, with derivatives of any order.

The derivatives need more than the forward pass computes: which ranks attain the extremum, or the product of the other
ranks' factors. The backward pass computes it with differentiable collectives. Notation: see ops/__init__.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pynccl import Communicator

from ..arguments import AnyOp
from ..collective import Collective, CollectiveCall, Run, run
from ..torch_internals import forward_mode
from ..wire import Dtype, Prepared
from .all_gather import AllGather
from .all_reduce import NONLINEAR, AllReduce, Copy


def extremum(x: Tensor, op: str, grad: str, reduce_dtype: Dtype) -> CollectiveCall:
    """Return the call for all_reduce with op "max" or "min"."""
    if x.is_complex():
        raise TypeError(f"all_reduce: complex numbers ({x.dtype}) have no {op}; pass x.abs() or x.real")
    return CollectiveCall(Extremum, x, (op, grad, reduce_dtype))


def product(x: Tensor, op: str, grad: str, reduce_dtype: Dtype) -> CollectiveCall:
    """Return the call for all_reduce with op "prod"."""
    return CollectiveCall(Product, x, (grad, reduce_dtype))


NONLINEAR.update(max=extremum, min=extremum, prod=product)


class Elementwise(Collective):
    """A reduction whose derivative multiplies by a factor that depends on x and y."""

    linear = False

    @staticmethod
    def factor(run: Run, comm: Communicator, x: Tensor, y: Tensor, *params: Any) -> Tensor:
        """Return dy / dx_r."""
        raise NotImplementedError

    @classmethod
    def cotangent(
        cls, run: Run, comm: Communicator, g: Tensor, shape: torch.Size, saved: tuple[Tensor, ...], params: Any
    ) -> Tensor:
        """Return dx = G * conj(factor), where G is all_reduce(g) under "sum", g under "replicated"."""
        *_, grad, reduce_dtype = params
        if grad == "sum":
            total = run(comm, AllReduce, g, "sum", "sum", reduce_dtype)
        else:
            total = run(comm, Copy, g, reduce_dtype)
        return total * cls.factor(run, comm, *saved, *params).conj().resolve_conj()

    @classmethod
    def setup_context(cls, ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        super().setup_context(ctx, inputs, output)
        ctx.save_for_backward(inputs[0], output)
        ctx.save_for_forward(inputs[0], output)

    @classmethod
    def jvp(cls, ctx: Any, tangent: Tensor, *others: None) -> Tensor:
        *_, grad, reduce_dtype = ctx.params
        with forward_mode(True):  # torch turns it off in a jvp, but outer levels have tangents
            x, y = (forward_ad.unpack_dual(t).primal for t in ctx.saved_tensors)
            term = tangent * cls.factor(run, ctx.comm, x, y, *ctx.params)
            return run(ctx.comm, AllReduce, term, "sum", grad, reduce_dtype)


class Extremum(Elementwise):
    """Maximum or minimum over ranks, on every rank. The ranks that attain it share the cotangent equally.

    forward    x [..] -> y [..]     y_r = max_q x_q (min_q x_q)
    backward   g [..] -> [..]       G * [x_r == y] / ties           "sum": G = all_reduce(g)    "replicated": G = g
    """

    name = "extremum"
    schema = "str op, str grad, ScalarType? reduce_dtype"
    grad_index = 1

    @staticmethod
    def prepare(x: Tensor, comm: Communicator, op: AnyOp, grad: str, reduce_dtype: Dtype) -> Prepared:
        return AllReduce.prepare(x, comm, op, grad, reduce_dtype)

    @staticmethod
    def factor(run: Run, comm: Communicator, x: Tensor, y: Tensor, *params: Any) -> Tensor:
        *_, reduce_dtype = params
        with torch.no_grad():  # piecewise constant
            sent, best = (x, y) if reduce_dtype is None else (x.to(reduce_dtype).to(x.dtype), y)
            # As precise as x, and wide enough to count ties exactly.
            count = torch.float64 if x.dtype is torch.float64 else torch.float32
            attained = ((sent == best) | (sent.isnan() & best.isnan())).to(count)
            ties = run(comm, AllReduce, attained, "sum", "sum", None)
            return (attained / ties.clamp(min=1)).to(x.dtype)


class Product(Elementwise):
    """Product over ranks, on every rank. The derivatives gather the factors without division: zeros are exact too.

    forward    x [..] -> y [..]     y_r = prod_q x_q
    backward   g [..] -> [..]       G * conj(product of the others)     "sum": G = all_reduce(g)    "replicated": G = g

    The derivatives need memory for N tensors like x. So does the forward pass of a complex product, which NCCL lacks.
    """

    name = "product"
    schema = "str grad, ScalarType? reduce_dtype"
    grad_index = 0

    @staticmethod
    def prepare(x: Tensor, comm: Communicator, grad: str, reduce_dtype: Dtype) -> Prepared:
        if not x.is_complex():
            return AllReduce.prepare(x, comm, "prod", grad, reduce_dtype)
        launch, factors = AllGather.prepare(x.unsqueeze(0), comm, 0, grad, None, None)
        return Prepared(launch, lambda: factors().prod(0))

    @staticmethod
    def factor(run: Run, comm: Communicator, x: Tensor, y: Tensor, *params: Any) -> Tensor:
        *_, reduce_dtype = params
        factors = run(comm, AllGather, x.unsqueeze(0), 0, "sum", None, reduce_dtype)
        if reduce_dtype is not None and not x.is_complex():
            factors = factors.to(reduce_dtype)
        before, local, after = factors.split([comm.rank, 1, comm.size - 1 - comm.rank])
        return torch.cat([before, torch.ones_like(local), after]).prod(0).to(x.dtype)
