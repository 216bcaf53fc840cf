"""Apply convolutions to an image that is sharded by rows: each rank needs some of its neighbours' rows, the halo.

The gradient of a halo is sent back to the rank that owns the rows and added there. The weights are replicated and each
rank applies them to its rows, so ad.copy sums their gradients over the ranks.

examples:
  torchrun --nproc-per-node=2 scripts/recipes/halo_convolution.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import pynccl
import pynccl_autograd as ad
from pynccl.tools import command

HALO = 2  # for a kernel of 5 rows
CHANNELS, WIDTH = 2, 8


def convolve(x: Tensor, weight: Tensor, comm: pynccl.Communicator) -> Tensor:
    """F.conv2d(padding=HALO) of x [batch, channels, rows, width], this rank's rows -> [batch, out, rows, width]."""
    padded = ad.halo_exchange(F.pad(x, (0, 0, HALO, HALO)), comm, dim=2, halo=HALO)  # zeros remain at both ends
    return F.conv2d(padded, ad.copy(weight, comm), padding=(0, HALO))


def main(comm: pynccl.Communicator) -> str:
    torch.manual_seed(0)
    rows = [3 + rank % 2 for rank in range(comm.size)]  # uneven shards
    image = torch.randn(2, CHANNELS, sum(rows), WIDTH, dtype=torch.float64).to(comm.device).requires_grad_()
    weights = torch.randn(2, CHANNELS, CHANNELS, 5, 5, dtype=torch.float64).to(comm.device).requires_grad_()
    expected = F.conv2d(torch.tanh(F.conv2d(image, weights[0], padding=HALO)), weights[1], padding=HALO)
    of_image, of_weights = torch.autograd.grad(expected.square().sum(), (image, weights))
    local = image.detach().split(rows, 2)[comm.rank].clone().requires_grad_()
    y = convolve(torch.tanh(convolve(local, weights[0], comm)), weights[1], comm)
    found = torch.autograd.grad(y.square().sum(), (local, weights))
    torch.testing.assert_close(y, expected.split(rows, 2)[comm.rank])
    torch.testing.assert_close(found, (of_image.split(rows, 2)[comm.rank], of_weights))
    return f"halo_convolution: {rows} rows, two layers: outputs and gradients equal those of one process"


if __name__ == "__main__":
    command.on_ranks(main, __doc__)
