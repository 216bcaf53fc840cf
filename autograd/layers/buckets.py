"""Bucket: many parameters' gradients as one flat tensor, which travels at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from ..torch_internals import copy_all
from ..wire import Dtype

ALIGNMENT = 64  # bytes: so that kernels may read a view of a flat tensor in their widest words

Named = tuple[str, nn.Parameter]


class Bucket:
    """Gradients of some parameters of one type and device.

    flat    [n]: the gradients, one after the other, then one element a parameter that is not zero where it has a
            gradient. The average of those tells who has one on any rank.
    views   of it, each as its parameter
    """

    def __init__(self, named: Sequence[Named]) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        first = self.parameters[0]
        step = max(1, ALIGNMENT // first.element_size())
        *starts, end = accumulate((-(-one.numel() // step) * step for one in self.parameters), initial=0)
        self.flat = torch.zeros(end + len(named), dtype=first.dtype, device=first.device)
        self.marks = self.flat[end:]
        self.views = [_like(self.flat[at:], one) for at, one in zip(starts, self.parameters, strict=True)]

    def fill(self) -> None:
        """The gradients into `flat`, but for those that are its views; zeros of what has none."""
        grads = [parameter.grad for parameter in self.parameters]
        there: list[tuple[Tensor, Tensor]] = []
        for view, grad in zip(self.views, grads, strict=True):
            if grad is None:
                view.zero_()
            elif not is_view(grad, view):
                there.append((view, grad))
        if there:
            copy_all([view for view, _ in there], [grad for _, grad in there])
        self.marks.fill_(1)
        for mark, grad in zip(self.marks, grads, strict=True):
            if grad is None:  # written there: a copy from the CPU waits for the GPU, and breaks a capture
                mark.zero_()

    def let_go(self) -> None:
        """No gradient is a view of `flat` any more."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is not None and is_view(parameter.grad, view):
                parameter.grad = None

    def spread(self, as_views: bool) -> None:
        """What is in `flat` to the gradients: also of those that have one on another rank alone."""
        lacking = any(parameter.grad is None for parameter in self.parameters)
        has = (self.marks != 0).tolist() if lacking else [True] * len(self.views)  # reading them waits for the GPU
        to: list[Tensor] = []
        values: list[Tensor] = []
        for parameter, view, somewhere in zip(self.parameters, self.views, has, strict=True):
            grad = parameter.grad
            if not somewhere or (grad is not None and is_view(grad, view)):
                continue
            if as_views:
                parameter.grad = view
            elif grad is None:
                parameter.grad = view.clone()
            else:
                to.append(grad)
                values.append(view)
        if to:
            copy_all(to, values)


def cut_into_buckets(parameters: Iterable[Named], nbytes: float) -> list[list[Named]]:
    """The parameters in reverse order, about that in which a backward pass has their gradients: of one type each.

    A bucket is full with `nbytes`, or with an eighth of all if that is less: while the last one travels nothing is left
    to hide it, and what travels first cannot begin before it is full. But not with less than nbytes / 16.
    """
    groups: dict[torch.dtype, list[tuple[int, Named]]] = {}
    for place, (name, parameter) in enumerate(reversed(list(parameters))):
        groups.setdefault(parameter.dtype, []).append((place, (name, parameter)))
    closed: list[list[tuple[int, Named]]] = []
    for group in groups.values():
        total = sum(parameter.nbytes for _, (_, parameter) in group)
        full = min(nbytes, max(total / 8, nbytes / 16))
        held = full  # so that a bucket is begun
        for one in group:
            if held >= full:
                closed.append([])
                held = 0
            closed[-1].append(one)
            held += one[1][1].nbytes
    closed.sort(key=lambda bucket: bucket[-1][0])  # as they get full
    return [[named for _, named in bucket] for bucket in closed]


def wire_of(flat: Tensor, dtype: Dtype) -> Tensor:
    """`flat` as NCCL takes it, in the type in which it is to be summed: its own memory, if that is its type."""
    real = as_real(flat)
    return real if dtype is None else real.to(dtype)


def as_real(flat: Tensor) -> Tensor:
    """Complex numbers as pairs, in the same memory."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def is_view(grad: Tensor, view: Tensor) -> bool:
    """Whether a gradient is that view of its bucket."""
    return grad.data_ptr() == view.data_ptr() and grad.stride() == view.stride()


def _like(part: Tensor, parameter: Tensor) -> Tensor:
    """A view with the strides of torch.empty_like: those of the parameter, if it lies in memory without gaps."""
    return part.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride())
