"""Nested forward-mode and reverse-mode derivatives with torch.func, compared with one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor, func

import pynccl_autograd as ad
from pynccl import Communicator

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
X, C = torch.tensor([1.0, 2.0]).double(), torch.tensor([3.0, 4.0]).double()


REDUCTIONS = {"sum": lambda ys: ys.sum(0), "max": lambda ys: ys.amax(0), "prod": lambda ys: ys.prod(0)}
FACTORS = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
S, V = torch.tensor([0.3, -0.7, 1.1]).double(), torch.ones(3).double()


def compare_nested_derivatives(comm: Communicator) -> None:
    """Forward mode perturbs the argument on all ranks at once; reverse mode differentiates by one rank's argument."""
    n, factor = comm.size, FACTORS[comm.rank]
    for op, reduction in REDUCTIONS.items():

        def parallel(t: Tensor, op: Any = op) -> Tensor:
            return ad.all_reduce((factor * t).sin(), comm, op, grad="sum")

        def reference(t: Tensor, reduction: Any = reduction) -> Tensor:
            return reduction((FACTORS * t).sin())

        # Of the sum of the ranks' outputs, with a separate variable for each rank: [3, n, 3, n, 3]
        by_rank = func.jacfwd(func.jacrev(lambda ts: n * reference(ts)))(torch.stack([S] * n))
        for outer, inner in ((func.jacfwd, func.jacrev), (func.jacrev, func.jacfwd), (func.jacrev, func.jacrev)):
            torch.testing.assert_close(outer(inner(parallel))(S), by_rank[:, comm.rank].sum(2), **CLOSE)
        third = func.jacfwd(func.jacfwd(func.jacfwd(parallel)))(S)
        torch.testing.assert_close(third, func.jacfwd(func.jacfwd(func.jacfwd(reference)))(S), **CLOSE)
    x = X.clone().requires_grad_()
    y = ad.all_gather(x, comm, grad="sum")
    with pytest.raises(NotImplementedError, match=r"use torch\.func\.vmap, jacrev or hessian"):  # torch's old vmap
        torch.autograd.grad(y, x, torch.eye(len(y)).double(), is_grads_batched=True)


def test_nested_derivatives_in_forward_and_reverse_mode(ranks: RankPool) -> None:
    ranks.run(2, compare_nested_derivatives)
