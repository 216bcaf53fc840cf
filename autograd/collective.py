"""What every differentiable collective shares: forward, backward, forward mode and vmap, from one description of it.

A linear collective is a subclass of `Collective` with two halves: `prepare` says how it travels, and `adjoint` names
the collective that is its adjoint. All derivatives follow, of any order, since each adjoint is again such a collective:

    backward   run(adjoint, g)               forward mode   the same collective, of the tangent
    vmap       the same collective, with the batch dimension in front

`run` is the way in. Where nothing is traced it applies the autograd Function; under torch.compile it calls the custom
operator of the same name (operators.py), which is made from the same two halves.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, ClassVar, NamedTuple, ParamSpec

import torch
from torch import Tensor
from torch.autograd import Function

from pynccl import Communicator, NcclInvalidUsage
from pynccl.comm.groups import recorder
from pynccl.watch.caller_notes import calls_noted_as
from pynccl.watch.frames import call_site

from .arguments import check_comm, check_memory
from .checks import compare_backward, number_call
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
# run(comm, function, x, *params): `run`, or in a custom operator's backward the call of another operator.
Run = Callable[..., Tensor]

_grad_enabled = torch.is_grad_enabled  # bound once: it is asked at every call


class Call(NamedTuple):
    """A collective of x, yet to be run."""

    function: type[Collective]
    x: Tensor
    params: tuple[Any, ...]


class Collective(Function):
    """A collective that is linear in its tensor. `apply(x, comm, *params)` on every rank, params as in `schema`."""

    name: ClassVar[str]  # of the custom operator in the namespace pynccl
    schema: ClassVar[str]  # of its parameters, after the tensor and the communicator
    grad_at: ClassVar[int | None] = None  # index in params of the convention, for those that have two
    dims_at: ClassVar[tuple[int, ...]] = ()  # indices in params of the tensor's dimensions
    linear: ClassVar[bool] = True  # else its derivatives need x and y
    communicates: ClassVar[bool] = True
    forward_name: ClassVar[str]  # in the flight recorder
    backward_name: ClassVar[str]
    operator: ClassVar[Callable[..., Tensor]]  # (x, key of the communicator, *params): torch.ops.pynccl.<name>

    def __init_subclass__(cls) -> None:
        cls.forward_name, cls.backward_name = f"{cls.__name__}.forward", f"{cls.__name__}.backward"
        if name := getattr(cls, "name", ""):

            def operator(x: Tensor, key: str, *params: Any) -> Tensor:
                y: Tensor = getattr(torch.ops.pynccl, name)(x, key, *params)
                return y

            pull_back = cls.pull_back.__func__  # type: ignore[attr-defined]

            def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
                return pull_back(cls, ctx, g)

            # So, and not by the name, it can be traced by torch.compile, and the other by compiled autograd.
            cls.operator = staticmethod(operator)
            cls.backward = staticmethod(backward)  # type: ignore[method-assign]

    @staticmethod
    def prepare(x: Tensor, comm: Communicator, *params: Any) -> Prepared:
        """The collective of x, ready to be launched."""
        raise NotImplementedError

    @staticmethod
    def adjoint(g: Tensor, comm: Communicator, shape: torch.Size, *params: Any) -> Call:
        """The collective that takes the cotangent g to that of the input, whose shape is `shape`."""
        raise NotImplementedError

    @classmethod
    def batched(cls, *params: Any) -> tuple[Any, ...]:
        """The parameters for a tensor with one more dimension in front."""
        return tuple(param + 1 if at in cls.dims_at else param for at, param in enumerate(params))

    @staticmethod
    def alone(x: Tensor, *params: Any) -> Tensor:
        """The result on one rank."""
        return x.clone()

    @classmethod
    def apply(cls, x: Tensor, comm: Communicator, *params: Any) -> Any:
        """Torch's apply, without its inspection of the signature, which takes longer than all the rest together."""
        if transforms_active():
            return super().apply(x, comm, *params)
        return super(Function, cls).apply(unwrap_if_dead(x), comm, *params)  # type: ignore[misc]

    @classmethod
    def forward(cls, x: Tensor, comm: Communicator, *params: Any) -> Tensor:
        # beneath transforms: see sees_operators
        if dispatch_modes() or x.is_meta or (type(x) is not Tensor and has_no_values(x)):
            return cls.operator(x, key_of(comm), *params)
        if not has_storage(x):
            check_memory(cls.name, x)
        launch, result = cls.prepare(x, comm, *params)
        if cls.communicates:
            refuse_group(cls.name)
        if comm.recorded:
            with calls_noted_as(cls.forward_name):
                launch(None)
        else:
            launch(None)
        return result()

    @classmethod
    def setup_context(cls, ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, comm, *params = inputs
        ctx.comm, ctx.shape, ctx.params = comm, x.shape, params
        remember(ctx, comm, cls.name)

    @classmethod
    def pull_back(cls, ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """`backward`; g is zeros where there is none, since the peers wait for this rank all the same."""
        replicated = ctx.call is not None and cls.is_replicated(ctx.params)
        enter_backward(ctx, ctx.comm, [g] if replicated else [])
        saved = ctx.saved_tensors
        with cls.in_backward(ctx):
            dx = cls.cotangent(run, ctx.comm, g, ctx.shape, saved, ctx.params)
        return dx, None, *(None,) * len(ctx.params)

    @classmethod
    def in_backward(cls, ctx: Any) -> contextlib.AbstractContextManager[None]:
        """What runs within is in the flight recorder as the backward pass of this call."""
        if ctx.site and not torch.compiler.is_compiling():
            return calls_noted_as(cls.backward_name, ctx.site)
        return contextlib.nullcontext()

    @classmethod
    def cotangent(
        cls, run: Run, comm: Communicator, g: Tensor, shape: torch.Size, saved: tuple[Tensor, ...], params: Any
    ) -> Tensor:
        """That of the input, of the output's; `saved`: x and y, if this is not linear."""
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
        return cls.grad_at is not None and params[cls.grad_at] == "replicated"


def remember(ctx: Any, comm: Communicator, name: str) -> None:
    """After the communication of a forward pass: what `enter_backward` needs, and the line for the flight recorder."""
    ctx.ask_for_token = save_token()
    ctx.call = number_call(comm, name) if comm.checking else None
    ctx.site = call_site() if comm.recorded and not torch.compiler.is_compiling() else ""


def enter_backward(ctx: Any, comm: Communicator, replicated: Sequence[Tensor]) -> None:
    """Before a backward pass communicates, and before it asks for saved tensors: a checkpoint may compute its region
    anew. With PYNCCL_CHECK=1 the ranks compare where they are, and the cotangents that have to be equal."""
    if ctx.ask_for_token is not None:
        ctx.ask_for_token()
    if ctx.call is not None:
        for g in replicated or (None,):
            compare_backward(comm, ctx.call, g)


def refuse_group(name: str) -> None:
    """NcclInvalidUsage within a `pynccl.group`, at whose end alone there are results."""
    if recorder() is not None:
        raise NcclInvalidUsage(
            f"{name} within a pynccl.group(): its calls are launched at the end of the block, and a graph, or its "
            "backward pass,\ngoes on with their results before that. For several tensors pass a list, as in "
            "ad.all_reduce([a, b], comm, ...), which is one\ngroup; for several ranks in one process have a thread for "
            "each"
        )


class RequireGrad(Function):
    """Gives x a node although x needs no gradient, so that what follows is entered by the backward pass.

    forward    x [..] -> x [..]
    backward   g [..] -> nothing
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, requires_grad: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[None, None]:
        return None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *others: None) -> Tensor:
        return tangent.view_as(tangent)


_REQUIRES_GRAD = torch.empty(0, requires_grad=True)


def run(comm: Communicator, function: type[Collective], x: Tensor, *params: Any) -> Tensor:
    """The collective of x, differentiable.

    Its node is made on every rank whatever needs a gradient there: the peers' backward passes wait for this rank's."""
    if comm.size == 1:
        return function.alone(x, *params)
    if torch.compiler.is_compiling():
        check_compiled()
        return function.operator(x, key_of(comm), *params)
    if not x.requires_grad and _grad_enabled():
        x = require_grad(x)
    # What is seldom so is asked without a call: every collective comes this way, forwards and backwards.
    if (dispatch_modes() or x.is_meta or type(x) is not Tensor) and sees_operators(x):
        return function.operator(x, key_of(comm), *params)
    y: Tensor = function.apply(x, comm, *params)
    return y


def require_grad(x: Tensor) -> Tensor:
    """x with a node, where derivatives are recorded and x could have one."""
    if x.requires_grad or not torch.is_grad_enabled() or not (x.is_floating_point() or x.is_complex()):
        return x
    if transforms_active():  # nodes of torch.func belong to its levels
        return x
    y: Tensor = RequireGrad.apply(x, _REQUIRES_GRAD)
    return y


def sees_operators(x: Tensor) -> bool:
    """Whether the collective of x is to be run as an operator.

    Under dispatch modes (fake tensors, make_fx, export, selective checkpointing), which know operators only; and for
    tensors without values, of which operators know the outputs' shapes. Within torch.func's transforms and forward mode
    the Function is run all the same, which has rules for them; its forward, at the bottom of them, then calls the
    operator."""
    if not (dispatch_modes() or has_no_values(x)):
        return False
    return not (transforms_active() or in_forward_mode())


def operation(plan: Callable[P, Any]) -> Callable[P, Tensor]:
    """The function that runs what `plan` makes of its arguments, (comm, Call); `start` takes the plan instead."""

    @functools.wraps(plan)
    def run_now(*args: P.args, **kwargs: P.kwargs) -> Tensor:
        comm, (function, x, params) = plan(*args, **kwargs)
        return run(comm, function, x, *params)

    run_now.plan = plan  # type: ignore[attr-defined]
    run_now.__annotations__ = {**plan.__annotations__, "return": "Tensor"}
    run_now.__signature__ = inspect.signature(plan).replace(return_annotation="Tensor")  # type: ignore[attr-defined]
    return run_now


def mean(g: Tensor, op: str, comm: Communicator) -> Tensor:
    """g / N for the operator "avg", else g."""
    return g / comm.size if op == "avg" else g


# Operators take no communicators, but strings; neither table keeps a communicator alive.
_keys: weakref.WeakKeyDictionary[Communicator, str] = weakref.WeakKeyDictionary()
_communicators: weakref.WeakValueDictionary[str, Communicator] = weakref.WeakValueDictionary()
_numbers = count(1)


@torch.compiler.assume_constant_result
def key_of(comm: Communicator) -> str:
    """The string that stands for comm in the operators of this process."""
    check_comm("key_of", comm)
    key = _keys.get(comm)
    if key is None:
        key = _keys[comm] = f"{next(_numbers)}:{comm.rank}/{comm.size}"
        _communicators[key] = comm
    return key


def communicator(key: str) -> Communicator:
    """What `key_of` was asked about."""
    comm = _communicators.get(key)
    if comm is None:
        raise ValueError(
            f"pynccl operator: {key!r} names no communicator that is alive in this process; use key_of(comm)"
        )
    return comm
