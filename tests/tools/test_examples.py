"""The recipe of CLIP's loss: the wrong convention is seen, and sums of gradients are rounded once."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from ranks import RankPool
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "recipes"))

import clip_loss


def check_wrong_convention(comm: Communicator) -> None:
    """The whole loss on every rank with grad="sum" is N times the gradient."""
    torch.manual_seed(0)
    images, texts = torch.randn(2, 4 * comm.size, 8, dtype=torch.float64)
    log_scale = torch.ones([], dtype=torch.float64)
    own = slice(comm.rank * 4, (comm.rank + 1) * 4)

    def mixed(images: Tensor, texts: Tensor, log_scale: Tensor) -> Tensor:
        gathered = [ad.all_gather(x, comm, grad="sum") for x in (images, texts)]
        return clip_loss.loss_alone(*gathered, log_scale)

    expected = clip_loss.differentiate(clip_loss.loss_alone, images, texts, log_scale)
    found = clip_loss.differentiate(mixed, images[own], texts[own], log_scale)
    torch.testing.assert_close(found[1], comm.size * expected[1][own])


def test_the_wrong_convention_is_a_factor_of_the_number_of_ranks(ranks: RankPool) -> None:
    ranks.run(3, check_wrong_convention)


def check_reduce_dtype(comm: Communicator) -> None:
    cotangents = torch.randn(comm.size, 64 * comm.size, 8, generator=torch.Generator().manual_seed(3)).bfloat16()
    x = torch.zeros(64, 8, dtype=torch.bfloat16, requires_grad=True)
    y = ad.all_gather(x, comm, grad="sum", reduce_dtype=torch.float32)
    (dx,) = torch.autograd.grad(y, x, cotangents[comm.rank])
    assert torch.equal(dx, cotangents.float().sum(0).chunk(comm.size)[comm.rank].bfloat16())

    # float32 has no number between 2**24 and 2**24 + 2, so that adding 1 three times to the former changes nothing.
    x = torch.zeros(1, requires_grad=True)
    found: list[Tensor] = []
    for reduce_dtype in (torch.float64, None):
        y = ad.all_gather(x, comm, grad="sum", reduce_dtype=reduce_dtype)
        found += torch.autograd.grad(y, x, torch.full((comm.size,), 1.0 if comm.rank else 2.0**24))
    assert [value.item() for value in found] == [2.0**24 + 4, 2.0**24]  # 2**24 + 3, rounded once; rounded three times


def test_reduce_dtype_rounds_the_sum_of_gradients_once(ranks: RankPool) -> None:
    ranks.run(4, check_reduce_dtype)
