"""Bucket: many parameters' gradients as one flat tensor, which travels at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..torch_internals import copy_all
from ..wire import Dtype
from .gradients import partial_over

ALIGNMENT = 64  # bytes: so that kernels may read a view of a flat tensor in their widest words

Named = tuple[str, nn.Parameter]


class Placed(NamedTuple):
    """Where a parameter lies in its bucket: elements start to stop."""

    name: str
    parameter: nn.Parameter
    start: int
    stop: int


class Bucket:
    """Gradients of some parameters of one type and device.

    flat    [n], n divisible by the number of ranks: the gradients, one after the other, then, if marked, one element a
            parameter that is not zero where it has a gradient. The average of those tells who has one on any rank.
    views   of it, each as its parameter
    """

    def __init__(self, parameters: Sequence[Named], ranks: int, marked: bool) -> None:
        first = parameters[0][1]
        step = max(1, ALIGNMENT // first.element_size())
        self.pieces: list[Placed] = []
        end = 0
        for name, parameter in parameters:
            self.pieces.append(Placed(name, parameter, end, end + parameter.numel()))
            end = _up_to(end + parameter.numel(), step)
        marks = len(self.pieces) if marked else 0
        self.flat = torch.zeros(_up_to(end + marks, step * ranks), dtype=first.dtype, device=first.device)
        self.marks = self.flat[end : end + marks]
        self.views = self.views_of(self.flat)

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Of a tensor like `flat`: for each parameter its part, in its shape and, where that is dense, its strides."""
        return [_like(flat[piece.start : piece.stop], piece.parameter) for piece in self.pieces]

    def fill(self) -> None:
        """The gradients into `flat`, but for those that are its views; zeros of what has none."""
        grads = [piece.parameter.grad for piece in self.pieces]
        there: list[tuple[Tensor, Tensor]] = []
        for view, grad in zip(self.views, grads, strict=True):
            if grad is None:
                view.zero_()
            elif not is_view(grad, view):
                there.append((view, grad))
        if there:
            copy_all([view for view, _ in there], [grad for _, grad in there])
        if len(self.marks):
            self.marks.fill_(1)
            for mark, grad in zip(self.marks, grads, strict=True):
                if grad is None:  # written there: a copy from the CPU waits for the GPU, and breaks a capture
                    mark.zero_()

    def let_go(self) -> None:
        """No gradient is a view of `flat` any more."""
        for piece, view in zip(self.pieces, self.views, strict=True):
            if piece.parameter.grad is not None and is_view(piece.parameter.grad, view):
                piece.parameter.grad = None

    def spread(self, as_views: bool) -> None:
        """What is in `flat` to the gradients: also of those that have one on another rank alone."""
        lacking = any(piece.parameter.grad is None for piece in self.pieces)
        has = (self.marks != 0).tolist() if lacking else [True] * len(self.pieces)  # reading them waits for the GPU
        to: list[Tensor] = []
        values: list[Tensor] = []
        for piece, view, somewhere in zip(self.pieces, self.views, has, strict=True):
            grad = piece.parameter.grad
            if not somewhere or (grad is not None and is_view(grad, view)):
                continue
            if as_views:
                piece.parameter.grad = view
            elif grad is None:
                piece.parameter.grad = view.clone()
            else:
                to.append(grad)
                values.append(view)
        if to:
            copy_all(to, values)


def cut_into_buckets(parameters: Iterable[Named], nbytes: float, partial_apart: bool = False) -> list[list[Named]]:
    """The parameters in reverse order, about that in which a backward pass has their gradients: of one type each.

    A bucket is full with `nbytes`, or with an eighth of all if that is less: while the last one travels nothing is left
    to hide it, and what travels first cannot begin before it is full. But not with less than nbytes / 16.
    partial_apart: those with partial gradients share buckets with others of the same communicator alone, whose ranks
    have the same then, however unequally they have the rest.
    """
    groups: dict[tuple[torch.dtype, int | None], list[tuple[int, Named]]] = {}
    for place, (name, parameter) in enumerate(reversed(list(parameters))):
        over = partial_over(parameter) if partial_apart else None
        group = groups.setdefault((parameter.dtype, None if over is None else id(over)), [])
        group.append((place, (name, parameter)))
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


def _up_to(count: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-count // step) * step
