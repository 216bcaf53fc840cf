"""start: run a differentiable collective asynchronously, in the forward and in the backward pass.

    work = ad.start(ad.all_gather, x, comm, grad="sum")
    ...                                                       # overlaps with the collective
    y = work.wait()

The collective runs on the communicator's side stream (streams.py). The graph gets two nodes, which swap roles in the
backward pass: the node of wait() starts the adjoint as soon as the cotangent of y is available, and the node of start()
waits for it. The engine runs the backward of everything computed in between before the node of start().

A token, a tensor of one element, connects the two nodes. y itself cannot: in the backward pass the edge carries the
result of the adjoint, which may have a different shape.
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
from pynccl.bindings.resource import destructor
from pynccl.bindings.values import attribute, shown
from pynccl.watch.frames import attribute_calls, call_site

from .agreement import check_not_in_group
from .checks import compare_backward, number_call
from .collective import Collective, CollectiveCall, require_grad, run, runs_as_operator
from .recompute import FetchToken, save_token
from .streams import producer_stream, share, side_stream
from .torch_internals import dispatch_modes, has_storage, in_forward_mode, transforms_active
from .wire import Prepared

P = ParamSpec("P")


def start(operation: Callable[P, Tensor], *args: P.args, **options: P.kwargs) -> Work:
    """Start `operation(*args, **options)` on the communicator's side stream and return a `Work`.

    operation  a collective of this package, e.g. ad.all_gather; its arguments follow

    Do not modify the input before wait(). The result belongs to the graph in which start() was called, wherever wait()
    is called: a collective started under torch.no_grad() has no gradient, and any other has one, even if wait() is
    called under no_grad.

    You may call wait() under a different CUDA stream than start(), and drop the Work under a third. Every stream that
    waits is ordered after the collective. The stream of start() also waits for the first stream that called wait(),
    because its allocator gets the buffers back.

    Under torch.compile, in torch.func transforms, in forward mode and on one rank, the operation runs synchronously.

    TypeError if `operation` is not a collective of this package. NotImplementedError for max, min and prod, whose
    derivatives need more than one collective.
    """
    plan = attribute(operation, "plan")
    if not callable(plan):
        raise TypeError(
            f"start: operation is {shown(operation)}, which is not a collective of pynccl_autograd; pass one, e.g. "
            "ad.all_reduce"
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
    """A collective in progress, from `start`. `wait()` returns its result, any number of times, in any thread."""

    def __init__(self, pending: _Pending | None, token: Tensor, on: Any = None) -> None:
        self._pending = pending
        self._token = token  # the result, if nothing is pending
        self._on = on  # the stream on which the token was made
        self._result: Tensor | None = None if pending else token

    def wait(self) -> Tensor:
        """Return the result, and make the current stream wait for it; on the CPU, block until it is there.

        Raises the error of the collective if it failed.
        """
        pending = self._pending
        if pending is None:
            if self._on is not None:
                share(self._token, self._on)
            return self._token
        with pending.lock:
            token = save_token()  # even if the result is there: a recomputed region fetches it again
            if self._result is None:
                if transforms_active():
                    raise NotImplementedError(
                        "wait: the collective was started outside of this torch.func transform; call wait() outside too"
                    )
                pending.tokens.append(token)
                with torch.inference_mode(pending.inference), torch.set_grad_enabled(pending.recording):
                    self._result = Waited.apply(self._token, pending)
            else:
                pending.share(self._result)
            return self._result


def _start(comm: Communicator, call: CollectiveCall) -> Work:
    function, x, params = call
    if dispatch_modes() or runs_as_operator(x) or transforms_active() or in_forward_mode() or not has_storage(x):
        return Work(None, run(comm, function, x, *params))
    if comm.size == 1:
        return Work(None, run(comm, function, x, *params), producer_stream(x))
    pending = _Pending(comm, function, x.shape, params)
    work = Work(pending, Started.apply(require_grad(x), pending))
    pending.tokens.append(save_token())
    return work


class _Pending:
    """The state that the nodes of one start() and its wait() share."""

    def __init__(
        self, comm: Communicator, function: type[Collective], shape: torch.Size, params: tuple[Any, ...]
    ) -> None:
        self.comm, self.function, self.shape, self.params = comm, function, shape, params
        self.call = number_call(comm, function.name) if comm.checking else None
        self.site = call_site() if comm._is_recorded else ""
        # The modes that wait() must restore, and the tokens that its node must fetch before it communicates.
        self.recording, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self.tokens: list[FetchToken] = []
        self.lock = threading.Lock()
        self.adjoint: Work | None = None  # in progress, during a backward pass
        self._side = side_stream(comm)
        self._prepared: Prepared | None = None
        self._buffers: list[Any] = []
        self._start_stream: Any = None  # the stream of start(), whose allocator owns the buffers
        self._wait_stream: Any = None  # the stream of the first wait(), where the result is made

    def launch(self, x: Tensor) -> None:
        prepared = self.function.prepare(x, self.comm, *self.params)
        check_not_in_group(self.function.name)
        self._start_stream = self._side.wait_for_caller()
        self._prepared = prepared
        try:
            prepared.launch(self._side.handle(self))
        finally:  # after an error too: part of it may be enqueued
            self._done = self._side.record()

    def hold(self, keep: Any) -> None:
        """Keep a buffer alive until the collective is done."""
        self._buffers.append(keep)

    def result(self) -> Tensor:
        """Make the current stream wait, return the result, and release the buffers."""
        if self._prepared is None:
            raise RuntimeError(f"start: the result of {self.function.name} was already returned")
        self._wait_stream = self._side.wait(self._done)
        prepared, self._prepared = self._prepared, None
        y: Tensor | None = None
        try:
            y = prepared.result()
            return y
        finally:
            self._side.release(self._start_stream, self._wait_stream, y)
            self._buffers.clear()

    def share(self, y: Tensor) -> None:
        """Let the current stream use a result that an earlier wait(), maybe under another stream, returned."""
        self._side.share(y, self._wait_stream)

    @destructor
    def __del__(self) -> None:
        # If wait() was never called, the stream of start() must wait, so that the allocator does not reuse the buffers
        # while the collective writes to them. A finalizer runs in any thread, under any current stream.
        if getattr(self, "_prepared", None) is not None:
            with contextlib.suppress(Exception):
                self._side.wait_on(self._start_stream, self._done)


class Started(Function):
    """Start the collective; in the backward pass, wait for its adjoint.

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
    """Wait for the collective; in the backward pass, start its adjoint.

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
        for fetch_token in pending.tokens:
            if fetch_token is not None:
                fetch_token()
        if pending.call is not None:
            replicated = pending.function.is_replicated(pending.params)
            compare_backward(pending.comm, pending.call, g if replicated else None)
        call = pending.function.adjoint(g, pending.comm, pending.shape, *pending.params)
        with attribute_calls(pending.function.backward_name, pending.site):
            adjoint = pending.adjoint = _start(pending.comm, call)
        return g.new_zeros(()) if adjoint._pending is None else adjoint._token, None
