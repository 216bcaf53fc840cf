"""Collectives of several tensors in one call: one NCCL group in the forward pass, one in the backward pass.

Useful for gradients or parameters of many sizes and dtypes, where separate calls would each pay the launch latency. The
output and the derivative of each tensor are those of a separate call. ops/__init__.py says which functions take lists.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, overload

import torch
from torch import Tensor
from torch.autograd import Function

import pynccl
from pynccl import Communicator
from pynccl.watch.frames import attribute_calls

from ..agreement import check_not_in_group
from ..arguments import raise_async_op
from ..collective import (
    Collective,
    CollectiveCall,
    enter_backward,
    operation,
    record_forward_call,
    require_grad,
    run,
    runs_as_operator,
)
from ..torch_internals import in_forward_mode, transforms_active

Tensors = list[Tensor] | tuple[Tensor, ...]  # launched as one group


class CallableOnLists(Protocol):
    """The `__call__` of a module whose function also takes a list of tensors."""

    @overload
    def __call__(self, x: Tensor) -> Tensor: ...
    @overload
    def __call__(self, x: Tensors) -> list[Tensor]: ...


def operation_of_lists(plan: Callable[..., Any]) -> Callable[..., Any]:
    """Like `operation`, for one tensor or a list of them. The functions spell out their overloads for static tools."""

    @functools.wraps(operation(plan))
    def run_now(x: Any, *args: Any, **kwargs: Any) -> Any:
        if "async_op" in kwargs:
            raise_async_op(plan.__name__)
        if not isinstance(x, (list, tuple)):
            comm, (function, x, params) = plan(x, *args, **kwargs)
            return run(comm, function, x, *params)
        plans = []
        for i, tensor in enumerate(x):
            try:
                plans.append(plan(tensor, *args, **kwargs))
            except (TypeError, ValueError) as error:
                raise type(error)(f"{error} (x is tensor {i} of {len(x)} in the list)") from None
        return run_together(plans[0][0], [call for _, call in plans]) if plans else []

    return run_now


class _Plan(NamedTuple):
    """The collective of each tensor, and the communicator."""

    comm: Communicator
    parts: tuple[tuple[type[Collective], tuple[Any, ...]], ...]

    @property
    def name(self) -> str:
        return f"{self.parts[0][0].name} of {len(self.parts)} tensors"


class Coalesced(Function):
    """Linear collectives of several tensors, launched as one group.

    forward    x_1, .., x_k -> y_1, .., y_k     y_i = collective_i(x_i)
    backward   g_1, .., g_k -> dx_1, .., dx_k   dx_i = adjoint_i(g_i), where g_i is 0 if y_i was not used
    """

    @staticmethod
    def forward(plan: _Plan, *xs: Tensor) -> tuple[Tensor, ...]:
        prepared = [
            function.prepare(x, plan.comm, *params) for (function, params), x in zip(plan.parts, xs, strict=True)
        ]
        check_not_in_group(plan.name)
        with pynccl.group():
            for call in prepared:
                call.launch(None)
        return tuple(call.result() for call in prepared)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.plan, *xs = inputs
        ctx.shapes = [x.shape for x in xs]
        ctx.differentiable = [has_derivative(x) for x in xs]
        ctx.mark_non_differentiable(*(y for y in output if not has_derivative(y)))
        record_forward_call(ctx, ctx.plan.comm, ctx.plan.name)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        plan, differentiable = ctx.plan, ctx.differentiable
        function, params = plan.parts[0]
        needed = [g for g, wanted in zip(cotangents, differentiable, strict=True) if wanted]
        enter_backward(ctx, plan.comm, needed if function.is_replicated(params) else [])
        calls = [
            function.adjoint(g, plan.comm, shape, *params)
            for (function, params), g, shape, wanted in zip(
                plan.parts, cotangents, ctx.shapes, differentiable, strict=True
            )
            if wanted
        ]
        with attribute_calls("Coalesced.backward", ctx.site):
            gradients = iter(run_together(plan.comm, calls))
        return None, *(next(gradients) if wanted else None for wanted in differentiable)


def run_together(comm: Communicator, calls: Sequence[CollectiveCall]) -> list[Tensor]:
    """Launch the calls as one group and return their outputs in order.

    They run one by one on one rank, while tracing, in forward mode, in torch.func, and for max, min and prod."""
    if _one_by_one(comm, calls):
        return [run(comm, function, x, *params) for function, x, params in calls]
    xs = [call.x for call in calls]
    if not any(x.requires_grad for x in xs):  # see `run`: the outputs need a grad_fn on every rank
        first = next((i for i, x in enumerate(xs) if has_derivative(x)), None)
        if first is not None:
            xs[first] = require_grad(xs[first])
    plan = _Plan(comm, tuple((call.function, call.params) for call in calls))
    return list(Coalesced.apply(plan, *xs))


def has_derivative(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _one_by_one(comm: Communicator, calls: Sequence[CollectiveCall]) -> bool:
    return (
        comm.size == 1
        or len(calls) < 2
        or torch.compiler.is_compiling()
        or transforms_active()
        or in_forward_mode()
        or any(not call.function.linear or runs_as_operator(call.x) for call in calls)
        or not any(call.function.communicates for call in calls)
    )
