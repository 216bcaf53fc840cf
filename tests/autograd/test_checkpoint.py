"""State dicts of the unsharded model, of models with parts for parameters, and what is no checkpoint of theirs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import (
    NAMES,
    Model,
    loaded,
    same_output,
    whole_model,
)
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
        found["norm.weight"].zero_()  # a copy
    same_output(model)
    plain = Model()
    if comm.rank == 0:
        plain.load_state_dict(ad.full_state_dict(model))
        same_output(plain)
    else:
        ad.full_state_dict(model)


@each_size
def test_the_full_state_dict_is_that_of_the_unsharded_model(ranks: RankPool, n: int) -> None:
    ranks.run(n, there_and_back)


def from_rank_0(comm: Communicator, path: str) -> None:
    model = Model(comm)
    state = whole_model().state_dict() if comm.rank == 0 else None
    assert ad.load_full_state_dict(model, state) == ([], [])
    same_output(model)
    ad.save_full_state_dict(model, path)
    again = Model(comm)
    ad.load_full_state_dict(again, path if comm.rank == 0 else None)
    same_output(again)
    with torch.device("meta"):
        empty = Model(comm)
    ad.load_full_state_dict(empty, state)
    same_output(empty)


@each_size
def test_rank_0_may_have_the_checkpoint_alone(ranks: RankPool, n: int, tmp_path: Path) -> None:
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


def states_refused(comm: Communicator) -> None:
    model, state = loaded(comm), whole_model().state_dict()

    lacking = {name: value for name, value in state.items() if not name.startswith("up")}
    text = r'Error.s. in loading state_dict for Model:\n\tUnexpected key.s. in state_dict: "other". \n\t'
    text += r'Missing key.s. in state_dict: "up.weight", "up.bias"'
    with pytest.raises(RuntimeError, match=text):
        ad.load_full_state_dict(model, {**lacking, "other": torch.ones(1)} if comm.rank == 0 else None)
    same_output(model)
    found = ad.load_full_state_dict(model, {**lacking, "other": torch.ones(1)}, strict=False)
    assert found.missing_keys == ["up.weight", "up.bias"] and found.unexpected_keys == ["other"]
    ad.load_full_state_dict(model, {name: value for name, value in state.items() if name != "head.weight"})
    with pytest.raises(RuntimeError, match=r"size mismatch for up.weight: found \[12, 8\], expected \[24, 8\]"):
        ad.load_full_state_dict(model, {**state, "up.weight": torch.ones(12, 8)}, strict=False)


def files_refused(comm: Communicator, folder: str) -> None:
    model, state = loaded(comm), whole_model().state_dict()
    with pytest.raises(RuntimeError if comm.rank else ValueError, match=r"one.safetensors is no whole file"):
        ad.load_full_state_dict(model, f"{folder}/one.safetensors" if comm.rank == 0 else state)
    with pytest.raises(FileNotFoundError, match=r"has no file .safetensors that is whole"):
        ad.load_full_state_dict(model, f"{folder}/empty")
    with pytest.raises(ValueError, match=r"has one.safetensors, two.safetensors; say which one to load"):
        ad.load_full_state_dict(model, folder)
    with pytest.raises(ValueError, match=r"bad.safetensors.index.json is no index: it needs a weight_map"):
        ad.load_full_state_dict(model, f"{folder}/bad/bad.safetensors.index.json")
    with pytest.raises(ValueError, match=r"model.bin, expected a file .safetensors, an index"):
        ad.load_full_state_dict(model, f"{folder}/model.bin")
    with pytest.raises(
        TypeError if comm.rank == 1 else RuntimeError, match=r"state is 3, expected a state dict, a path"
    ):
        ad.load_full_state_dict(model, 3 if comm.rank == 1 else state)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"state is None on ranks \[0\]; expected it on none, or on all but rank 0"):
        ad.load_full_state_dict(model, state if comm.rank == 1 else None)
    same_output(model)


def models_refused(comm: Communicator, folder: str) -> None:
    model, state = loaded(comm), whole_model().state_dict()
    with pytest.raises(
        RuntimeError, match=r"(?s)up.weight is the whole parameter.*pynccl_autograd.load_full_state_dict"
    ):
        model.load_state_dict(state)
    model.load_state_dict(model.state_dict())

    file = f"{folder}/model.bin/below"  # model.bin is a file
    with pytest.raises(RuntimeError if comm.rank else NotADirectoryError, match="Not a directory"):
        ad.save_full_state_dict(model, file)
    with pytest.raises(ValueError, match=r"max_shard_bytes is 0, expected a number above 0"):
        ad.save_full_state_dict(model, folder, 0)
    with pytest.raises(TypeError, match=r"x is torch.complex128, which files of safetensors cannot hold"):
        wide = nn.Module()
        wide.x = nn.Parameter(torch.ones(2, dtype=torch.complex128))
        ad.save_full_state_dict(wide, folder)
    with pytest.raises(TypeError, match=r"full_state_dict: model is 3, expected a torch.nn.Module"):
        ad.full_state_dict(3)  # type: ignore[arg-type]
    with torch.device("meta"):
        empty = Model(comm)
        empty.register_buffer("table", torch.ones(2), persistent=False)
    with pytest.raises(ValueError, match=r"norm_scale is on the meta device: it has no values"):
        ad.full_state_dict(empty)
    with pytest.raises(RuntimeError, match=r"since not persistent: table; compute them first"):
        ad.load_full_state_dict(empty, state)
    same_output(model)


def test_bad_input_is_refused_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    for name in ("one.safetensors", "two.safetensors", "model.bin"):
        (tmp_path / name).write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "bad.safetensors.index.json").write_text('{"weight_map": {"x": "../one.safetensors"}}')
    ranks.run(2, states_refused)
    ranks.run(2, files_refused, str(tmp_path))
    ranks.run(2, models_refused, str(tmp_path))


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
