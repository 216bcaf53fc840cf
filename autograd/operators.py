"""The collectives as custom operators, torch.ops.pynccl.*, for tracing: torch.compile, fake tensors, export.

Each operator is built from a `Collective`: the kernel and the shapes from `prepare`, the backward from `adjoint`, the
vmap rule from `batched`. The string `key_of(comm)` identifies a communicator. Operators do not support forward mode:
they raise an error, where torch would silently drop the tangent. Under torch.compile no grad_fn is added (see
ops/__init__.py), so requires_grad must be the same on all ranks. torch.compile removes a collective whose result is not
used; ranks that run the same program all remove it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pynccl import Communicator

from .collective import Collective, check_not_in_group, communicator, key_of
from .ops.all_gather import AllGather, ReduceScatter, Split
from .ops.all_reduce import AllReduce, Copy
from .ops.all_to_all import AllToAll
from .ops.extremes import Extremum, Product
from .ops.halo import HaloExchange, HaloReduce
from .ops.permute import Permute
from .ops.rooted import AtRoot, Broadcast, Gather, Reduce, Scatter
from .recompute import save_token
from .torch_internals import detect_fake_mode, forward_mode_is_on, in_forward_mode

FUNCTIONS: tuple[type[Collective], ...] = (
    AllReduce,
    Copy,
    ReduceScatter,
    AllGather,
    Split,
    Broadcast,
    AtRoot,
    Reduce,
    Scatter,
    Gather,
    AllToAll,
    Permute,
    HaloExchange,
    HaloReduce,
    Extremum,
    Product,
)


def run_operator(comm: Communicator, function: type[Collective], x: Tensor, *params: Any) -> Tensor:
    """Run a collective as an operator, also in the backward passes of operators, which may be traced."""
    return function.operator(x, key_of(comm), *params)


def _check_no_tangents(function: type[Collective]) -> None:
    """Raise in forward mode: the kernel cannot see whether x has a tangent. Forward mode is off if a Function, which
    has a jvp rule, calls the operator."""
    if in_forward_mode() and forward_mode_is_on():
        raise NotImplementedError(
            f"torch.ops.pynccl.{function.name} has no forward mode, so pynccl_autograd does not support it under "
            "torch.compile; call its functions outside torch.compile"
        )


def _register(function: type[Collective]) -> None:
    def kernel(x: Tensor, comm: str, *params: Any) -> Tensor:
        _check_no_tangents(function)
        launch, result = function.prepare(x, communicator(comm), *params)
        if function.communicates:
            check_not_in_group(function.name)
        launch(None)
        return result()

    def fake(x: Tensor, comm: str, *params: Any) -> Tensor:
        _check_no_tangents(function)
        return function.prepare(x, communicator(comm), *params).result()

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, key, *ctx.params = inputs
        ctx.comm, ctx.shape = communicator(key), x.shape
        ctx.fetch_token = None if detect_fake_mode() else save_token()
        if not function.linear:
            ctx.save_for_backward(x, output)

    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.fetch_token is not None:
            ctx.fetch_token()
        dx = function.cotangent(run_operator, ctx.comm, g, ctx.shape, ctx.saved_tensors, ctx.params)
        return dx, None, *(None,) * len(ctx.params)

    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, comm: str, *params: Any) -> tuple[Tensor, int]:
        return function.operator(x.movedim(in_dims[0], 0), comm, *function.batched(*params)), 0

    schema = f"(Tensor x, str comm, {function.schema}) -> Tensor"
    made = torch.library.custom_op(f"pynccl::{function.name}", kernel, mutates_args=(), schema=schema)
    made.register_fake(fake)
    made.register_autograd(backward, setup_context=setup_context)
    made.register_vmap(vmap)


for _function in FUNCTIONS:
    _register(_function)
