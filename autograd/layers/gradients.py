"""Gradients of models with parallel layers: sums of partial gradients, and the gradient norm."""

from __future__ import annotations

import gc
import math
import numbers
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pynccl import Communicator
from pynccl.bindings.values import instance, ordered, shown

from ..agreement import DeferredCheck, check_not_in_group
from ..arguments import checked
from ..names import plain_name
from ..ops.all_reduce import all_reduce
from ..state import state_of
from ..streams import is_capturing
from .dtensors import is_dtensor, local_tensor, sharding_groups
from .shards import shard_of

_in_backward: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


@checked
def finish_gradients(parameters: nn.Module | Iterable[Tensor], bucket_bytes: float = 64e6) -> None:
    """Sum the gradients that are partial after backward(): those of parameters that saw a shard of the sequence.

        loss.backward()
        ad.finish_gradients(model)
        optimizer.step()

    Every rank must call it with the same parameters, once per step, after the last backward pass. It makes a few
    all_reduces of up to `bucket_bytes` each. A gradient must be None on all ranks or on none. Gradients that
    `finish_gradients_in_backward` sums are left unchanged.
    """
    buckets: dict[tuple[int, torch.dtype], list[tuple[Communicator, list[Tensor]]]] = {}
    for parameter in _as_list(parameters, "finish_gradients"):
        comm, local = partial_comm(parameter), local_tensor(parameter.grad)  # DTensors: the same shard on all of comm
        if comm is None or local is None or is_summed_in_backward(parameter):
            continue
        _check_dense("finish_gradients", parameter, local)
        found = buckets.setdefault((id(comm), local.dtype), [(comm, [])])
        _, grads = found[-1]
        if grads and sum(grad.nbytes for grad in grads) + local.nbytes > bucket_bytes:
            found.append((comm, [local]))
        else:
            grads.append(local)
    for found in buckets.values():
        for comm, grads in found:
            _sum(comm, grads)


@torch.no_grad()
def _sum(comm: Communicator, grads: list[Tensor]) -> None:
    check_not_in_group("finish_gradients")
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    comm.all_reduce(flat, flat)
    for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))


def finish_gradients_in_backward(parameters: nn.Module | Iterable[Tensor]) -> FinishedInBackward:
    """Sum partial gradients within backward() from now on, in place of `finish_gradients`.

    Each partial gradient is summed by an all_reduce of its own before it is added to .grad. So .grad is complete after
    each backward pass, also for hooks, for `DataParallelGradients`, and for optimizers that step in the backward pass.
    Call `remove()` of the returned object to stop it.

    Every rank must call it with the same parameters; those that require a gradient now are summed. RuntimeError if it
    was called for a parameter before, or if torch's fully_shard shards one. The backward pass raises TypeError for a
    sparse gradient.
    """
    return FinishedInBackward(_as_list(parameters, "finish_gradients_in_backward"))


class FinishedInBackward:
    """Returned by `finish_gradients_in_backward`; `remove()` stops it."""

    def __init__(self, parameters: list[Tensor]) -> None:
        found = {id(one): one for one in parameters if one.requires_grad and partial_comm(one) is not None}
        for one in found.values():
            _check_can_sum_in_backward(one)
        self._parameters = found
        self._hooks = [one.register_hook(partial(_sum_over_ranks, one)) for one in found.values()]
        _in_backward.update(found)

    def remove(self) -> None:
        """Stop summing these gradients in backward passes. Can be called twice."""
        while self._hooks:
            self._hooks.pop().remove()
        for key, one in self._parameters.items():
            if _in_backward.get(key) is one:
                del _in_backward[key]
        self._parameters = {}


def _sum_over_ranks(parameter: Tensor, grad: Tensor) -> Tensor:
    _check_dense("finish_gradients_in_backward", parameter, grad)
    comm = partial_comm(parameter)
    return grad if comm is None else all_reduce(grad, comm, grad="sum")


def _check_can_sum_in_backward(parameter: Tensor) -> None:
    shape = list(parameter.shape)
    if is_summed_in_backward(parameter):
        raise RuntimeError(
            f"finish_gradients_in_backward: already called for a parameter of shape {shape}; call it once for a model, "
            "or remove() what the first call returned"
        )
    if is_dtensor(parameter):
        raise RuntimeError(
            f"finish_gradients_in_backward: fully_shard shards the gradient of a parameter of shape {shape} in the "
            "same backward pass; call finish_gradients after it instead"
        )


def is_summed_in_backward(parameter: Tensor) -> bool:
    """Return whether `finish_gradients_in_backward` sums the gradient of this parameter."""
    return _in_backward.get(id(parameter)) is parameter


def partial_comm(parameter: Tensor) -> Communicator | None:
    """Return the communicator over which the parameter's gradient must be summed; None: it is complete."""
    shard = shard_of(parameter)
    return shard.comm if shard is not None and shard.partial and shard.comm.size > 1 else None


def _check_dense(name: str, parameter: Tensor, grad: Tensor) -> None:
    if grad.layout != torch.strided:
        raise TypeError(
            f"{name}: a gradient of shape {list(parameter.shape)} is {grad.layout}, expected a dense one; pass "
            "sparse=False to its layer"
        )


@checked
@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clip the gradients by the norm of the unsharded model's, as torch.nn.utils.clip_grad_norm_ does.

    Returns the norm, equal on all ranks. Every rank must call it, after `finish_gradients`. Each parameter counts once:
    sharded gradients are summed over the ranks, replicated ones are this rank's. It makes an all_reduce of a few
    numbers for each communicator, and each process group of torch (FSDP2), over which parameters are sharded.

    With the communicator's all_reduce it compares the norms of replicated gradients, and raises RuntimeError with the
    parameter's name on all ranks if they differ: the replicas would drift apart. On a GPU the next call raises it,
    since reading the result now would wait for the GPU.

    parameters           a module or its parameters, the same on all ranks
    max_norm             maximum norm
    norm_type            p of the p-norm: above 0, or math.inf. Default: 2
    error_if_nonfinite   True: raise RuntimeError if the norm is NaN or infinite
    """
    found = _as_list(parameters, "clip_grad_norm_")
    instance(max_norm, (numbers.Real, Tensor), "clip_grad_norm_: max_norm", "a number")
    instance(norm_type, numbers.Real, "clip_grad_norm_: norm_type", "a number above 0, or math.inf")
    grads = [local_tensor(parameter.grad) for parameter in found if parameter.grad is not None]
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
    """Return the norm of the parameters' gradients, in float64. All ranks must pass the same parameters."""
    if not norm_type > 0:
        raise ValueError(f"clip_grad_norm_: norm_type is {shown(norm_type)}, expected a number above 0, or math.inf")
    largest = norm_type == math.inf
    zero = torch.zeros(1, dtype=torch.float64, device=device)
    norms = [_norm(local_tensor(parameter.grad), norm_type, zero) for parameter in parameters]
    totals: dict[tuple[int, ...], tuple[Communicator | None, tuple[Any, ...], Tensor]] = {(id(None),): (None, (), zero)}
    for parameter, norm in zip(parameters, norms, strict=True):
        shard, groups = shard_of(parameter), sharding_groups(parameter)
        comm = None if shard is None or shard.dim is None else shard.comm
        # Also without a gradient here: other ranks may have one, and then call the all_reduce.
        key = id(comm), *map(id, groups)
        *_, total = totals.get(key, (comm, groups, zero))
        total = torch.maximum(total, norm) if largest else total + norm**norm_type
        totals[key] = (comm, groups, total)
    replicated = {id(comm): _replicated(parameters, norms, comm) for comm, _, _ in totals.values() if comm is not None}
    norm = zero
    for comm, groups, total in totals.values():
        summed = total.clone()
        for group in groups:
            dist.all_reduce(summed, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group)
        if comm is not None:
            check_not_in_group("clip_grad_norm_")
            summed = _reduced(comm, summed, replicated.pop(id(comm), []), largest)
        norm = torch.maximum(norm, summed) if largest else norm + summed
    return norm[0] if largest else norm[0] ** (1 / norm_type)


def _norm(grad: Tensor | None, norm_type: float, zero: Tensor) -> Tensor:
    if grad is None or not grad.numel():
        return zero
    kind = torch.float32 if grad.dtype in (torch.float16, torch.bfloat16) else None
    return torch.linalg.vector_norm(grad, norm_type, dtype=kind).to(zero).view(1)


# ------------------------------------------------------------------------------------------- replicated gradients


def _replicated(parameters: list[Tensor], norms: list[Tensor], comm: Communicator) -> list[tuple[Tensor, Tensor]]:
    """Return the parameters whose gradients must be equal on the ranks of `comm`, with their norms."""
    shards = map(shard_of, parameters)
    equal = [shard is None or (shard.dim is None and shard.comm is comm) for shard in shards]
    return [pair for pair, one in zip(zip(parameters, norms, strict=True), equal, strict=True) if one]


def _reduced(comm: Communicator, total: Tensor, replicated: list[tuple[Tensor, Tensor]], largest: bool) -> Tensor:
    """All-reduce `total`. The same all_reduce compares the norms of gradients that must be equal on all ranks."""
    each = torch.cat([total[:0], *(norm if one.grad is not None else norm - 1 for one, norm in replicated)])
    each = torch.where(each.isfinite(), each, -2.0)
    row = torch.cat([total, each, -each if largest else each * each])
    comm.all_reduce(row, row, op="max" if largest else "sum")
    if replicated and not (row.is_cuda and is_capturing(row.device)):
        parameters = [(id(one), list(one.shape)) for one, _ in replicated]  # on a GPU it is kept until the next call
        found = row[1:].view(2, -1)
        spread = found.sum(0) if largest else comm.size * (found[1] - found[0] ** 2 / comm.size).clamp(min=0).sqrt()
        size = found.abs().amax(0) if largest else found[0].abs()
        tolerances = torch.tensor([_TOLERANCES.get(one.dtype, 1e-2) for one, _ in replicated], dtype=torch.float64)
        wrong = spread > size * tolerances.to(row.device, non_blocking=True)
        state_of(comm, DeferredCheck)(wrong, partial(_check_equal, parameters))
    return row[:1]


# Allowed difference of norms relative to their mean. Kernels may sum, and so round, differently on each rank.
_TOLERANCES = {torch.float64: 1e-6, torch.complex128: 1e-6, torch.float32: 1e-4, torch.complex64: 1e-4}


def _check_equal(parameters: list[tuple[int, list[int]]], wrong: list[bool]) -> None:
    names = [_name_of(*one) for one, differs in zip(parameters, wrong, strict=True) if differs]
    if names:
        raise RuntimeError(
            f"clip_grad_norm_: the gradient of {names[0]} differs between the ranks, which all have this parameter"
            f"{f' (and {len(names) - 1} more)' if len(names) > 1 else ''}, so they would drift apart. Call "
            "finish_gradients(model) before; give all ranks the same batch, the same seed and one GradScaler of "
            "pynccl_autograd; declare a parameter that is this rank's own by set_shard"
        )


def _name_of(number: int, shape: list[int]) -> str:
    """Return the longest path to the parameter of this id from any module of the process. For errors: it looks at all
    objects, since the program passed parameters without their names."""
    modules = [one for one in gc.get_objects() if issubclass(type(one), nn.Module)]
    paths = [plain_name(one, path) for one in modules for path, there in one.named_parameters() if id(there) == number]
    return max(paths, key=len, default=f"a parameter of shape {shape}")


def _as_list(parameters: Any, name: str) -> list[Tensor]:
    if isinstance(parameters, nn.Module):
        return list(parameters.parameters())
    if isinstance(parameters, Tensor):
        return [parameters]
    found = ordered(parameters, f"{name}: parameters", "a torch.nn.Module or its parameters")
    for one in found:
        instance(one, Tensor, f"{name}: a parameter", "a torch.Tensor")
    return found
