"""What every differentiable collective shares: forward, backward, forward mode and vmap, from one description of it.

A linear collective is a subclass of `Collective` with two halves: `exchange` moves the data, and `adjoint` names the
collective that is its adjoint. All derivatives follow, of any order, since each adjoint is again such a collective:

    backward   run(adjoint, g)               forward mode   the same collective, of the tangent
    vmap       the same collective, with the batch dimension in front

`run` is the way in. Where nothing is traced it applies the autograd Function; under torch.compile it calls the custom
operator of the same name (operators.py), which is made from the same two halves.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import count
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from pynccl import Communicator

from . import backward_check, levels
from .inputs import check_comm
from .raw import Exchange
from .recompute import keep, saved_tensors_hooks_on_top
from .tracing import handles_tangents, has_no_values, is_functionalized, sees_operators

# Bound once: they are asked at every call.
_transforming, _has_storage = torch._C._are_functorch_transforms_active, torch._C._has_storage
_hooks, _dispatching, _grad_enabled = (
    saved_tensors_hooks_on_top,
    torch._C._len_torch_dispatch_stack,
    torch.is_grad_enabled,
)
_unwrap_if_dead = torch._C._functorch.unwrap_if_dead


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
    operator: ClassVar[Callable[..., Tensor]]  # (x, key of the communicator, *params): torch.ops.pynccl.<name>

    def __init_subclass__(cls) -> None:
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
    def exchange(x: Tensor, comm: Communicator, *params: Any) -> Exchange:
        raise NotImplementedError

    @staticmethod
    def adjoint(g: Tensor, comm: Communicator, shape: torch.Size, *params: Any) -> Call:
        """The collective that takes the cotangent g to that of the input, whose shape is `shape`."""
        raise NotImplementedError

    @staticmethod
    def batched(*params: Any) -> tuple[Any, ...]:
        """The parameters for a tensor with one more dimension in front."""
        return params

    @staticmethod
    def alone(x: Tensor, *params: Any) -> Tensor:
        """The result on one rank."""
        return x.clone()

    @classmethod
    def apply(cls, x: Tensor, comm: Communicator, *params: Any) -> Any:
        """Torch's apply, without its inspection of the signature, which takes longer than all the rest together."""
        if _transforming():
            return super().apply(x, comm, *params)
        return super(Function, cls).apply(_unwrap_if_dead(x), comm, *params)  # type: ignore[misc]

    @classmethod
    def forward(cls, x: Tensor, comm: Communicator, *params: Any) -> Tensor:
        # beneath transforms: see sees_operators
        if _dispatching() or x.is_meta or (type(x) is not Tensor and has_no_values(x)):
            with handles_tangents():
                return cls.operator(x, key_of(comm), *params)
        if not _has_storage(x):
            return levels.in_memory(
                x, lambda t, batched: cls.forward(t, comm, *(cls.batched(*params) if batched else params))
            )
        issue, finish = cls.exchange(x, comm, *params)
        issue(None)
        return finish()

    @classmethod
    def setup_context(cls, ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, comm, *params = inputs
        ctx.comm, ctx.shape, ctx.params = comm, x.shape, params
        ctx.kept = None if _hooks(False) is None else keep()
        ctx.site = backward_check.sign(comm, cls.name) if comm.checking else None

    @classmethod
    def pull_back(cls, ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """`backward`; g is zeros where there is none, since the peers wait for this rank all the same."""
        if ctx.kept is not None:
            ctx.kept()
        if ctx.site is not None:
            backward_check.compare(ctx.comm, ctx.site, g if cls.is_replicated(ctx.params) else None)
        function, x, params = cls.adjoint(g, ctx.comm, ctx.shape, *ctx.params)
        return run(ctx.comm, function, x, *params), None, *(None,) * len(ctx.params)

    @classmethod
    def jvp(cls, ctx: Any, tangent: Tensor, *others: None) -> Tensor:
        return run(ctx.comm, cls, tangent, *ctx.params)

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[Any, ...], x: Tensor, comm: Communicator, *params: Any) -> tuple[Any, int]:
        return run(comm, cls, x.movedim(in_dims[0], 0), *cls.batched(*params)), 0

    @classmethod
    def is_replicated(cls, params: Any) -> bool:
        return cls.grad_at is not None and params[cls.grad_at] == "replicated"


class Reached(Function):
    """Gives x a node although x needs no gradient, so that what follows is entered by the backward pass.

    forward    x [..] -> x [..]
    backward   g [..] -> nothing
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, needs_gradient: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[None, None]:
        return None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *others: None) -> Tensor:
        return tangent.view_as(tangent)


_NEEDS_GRADIENT = torch.empty(0, requires_grad=True)


def run(comm: Communicator, function: type[Collective], x: Tensor, *params: Any) -> Tensor:
    """The collective of x, differentiable.

    Its node is made on every rank whatever needs a gradient there: the peers' backward passes wait for this rank's."""
    if comm.size == 1:
        return function.alone(x, *params)
    if torch.compiler.is_compiling():
        levels.check_compiled()
        return function.operator(x, key_of(comm), *params)
    if forward_ad._current_level >= 0 or _transforming():
        if is_functionalized():
            return function.operator(x, key_of(comm), *params)
        if levels.active():
            x = levels.lift(x)
    if not x.requires_grad and _grad_enabled():
        x = reachable(x)
    # What is seldom so is asked without a call: every collective comes this way, forwards and backwards.
    if (_dispatching() or x.is_meta or type(x) is not Tensor) and sees_operators(x):
        return function.operator(x, key_of(comm), *params)
    y: Tensor = function.apply(x, comm, *params)
    return y


def reachable(x: Tensor) -> Tensor:
    """x with a node, where derivatives are recorded and x could have one."""
    if x.requires_grad or not torch.is_grad_enabled() or not (x.is_floating_point() or x.is_complex()):
        return x
    if _transforming():  # nodes of torch.func belong to its levels
        return x
    reached: Tensor = Reached.apply(x, _NEEDS_GRADIENT)
    return reached


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
