"""What the overlapped patterns share: when they apply, how a pass is opened, and the gradient of a weight.

A pattern is one autograd Function: forward pass and backward pass on lanes. It applies to plain tensors in memory,
outside of what traces and transforms; everything else, and what is decided not to overlap, goes through the composition
of unfused.py, whose parts have rules for all that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pynccl import Communicator
from pynccl.bindings.values import attribute, shown
from pynccl.comm.observers import observers
from pynccl.watch.caller_notes import calls_noted_as

from ..arguments import check_reduce_dtype
from ..collective import enter_backward, remember as remember_call, require_grad
from ..torch_internals import (
    accumulates,
    dispatch_modes,
    has_storage,
    in_forward_mode,
    transforms_active,
)
from ..wire import Dtype
from .config import AUTO, Overlap, OverlapConfig, as_config
from .gathering import Cut
from .lanes import Lanes
from .limits import limited
from .matmul import add_outer_rows, outer_rows
from .routes import asked_for, route_of, turn_of
from .trials import Asked, Decision, is_tiny
from .unfused import check_input, into_main_grad
from .workspace import Workspace, workspace_of

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Grads = tuple[Tensor | None, Tensor | None, Tensor | None]  # of x, w, bias


class MatmulCall:
    """A call of one of the functions of functions.py: what it says besides its tensors, checked.

    main_grad, parameter  where the weight's gradient is added, by passes that add to gradients, and the weight that has
                          it; None: it is returned, as ever
    owner                 the layer that called, for which is decided, and for the report
    backward              the pass of its gradients, if that communicates
    """

    def __init__(
        self,
        name: str,
        kind: str,
        x: Tensor,
        w: Tensor,
        comm: Communicator,
        overlap: Overlap,
        reduce_dtype: Dtype,
        fused: bool,
        owner: Any,
    ) -> None:
        check_input(name, x, w, comm)
        self.name, self.comm, self.owner = name, comm, owner
        self.config = as_config(name, overlap, kind)
        self.workspace: Workspace | None = attribute(overlap, "workspace")
        found = check_reduce_dtype(name, x, reduce_dtype)
        self.reduce_dtype = None if found is x.dtype else found  # in which sums travel; None for that of x
        self.parameter, self.main_grad = w, main_grad_of(name, w, fused)
        self.backward: Asked | None = None

    def run(
        self,
        x: Tensor,
        bias: Tensor | None,
        rows: int,
        patterns: tuple[str | None, str | None],
        overlapped: Callable[..., Any],
        composed: Callable[[Tensor, Tensor, Tensor | None], Any],
    ) -> Any:
        """The result, by the way whose turn it is.

        rows      of all ranks
        patterns  of the forward and of the backward pass; None for one that communicates nothing"""
        comm, config = self.comm, self.config
        w = into_main_grad(self.parameter, self.main_grad)
        cast = tensors_for(comm, config, rows, x, w, bias)
        if cast is None:
            return composed(x, w, bias)
        x, w, bias = cast
        forward, backward = patterns
        asked = asked_for(forward, rows, w, config, self.reduce_dtype) if forward else None
        self.backward = None
        if backward and torch.is_grad_enabled():
            self.backward = asked_for(backward, rows, w, config.backward, self.reduce_dtype)
        if asked is self.backward is None:
            return composed(x, w, bias)
        route = route_of(comm, self.owner, asked, self.backward)
        with route.turn.timed(x):
            if route.composed:
                return composed(x, w, bias)
            return overlapped(require_grad(x), w, bias, self, route.turn.decision)


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether a pass may work on the memory of these tensors: nothing traces, nothing transforms."""
    if transforms_active() or in_forward_mode() or dispatch_modes():
        return False
    return all(t is None or (not t.is_meta and has_storage(t) and not t.is_neg()) for t in tensors)


def tensors_for(
    comm: Communicator, config: OverlapConfig, rows: int, x: Tensor, w: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """The tensors as the pattern's Function is to have them; None: it cannot, or is not to do it. What decides is alike
    on all ranks.   rows: of the whole

    Under torch.autocast they have its type, so that it is what travels, too."""
    if comm.size == 1 or torch.compiler.is_compiling() or (config.method == config.backward.method == "off"):
        return None
    if config is AUTO and not observers and is_tiny(comm, rows, *w.shape):
        return None  # as would be decided, in less time than that takes
    if x.dim() < 2 or not x.numel() or not w.numel() or not is_plain(x, w, bias):
        return None
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, w = (t if t.dtype is torch.float64 else t.to(dtype) for t in (x, w))
        bias = bias if bias is None or bias.dtype is torch.float64 else bias.to(dtype)
    alike = x.dtype in _DTYPES and x.dtype is w.dtype and (bias is None or bias.dtype is x.dtype)
    return (x, w, bias) if alike else None


def main_grad_of(operation: str, w: Tensor, fused: bool) -> Tensor | None:
    """w.main_grad, if the weight's gradient is to be added there."""
    if not fused:
        return None
    found = getattr(w, "main_grad", None)
    if isinstance(found, Tensor) and found.shape == w.shape and found.device == w.device:
        return found
    is_now = f"{tuple(found.shape)} on {found.device}" if isinstance(found, Tensor) else shown(found)
    raise ValueError(
        f"{operation}: grad_accumulation_fusion=True adds to weight.main_grad, which is {is_now}; "
        f"expected a tensor {tuple(w.shape)} on {w.device}: weight.main_grad = torch.zeros_like(weight, "
        "dtype=torch.float32)"
    )


class Pass(NamedTuple):
    """One pass that is under way."""

    lanes: Lanes
    work: Workspace
    cut: Cut


@contextmanager
def opened(call: MatmulCall, decision: Decision, config: OverlapConfig, like: Tensor) -> Iterator[Pass]:
    """The lanes of a pass that is decided to overlap."""
    workspace = call.workspace or workspace_of(call.comm)
    comm, limit = limited(workspace.carrier or call.comm, config, decision.method)
    lanes = Lanes(comm, decision.compute_streams, config.priority, limit, call.owner, decision)
    cut = Cut(decision.method, decision.chunks, config.aggregate)
    with workspace.lent(like) as work, lanes:
        if observers and call.workspace is not None:
            said = "in symmetric windows" if work.window and cut.method != "ring" else "not in symmetric windows"
            lanes.decision = replace(decision, reason=f"{decision.reason}; {said}")
        if work.broken_off:
            lanes.main.wait(lanes.comm.record())
        yield Pass(lanes, work, cut)


def remember(ctx: Any, call: MatmulCall) -> None:
    """After the communication of a forward pass: what `backward_of` asks for."""
    ctx.of = call
    remember_call(ctx, call.comm, call.name)


def backward_of(
    ctx: Any,
    tensors: tuple[Tensor | None, ...],
    composed: Callable[[], Grads],
    on_lanes: Callable[[Decision, OverlapConfig], Grads] | None = None,
    replicated: Tensor | None = None,
) -> Grads:
    """The gradients, by the way whose turn it is; by operations that have derivatives where those are wanted. The calls
    are in the flight recorder as those of the forward call.

    on_lanes    None: nothing of it is to be hidden
    replicated  what has to be equal on all ranks"""
    call: MatmulCall = ctx.of
    with calls_noted_as(f"{type(ctx).__name__.removesuffix('Backward')}.backward", ctx.site):
        enter_backward(ctx, call.comm, [] if replicated is None else [replicated])
        if on_lanes is None or call.backward is None or torch.is_grad_enabled() or not is_plain(*tensors):
            return composed()
        turn = turn_of(call.comm, call.owner, call.backward)
        assert tensors[0] is not None and turn.decision is not None
        with turn.timed(tensors[0]):
            if turn.decision.method == "off":
                dx, dw, db = composed()
                if dw is not None and call.main_grad is not None and accumulates(call.parameter):
                    call.main_grad.add_(dw)  # as on lanes, within what is timed
                    dw = None
                return dx, dw, db
            return on_lanes(turn.decision, call.config.backward)


class WeightGrad:
    """The gradient of a weight [n, k], a sum of products of rows; they are issued on one lane, the caller's.

    products  how many there will be: of more than one, the sum is kept in float32 at least"""

    def __init__(self, call: MatmulCall, w: Tensor, wanted: bool, products: int = 1) -> None:
        self.wanted, self._dtype = wanted, w.dtype
        adds = wanted and call.main_grad is not None and accumulates(call.parameter)
        self._sum: Tensor | None = call.main_grad if adds else None
        self._begun = self._in_main_grad = adds
        if wanted and self._sum is None:
            wide = products > 1 and w.dtype.itemsize < 4
            self._sum = torch.empty(w.shape, dtype=torch.float32 if wide else w.dtype, device=w.device)

    def add(self, lanes: Lanes, g: Tensor, a: Tensor) -> None:
        """+= sum_q g_q.T @ a_q.   g [q, rows, n], a [q, rows, k]"""
        if not self.wanted:
            return
        assert self._sum is not None
        if self._begun:
            lanes.main.run(add_outer_rows, g, a, self._sum, out=self._sum)
        else:
            lanes.main.run(outer_rows, g, a, out=self._sum)
        self._begun = True

    def result(self) -> Tensor | None:
        """The gradient to be returned; None if it was added to main_grad: `IntoMainGrad` tells the parameter."""
        return None if self._sum is None or self._in_main_grad else self._sum.to(self._dtype)


def flat_rows(x: Tensor) -> Tensor:
    """x [.., k] as rows [m, k] in contiguous memory."""
    return x.reshape(-1, x.shape[-1]).contiguous()
