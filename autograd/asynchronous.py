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
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pynccl import Communicator

from . import backward_check
from .collective import Call, Collective, reachable, run
from .extremes import Elementwise
from .raw import Exchange
from .streams import side_stream


def start(operation: Callable[..., Tensor], *args: Any, **options: Any) -> Handle:
    """Begin `operation(*args, **options)`, one of this package's functions, on the communicator's side stream.

    The input must not be changed before wait(). max, min and prod raise NotImplementedError: their derivatives are
    more than one collective. Under torch.compile, and on one rank, the operation is done at once.
    """
    plan = getattr(operation, "plan", None)
    if plan is None:
        raise TypeError(
            f"start: {operation!r} is no collective of pynccl_autograd; pass ad.all_reduce, ad.all_gather, ..."
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
    """A collective under way. `wait()` gives its result; any number of times."""

    def __init__(self, flight: _Flight | None, token: Tensor) -> None:
        self._flight = flight
        self._token = token  # the result, once there is no flight
        self._result: Tensor | None = None if flight else token

    def wait(self) -> Tensor:
        """The result; the caller's stream (on the CPU the caller) waits for it. Raises what went wrong under way."""
        if self._result is None:
            self._result = Waited.apply(self._token, self._flight)
        return self._result


def _start(comm: Communicator, call: Call) -> Handle:
    function, x, params = call
    if comm.size == 1 or torch._C._len_torch_dispatch_stack():
        return Handle(None, run(comm, function, x, *params))
    flight = _Flight(comm, function, x.shape, params)
    return Handle(flight, Started.apply(reachable(x), flight))


class _Flight:
    """What the nodes of one start and its wait share."""

    def __init__(
        self, comm: Communicator, function: type[Collective], shape: torch.Size, params: tuple[Any, ...]
    ) -> None:
        self.comm, self.function, self.shape, self.params = comm, function, shape, params
        self.site = backward_check.sign(comm, function.name) if comm.checking else None
        self.adjoint: Handle | None = None  # under way, in a backward pass
        self._side = side_stream(comm)
        self._exchange: Exchange | None = None

    def launch(self, x: Tensor) -> None:
        self._exchange = self.function.exchange(x, self.comm, *self.params)
        self._side.follow()
        self._exchange.issue(self._side.handle)
        self._landed = self._side.mark()

    def land(self) -> Tensor:
        """The result, in the order of the caller's stream. Only then are the buffers let go."""
        if self._exchange is None:
            raise RuntimeError(f"start: the result of {self.function.name} was taken already")
        self._side.join(self._landed)
        exchange, self._exchange = self._exchange, None
        return exchange.finish()

    def __del__(self) -> None:
        # Never waited for: its buffers must not be used anew while it still writes to them.
        if getattr(self, "_exchange", None) is not None:
            with contextlib.suppress(Exception):
                self._side.join(self._landed)


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
        if flight.site is not None:
            replicated = flight.function.is_replicated(flight.params)
            backward_check.compare(flight.comm, flight.site, g if replicated else None)
        flight.adjoint = _start(flight.comm, flight.function.adjoint(g, flight.comm, flight.shape, *flight.params))
        return flight.adjoint._token, None
