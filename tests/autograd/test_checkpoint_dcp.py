"""Models with parts for parameters in checkpoints of torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import HIDDEN, WIDTH, loaded, steps, whole_model, with_group, words
from ranks import RankPool
from torch import nn

import pynccl_autograd as ad
from pynccl import Communicator


def trained(comm: Communicator | None, kind: str, count: int) -> tuple[nn.Module, Any]:
    """A model, of parts if there is a communicator, after some steps, with a group of its own for one parameter."""
    model = whole_model() if comm is None else loaded(comm)
    model.get_parameter("norm.bias").requires_grad_(False)
    unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
    model.register_parameter("unused", unused)  # it has no gradient, and so no state
    optimizer = OPTIMIZERS[kind]([{"params": [model.get_parameter("up.weight"), unused], "lr": 0.02}, others(model)])
    steps(model, None, count, optimizer)
    return model, optimizer


def others(model: nn.Module) -> dict[str, Any]:
    return {"params": [one for name, one in model.named_parameters() if name not in ("up.weight", "unused")]}


OPTIMIZERS: dict[str, Any] = {
    "adam": lambda groups: torch.optim.AdamW(groups, lr=0.05, betas=(0.8, 0.9), amsgrad=True),
    "rprop": lambda groups: torch.optim.Rprop(groups, lr=0.01),
}


def losses(model: nn.Module, optimizer: Any, count: int) -> list[float]:
    found = []
    for _ in range(count):
        found.append((model(words()) - 1).square().sum().item())
        steps(model, None, 1, optimizer)
    return found


def stops(comm: Communicator, folder: str, kind: str, asynchronous: bool) -> None:
    import torch.distributed.checkpoint as dcp

    dist = with_group(comm, f"{folder}-store-{comm.size}")
    try:
        model, optimizer = trained(comm, kind, 3)
        optimizer.param_groups[1]["lr"] = 0.03  # as a schedule would
        state = {"model": ad.dcp_state_dict(model), "optimizer": ad.dcp_optimizer_state_dict(model, optimizer)}
        if asynchronous:
            done = dcp.async_save(state, checkpoint_id=folder)
            for parameter in model.parameters():
                parameter.detach().zero_()  # it has been copied
            done.result()  # type: ignore[union-attr]
        else:
            dcp.save(state, checkpoint_id=folder)
    finally:
        dist.destroy_process_group()


def goes_on(comm: Communicator | None, folder: str, kind: str, steps_before: int) -> None:
    """As the unsharded model after as many steps, whatever state there was before."""
    import torch.distributed.checkpoint as dcp

    whole, whole_optimizer = trained(None, kind, 3)
    whole_optimizer.param_groups[1]["lr"] = 0.03
    expected = losses(whole, whole_optimizer, 3)
    dist = None if comm is None else with_group(comm, f"{folder}-store-{comm.size}-{steps_before}")
    try:
        model, optimizer = trained(comm, kind, steps_before)
        before = [one.clone() for one in model.parameters()]
        of_optimizer = ad.dcp_optimizer_state_dict(model, optimizer)
        state = {"model": ad.dcp_state_dict(model), "optimizer": of_optimizer}
        of_optimizer.state_dict()  # looking changes nothing
        assert all(torch.equal(one, other) for one, other in zip(model.parameters(), before, strict=True))
        dcp.load(state, checkpoint_id=folder, no_dist=comm is None)
    finally:
        if dist is not None:
            dist.destroy_process_group()
    assert model.get_parameter("unused") not in optimizer.state
    assert [{**group, "params": 0} for group in optimizer.param_groups] == [
        {**group, "params": 0} for group in whole_optimizer.param_groups
    ]
    torch.testing.assert_close(losses(model, optimizer, 3), expected, rtol=1e-11, atol=1e-12)
    for name, parameter in model.named_parameters():
        other = whole_optimizer.state.get(whole.get_parameter(name), {})
        assert set(optimizer.state.get(parameter, {})) == set(other)
        if "step" in other:
            assert optimizer.state[parameter]["step"] == other["step"] == 6


@pytest.mark.parametrize(("kind", "asynchronous"), [("adam", False), ("rprop", True)])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_model_and_its_optimizer_of_4_ranks_go_on_on_2_and_on_1(
    ranks: RankPool, tmp_path: Path, kind: str, asynchronous: bool
) -> None:
    import torch.distributed.checkpoint as dcp

    folder = str(tmp_path / "checkpoint")
    ranks.run(4, stops, folder, kind, asynchronous)
    ranks.run(2, goes_on, folder, kind, 0)
    ranks.run(2, goes_on, folder, kind, 2)
    goes_on(None, folder, kind, 0)
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    chunks = {name: [list(chunk.sizes) for chunk in getattr(one, "chunks", [])] for name, one in metadata.items()}
    assert sorted(chunks["model.embedding.weight"]) == [[3, WIDTH]] * 3 + [[4, WIDTH]]
    assert chunks["model.down.weight"] == [[WIDTH, HIDDEN // 4]] * 4 and chunks["model.down.bias"] == [[WIDTH]]


def never_stepped(comm: Communicator, folder: str) -> None:
    """What is saved before the first step has no state where it is loaded."""
    import torch.distributed.checkpoint as dcp

    dist = with_group(comm, f"{folder}-store")
    try:
        model, optimizer = trained(comm, "adam", 0)
        dcp.save({"optimizer": ad.dcp_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
        assert not optimizer.state
        model, optimizer = trained(comm, "adam", 2)
        dcp.load({"optimizer": ad.dcp_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder)
        assert not optimizer.state
        swapped = torch.optim.AdamW([others(model), {"params": [model.up.weight, model.unused]}])  # type: ignore[union-attr, list-item]
        with pytest.raises(
            ValueError, match=r"the groups have the parameters in another way; expected .*up.weight.*, got "
        ):
            dcp.load({"optimizer": ad.dcp_optimizer_state_dict(model, swapped)}, checkpoint_id=folder)
        optimizer.state[model.up.weight] = {"row": torch.zeros(5)}  # type: ignore[union-attr, index]
        with pytest.raises(ValueError, match=r"row of up.weight has shape \[5\], expected that of this rank's part"):
            ad.dcp_optimizer_state_dict(model, optimizer).state_dict()
        with pytest.raises(ValueError, match=r"a parameter of shape \[1\] that is not the model's"):
            ad.dcp_optimizer_state_dict(model, torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    finally:
        dist.destroy_process_group()


def test_an_optimizer_that_has_not_stepped_and_others_that_do_not_fit(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, never_stepped, str(tmp_path / "checkpoint"))
