"""Test cases of the overlapped matmuls: inputs, and the reference results of torch on the full tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd.overlap.lanes import Lane, Observer
from pynccl_autograd.streams import side_stream

# Divisible by 1, 2 and 4 ranks. The rows are not divisible by all chunk counts.
SEQUENCE, BATCH, WIDTH, HIDDEN = 24, 2, 64, 96
BUSY_CYCLES = 50_000_000  # about 25 ms: much longer than the launches of a pass
SIZES = (512, 1536, 3072, 6144, 12288, 1 << 15, 1 << 18, 1 << 20)  # bytes of tensors that may have been freed


class Case(NamedTuple):
    """A pattern: the dimensions of x, w, y and bias that are sharded over the ranks; None: replicated."""

    function: Any
    x_dim: int | None
    w_dim: int
    y_dim: int | None
    bias_dim: int | None


CASES = {
    "all_gather_matmul": Case(ad.all_gather_matmul, 0, 0, 2, 0),
    "matmul_reduce_scatter": Case(ad.matmul_reduce_scatter, 2, 1, 0, None),
    "matmul_all_reduce": Case(ad.matmul_all_reduce, 2, 1, None, None),
    "copy_matmul": Case(ad.copy_matmul, None, 0, 2, 0),
}


def half_of_pairs(schedules: Iterable[str]) -> list[tuple[str, str]]:
    """Return half of all (pattern, schedule) pairs: each schedule with two patterns, each pattern with several."""
    names = list(CASES)
    return [(names[(at + more) % len(names)], schedule) for at, schedule in enumerate(schedules) for more in (0, 2)]


class Tensors(NamedTuple):
    """Inputs of a linear layer and the cotangent of y; or the gradients of these inputs, and y."""

    x: Tensor
    w: Tensor
    bias: Tensor
    y: Tensor


def shard_of(t: Tensor, dim: int | None, comm: Communicator) -> Tensor:
    """Return a copy of this rank's shard."""
    return (t if dim is None else t.chunk(comm.size, dim)[comm.rank]).clone()


def shards_of(case: Case, full: Tensors, comm: Communicator) -> Tensors:
    dims = (case.x_dim, case.w_dim, case.bias_dim, case.y_dim)
    return Tensors(*(shard_of(t, dim, comm) for t, dim in zip(full, dims, strict=True)))


def inputs(comm: Communicator, seed: int, exact: bool = True, sequence: int = SEQUENCE) -> Tensors:
    """Return the full tensors in float64, equal on all ranks.

    exact  draw -1, 0 and 1: all sums are then integers below 256, exact in bfloat16 in any order of summation"""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        if exact:
            return torch.randint(-1, 2, shape, generator=generator).to(comm.device, torch.float64)
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(comm.device)

    x, w, bias = draw(sequence, BATCH, WIDTH), draw(HIDDEN, WIDTH), draw(HIDDEN)
    return Tensors(x, w if exact else w / 8, bias, draw(sequence, BATCH, HIDDEN))


def reference(full: Tensors) -> Tensors:
    """Return y and the gradients of the full tensors, computed by torch in float64."""
    x, w, bias = (t.double().requires_grad_() for t in full[:3])
    y = F.linear(x, w, bias)
    return Tensors(*torch.autograd.grad(y, (x, w, bias), full.y.double()), y.detach())


def to(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return Tensors(*(t.to(dtype) for t in tensors))


def forward_and_backward(case: Case, shards: Tensors, comm: Communicator, overlap: Any, **more: Any) -> Tensors:
    """Return y and the gradients of this rank's shards."""
    x, w, bias = (t.detach().requires_grad_() for t in shards[:3])
    y = case.function(x, w, comm, bias, overlap=overlap, **more)
    return Tensors(*torch.autograd.grad(y, (x, w, bias), shards.y), y.detach())


def assert_same(found: Tensors, expected: Tensors, what: object) -> None:
    """Check bitwise equality."""
    for name, got, reference in zip(Tensors._fields, found, expected, strict=True):
        assert got.shape == reference.shape and torch.equal(got.double(), reference), f"{name} by {what}"


def needs_peers(comm: Communicator) -> None:
    if comm.size < 2:
        pytest.skip("needs 2 ranks")


def delay(comm: Communicator) -> None:
    """Delay the communicator's side stream."""
    side: Any = side_stream(comm)
    with torch.cuda.stream(side.stream):
        torch.cuda._sleep(BUSY_CYCLES)


def overwrite_freed(comm: Communicator) -> list[Tensor]:
    """Allocate the memory that was freed, and fill it with bytes that are NaN in every floating-point type."""
    return [torch.full((n,), 255, dtype=torch.uint8, device=comm.device) for n in SIZES for _ in range(12)]


def unchanged(memory: list[Tensor]) -> bool:
    """Return whether the overwritten memory has kept its content."""
    return bool(torch.stack([t.min() for t in memory]).eq(255).all())


class Span(NamedTuple):
    """Work on a lane, between two events."""

    lane: Lane
    name: str
    begin: Any
    end: Any


class Timeline(Observer):
    """Record the events of all work."""

    timing = True

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def ran(self, lane: Lane, name: str, reads: Sequence[Any], writes: Sequence[Any], begin: Any, end: Any) -> None:
        self.spans.append(Span(lane, name, begin, end))

    def on(self, *names: str) -> list[Span]:
        return [span for span in self.spans if span.lane.name in names]
