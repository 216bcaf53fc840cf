"""PYNCCL_CHECK=1 in the backward pass: do all ranks run the adjoint of the same call, and are cotangents equal?

The engine decides the order of a backward pass, so ranks whose forward passes agree may still disagree there: one has
an output unused, or a branch of its own. Each forward call on a communicator gets a number, the same on all ranks since
forward calls are compared too (pynccl/check.py); before an adjoint, the ranks exchange number, operation and line.
"""

from __future__ import annotations

import math
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from pynccl import Communicator, NcclInvalidUsage
from pynccl.comm.consistency import exchange
from pynccl.comm.frames import call_site

from .recompute import reentrant

_PAIRWISE = ("permute", "halo_exchange", "halo_reduce")  # sends and receives: not all ranks need join
# Largest difference of "replicated" cotangents, beside the largest of them: rounding in another order on each rank.
_SLACK = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class Site(NamedTuple):
    """A forward call."""

    number: int  # of the forward calls on its communicator
    operation: str
    line: str

    def __str__(self) -> str:
        return f"{self.operation}, forward call no. {self.number}, of {self.line}"


_calls: weakref.WeakKeyDictionary[Communicator, int] = weakref.WeakKeyDictionary()


def sign(comm: Communicator, operation: str) -> Site:
    """Number this forward call."""
    number = _calls[comm] = _calls.get(comm, 0) + 1
    site = Site(number, operation, call_site())
    if operation not in _PAIRWISE and (regions := reentrant()):
        _compare_regions(comm, site, regions)
    return site


def _compare_regions(comm: Communicator, site: Site, regions: list[bool]) -> None:
    """Raise NcclInvalidUsage on every rank if some would have no backward pass of a reentrant checkpoint."""
    rows = exchange({comm: f"{'no' if False in regions else 'a'} gradient ({regions})\0{site}"})[comm]
    needs = [row.partition(" ")[0] for row in rows]
    if len({row.partition("\0")[0] for row in rows}) > 1:
        without = [rank for rank, need in enumerate(needs) if need == "no"]
        raise NcclInvalidUsage(
            f"{site}: within a reentrant checkpoint whose inputs need a gradient on some ranks, and none on ranks "
            f"{without} (PYNCCL_CHECK=1), which would therefore have no backward pass of it while the others wait\n"
            "  pass use_reentrant=False to torch.utils.checkpoint, or inputs that require a gradient on every rank"
        )


def compare(comm: Communicator, site: Site, replicated: Tensor | None) -> None:
    """Raise NcclInvalidUsage on every rank unless all are at the adjoint of the same call.

    replicated: the cotangent that has to be equal on all ranks, None under the other convention."""
    if site.operation not in _PAIRWISE:
        rows = exchange({comm: f"backward of {site.operation}, forward call no. {site.number}\0{site.line}"})[comm]
        own = rows[comm.rank].partition("\0")
        for rank, row in enumerate(rows):
            other = row.partition("\0")
            if other[0] != own[0]:
                raise NcclInvalidUsage(
                    f"the ranks of this communicator disagree in the backward pass (PYNCCL_CHECK=1):\n"
                    f"  rank {comm.rank}: {own[0]}, made at {own[2]}\n"
                    f"  rank {rank}: {other[0]}, made at {other[2]}\n"
                    "  every rank must enter the backward of every call, in the same order; where an output is unused "
                    "on some rank, pass it to ad.anchor(loss, *outputs)"
                )
    if replicated is not None and replicated.numel():
        _compare_cotangents(comm, site, replicated.detach())


def _compare_cotangents(comm: Communicator, site: Site, g: Tensor) -> None:
    wire = (torch.view_as_real(g.resolve_conj()) if g.is_complex() else g).to(torch.float64).contiguous()
    # NaN and the infinities are equal to their like only. Numbered, since libraries differ in the maximum of NaN.
    kinds = wire.isnan() + 2.0 * wire.isposinf() + 3.0 * wire.isneginf()
    sent = torch.stack([wire.nan_to_num(0.0, 0.0, 0.0), kinds])
    highest, lowest = (comm.all_reduce(sent, torch.empty_like(sent), op) for op in ("max", "min"))
    scale = torch.maximum(highest[0].abs(), lowest[0].abs()).max()
    spread, other_kind = highest - lowest
    real = g.dtype.to_real() if g.is_complex() else g.dtype
    if bool((spread <= _SLACK.get(real, 5e-2) * scale).all()) and not bool(other_kind.any()):
        return
    at = int(torch.where(other_kind > 0, math.inf, spread).argmax())
    values = [float(v) for v in comm.all_gather(wire.flatten()[at : at + 1], wire.new_empty(comm.size))]
    first = values[0]
    other = max(range(comm.size), key=lambda rank: _distance(values[rank], first))
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), wire.shape))
    raise NcclInvalidUsage(
        f'{site}: grad="replicated", but the cotangents differ between ranks (PYNCCL_CHECK=1): at index {index} '
        f"rank 0 has {first:.9g}, rank {other} has {values[other]:.9g}\n"
        "  every rank must compute the same loss from this output; if the loss is the sum of the ranks' losses, pass "
        'grad="sum"'
    )


def _distance(value: float, other: float) -> float:
    """Infinite between NaN or an infinity and anything else, 0 between two of a kind."""
    if math.isfinite(value) and math.isfinite(other):
        return abs(value - other)
    return 0.0 if value == other or (math.isnan(value) and math.isnan(other)) else math.inf
