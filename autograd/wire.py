"""What travels: tensors of any kind as contiguous memory of a type that NCCL has, and memory for what arrives.

A type that NCCL has travels as itself; complex numbers as pairs of reals; every other one (bool, int16, other float8)
as bytes, which serves all that only copies. Sums, too, may travel in a type of their own, `reduce_dtype`.

What arrives is received into the result itself, where its rows lie as they arrive. A result is never a view of another
tensor, not even of one that nobody else has: autograd forbids to change such an output of a custom Function in place.

`Prepared` is what each collective makes of these: contiguous buffers, to be launched on any stream, and the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pynccl import Communicator
from pynccl.bindings.abi import ELEMENTS

from .torch_internals import is_zero_tensor

Splits = Sequence[int] | None
Dtype = torch.dtype | None

CARRIED = frozenset(getattr(torch, element.name) for element in ELEMENTS)
# Types that travel as pairs, and of what. A table, since torch.compile does not know dtype.to_real().
REAL_OF = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
# Integers that torch cannot add, and those of the same bits.
SAME_BITS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_ADDED = {torch.int16, torch.uint16, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}


class Prepared(NamedTuple):
    """A collective, ready: launch(stream) enqueues it (None: on the current stream); result() then makes the output.

    The two hold references to all buffers, so whoever launches on a side stream keeps this until the current stream has
    waited for it. result() alone gives a tensor of the right shape and strides, which is what tracing needs.
    """

    launch: Callable[[Any], object]
    result: Callable[[], Tensor]


class RecvBuffer(NamedTuple):
    """Memory to receive into, contiguous; `result` makes the output of it once all has arrived."""

    recv: Tensor
    result: Callable[[], Tensor]


def nothing(stream: Any) -> None:
    """The `launch` of what needs no communication."""


def local(result: Callable[[], Tensor]) -> Prepared:
    """What needs no communication."""
    return Prepared(nothing, result)


def units(dtype: torch.dtype) -> int:
    """How many elements of the wire one element of a tensor that is copied takes."""
    if dtype in CARRIED:
        return 1
    return 2 if is_paired(dtype) else dtype.itemsize


def is_paired(dtype: torch.dtype) -> bool:
    return dtype in REAL_OF


def is_addable(dtype: torch.dtype) -> bool:
    """Whether `added` has a sum of this type. That of bool would be another thing than a sum."""
    return dtype is not torch.bool and (dtype in CARRIED or dtype.is_complex or dtype in _ADDED)


def to_wire(x: Tensor, dtype: Dtype = None) -> Tensor:
    """Contiguous memory of a type that NCCL has: the tensor's own, or `dtype`. The shape is that of x only if both
    have one type."""
    if x.is_neg() or is_zero_tensor(x):
        x = real_memory(x)
    if x.dtype in CARRIED:
        return x.contiguous() if dtype is None or dtype is x.dtype else x.to(dtype).contiguous()
    if dtype is None:
        return _bits(x.resolve_conj().contiguous())
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).to(dtype).contiguous()


def real_memory(x: Tensor) -> Tensor:
    """x with memory that holds its values: no lazy minus sign, no zeros that take no memory."""
    return x.new_zeros(x.shape) if is_zero_tensor(x) else x.resolve_neg()


def recv_buffer(like: Tensor, shape: Sequence[int], dim: int = 0, dtype: Dtype = None) -> RecvBuffer:
    """For a result of `shape` in the type of `like`, whose slices along `dim` arrive one after the other.

    dtype  in which it arrives, if not its own"""
    if dtype is not None and dtype is not like.dtype:
        return _converting(like, shape, dim, dtype)
    out = like.new_empty(tuple(shape))
    if slices_are_contiguous(shape, dim):
        return RecvBuffer(_bits(out), lambda: out)
    front = like.new_empty((shape[dim], *shape[:dim], *shape[dim + 1 :]))

    def result() -> Tensor:
        out.movedim(dim, 0).copy_(front)
        return out

    return RecvBuffer(_bits(front), result)


def slices_are_contiguous(shape: Sequence[int], dim: int) -> bool:
    """Whether slices along `dim` lie one after the other in contiguous memory."""
    return all(type(size) is int and size == 1 for size in shape[:dim])  # what is symbolic is not asked


def recv_buffer_like(x: Tensor, send: Tensor, dtype: Dtype = None) -> tuple[Tensor, Callable[[], Tensor]]:
    """`recv_buffer` for a result of the shape of x; the shortest way where nothing is to be converted."""
    if send.dtype is x.dtype:  # then send has its shape too
        recv = torch.empty_like(send)
        return recv, lambda: recv
    return recv_buffer(x, x.shape, dtype=dtype)


def _converting(like: Tensor, shape: Sequence[int], dim: int, dtype: torch.dtype) -> RecvBuffer:
    paired = like.is_complex()
    front = (shape[dim], *shape[:dim], *shape[dim + 1 :]) if shape else ()
    recv = like.new_empty((*front, 2) if paired else front, dtype=dtype)

    def result() -> Tensor:
        out = like.new_empty(tuple(shape))
        values = torch.view_as_real(out) if paired else out
        (values.movedim(dim, 0) if shape else values).copy_(recv)
        return out

    return RecvBuffer(recv, result)


def _bits(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor as elements that NCCL has."""
    if x.dtype in CARRIED:
        return x
    if is_paired(x.dtype):
        return torch.view_as_real(x)
    return x.reshape(-1).view(torch.uint8)


def own(x: Tensor) -> Tensor:
    """A contiguous copy."""
    return real_memory(x).clone(memory_format=torch.contiguous_format)


def added(parts: Sequence[Tensor]) -> Tensor:
    """The sum of contiguous tensors of one shape and type, also of a type that torch cannot add: a new tensor, or the
    only one."""
    first, *others = parts
    dtype = first.dtype
    if not others:
        return first
    if same := SAME_BITS.get(dtype):  # two's complement: signed and unsigned sums have the same bits
        total = added([part.reshape(-1).view(same) for part in parts])
        return first.new_empty(first.shape).copy_(total.view(dtype).view(first.shape))
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize == 1 else dtype
    total = first.to(wide)
    for part in others:
        total = total + part.to(wide)
    return total.to(dtype)


def resized(x: Tensor, dim: int, rows: int) -> tuple[int, ...]:
    """The shape of x with so many rows along `dim`."""
    return (*x.shape[:dim], rows, *x.shape[dim + 1 :])


def counts(x: Tensor, dim: int, rows: Sequence[int], per_element: int | None = None) -> list[int]:
    """Elements of the wire in so many rows of x along `dim`."""
    width = torch.Size([*x.shape[:dim], *x.shape[dim + 1 :]]).numel()
    width *= units(x.dtype) if per_element is None else per_element
    return [size * width for size in rows]


def send_to(comm: Communicator, part: Tensor, peer: int, stream: Any) -> None:
    """Send what is not empty; so does `recv_from`."""
    if part.numel():
        comm.send(part, peer, stream=stream)


def recv_from(comm: Communicator, part: Tensor, peer: int, stream: Any) -> None:
    if part.numel():
        comm.recv(part, peer, stream=stream)
