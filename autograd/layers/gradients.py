"""Gradients of models that have parallel layers: finished where a rank has a part of them, and their norm."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pynccl import Communicator
from pynccl.bindings.values import shown

from ..streams import Kept, made_on, side_stream, wait_for
from ..torch_internals import backward_pass, queue_callback
from .dtensors import groups_that_cut, is_dtensor, local_part
from .shards import shard_of

averaged: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()  # by DataParallelGradients
_in_backward: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()


def finish_gradients(parameters: nn.Module | Iterable[Tensor], bucket_bytes: float = 64e6) -> None:
    """Sum the gradients that sequence parallelism has left partial, after backward(), before the optimizer's step.

    A few all_reduce of up to `bucket_bytes` each, whatever the number of parameters. Every rank must call it, once
    after the last backward pass of a step, with the same parameters. One whose gradient is None here and not on another
    rank is an error of the ranks' programs. What `finish_gradients_in_backward` has finished is left as it is.
    """
    buckets: dict[tuple[int, torch.dtype], list[_Bucket]] = {}
    for parameter in _listed(parameters, "finish_gradients"):
        comm, own = partial_over(parameter), local_part(parameter.grad)  # of a DTensor all ranks of comm have the same
        if comm is None or own is None or _in_backward.get(id(parameter)) is parameter:
            continue
        _check_dense("finish_gradients", parameter, own)
        found = buckets.setdefault((id(comm), own.dtype), [_Bucket(comm, [])])
        nbytes = sum(grad.nbytes for grad in found[-1].grads)
        if found[-1].grads and nbytes + own.nbytes > bucket_bytes:
            found.append(_Bucket(comm, []))
        found[-1].grads.append(own)
    for bucket in (one for found in buckets.values() for one in found):
        _sum(bucket)


class _Bucket(NamedTuple):
    comm: Communicator
    grads: list[Tensor]


@torch.no_grad()
def _sum(bucket: _Bucket) -> None:
    flat = torch.cat([grad.reshape(-1) for grad in bucket.grads])
    bucket.comm.all_reduce(flat, flat)
    for grad, total in zip(bucket.grads, flat.split([grad.numel() for grad in bucket.grads]), strict=True):
        grad.copy_(total.view_as(grad))


def finish_gradients_in_backward(
    parameters: nn.Module | Iterable[Tensor], bucket_bytes: float = 1e6
) -> FinishedInBackward:
    """From now on backward() itself sums the gradients that sequence parallelism leaves partial, beside its own work.

    They travel in buckets, on the communicator's side stream, as soon as there are `bucket_bytes` of them. When
    backward() returns .grad is whole, after one pass or several that add to it; `finish_gradients` then finds nothing
    to do. `remove()` of what is returned ends it.

    Every rank must call it, with the same parameters, those that require a gradient now. Not for what takes gradients
    before backward() returns: hooks of parameters, torch's DistributedDataParallel and fully_shard, optimizers that
    step in the backward pass; `DataParallelGradients` refuses it. RuntimeError for parameters that it was called for
    already, and in a backward pass with create_graph=True; TypeError there for a sparse gradient.
    """
    return FinishedInBackward(_listed(parameters, "finish_gradients_in_backward"), bucket_bytes)


class FinishedInBackward:
    """See `finish_gradients_in_backward`."""

    def __init__(self, parameters: list[Tensor], bucket_bytes: float) -> None:
        found = {id(one): one for one in parameters if one.requires_grad and partial_over(one) is not None}
        for one in found.values():
            if _in_backward.get(id(one)) is one:
                raise RuntimeError(
                    f"finish_gradients_in_backward: a parameter of {list(one.shape)} has it already; call it once for "
                    "a model, or remove() what the first call returned"
                )
            if averaged.get(id(one)) is one or is_dtensor(one):
                what = "fully_shard cuts" if is_dtensor(one) else "DataParallelGradients averages"
                raise RuntimeError(
                    f"finish_gradients_in_backward: {what} the gradient of a parameter of {list(one.shape)} in the "
                    "same backward pass; call finish_gradients after it"
                )
        self.bucket_bytes = bucket_bytes
        self._parameters = found
        self._passes: dict[int, tuple[weakref.ref[_Pass], list[_Travelling]]] = {}
        self._hooks: list[Any] = []
        for one in found.values():
            _in_backward[id(one)] = one
            self._hooks.append(one.register_hook(partial(self._comes, weakref.ref(one))))
            self._hooks.append(one.register_post_accumulate_grad_hook(self._added))

    def remove(self) -> None:
        """Leave the parameters alone from now on. Twice is harmless."""
        while self._hooks:
            self._hooks.pop().remove()
        for key, one in self._parameters.items():
            if _in_backward.get(key) is one:
                del _in_backward[key]
        self._parameters = {}

    def _comes(self, parameter_of: weakref.ref[Tensor], grad: Tensor) -> None:
        """Before a gradient of this pass is added to .grad."""
        parameter = parameter_of()
        comm = None if parameter is None else partial_over(parameter)
        if parameter is None or comm is None:
            return
        _check_dense("finish_gradients_in_backward", parameter, grad)
        if torch.is_grad_enabled():
            raise RuntimeError(
                "finish_gradients_in_backward: not with create_graph=True; remove() it, and call finish_gradients"
            )
        for under_way, launched in list(self._passes.values()):
            one = under_way()
            if one is None:  # an error has ended it: the other ranks take part in what it launched, too
                _wait(launched)
            elif one.has(parameter):  # as where a checkpoint has a pass within the pass
                one.settle()
        self._passes = {number: pair for number, pair in self._passes.items() if pair[0]() is not None}
        number = backward_pass()
        of = self._passes[number][0]() if number in self._passes else None
        if of is None:
            of = _Pass(self.bucket_bytes)
            self._passes[number] = (weakref.ref(of), of.launched)
            queue_callback(of.settle)  # autograd has it, until the end of the pass
        of.add(comm, _Arrival(parameter, grad.detach(), parameter.grad))

    def _added(self, parameter: Tensor) -> None:
        for under_way, _ in self._passes.values():
            one = under_way()
            if one is not None:
                one.added(parameter)


class _Arrival:
    """A gradient of this pass."""

    def __init__(self, parameter: Tensor, part: Tensor, before: Tensor | None) -> None:
        self.parameter, self.part = parameter, part
        self.before = None if before is None else before.detach().clone()  # what is there of passes before
        self.added = False  # to parameter.grad, which torch.autograd.grad() does not


class _Travelling(NamedTuple):
    comm: Communicator
    arrivals: list[_Arrival]
    flat: Tensor
    home: Any
    done: Any
    keep: Any


class _Pass:
    """A backward pass under way."""

    def __init__(self, bucket_bytes: float) -> None:
        self.bucket_bytes = bucket_bytes
        self.waiting: dict[tuple[int, torch.dtype], tuple[Communicator, list[_Arrival], dict[Any, None]]] = {}
        self.launched: list[_Travelling] = []

    def has(self, parameter: Tensor) -> bool:
        return any(arrival.parameter is parameter for arrival in self._all())

    def _all(self) -> list[_Arrival]:
        waiting = [arrival for _, arrivals, _ in self.waiting.values() for arrival in arrivals]
        return waiting + [arrival for one in self.launched for arrival in one.arrivals]

    def add(self, comm: Communicator, arrival: _Arrival) -> None:
        key = (id(comm), arrival.part.dtype)
        _, arrivals, streams = self.waiting.setdefault(key, (comm, [], {}))
        arrivals.append(arrival)
        streams[made_on(arrival.part)] = None
        if sum(one.part.nbytes for one in arrivals) >= self.bucket_bytes:
            self._launch(key)

    def added(self, parameter: Tensor) -> None:
        for arrival in self._all():
            if arrival.parameter is parameter:
                arrival.added = True

    @torch.no_grad()
    def _launch(self, key: tuple[int, torch.dtype]) -> None:
        comm, arrivals, streams = self.waiting.pop(key)
        wait_for(streams)
        flat = torch.cat([arrival.part.reshape(-1) for arrival in arrivals])
        side, keep = side_stream(comm), Kept()
        home = side.wait_for_caller()
        comm.all_reduce(flat, flat, stream=side.handle(keep))
        self.launched.append(_Travelling(comm, arrivals, flat, home, side.record(), keep))

    @torch.no_grad()
    def settle(self) -> None:
        """All that has arrived: to the end."""
        for key in list(self.waiting):
            self._launch(key)
        launched = self.launched[:]
        self.launched.clear()
        for one in launched:
            side = side_stream(one.comm)
            here = side.wait(one.done)
            totals = one.flat.split([arrival.part.numel() for arrival in one.arrivals])
            for arrival, total in zip(one.arrivals, totals, strict=True):
                grad = arrival.parameter.grad
                if arrival.added and grad is not None:
                    whole = total.view_as(arrival.part)
                    grad.copy_(whole if arrival.before is None else arrival.before + whole)
            side.release(one.home, here, None)


def _wait(launched: list[_Travelling]) -> None:
    for one in launched:
        side_stream(one.comm).wait(one.done)
    launched.clear()


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
    check_norm_type(norm_type)
    found = _listed(parameters, "clip_grad_norm_")
    grads = [local_part(parameter.grad) for parameter in found if parameter.grad is not None]
    device = grads[0].device if grads else torch.device("cpu")
    whole = torch.zeros((), dtype=torch.float64, device=device)
    largest = norm_type == math.inf
    cut: dict[tuple[int, ...], tuple[Communicator | None, tuple[Any, ...], Tensor]] = {}
    for parameter in found:
        shard, groups = shard_of(parameter), groups_that_cut(parameter)
        comm = None if shard is None or shard.dim is None else shard.comm
        if comm is None and not groups:
            whole = add_power(whole, local_part(parameter.grad), norm_type)
        else:  # also where it has no gradient here: the others may have one, and so come to the sum
            key = id(comm), *map(id, groups)
            *_, total = cut.get(key, (comm, groups, torch.zeros_like(whole)))
            cut[key] = (comm, groups, add_power(total, local_part(parameter.grad), norm_type))
    for comm, groups, total in cut.values():
        summed = total.reshape(1)
        for group in groups:
            dist.all_reduce(summed, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group)
        if comm is not None:
            comm.all_reduce(summed, summed, op="max" if largest else "sum")
        whole = torch.maximum(whole, summed[0]) if largest else whole + summed[0]
    norm = whole if largest else whole ** (1 / norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"clip_grad_norm_: the norm of the gradients is {norm.item()}, so they cannot be clipped")
    factor = clip_factor(norm, max_norm)
    for grad in grads:
        grad.mul_(factor.to(grad.device))
    double = any(grad.dtype in (torch.float64, torch.complex128) for grad in grads)
    return norm if double else norm.float()


def add_power(total: Tensor, grad: Tensor | None, norm_type: float) -> Tensor:
    """`total` plus the sum of the powers of the gradient's entries, or the larger one of it and their maximum."""
    if grad is None or not grad.numel():
        return total
    kind = torch.float32 if grad.dtype in (torch.float16, torch.bfloat16) else None
    norm = torch.linalg.vector_norm(grad, norm_type, dtype=kind).to(total)
    return torch.maximum(total, norm) if norm_type == math.inf else total + norm**norm_type


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """By which gradients of that norm are multiplied."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def check_norm_type(norm_type: Any) -> None:
    if not norm_type > 0:
        raise ValueError(f"clip_grad_norm_: norm_type is {shown(norm_type)}, expected a number above 0, or math.inf")


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
