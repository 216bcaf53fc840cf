"""The collectives as custom operators, torch.ops.pynccl.*, for what traces: torch.compile, fake tensors, export.

Each is made from a `Collective`: the kernel and the shapes from `prepare`, the backward from its adjoint, the vmap rule
from its batched parameters. A communicator is named by the string `key_of(comm)`. Operators have no forward mode:
they raise, where torch would drop the tangent. Under torch.compile no nodes are added (see ops/__init__.py), so
requires_grad must be the same on all ranks; and a collective whose result is not used is dropped from the graph, on all
ranks alike if they run the same program.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pynccl import Communicator

from .collective import Collective, communicator, key_of, refuse_group
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
    """`collective.run`, by operators only: backward passes of operators may be traced too."""
    return function.operator(x, key_of(comm), *params)


def _refuse_tangents(function: type[Collective]) -> None:
    """Raise within forward mode: whether x has a tangent can no longer be seen down here. It is off where a Function
    that has a rule of its own for tangents calls the operator."""
    if in_forward_mode() and forward_mode_is_on():
        raise NotImplementedError(
            f"torch.ops.pynccl.{function.name} has no forward mode, and so under torch.compile neither has "
            "pynccl_autograd; call its functions outside torch.compile, where they have"
        )


def _register(function: type[Collective]) -> None:
    def kernel(x: Tensor, comm: str, *params: Any) -> Tensor:
        _refuse_tangents(function)
        launch, result = function.prepare(x, communicator(comm), *params)
        if function.communicates:
            refuse_group(function.name)
        launch(None)
        return result()

    def fake(x: Tensor, comm: str, *params: Any) -> Tensor:
        _refuse_tangents(function)
        return function.prepare(x, communicator(comm), *params).result()

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, key, *ctx.params = inputs
        ctx.comm, ctx.shape = communicator(key), x.shape
        ctx.ask_for_token = None if detect_fake_mode() else save_token()
        if not function.linear:
            ctx.save_for_backward(x, output)

    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.ask_for_token is not None:
            ctx.ask_for_token()
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
