"""Collectives of several tensors in one call: one NCCL group forwards, one backwards.

For gradients or parameters of many sizes and types, which one by one would each pay the latency of a launch. Every
tensor's output and derivative are those of the call with it alone; see functions.py for which functions take lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

import pynccl
from pynccl import Communicator

from . import backward_check
from .collective import Call, Collective, reachable, run
from .extremes import Elementwise
from .sums import Copy, Split
from .tracing import sees_operators

_LOCAL = (Copy, Split)  # what communicates nothing has nothing to be grouped


class _Part(NamedTuple):
    function: type[Collective]
    params: tuple[Any, ...]


class _Plan:
    """What is to be done with each tensor."""

    def __init__(self, comm: Communicator, parts: Sequence[_Part]) -> None:
        self.comm, self.parts = comm, tuple(parts)

    @property
    def name(self) -> str:
        return f"{self.parts[0].function.name} of {len(self.parts)} tensors"

    def calls(self, xs: Sequence[Tensor]) -> list[Call]:
        return [Call(part.function, x, part.params) for part, x in zip(self.parts, xs, strict=True)]


class Coalesced(Function):
    """Linear collectives of several tensors, as one group.

    forward    x_1, .., x_k -> y_1, .., y_k     y_i = its collective of x_i
    backward   g_1, .., g_k -> dx_1, .., dx_k   dx_i = its adjoint of g_i, zeros for an output that was not used
    """

    @staticmethod
    def forward(plan: _Plan, *xs: Tensor) -> tuple[Tensor, ...]:
        exchanges = [function.exchange(x, plan.comm, *params) for function, x, params in plan.calls(xs)]
        with pynccl.group():
            for exchange in exchanges:
                exchange.issue(None)
        return tuple(exchange.finish() for exchange in exchanges)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.plan, *xs = inputs
        ctx.shapes = [x.shape for x in xs]
        ctx.differentiable = [has_derivative(x) for x in xs]
        ctx.mark_non_differentiable(*(y for y in output if not has_derivative(y)))
        ctx.site = backward_check.sign(ctx.plan.comm, ctx.plan.name) if ctx.plan.comm.checking else None

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        plan = ctx.plan
        at = [i for i, differentiable in enumerate(ctx.differentiable) if differentiable]
        if ctx.site is not None:
            _check(plan, ctx.site, [cotangents[i] for i in at])
        calls = [
            plan.parts[i].function.adjoint(cotangents[i], plan.comm, ctx.shapes[i], *plan.parts[i].params) for i in at
        ]
        gradients = dict(zip(at, run_together(plan.comm, calls), strict=True))
        return None, *(gradients.get(i) for i in range(len(plan.parts)))


def run_together(comm: Communicator, calls: Sequence[Call]) -> list[Tensor]:
    """The calls' outputs, in order; launched as one group.

    One by one on one rank, in what is traced, under forward mode and torch.func, and for max, min and prod."""
    if _one_by_one(comm, calls):
        return [run(comm, function, x, *params) for function, x, params in calls]
    xs = [call.x for call in calls]
    if not any(x.requires_grad for x in xs):  # a node on every rank, for the peers' backward passes: see `run`
        first = next((i for i, x in enumerate(xs) if has_derivative(x)), None)
        if first is not None:
            xs[first] = reachable(xs[first])
    plan = _Plan(comm, [_Part(call.function, call.params) for call in calls])
    return list(Coalesced.apply(plan, *xs))


def has_derivative(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _one_by_one(comm: Communicator, calls: Sequence[Call]) -> bool:
    return (
        comm.size == 1
        or len(calls) < 2
        or torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or getattr(forward_ad, "_current_level", -1) >= 0
        or any(issubclass(call.function, Elementwise) or sees_operators(call.x) for call in calls)
        or all(issubclass(call.function, _LOCAL) for call in calls)
    )


def _check(plan: _Plan, site: backward_check.Site, cotangents: Sequence[Tensor]) -> None:
    """PYNCCL_CHECK=1: whether all ranks are in the backward pass of this call; whether "replicated" ones are."""
    function, params = plan.parts[0]
    if not function.is_replicated(params):
        backward_check.compare(plan.comm, site, None)
        return
    for g in cotangents:
        backward_check.compare(plan.comm, site, g)
