"""Send and receive buffers: contiguous memory, in a dtype that NCCL supports, for tensors of any kind.

A dtype that NCCL supports is sent as it is, complex numbers as pairs of real numbers, and all others (bool, int16,
other float8) as bytes, which works for collectives that only copy. Sums may be sent in a different dtype,
`reduce_dtype`.

If its memory layout allows, the result itself is the receive buffer. A result is never a view, not even of a temporary:
autograd forbids in-place changes of an output of a custom Function that is a view.

Each collective returns a `Prepared`: a function that launches it on any stream, and one that makes the result.
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

NCCL_DTYPES = frozenset(getattr(torch, element.name) for element in ELEMENTS)
# Complex dtype -> dtype of its real part. A table, since torch.compile does not support dtype.to_real().
REAL_OF = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
# Integer dtype that torch cannot add -> the signed dtype of the same width.
SAME_BITS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_SUMMABLE = {torch.int16, torch.uint16, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}


class Prepared(NamedTuple):
    """A collective, ready to launch: launch(stream) enqueues it (None: the current stream), then result() returns the
    output.

    The two functions hold references to all buffers. If you launch on a side stream, keep this object until the current
    stream has waited for it. result() without a launch returns a tensor of the right shape and strides, for tracing.
    """

    launch: Callable[[Any], object]
    result: Callable[[], Tensor]


class RecvBuffer(NamedTuple):
    """A contiguous receive buffer. `result` makes the output from it after the communication."""

    recv: Tensor
    result: Callable[[], Tensor]


def _no_launch(stream: Any) -> None:
    """The `launch` of a `Prepared` without communication."""


def local_result(result: Callable[[], Tensor]) -> Prepared:
    """Return a `Prepared` without communication."""
    return Prepared(_no_launch, result)


def wire_elements(dtype: torch.dtype) -> int:
    """Return the number of sent elements per element of a tensor of this dtype, in a collective that copies."""
    if dtype in NCCL_DTYPES:
        return 1
    return 2 if is_paired(dtype) else dtype.itemsize


def is_paired(dtype: torch.dtype) -> bool:
    return dtype in REAL_OF


def is_addable(dtype: torch.dtype) -> bool:
    """Return whether `sum_tensors` supports this dtype. bool is excluded: its sum would be a logical or."""
    return dtype is not torch.bool and (dtype in NCCL_DTYPES or dtype.is_complex or dtype in _SUMMABLE)


def to_wire(x: Tensor, dtype: Dtype = None) -> Tensor:
    """Return x as contiguous memory in a dtype that NCCL supports: that of x, or `dtype`. The result has the shape of x
    only if it has the dtype of x."""
    if x.is_neg() or is_zero_tensor(x):
        x = materialize(x)
    if x.dtype in NCCL_DTYPES:
        return x.contiguous() if dtype is None or dtype is x.dtype else x.to(dtype).contiguous()
    if dtype is None:
        return _view_as_wire_dtype(x.resolve_conj().contiguous())
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).to(dtype).contiguous()


def materialize(x: Tensor) -> Tensor:
    """Return x with its values in memory: without a lazy negation bit, and not a zero tensor without storage."""
    return x.new_zeros(x.shape) if is_zero_tensor(x) else x.resolve_neg()


def recv_buffer(like: Tensor, shape: Sequence[int], dim: int = 0, dtype: Dtype = None) -> RecvBuffer:
    """Return a buffer for a result of `shape` in the dtype of `like`, whose slices along `dim` arrive one after
    another.

    dtype  dtype in which the data arrives; None: that of `like`"""
    if dtype is not None and dtype is not like.dtype:
        return _converting_recv_buffer(like, shape, dim, dtype)
    out = like.new_empty(tuple(shape))
    if slices_are_contiguous(shape, dim):
        return RecvBuffer(_view_as_wire_dtype(out), lambda: out)
    front = like.new_empty((shape[dim], *shape[:dim], *shape[dim + 1 :]))

    def result() -> Tensor:
        out.movedim(dim, 0).copy_(front)
        return out

    return RecvBuffer(_view_as_wire_dtype(front), result)


def slices_are_contiguous(shape: Sequence[int], dim: int) -> bool:
    """Return whether the slices along `dim` are consecutive in contiguous memory."""
    return all(type(size) is int and size == 1 for size in shape[:dim])  # no guards on symbolic sizes


def recv_buffer_like(x: Tensor, send: Tensor, dtype: Dtype = None) -> tuple[Tensor, Callable[[], Tensor]]:
    """Return (recv, result) as `recv_buffer` does, for a result of the shape of x; fast if no conversion is needed."""
    if send.dtype is x.dtype:  # then send has its shape too
        recv = torch.empty_like(send)
        return recv, lambda: recv
    return recv_buffer(x, x.shape, dtype=dtype)


def _converting_recv_buffer(like: Tensor, shape: Sequence[int], dim: int, dtype: torch.dtype) -> RecvBuffer:
    paired = like.is_complex()
    front = (shape[dim], *shape[:dim], *shape[dim + 1 :]) if shape else ()
    recv = like.new_empty((*front, 2) if paired else front, dtype=dtype)

    def result() -> Tensor:
        out = like.new_empty(tuple(shape))
        values = torch.view_as_real(out) if paired else out
        (values.movedim(dim, 0) if shape else values).copy_(recv)
        return out

    return RecvBuffer(recv, result)


def _view_as_wire_dtype(x: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as elements of a dtype that NCCL supports."""
    if x.dtype in NCCL_DTYPES:
        return x
    if is_paired(x.dtype):
        return torch.view_as_real(x)
    return x.reshape(-1).view(torch.uint8)


def contiguous_copy(x: Tensor) -> Tensor:
    """Return a contiguous copy of x."""
    return materialize(x).clone(memory_format=torch.contiguous_format)


def sum_tensors(parts: Sequence[Tensor]) -> Tensor:
    """Sum contiguous tensors of one shape and dtype, including dtypes that torch cannot add. Returns a new tensor, or
    the input itself if there is only one."""
    first, *others = parts
    dtype = first.dtype
    if not others:
        return first
    if same := SAME_BITS.get(dtype):  # two's complement: signed and unsigned sums have the same bits
        total = sum_tensors([part.reshape(-1).view(same) for part in parts])
        return first.new_empty(first.shape).copy_(total.view(dtype).view(first.shape))
    wide = torch.float32 if dtype.is_floating_point and dtype.itemsize == 1 else dtype
    total = first.to(wide)
    for part in others:
        total = total + part.to(wide)
    return total.to(dtype)


def resized_shape(x: Tensor, dim: int, rows: int) -> tuple[int, ...]:
    """Return the shape of x with size `rows` along `dim`."""
    return (*x.shape[:dim], rows, *x.shape[dim + 1 :])


def counts(x: Tensor, dim: int, rows: Sequence[int], per_element: int | None = None) -> list[int]:
    """Return the number of sent elements in each number of rows of x along `dim`."""
    width = torch.Size([*x.shape[:dim], *x.shape[dim + 1 :]]).numel()
    width *= wire_elements(x.dtype) if per_element is None else per_element
    return [size * width for size in rows]


def send_to(comm: Communicator, part: Tensor, peer: int, stream: Any) -> None:
    """Send a tensor unless it is empty. `recv_from` skips empty tensors too."""
    if part.numel():
        comm.send(part, peer, stream=stream)


def recv_from(comm: Communicator, part: Tensor, peer: int, stream: Any) -> None:
    if part.numel():
        comm.recv(part, peer, stream=stream)
