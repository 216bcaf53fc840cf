"""Hugging Face models saved by some ranks, loaded by others and by transformers itself, and trained further."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool
from small_transformers import MAKE, batch
from torch import nn

import pynccl_autograd as ad
from pynccl import Communicator

pytest.importorskip("transformers")

TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}


def llama(kv_heads: int, tied: bool, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    return MAKE["llama"](kv_heads, tied).double()


def losses_of(model: Any, optimizer: torch.optim.Optimizer, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        optimizer.zero_grad()
        loss = model(**batch(step)).loss
        loss.backward()
        ad.finish_gradients(model)
        optimizer.step()
        losses.append(loss.item())
    return losses


def adam(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    return torch.optim.AdamW([{"params": others}, {"params": [first], "lr": 0.02}], lr=0.01)


def train_and_save(comm: Communicator, folder: str, kv_heads: int, tied: bool) -> list[float]:
    """Save after two steps; return the losses of these and of three more steps."""
    model: Any = ad.parallelize(llama(kv_heads, tied), comm, ad.plans.llama)
    optimizer = adam(model)
    losses = losses_of(model, optimizer, 0, 2)
    ad.save_full_state_dict(model, folder, 20_000)
    state = ad.full_optimizer_state_dict(model, optimizer)
    if comm.rank == 0:
        model.config.save_pretrained(folder)
        torch.save(state, f"{folder}/optimizer.pt")
    return [*losses, *losses_of(model, optimizer, 2, 3)]


def load_and_train(comm: Communicator, folder: str, kv_heads: int, tied: bool) -> list[float]:
    with torch.device("meta"):
        empty = llama(kv_heads, tied, seed=2)
    model: Any = ad.parallelize(empty, comm, ad.plans.llama)
    ad.load_full_state_dict(model, folder)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    optimizer = adam(model)
    state = torch.load(f"{folder}/optimizer.pt") if comm.rank == 0 else None
    ad.load_full_optimizer_state_dict(model, optimizer, state)
    return losses_of(model, optimizer, 2, 3)


@pytest.mark.parametrize(("kv_heads", "tied"), [(8, True), (2, False)])
def test_llama_saved_by_4_ranks_resumes_on_2_on_1_and_in_plain_transformers(
    ranks: RankPool, tmp_path: Path, kv_heads: int, tied: bool
) -> None:
    from transformers import AutoModelForCausalLM

    folder = str(tmp_path / "model")
    expected = ranks.run(4, train_and_save, folder, kv_heads, tied)[0]
    unsharded = llama(kv_heads, tied)
    torch.testing.assert_close(losses_of(unsharded, adam(unsharded), 0, 5), expected, rtol=1e-10, atol=1e-10)
    for n in (2, 1):
        for found in ranks.run(n, load_and_train, folder, kv_heads, tied):
            torch.testing.assert_close(found, expected[2:], **TOLERANCE)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    optimizer = adam(plain)
    ad.load_full_optimizer_state_dict(plain, optimizer, torch.load(f"{folder}/optimizer.pt"))
    torch.testing.assert_close(losses_of(plain, optimizer, 2, 3), expected[2:], **TOLERANCE)
    plain.save_pretrained(folder, max_shard_size="20KB")  # ranks load what transformers has saved
    for loss in ranks.run(2, loss_of_saved, folder, kv_heads, tied):
        torch.testing.assert_close(loss, plain(**batch(5)).loss.item(), **TOLERANCE)


def loss_of_saved(comm: Communicator, folder: str, kv_heads: int, tied: bool) -> float:
    model: Any = ad.parallelize(llama(kv_heads, tied, seed=2), comm, ad.plans.llama)
    ad.load_full_state_dict(model, folder)
    loss: float = model(**batch(5)).loss.item()
    return loss


def save_pretrained_shards(comm: Communicator, folder: str) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = ad.parallelize(llama(2, True), comm, ad.plans.llama)
    advice = r"ad.save_full_state_dict\(model, folder\) on every rank, and model.config.save_pretrained"
    for each_model in (model, copy.deepcopy(model)):
        for module in (each_model, each_model.model):
            with pytest.raises(RuntimeError, match=advice):
                module.save_pretrained(f"{folder}/parts")
        with pytest.raises(ValueError, match=r"has shape \[\d+, \d+\], expected that of the full parameter, .*; pass"):
            each_model.save_pretrained(f"{folder}/parts", state_dict=each_model.state_dict())
        assert not Path(folder, "parts").exists()
        with torch.no_grad():
            each_model.model.norm.weight.mul_(1 + (each_model is not model))  # shows that the last written file is read
        each_model.save_pretrained(f"{folder}/whole", state_dict=ad.full_state_dict(each_model), max_shard_size="20KB")
        comm.barrier()
        plain = AutoModelForCausalLM.from_pretrained(f"{folder}/whole", dtype=torch.float64)
        torch.testing.assert_close(plain(**batch(0)).loss, each_model(**batch(0)).loss, **TOLERANCE)
        comm.barrier()


def test_save_pretrained_saves_the_full_model_or_raises(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(4, save_pretrained_shards, str(tmp_path))
