"""Tensor-parallel models within torch's DistributedDataParallel and FSDP2, over the other axis of a mesh."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from small_transformers import MAKE, batch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pynccl_autograd as ad
from pynccl import Communicator

pytest.importorskip("transformers")


@contextlib.contextmanager
def device_mesh(comm: Communicator, path: str, mesh: ad.Mesh) -> Iterator[Any]:
    """A torch DeviceMesh of the same ranks, over gloo."""
    dist.init_process_group("gloo", store=dist.FileStore(path, comm.size), rank=comm.rank, world_size=comm.size)
    try:
        yield mesh.to_device_mesh()
    finally:
        gc.collect()  # releases references to the group
        comm.barrier()
        dist.destroy_process_group()


def run_on_mesh(comm: Communicator, path: str, function: Any, *args: Any) -> None:
    """Call the function in its own frame, so that its objects are released before the process group."""
    with ad.Mesh(comm, {"dp": 2, "tp": 2}) as mesh, device_mesh(comm, path, mesh) as data_mesh:
        function(comm, mesh, data_mesh["dp"], *args)


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def make_unsharded() -> Any:
    torch.manual_seed(0)
    return MAKE["llama"](2).double()


def assert_same_state(sharded: Any, optimizer: Any, unsharded: nn.Module, reference: Any, comm: Communicator) -> None:
    """Compare the gathered model and optimizer states with the reference, and load them back."""
    found = ad.full_state_dict(sharded, comm, rank0_only=False)
    torch.testing.assert_close(found, {**unsharded.state_dict()}, rtol=1e-9, atol=1e-11)
    ad.load_full_state_dict(sharded, {name: value + 1 for name, value in found.items()}, comm=comm)
    for name, value in ad.full_state_dict(sharded, comm, rank0_only=False).items():
        assert torch.equal(value, found[name] + 1), name
    states = ad.full_optimizer_state_dict(sharded, optimizer, comm=comm, rank0_only=False)
    expected = {name: reference.state[parameter] for name, parameter in unsharded.named_parameters()}
    torch.testing.assert_close(states["state"], expected, rtol=1e-8, atol=1e-10)
    fresh = sgd(sharded)
    ad.load_full_optimizer_state_dict(sharded, fresh, states, comm=comm)
    for key, state in optimizer.state.items():
        loaded, before = fresh.state[key]["momentum_buffer"], state["momentum_buffer"]
        assert type(loaded) is type(before) and torch.equal(loaded, before)


def train_and_compare(
    comm: Communicator, mesh: ad.Mesh, data_mesh: Any, kind: str, sequence_parallel: bool, norm_type: float
) -> None:
    unsharded = make_unsharded()
    sharded: Any = ad.parallelize(copy.deepcopy(unsharded), mesh["tp"], ad.plans.llama, sequence_parallel)
    model: Any = sharded
    if kind == "ddp":
        model = DistributedDataParallel(sharded, process_group=data_mesh.get_group(), gradient_as_bucket_view=True)
    else:
        with ad.keep_shards(sharded):
            for block in (*sharded.model.layers, sharded):
                fully_shard(block, mesh=data_mesh)
    optimizer, reference = sgd(model), sgd(unsharded)
    for step in range(2):
        batches = [batch(10 * step + rank) for rank in range(2)]
        model(**batches[mesh.coordinate["dp"]]).loss.backward()
        for each_batch in batches:
            (unsharded(**each_batch).loss / 2).backward()
        ad.finish_gradients(model)
        expected = nn.utils.clip_grad_norm_(unsharded.parameters(), 0.5, norm_type)
        torch.testing.assert_close(ad.clip_grad_norm_(model.parameters(), 0.5, norm_type), expected)
        for each_optimizer in (optimizer, reference):
            each_optimizer.step()
            each_optimizer.zero_grad()
    assert_same_state(sharded, optimizer, unsharded, reference, comm)


@pytest.mark.parametrize(
    ("kind", "sequence_parallel", "norm_type"), [("ddp", True, 2.0), ("fsdp", True, math.inf), ("fsdp", False, 2.0)]
)
def test_training_steps_equal_those_of_the_unsharded_model(
    ranks: RankPool, tmp_path: Path, kind: str, sequence_parallel: bool, norm_type: float
) -> None:
    ranks.run(4, run_on_mesh, str(tmp_path / "store"), train_and_compare, kind, sequence_parallel, norm_type)


def sharded_on_both_axes(seed: int, mesh: ad.Mesh, data_mesh: Any) -> tuple[Any, torch.optim.Optimizer]:
    """A model of layers, and a parameter of the user's without gradients, after a step."""
    model: Any = ad.parallelize(make_unsharded(), mesh["tp"], ad.plans.llama, sequence_parallel=False)
    model.extra = nn.Module()
    part = torch.arange(12.0).view(6, 2).chunk(2, 1)[mesh["tp"].rank].contiguous()
    model.extra.weight = nn.Parameter(part.double() * seed)
    ad.set_shard(model.extra.weight, ad.Shard(mesh["tp"], 1, (6, 2)))
    with ad.keep_shards(model):
        for block in (*model.model.layers, model):
            fully_shard(block, mesh=data_mesh)
    optimizer = sgd(model)
    model(**batch(seed)).loss.backward()
    ad.finish_gradients(model)
    optimizer.step()
    return model, optimizer


def full_states(comm: Communicator, model: Any, optimizer: Any) -> Any:
    state = ad.full_optimizer_state_dict(model, optimizer, comm=comm, rank0_only=False)["state"]
    return ad.full_state_dict(model, comm, rank0_only=False), state


def save_and_load_shards(comm: Communicator, mesh: ad.Mesh, data_mesh: Any, folder: str) -> None:
    """torch.distributed.checkpoint takes the states of a model that both axes shard, and gives each rank its part."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    def states(model: Any, optimizer: Any) -> dict[str, Any]:
        moments = ad.dcp_optimizer_state_dict(model, optimizer)
        torchs = get_optimizer_state_dict(model, optimizer)
        return {"model": model.state_dict(), "ours": ad.dcp_state_dict(model), "moments": moments, "torchs": torchs}

    (model, optimizer), (other, fresh) = (sharded_on_both_axes(seed, mesh, data_mesh) for seed in (1, 2))
    expected = full_states(comm, model, optimizer)
    dcp.save(states(model, optimizer), checkpoint_id=folder)
    dcp.load(loaded := states(other, fresh), checkpoint_id=folder)
    torch.testing.assert_close(full_states(comm, other, fresh), expected, rtol=0, atol=0)
    other.load_state_dict({name: value.clone() * 2 for name, value in loaded["model"].items()})
    doubled = ad.full_state_dict(other, comm, rank0_only=False)["lm_head.weight"]
    assert torch.equal(doubled, expected[0]["lm_head.weight"] * 2)
    fresh.step()
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    torch.testing.assert_close({**whole}, expected[0], rtol=0, atol=0)
    if comm.rank == 0:  # as a program without ranks reads it
        plain: Any = make_unsharded()
        plain.extra = nn.Module()
        plain.extra.weight = nn.Parameter(torch.zeros(6, 2, dtype=torch.float64))
        for key in ("model", "ours"):
            state = {key: plain.state_dict()}
            dcp.load(state, checkpoint_id=folder, no_dist=True)
            torch.testing.assert_close({**state[key]}, expected[0], rtol=0, atol=0)


def load_optimizer_states(comm: Communicator, mesh: ad.Mesh, data_mesh: Any) -> None:
    """An optimizer holds DTensors again after it has loaded its own state, a copy of it, or whole tensors."""
    model, optimizer = sharded_on_both_axes(1, mesh, data_mesh)
    expected, own = full_states(comm, model, optimizer), optimizer.state_dict()
    names = [name for name, _ in model.named_parameters()]
    parts = {at for at, one in enumerate(model.parameters()) if one.shard is not None and one.shard.is_part}
    whole = {at: dict(expected[1][names[at]]) if at in parts else row for at, row in own["state"].items()}
    for state in (copy.deepcopy({**own, "state": whole}), copy.deepcopy(own), own):  # `fresh` steps own tensors too
        other, fresh = sharded_on_both_axes(2, mesh, data_mesh)
        other.load_state_dict(model.state_dict())
        fresh.load_state_dict(state)
        assert all(type(row["momentum_buffer"]).__name__ == "DTensor" for row in fresh.state.values())
        torch.testing.assert_close(full_states(comm, other, fresh), expected, rtol=0, atol=0)
        fresh.step()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_states_of_both_axes_in_torchs_checkpoints(ranks: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    ranks.run(4, run_on_mesh, str(tmp_path / "store"), save_and_load_shards, folder, timeout=180)


def test_optimizer_states_of_both_axes(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(4, run_on_mesh, str(tmp_path / "store"), load_optimizer_states, timeout=180)


def use_unmarked_models(comm: Communicator, mesh: ad.Mesh, data_mesh: Any) -> None:
    model: Any = ad.parallelize(make_unsharded(), mesh["tp"], ad.plans.llama)
    fully_shard(model, mesh=data_mesh)
    lost = r"is a DTensor without `shard`, .* within `with pynccl_autograd\.keep_shards"
    for use in (ad.finish_gradients, ad.clip_grad_norm_, ad.full_state_dict):
        options = {"max_norm": 1.0} if use is ad.clip_grad_norm_ else {}
        with pytest.raises(TypeError, match=lost):
            use(model, **options)  # type: ignore[operator]
    kept: Any = ad.parallelize(make_unsharded(), mesh["tp"], ad.plans.llama)
    with ad.keep_shards(kept):
        fully_shard(kept, mesh=data_mesh)
    with pytest.raises(TypeError, match=r"model\.embed_tokens\.weight is a DTensor; .* already averages its gradients"):
        ad.DataParallelGradients(kept, mesh["dp"])


def test_a_dtensor_that_lost_its_shard_mark_raises(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(4, run_on_mesh, str(tmp_path / "store"), use_unmarked_models)
