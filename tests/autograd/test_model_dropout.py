"""Dropout of models made parallel: the masks of all ranks put together, in the unsharded model, give its gradients."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from ranks import RankPool
from small_transformers import MAKE, TOLERANCE, batch, compare
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator

pytest.importorskip("transformers")


def patched(dropout: Any) -> Any:
    return mock.patch.object(F, "dropout", dropout)


def with_dropout(name: str) -> nn.Module:
    model = MAKE[name]()
    model.config._attn_implementation = "eager"  # whose dropout of attention is torch.nn.functional's
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3
    return model.double().train()


PLACES = {  # of the dropouts of a model in the order of its forward pass, with two layers
    "llama": ["heads"] * 2,
    "gpt2": ["whole", *["heads", "sequence", "sequence"] * 2],
    "bert": ["whole", *["heads", "sequence", "sequence"] * 2],
}


def draws(comm: Communicator, name: str, sequence_parallel: bool, reentrant: bool | None) -> None:
    torch.manual_seed(3)
    whole: Any = with_dropout(name)
    model: Any = ad.parallelize(copy.deepcopy(whole), comm, getattr(ad.plans, name), sequence_parallel)
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    ad.rng.seed(11, comm)
    real, masks = F.dropout, []

    def records(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        y = real(x, p, training, inplace)
        if training and p > 0:
            masks.append(real(torch.ones_like(x), 0.0) * (y != 0) / (1 - p))
        return y

    with patched(records):
        loss = model(**batch(0)).loss
        drawn = masks[:]
        loss.backward()
    ad.finish_gradients(model)
    assembled = []
    for mask, place in zip(drawn, PLACES[name], strict=True):
        cut = place == "heads" or (place == "sequence" and sequence_parallel)  # both are dimension 1
        each = ad.all_gather(mask, comm, 1, grad="sum").chunk(comm.size, 1)
        for one in each[1:]:
            assert torch.equal(one, each[0]) != cut, place
        assembled.append(torch.cat(each, 1) if cut else mask)

    def replays(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return x * assembled.pop(0) if training and p > 0 else x

    with patched(replays):
        expected = whole(**batch(0)).loss
    expected.backward()
    torch.testing.assert_close(loss, expected, **TOLERANCE[torch.float64])
    compare(model, whole, TOLERANCE[torch.float64])
    outside = torch.rand(3)  # the default generators are equal after it
    assert torch.equal(ad.all_gather(outside, comm, 0, grad="sum"), outside.repeat(comm.size))
    state = torch.get_rng_state()
    torch.testing.assert_close(model.eval()(**batch(0)).loss, whole.eval()(**batch(0)).loss)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("name", "sequence_parallel", "reentrant"),
    [
        ("llama", True, True),
        ("llama", False, False),
        ("gpt2", True, False),
        ("bert", True, None),
    ],
)
def test_masks_are_each_ranks_own_where_activations_are(
    ranks: RankPool, name: str, sequence_parallel: bool, reentrant: bool | None
) -> None:
    """And checkpoints of activations, of both kinds, draw the same ones again."""
    ranks.run(2, draws, name, sequence_parallel, reentrant)


def unseeded(comm: Communicator) -> None:
    other = comm.split(0, comm.rank)
    assert other is not None
    model: Any = ad.parallelize(with_dropout("gpt2"), other, ad.plans.gpt2)
    torch.manual_seed(comm.rank)
    with pytest.raises(RuntimeError, match=r"call ad\.rng\.seed\(seed, comm\)"):
        model(**batch(0))
    other.destroy()
    ad.rng.seed(4, comm)
    model = ad.parallelize(with_dropout("llama"), comm, ad.plans.llama)
    model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**batch(0))
    ad.rng.get_state()  # refused within a block: the error has left it


def test_what_is_not_seeded_is_said_and_an_error_leaves_the_block(ranks: RankPool) -> None:
    ranks.run(2, unseeded)
