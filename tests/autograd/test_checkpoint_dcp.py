"""Models with sharded parameters in checkpoints of torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import HIDDEN, WIDTH, full_model, init_gloo, sharded_model, train
from ranks import RankPool
from torch import nn

import pynccl_autograd as ad
from pynccl import Communicator


def trained_model(comm: Communicator | None, count: int) -> tuple[Any, torch.optim.Optimizer]:
    """A model (sharded if there is a communicator) and its optimizer with two parameter groups, after some steps."""
    model: Any = full_model() if comm is None else sharded_model(comm)
    model.norm.bias.requires_grad_(False)
    model.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))  # no gradient, hence no optimizer state
    others = [parameter for name, parameter in model.named_parameters() if name not in ("up.weight", "unused")]
    groups = [{"params": [model.up.weight, model.unused], "lr": 0.02}, {"params": others}]
    optimizer = torch.optim.AdamW(groups, lr=0.05, betas=(0.8, 0.9), amsgrad=True)
    train(model, optimizer, count)
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": ad.dcp_state_dict(model), "optimizer": ad.dcp_optimizer_state_dict(model, optimizer)}


def train_and_save(comm: Communicator, folder: str, asynchronous: bool) -> None:
    import torch.distributed.checkpoint as dcp

    dist = init_gloo(comm, f"{folder}-store-{comm.size}")
    try:
        model, optimizer = trained_model(comm, 3)
        optimizer.param_groups[1]["lr"] = 0.03  # as a learning rate schedule would
        if asynchronous:
            done = dcp.async_save(state_of(model, optimizer), checkpoint_id=folder)
            for parameter in model.parameters():
                parameter.detach().zero_()  # the save has copied it
            done.result()  # type: ignore[union-attr]
        else:
            dcp.save(state_of(model, optimizer), checkpoint_id=folder)
    finally:
        dist.destroy_process_group()


def load_and_train(comm: Communicator | None, folder: str, steps_before: int) -> None:
    """Load, and check that training continues as in the unsharded model, whatever the state before."""
    import torch.distributed.checkpoint as dcp

    unsharded, reference = trained_model(None, 3)
    reference.param_groups[1]["lr"] = 0.03
    expected = train(unsharded, reference, 3)
    dist = None if comm is None else init_gloo(comm, f"{folder}-store-{comm.size}-{steps_before}")
    try:
        model, optimizer = trained_model(comm, steps_before)
        dcp.load(state_of(model, optimizer), checkpoint_id=folder, no_dist=comm is None)
    finally:
        if dist is not None:
            dist.destroy_process_group()
    assert model.unused not in optimizer.state
    found, wanted = ([{**group, "params": 0} for group in each.param_groups] for each in (optimizer, reference))
    assert found == wanted
    torch.testing.assert_close(train(model, optimizer, 3), expected, rtol=1e-11, atol=1e-12)
    for name, parameter in model.named_parameters():
        other = reference.state.get(unsharded.get_parameter(name), {})
        assert set(optimizer.state.get(parameter, {})) == set(other), name


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_model_and_optimizer_saved_by_4_ranks_resume_on_2_and_on_1(
    ranks: RankPool, tmp_path: Path, asynchronous: bool
) -> None:
    import torch.distributed.checkpoint as dcp

    folder = str(tmp_path / "checkpoint")
    ranks.run(4, train_and_save, folder, asynchronous)
    ranks.run(2, load_and_train, folder, 0)
    ranks.run(2, load_and_train, folder, 2)
    load_and_train(None, folder, 0)
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    chunks = {name: [list(chunk.sizes) for chunk in getattr(entry, "chunks", [])] for name, entry in metadata.items()}
    assert sorted(chunks["model.embedding.weight"]) == [[3, WIDTH]] * 3 + [[4, WIDTH]]
    assert chunks["model.down.weight"] == [[WIDTH, HIDDEN // 4]] * 4 and chunks["model.down.bias"] == [[WIDTH]]
