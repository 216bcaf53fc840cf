"""Forward mode and torch.func: every rank derives a collective at every level that is active, whatever its input is.

A level is what torch.func's grad, jvp and vmap enter, and forward_ad.dual_level. Ranks that run the same program are
within the same levels, but one rank's input may depend on what is differentiated (have a tangent, a batch dimension)
and another's not. The first would then communicate a tangent, enter a backward or send a batch, and the second not.
`lift` gives an input all of it: a tangent of 0, a node that leads to the arguments of torch.func.grad, the batch
dimension. All that this package uses of torch.func's inside is in this file.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch._C._functorch import TransformType
from torch._functorch import eager_transforms
from torch._functorch.pyfunctorch import (
    retrieve_all_functorch_interpreters,
    retrieve_current_functorch_interpreter,
    temporarily_clear_interpreter_stack,
)
from torch.autograd import Function, forward_ad
from torch.autograd.forward_ad import _set_fwd_grad_enabled

# The functions within which torch.func.grad, vjp, jacrev and hessian call the user's, and their local variable with the
# arguments that they differentiate by. Nothing else knows those.
_DIFFERENTIATED = {
    inspect.unwrap(eager_transforms.grad_and_value_impl).__code__: "diff_args",
    inspect.unwrap(eager_transforms._vjp_with_argnums).__code__: "diff_primals",
}


def active() -> bool:
    """Whether any level is."""
    return torch._C._are_functorch_transforms_active() or _is_dual_level()


def _is_dual_level() -> bool:
    """Whether a dual_level is active that is the user's: torch.func.jvp enters one too, beside its own level."""
    return forward_ad._current_level >= 0 and not eager_transforms.JVP_NESTING and torch._C._is_fwd_grad_enabled()


def lift(x: Tensor) -> Tensor:
    """x, which at every active level has a tangent, depends on what is differentiated, and has the batch dimension."""
    differentiable = x.is_floating_point() or x.is_complex()
    levels = retrieve_all_functorch_interpreters()
    arguments = _arguments({level.level() for level in levels if level.key() == TransformType.Grad})
    zero = _zero(x, differentiable)
    lifted: Tensor = Lifted.apply(x, zero, *(arguments if differentiable else ()))
    return lifted


@torch.compiler.assume_constant_result
def check_compiled() -> None:
    """Raise where torch.compile traces torch.func.grad: operators know torch's own autograd only."""
    if any(level.key() == TransformType.Grad for level in retrieve_all_functorch_interpreters()):
        raise NotImplementedError(
            "pynccl_autograd within torch.func.grad, vjp or jacrev within torch.compile; call torch.func outside of "
            "torch.compile, or torch.autograd.grad on the compiled function's result"
        )


def beneath(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """function(*tensors) within a `jvp`, computed beneath its level: derivatives of that level's own would be dropped.

    torch switches forward mode off within the jvp of a Function, which is right for the level of that jvp only."""
    if not torch._C._are_functorch_transforms_active():
        return function(*tensors)
    interpreter = retrieve_current_functorch_interpreter()
    level = interpreter.level()
    inner = [_functorch._unwrap_for_grad(t, level) for t in tensors]
    with _set_fwd_grad_enabled(True), interpreter.lower():
        result = function(*inner)
    return _functorch._wrap_for_grad(result, level)


def left() -> contextlib.AbstractContextManager[Any]:
    """A context outside of all of torch.func's levels."""
    if torch._C._are_functorch_transforms_active():
        return temporarily_clear_interpreter_stack()
    return contextlib.nullcontext()


def in_memory(x: Tensor, compute: Callable[[Tensor, bool], Tensor]) -> Tensor:
    """compute(t, batched) for an x without memory of its own: t has memory, and if batched a batch dimension in front.

    Such are torch's zeros, as tangents may be, and the cotangents of torch.autograd.grad(is_grads_batched=True), whose
    batches torch.func does not know."""
    if x._is_zerotensor():
        return compute(torch.zeros(x.shape, dtype=x.dtype, device=x.device), False)
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    batched = torch._remove_batch_dim(x, level, 1, 0) if level else x
    if torch._C._has_storage(batched):
        return torch._add_batch_dim(compute(batched, True), 0, level)
    raise NotImplementedError(
        f"pynccl_autograd: the tensor is a {type(x).__name__} without memory of its own; pass one that has memory, and "
        "where is_grads_batched is nested use torch.func.jacrev or vmap"
    )


class Lifted(Function):
    """x at the levels of the other tensors: `zero`, and arguments that are differentiated by.

    forward    x [..], zero [], arguments -> x [..]
    backward   g [..] -> g, and for each argument zeros that depend on g: a derivative of them enters what made g
    """

    @staticmethod
    def forward(x: Tensor, zero: Tensor, *arguments: Tensor) -> Tensor:
        return x.clone()  # and no view: torch would write a tangent to the memory of what is viewed

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        _, _, *arguments = inputs
        ctx.save_for_backward(*arguments)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = cotangents
        return g, None, *(Nothing.apply(argument, g) for argument in ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return beneath(torch.clone, tangents[0])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, *others: Tensor) -> tuple[Tensor, int]:
        batched = x.expand(info.batch_size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
        return Lifted.apply(batched, *others), 0


class Nothing(Function):
    """Zeros that depend on tensors, and whose derivatives of any order do: where these are asked for, backward passes
    enter what made the tensors. Values are not looked at, so that no NaN comes of infinities.

    forward    like [..], others -> 0 [..], without memory
    backward   g [..] -> zeros for each, which depend on g and on all of them
    """

    @staticmethod
    def forward(like: Tensor, *others: Tensor) -> Tensor:
        return like.new_zeros(()).expand(like.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor, ...]:
        (g,) = cotangents
        inputs = ctx.saved_tensors
        return tuple(Nothing.apply(each, g, *inputs) for each in inputs)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        (like,) = ctx.saved_tensors
        return beneath(Nothing.apply, like, *tangents)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Tensor, int | None]:
        return Nothing.apply(*tensors), in_dims[0]


def _zero(x: Tensor, differentiable: bool) -> Tensor:
    """A number 0 that is batched at every level of vmap, and has a tangent of 0 at every level of jvp."""
    if not torch._C._are_functorch_transforms_active():
        zero = torch.zeros((), device=x.device)
        return forward_ad.make_dual(zero, torch.zeros_like(zero)) if differentiable and _is_dual_level() else zero
    interpreter: Any = retrieve_current_functorch_interpreter()
    kind, level = interpreter.key(), interpreter.level()
    with _set_fwd_grad_enabled(True), interpreter.lower():
        zero = _zero(x, differentiable)
        tangent = torch.zeros_like(zero)
        if kind == TransformType.Vmap:
            zero = zero.expand(interpreter.batch_size(), *zero.shape)
    if kind == TransformType.Vmap:
        return _functorch._add_batch_dim(zero, 0, level)
    if kind == TransformType.Jvp and differentiable:
        primal, change = (_functorch._wrap_for_grad(t, level) for t in (zero, tangent))
        return forward_ad.make_dual(primal, change)
    return zero


def _arguments(levels: set[int]) -> list[Tensor]:
    """For each of these levels of torch.func.grad, an argument by which it differentiates."""
    found: list[Tensor] = []
    frame = sys._getframe(1) if levels else None
    while frame is not None and levels:
        name = _DIFFERENTIATED.get(frame.f_code)
        if name is not None and frame.f_locals.get("level") in levels:
            levels.discard(frame.f_locals["level"])
            leaves = torch.utils._pytree.tree_leaves(frame.f_locals.get(name))
            found += [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad][:1]
        frame = frame.f_back
    return found
