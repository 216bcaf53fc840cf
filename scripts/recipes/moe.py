"""A mixture of experts: one expert on each rank, tokens travel to theirs and back, however many each gets.

Each rank has its own tokens and the whole router. Its gradient is the sum over the ranks of their tokens': ad.copy.

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

TOKENS, WIDTH = 7, 6  # on each rank


def moe(x: Tensor, router: Tensor, expert: nn.Module, comm: pynccl.Communicator) -> Tensor:
    """x [tokens, width] of this rank -> [tokens, width]; router [experts, width], expert `rank` is here."""
    gate, choice = F.softmax(x @ ad.copy(router, comm).T, -1).max(-1)
    order = choice.argsort(stable=True)  # the tokens of expert 0 first
    sends = choice.bincount(minlength=comm.size).tolist()
    recvs = comm.all_to_all(torch.tensor(sends, device=x.device)).tolist()  # how many come from each rank
    here = ad.all_to_all(x[order], comm, send_splits=sends, recv_splits=recvs)
    back = ad.all_to_all(expert(here), comm, send_splits=recvs, recv_splits=sends)
    return gate[:, None] * back[order.argsort()]


def in_one_process(x: Tensor, router: Tensor, experts: list[nn.Module]) -> Tensor:
    gate, choice = F.softmax(x @ router.T, -1).max(-1)
    return gate[:, None] * torch.stack([experts[int(one)](row) for one, row in zip(choice, x, strict=True)])


def main(comm: pynccl.Communicator) -> str:
    torch.manual_seed(0)
    experts: list[nn.Module] = [nn.Linear(WIDTH, WIDTH).double().to(comm.device) for _ in range(comm.size)]
    router = torch.randn(comm.size, WIDTH, dtype=torch.float64).to(comm.device).requires_grad_()
    x = torch.randn(comm.size * TOKENS, WIDTH, dtype=torch.float64).to(comm.device)
    leaves = [router, *experts[comm.rank].parameters()]
    whole = in_one_process(x, router, experts)
    expected = torch.autograd.grad(whole.square().sum(), leaves)
    part = slice(comm.rank * TOKENS, (comm.rank + 1) * TOKENS)
    y = moe(x[part], router, experts[comm.rank], comm)
    torch.testing.assert_close(y, whole[part])
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), leaves), expected)  # the loss is the ranks' sum
    counts = F.softmax(x @ router.T, -1).argmax(-1).bincount(minlength=comm.size).tolist()
    return f"moe: {counts} tokens for the {comm.size} experts: outputs and gradients equal those of one process"


if __name__ == "__main__":
    command.on_ranks(main, __doc__)
