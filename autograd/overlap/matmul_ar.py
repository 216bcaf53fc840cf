"""matmul_all_reduce: partial products summed over the ranks, on every rank; a slice of rows travels while the next one
is multiplied, and may be used as soon as it is there.

N ranks; x is [s, .., in/N], w [out, in/N] as in F.linear; rows are all dimensions but the last, M in all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import Function

from pynccl import Communicator
from pynccl.bindings.values import attribute

from ..collective import require_grad, run
from ..ops.all_reduce import AllReduce
from ..torch_internals import reshaped
from ..wire import Dtype
from . import unfused
from .config import Overlap, as_config
from .lanes import Lane, Lanes, Point
from .matmul import add, linear_into, linear_rows
from .passes import (
    Options,
    check_backward,
    checked_reduce_dtype,
    decided,
    flat_rows,
    in_backward,
    main_grad_of,
    opened,
    remember,
    tensors_for,
)
from .planner import Decision
from .reducing import Sums, all_reduce


@overload
def matmul_all_reduce(
    x: Tensor,
    w: Tensor,
    comm: Communicator,
    bias: Tensor | None = None,
    *,
    overlap: Overlap = "auto",
    reduce_dtype: Dtype = None,
    grad_accumulation_fusion: bool = False,
    owner: Any = None,
) -> Tensor: ...
@overload
def matmul_all_reduce(
    x: Tensor,
    w: Tensor,
    comm: Communicator,
    bias: Tensor | None = None,
    *,
    overlap: Overlap = "auto",
    reduce_dtype: Dtype = None,
    grad_accumulation_fusion: bool = False,
    hand_off: Literal[True],
) -> Slices: ...
def matmul_all_reduce(
    x: Tensor,
    w: Tensor,
    comm: Communicator,
    bias: Tensor | None = None,
    *,
    overlap: Overlap = "auto",
    reduce_dtype: Dtype = None,
    grad_accumulation_fusion: bool = False,
    hand_off: bool = False,
    owner: Any = None,
) -> Any:
    """all_reduce(x @ w.T) + bias.   x [s, .., in/N], w [out, in/N], bias [out] -> [s, .., out]

    The adjoint communicates nothing: dy must be equal on all ranks, as where each computes the same loss.

    The options are those of `all_gather_matmul`; reduce_dtype is that of the forward sum
    hand_off    return `Slices` of the rows, each of which can be used as soon as it is there; x has to be [s, in/N]

    ValueError, TypeError on every rank for what does not fit together, before anything is launched.
    """
    name = "matmul_all_reduce"
    unfused.check_input(name, x, w, comm)
    if hand_off and x.dim() != 2:
        raise ValueError(f"{name}: hand_off=True hands out rows of a matrix, but x is {tuple(x.shape)}; flatten it")
    config = as_config(name, overlap, "row")
    reduce_dtype = checked_reduce_dtype(name, x, reduce_dtype)
    parameter, main_grad = w, main_grad_of(name, w, grad_accumulation_fusion)
    w = unfused.into_main_grad(w, main_grad)
    rows = x.numel() // max(x.shape[-1], 1)
    if cast := tensors_for(comm, config, rows, x, w, bias):
        options = Options(comm, config, reduce_dtype, main_grad, parameter, owner, attribute(overlap, "workspace"))
        x, w, bias = cast
        decision = decided(options, name, rows, w, config)
        if decision.method != "off":
            if hand_off:
                flight = _Flight()
                return Slices(MatmulAllReduce.apply(require_grad(x), w, bias, options, decision, flight), flight)
            (y,) = MatmulAllReduce.apply(require_grad(x), w, bias, options, decision, None)
            return y
    y = unfused.matmul_all_reduce(x, w, comm, bias, reduce_dtype)
    return Slices((y,), _Flight()) if hand_off else y


class _Flight:
    """An all-reduce that the caller waits for slice by slice."""

    def __init__(self) -> None:
        self.rows: list[slice] = []
        self._points: list[Point] = []
        self._lanes: Lanes | None = None
        self._open = ExitStack()

    def depart(self, lanes: Lanes, at: slice) -> None:
        """All that makes these rows was issued."""
        self.rows.append(at)
        self._points.append(lanes.comm.record())

    def take(self, lanes: Lanes, opened: ExitStack) -> None:
        """The lanes, and what ends them."""
        self._lanes, self._open = lanes, opened

    def wait(self, at: int) -> None:
        """The caller's stream, or on the CPU the caller, waits for a slice; with the last one, for all."""
        lanes = self._lanes
        if lanes is None:
            return
        try:
            lanes.main.wait(self._points[at])
        except BaseException as error:
            self._lanes = None
            self._open.__exit__(type(error), error, error.__traceback__)
            raise
        if at == len(self._points) - 1:
            self.end()

    def end(self) -> None:
        if self._lanes is not None:
            self._lanes = None
            self._open.close()


class Slices(Sequence[Tensor]):
    """The rows of a result, slice by slice: getting one waits until it is there, and for those before it.

        for y in ad.matmul_all_reduce(x, w, comm, hand_off=True):
            z.append(norm(y))                       # while the next slice is under way

    Each slice is a tensor of its own, [rows, out], differentiable; `rows` are where they lie in the whole, `whole()` is
    all of them. The stream that waits is the one under which the call was made."""

    def __init__(self, parts: Sequence[Tensor], flight: _Flight) -> None:
        self._parts, self._flight, self._got = parts, flight, 0
        self.rows = tuple(flight.rows) or (slice(0, len(parts[0])),)

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        at = range(len(self))[at]
        while self._got <= at:
            self._flight.wait(self._got)
            self._got += 1
        return self._parts[at]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[at] for at in range(len(self)))

    def whole(self) -> Tensor:
        """All rows, [s, out]."""
        return torch.cat(list(self))

    def __del__(self) -> None:
        flight = getattr(self, "_flight", None)
        if flight is not None:  # its memory must not be used anew while it is still written to
            with contextlib.suppress(Exception):
                flight.end()


class MatmulAllReduce(Function):
    """Row-parallel, into a sequence that every rank has whole.

    forward    x [s, .., in/N] -> y [s, .., out]      y = all_reduce(x @ w.T) + bias; by slices: y_1 [s_1, out], ..
    backward   gy [s, .., out], equal on all ranks    dx = gy @ w     dw = gy.T @ x     dbias = sum of gy's rows
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, options: Options, decision: Decision, flight: Any
    ) -> tuple[Tensor, ...]:
        a = flat_rows(x)
        y = a.new_empty(len(a), w.shape[0])

        def multiply(lane: Lane, _: slice, at: slice, into: Tensor) -> None:
            lane.run(linear_rows if into.dtype is a.dtype else linear_into, a[at][None], w.t(), out=into)

        with ExitStack() as stack:
            lanes, work, cut = stack.enter_context(opened(options, decision, options.config, a))

            def there(at: slice) -> None:
                if bias is not None:
                    lanes.comm.run(add, bias, y[at], out=y[at])
                if flight is not None:
                    flight.depart(lanes, at)

            all_reduce(Sums(lanes, work, y, options.reduce_dtype or y.dtype), cut, multiply, there)
            if flight is not None:
                flight.take(lanes, stack.pop_all())
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, w)
        remember(ctx, "matmul_all_reduce", options)
        if flight is not None:
            return tuple(_apart(y[at]) for at in flight.rows)
        return (reshaped(y, (*x.shape[:-1], w.shape[0])),)  # no view: the caller may change it in place

    @staticmethod
    @in_backward
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        gy = cotangents[0] if len(cotangents) == 1 else torch.cat(cotangents)
        check_backward(ctx, gy)
        options: Options = ctx.options
        function, gy, params = AllReduce.adjoint(gy, options.comm, gy.shape, "sum", "replicated", options.reduce_dtype)
        db = gy.reshape(-1, gy.shape[-1]).sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        gy = run(options.comm, function, gy, *params)
        dx = gy @ w if ctx.needs_input_grad[0] else None
        dw = unfused.weight_grad(gy, x) if ctx.needs_input_grad[1] else None
        return dx, dw, db, None, None, None


def _apart(rows: Tensor) -> Tensor:
    """The same memory as a tensor that is no view, so that it may be changed in place as any other."""
    return rows.new_empty(0).set_(rows.untyped_storage(), rows.storage_offset(), rows.shape, rows.stride())
