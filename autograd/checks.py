"""`anchor`, which makes all ranks run the same backward passes, and the checks of PYNCCL_CHECK=1 that compare them.

The engine decides the order of a backward pass, so ranks with equal forward passes may still differ there, e.g. if one
rank does not use an output or takes a different branch. Each forward call on a communicator gets a number. It is the
same on all ranks because forward calls are compared too (pynccl/comm/consistency.py). Before an adjoint, the ranks
exchange number, operation and line, and compare the cotangents that must be equal.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pynccl import Communicator, NcclInvalidUsage
from pynccl.bindings.values import instance
from pynccl.comm.consistency import compare_rows, exchange
from pynccl.watch.frames import call_site

from .agreement import gathered
from .arguments import check_dense
from .state import state_of
from .torch_internals import dispatch_modes, has_no_values, plain_values, unwrapped

_PAIRWISE = ("permute", "halo_exchange", "halo_reduce")  # sends and receives: not every rank takes part
# Allowed difference of "replicated" cotangents relative to the largest one: ranks may sum, and so round, differently.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def anchor(loss: Tensor, *outputs: Tensor) -> Tensor:
    """Return the loss unchanged, but make its backward pass run the collectives behind `outputs` with zero gradients.

    Use it on a rank that computes an output without using it while other ranks use it: loss = ad.anchor(loss, y).
    Otherwise this rank skips the backward pass of that collective, and the other ranks hang in it.

    loss     the tensor that you call backward() on
    outputs  outputs of collectives; those that are neither floating-point nor complex are ignored. Their values do not
             matter and may be NaN or infinite

    It works for derivatives of any order: the zeros depend on all outputs of one call, as if the loss combined them. If
    the other ranks never combine some outputs, and differentiate the gradient of only one further, call anchor once per
    output.

    TypeError if an argument is not a dense tensor, or only some of them have values (others are meta or fake tensors).
    """
    for name, x in (("loss", loss), *(("output", out) for out in outputs)):
        instance(x, Tensor, f"anchor: {name}", "a dense torch.Tensor")
        if torch.compiler.is_compiling():
            continue
        check_dense("anchor", x, name)
        if has_no_values(x) != has_no_values(loss) and not dispatch_modes():
            raise TypeError(f"anchor: only one of {name} and loss is a meta or fake tensor, expected both or none")
    if not (loss.is_floating_point() or loss.is_complex()) or loss.dtype.itemsize == 1:  # float8 has no addition
        raise TypeError(
            f"anchor: loss is {loss.dtype}, expected a dtype with gradients and addition, e.g. torch.float32"
        )
    reached = [out for out in outputs if out.is_floating_point() or out.is_complex()]
    if not reached:
        return loss
    # torch.where, since NaN * 0 is NaN. expm1, since its derivatives depend on all outputs, unlike those of a sum.
    zeros = [torch.where(torch.zeros((), dtype=torch.bool, device=out.device), out, 0) for out in reached]
    zero = torch.stack([(z.real if z.is_complex() else z).sum(dtype=loss.dtype) for z in zeros]).sum()
    return loss + torch.expm1(zero)


class ForwardCall(NamedTuple):
    """A forward call of a collective."""

    number: int  # counts the forward calls on its communicator
    operation: str
    line: str

    def __str__(self) -> str:
        return f"{self.operation}, forward call no. {self.number}, at {self.line}"


class ForwardCalls:
    """Counts the forward calls of a communicator."""

    number = 0


def number_call(comm: Communicator, operation: str) -> ForwardCall:
    """Return the description of this forward call, with the next number of its communicator."""
    calls = state_of(comm, ForwardCalls)
    calls.number += 1
    return ForwardCall(calls.number, operation, call_site())


def compare_backward(comm: Communicator, call: ForwardCall, replicated: Tensor | None) -> None:
    """Check that all ranks are at the adjoint of the same call; else raise NcclInvalidUsage on every rank.

    replicated: the cotangent, which must be equal on all ranks; None under grad="sum"."""
    if call.operation not in _PAIRWISE:
        text = f"backward of {call.operation}, forward call no. {call.number}, made\0{call.line}"
        remedy = (
            "every rank must run the backward pass of every call, in the same order; on a rank that does not use an "
            "output, pass it to ad.anchor(loss, *outputs)"
        )
        compare_rows(exchange({comm: text})[comm], comm.rank, remedy, " in the backward pass")
    if replicated is not None and replicated.numel():
        with unwrapped():
            _compare_cotangents(comm, call, plain_values(replicated).detach())


def _compare_cotangents(comm: Communicator, call: ForwardCall, g: Tensor) -> None:
    mine = (torch.view_as_real(g.resolve_conj()) if g.is_complex() else g).to(torch.float64).contiguous()
    first = comm.broadcast(mine, torch.empty_like(mine), 0)
    tolerance = _TOLERANCES.get(g.dtype.to_real() if g.is_complex() else g.dtype, 5e-2)
    atol = tolerance * float(first.nan_to_num(0.0, 0.0, 0.0).abs().max())
    equal = torch.isclose(mine, first, rtol=0.0, atol=atol, equal_nan=True).flatten()
    at = int(equal.int().argmin())
    rows = gathered(comm, [not equal[at], at, float(mine.flatten()[at]), float(first.flatten()[at])], torch.float64)
    for rank, (differs, place, found, expected) in enumerate(rows):
        if differs:
            index = tuple(int(i) for i in torch.unravel_index(torch.tensor(int(place)), mine.shape))
            raise NcclInvalidUsage(
                f'{call}: grad="replicated", but the cotangents differ between ranks (PYNCCL_CHECK=1): at index '
                f"{index} rank 0 has {expected:.9g}, rank {rank} has {found:.9g}\n"
                "  every rank must do the same computation on this output; if ranks use it differently (own columns, "
                'own samples), pass grad="sum"'
            )
