"""Bucket: the gradients of several parameters in one flat tensor, which one all_reduce averages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from ..torch_internals import copy_all
from ..wire import Dtype

ALIGNMENT = 64  # bytes, so that kernels can use their widest loads on a view of a flat tensor

Named = tuple[str, nn.Parameter]


class Bucket:
    """Gradients of parameters of one dtype and device.

    flat      [n]: the gradients, one after the other, then `has_grad`
    has_grad  view of `flat` with one element per parameter: nonzero if it has a gradient. After the all_reduce, it is
              nonzero if the parameter has a gradient on any rank
    views     views of `flat`, each with the shape of its parameter
    """

    def __init__(self, named: Sequence[Named]) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        first = self.parameters[0]
        step = max(1, ALIGNMENT // first.element_size())
        *starts, end = accumulate((-(-one.numel() // step) * step for one in self.parameters), initial=0)
        self.flat = torch.zeros(end + len(named), dtype=first.dtype, device=first.device)
        self.has_grad = self.flat[end:]
        self.views = [_view_like(self.flat[at:], one) for at, one in zip(starts, self.parameters, strict=True)]

    def pack(self) -> None:
        """Copy the gradients into `flat`, except those that are its views; write zeros where there is none."""
        grads = [parameter.grad for parameter in self.parameters]
        copies: list[tuple[Tensor, Tensor]] = []
        for view, grad in zip(self.views, grads, strict=True):
            if grad is None:
                view.zero_()
            elif not is_view(grad, view):
                copies.append((view, grad))
        if copies:
            copy_all([view for view, _ in copies], [grad for _, grad in copies])
        self.has_grad.fill_(1)
        for flag, grad in zip(self.has_grad, grads, strict=True):
            if grad is None:  # set on the device: a copy from the CPU would synchronize, and break a graph capture
                flag.zero_()

    def detach_views(self) -> None:
        """Set the gradients that are views of `flat` to None."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is not None and is_view(parameter.grad, view):
                parameter.grad = None

    def unpack(self, as_views: bool) -> None:
        """Copy `flat` back into the gradients, also of parameters that have one on other ranks only.

        as_views: make the gradients views of `flat` instead."""
        lacking = any(parameter.grad is None for parameter in self.parameters)
        on_any_rank = (self.has_grad != 0).tolist() if lacking else [True] * len(self.views)  # reading it synchronizes
        to: list[Tensor] = []
        values: list[Tensor] = []
        for parameter, view, has_grad in zip(self.parameters, self.views, on_any_rank, strict=True):
            grad = parameter.grad
            if not has_grad or (grad is not None and is_view(grad, view)):
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


def assign_buckets(parameters: Iterable[Named], nbytes: float) -> list[list[Named]]:
    """Assign the parameters to buckets of one dtype each, in reverse order, roughly that of their gradients.

    A bucket is full at `nbytes`, or at an eighth of all bytes if that is less (but at least nbytes / 16). With smaller
    buckets the first all_reduce starts earlier, and the last one, which nothing hides, is shorter.
    """
    groups: dict[torch.dtype, list[tuple[int, Named]]] = {}
    for place, (name, parameter) in enumerate(reversed(list(parameters))):
        groups.setdefault(parameter.dtype, []).append((place, (name, parameter)))
    closed: list[list[tuple[int, Named]]] = []
    for group in groups.values():
        total = sum(parameter.nbytes for _, (_, parameter) in group)
        full = min(nbytes, max(total / 8, nbytes / 16))
        held = full  # so that the first parameter opens a bucket
        for one in group:
            if held >= full:
                closed.append([])
                held = 0
            closed[-1].append(one)
            held += one[1][1].nbytes
    closed.sort(key=lambda bucket: bucket[-1][0])  # in the order in which they get full
    return [[named for _, named in bucket] for bucket in closed]


def wire_of(flat: Tensor, dtype: Dtype) -> Tensor:
    """Return `flat` as a real tensor of the dtype in which to reduce it: a view, if that is its own dtype."""
    real = as_real(flat)
    return real if dtype is None else real.to(dtype)


def as_real(flat: Tensor) -> Tensor:
    """Return a view of complex numbers as pairs of real ones; other tensors unchanged."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def is_view(grad: Tensor, view: Tensor) -> bool:
    """Return whether a gradient is this view of its bucket."""
    return grad.data_ptr() == view.data_ptr() and grad.stride() == view.stride()


def _view_like(flat: Tensor, parameter: Tensor) -> Tensor:
    """Return a view with the strides of torch.empty_like: those of the parameter, if its memory has no gaps."""
    return flat.as_strided(parameter.shape, torch.empty_like(parameter, device="meta").stride())
