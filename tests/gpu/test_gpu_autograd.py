"""Differentiable collectives and parallel layers on a GPU: exact adjoints, and equality with the unsharded layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import pynccl_autograd as ad
from pynccl import Communicator

Function = Callable[[torch.Tensor, Communicator], torch.Tensor]

LINEAR: dict[str, tuple[Function, bool]] = {
    "all_reduce": (lambda x, c: ad.all_reduce(x, c, grad="sum"), False),
    "all_reduce avg": (lambda x, c: ad.all_reduce(x, c, "avg", grad="sum"), False),
    "all_reduce replicated": (lambda x, c: ad.all_reduce(x, c, grad="replicated"), True),
    "reduce_scatter": (ad.reduce_scatter, False),
    "reduce_scatter dim 1": (lambda x, c: ad.reduce_scatter(x, c, dim=1), False),
    "all_gather": (lambda x, c: ad.all_gather(x, c, grad="sum"), False),
    "all_gather dim -1": (lambda x, c: ad.all_gather(x, c, dim=-1, grad="sum"), False),
    "all_gather replicated": (lambda x, c: ad.all_gather(x, c, grad="replicated"), True),
}


def random(*shape: int, seed: int, comm: Communicator, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(comm.device, dtype)


def assert_equal(got: torch.Tensor | None, expected: torch.Tensor) -> None:
    """Check equality up to the order of summation in float64."""
    torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("function", LINEAR)
def test_forward_and_backward_are_adjoint(comm: Communicator, function: str) -> None:
    apply, replicated = LINEAR[function]
    x = random(4 * comm.size, 8, 5 * comm.size, seed=comm.rank, comm=comm)
    assert ad.testing.check_adjoint(lambda t: apply(t, comm), x, comm, replicated=replicated) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_float8_is_summed_and_moved(comm: Communicator, dtype: torch.dtype) -> None:
    n, mine = comm.size, comm.rank + 1.0
    x = torch.full((4 * n,), mine, device=comm.device).to(dtype)
    total, each = n * (n + 1) / 2, [rank + 1.0 for rank in range(n)]  # exact in float8 for 1, 2 and 4 ranks
    for y, expected in (
        (ad.all_reduce(x, comm, grad="sum"), [total] * 4 * n),
        (ad.reduce_scatter(x, comm), [total] * 4),
        (ad.all_gather(x[:4], comm, grad="sum"), [value for value in each for _ in range(4)]),
        (ad.all_to_all(x, comm), [value for value in each for _ in range(4)]),
        (ad.broadcast(x, comm, root=n - 1, grad="sum"), [float(n)] * 4 * n),
    ):
        assert y.dtype == dtype and y.float().tolist() == expected


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_column_then_row_equals_two_unsharded_layers(comm: Communicator, sequence_parallel: bool) -> None:
    s, width, hidden = 4 * comm.size, 16, 24 * comm.size
    x = random(s, 3, width, seed=100, comm=comm).requires_grad_()
    w1, b1 = random(hidden, width, seed=1, comm=comm), random(hidden, seed=2, comm=comm)
    w2, b2 = random(width, hidden, seed=3, comm=comm), random(width, seed=4, comm=comm)
    full_parameters = [t.requires_grad_() for t in (w1, b1, w2, b2)]
    expected = F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)
    g = random(*expected.shape, seed=5, comm=comm)
    expected.backward(g)

    column = ad.ColumnParallelLinear(width, hidden, comm, sequence_parallel=sequence_parallel, dtype=torch.float64)
    row = ad.RowParallelLinear(hidden, width, comm, sequence_parallel=sequence_parallel, dtype=torch.float64)
    column.load_full(w1.detach(), b1.detach())
    row.load_full(w2.detach(), b2.detach())

    def shard(t: torch.Tensor) -> torch.Tensor:
        return t.chunk(comm.size)[comm.rank] if sequence_parallel else t

    own_x = shard(x.detach()).clone().requires_grad_()
    y = row(F.gelu(column(own_x)))
    y.backward(shard(g))

    assert x.grad is not None
    assert_equal(y, shard(expected))
    assert_equal(own_x.grad, shard(x.grad))
    own = [column.weight, column.bias, row.weight, row.bias]
    dims = [0, 0, 1, None]
    for parameter, full, dim in zip(own, full_parameters, dims, strict=True):
        assert parameter is not None and full.grad is not None
        assert_equal(parameter.grad, full.grad if dim is None else full.grad.chunk(comm.size, dim)[comm.rank])
    assert torch.equal(column.full_state()["weight"], w1.detach())
    assert torch.equal(row.full_state()["weight"], w2.detach())
