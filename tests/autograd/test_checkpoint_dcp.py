"""Models with parts for parameters in checkpoints of torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import HIDDEN, WIDTH, loaded, steps, whole_model, with_group
from ranks import RankPool
from torch import nn

import pynccl_autograd as ad
from pynccl import Communicator


def trained(comm: Communicator | None, count: int) -> tuple[Any, torch.optim.Optimizer]:
    """A model, of parts if there is a communicator, after some steps, with a group of its own for one parameter."""
    model: Any = whole_model() if comm is None else loaded(comm)
    model.norm.bias.requires_grad_(False)
    model.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))  # it has no gradient, and so no state
    others = [one for name, one in model.named_parameters() if name not in ("up.weight", "unused")]
    groups = [{"params": [model.up.weight, model.unused], "lr": 0.02}, {"params": others}]
    optimizer = torch.optim.AdamW(groups, lr=0.05, betas=(0.8, 0.9), amsgrad=True)
    steps(model, optimizer, count)
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": ad.dcp_state_dict(model), "optimizer": ad.dcp_optimizer_state_dict(model, optimizer)}


def stops(comm: Communicator, folder: str, asynchronous: bool) -> None:
    import torch.distributed.checkpoint as dcp

    dist = with_group(comm, f"{folder}-store-{comm.size}")
    try:
        model, optimizer = trained(comm, 3)
        optimizer.param_groups[1]["lr"] = 0.03  # as a schedule would
        if asynchronous:
            done = dcp.async_save(state_of(model, optimizer), checkpoint_id=folder)
            for parameter in model.parameters():
                parameter.detach().zero_()  # it has been copied
            done.result()  # type: ignore[union-attr]
        else:
            dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    finally:
        dist.destroy_process_group()


def goes_on(comm: Communicator | None, folder: str, steps_before: int) -> None:
    """As the unsharded model after as many steps, whatever state there was before."""
    import torch.distributed.checkpoint as dcp

    whole, reference = trained(None, 3)
    reference.param_groups[1]["lr"] = 0.03
    expected = steps(whole, reference, 3)
    dist = None if comm is None else with_group(comm, f"{folder}-store-{comm.size}-{steps_before}")
    try:
        model, optimizer = trained(comm, steps_before)
        dcp.load(state_of(model, optimizer), checkpoint_id=folder, no_dist=comm is None)
    finally:
        if dist is not None:
            dist.destroy_process_group()
    assert model.unused not in optimizer.state
    found, wanted = ([{**group, "params": 0} for group in one.param_groups] for one in (optimizer, reference))
    assert found == wanted
    torch.testing.assert_close(steps(model, optimizer, 3), expected, rtol=1e-11, atol=1e-12)
    for name, parameter in model.named_parameters():
        other = reference.state.get(whole.get_parameter(name), {})
        assert set(optimizer.state.get(parameter, {})) == set(other), name


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_model_and_its_optimizer_of_4_ranks_go_on_on_2_and_on_1(
    ranks: RankPool, tmp_path: Path, asynchronous: bool
) -> None:
    import torch.distributed.checkpoint as dcp

    folder = str(tmp_path / "checkpoint")
    ranks.run(4, stops, folder, asynchronous)
    ranks.run(2, goes_on, folder, 0)
    ranks.run(2, goes_on, folder, 2)
    goes_on(None, folder, 0)
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    chunks = {name: [list(chunk.sizes) for chunk in getattr(one, "chunks", [])] for name, one in metadata.items()}
    assert sorted(chunks["model.embedding.weight"]) == [[3, WIDTH]] * 3 + [[4, WIDTH]]
    assert chunks["model.down.weight"] == [[WIDTH, HIDDEN // 4]] * 4 and chunks["model.down.bias"] == [[WIDTH]]
