"""start: a differentiable collective beside other work, forwards and backwards.

    handle = ad.start(ad.all_gather, x, comm, grad="sum")
    ...                                                       # hides it
    y = handle.wait()

The collective runs on the communicator's side stream (streams.py). The graph has two nodes, which change roles in the
backward pass: that of wait() starts the adjoint as soon as the cotangent of y is there, and that of start() waits for
it, which the engine does after the backward of all that was computed in between.

Between the two nodes goes a token, a tensor of one element that stands for what is under way. It cannot be y itself:
backwards, what goes along that edge is the adjoint's result, which may have another shape.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pynccl import Communicator
from pynccl.bindings.values import attribute, shown

from . import backward_check, levels
from .collective import Call, Collective, reachable, run
from .extremes import Elementwise
from .raw import Exchange
from .recompute import Kept, keep
from .streams import made_on, share, side_stream
from .tracing import sees_operators


def start(operation: Callable[..., Tensor], *args: Any, **options: Any) -> Handle:
    """Begin `operation(*args, **options)`, one of this package's functions, on the communicator's side stream.

    The input must not be changed before wait(). The result belongs to the graph of start(), wherever wait() is called:
    started under torch.no_grad() it has no gradient, and else it has one, also if wait() is called under no_grad.

    wait() may be called under another CUDA stream than start(), and the handle dropped under a third. Each stream that
    waits is ordered after the collective; that of start() then waits for the first of them too, since what it made
    comes back to it.

    max, min and prod raise NotImplementedError: their derivatives are more than one collective. Under torch.compile,
    within torch.func's transforms and forward mode, and on one rank, the operation is done at once.
    """
    plan = attribute(operation, "plan")
    if not callable(plan):
        raise TypeError(
            f"start: {shown(operation)} is no collective of pynccl_autograd; pass ad.all_reduce, ad.all_gather, ..."
        )
    comm, call = plan(*args, **options)
    if torch.compiler.is_compiling():
        function, x, params = call
        return Handle(None, run(comm, function, x, *params))
    if issubclass(call.function, Elementwise):
        raise NotImplementedError(
            f"start: {operation.__name__} with max, min or prod cannot run asynchronously; call ad.{operation.__name__}"
        )
    return _start(comm, call)


class Handle:
    """A collective under way. `wait()` gives its result; any number of times, in any thread."""

    def __init__(self, flight: _Flight | None, token: Tensor, on: Any = None) -> None:
        self._flight = flight
        self._token = token  # the result, if there is no flight
        self._on = on  # the stream on which that was made
        self._result: Tensor | None = None if flight else token

    def wait(self) -> Tensor:
        """The result; the caller's stream (on the CPU the caller) waits for it. Raises what went wrong under way."""
        flight = self._flight
        if flight is None:
            if self._on is not None:
                share(self._token, self._on)
            return self._token
        with flight.lock:
            kept = keep()  # also where the result is there: a region that is computed anew asks for it once more
            if self._result is None:
                flight.kept.append(kept)
                with levels.left(), torch.inference_mode(flight.inference), torch.set_grad_enabled(flight.recording):
                    self._result = Waited.apply(self._token, flight)
            else:
                flight.share(self._result)
            return self._result


def _start(comm: Communicator, call: Call) -> Handle:
    function, x, params = call
    if torch._C._len_torch_dispatch_stack() or sees_operators(x) or levels.active() or not torch._C._has_storage(x):
        return Handle(None, run(comm, function, x, *params))
    if comm.size == 1 or x._is_zerotensor():
        return Handle(None, run(comm, function, x, *params), made_on(x))
    flight = _Flight(comm, function, x.shape, params)
    handle = Handle(flight, Started.apply(reachable(x), flight))
    flight.kept.append(keep())
    return handle


class _Flight:
    """What the nodes of one start and its wait share."""

    def __init__(
        self, comm: Communicator, function: type[Collective], shape: torch.Size, params: tuple[Any, ...]
    ) -> None:
        self.comm, self.function, self.shape, self.params = comm, function, shape, params
        self.site = backward_check.sign(comm, function.name) if comm.checking else None
        # What wait() has to be called as if it were under, and what its node has to ask for before it communicates.
        self.recording, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.kept: list[Kept] = []
        self.lock = threading.Lock()
        self.adjoint: Handle | None = None  # under way, in a backward pass
        self._side = side_stream(comm)
        self._exchange: Exchange | None = None
        self._buffers: list[Any] = []
        self._home: Any = None  # the stream of start(), whose memory the buffers are
        self._here: Any = None  # that of the first wait(), where the result was made

    def launch(self, x: Tensor) -> None:
        exchange = self.function.exchange(x, self.comm, *self.params)
        self._home = self._side.follow()
        self._exchange = exchange
        try:
            exchange.issue(self._side.handle(self))
        finally:  # after an error too, some of it may be under way
            self._landed = self._side.mark()

    def hold(self, keep: Any) -> None:
        """Keep what was issued until it has landed."""
        self._buffers.append(keep)

    def land(self) -> Tensor:
        """The result, in the order of the caller's stream. Only then are the buffers let go."""
        if self._exchange is None:
            raise RuntimeError(f"start: the result of {self.function.name} was taken already")
        self._here = self._side.join(self._landed)
        exchange, self._exchange = self._exchange, None
        y: Tensor | None = None
        try:
            y = exchange.finish()
            return y
        finally:
            self._side.give_back(self._home, self._here, y)
            self._buffers.clear()

    def share(self, y: Tensor) -> None:
        """It was waited for, and is once more: maybe under another stream."""
        self._side.share(y, self._here)

    def __del__(self) -> None:
        # Never waited for: its buffers must not be used anew while it still writes to them. That is for the stream of
        # start() to know: a finaliser runs in any thread, under any stream.
        if getattr(self, "_exchange", None) is not None:
            with contextlib.suppress(Exception):
                self._side.leave(self._landed, self._home)


class Started(Function):
    """The collective begins; backwards, its adjoint is waited for.

    forward    x [..] -> token []
    backward   token [] -> dx [..]
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        flight.launch(x)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, None]:
        adjoint, ctx.flight.adjoint = ctx.flight.adjoint, None
        return adjoint and adjoint.wait(), None


class Waited(Function):
    """The collective is waited for; backwards, its adjoint begins.

    forward    token [] -> y [..]
    backward   g [..] -> token []
    """

    @staticmethod
    def forward(ctx: Any, token: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        return flight.land()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None]:
        (g,) = cotangents
        flight: _Flight = ctx.flight
        for kept in flight.kept:
            if kept is not None:
                kept()
        if flight.site is not None:
            replicated = flight.function.is_replicated(flight.params)
            backward_check.compare(flight.comm, flight.site, g if replicated else None)
        flight.adjoint = _start(flight.comm, flight.function.adjoint(g, flight.comm, flight.shape, *flight.params))
        done = flight.adjoint._flight is None
        return g.new_zeros(()) if done else flight.adjoint._token, None
