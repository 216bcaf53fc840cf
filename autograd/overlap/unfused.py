"""A matmul beside its collective, one after the other: what the overlapped ways have to equal.

N ranks; x is [s, .., in] with the sequence in dimension 0, w is [out, in] as in F.linear.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pynccl import Communicator

from ..arguments import check_call
from ..ops.all_gather import all_gather, reduce_scatter
from ..ops.all_reduce import all_reduce


def all_gather_matmul(x: Tensor, w: Tensor, comm: Communicator, bias: Tensor | None = None) -> Tensor:
    """all_gather(x, dim 0) @ w.T + bias.   x [s/N, .., in], w [out, in] -> [s, .., out];  dx is reduce-scattered."""
    check_input("all_gather_matmul", x, w, comm)
    return F.linear(all_gather(x, comm, 0, grad="sum"), w, bias)


def matmul_reduce_scatter(x: Tensor, w: Tensor, comm: Communicator) -> Tensor:
    """reduce_scatter(x @ w.T, dim 0).   x [s, .., in/N], w [out, in/N] -> [s/N, .., out];  dy is all-gathered."""
    check_input("matmul_reduce_scatter", x, w, comm)
    return reduce_scatter(F.linear(x, w), comm, 0)


def matmul_all_reduce(x: Tensor, w: Tensor, comm: Communicator) -> Tensor:
    """all_reduce(x @ w.T).   x [s, .., in/N], w [out, in/N] -> [s, .., out];  dy must be equal on all ranks."""
    check_input("matmul_all_reduce", x, w, comm)
    return all_reduce(F.linear(x, w), comm, grad="replicated")


def check_input(operation: str, x: Tensor, w: Tensor, comm: Communicator) -> None:
    """That x can travel over comm and be multiplied with w, of which torch would say so in words of its own."""
    check_call(operation, x, comm)
    if torch.compiler.is_compiling():
        return
    if not x.dim() or x.shape[-1] != w.shape[1]:
        raise ValueError(
            f"{operation}: x has shape {tuple(x.shape)}, expected [.., {w.shape[1]}], as many features as the weight "
            f"{tuple(w.shape)} takes on this rank"
        )
    if x.dtype is not w.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(
            f"{operation}: x is {x.dtype}, the weight {w.dtype}; pass x.to({w.dtype}), or use torch.autocast"
        )
    if x.device != w.device:
        raise ValueError(f"{operation}: x is on {x.device}, the weight on {w.device}; move one of them")
