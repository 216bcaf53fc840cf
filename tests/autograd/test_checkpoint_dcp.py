"""Models with parts for parameters in checkpoints of torch.distributed.checkpoint."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from checkpoints import (
    HIDDEN,
    WIDTH,
    Model,
    loaded,
    same_output,
    with_group,
)
from ranks import RankPool

import pynccl_autograd as ad
from pynccl import Communicator


def dcp_saves(comm: Communicator, folder: str, asynchronous: bool) -> None:
    import torch.distributed.checkpoint as dcp

    dist = with_group(comm, f"{folder}-store-{comm.size}")
    try:
        model = loaded(comm)
        if asynchronous:
            done = dcp.async_save(ad.dcp_state_dict(model), checkpoint_id=folder)
            for parameter in model.parameters():
                parameter.detach().zero_()  # it has been copied
            done.result()  # type: ignore[union-attr]
        else:
            dcp.save(ad.dcp_state_dict(model), checkpoint_id=folder)
    finally:
        dist.destroy_process_group()


def dcp_loads(comm: Communicator, folder: str) -> None:
    import torch.distributed.checkpoint as dcp

    dist = with_group(comm, f"{folder}-store-{comm.size}")
    try:
        model = Model(comm)
        dcp.load(ad.dcp_state_dict(model), checkpoint_id=folder)
        same_output(model)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_torch_distributed_checkpoint_of_4_ranks_loads_on_2_and_1(
    ranks: RankPool, tmp_path: Path, asynchronous: bool
) -> None:
    import torch.distributed.checkpoint as dcp

    folder = str(tmp_path / "checkpoint")
    ranks.run(4, dcp_saves, folder, asynchronous)
    ranks.run(2, dcp_loads, folder)
    alone = Model()  # of plain torch
    state = {name: value for name, value in alone.state_dict().items() if name != "head.weight"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nobody else is there, as intended
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    same_output(alone)
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    chunks = {name: [list(chunk.sizes) for chunk in one.chunks] for name, one in metadata.items()}  # type: ignore[union-attr]
    assert sorted(chunks["embedding.weight"]) == [[3, WIDTH]] * 3 + [[4, WIDTH]]
    assert chunks["down.weight"] == [[WIDTH, HIDDEN // 4]] * 4 and chunks["down.bias"] == [[WIDTH]]
