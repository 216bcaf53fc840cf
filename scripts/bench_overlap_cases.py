"""The passes of linear layers whose overlap is measured: tensors of one rank, a step of each, what it has to move."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd import OverlapConfig
from pynccl_autograd.overlap import passes, plan
from pynccl_autograd.overlap.calibration import machine_of
from pynccl_autograd.overlap.machine import dtype_name

Step = Callable[[], Any]


class Shape(NamedTuple):
    """Of a layer: tokens of all ranks, width of the residual stream, hidden features of all ranks."""

    tokens: int
    width: int
    hidden: int
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Case:
    """One pass of a layer.

    pattern     as the planner calls it
    layer       function whose forward or backward pass it is
    operations  collectives, each of a full tensor of [tokens, width]
    matmuls     each as large as the forward one
    """

    name: str
    pattern: str
    layer: str
    operations: tuple[str, ...]
    matmuls: int = 1
    save_gathered: bool = True

    @property
    def backward(self) -> bool:
        return self.pattern.endswith("_backward")

    @property
    def column(self) -> bool:
        """Cut by its outputs; else by its inputs."""
        return self.layer in ("all_gather_matmul", "copy_matmul")

    def config(self, method: str, chunks: int | None = None) -> OverlapConfig:
        return OverlapConfig(method, chunks=chunks, save_gathered=self.save_gathered)

    def sizes(self, shape: Shape, ranks: int) -> tuple[int, int, int]:
        """(m, n, k) of this rank's forward matmul, as the planner has them."""
        inner = shape.hidden // ranks
        return (shape.tokens, inner, shape.width) if self.column else (shape.tokens, shape.width, inner)

    def wire(self, shape: Shape, ranks: int) -> tuple[int, float]:
        """(steps, bytes on the wire) of a rank."""
        times = sum(2 if name == "all_reduce" else 1 for name in self.operations)
        nbytes = shape.tokens * shape.width * shape.dtype.itemsize
        return times * (ranks - 1), times * (ranks - 1) / ranks * nbytes

    def flop(self, shape: Shape, ranks: int) -> float:
        m, n, k = self.sizes(shape, ranks)
        return 2.0 * m * n * k * self.matmuls


_GATHER, _SCATTER, _REDUCE = "all_gather", "reduce_scatter", "all_reduce"
CASES = (
    Case("all_gather_matmul", "all_gather_matmul", "all_gather_matmul", (_GATHER,)),
    Case("matmul_reduce_scatter", "matmul_reduce_scatter", "matmul_reduce_scatter", (_SCATTER,)),
    Case("matmul_all_reduce", "matmul_all_reduce", "matmul_all_reduce", (_REDUCE,)),
    Case("column_backward", "column_backward", "all_gather_matmul", (_SCATTER,), 2),
    Case("column_backward_regather", "column_backward", "all_gather_matmul", (_GATHER, _SCATTER), 2, False),
    Case("row_backward", "row_backward", "matmul_reduce_scatter", (_GATHER,), 2),
    Case("copy_backward", "copy_backward", "copy_matmul", (_REDUCE,), 2),
)
BY_NAME = {case.name: case for case in CASES}


class Tensors(NamedTuple):
    """Of one rank. x and w [out, in] want gradients, gy is that of the output."""

    x: Tensor
    w: Tensor
    gy: Tensor


def tensors_of(case: Case, shape: Shape, rank: int, ranks: int, device: torch.device) -> Tensors:
    """Random numbers, of variance such that results are of the order of 1; where ranks share a tensor, the same."""
    m, n, k = case.sizes(shape, ranks)
    cut_rows = m // ranks
    rows_in = cut_rows if case.layer == "all_gather_matmul" else m
    rows_out = cut_rows if case.layer == "matmul_reduce_scatter" else m
    shared = case.layer == "copy_matmul"
    made = torch.Generator().manual_seed(0 if shared else 1 + rank)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size, generator=made) * scale).to(device, shape.dtype)

    x = normal(rows_in, k)
    made.manual_seed(100 + rank)
    w, gy = normal(n, k, scale=k**-0.5), normal(rows_out, n)
    return Tensors(x.requires_grad_(), w.requires_grad_(), gy)


def step_of(case: Case, tensors: Tensors, comm: Communicator, config: OverlapConfig) -> Step:
    """The pass, once: returns its results. Of a backward pass the forward one is done here, untimed."""
    layer = getattr(ad, case.layer)
    x, w, gy = tensors
    if not case.backward:
        return lambda: (layer(x, w, comm, overlap=config).detach(),)
    y = layer(x, w, comm, overlap=config)
    return lambda: torch.autograd.grad(y, (x, w), gy, retain_graph=True)


def decision_of(case: Case, shape: Shape, comm: Communicator, config: OverlapConfig) -> dict[str, Any]:
    """What a layer decides for this pass, and what the planner predicts of it, as far as it says so. A collective."""
    m, n, k = case.sizes(shape, comm.size)
    found = vars(passes)["decide"](comm, case.pattern, m, n, k, shape.dtype, config)
    said: dict[str, Any] = {"method": found.method, "chunks": found.chunks}
    for name in ("t_comm", "t_mm", "t_seq", "t_overlap", "efficiency", "reason"):
        value = getattr(found, name, None)
        said[name] = None if value != value else value  # nan: nothing was predicted
    return said


class Model:
    """The planner's simulation of a pass, with the times that were measured of its parts in place of its own constants,
    and slices that cost nothing: the efficiency that a schedule allows at most. Making one is a collective."""

    def __init__(self, case: Case, shape: Shape, comm: Communicator) -> None:
        self._case, self._shape, self._ranks = case, shape, comm.size
        self._machine = machine_of(comm, dtype_name(shape.dtype))

    def efficiency(self, method: str, chunks: int, t_comm: float, t_mm: float) -> float | None:
        """None where nothing is to be said."""
        if method == "off":
            return None
        case, shape, ranks = self._case, self._shape, self._ranks
        link = self._machine.link
        steps, nbytes = case.wire(shape, ranks)
        moving = t_comm - len(case.operations) * link.latency - steps * link.hop
        if moving <= 0:
            return None
        name = str(shape.dtype).removeprefix("torch.")
        device = replace(self._machine.device, flops={name: case.flop(shape, ranks) / t_mm}, overhead=0.0)
        config = case.config(method, chunks if method in ("slices", "exchange") else None)
        found = plan(
            *case.sizes(shape, ranks),
            shape.dtype,
            ranks,
            replace(link, bandwidth=nbytes / moving),
            device,
            pattern=case.pattern,
            config=config,
        )
        return float(found.efficiency)


def check_equal(case: Case, results: Mapping[str, Sequence[Tensor]]) -> None:
    """Every way computes the same. AssertionError with its name."""
    (first, expected), *others = results.items()
    for name, found in others:
        for one, other in zip(expected, found, strict=True):
            tolerance = 1e-3 if one.dtype is torch.float32 else 5e-2
            largest, says = float(one.abs().max()), f"{case.name}: the results of {name} are not those of {first}"
            torch.testing.assert_close(other, one, rtol=tolerance, atol=tolerance * largest, msg=says)
