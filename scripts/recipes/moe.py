"""Run a mixture of experts with one expert per rank: tokens are sent to their experts and back, in uneven numbers.

Each rank has its own tokens and a replicated router. ad.copy sums the router's gradients over the ranks.

examples:
  torchrun --nproc-per-node=2 scripts/recipes/moe.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pynccl
import pynccl_autograd as ad
from pynccl.tools import command

TOKENS, WIDTH = 7, 6  # tokens per rank, features


def moe(x: Tensor, router: Tensor, expert: nn.Module, comm: pynccl.Communicator) -> Tensor:
    """x [tokens, width] of this rank, router [experts, width] -> [tokens, width]. This rank holds expert `rank`."""
    gate, choice = F.softmax(x @ ad.copy(router, comm).T, -1).max(-1)
    order = choice.argsort(stable=True)  # sort tokens by expert
    sends = choice.bincount(minlength=comm.size).tolist()
    recvs = comm.all_to_all(torch.tensor(sends, device=x.device)).tolist()  # tokens from each rank
    received = ad.all_to_all(x[order], comm, send_splits=sends, recv_splits=recvs)
    back = ad.all_to_all(expert(received), comm, send_splits=recvs, recv_splits=sends)
    return gate[:, None] * back[order.argsort()]


def in_one_process(x: Tensor, router: Tensor, experts: list[nn.Module]) -> Tensor:
    gate, choice = F.softmax(x @ router.T, -1).max(-1)
    return gate[:, None] * torch.stack([experts[int(index)](row) for index, row in zip(choice, x, strict=True)])


def main(comm: pynccl.Communicator) -> str:
    torch.manual_seed(0)
    experts: list[nn.Module] = [nn.Linear(WIDTH, WIDTH).double().to(comm.device) for _ in range(comm.size)]
    router = torch.randn(comm.size, WIDTH, dtype=torch.float64).to(comm.device).requires_grad_()
    x = torch.randn(comm.size * TOKENS, WIDTH, dtype=torch.float64).to(comm.device)
    leaves = [router, *experts[comm.rank].parameters()]
    expected = in_one_process(x, router, experts)
    gradients = torch.autograd.grad(expected.square().sum(), leaves)
    own = slice(comm.rank * TOKENS, (comm.rank + 1) * TOKENS)
    y = moe(x[own], router, experts[comm.rank], comm)
    torch.testing.assert_close(y, expected[own])
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), leaves), gradients)  # loss: the sum over ranks
    counts = F.softmax(x @ router.T, -1).argmax(-1).bincount(minlength=comm.size).tolist()
    return f"moe: {counts} tokens for the {comm.size} experts: outputs and gradients equal those of one process"


if __name__ == "__main__":
    command.on_ranks(main, __doc__)
