"""Forward mode and torch.func: every rank derives a collective at every level that is active, whatever its input is.

A level is what torch.func's grad, jvp and vmap enter, and forward_ad.dual_level. Ranks that run the same program are
within the same levels, but one rank's input may depend on what is differentiated (have a tangent, a batch dimension)
and another's not. The first would then communicate a tangent, enter a backward or send a batch, and the second not.
`lift` gives an input all of it: a tangent of 0, a node that leads to the arguments of torch.func.grad, the batch
dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

from . import torch_internals
from .torch_internals import TransformType, forward_mode, in_dual_level, innermost, transforms_active


def active() -> bool:
    """Whether any level is."""
    return transforms_active() or in_dual_level()


def lift(x: Tensor) -> Tensor:
    """x, which at every active level has a tangent, depends on what is differentiated, and has the batch dimension."""
    differentiable = x.is_floating_point() or x.is_complex()
    of_grad = {level.level() for level in torch_internals.levels() if level.key() == TransformType.Grad}
    arguments = torch_internals.differentiated_by(of_grad)
    zero = _zero(x, differentiable)
    lifted: Tensor = Lifted.apply(x, zero, *(arguments if differentiable else ()))
    return lifted


@torch.compiler.assume_constant_result
def check_compiled() -> None:
    """Raise where torch.compile traces torch.func.grad: operators know torch's own autograd only."""
    if any(level.key() == TransformType.Grad for level in torch_internals.levels()):
        raise NotImplementedError(
            "pynccl_autograd within torch.func.grad, vjp or jacrev within torch.compile; call torch.func outside of "
            "torch.compile, or torch.autograd.grad on the compiled function's result"
        )


def is_functionalized() -> bool:
    """Whether torch.func.functionalize is active, which knows operators only.

    Beside a derivative it cannot be: torch's operators have no rule for both."""
    kinds = [level.key() for level in torch_internals.levels()]
    if TransformType.Functionalize not in kinds:
        return False
    if TransformType.Grad in kinds or TransformType.Jvp in kinds:
        raise NotImplementedError(
            "torch.func.functionalize together with torch.func.grad, vjp or jvp has no rule for collectives; leave "
            "functionalize out: make_fx(torch.func.grad(f)) traces them without"
        )
    return True


def beneath(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """function(*tensors) within a `jvp`, computed beneath its level: derivatives of that level's own would be dropped.

    torch switches forward mode off within the jvp of a Function, which is right for the level of that jvp only."""
    if not transforms_active():
        return function(*tensors)
    interpreter = innermost()
    level = interpreter.level()
    inner = [torch_internals.unwrap_for_grad(t, level) for t in tensors]
    with forward_mode(True), interpreter.lower():
        result = function(*inner)
    return torch_internals.wrap_for_grad(result, level)


def in_memory(x: Tensor, compute: Callable[[Tensor, bool], Tensor]) -> Tensor:
    """compute(t, batched) for an x without memory of its own: t has memory, and if batched a batch dimension in front.

    Such are torch's zeros, as tangents may be, and the cotangents of torch.autograd.grad(is_grads_batched=True), whose
    batches torch.func does not know."""
    if torch_internals.is_zero_tensor(x):
        return compute(torch.zeros(x.shape, dtype=x.dtype, device=x.device), False)
    level = torch_internals.old_vmap_level()
    batched = torch_internals.old_vmap_unbatched(x, level, 1, 0) if level else x
    if torch_internals.has_storage(batched):
        return torch_internals.old_vmap_batched(compute(batched, True), 0, level)
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
        return g, None, *(DependentZeros.apply(argument, g) for argument in ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        return beneath(torch.clone, tangents[0])

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, *others: Tensor) -> tuple[Tensor, int]:
        batched = x.expand(info.batch_size, *x.shape) if in_dims[0] is None else x.movedim(in_dims[0], 0)
        return Lifted.apply(batched, *others), 0


class DependentZeros(Function):
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
        return tuple(DependentZeros.apply(each, g, *inputs) for each in inputs)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        (like,) = ctx.saved_tensors
        return beneath(DependentZeros.apply, like, *tangents)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Tensor, int | None]:
        return DependentZeros.apply(*tensors), in_dims[0]


def _zero(x: Tensor, differentiable: bool) -> Tensor:
    """A number 0 that is batched at every level of vmap, and has a tangent of 0 at every level of jvp."""
    if not transforms_active():
        zero = torch.zeros((), device=x.device)
        return forward_ad.make_dual(zero, torch.zeros_like(zero)) if differentiable and in_dual_level() else zero
    interpreter = innermost()
    kind, level = interpreter.key(), interpreter.level()
    with forward_mode(True), interpreter.lower():
        zero = _zero(x, differentiable)
        tangent = torch.zeros_like(zero)
        if kind == TransformType.Vmap:
            zero = zero.expand(interpreter.batch_size(), *zero.shape)
    if kind == TransformType.Vmap:
        return torch_internals.wrap_for_vmap(zero, 0, level)
    if kind == TransformType.Jvp and differentiable:
        primal, change = (torch_internals.wrap_for_grad(t, level) for t in (zero, tangent))
        return forward_ad.make_dual(primal, change)
    return zero
