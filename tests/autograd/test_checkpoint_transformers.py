"""Models of Hugging Face's library: saved by some ranks, loaded by others and by the library itself, trained on."""

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


def trained(model: Any, optimizer: torch.optim.Optimizer, first: int, count: int) -> list[float]:
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


def saves(comm: Communicator, folder: str, kv_heads: int, tied: bool) -> list[float]:
    """After two steps; the losses of those and of the three that follow."""
    model: Any = ad.parallelize(llama(kv_heads, tied), comm, ad.plans.llama)
    optimizer = adam(model)
    losses = trained(model, optimizer, 0, 2)
    ad.save_full_state_dict(model, folder, 20_000)
    state = ad.full_optimizer_state_dict(model, optimizer)
    if comm.rank == 0:
        model.config.save_pretrained(folder)
        torch.save(state, f"{folder}/optimizer.pt")
    return [*losses, *trained(model, optimizer, 2, 3)]


def goes_on(comm: Communicator, folder: str, kv_heads: int, tied: bool) -> list[float]:
    with torch.device("meta"):
        empty = llama(kv_heads, tied, seed=2)
    model: Any = ad.parallelize(empty, comm, ad.plans.llama)
    ad.load_full_state_dict(model, folder)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    optimizer = adam(model)
    state = torch.load(f"{folder}/optimizer.pt") if comm.rank == 0 else None
    ad.load_full_optimizer_state_dict(model, optimizer, state)
    return trained(model, optimizer, 2, 3)


@pytest.mark.parametrize(("kv_heads", "tied"), [(8, True), (2, False)])
def test_llama_of_4_ranks_goes_on_on_2_on_1_and_in_plain_transformers(
    ranks: RankPool, tmp_path: Path, kv_heads: int, tied: bool
) -> None:
    from transformers import AutoModelForCausalLM

    folder = str(tmp_path / "model")
    expected = ranks.run(4, saves, folder, kv_heads, tied)[0]
    whole = llama(kv_heads, tied)
    torch.testing.assert_close(trained(whole, adam(whole), 0, 5), expected, rtol=1e-10, atol=1e-10)
    for n in (2, 1):
        for found in ranks.run(n, goes_on, folder, kv_heads, tied):
            torch.testing.assert_close(found, expected[2:], **TOLERANCE)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    optimizer = adam(plain)
    ad.load_full_optimizer_state_dict(plain, optimizer, torch.load(f"{folder}/optimizer.pt"))
    torch.testing.assert_close(trained(plain, optimizer, 2, 3), expected[2:], **TOLERANCE)
    plain.save_pretrained(folder, max_shard_size="20KB")  # and what the library has saved ranks load
    for loss in ranks.run(2, loss_of_saved, folder, kv_heads, tied):
        torch.testing.assert_close(loss, plain(**batch(5)).loss.item(), **TOLERANCE)


def loss_of_saved(comm: Communicator, folder: str, kv_heads: int, tied: bool) -> float:
    model: Any = ad.parallelize(llama(kv_heads, tied, seed=2), comm, ad.plans.llama)
    ad.load_full_state_dict(model, folder)
    loss: float = model(**batch(5)).loss.item()
    return loss


def refuses_parts(comm: Communicator, folder: str) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = ad.parallelize(llama(2, True), comm, ad.plans.llama)
    told = r"ad.save_full_state_dict\(model, folder\), and model.config.save_pretrained\(folder\) on rank 0"
    for one in (model, copy.deepcopy(model)):
        for part in (one, one.model):
            with pytest.raises(RuntimeError, match=told):
                part.save_pretrained(f"{folder}/parts")
        with pytest.raises(ValueError, match=r"has shape \[\d+, \d+\], expected that of the whole, \[\d+, \d+\]: pass"):
            one.save_pretrained(f"{folder}/parts", state_dict=one.state_dict())
        assert not Path(folder, "parts").exists()
        with torch.no_grad():
            one.model.norm.weight.mul_(1 + (one is not model))  # so that what is read is what was written last
        one.save_pretrained(f"{folder}/whole", state_dict=ad.full_state_dict(one), max_shard_size="20KB")
        comm.barrier()
        plain = AutoModelForCausalLM.from_pretrained(f"{folder}/whole", dtype=torch.float64)
        torch.testing.assert_close(plain(**batch(0)).loss, one(**batch(0)).loss, **TOLERANCE)
        comm.barrier()


def test_save_pretrained_saves_the_whole_or_raises(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(4, refuses_parts, str(tmp_path))
