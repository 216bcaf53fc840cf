"""Modules that wrap others (torch.compile, activation checkpointing, DDP) do not show in names, and checkpoints of
wrapped models load."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import Model, check_output, full_model, sharded_model, words
from ranks import RankPool
from safetensors.torch import load_file
from small_transformers import MAKE
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel

import pynccl_autograd as ad
from pynccl import Communicator

Wrap = Callable[[Any], Any]


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def compiled_layers(model: Any) -> Any:
    model.up, model.norm = compiled(model.up), compiled(model.norm)
    return model


def checkpointed_layers(model: Any) -> Any:
    model.up, model.head = checkpoint_wrapper(model.up), compiled(checkpoint_wrapper(model.head))
    return model


def all_at_once(model: Any) -> Any:
    return compiled(checkpointed_layers(model))


def in_ddp(model: Any) -> Any:
    return DistributedDataParallel(model)


def compiled_in_ddp(model: Any) -> Any:
    return DistributedDataParallel(compiled(compiled_layers(model)))


class Holder(nn.Module):
    """A user's own model, with a child that is called as DDP calls the module that it wraps."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model

    def forward(self, ids: Tensor) -> Any:
        return self.module(ids)

    def get_extra_state(self) -> Any:
        return {"held": 1}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


WRAPS: list[Wrap] = [compiled, compiled_layers, checkpointed_layers, all_at_once, lambda model: compiled(Holder(model))]


def step(model: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(words()).square().sum().backward()
    optimizer.step()
    return optimizer


def assert_same(state: Any, expected: Any) -> None:
    """Compare two states of an optimizer."""
    torch.testing.assert_close(state["state"], expected["state"], rtol=0, atol=0)
    assert state["param_groups"] == expected["param_groups"]


def check_names(comm: Communicator, wrap: Wrap, plain: Any, folder: str) -> None:
    """Compare a wrapped model with the plain one: in each way to save, the names and values are equal; each loads what
    the other has saved, and what torch.save would write."""
    wrapped = wrap(sharded_model(comm))
    optimizers = step(plain), step(wrapped)
    full, found = (ad.full_state_dict(model, comm, rank0_only=False) for model in (plain, wrapped))
    assert list(found) == list(full)
    torch.testing.assert_close(found, full, rtol=0, atol=0)
    assert ad.describe(wrapped) == ad.describe(plain)
    assert ad.dcp_state_dict(wrapped).keys() == ad.dcp_state_dict(plain).keys()
    states = [
        ad.full_optimizer_state_dict(model, optimizer, comm, rank0_only=False)
        for model, optimizer in zip((plain, wrapped), optimizers, strict=True)
    ]
    assert_same(states[1], states[0])
    sharded = [
        ad.dcp_optimizer_state_dict(model, optimizer).state_dict()
        for model, optimizer in zip((plain, wrapped), optimizers, strict=True)
    ]
    assert sharded[0]["state"].keys() == sharded[1]["state"].keys()
    if not any(name.endswith("_extra_state") for name in full):
        ad.save_full_state_dict(wrapped, folder, comm=comm)
        assert load_file(f"{folder}/model.safetensors").keys() == {*full} - {"head.weight"}

    of_torch = wrap(full_model()).state_dict()  # with the names of the wrappers, where torch writes them
    for model in (plain, wrapped):
        assert ad.load_full_state_dict(model, of_torch, comm=comm) == ([], [])
        assert ad.full_state_dict(model, comm, rank0_only=False).keys() == full.keys()
        check_output(model)
        ad.load_full_state_dict(model, found, comm=comm)
        assert torch.equal(model(words()), wrapped(words()))
    raw = [name for name, _ in wrapped.named_parameters()]  # what an optimizer state with wrappers was saved with
    names = dict(zip((name for name, _ in plain.named_parameters()), raw, strict=True))
    renamed = {names[name]: row for name, row in states[0]["state"].items()}
    groups = [{**group, "params": [names[name] for name in group["params"]]} for group in states[0]["param_groups"]]
    for model, state in ((plain, {"state": renamed, "param_groups": groups}), (wrapped, states[0])):
        fresh = torch.optim.AdamW(model.parameters())
        ad.load_full_optimizer_state_dict(model, fresh, state, comm=comm)
        again = ad.full_optimizer_state_dict(model, fresh, comm, rank0_only=False)
        assert_same(again, states[0])


def check_all_wraps(comm: Communicator, folder: str) -> None:
    for at, wrap in enumerate(WRAPS):
        of_user = at == len(WRAPS) - 1
        check_names(comm, wrap, Holder(sharded_model(comm)) if of_user else sharded_model(comm), f"{folder}/{at}")
    loaded = compiled(Holder(sharded_model(comm)))
    ad.load_full_state_dict(loaded, Holder(full_model()).state_dict())
    assert loaded.extra == {"held": 1}
    with pytest.raises(RuntimeError, match=r'Missing key.* in state_dict: "up.bias"'):
        state = full_model().state_dict()
        ad.load_full_state_dict(checkpointed_layers(sharded_model(comm)), {**state, "up.bias": None})


def test_wrappers_do_not_show_in_names_and_both_forms_load(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, check_all_wraps, str(tmp_path))


def check_ddp(comm: Communicator, folder: str) -> None:
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", comm.size), rank=comm.rank, world_size=comm.size
    )
    try:
        with ad.Mesh(comm, {"dp": 2, "tp": -1}) as mesh:
            for wrap in (in_ddp, compiled_in_ddp):
                _check_ddp(mesh, wrap, f"{folder}/{comm.rank}")
        gc.collect()
    finally:
        comm.barrier()
        dist.destroy_process_group()


def _check_ddp(mesh: Any, wrap: Wrap, folder: str) -> None:
    check_names(mesh["tp"], wrap, sharded_model(mesh["tp"]), folder)
    # As torch names them. The child of the user's model that is called `module` keeps its name.
    twice = DistributedDataParallel(Holder(full_model()))
    assert ad.full_state_dict(twice).keys() == get_model_state_dict(twice).keys()
    assert "module.up.weight" in ad.full_state_dict(twice)
    plain, changed = Holder(full_model()), Holder(full_model(seed=6))
    for state in (DistributedDataParallel(changed).state_dict(), changed.state_dict()):
        for model in (plain, twice):
            ad.load_full_state_dict(model, Holder(full_model()).state_dict())
            ad.load_full_state_dict(model, state)
            check_output(model, seed=6)


def test_names_within_ddp(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, check_ddp, str(tmp_path))


class Pair(nn.Module):
    """Two parameters of one name, one in a child that is called `module`."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight, self.module = nn.Parameter(torch.full((2,), value)), nn.Linear(1, 2, bias=False)
        nn.init.constant_(self.module.weight, value + 1)


def test_names_that_could_be_read_in_two_ways() -> None:
    state = Pair(1.0).state_dict()
    with_prefix = {f"module.{name}": value for name, value in state.items()}
    for given in (state, with_prefix):
        model = Pair(5.0)
        assert ad.load_full_state_dict(model, given) == ([], [])
        torch.testing.assert_close(model.state_dict(), state)
    model = Pair(5.0)
    found = ad.load_full_state_dict(model, {"weight": torch.zeros(2), "_orig_mod.weight": torch.ones(2)}, strict=False)
    assert found == (["module.weight"], ["_orig_mod.weight"])
    assert torch.equal(model.weight.detach(), torch.zeros(2))


def check_model_and_shards(comm: Communicator) -> None:
    def loss(model: Any, ids: Tensor) -> Tensor:
        total: Tensor = model(ids).square().sum()
        return total

    ad.testing.check_model(all_at_once(sharded_model(comm)), Model.double(full_model()), words(), comm, loss=loss)
    own = nn.Sequential(nn.Linear(4, 2, bias=False))
    ad.set_shard(own[0].weight, ad.Shard(comm, 1, (2, 8)))
    with ad.keep_shards(own):
        own[0] = checkpoint_wrapper(own[0])
        own.load_state_dict({"0.weight": torch.ones(2, 4)}, assign=True)
    assert ad.full_state_dict(own, rank0_only=False)["0.weight"].shape == (2, 8)


def test_check_model_and_keep_shards_see_through_wrappers(ranks: RankPool) -> None:
    ranks.run(2, check_model_and_shards)


def check_save_pretrained(comm: Communicator, folder: str) -> None:
    torch.manual_seed(0)
    model: Any = MAKE["llama"]()
    reference = {name: value.clone() for name, value in model.state_dict().items()}
    ad.parallelize(model, comm, ad.plans.llama)
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    model.model.layers[1] = compiled(model.model.layers[1])
    whole = compiled(model)
    whole.save_pretrained(f"{folder}/a", state_dict=ad.full_state_dict(whole))
    ad.save_full_state_dict(whole, f"{folder}/b")
    if comm.rank == 0:
        model.config.save_pretrained(f"{folder}/b")
        for name in ("a", "b"):
            loaded, info = type(model).from_pretrained(f"{folder}/{name}", output_loading_info=True)
            assert not info["missing_keys"] and not info["unexpected_keys"]
            torch.testing.assert_close(loaded.state_dict(), reference)
    with pytest.raises(ValueError, match=r"save_pretrained: model.layers.0.self_attn.q_proj.weight of state_dict has"):
        wrong = {name: value[:1] for name, value in reference.items() if "layers.0" in name}
        whole.save_pretrained(f"{folder}/c", state_dict=wrong)


def test_a_compiled_model_saves_what_transformers_loads(ranks: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    ranks.run(2, check_save_pretrained, str(tmp_path))


class FullyShardedDataParallel(nn.Module):
    """Stands for torch's (FSDP1), which needs a GPU. It copies the shards, which then look like whole tensors."""

    __module__ = "torch.distributed.fsdp.fully_sharded_data_parallel"

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module


def refuse_fsdp1(comm: Communicator) -> None:
    assert ad.full_state_dict(FullyShardedDataParallel(full_model()), comm, rank0_only=False)
    functions: list[Any] = [ad.full_state_dict, ad.dcp_state_dict]
    for function in functions:
        with pytest.raises(TypeError, match=r"FSDP1.* use torch's fully_shard \(FSDP2\)"):
            function(FullyShardedDataParallel(sharded_model(comm)))


def test_fsdp1_of_a_parallel_model_is_refused(ranks: RankPool) -> None:
    ranks.run(2, refuse_fsdp1)
