"""Parts that are put together otherwise: of two in one, of blocks, transposed, without a row."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import WIDTH, Model, with_group
from ranks import RankPool
from torch import nn

import pynccl_autograd as ad
from pynccl import Communicator


def without_rows(comm: Communicator, folder: str) -> None:
    """A vocabulary of fewer words than ranks."""
    import torch.distributed.checkpoint as dcp

    torch.manual_seed(1)
    state = Model(words=2).state_dict()

    def same(model: nn.Module) -> bool:
        found = ad.full_state_dict(model, rank0_only=False)
        return all(torch.equal(found[name], value) for name, value in state.items())

    given, read, told = (Model(comm, 2) for _ in range(3))
    ad.load_full_state_dict(given, state if comm.rank == 0 else None)
    ad.save_full_state_dict(given, folder, 500)
    ad.load_full_state_dict(read, folder)
    dist = with_group(comm, f"{folder}-store-few")
    try:
        dcp.save(ad.dcp_state_dict(given), checkpoint_id=f"{folder}/dcp")
        dcp.load(ad.dcp_state_dict(told), checkpoint_id=f"{folder}/dcp")
    finally:
        dist.destroy_process_group()
    assert same(given) and same(read) and same(told)
    optimizer = torch.optim.AdamW(given.parameters())
    given(torch.tensor([[0, 1]])).sum().backward()
    optimizer.step()
    found = ad.full_optimizer_state_dict(given, optimizer, rank0_only=False)
    assert found["state"]["embedding.weight"]["exp_avg"].shape == (2, WIDTH)
    ad.load_full_optimizer_state_dict(given, optimizer, found)


def test_a_rank_may_have_no_rows(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(4, without_rows, str(tmp_path / "few"))


def keeps_blocks(comm: Communicator, folder: str, blocks: Any, sizes: list[int]) -> None:
    """Queries, keys and values in one layer, from [in, out] as transformers' Conv1D has them."""
    from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save

    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(4, 24)), nn.Parameter(torch.randn(24))

    torch.manual_seed(5)
    whole = Conv1D()
    layer = ad.ColumnParallelLinear.from_linear(whole, comm, blocks=blocks)
    rows = torch.cat([one.chunk(comm.size)[comm.rank] for one in whole.weight.t().split(sizes)])
    assert torch.equal(layer.weight, rows)
    found = ad.full_state_dict(layer, rank0_only=False)
    assert torch.equal(found["weight"], whole.weight) and torch.equal(found["bias"], whole.bias)
    empty = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in empty.parameters():
            parameter.zero_()
    ad.load_full_state_dict(empty, found)
    assert torch.equal(empty.weight, layer.weight) and torch.equal(empty.bias, layer.bias)
    with torch.no_grad():
        for parameter in empty.parameters():
            parameter.zero_()
    own = f"{folder}/{comm.rank}"
    boxes = [box.whole for box in layer.weight.shard.boxes()]  # type: ignore[attr-defined]
    starts = [0, sizes[0], sizes[0] + sizes[1]]
    each = zip(starts, sizes, strict=True)
    assert boxes == [(0, start + size // comm.size * comm.rank) for start, size in each]
    save(ad.dcp_state_dict(layer), storage_writer=FileSystemWriter(own), no_dist=True)
    load(ad.dcp_state_dict(empty), storage_reader=FileSystemReader(own), no_dist=True)
    assert torch.equal(empty.weight, layer.weight) and torch.equal(empty.bias, layer.bias)


def test_blocks_and_transposed_weights_are_put_together(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, keeps_blocks, str(tmp_path / "2"), 3, [8, 8, 8])
    ranks.run(4, keeps_blocks, str(tmp_path / "unequal"), (12, 4, 8), [12, 4, 8])


def wrong_blocks(comm: Communicator) -> None:
    for blocks in (0, -1, 5, 1.5, "3", (12, 12, 12), (25, -1), None, ()):
        with pytest.raises(ValueError, match=r"ColumnParallelLinear: blocks is .* in 24 outputs, or their sizes"):
            ad.ColumnParallelLinear(4, 24, comm, blocks=blocks)  # type: ignore[arg-type]
    for blocks in (8, (11, 13)):
        with pytest.raises(ValueError, match="or their sizes, each divisible by 2 ranks"):
            ad.ColumnParallelLinear(4, 24, comm, blocks=blocks)


def test_blocks_that_do_not_fit_are_named(ranks: RankPool) -> None:
    ranks.run(2, wrong_blocks)
