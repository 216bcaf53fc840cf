"""An MLP cut over the ranks, its activations cut along the sequence, beside the unsharded MLP: loss and gradients.

    torchrun --standalone --nproc-per-node=2 scripts/examples/sequence_parallel_mlp.py
    sequence_parallel_mlp: loss 5.223599 and 6 gradients equal those of the unsharded MLP

Rank r has columns of the first layer, rows of the second, and its part of the sequence, S/N tokens:

    x [S/N, b, d] -> norm -> all_gather -> @ up [d, h/N] -> gelu -> @ down [h/N, d] -> reduce_scatter -> y [S/N, b, d]

The two layers do the collectives. Their own gradients are whole: each rank has seen all tokens. Those of the norm,
which every rank has, come from this rank's tokens alone; it says so by a `Shard`, and `finish_gradients` sums them.
"""

from __future__ import annotations

import torch
from torch import nn

import pynccl
import pynccl_autograd as ad

TOKENS, BATCH, WIDTH, COLUMNS = 3, 2, 8, 6  # tokens of a sequence and columns of the first layer on each rank


def cut(whole: nn.Sequential, comm: pynccl.Communicator) -> nn.Sequential:
    """This rank's part of norm, up, gelu, down."""
    norm = nn.LayerNorm(WIDTH, device=comm.device, dtype=torch.float64)
    for parameter in norm.parameters():
        parameter.shard = ad.Shard(comm, None, parameter.shape, partial=True)  # type: ignore[attr-defined]
    up = ad.ColumnParallelLinear.from_linear(whole[1], comm, sequence_parallel=True)
    down = ad.RowParallelLinear.from_linear(whole[3], comm, sequence_parallel=True)
    return nn.Sequential(norm, up, nn.GELU(), down)


def main(comm: pynccl.Communicator) -> str:
    torch.manual_seed(0)
    hidden = comm.size * COLUMNS
    layers = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, WIDTH)
    whole = nn.Sequential(*layers).double().to(comm.device)
    x = torch.randn(comm.size * TOKENS, BATCH, WIDTH, dtype=torch.float64).to(comm.device)
    expected = whole(x).square().sum()
    expected.backward()

    model = cut(whole, comm)
    part = model(x.chunk(comm.size)[comm.rank]).square().sum()  # of these tokens
    loss = ad.all_reduce(part, comm, grad="replicated")  # the same number on every rank
    loss.backward()
    ad.finish_gradients(model)  # before the optimizer's step

    torch.testing.assert_close(loss, expected)
    for (name, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        dim = {"1.weight": 0, "1.bias": 0, "3.weight": 1}.get(name)  # along which this rank has a part
        assert theirs.grad is not None
        own = theirs.grad if dim is None else theirs.grad.chunk(comm.size, dim)[comm.rank]
        torch.testing.assert_close(ours.grad, own)
    return f"sequence_parallel_mlp: loss {loss.item():.6f} and 6 gradients equal those of the unsharded MLP"


if __name__ == "__main__":
    with pynccl.init() as world:
        verified = main(world)
        if world.rank == 0:
            print(verified)
