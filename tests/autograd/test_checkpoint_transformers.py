"""Models of Hugging Face's library: saved by some ranks, loaded by others and by the library itself, trained on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import with_group
from ranks import RankPool
from small_transformers import MAKE, WORDS
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator

pytest.importorskip("transformers")

SEQUENCE = 8
TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}


def llama(kv_heads: int, tied: bool, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    return MAKE["llama"](kv_heads, tied).double()


def batch(step: int) -> Tensor:
    return torch.randint(WORDS, (2, SEQUENCE), generator=torch.Generator().manual_seed(step))


def loss_of(model: Any, step: int = 0) -> Tensor:
    loss: Tensor = model(input_ids=batch(step), labels=batch(step)).loss
    return loss


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        ad.finish_gradients(model)
        optimizer.step()
        losses.append(loss.item())
    return losses


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


# ------------------------------------------------------------------------------------------------- on other ranks


def saves(comm: Communicator, folder: str, kv_heads: int, tied: bool) -> list[float]:
    """After two steps; the losses of those and of the two that follow."""
    model: Any = ad.parallelize(llama(kv_heads, tied), comm, ad.plans.llama)
    optimizer = adam(model)
    losses = trained(model, optimizer, 0, 2)
    ad.save_full_state_dict(model, folder, 20_000)
    if comm.rank == 0:
        model.config.save_pretrained(folder)
    state = ad.full_optimizer_state_dict(model, optimizer)
    if comm.rank == 0:
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
    assert len(list(Path(folder).glob("model-*.safetensors"))) > 2
    for n in (2, 1):
        for found in ranks.run(n, goes_on, folder, kv_heads, tied):
            torch.testing.assert_close(found, expected[2:], **TOLERANCE)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    assert (plain.lm_head.weight is plain.model.embed_tokens.weight) == tied
    torch.testing.assert_close(loss_of(plain, 2).item(), expected[2], **TOLERANCE)
    whole = llama(kv_heads, tied)
    optimizer = adam(whole)
    torch.testing.assert_close(trained(whole, optimizer, 0, 5), expected, rtol=1e-10, atol=1e-10)
    other = adam(plain)
    state = torch.load(f"{folder}/optimizer.pt")
    ad.load_full_optimizer_state_dict(plain, other, state)
    torch.testing.assert_close(trained(plain, other, 2, 3), expected[2:], **TOLERANCE)


def pretrained(comm: Communicator, folder: str) -> float:
    """What transformers itself has saved, on the meta device here."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).double()
    model = ad.parallelize(empty, comm, ad.plans.llama)
    ad.load_full_state_dict(model, folder)
    return loss_of(model).item()


def test_what_transformers_has_saved_is_loaded(ranks: RankPool, tmp_path: Path) -> None:
    whole = llama(2, True)
    whole.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    for found in ranks.run(4, pretrained, str(tmp_path)):
        torch.testing.assert_close(found, loss_of(whole).item(), **TOLERANCE)


def by_torch(comm: Communicator, folder: str, saving: bool) -> list[float]:
    """Model and optimizer through torch.distributed.checkpoint, with heads of keys and values that ranks share."""
    import torch.distributed.checkpoint as dcp

    model = ad.parallelize(llama(2, True, seed=1 if saving else 2), comm, ad.plans.llama)
    optimizer = adam(model)
    state = {"model": ad.dcp_state_dict(model), "optimizer": ad.dcp_optimizer_state_dict(model, optimizer)}
    dist = with_group(comm, f"{folder}-store-{comm.size}-{saving}")
    try:
        if saving:
            trained(model, optimizer, 0, 2)
            dcp.save(state, checkpoint_id=folder)
        else:
            dcp.load(state, checkpoint_id=folder)
    finally:
        dist.destroy_process_group()
    return trained(model, optimizer, 2, 3)


def test_llama_goes_on_through_torch_distributed_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    expected = ranks.run(4, by_torch, folder, True)[0]
    for n in (2, 1):
        for found in ranks.run(n, by_torch, folder, False):
            torch.testing.assert_close(found, expected, **TOLERANCE)


# ------------------------------------------------------------------------------------------------- save_pretrained


def refuses_parts(comm: Communicator, folder: str, tied: bool) -> float:
    from transformers import AutoModel, AutoModelForCausalLM

    model: Any = ad.parallelize(llama(2, tied), comm, ad.plans.llama)
    expected = loss_of(model)
    told = r"ad.save_full_state_dict\(model, folder\), and model.config.save_pretrained\(folder\) on rank 0"
    for one in (model, copy.deepcopy(model)):
        assert one.save_pretrained.args == (one,)
        for options in ({}, {"max_shard_size": "1GB"}, {"distributed_checkpoint": True, "state_dict": {}}):
            with pytest.raises(RuntimeError, match=told):
                one.save_pretrained(f"{folder}/parts", **options)
        with pytest.raises(ValueError, match=r"has shape \[\d+, \d+\], expected that of the whole, \[\d+, \d+\]: pass"):
            one.save_pretrained(f"{folder}/parts", state_dict=one.state_dict())
        with pytest.raises(ValueError, match=r"pass state_dict=ad.full_state_dict\(model\)"):
            one.save_pretrained(f"{folder}/parts", True, one.state_dict())
        with pytest.raises(RuntimeError, match=told):
            one.model.save_pretrained(f"{folder}/parts")
        assert not Path(folder, "parts").exists()
        with torch.no_grad():
            one.model.norm.weight.mul_(1 + (one is not model))  # so that what is read is what was written last
        one.save_pretrained(f"{folder}/whole", state_dict=ad.full_state_dict(one), max_shard_size="20KB")
        comm.barrier()
        plain = AutoModelForCausalLM.from_pretrained(f"{folder}/whole", dtype=torch.float64)
        torch.testing.assert_close(loss_of(plain), loss_of(one), **TOLERANCE)
        comm.barrier()
    model.model.save_pretrained(f"{folder}/inner", state_dict=ad.full_state_dict(model.model))
    comm.barrier()
    inner = AutoModel.from_pretrained(f"{folder}/inner", dtype=torch.float64)
    hidden = model.model(input_ids=batch(0)).last_hidden_state
    torch.testing.assert_close(inner(input_ids=batch(0)).last_hidden_state, hidden, rtol=1e-10, atol=1e-11)
    with pytest.raises(RuntimeError, match=r"size mismatch for model.layers.0.mlp.up_proj.weight"):
        llama(2, tied).load_state_dict(model.state_dict())
    return expected.item()


@pytest.mark.parametrize("tied", [True, False])
def test_save_pretrained_saves_the_whole_or_raises(ranks: RankPool, tmp_path: Path, tied: bool) -> None:
    assert len(set(ranks.run(4, refuses_parts, str(tmp_path), tied))) == 1
