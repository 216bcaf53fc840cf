"""Differentiable collectives on a GPU under torch.compile, with and without CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from gpu.graphs import destroy_compiled_graphs

import pynccl_autograd as ad
from pynccl import Communicator


def values(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (this rank's input, the sum of all ranks' inputs), integer-valued."""
    each = [torch.arange(1.0, 13.0, device=comm.device).view(4, 3) * (rank + 1) for rank in range(comm.size)]
    return each[comm.rank], torch.stack(each).sum(0)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_step_equals_the_eager_one(comm: Communicator, mode: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return (ad.all_reduce(2 * x, comm, grad="sum") ** 2).sum()

    own, total = values(comm)
    try:
        compiled = torch.compile(step, fullgraph=True, mode=mode)
        for _ in range(4):  # with CUDA graphs: warm-up, capture, replay
            x = own.clone().requires_grad_()
            loss = compiled(x)
            loss.backward()
            assert float(loss) == float((4 * total**2).sum())
            assert x.grad is not None
            torch.testing.assert_close(x.grad, comm.size * 8 * total)
            del loss
    finally:
        destroy_compiled_graphs()  # else the session's communicator cannot be destroyed
