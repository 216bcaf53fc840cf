"""Gradients of models that have parallel layers: finished where a rank has a part of them, and their norm."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pynccl import Communicator
from pynccl.bindings.values import shown

from ..ops.all_reduce import all_reduce
from .dtensors import groups_that_cut, is_dtensor, local_part
from .shards import shard_of

_in_backward: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


def finish_gradients(parameters: nn.Module | Iterable[Tensor], bucket_bytes: float = 64e6) -> None:
    """Sum the gradients that sequence parallelism has left partial, after backward(), before the optimizer's step.

    A few all_reduce of up to `bucket_bytes` each, whatever the number of parameters. Every rank must call it, once
    after the last backward pass of a step, with the same parameters. One whose gradient is None here and not on another
    rank is an error of the ranks' programs. What `finish_gradients_in_backward` has finished is left as it is.
    """
    buckets: dict[tuple[int, torch.dtype], list[tuple[Communicator, list[Tensor]]]] = {}
    for parameter in _listed(parameters, "finish_gradients"):
        comm, own = partial_over(parameter), local_part(parameter.grad)  # of a DTensor all ranks of comm have the same
        if comm is None or own is None or is_finished_in_backward(parameter):
            continue
        _check_dense("finish_gradients", parameter, own)
        found = buckets.setdefault((id(comm), own.dtype), [(comm, [])])
        _, grads = found[-1]
        if grads and sum(grad.nbytes for grad in grads) + own.nbytes > bucket_bytes:
            found.append((comm, [own]))
        else:
            grads.append(own)
    for found in buckets.values():
        for comm, grads in found:
            _sum(comm, grads)


@torch.no_grad()
def _sum(comm: Communicator, grads: list[Tensor]) -> None:
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    comm.all_reduce(flat, flat)
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))


def finish_gradients_in_backward(parameters: nn.Module | Iterable[Tensor]) -> FinishedInBackward:
    """From now on backward() itself sums the gradients that sequence parallelism leaves partial.

    One all_reduce for each parameter, as soon as its gradient is there and before it is added to .grad: so .grad is
    whole, after one pass or several that add to it, also for hooks of parameters, for DataParallelGradients, and for
    optimizers that step in the backward pass. `finish_gradients` then finds nothing to do. `remove()` of what is
    returned ends it.

    Every rank must call it, with the same parameters, those that require a gradient now. RuntimeError for parameters
    that it was called for already, and for those that torch's fully_shard cuts; TypeError in the backward pass for a
    sparse gradient.
    """
    return FinishedInBackward(_listed(parameters, "finish_gradients_in_backward"))


class FinishedInBackward:
    """See `finish_gradients_in_backward`."""

    def __init__(self, parameters: list[Tensor]) -> None:
        found = {id(one): one for one in parameters if one.requires_grad and partial_over(one) is not None}
        for one in found.values():
            _check_finishes_alone(one)
        self._parameters = found
        self._hooks = [one.register_hook(partial(_summed, one)) for one in found.values()]
        _in_backward.update(found)

    def remove(self) -> None:
        """Leave the parameters alone from now on. Twice is harmless."""
        while self._hooks:
            self._hooks.pop().remove()
        for key, one in self._parameters.items():
            if _in_backward.get(key) is one:
                del _in_backward[key]
        self._parameters = {}


def _summed(parameter: Tensor, grad: Tensor) -> Tensor:
    _check_dense("finish_gradients_in_backward", parameter, grad)
    comm = partial_over(parameter)
    return grad if comm is None else all_reduce(grad, comm, grad="sum")


def _check_finishes_alone(parameter: Tensor) -> None:
    shape = list(parameter.shape)
    if is_finished_in_backward(parameter):
        raise RuntimeError(
            f"finish_gradients_in_backward: a parameter of {shape} has it already; call it once for a model, or "
            "remove() what the first call returned"
        )
    if is_dtensor(parameter):
        raise RuntimeError(
            f"finish_gradients_in_backward: fully_shard cuts the gradient of a parameter of {shape} in the same "
            "backward pass; call finish_gradients after it"
        )


def is_finished_in_backward(parameter: Tensor) -> bool:
    """Whether `finish_gradients_in_backward` has it."""
    return _in_backward.get(id(parameter)) is parameter


def partial_over(parameter: Tensor) -> Communicator | None:
    """Whose ranks each have a part of its gradient, as sequence parallelism leaves it; None: it is whole."""
    shard = shard_of(parameter)
    return shard.comm if shard is not None and shard.partial and shard.comm.size > 1 else None


def _check_dense(name: str, parameter: Tensor, grad: Tensor) -> None:
    if grad.layout != torch.strided:
        raise TypeError(f"{name}: a gradient of {list(parameter.shape)} is {grad.layout}, expected a dense one")


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """torch.nn.utils.clip_grad_norm_ of the unsharded model: returns its norm, equal on all ranks.

    Each parameter counts once: parts are summed over the ranks that have them, what every rank has is taken from this
    one. One all_reduce of one number for each communicator that cuts parameters, and each process group of torch that
    does (FSDP2). Every rank must call it, after `finish_gradients`. norm_type: above 0, or math.inf.
    """
    found = _listed(parameters, "clip_grad_norm_")
    grads = [local_part(parameter.grad) for parameter in found if parameter.grad is not None]
    device = grads[0].device if grads else torch.device("cpu")
    norm = _total_norm(found, norm_type, device)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"clip_grad_norm_: the norm of the gradients is {norm.item()}, so they cannot be clipped")
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(factor.to(grad.device))
    double = any(grad.dtype in (torch.float64, torch.complex128) for grad in grads)
    return norm if double else norm.float()


def _total_norm(parameters: list[Tensor], norm_type: float, device: Any) -> Tensor:
    """The norm, in double precision, of the gradients of parameters. All ranks must pass the same parameters."""
    if not norm_type > 0:
        raise ValueError(f"clip_grad_norm_: norm_type is {shown(norm_type)}, expected a number above 0, or math.inf")
    largest = norm_type == math.inf
    zero = torch.zeros(1, dtype=torch.float64, device=device)
    cut: dict[tuple[int, ...], tuple[Communicator | None, tuple[Any, ...], Tensor]] = {(id(None),): (None, (), zero)}
    for parameter in parameters:
        shard, groups = shard_of(parameter), groups_that_cut(parameter)
        comm = None if shard is None or shard.dim is None else shard.comm
        # Also where it has no gradient here: the others may have one, and so come to the sum.
        key = id(comm), *map(id, groups)
        *_, total = cut.get(key, (comm, groups, zero))
        cut[key] = (comm, groups, _add_power(total, local_part(parameter.grad), norm_type))
    whole = zero
    for comm, groups, total in cut.values():
        summed = total.clone()
        for group in groups:
            dist.all_reduce(summed, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group)
        if comm is not None:
            comm.all_reduce(summed, summed, op="max" if largest else "sum")
        whole = torch.maximum(whole, summed) if largest else whole + summed
    return whole[0] if largest else whole[0] ** (1 / norm_type)


def _add_power(total: Tensor, grad: Tensor | None, norm_type: float) -> Tensor:
    """`total` plus the sum of the powers of the gradient's entries, or the larger one of it and their maximum."""
    if grad is None or not grad.numel():
        return total
    kind = torch.float32 if grad.dtype in (torch.float16, torch.bfloat16) else None
    norm = torch.linalg.vector_norm(grad, norm_type, dtype=kind).to(total)
    return torch.maximum(total, norm) if norm_type == math.inf else total + norm**norm_type


def _listed(parameters: Any, name: str) -> list[Tensor]:
    if isinstance(parameters, nn.Module):
        return list(parameters.parameters())
    if isinstance(parameters, Tensor):
        return [parameters]
    found = list(parameters)
    for one in found:
        if not isinstance(one, Tensor):
            raise TypeError(f"{name}: expected a module or its parameters, got {shown(one)}")
    return found
