"""What torch's own ways give of a model with shards: the whole, a shard that says so, or an error."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from checkpoints import full_model, init_gloo, sharded_model, train
from ranks import RankPool
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import pynccl_autograd as ad
from pynccl import Communicator

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Scale(nn.Module):
    """A module of the user's, with a shard of `full`."""

    def __init__(self, full: Tensor, comm: Communicator) -> None:
        super().__init__()
        self.scale = nn.Parameter(full.chunk(comm.size)[comm.rank].clone())
        ad.set_shard(self.scale, ad.Shard(comm, 0, full.shape))


def trained(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    train(model, optimizer, 2)
    return model, optimizer


def torch_states(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    states = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    return dict(zip(("model", "optimizer"), states, strict=True))


def assert_whole(found: dict[str, Any]) -> None:
    """Compare with the states of the unsharded model, after the same steps."""
    expected = torch_states(*trained(full_model()))
    torch.testing.assert_close({**found["model"]}, {**expected["model"]}, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found["optimizer"]["state"], expected["optimizer"]["state"], rtol=1e-9, atol=1e-12)


def save_in_torchs_ways(comm: Communicator, folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    dist = init_gloo(comm, f"{folder}-store-{comm.size}")
    try:
        model, optimizer = trained(sharded_model(comm))
        assert_whole(torch_states(model, optimizer, full_state_dict=True))
        whole = torch_states(model, optimizer, full_state_dict=True, cpu_offload=True)
        if comm.rank == 0:
            assert_whole(whole)
        shards = torch_states(model, optimizer)
        dcp.save(shards, checkpoint_id=f"{folder}/states")
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/plain")
        for value in [*model.state_dict().values(), *shards["optimizer"]["state"]["up.weight"].values()]:
            if not hasattr(value, "to_local"):
                assert value.dim() < 2  # of replicated parameters, and the number of steps
        fresh, new = trained(sharded_model(comm, 6))
        dcp.load(states := torch_states(fresh, new), checkpoint_id=f"{folder}/states")
        fresh.load_state_dict(states["model"])
        assert_whole({"model": ad.full_state_dict(fresh, rank0_only=False), "optimizer": torch_states_of(fresh, new)})
        dcp.load({"model": (state := fresh.state_dict())}, checkpoint_id=f"{folder}/plain")
        fresh.load_state_dict(state)
    finally:
        dist.destroy_process_group()


def torch_states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return torch_states(model, optimizer, full_state_dict=True)["optimizer"]


def load_whole(folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    model, optimizer = trained(full_model(6))
    dcp.load(states := torch_states(model, optimizer), checkpoint_id=f"{folder}/states", no_dist=True)
    assert_whole(states)
    dcp.load({"model": (state := full_model(6).state_dict())}, checkpoint_id=f"{folder}/plain", no_dist=True)
    assert_whole({**states, "model": state})


def test_torch_saves_and_returns_whole_models(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, save_in_torchs_ways, str(tmp_path / "two"))
    load_whole(str(tmp_path / "two"))
    ranks.run(3, save_in_torchs_ways, str(tmp_path / "three"))
    load_whole(str(tmp_path / "three"))


def resume_in_memory(comm: Communicator) -> None:
    """The best state of a training, kept by deepcopy, and states of other devices and dtypes, load again."""
    model, optimizer = trained(sharded_model(comm))
    best, moments = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    expected = ad.full_state_dict(model, rank0_only=False)
    full_moments = ad.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    for save in (ad.dcp_optimizer_state_dict, partial(ad.full_optimizer_state_dict, rank0_only=False)):
        new = torch.optim.AdamW(model.parameters())
        new.load_state_dict(moments)  # it has not stepped yet
        saved: Any = save(model, new)
        assert all(type(value) is Tensor for row in new.state.values() for value in row.values())
    torch.testing.assert_close(saved["state"], full_moments["state"], rtol=0, atol=0)
    losses = train(model, optimizer, 2)
    model.load_state_dict(best)
    optimizer.load_state_dict(moments)
    torch.testing.assert_close(ad.full_state_dict(model, rank0_only=False), expected, rtol=0, atol=0)
    assert all(type(value) is Tensor for row in optimizer.state.values() for value in row.values())
    assert train(model, optimizer, 2) == losses
    other = sharded_model(comm, 6)
    other.load_state_dict({name: value.cpu().double() for name, value in best.items()}, assign=True)
    assert all(type(one) is nn.Parameter for one in other.parameters())
    torch.testing.assert_close(ad.full_state_dict(other, rank0_only=False), expected, rtol=0, atol=0, check_dtype=False)
    weight = best["up.weight"]
    assert torch.equal(weight.full_tensor(), expected["up.weight"])
    for still in (weight * 2, weight.half(), weight.data, weight.detach().clone(), torch.zeros_like(weight)):
        assert still.shard is weight.shard  # type: ignore[attr-defined]
    assert type(weight.sum()) is type(weight.t()) is type(weight.T) is type(weight.to_local()) is Tensor
    new = torch.optim.AdamW(model.parameters())  # a full state, as get_optimizer_state_dict(full_state_dict=True) gives
    full = {key: getattr(value, "full_tensor", value.clone)() for key, value in moments["state"][0].items()}
    new.load_state_dict({**moments, "state": {**moments["state"], 0: full}})
    train(model, new, 1)
    assert all(value.shape == one.shape for one in new.state for key, value in new.state[one].items() if key != "step")


def refuse_to_lose_shards(comm: Communicator, folder: str) -> None:
    model, optimizer = trained(sharded_model(comm))
    own = Scale(torch.arange(8.0), comm)
    for state in (model.state_dict(), optimizer.state_dict(), own.state_dict()):
        for save in (pickle.dumps, lambda one: torch.save(one, io.BytesIO())):
            with pytest.raises(TypeError, match=r"would take a shard for the whole: this is Shard\(.* full_state_dict"):
                save(state)
    safetensors = pytest.importorskip("safetensors.torch")
    weight, plain = model.state_dict()["up.weight"], torch.zeros(24 // comm.size, 8, dtype=torch.float64)
    lose: list[Any] = [weight.numpy, lambda: numpy.asarray(weight), lambda: torch.from_dlpack(weight)]
    lose += [lambda: nn.Parameter(weight), lambda: plain.copy_(weight)]
    lose.append(lambda: safetensors.save_file({"up.weight": weight}, f"{folder}/{comm.rank}.safetensors"))
    for one in lose:
        with pytest.raises(TypeError, match=r"Shard\("):
            one()
    sizes = [4, 8] if comm.rank == 0 else [8, 4]  # of the same size here, but a shard of another parameter
    holder = nn.ParameterDict({"scale": torch.zeros(4)})
    ad.set_shard(holder["scale"], ad.Shard(comm, 0, (12,), sizes))
    with pytest.raises(RuntimeError, match=r"expected the same shard"):
        own.load_state_dict(holder.state_dict())


def copy_own_modules(comm: Communicator) -> None:
    model: Any = nn.Sequential(Scale(torch.ones(8), comm), nn.Linear(2, 2, bias=False))
    twins = [copy.deepcopy(model), copy.deepcopy(copy.deepcopy(model)), AveragedModel(model).module]
    for each in (model, *twins):
        assert each[0].scale.shard.comm is comm
        assert ad.full_state_dict(each, rank0_only=False)["0.scale"].shape == (8,)
        assert each.state_dict()["0.scale"].shard is each[0].scale.shard
        each[0].scale.grad = torch.full((8 // comm.size,), comm.rank + 1.0)
        norm = sum(8 // comm.size * (rank + 1.0) ** 2 for rank in range(comm.size)) ** 0.5
        torch.testing.assert_close(ad.clip_grad_norm_(each.parameters(), 1e9), torch.tensor(norm))
    tied = nn.ModuleList([model[0], model[0]])
    assert (twin := copy.deepcopy(tied))[0].scale is twin[1].scale
    assert type(model[0].scale.detach()) is Tensor  # in a forward pass it is a plain tensor
    lone = nn.Linear(2, 1, bias=False)  # replicated, with gradients to sum
    ad.set_shard(lone.weight, ad.Shard(comm, None, (1, 2), partial=True))
    lone = copy.deepcopy(lone)
    lone.weight.grad = torch.ones(1, 2)
    ad.finish_gradients(lone)
    assert torch.equal(lone.weight.grad, torch.full((1, 2), float(comm.size)))
    for kind in KINDS:
        check_holder(comm, holder(comm, kind(torch.arange(2.0) + 2 * comm.rank)))
    ad.set_shard(model[0].scale, None)
    assert type(model.state_dict()["0.scale"]) is Tensor and not hasattr(copy.deepcopy(model)[0].scale, "shard")


KINDS = (nn.Parameter, type("OwnParameter", (nn.Parameter,), {}), torch.clone)  # the last makes a buffer


def holder(comm: Communicator, value: Tensor) -> nn.Module:
    module = nn.Module()
    module.register_parameter("x", value) if isinstance(value, nn.Parameter) else module.register_buffer("x", value)
    ad.set_shard(module.x, ad.Shard(comm, 0, (2 * comm.size,)))
    return module


def check_holder(comm: Communicator, module: nn.Module) -> None:
    whole = torch.arange(2.0 * comm.size)
    for one in (module, copy.deepcopy(module)):
        assert type(one.state_dict()["x"]).__name__ == "ShardTensor"
        assert torch.equal(one.state_dict()["x"].full_tensor(), whole)
        assert torch.equal(ad.full_state_dict(one, comm, rank0_only=False)["x"], whole)


def load_own_modules_from_meta(comm: Communicator) -> None:
    for kind in KINDS:
        module = holder(comm, kind(torch.empty(2, device="meta")))
        ad.load_full_state_dict(module, {"x": torch.arange(2.0 * comm.size)}, comm=comm)
        check_holder(comm, module)


@pytest.mark.parametrize("check", [resume_in_memory, copy_own_modules, load_own_modules_from_meta])
def test_shards_stay_shards(ranks: RankPool, check: Any) -> None:
    ranks.run(2, check)


def test_what_would_lose_a_shard_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, refuse_to_lose_shards, str(tmp_path))


def use_parametrizations(comm: Communicator) -> None:
    from torch.nn.utils import parametrizations, prune

    ways: list[Any] = [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal]
    ways += [nn.utils.weight_norm, nn.utils.spectral_norm, lambda one: prune.l1_unstructured(one, "weight", 0.5)]
    ways.append(lambda one: nn.utils.parametrize.register_parametrization(one, "weight", nn.Identity()))
    for way in ways:
        layers: list[Any] = [ad.ColumnParallelLinear(6, 8, comm), ad.RowParallelLinear(6, 8, comm)]
        layers += [ad.VocabParallelEmbedding(12, 4, comm), ad.VocabParallelHead(4, 12, comm)]
        for layer in layers:
            with warnings.catch_warnings(), pytest.raises(TypeError, match=r"weight is Shard\(.*pruning or another"):
                warnings.simplefilter("ignore", FutureWarning)
                way(layer)


def test_parametrizations_of_parallel_layers_are_refused(ranks: RankPool) -> None:
    ranks.run(2, use_parametrizations)
