"""A linear layer with the collective before or after it: one slice is communicated while another is multiplied.

N ranks; x is [s, .., in] with the sequence in dimension 0, w is [out, in] as in F.linear; rows are all dimensions but
the last.

    all_gather_matmul        x [s/N, .., in]     -> y [s, .., out/N]    dx is reduce-scattered
    matmul_reduce_scatter    x [s, .., in/N]     -> y [s/N, .., out]    dy is all-gathered
    matmul_all_reduce        x [s, .., in/N]     -> y [s, .., out]      no communication
    copy_matmul              x [s, .., in] equal -> y [s, .., out/N]    dx is all-reduced
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, overload

import torch
from torch import Tensor

from pynccl import Communicator

from ..arguments import check_divisible, check_type
from ..wire import Dtype
from . import unfused
from .call import Call
from .handoff import Slices
from .keys import Overlap
from .linear import AllGatherMatmul, CopyMatmul, MatmulAllReduce, MatmulReduceScatter


@overload
def all_gather_matmul(
    x: Tensor, w: Tensor, comm: Communicator, bias: Tensor | None = None, *,
    overlap: Overlap = "auto", reduce_dtype: Dtype = None, grad_accumulation_fusion: bool = False, owner: Any = None,
) -> Tensor: ...  # fmt: skip
@overload
def all_gather_matmul(
    x: Tensor, w: Tensor, comm: Communicator, bias: Tensor | None = None, *, overlap: Overlap = "auto",
    reduce_dtype: Dtype = None, grad_accumulation_fusion: bool = False, return_gathered: Literal[True],
    owner: Any = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def all_gather_matmul(
    x: Tensor, w: Tensor, comm: Communicator, bias: Tensor | None = None, *, overlap: Overlap = "auto",
    reduce_dtype: Dtype = None, grad_accumulation_fusion: bool = False, return_gathered: bool = False,
    owner: Any = None,
) -> Any:  # fmt: skip
    """Return all_gather(x, dim 0) @ w.T + bias.   x [s/N, .., in], w [out, in], bias [out] -> [s, .., out]

    The backward pass reduce-scatters dx; dw and dbias are sums over all rows.

    overlap                   "auto": try the candidate schedules in the first calls, and keep the fastest, which may be
                              "off"; "off"; OverlapConfig(...); CommOverlap; a dict of TransformerEngine's keys
    reduce_dtype              data type of the sum in the backward reduce-scatter
    grad_accumulation_fusion  add dw to w.main_grad, and leave w.grad unchanged
    return_gathered           return (y, all_gather(x)), both differentiable
    owner                     the module that makes the call, as `overlap.report()` names it

    Raises ValueError or TypeError for wrong arguments, before this rank launches anything. If only one rank's arguments
    are wrong, the other ranks wait for it. Raises NcclInvalidUsage on all ranks if they compare their arguments, at new
    ones, and these differ.
    """
    if return_gathered is not False:
        check_type("all_gather_matmul: return_gathered", "bool", return_gathered)
    call = Call("all_gather_matmul", x, w, comm, bias, overlap, reduce_dtype, grad_accumulation_fusion, owner)
    tensors = call.schedule(x, bias)
    if tensors is None:
        return unfused.all_gather_matmul(call, x, bias, return_gathered)
    keeps = return_gathered or (call.config.save_gathered and torch.is_grad_enabled())
    y, *gathered = AllGatherMatmul.apply(*tensors, call, keeps)
    return (y, gathered[0]) if return_gathered else y


def matmul_reduce_scatter(
    x: Tensor, w: Tensor, comm: Communicator, bias: Tensor | None = None, *,
    overlap: Overlap = "auto", reduce_dtype: Dtype = None, grad_accumulation_fusion: bool = False, owner: Any = None,
) -> Tensor:  # fmt: skip
    """Return reduce_scatter(x @ w.T, dim 0) + bias.   x [s, .., in/N], w [out, in/N], bias [out] -> [s/N, .., out]

    The bias is added once, after the sum. The backward pass all-gathers dy; dbias is the sum over all ranks' rows.

    The options and errors are those of `all_gather_matmul`; reduce_dtype is that of the forward sum.
    """
    call = Call("matmul_reduce_scatter", x, w, comm, bias, overlap, reduce_dtype, grad_accumulation_fusion, owner)
    check_divisible(call.caller, x, 0, comm, "use another sequence length")
    tensors = call.schedule(x, bias)
    if tensors is None:
        return unfused.matmul_reduce_scatter(call, x, bias)
    y: Tensor = MatmulReduceScatter.apply(*tensors, call)
    return y


@overload
def matmul_all_reduce(
    x: Tensor, w: Tensor, comm: Communicator, bias: Tensor | None = None, *,
    overlap: Overlap = "auto", reduce_dtype: Dtype = None, grad_accumulation_fusion: bool = False, owner: Any = None,
) -> Tensor: ...  # fmt: skip
@overload
def matmul_all_reduce(
    x: Tensor, w: Tensor, comm: Communicator, bias: Tensor | None = None, *, overlap: Overlap = "auto",
    reduce_dtype: Dtype = None, grad_accumulation_fusion: bool = False, hand_off: Literal[True], owner: Any = None,
) -> Slices: ...  # fmt: skip
def matmul_all_reduce(
    x: Tensor, w: Tensor, comm: Communicator, bias: Tensor | None = None, *, overlap: Overlap = "auto",
    reduce_dtype: Dtype = None, grad_accumulation_fusion: bool = False, hand_off: bool = False, owner: Any = None,
) -> Any:  # fmt: skip
    """Return all_reduce(x @ w.T) + bias.   x [s, .., in/N], w [out, in/N], bias [out] -> [s, .., out]

    The backward pass communicates nothing: dy must be equal on all ranks, for example if all compute the same loss.

    hand_off    return `Slices` of the rows; each can be used as soon as it is available. x must be [s, in/N]. The
                default is 4 slices, without a race, which cannot time the caller's work on each slice

    The other options and the errors are those of `all_gather_matmul`; reduce_dtype is that of the forward sum.
    """
    call = Call("matmul_all_reduce", x, w, comm, bias, overlap, reduce_dtype, grad_accumulation_fusion, owner)
    check_type("matmul_all_reduce: hand_off", "bool", hand_off)
    if hand_off and x.dim() != 2:
        raise ValueError(
            f"matmul_all_reduce: hand_off=True expects x of shape [s, in/N], but x is {tuple(x.shape)}; flatten it"
        )
    config = call.config
    if hand_off and config.method in ("auto", "slices", "exchange"):
        method = "exchange" if config.deterministic else "slices" if config.method == "auto" else config.method
        call.config = replace(config, method=method, chunks=config.chunks or 4)
    slices = Slices() if hand_off else None
    tensors = call.schedule(x, bias)
    if tensors is None:
        y = (unfused.matmul_all_reduce(call, x, bias),)
    else:
        y = MatmulAllReduce.apply(*tensors, call, slices)
    return y[0] if slices is None else slices._filled(y)


def copy_matmul(
    x: Tensor, w: Tensor, comm: Communicator, bias: Tensor | None = None, *,
    overlap: Overlap = "auto", reduce_dtype: Dtype = None, grad_accumulation_fusion: bool = False, owner: Any = None,
) -> Tensor:  # fmt: skip
    """Return x @ w.T + bias for a replicated x.   x [s, .., in], w [out/N, in] -> [s, .., out/N]

    The backward pass all-reduces dx; dw and dbias are those of this rank's shard.

    The options and errors are those of `all_gather_matmul`; reduce_dtype is that of dx's sum.
    """
    call = Call("copy_matmul", x, w, comm, bias, overlap, reduce_dtype, grad_accumulation_fusion, owner)
    tensors = call.schedule(x, bias)
    if tensors is None:
        return unfused.copy_matmul(call, x, bias)
    y: Tensor = CopyMatmul.apply(*tensors, call)
    return y
