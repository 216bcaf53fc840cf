"""start: a differentiable collective beside other work, forwards and backwards.

    work = ad.start(ad.all_gather, x, comm, grad="sum")
    ...                                                       # hides it
    y = work.wait()

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
from typing import Any, ParamSpec

import torch
from torch import Tensor
from torch.autograd import Function

from pynccl import Communicator
from pynccl.bindings.values import attribute, shown
from pynccl.watch.caller_notes import calls_noted_as
from pynccl.watch.frames import call_site

from .checks import compare_backward, number_call
from .collective import Call, Collective, refuse_group, require_grad, run, sees_operators
from .recompute import AskForToken, save_token
from .streams import made_on, share, side_stream
from .torch_internals import dispatch_modes, has_storage, in_forward_mode, transforms_active
from .wire import Prepared

P = ParamSpec("P")


def start(operation: Callable[P, Tensor], *args: P.args, **options: P.kwargs) -> Work:
    """Begin `operation(*args, **options)`, one of this package's functions, on the communicator's side stream.

    The input must not be changed before wait(). The result belongs to the graph of start(), wherever wait() is called:
    started under torch.no_grad() it has no gradient, and else it has one, also if wait() is called under no_grad.

    wait() may be called under another CUDA stream than start(), and the Work dropped under a third. Each stream that
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
        return Work(None, run(comm, function, x, *params))
    if not call.function.linear:
        raise NotImplementedError(
            f"start: {operation.__name__} with max, min or prod cannot run asynchronously; call ad.{operation.__name__}"
        )
    return _start(comm, call)


class Work:
    """A collective under way. `wait()` gives its result; any number of times, in any thread."""

    def __init__(self, pending: _Pending | None, token: Tensor, on: Any = None) -> None:
        self._pending = pending
        self._token = token  # the result, if nothing is pending
        self._on = on  # the stream on which that was made
        self._result: Tensor | None = None if pending else token

    def wait(self) -> Tensor:
        """The result; the caller's stream (on the CPU the caller) waits for it. Raises what went wrong under way."""
        pending = self._pending
        if pending is None:
            if self._on is not None:
                share(self._token, self._on)
            return self._token
        with pending.lock:
            token = save_token()  # also where the result is there: a region that is computed anew asks for it once more
            if self._result is None:
                if transforms_active():
                    raise NotImplementedError(
                        "wait: a collective that was started outside of a transform of torch.func; wait outside, too"
                    )
                pending.tokens.append(token)
                with torch.inference_mode(pending.inference), torch.set_grad_enabled(pending.recording):
                    self._result = Waited.apply(self._token, pending)
            else:
                pending.share(self._result)
            return self._result


def _start(comm: Communicator, call: Call) -> Work:
    function, x, params = call
    if dispatch_modes() or sees_operators(x) or transforms_active() or in_forward_mode() or not has_storage(x):
        return Work(None, run(comm, function, x, *params))
    if comm.size == 1:
        return Work(None, run(comm, function, x, *params), made_on(x))
    pending = _Pending(comm, function, x.shape, params)
    work = Work(pending, Started.apply(require_grad(x), pending))
    pending.tokens.append(save_token())
    return work


class _Pending:
    """What the nodes of one start and its wait share."""

    def __init__(
        self, comm: Communicator, function: type[Collective], shape: torch.Size, params: tuple[Any, ...]
    ) -> None:
        self.comm, self.function, self.shape, self.params = comm, function, shape, params
        self.call = number_call(comm, function.name) if comm.checking else None
        self.site = call_site() if comm.recorded else ""
        # Under what wait() has to be called, and what its node has to ask for before it communicates.
        self.recording, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.tokens: list[AskForToken] = []
        self.lock = threading.Lock()
        self.adjoint: Work | None = None  # under way, in a backward pass
        self._side = side_stream(comm)
        self._prepared: Prepared | None = None
        self._buffers: list[Any] = []
        self._home: Any = None  # the stream of start(), whose memory the buffers are
        self._here: Any = None  # that of the first wait(), where the result was made

    def launch(self, x: Tensor) -> None:
        prepared = self.function.prepare(x, self.comm, *self.params)
        refuse_group(self.function.name)
        self._home = self._side.wait_for_caller()
        self._prepared = prepared
        try:
            prepared.launch(self._side.handle(self))
        finally:  # after an error too, some of it may be under way
            self._done = self._side.record()

    def hold(self, keep: Any) -> None:
        """Keep what was enqueued until it is done."""
        self._buffers.append(keep)

    def result(self) -> Tensor:
        """The result, in the order of the caller's stream. Only then are the buffers let go."""
        if self._prepared is None:
            raise RuntimeError(f"start: the result of {self.function.name} was taken already")
        self._here = self._side.wait(self._done)
        prepared, self._prepared = self._prepared, None
        y: Tensor | None = None
        try:
            y = prepared.result()
            return y
        finally:
            self._side.release(self._home, self._here, y)
            self._buffers.clear()

    def share(self, y: Tensor) -> None:
        """It was waited for, and is once more: maybe under another stream."""
        self._side.share(y, self._here)

    def __del__(self) -> None:
        # Never waited for: its buffers must not be used anew while it still writes to them. That is for the stream of
        # start() to know: a finaliser runs in any thread, under any stream.
        if getattr(self, "_prepared", None) is not None:
            with contextlib.suppress(Exception):
                self._side.wait_on(self._home, self._done)


class Started(Function):
    """The collective begins; backwards, its adjoint is waited for.

    forward    x [..] -> token []
    backward   token [] -> dx [..]
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, pending: _Pending) -> Tensor:
        ctx.pending = pending
        pending.launch(x)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, None]:
        adjoint, ctx.pending.adjoint = ctx.pending.adjoint, None
        return adjoint and adjoint.wait(), None


class Waited(Function):
    """The collective is waited for; backwards, its adjoint begins.

    forward    token [] -> y [..]
    backward   g [..] -> token []
    """

    @staticmethod
    def forward(ctx: Any, token: Tensor, pending: _Pending) -> Tensor:
        ctx.pending = pending
        return pending.result()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, None]:
        (g,) = cotangents
        pending: _Pending = ctx.pending
        for ask_for_token in pending.tokens:
            if ask_for_token is not None:
                ask_for_token()
        if pending.call is not None:
            replicated = pending.function.is_replicated(pending.params)
            compare_backward(pending.comm, pending.call, g if replicated else None)
        call = pending.function.adjoint(g, pending.comm, pending.shape, *pending.params)
        with calls_noted_as(pending.function.backward_name, pending.site):
            adjoint = pending.adjoint = _start(pending.comm, call)
        return g.new_zeros(()) if adjoint._pending is None else adjoint._token, None
