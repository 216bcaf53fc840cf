"""Run ring attention: the sequence is sharded, keys and values travel around the ring, and the softmax accumulates.

It uses the online softmax of Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018): a running
maximum, and sums that are rescaled when it grows. permute's adjoint is the reversed ring, so the gradients are exact.

examples:
  torchrun --nproc-per-node=2 scripts/recipes/ring_attention.py
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

import pynccl
import pynccl_autograd as ad
from pynccl.tools import command

HEADS, ROWS, WIDTH = 2, 5, 4  # rows of the sequence on each rank


def ring_attention(q: Tensor, k: Tensor, v: Tensor, comm: pynccl.Communicator) -> Tensor:
    """Causal attention of q, k, v [heads, rows, width], this rank's rows. Rank r has the r-th shard of the sequence."""
    ring = [(rank, (rank + 1) % comm.size) for rank in range(comm.size)]
    maximum = q.new_full((*q.shape[:-1], 1), -math.inf)
    weight, total = torch.zeros_like(maximum), torch.zeros_like(q)
    hidden = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    pair = torch.stack([k, v])  # sent as one tensor
    for step in range(comm.size):  # the shards of ranks rank, rank - 1, .., modulo the number of ranks
        if step:
            pair = ad.permute(pair, comm, ring)
        source = (comm.rank - step) % comm.size
        mask = hidden if source == comm.rank else torch.full_like(hidden, source > comm.rank)
        scores = (q @ pair[0].mT / math.sqrt(q.shape[-1])).masked_fill(mask, -math.inf)
        largest = torch.maximum(maximum, scores.amax(-1, keepdim=True)).detach()  # finite: the own shard is first
        share, kept = (scores - largest).exp(), (maximum - largest).exp()
        weight, total = weight * kept + share.sum(-1, keepdim=True), total * kept + share @ pair[1]
        maximum = largest
    return total / weight


def main(comm: pynccl.Communicator) -> str:
    torch.manual_seed(0)
    qkv = torch.randn(3, HEADS, comm.size * ROWS, WIDTH, dtype=torch.float64).to(comm.device).requires_grad_()
    expected = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
    (gradients,) = torch.autograd.grad(expected.square().sum(), qkv)
    own = qkv.detach().chunk(comm.size, 2)[comm.rank].clone().requires_grad_()
    y = ring_attention(own[0], own[1], own[2], comm)
    torch.testing.assert_close(y, expected.chunk(comm.size, 1)[comm.rank])
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), own)[0], gradients.chunk(comm.size, 2)[comm.rank])
    return f"ring_attention: {comm.size} x {ROWS} rows: outputs and gradients equal those of one process's attention"


if __name__ == "__main__":
    command.on_ranks(main, __doc__)
