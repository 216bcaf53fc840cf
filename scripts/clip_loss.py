"""CLIP's contrastive loss of a batch that is cut over the ranks, beside that of the whole batch in one process.

Every image is compared with every text, so each rank needs all embeddings: all_gather. Which convention of gradient is
right depends on what each rank computes from them:

`loss_of_own_rows`   each rank's loss is that of its own images and texts; the loss is the sum over ranks. What another
                     rank's loss says about this rank's embeddings has to come back: grad="sum", a reduce-scatter.
                     1/N of the work and memory of logits per rank: the one to use.
`loss_of_all_rows`   every rank computes the whole loss; it is the same value N times, not N losses. The cotangents are
                     equal, each rank keeps its slice: grad="replicated". "sum" would give N times the gradient, as
                     CLIP's AllGatherFunction does, which then relies on data parallelism to divide by N.

reduce_dtype=torch.float32: with bfloat16 embeddings the sum over ranks is made in float32 and rounded once. The script
prints the differences from the single process.

examples:
  torchrun --standalone --nproc-per-node=2 scripts/clip_loss.py
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import pynccl
import pynccl_autograd as ad
from pynccl.tools import command

ROWS, WIDTH = 6, 32  # image-text pairs per rank, embedding width
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1.6e-2}


def logits_of(a: Tensor, b: Tensor, log_scale: Tensor) -> Tensor:
    """Similarities, in at least float32 since a softmax follows."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return (a @ b.T).to(wide) * log_scale.exp()


def loss_on_one_process(images: Tensor, texts: Tensor, log_scale: Tensor) -> Tensor:
    """images, texts [B, width], log_scale [] -> []: as in CLIP's paper, figure 3."""
    logits = logits_of(images, texts, log_scale)
    pairs = torch.arange(len(images), device=images.device)
    return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2


def loss_of_own_rows(
    images: Tensor,
    texts: Tensor,
    log_scale: Tensor,
    comm: pynccl.Communicator,
    reduce_dtype: torch.dtype | None = torch.float32,
) -> Tensor:
    """images, texts [B/N, width], log_scale [] -> []: this rank's share; the shares sum to the loss."""
    all_images = ad.all_gather(images, comm, grad="sum", reduce_dtype=reduce_dtype)
    all_texts = ad.all_gather(texts, comm, grad="sum", reduce_dtype=reduce_dtype)
    log_scale = ad.copy(log_scale, comm)  # every rank uses it for its own rows: its gradients are summed
    pairs = comm.rank * len(images) + torch.arange(len(images), device=images.device)
    of_images = F.cross_entropy(logits_of(images, all_texts, log_scale), pairs, reduction="sum")
    of_texts = F.cross_entropy(logits_of(texts, all_images, log_scale), pairs, reduction="sum")
    return (of_images + of_texts) / (2 * len(all_images))


def loss_of_all_rows(images: Tensor, texts: Tensor, log_scale: Tensor, comm: pynccl.Communicator) -> Tensor:
    """images, texts [B/N, width], log_scale [] -> []: the whole loss, on every rank."""
    all_images = ad.all_gather(images, comm, grad="replicated")
    all_texts = ad.all_gather(texts, comm, grad="replicated")
    return loss_on_one_process(all_images, all_texts, log_scale)


class Result(NamedTuple):
    """The loss and its gradients."""

    loss: Tensor
    images: Tensor
    texts: Tensor
    log_scale: Tensor


def differentiate(loss: Callable[..., Tensor], *inputs: Tensor) -> Result:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    value = loss(*leaves)
    return Result(value.detach(), *torch.autograd.grad(value, leaves))


def batch(comm: pynccl.Communicator, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings of the whole batch and the logarithm of the scale; every rank draws the same."""
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randn(2, ROWS * comm.size, WIDTH, generator=generator, dtype=torch.float64)
    images, texts = F.normalize(drawn, dim=-1).to(comm.device, dtype)
    log_scale = torch.tensor(math.log(1 / 0.07), dtype=torch.promote_types(dtype, torch.float32), device=comm.device)
    return images, texts, log_scale


def compare(comm: pynccl.Communicator, dtype: torch.dtype, own_rows: bool) -> dict[str, float]:
    """The largest differences on any rank, relative to the largest value, from float64 in a single process."""
    images, texts, log_scale = batch(comm, dtype)
    expected = differentiate(loss_on_one_process, images.double(), texts.double(), log_scale.double())
    own = slice(comm.rank * ROWS, (comm.rank + 1) * ROWS)
    reduce_dtype = torch.promote_types(dtype, torch.float32)

    def sharded(images: Tensor, texts: Tensor, log_scale: Tensor) -> Tensor:
        if own_rows:
            return loss_of_own_rows(images, texts, log_scale, comm, reduce_dtype)
        return loss_of_all_rows(images, texts, log_scale, comm)

    found = differentiate(sharded, images[own], texts[own], log_scale)
    if own_rows:
        found = found._replace(loss=comm.all_reduce(found.loss))
    here = expected._replace(images=expected.images[own], texts=expected.texts[own])
    differences = {}
    for name, ours, theirs, scale in zip(Result._fields, found, here, expected, strict=True):
        largest = ((ours.double() - theirs).abs().max() / scale.abs().max()).detach()
        differences[name] = comm.all_reduce(largest.nan_to_num(nan=math.inf), op="max").item()
    return differences


def main() -> int:
    command.Parser(__doc__, failed="the differences are not within the tolerances").parse_args()
    with pynccl.init() as comm:
        agree = True
        for dtype, tolerance in TOLERANCES.items():
            for own_rows in (True, False):
                differences = compare(comm, dtype, own_rows)
                agree = agree and max(differences.values()) <= tolerance
                if comm.rank == 0:
                    which = 'own rows, grad="sum"' if own_rows else 'all rows, grad="replicated"'
                    shown = "  ".join(f"{name} {value:.1e}" for name, value in differences.items())
                    print(f"{str(dtype)[6:]:<9}{which:<28}{shown}   (tolerance {tolerance:.1e})")
        if comm.rank == 0:
            print(f"loss and gradients {'agree' if agree else 'DIFFER'} with a single process's", flush=True)
        return 0 if agree else 1


if __name__ == "__main__":
    command.run(main)
