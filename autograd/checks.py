"""Do all ranks enter the same backward passes? `anchor` sees to it, and PYNCCL_CHECK=1 compares them.

The engine decides the order of a backward pass, so ranks whose forward passes agree may still disagree there: one has
an output unused, or a branch of its own. Each forward call on a communicator gets a number, the same on all ranks since
forward calls are compared too (pynccl/comm/consistency.py); before an adjoint, the ranks exchange number, operation and
line, and compare cotangents that must be equal.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from pynccl import Communicator, NcclInvalidUsage
from pynccl.comm.consistency import compare_rows, exchange
from pynccl.watch.frames import call_site

from .agreement import gathered

_PAIRWISE = ("permute", "halo_exchange", "halo_reduce")  # sends and receives: not all ranks need join
# Largest difference of "replicated" cotangents, beside the largest of them: rounding in another order on each rank.
_SLACK = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def anchor(loss: Tensor, *outputs: Tensor) -> Tensor:
    """The loss, whose backward pass also enters the collectives that made `outputs`, with a cotangent of 0.

    For what one rank computes and does not use while its peers do: loss = ad.anchor(loss, y). Outputs that need no
    gradient, integers for example, are ignored. The values of the outputs do not matter, NaN and infinities included.

    It holds for derivatives of any order: the zeros depend on all the outputs of the call, as if they met in one loss.
    Outputs that never meet on the other ranks belong to an anchor each, where the gradient of only one of them is
    differentiated further."""
    for role, x in (("loss", loss), *(("an output", out) for out in outputs)):
        if not isinstance(x, Tensor):
            raise TypeError(f"anchor: {role} is a {type(x).__name__}, expected a torch.Tensor")
    reached = [out for out in outputs if out.is_floating_point() or out.is_complex()]
    if not reached:
        return loss
    # Not multiplied by 0, because of NaN. The derivatives of expm1 depend on all outputs, those of a sum on none.
    zeros = [torch.where(torch.zeros((), dtype=torch.bool, device=out.device), out, 0).sum() for out in reached]
    zero = torch.stack([(z.real if z.is_complex() else z).to(loss.dtype) for z in zeros]).sum()
    return loss + torch.expm1(zero)


class ForwardCall(NamedTuple):
    """A forward call."""

    number: int  # of the forward calls on its communicator
    operation: str
    line: str

    def __str__(self) -> str:
        return f"{self.operation}, forward call no. {self.number}, of {self.line}"


_calls: weakref.WeakKeyDictionary[Communicator, int] = weakref.WeakKeyDictionary()


def number_call(comm: Communicator, operation: str) -> ForwardCall:
    """Number this forward call."""
    number = _calls[comm] = _calls.get(comm, 0) + 1
    return ForwardCall(number, operation, call_site())


def compare_backward(comm: Communicator, call: ForwardCall, replicated: Tensor | None) -> None:
    """Raise NcclInvalidUsage on every rank unless all are at the adjoint of the same call.

    replicated: the cotangent that has to be equal on all ranks, None under the other convention."""
    if call.operation not in _PAIRWISE:
        text = f"backward of {call.operation}, forward call no. {call.number}, made\0{call.line}"
        remedy = (
            "every rank must enter the backward of every call, in the same order; where an output is unused on some "
            "rank, pass it to ad.anchor(loss, *outputs)"
        )
        compare_rows(exchange({comm: text})[comm], comm.rank, remedy, " in the backward pass")
    if replicated is not None and replicated.numel():
        _compare_cotangents(comm, call, replicated.detach())


def _compare_cotangents(comm: Communicator, call: ForwardCall, g: Tensor) -> None:
    own = (torch.view_as_real(g.resolve_conj()) if g.is_complex() else g).to(torch.float64).contiguous()
    first = comm.broadcast(own, torch.empty_like(own), 0)
    slack = _SLACK.get(g.dtype.to_real() if g.is_complex() else g.dtype, 5e-2)
    atol = slack * float(first.nan_to_num(0.0, 0.0, 0.0).abs().max())
    equal = torch.isclose(own, first, rtol=0.0, atol=atol, equal_nan=True).flatten()
    at = int(equal.int().argmin())
    rows = gathered(comm, [not equal[at], at, float(own.flatten()[at]), float(first.flatten()[at])], torch.float64)
    for rank, (apart, place, found, expected) in enumerate(rows):
        if apart:
            index = tuple(int(i) for i in torch.unravel_index(torch.tensor(int(place)), own.shape))
            raise NcclInvalidUsage(
                f'{call}: grad="replicated", but the cotangents differ between ranks (PYNCCL_CHECK=1): at index '
                f"{index} rank 0 has {expected:.9g}, rank {rank} has {found:.9g}\n"
                "  every rank must do the same work on this output; if each goes on with its own (its columns, its "
                'samples), pass grad="sum"'
            )
