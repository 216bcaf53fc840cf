"""Collectives under torch.func.linearize, make_fx and torch.export."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import RankPool
from semantics import OPERATIONS, Case, tensors
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from pynccl import Communicator

func = torch.func


def collectives_of(graph: torch.fx.GraphModule) -> list[str]:
    targets = [str(node.target) for node in graph.graph.nodes]
    return [
        target.removeprefix("pynccl.").removesuffix(".default") for target in targets if target.startswith("pynccl")
    ]


def compare_traces(comm: Communicator, name: str) -> list[str]:
    """Compare traces with the program; return the collectives in the trace of the gradient."""
    operation, case = OPERATIONS[name], Case(comm.size)
    x, other = (tensors(operation, case, seed)[comm.rank] for seed in (1, 2))

    def f(t: Tensor) -> Tensor:
        return operation.call(t * 2, comm, case)

    def gradient(t: Tensor) -> Tensor:
        dx: Tensor = func.grad(lambda u: (f(u) ** 3).sum())(t)
        return dx

    expected = f(other)
    programs: list[tuple[str, Any]] = [
        ("make_fx, fake", lambda: make_fx(f, tracing_mode="fake")(x)(other)),
        ("make_fx, symbolic", lambda: make_fx(f, tracing_mode="symbolic")(x)(other)),
        ("export", lambda: torch.export.export(_Module(f), (x,)).module()(other)),
    ]
    for what, run in programs:
        assert torch.equal(run(), expected), what
    y, tangent = func.linearize(f, x)
    assert torch.equal(y, f(x))
    torch.testing.assert_close(tangent(other), func.jvp(f, (x,), (other,))[1])
    backward = make_fx(gradient)(x)
    torch.testing.assert_close(backward(other), gradient(other))
    return collectives_of(backward)


class _Module(torch.nn.Module):
    def __init__(self, f: Any) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Any:
        return self.f(x)


TRACED = {
    "all_reduce max": ["extremum", "all_reduce", "all_reduce"],
    "all_gather": ["all_gather", "reduce_scatter"],
    "broadcast": ["broadcast", "reduce"],
    "scatter": ["scatter", "gather"],
    "halo_exchange": ["halo_exchange", "halo_reduce"],
}


@pytest.mark.parametrize("name", TRACED)
def test_traces_contain_the_collectives_and_equal_the_program(ranks: RankPool, name: str) -> None:
    assert ranks.run(2, compare_traces, name) == [TRACED[name]] * 2
