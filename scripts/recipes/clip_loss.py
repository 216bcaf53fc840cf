"""Compute CLIP's contrastive loss of image-text pairs sharded over ranks: every image is compared with every text.

all_gather gives each rank all embeddings. Each rank computes the loss of its own rows, so the gradients of its
embeddings from the other ranks' losses are summed: grad="sum". If every rank computed the full loss, use "replicated".

examples:
  torchrun --nproc-per-node=2 scripts/recipes/clip_loss.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import pynccl
import pynccl_autograd as ad
from pynccl.tools import command

ROWS, WIDTH = 6, 32  # pairs per rank, width of an embedding


def reference_loss(images: Tensor, texts: Tensor, log_scale: Tensor) -> Tensor:
    """images, texts [B, width], log_scale [] -> []: mean over rows and columns of the similarity matrix."""
    logits, pairs = images @ texts.T * log_scale.exp(), torch.arange(len(images)).to(images.device)
    return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2


def loss_of(images: Tensor, texts: Tensor, log_scale: Tensor, comm: pynccl.Communicator) -> Tensor:
    """images, texts [B/N, width], log_scale [] -> []: this rank's partial loss; the sum over ranks is the loss."""
    all_images, all_texts = (ad.all_gather(x, comm, grad="sum") for x in (images, texts))
    scale = ad.copy(log_scale, comm).exp()  # each rank scales its own rows: sum the gradients
    pairs = comm.rank * len(images) + torch.arange(len(images)).to(images.device)
    of_images = F.cross_entropy(images @ all_texts.T * scale, pairs, reduction="sum")
    of_texts = F.cross_entropy(texts @ all_images.T * scale, pairs, reduction="sum")
    return (of_images + of_texts) / (2 * len(all_images))


def differentiate(loss: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    value = loss(*leaves)
    return [value.detach(), *torch.autograd.grad(value, leaves)]


def main(comm: pynccl.Communicator) -> str:
    torch.manual_seed(0)
    images, texts = F.normalize(torch.randn(2, ROWS * comm.size, WIDTH, dtype=torch.float64), dim=-1).to(comm.device)
    log_scale = torch.tensor(2.66, dtype=torch.float64, device=comm.device)
    loss, of_images, of_texts, of_scale = differentiate(reference_loss, images, texts, log_scale)
    own = slice(comm.rank * ROWS, (comm.rank + 1) * ROWS)
    ours = differentiate(lambda a, b, c: loss_of(a, b, c, comm), images[own], texts[own], log_scale)
    torch.testing.assert_close([comm.all_reduce(ours[0]), *ours[1:]], [loss, of_images[own], of_texts[own], of_scale])
    return f"clip_loss: loss and gradients of {ROWS * comm.size} pairs on {comm.size} ranks equal those of one process"


if __name__ == "__main__":
    command.on_ranks(main, __doc__)
