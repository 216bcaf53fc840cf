"""State dicts of the unsharded model and its optimizer, of models with parts for parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import KINDS, NAMES, Model, loaded, same_output, steps, whole_model
from ranks import RankPool, each_size
from torch import nn

import pynccl_autograd as ad
from pynccl import Communicator


def there_and_back(comm: Communicator) -> None:
    expected = whole_model().state_dict()
    model = loaded(comm)
    same_output(model)
    for rank0_only in (True, False):
        found = ad.full_state_dict(model, rank0_only=rank0_only)
        if rank0_only and comm.rank:
            assert found == {}
            continue
        assert list(found) == list(expected) and set(found) == set(NAMES)
        for name, value in expected.items():
            assert torch.equal(found[name], value) and found[name].dtype == value.dtype, name
        assert found["head.weight"] is found["embedding.weight"]
        plain = Model()
        plain.load_state_dict(found)
        same_output(plain)
        found["norm.weight"].zero_()  # a copy
    same_output(model)


def from_rank_0(comm: Communicator, path: str) -> None:
    """Which may have the checkpoint alone."""
    model, again = Model(comm), Model(comm)
    state = whole_model().state_dict() if comm.rank == 0 else None
    assert ad.load_full_state_dict(model, state) == ([], [])
    same_output(model)
    ad.save_full_state_dict(model, path)
    ad.load_full_state_dict(again, path if comm.rank == 0 else None)
    same_output(again)
    with torch.device("meta"):
        empty = Model(comm)
    ad.load_full_state_dict(empty, state)
    same_output(empty)


@each_size
def test_the_full_state_dict_is_that_of_the_unsharded_model(ranks: RankPool, n: int, tmp_path: Path) -> None:
    ranks.run(n, there_and_back)
    ranks.run(n, from_rank_0, str(tmp_path / "model.safetensors"))


def half(comm: Communicator) -> None:
    model = loaded(comm).to(torch.bfloat16)
    found = ad.full_state_dict(model, comm, rank0_only=False)
    for name, value in whole_model().to(torch.bfloat16).state_dict().items():
        assert torch.equal(found[name], value) and found[name].dtype == torch.bfloat16
    flags = nn.Module()
    flags.mask = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
    flags.mask.shard = ad.Shard(comm, 0, (2 * comm.size,))  # type: ignore[attr-defined]
    assert ad.full_state_dict(flags, rank0_only=False)["mask"].tolist() == [True, False] * comm.size
    ad.load_full_state_dict(flags, {"mask": torch.ones(2 * comm.size, dtype=torch.bool)} if comm.rank == 0 else None)
    assert flags.mask.all()


def test_of_any_type(ranks: RankPool) -> None:
    ranks.run(2, half)


def two_communicators(comm: Communicator) -> None:
    mesh = ad.Mesh(comm, {"dp": 2, "tp": 2})
    model = nn.Sequential(
        ad.ColumnParallelLinear(4, 8, mesh["tp"], bias=False), ad.ColumnParallelLinear(8, 4, mesh["dp"], bias=False)
    )
    with pytest.raises(ValueError, match=r"cut over 2 communicators; pass comm="):
        ad.full_state_dict(model)
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)).state_dict()
    ad.load_full_state_dict(model, whole if comm.rank == 0 else None, comm=comm)
    found = ad.full_state_dict(model, comm)
    assert set(found) == (set() if comm.rank else set(whole))
    assert all(torch.equal(found[name], whole[name]) for name in found)
    mesh.close()


def test_parameters_cut_over_several_communicators(ranks: RankPool) -> None:
    ranks.run(4, two_communicators)


# ----------------------------------------------------------------------------------------------- optimizers


def goes_on(comm: Communicator, kind: str, path: str) -> None:
    """Of a whole optimizer's state on rank 0: two steps more, as the whole model takes them."""
    whole = whole_model()
    whole_optimizer = steps(whole, KINDS[kind], 5)
    model = Model(comm)
    checkpoint = torch.load(path) if comm.rank == 0 else {"model": None, "optimizer": None}
    ad.load_full_state_dict(model, checkpoint["model"])
    optimizer = KINDS[kind](model.parameters())
    ad.load_full_optimizer_state_dict(model, optimizer, checkpoint["optimizer"])
    steps(model, None, 2, optimizer)
    same = ad.full_state_dict(model, rank0_only=False)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(same[name], value, rtol=1e-9, atol=1e-12)
    found = ad.full_optimizer_state_dict(model, optimizer)
    assert found == {} if comm.rank else list(found) == ["state", "param_groups"]
    found = ad.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    for name, parameter in whole.named_parameters():
        expected = whole_optimizer.state[parameter]
        assert set(found["state"][name]) == set(expected)
        for key, value in expected.items():
            torch.testing.assert_close(found["state"][name][key], value, rtol=1e-9, atol=1e-12)
    names = [name for name, _ in whole.named_parameters()]
    assert [name for group in found["param_groups"] for name in group["params"]] == names
    assert [group["lr"] for group in found["param_groups"]] == [group["lr"] for group in whole_optimizer.param_groups]


def stops(comm: Communicator, kind: str, path: str) -> None:
    model = loaded(comm)
    optimizer = steps(model, KINDS[kind], 3)
    checkpoint = {"model": ad.full_state_dict(model), "optimizer": ad.full_optimizer_state_dict(model, optimizer)}
    if comm.rank == 0:
        torch.save(checkpoint, path)


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_goes_on_with_another_number_of_ranks(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "all.pt")
    ranks.run(4, stops, kind, path)
    ranks.run(2, goes_on, kind, path)
