"""The base class of the differentiable collectives: forward, backward, forward mode and vmap.

A linear collective is a subclass of `Collective` with two methods: `prepare` sets up the communication, and `adjoint`
returns the adjoint collective. These define derivatives of any order, because each adjoint is a `Collective` too:

    backward   run(adjoint, g)               forward mode   the same collective, applied to the tangent
    vmap       the same collective, with the batch dimension in front

`run` is the entry point. In eager mode it applies the autograd Function; under torch.compile it calls the custom
operator of the same name (operators.py), which uses the same two methods.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, ParamSpec

import torch
from torch import Tensor
from torch.autograd import Function

from pynccl import Communicator
from pynccl.comm.base import by_key
from pynccl.watch.frames import attribute_calls, call_site

from .agreement import check_not_in_group
from .arguments import check_comm, check_memory, raise_async_op
from .checks import compare_backward, number_call
from .compiled import forward_call
from .recompute import save_token
from .torch_internals import (
    check_compiled,
    dispatch_modes,
    has_no_values,
    has_storage,
    in_forward_mode,
    transforms_active,
    unwrap_if_dead,
)
from .wire import Prepared

P = ParamSpec("P")
# run(comm, function, x, *params): `run`, or a custom operator in the backward pass of one.
Run = Callable[..., Tensor]

_grad_enabled = torch.is_grad_enabled  # bound once: every call uses it


class CollectiveCall(NamedTuple):
    """A collective of x that has not run yet."""

    function: type[Collective]
    x: Tensor
    params: tuple[Any, ...]


class Collective(Function):
    """Base class of the collectives. Call `apply(x, comm, *params)` on every rank, with the params of `schema`."""

    name: ClassVar[str]  # name of the custom operator in the namespace pynccl
    schema: ClassVar[str]  # schema of the parameters after the tensor and the communicator
    grad_index: ClassVar[int | None] = None  # index of `grad` in params, if there is one
    dim_indices: ClassVar[tuple[int, ...]] = ()  # indices in params of tensor dimensions
    linear: ClassVar[bool] = True  # if False, the derivatives need x and y
    communicates: ClassVar[bool] = True
    forward_name: ClassVar[str]  # in the flight recorder
    backward_name: ClassVar[str]
    operator: ClassVar[Callable[..., Tensor]]  # (x, key of the communicator, call, *params): torch.ops.pynccl.<name>
    compiled: ClassVar[Callable[..., Tensor]]  # (x, comm, *params): the same in a function that torch.compile traces

    def __init_subclass__(cls) -> None:
        forward_name = cls.forward_name = f"{cls.__name__}.forward"
        cls.backward_name = f"{cls.__name__}.backward"
        if name := getattr(cls, "name", ""):

            def operator(x: Tensor, key: str, call: str, *params: Any) -> Tensor:
                y: Tensor = getattr(torch.ops.pynccl, name)(x, key, call, *params)[0]
                return y

            def compiled(x: Tensor, comm: Communicator, *params: Any) -> Tensor:
                key = key_of(comm)
                return operator(x, key, forward_call(key, forward_name), *params)

            vjp = cls._vjp.__func__  # type: ignore[attr-defined]

            def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
                return vjp(cls, ctx, g)

            # In this form torch.compile can trace the operator, and compiled autograd the backward.
            cls.operator, cls.compiled = staticmethod(operator), staticmethod(compiled)
            cls.backward = staticmethod(backward)  # type: ignore[method-assign]

    @staticmethod
    def prepare(x: Tensor, comm: Communicator, *params: Any) -> Prepared:
        """Return the collective of x, ready to launch."""
        raise NotImplementedError

    @staticmethod
    def adjoint(g: Tensor, comm: Communicator, shape: torch.Size, *params: Any) -> CollectiveCall:
        """Return the collective that maps the cotangent g to the cotangent of the input of shape `shape`."""
        raise NotImplementedError

    @classmethod
    def batched(cls, *params: Any) -> tuple[Any, ...]:
        """Return the parameters for a tensor with an additional leading dimension."""
        return tuple(param + 1 if at in cls.dim_indices else param for at, param in enumerate(params))

    @staticmethod
    def on_one_rank(x: Tensor, *params: Any) -> Tensor:
        """Return the result if there is only one rank."""
        return x.clone()

    @classmethod
    def apply(cls, x: Tensor, comm: Communicator, *params: Any) -> Any:
        """Function.apply without its inspection of the signature, which takes longer than everything else."""
        if transforms_active():
            return super().apply(x, comm, *params)
        return super(Function, cls).apply(unwrap_if_dead(x), comm, *params)  # type: ignore[misc]

    @classmethod
    def forward(cls, x: Tensor, comm: Communicator, *params: Any) -> Tensor:
        # beneath torch.func transforms: see runs_as_operator
        if dispatch_modes() or x.is_meta or (type(x) is not Tensor and has_no_values(x)):
            return cls.operator(x, key_of(comm), "", *params)
        if not has_storage(x):
            check_memory(cls.name, x)
        launch, result = cls.prepare(x, comm, *params)
        if cls.communicates:
            check_not_in_group(cls.name)
        if comm._is_recorded:
            with attribute_calls(cls.forward_name):
                launch(None)
        else:
            launch(None)
        return result()

    @classmethod
    def setup_context(cls, ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, comm, *params = inputs
        ctx.comm, ctx.shape, ctx.params = comm, x.shape, params
        record_forward_call(ctx, comm, cls.name)

    @classmethod
    def _vjp(cls, ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Implement `backward`; torch reserves the name vjp. If the output was not used, g is zeros: the peers wait for
        this rank anyway."""
        replicated = ctx.call is not None and cls.is_replicated(ctx.params)
        enter_backward(ctx, ctx.comm, [g] if replicated else [])
        saved = ctx.saved_tensors
        with cls.in_backward(ctx):
            dx = cls.cotangent(run, ctx.comm, g, ctx.shape, saved, ctx.params)
        return dx, None, *(None,) * len(ctx.params)

    @classmethod
    def in_backward(cls, ctx: Any) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the flight recorder labels calls as the backward pass of this call."""
        if ctx.site and not torch.compiler.is_compiling():
            return attribute_calls(cls.backward_name, ctx.site)
        return contextlib.nullcontext()

    @classmethod
    def cotangent(
        cls, run: Run, comm: Communicator, g: Tensor, shape: torch.Size, saved: tuple[Tensor, ...], params: Any
    ) -> Tensor:
        """Return the cotangent of the input for the cotangent g of the output. saved: (x, y) if this is not linear."""
        function, x, params = cls.adjoint(g, comm, shape, *params)
        return run(comm, function, x, *params)

    @classmethod
    def jvp(cls, ctx: Any, tangent: Tensor, *others: None) -> Tensor:
        return run(ctx.comm, cls, tangent, *ctx.params)

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[Any, ...], x: Tensor, comm: Communicator, *params: Any) -> tuple[Any, int]:
        return run(comm, cls, x.movedim(in_dims[0], 0), *cls.batched(*params)), 0

    @classmethod
    def is_replicated(cls, params: Any) -> bool:
        return cls.grad_index is not None and params[cls.grad_index] == "replicated"


def record_forward_call(ctx: Any, comm: Communicator, name: str) -> None:
    """Store in ctx what `enter_backward` and the flight recorder need. Call it after the forward communication."""
    ctx.fetch_token = save_token()
    ctx.call = number_call(comm, name) if comm.checking else None
    ctx.site = call_site() if comm._is_recorded and not torch.compiler.is_compiling() else ""


def enter_backward(ctx: Any, comm: Communicator, replicated: Sequence[Tensor]) -> None:
    """Call it before a backward pass communicates or reads saved tensors: activation checkpointing may recompute its
    region here. With PYNCCL_CHECK=1 the ranks compare their positions, and the cotangents that must be equal."""
    if ctx.fetch_token is not None:
        ctx.fetch_token()
    if ctx.call is not None:
        for g in replicated or (None,):
            compare_backward(comm, ctx.call, g)


class RequireGrad(Function):
    """Give x a grad_fn although x does not require grad, so that the backward pass runs the collectives after it.

    forward    x [..] -> x [..]
    backward   g [..] -> None
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, requires_grad: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[None, None]:
        return None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *others: None) -> Tensor:
        return tangent.view_as(tangent)


_REQUIRES_GRAD = torch.empty(0, requires_grad=True)


def run(comm: Communicator, function: type[Collective], x: Tensor, *params: Any) -> Tensor:
    """Run the collective of x, differentiably.

    The output gets a grad_fn on every rank, even if x does not require grad: the peers' backward passes wait for
    ours."""
    if comm.size == 1:
        return function.on_one_rank(x, *params)
    if torch.compiler.is_compiling():
        check_compiled()
        return function.compiled(x, comm, *params)
    if not x.requires_grad and _grad_enabled():
        x = require_grad(x)
    # Inlined fast checks before the call of runs_as_operator: every collective passes here, forward and backward.
    if (dispatch_modes() or x.is_meta or type(x) is not Tensor) and runs_as_operator(x):
        return function.operator(x, key_of(comm), "", *params)
    y: Tensor = function.apply(x, comm, *params)
    return y


def require_grad(x: Tensor) -> Tensor:
    """Return x with a grad_fn, if grad mode is on and the dtype of x has derivatives."""
    if x.requires_grad or not torch.is_grad_enabled() or not (x.is_floating_point() or x.is_complex()):
        return x
    if transforms_active():  # torch.func keeps a graph for each of its levels
        return x
    y: Tensor = RequireGrad.apply(x, _REQUIRES_GRAD)
    return y


def runs_as_operator(x: Tensor) -> bool:
    """Return whether the collective of x must run as a custom operator.

    Dispatch modes (fake tensors, make_fx, export, selective checkpointing) see only operators, and for tensors without
    values operators compute the output shapes. In torch.func transforms and forward mode the Function runs instead,
    which has rules for them; its forward, at the bottom level, then calls the operator."""
    if not (dispatch_modes() or has_no_values(x)):
        return False
    return not (transforms_active() or in_forward_mode())


def operation(plan: Callable[P, Any]) -> Callable[P, Tensor]:
    """Decorate `plan`, which checks arguments and returns (comm, call): the result runs the call. `start` uses
    `plan`."""

    @functools.wraps(plan)
    def run_now(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        if "async_op" in kwargs:
            raise_async_op(plan.__name__)
        comm, (function, x, params) = plan(*args, **kwargs)
        return run(comm, function, x, *params)

    run_now.plan = plan  # type: ignore[attr-defined]
    run_now.__annotations__ = {**plan.__annotations__, "return": "Tensor"}
    run_now.__signature__ = inspect.signature(plan).replace(return_annotation="Tensor")  # type: ignore[attr-defined]
    return run_now


def divide_if_avg(g: Tensor, op: str, comm: Communicator) -> Tensor:
    """Return g / N if the operator is "avg", else g."""
    return g / comm.size if op == "avg" else g


def key_of(comm: Communicator) -> str:
    """Return the string that identifies comm in calls of the custom operators, in this process."""
    check_comm("key_of", comm)
    return comm._key


def communicator(key: str) -> Communicator:
    """Return the communicator of a string from `key_of`."""
    comm = by_key.get(key)
    if not isinstance(comm, Communicator):
        raise ValueError(
            f"pynccl operator: {key!r} does not name an alive communicator of this process; pass key_of(comm)"
        )
    return comm
