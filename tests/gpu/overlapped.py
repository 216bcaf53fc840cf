"""The overlapped matmuls as cases: their inputs, and what torch makes of the whole tensors on one rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl.comm.observers import Observer
from pynccl_autograd.overlap.lanes import Lane
from pynccl_autograd.streams import side_stream

SEQUENCE, BATCH, WIDTH, HIDDEN = 24, 2, 64, 96  # divisible by 1, 2 and 4 ranks; the rows not by all chunks
BUSY_CYCLES = 50_000_000  # about 25 ms: far longer than the launches of a pass take
SIZES = (512, 1536, 3072, 6144, 12288, 1 << 15, 1 << 18, 1 << 20)  # bytes, of what may have been freed


class Case(NamedTuple):
    """A pattern: the dimensions of x, w, y and bias that are cut over the ranks; None: equal on all."""

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


def some_pairs(ways: Iterable[str]) -> list[tuple[str, str]]:
    """(pattern, way): each way with two of the patterns, of which each has several ways. Half of the product."""
    names = list(CASES)
    return [(names[(at + more) % len(names)], way) for at, way in enumerate(ways) for more in (0, 2)]


class Tensors(NamedTuple):
    """Inputs of a linear layer and the cotangent of y; or y and the gradients of the inputs, without which they are."""

    x: Tensor
    w: Tensor
    bias: Tensor
    y: Tensor


def part(t: Tensor, dim: int | None, comm: Communicator) -> Tensor:
    """This rank's own copy of its part."""
    return (t if dim is None else t.chunk(comm.size, dim)[comm.rank]).clone()


def parts(case: Case, whole: Tensors, comm: Communicator) -> Tensors:
    dims = (case.x_dim, case.w_dim, case.bias_dim, case.y_dim)
    return Tensors(*(part(t, dim, comm) for t, dim in zip(whole, dims, strict=True)))


def inputs(comm: Communicator, seed: int, exact: bool = True, sequence: int = SEQUENCE) -> Tensors:
    """The whole tensors in float64, equal on all ranks.

    exact  of -1, 0 and 1: all sums are then integers below 256, which bfloat16 has, in whatever order they are made"""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        if exact:
            return torch.randint(-1, 2, shape, generator=generator).to(comm.device, torch.float64)
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(comm.device)

    x, w, bias = draw(sequence, BATCH, WIDTH), draw(HIDDEN, WIDTH), draw(HIDDEN)
    return Tensors(x, w if exact else w / 8, bias, draw(sequence, BATCH, HIDDEN))


def reference(whole: Tensors) -> Tensors:
    """What torch makes of the whole, in float64: y and the gradients."""
    x, w, bias = (t.double().requires_grad_() for t in whole[:3])
    y = F.linear(x, w, bias)
    return Tensors(*torch.autograd.grad(y, (x, w, bias), whole.y.double()), y.detach())


def to(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return Tensors(*(t.to(dtype) for t in tensors))


def forward_and_backward(case: Case, own: Tensors, comm: Communicator, overlap: Any, **more: Any) -> Tensors:
    """y and the gradients of this rank's parts."""
    x, w, bias = (t.detach().requires_grad_() for t in own[:3])
    y = case.function(x, w, comm, bias, overlap=overlap, **more)
    return Tensors(*torch.autograd.grad(y, (x, w, bias), own.y), y.detach())


def assert_same(found: Tensors, expected: Tensors, what: object) -> None:
    """Bit by bit."""
    for name, got, wanted in zip(Tensors._fields, found, expected, strict=True):
        assert got.shape == wanted.shape and torch.equal(got.double(), wanted), f"{name} by {what}"


def needs_peers(comm: Communicator) -> None:
    if comm.size < 2:
        pytest.skip("needs 2 ranks")


def delay(comm: Communicator) -> None:
    """Let the communicator's side stream be late by far."""
    side: Any = side_stream(comm)
    with torch.cuda.stream(side.stream):
        torch.cuda._sleep(BUSY_CYCLES)


def trample(comm: Communicator) -> list[Tensor]:
    """Take what the allocator has got back, and fill it with what is NaN in every type."""
    return [torch.full((n,), 255, dtype=torch.uint8, device=comm.device) for n in SIZES for _ in range(12)]


def untouched(trampled: list[Tensor]) -> bool:
    """Whether nobody has written to it since."""
    return bool(torch.stack([t.min() for t in trampled]).eq(255).all())


class Span(NamedTuple):
    """What ran on a lane, between two events."""

    lane: Lane
    name: str
    begin: Any
    end: Any


class Timeline(Observer):
    """Keeps the events of what ran."""

    timing = True

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def ran(self, lane: Lane, name: str, reads: Sequence[Any], writes: Sequence[Any], begin: Any, end: Any) -> None:
        self.spans.append(Span(lane, name, begin, end))

    def on(self, *names: str) -> list[Span]:
        return [span for span in self.spans if span.lane.name in names]
