"""A call of a linear layer with a collective: its checked arguments, how its passes run, and its parameter gradients.

The Functions of linear.py apply to plain tensors in memory, outside of tracing and function transforms. Everything
else, and derivatives of derivatives, use the operations of unfused.py, which support tracing and transforms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pynccl import Communicator
from pynccl.bindings.values import shown
from pynccl.watch.frames import attribute_calls

from .. import collective
from ..agreement import check_not_in_group
from ..arguments import check_linear, check_reduce_dtype
from ..collective import record_forward_call, require_grad
from ..main_grad import IntoMainGrad, main_grad_of
from ..state import state_of
from ..torch_internals import accumulates, dispatch_modes, has_storage, in_forward_mode, reshaped, transforms_active
from ..wire import Dtype
from .buffers import Buffers
from .choose import choose, entry_of, pass_of, x_needs_grad
from .config import AUTO, OverlapConfig
from .keys import Overlap, as_config
from .lanes import Lane, Lanes, Pass, Serial, observers
from .limits import limited
from .matmul import add_outer_rows, add_sum_rows, outer_rows, sum_rows
from .schedules import PassKey, is_tiny, pass_key
from .tune import NOT_SCHEDULED, ScheduledCall

# Function -> kind of layer, and the patterns of its passes; None for a pass that communicates nothing.
PASSES = {
    "all_gather_matmul": ("column", "all_gather_matmul", "column_backward"),
    "matmul_reduce_scatter": ("row", "matmul_reduce_scatter", "row_backward"),
    "matmul_all_reduce": ("row", "matmul_all_reduce", None),
    "copy_matmul": ("column", None, "copy_backward"),
}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Call:
    """The checked arguments of a call of one of the functions of functions.py, except x and the bias.

    parameter, main_grad  a backward() that would add to parameter.grad adds to main_grad; None: it returns the gradient
    owner                 the layer that made the call, for decisions and the report
    caller                name of the layer, or of the function, for errors
    buffers               those of a CommOverlap
    forward               how this call's forward pass runs
    backward              the key of its backward pass; None: "off" without one, or nothing to communicate
    needs_dx              whether x needs a gradient: in a column layer on any rank, in a row layer on this one
    """

    def __init__(
        self, name: str, x: Tensor, w: Tensor, comm: Communicator, bias: Tensor | None, overlap: Overlap,
        reduce_dtype: Dtype, fused: bool, owner: Any,
    ) -> None:  # fmt: skip
        if owner is not None and not isinstance(owner, nn.Module):
            raise TypeError(f"{name}: owner is {shown(owner)}, expected the module that makes the call, or None")
        self.caller = caller = name if owner is None else type(owner).__name__
        check_linear(caller, x, w, comm, bias)
        self.name, self.comm, self.owner = name, comm, owner
        self.config = as_config(caller, overlap, PASSES[name][0])
        self.buffers: Buffers | None = getattr(overlap, "buffers", None)
        self.reduce_dtype = check_reduce_dtype(caller, x, reduce_dtype)  # of sums in flight; None: that of x
        self.parameter, self.main_grad = w, None if fused is False else main_grad_of(caller, w, fused)
        self.forward, self.needs_dx = NOT_SCHEDULED, False
        self.backward: PassKey | None = None

    @property
    def weight(self) -> Tensor:
        """The weight, whose gradient is added to main_grad if there is one."""
        w: Tensor = self.parameter
        return w if self.main_grad is None else IntoMainGrad.apply(w, self.main_grad)

    def schedule(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None] | None:
        """Schedule the passes, and return x, w and bias for the Function. None: it does not apply, use unfused.py. It
        may communicate, so all ranks must take the same branch: see `x_needs_grad` and `choose`."""
        comm, config, training = self.comm, self.config, torch.is_grad_enabled()
        kind, forward, backward = PASSES[self.name]
        rows = x.numel() // max(x.shape[-1], 1) * (comm.size if forward == "all_gather_matmul" else 1)  # of all ranks
        off = config.method == config.backward.method == "off"
        tiny = config is AUTO and is_tiny(comm.library.is_host, rows, *self.parameter.shape)
        tensors = cast(comm, x, self.weight, bias, off or tiny)
        if tensors is None:
            return None
        if forward:
            check_not_in_group(self.caller)
        x, w, bias = tensors
        if self.reduce_dtype is x.dtype:
            self.reduce_dtype = None
        self.needs_dx = training and x.requires_grad
        if training and kind == "column":
            self.needs_dx = x_needs_grad(comm, self.owner, x.requires_grad)
            backward = backward if self.needs_dx else None
        off = off or (tiny and not observers)  # a shortcut: only observers miss the decision
        if not off and forward:
            self.forward = choose(comm, self.owner, pass_key(comm, forward, rows, w, config, self.reduce_dtype))
        if not off and training and backward:
            self.backward = pass_key(comm, backward, rows, w, config.backward, self.reduce_dtype)
            entry_of(comm, self.owner, self.backward)  # now, so that an error comes before anything is launched
        return require_grad(x), w, bias

    def forward_pass(self, like: Tensor) -> AbstractContextManager[Pass]:
        """Return a context manager that begins and ends the forward pass: its lanes, buffers and clock."""
        return self._pass(self.forward, self.config, like)

    def backward_pass(self, like: Tensor) -> AbstractContextManager[Pass]:
        """The same for the backward pass."""
        check_not_in_group(self.caller)
        scheduled = pass_of(self.comm, self.owner, self.backward) if self.backward else NOT_SCHEDULED
        return self._pass(scheduled, self.config.backward, like)

    def _pass(self, scheduled: ScheduledCall, config: OverlapConfig, like: Tensor) -> AbstractContextManager[Pass]:
        decision = scheduled.decision
        off = decision is None or decision.method == "off"
        run: Any = Serial(self.comm) if off else self._on_lanes(decision, config, like)
        return run if scheduled.round is None else scheduled.timed(run, like)

    @contextmanager
    def _on_lanes(self, decision: Any, config: OverlapConfig, like: Tensor) -> Iterator[Pass]:
        method, buffers = decision.method, self.buffers or state_of(self.comm, Buffers)
        comm, limit = limited(buffers.carrier or self.comm, config, method)
        with buffers.acquire(like) as acquired:
            if observers and self.buffers is not None:
                windows = "in" if acquired.window and method != "ring" else "not in"
                decision = replace(decision, reason=f"{decision.reason}; {windows} symmetric windows")
            with Lanes(comm, config, decision, limit, acquired, self.owner) as p:
                if acquired.interrupted:
                    p.main.wait_lane(p.comm)
                yield p

    def save(self, ctx: Any) -> None:
        """Save what `in_backward` needs. Call it after the communication of the forward pass."""
        ctx.matmul_call = self
        record_forward_call(ctx, self.comm, self.name)

    def parameter_grads(self, ctx: Any, w: Tensor, products: int = 1) -> tuple[Grad, Grad]:
        """Return the sums that become the gradients of w [n, k] and of the bias [n]."""
        _, needs_dw, needs_db, *_ = ctx.needs_input_grad
        into = self.main_grad if needs_dw and self.main_grad is not None and accumulates(self.parameter) else None
        dw = Grad((outer_rows, add_outer_rows), w, w.shape, needs_dw, products, into)
        return dw, Grad((sum_rows, add_sum_rows), w, w.shape[:1], needs_db, products)


@contextmanager
def in_backward(ctx: Any, replicated: Sequence[Tensor] = ()) -> Iterator[Call]:
    """A context manager that enters a backward pass and yields its call. Then the saved tensors can be read.

    The flight recorder shows the collectives with the call site of the forward call.

    replicated  cotangents that must be equal on all ranks"""
    call: Call = ctx.matmul_call
    with attribute_calls(f"{type(ctx).__name__.removesuffix('Backward')}.backward", ctx.site):
        collective.enter_backward(ctx, call.comm, replicated)
        yield call


def needs_graph(*tensors: Tensor | None) -> bool:
    """Return whether a backward pass must itself be differentiable, or is traced: it then uses unfused.py."""
    return torch.is_grad_enabled() or not is_plain(*tensors)


def is_plain(*tensors: Tensor | None) -> bool:
    """Return whether a pass may use the memory of these tensors, that is, without tracing or function transforms."""
    if transforms_active() or in_forward_mode() or dispatch_modes():
        return False
    for t in tensors:  # noqa: SIM110 - every pass comes here, and a generator takes longer
        if t is not None and (t.is_meta or not has_storage(t) or t.is_neg()):
            return False
    return True


def cast(
    comm: Communicator, x: Tensor, w: Tensor, bias: Tensor | None, off: bool
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Return the tensors for the Function, or None if it does not apply.

    With overlap, torch.autocast applies before the communication, so that tensors travel in the autocast type.

    off  whether neither pass will overlap"""
    if comm.size == 1 or torch.compiler.is_compiling() or x.dim() < 2 or not x.numel() or not w.numel():
        return None
    if not is_plain(x, w, bias):
        return None
    if torch.is_autocast_enabled(x.device.type):
        if off:
            return None
        dtype = torch.get_autocast_dtype(x.device.type)
        x, w = (t if t.dtype is torch.float64 else t.to(dtype) for t in (x, w))
        bias = bias if bias is None or bias.dtype is torch.float64 else bias.to(dtype)
    same_dtype = x.dtype in _DTYPES and x.dtype is w.dtype and (bias is None or bias.dtype is x.dtype)
    return (x, w, bias) if same_dtype else None


class Grad:
    """The gradient of a parameter: a sum over pieces of rows, in the order of a lane.

    work      functions that write the first product, and that add another one
    w         has the data type and device of the gradient
    products  their number; several are summed in at least float32
    into      add to this tensor, and return no gradient: `IntoMainGrad` marks the parameter"""

    def __init__(
        self, work: Sequence[Callable[..., None]], w: Tensor, shape: Sequence[int], needed: bool, products: int,
        into: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._first, self._more = work
        self._dtype, self._into, self._started = w.dtype, into, into is not None
        dtype = torch.float32 if products > 1 and w.dtype.itemsize < 4 else w.dtype
        self._sum = into if into is not None or not needed else w.new_empty(shape, dtype=dtype)

    def add(self, lane: Lane | Serial, *rows: Tensor) -> None:
        """Add the product of rows, each [q, rows, ..] or [rows, ..]: dy, and x for a weight."""
        if self._sum is None:
            return
        work, so_far = (self._more, (self._sum,)) if self._started else (self._first, ())
        lane.run(work, *rows, *so_far, out=self._sum)
        self._started = True

    def result(self) -> Tensor | None:
        return None if self._sum is None or self._into is not None else self._sum.to(self._dtype)


def flat_rows(x: Tensor) -> Tensor:
    """Return x [.., k] as contiguous rows [M, k]."""
    return x if x.dim() == 2 and x.is_contiguous() else x.reshape(-1, x.shape[-1]).contiguous()


def shaped(y: Tensor, shape: Sequence[int]) -> Tensor:
    """Return rows [M, n] as a tensor [*shape, n] that is not a view for autograd: the caller may modify it in place."""
    return y if len(shape) == 1 else reshaped(y, (*shape, y.shape[1]))
