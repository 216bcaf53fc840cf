"""Code that the overlapped patterns share: when they apply, how a pass begins, and the gradient of a weight.

A pattern is one autograd Function whose forward and backward pass run on lanes. It applies to plain tensors in memory,
outside of tracing and function transforms. Everything else, and passes whose decision is "off", use the operations of
unfused.py, which support tracing and transforms.
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
from pynccl.watch.attribution import attribute_calls

from ..agreement import check_not_in_group
from ..arguments import check_reduce_dtype, check_type
from ..collective import enter_backward, record_forward_call, require_grad
from ..torch_internals import (
    accumulates,
    dispatch_modes,
    has_storage,
    in_forward_mode,
    transforms_active,
)
from ..wire import Dtype
from .config import AUTO, Overlap, OverlapConfig, as_config
from .gathering import Chunking
from .lanes import Lanes
from .limits import limited
from .matmul import add_outer_rows, outer_rows
from .routes import pass_key, route_of, schedule_call
from .schedules import Decision, PassKey, is_tiny
from .unfused import check_input, into_main_grad
from .workspace import Workspace, workspace_of

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Grads = tuple[Tensor | None, Tensor | None, Tensor | None]  # of x, w, bias


class MatmulCall:
    """The checked arguments of a call of one of the functions of functions.py, except its tensors.

    main_grad, parameter  passes that accumulate gradients add the weight's gradient to main_grad of this parameter;
                          main_grad None: they return it
    owner                 the layer that made the call, for decisions and the report
    caller                name of the layer, or of the function, for errors
    backward              the key of the backward pass, if that communicates
    """

    def __init__(
        self,
        name: str,
        kind: str,
        x: Tensor,
        w: Tensor,
        comm: Communicator,
        bias: Tensor | None,
        overlap: Overlap,
        reduce_dtype: Dtype,
        fused: bool,
        owner: Any,
    ) -> None:
        self.caller = caller = name if owner is None else type(owner).__name__
        check_input(caller, x, w, comm, bias)
        self.name, self.comm, self.owner = name, comm, owner
        self.config = as_config(caller, overlap, kind)
        self.workspace: Workspace | None = attribute(overlap, "workspace")
        found = check_reduce_dtype(caller, x, reduce_dtype)
        self.reduce_dtype = None if found is x.dtype else found  # of sums in flight; None for that of x
        self.parameter, self.main_grad = w, main_grad_of(caller, w, fused)
        self.backward: PassKey | None = None

    def run(
        self,
        x: Tensor,
        bias: Tensor | None,
        rows: int,
        patterns: tuple[str | None, str | None],
        overlapped: Callable[..., Any],
        composed: Callable[[Tensor, Tensor, Tensor | None], Any],
    ) -> Any:
        """Return the result, computed by the schedule of this call.

        rows      of all ranks
        patterns  of the forward and of the backward pass; None for a pass that communicates nothing"""
        comm, config = self.comm, self.config
        w = into_main_grad(self.parameter, self.main_grad)
        cast = tensors_for(comm, config, rows, x, w, bias)
        if cast is None:
            return composed(x, w, bias)
        x, w, bias = cast
        forward, backward = patterns
        key = pass_key(forward, rows, w, config, self.reduce_dtype) if forward else None
        self.backward = None
        if backward and torch.is_grad_enabled():
            self.backward = pass_key(backward, rows, w, config.backward, self.reduce_dtype)
        if key is self.backward is None:
            return composed(x, w, bias)
        check_not_in_group(self.caller)
        route = route_of(comm, self.owner, key, self.backward)
        with route.call.timed(x):
            if route.composed:
                return composed(x, w, bias)
            return overlapped(require_grad(x), w, bias, self, route.call.decision)


def is_plain(*tensors: Tensor | None) -> bool:
    """Return whether a pass may use the memory of these tensors, that is, without tracing or function transforms."""
    if transforms_active() or in_forward_mode() or dispatch_modes():
        return False
    return all(t is None or (not t.is_meta and has_storage(t) and not t.is_neg()) for t in tensors)


def tensors_for(
    comm: Communicator, config: OverlapConfig, rows: int, x: Tensor, w: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Return the tensors for the pattern's Function, or None if it does not apply. All ranks take the same branch.

    rows: of all ranks

    torch.autocast applies before the communication, so that tensors travel in the autocast type."""
    if comm.size == 1 or torch.compiler.is_compiling() or (config.method == config.backward.method == "off"):
        return None
    if config is AUTO and not observers and is_tiny(comm, rows, *w.shape):
        return None  # a shortcut to the same decision
    if x.dim() < 2 or not x.numel() or not w.numel() or not is_plain(x, w, bias):
        return None
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, w = (t if t.dtype is torch.float64 else t.to(dtype) for t in (x, w))
        bias = bias if bias is None or bias.dtype is torch.float64 else bias.to(dtype)
    same_dtype = x.dtype in _DTYPES and x.dtype is w.dtype and (bias is None or bias.dtype is x.dtype)
    return (x, w, bias) if same_dtype else None


def main_grad_of(operation: str, w: Tensor, fused: bool) -> Tensor | None:
    """Return w.main_grad if gradients are accumulated there (`fused`), else None."""
    check_type(f"{operation}: grad_accumulation_fusion", "bool", fused)
    if not fused:
        return None
    found = getattr(w, "main_grad", None)
    if isinstance(found, Tensor) and found.shape == w.shape and found.device == w.device:
        return found
    actual = f"{tuple(found.shape)} on {found.device}" if isinstance(found, Tensor) else shown(found)
    raise ValueError(
        f"{operation}: grad_accumulation_fusion=True adds to weight.main_grad, which is {actual}; "
        f"expected a tensor {tuple(w.shape)} on {w.device}; set weight.main_grad = torch.zeros_like(weight, "
        "dtype=torch.float32)"
    )


class Pass(NamedTuple):
    """One running pass."""

    lanes: Lanes
    work: Workspace
    chunking: Chunking


@contextmanager
def open_pass(call: MatmulCall, decision: Decision, config: OverlapConfig, like: Tensor) -> Iterator[Pass]:
    """Open the lanes and the workspace of a pass that overlaps."""
    check_not_in_group(call.caller)
    workspace = call.workspace or workspace_of(call.comm)
    comm, limit = limited(workspace.carrier or call.comm, config, decision.method)
    lanes = Lanes(comm, decision.compute_streams, config.priority, limit, call.owner, decision)
    chunking = Chunking(decision.method, decision.chunks, config.aggregate)
    with workspace.lent(like) as work, lanes:
        if observers and call.workspace is not None:
            windows = (
                "in symmetric windows" if work.window and chunking.method != "ring" else "not in symmetric windows"
            )
            lanes.decision = replace(decision, reason=f"{decision.reason}; {windows}")
        if work.interrupted:
            lanes.main.wait(lanes.comm.record())
        yield Pass(lanes, work, chunking)


def save_call(ctx: Any, call: MatmulCall) -> None:
    """Save what `backward_of` needs. Call it after the communication of the forward pass."""
    ctx.matmul_call = call
    record_forward_call(ctx, call.comm, call.name)


def backward_of(
    ctx: Any,
    tensors: tuple[Tensor | None, ...],
    composed: Callable[[], Grads],
    on_lanes: Callable[[Decision, OverlapConfig], Grads] | None = None,
    replicated: Tensor | None = None,
) -> Grads:
    """Return the gradients, by the schedule of this call, or by differentiable operations for second derivatives.

    The flight recorder shows the collectives with the call site of the forward call.

    on_lanes    None: the pass never overlaps
    replicated  the cotangent that must be equal on all ranks"""
    call: MatmulCall = ctx.matmul_call
    with attribute_calls(f"{type(ctx).__name__.removesuffix('Backward')}.backward", ctx.site):
        enter_backward(ctx, call.comm, [] if replicated is None else [replicated])
        if on_lanes is None or call.backward is None or torch.is_grad_enabled() or not is_plain(*tensors):
            return composed()
        scheduled = schedule_call(call.comm, call.owner, call.backward)
        assert tensors[0] is not None and scheduled.decision is not None
        with scheduled.timed(tensors[0]):
            if scheduled.decision.method == "off":
                dx, dw, db = composed()
                if dw is not None and call.main_grad is not None and accumulates(call.parameter):
                    call.main_grad.add_(dw)  # inside the timed block, as on lanes
                    dw = None
                return dx, dw, db
            return on_lanes(scheduled.decision, call.config.backward)


class WeightGrad:
    """The gradient of a weight [n, k]: a sum of products of rows, all issued on the caller's lane.

    products  number of products; several are accumulated in at least float32"""

    def __init__(self, call: MatmulCall, w: Tensor, needed: bool, products: int = 1) -> None:
        self.needed, self._dtype = needed, w.dtype
        adds = needed and call.main_grad is not None and accumulates(call.parameter)
        self._sum: Tensor | None = call.main_grad if adds else None
        self._started = self._in_main_grad = adds
        if needed and self._sum is None:
            wide = products > 1 and w.dtype.itemsize < 4
            self._sum = torch.empty(w.shape, dtype=torch.float32 if wide else w.dtype, device=w.device)

    def add(self, lanes: Lanes, g: Tensor, a: Tensor) -> None:
        """+= sum_q g_q.T @ a_q.   g [q, rows, n], a [q, rows, k]"""
        if not self.needed:
            return
        assert self._sum is not None
        if self._started:
            lanes.main.run(add_outer_rows, g, a, self._sum, out=self._sum)
        else:
            lanes.main.run(outer_rows, g, a, out=self._sum)
        self._started = True

    def result(self) -> Tensor | None:
        """Return the gradient; None if it was added to main_grad, which `IntoMainGrad` marks on the parameter."""
        return None if self._sum is None or self._in_main_grad else self._sum.to(self._dtype)


def flat_rows(x: Tensor) -> Tensor:
    """Return x [.., k] as contiguous rows [m, k]."""
    return x.reshape(-1, x.shape[-1]).contiguous()
