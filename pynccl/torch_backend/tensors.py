"""Convert torch.distributed's tensors to buffers of a communicator: any strides and data type, outside autograd.

Collectives of torch.distributed write tensors without bumping their version counters; DDP and FSDP rely on that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ..comm.communicator import Communicator
from ..comm.redop import PreMulSum
from ..interop.buffers import torch_types
from . import c10d

Copy = Callable[[], object]
_OPERATORS = {"SUM": "sum", "AVG": "avg", "PRODUCT": "prod", "MIN": "min", "MAX": "max"}
_COMPLEX_OPERATORS = {"SUM": "sum", "AVG": "avg"}
_BOOL_OPERATORS = {"SUM": "max", "MAX": "max", "PRODUCT": "min", "MIN": "min"}  # or, and


def source(x: torch.Tensor, reduces: bool = False) -> torch.Tensor:
    """Return a contiguous buffer with the values of x: its own memory if possible, else a copy."""
    if x.layout is not torch.strided:
        raise TypeError(f"a {x.layout} tensor of shape {tuple(x.shape)} cannot be sent; pass x.to_dense()")
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    return _elements(x.data.contiguous(), reduces)


def target(x: torch.Tensor, copies: list[Copy], reduces: bool = False, keep: bool = False) -> torch.Tensor:
    """Return a contiguous buffer to receive x into: its own memory, or a temporary one whose copy-back function is
    appended to `copies`.

    keep  fill the temporary buffer with x"""
    if x.layout is not torch.strided:
        raise TypeError(f"a {x.layout} tensor of shape {tuple(x.shape)} cannot be received into; pass a dense one")
    data = x.data
    if data.is_contiguous() and not (data.is_conj() or data.is_neg()):
        return _elements(data, reduces)
    buffer = torch.empty_like(data, memory_format=torch.contiguous_format)
    if keep:
        buffer.copy_(data)
    copies.append(partial(data.copy_, buffer))
    return _elements(buffer, reduces)


def concatenated(tensors: Sequence[torch.Tensor], reduces: bool = False) -> torch.Tensor:
    """Return one buffer that holds the tensors one after the other."""
    return source(torch.cat([x.data.reshape(-1) for x in tensors]), reduces)


def recv_buffer_of(tensors: Sequence[torch.Tensor], copies: list[Copy]) -> torch.Tensor:
    """Return one buffer to receive the tensors into, one after the other; append copy-back functions to `copies`."""
    counts = [x.numel() for x in tensors]
    buffer = tensors[0].data.new_empty(sum(counts))
    for x, part in zip(tensors, buffer.split(counts), strict=True):
        copies.append(partial(x.data.copy_, part.view(x.shape)))
    return _elements(buffer, False)


def copy_back(copies: Sequence[Copy]) -> Exception | None:
    """Make the copies, in any thread, even into inference tensors. Return the error if one fails."""
    try:
        if copies:
            with torch.inference_mode():
                for copy in copies:
                    copy()
    except Exception as error:
        return error
    return None


def _elements(x: torch.Tensor, reduces: bool) -> torch.Tensor:
    """View x with a data type that NCCL has: as bytes to move data, as a type with the same sum to reduce."""
    if reduces:
        if x.dtype == torch.bool:
            return x.view(torch.uint8)
        return torch.view_as_real(x) if x.is_complex() else x
    return x if x.dtype in torch_types or _has_data_type(x.dtype) else x.reshape(-1).view(torch.uint8)


def _has_data_type(dtype: torch.dtype) -> bool:
    try:
        return bool(torch_types[dtype] >= 0)
    except TypeError:
        return False


def operator(op: Any, x: torch.Tensor) -> str | Callable[[Communicator], PreMulSum]:
    """Return the communicator's name of a ReduceOp for tensors like x; for PREMUL_SUM, a factory of the operator."""
    name = c10d.OPERATOR_NAMES[hash(op)]
    if name == "PREMUL_SUM":
        factor, dtype = c10d.factor(op), x.dtype.to_real()
        if isinstance(factor, torch.Tensor):
            factor = factor.data.to(dtype)
        return lambda comm: comm.pre_mul_sum(factor, dtype)
    operators = _BOOL_OPERATORS if x.dtype == torch.bool else _COMPLEX_OPERATORS if x.is_complex() else _OPERATORS
    if name in operators:
        return operators[name]
    raise ValueError(
        f"ReduceOp.{name} of a {x.dtype} tensor: NCCL has no such reduction; expected one of {', '.join(operators)}"
        + ("; all_gather the tensors and combine them" if name.startswith("B") else "")
    )
