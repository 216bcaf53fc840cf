"""The collectives as custom operators, torch.ops.pynccl.*, for tracing: torch.compile, fake tensors, export.

Each operator is built from a `Collective`: the kernel and the shapes from `prepare`, the backward from `adjoint`, the
vmap rule from `batched`. The string `key_of(comm)` identifies a communicator. Operators do not support forward mode:
they raise an error, where torch would silently drop the tangent. Under torch.compile no grad_fn is added (see
ops/__init__.py), so requires_grad must be the same on all ranks. compiled.py keeps the calls in their order.

An operator returns its result in a list, because torch may move an operator that returns a tensor next to its use.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pynccl import Communicator
from pynccl.bindings.listing import public_dir

from .agreement import check_not_in_group
from .collective import Collective, communicator, key_of
from .compiled import attribute_compiled, backward_call, keep_calls
from .ops.all_gather import AllGather, ReduceScatter, Split
from .ops.all_reduce import AllReduce, Copy
from .ops.all_to_all import AllToAll
from .ops.extremes import Extremum, Product
from .ops.halo import HaloExchange, HaloReduce
from .ops.permute import Permute
from .ops.rooted import AtRoot, Broadcast, Gather, Reduce, Scatter
from .recompute import save_token
from .torch_internals import detect_fake_mode, forward_mode_is_on, in_forward_mode

__all__ = ["FUNCTIONS"]
__dir__ = public_dir(globals())

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


def _check_no_tangents(function: type[Collective]) -> None:
    """Raise in forward mode: the kernel cannot see whether x has a tangent. Forward mode is off if a Function, which
    has a jvp rule, calls the operator."""
    if in_forward_mode() and forward_mode_is_on():
        raise NotImplementedError(
            f"torch.ops.pynccl.{function.name} has no forward mode, so pynccl_autograd does not support it under "
            "torch.compile; call its functions outside torch.compile"
        )


def _register(function: type[Collective]) -> None:
    def kernel(x: Tensor, key: str, call: str, *params: Any) -> list[Tensor]:
        _check_no_tangents(function)
        comm = communicator(key)
        launch, result = function.prepare(x, comm, *params)
        if function.communicates:
            check_not_in_group(function.name)
        with attribute_compiled(comm, call):
            launch(None)
        return [result()]

    def fake(x: Tensor, key: str, call: str, *params: Any) -> list[Tensor]:
        _check_no_tangents(function)
        return [function.prepare(x, communicator(key), *params).result()]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        x, key, ctx.call, *ctx.params = inputs
        ctx.comm, ctx.shape = communicator(key), x.shape
        ctx.fetch_token = None if detect_fake_mode() else save_token()
        if not function.linear:
            ctx.save_for_backward(x, *output)

    def backward(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
        if ctx.fetch_token is not None:
            ctx.fetch_token()

        def run(comm: Communicator, adjoint: type[Collective], g: Tensor, *params: Any) -> Tensor:
            key = key_of(comm)
            return adjoint.operator(g, key, backward_call(key, function.backward_name, ctx.call), *params)

        dx = function.cotangent(run, ctx.comm, gradients[0], ctx.shape, ctx.saved_tensors, ctx.params)
        # torch takes an empty list for a list of tensors, whose gradient is a list
        return dx, None, None, *([] if param == [] else None for param in ctx.params)

    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, key: str, call: str, *params: Any
    ) -> tuple[list[Tensor], list[int]]:
        return [function.operator(x.movedim(in_dims[0], 0), key, call, *function.batched(*params))], [0]

    schema = f"(Tensor x, str comm, str call, {function.schema}) -> Tensor[]"
    made = torch.library.custom_op(f"pynccl::{function.name}", kernel, mutates_args=(), schema=schema)
    made.register_fake(fake)
    made.register_autograd(backward, setup_context=setup_context)
    made.register_vmap(vmap)
    if function.communicates:
        keep_calls(function.name, made)


for _function in FUNCTIONS:
    _register(_function)
