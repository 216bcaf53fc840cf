"""State of optimizers whose parameters are parts, saved and loaded as that of the unsharded model's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import (
    KINDS,
    Model,
    loaded,
    steps,
    whole_model,
)
from ranks import RankPool
from torch import nn

import pynccl_autograd as ad
from pynccl import Communicator


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


def optimizers_refused(comm: Communicator) -> None:
    model, other = loaded(comm), nn.Linear(2, 3)
    with pytest.raises(ValueError, match=r"a parameter of shape \[3, 2\] that is not the model's"):
        ad.full_optimizer_state_dict(model, torch.optim.SGD(other.parameters()))
    optimizer = steps(model, KINDS["adam"], 1)
    state = ad.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    with pytest.raises(TypeError, match=r"expected what full_optimizer_state_dict makes"):
        ad.load_full_optimizer_state_dict(model, optimizer, {"params": []})
    with pytest.raises(RuntimeError, match=r"exp_avg of up.weight: found \[3, 8\], expected \[24, 8\]"):
        wrong = {**state["state"], "up.weight": {"exp_avg": torch.zeros(3, 8)}}
        ad.load_full_optimizer_state_dict(model, optimizer, {**state, "state": wrong})
    with pytest.raises(ValueError, match=r"other parameters: without \['up.bias'\]"):
        names = [name for name in state["param_groups"][0]["params"] if name != "up.bias"]
        ad.load_full_optimizer_state_dict(model, optimizer, {**state, "param_groups": [{"params": names}]})
    if comm.rank == 1:
        del optimizer.state[model.up.weight]
    with pytest.raises(
        ValueError, match=r"the ranks have other state: rank 1 and rank 0 differ in that of up.weight: here \["
    ):
        ad.full_optimizer_state_dict(model, optimizer)
    optimizer.state[model.up.weight] = {"row": torch.zeros(5)}
    with pytest.raises(
        ValueError, match=r"row of up.weight has shape \[5\], expected that of this rank's part, \[12, 8\]"
    ):
        ad.full_optimizer_state_dict(model, optimizer)


def test_optimizers_that_do_not_fit_are_refused_on_every_rank(ranks: RankPool) -> None:
    ranks.run(2, optimizers_refused)
