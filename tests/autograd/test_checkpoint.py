"""State dicts of the unsharded model and its optimizer, of models with parts for parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Model, loaded, same_output, steps, whole_model
from ranks import RankPool, each_size
from torch import nn

import pynccl_autograd as ad
from pynccl import Communicator


def there_and_back(comm: Communicator, path: str) -> None:
    expected, model = whole_model().state_dict(), loaded(comm, 6)
    state = expected if comm.rank == 0 else None  # which may have it alone
    assert ad.load_full_state_dict(model, state) == ([], [])
    for rank0_only in (True, False):
        found = ad.full_state_dict(model, rank0_only=rank0_only)
        if rank0_only and comm.rank:
            assert found == {}
            continue
        assert list(found) == list(expected)
        for name, value in expected.items():
            assert torch.equal(found[name], value) and found[name].dtype == value.dtype, name
        assert found["head.weight"] is found["embedding.weight"]
        plain = Model()
        plain.load_state_dict(found)
        same_output(plain)
        found["norm.weight"].zero_()  # a copy
    same_output(model)
    ad.save_full_state_dict(model, path)
    again = loaded(comm, 7)
    ad.load_full_state_dict(again, path if comm.rank == 0 else None)
    same_output(again)
    few = loaded(comm, 1, words=2)  # some ranks have no row
    ad.load_full_state_dict(few, ad.full_state_dict(few, rank0_only=False))
    ids = torch.tensor([[0, 1]])
    torch.testing.assert_close(few(ids), whole_model(1, 2)(ids))


@each_size
def test_the_full_state_dict_is_that_of_the_unsharded_model(ranks: RankPool, n: int, tmp_path: Path) -> None:
    ranks.run(n, there_and_back, str(tmp_path / "model.safetensors"))


def other_types(comm: Communicator, folder: str) -> None:
    """Values take the type of the parameter, as Module.load_state_dict has it."""
    state = whole_model().state_dict()
    ad.save_full_state_dict(loaded(comm).float(), folder)
    narrow = loaded(comm, 6).bfloat16()
    ad.load_full_state_dict(narrow, folder)
    wide = loaded(comm, 6)
    ad.load_full_state_dict(wide, ad.full_state_dict(narrow, rank0_only=False))
    for name, value in ad.full_state_dict(wide, comm, rank0_only=False).items():
        assert value.dtype == state[name].dtype
        assert torch.equal(value, state[name].float().bfloat16().to(value.dtype))
    flags: Any = nn.Module()
    flags.mask = nn.Parameter(torch.tensor([True, False]), requires_grad=False)
    flags.mask.shard = ad.Shard(comm, 0, (2 * comm.size,))
    assert ad.full_state_dict(flags, rank0_only=False)["mask"].tolist() == [True, False] * comm.size


def test_a_checkpoint_of_another_type_is_converted(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, other_types, str(tmp_path))


def two_communicators(comm: Communicator) -> None:
    with ad.Mesh(comm, {"dp": 2, "tp": 2}) as mesh:
        layers = [ad.ColumnParallelLinear(4, 8, mesh["tp"], bias=False), ad.RowParallelLinear(8, 4, mesh["dp"])]
        model = nn.Sequential(*layers)
        with pytest.raises(ValueError, match=r"cut over 2 communicators; pass comm="):
            ad.full_state_dict(model)
        whole = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4)).state_dict()
        ad.load_full_state_dict(model, whole if comm.rank == 0 else None, comm=comm)
        found = ad.full_state_dict(model, comm)
        assert set(found) == (set() if comm.rank else set(whole))
        assert all(torch.equal(found[name], whole[name]) for name in found)


def test_parameters_cut_over_several_communicators(ranks: RankPool) -> None:
    ranks.run(4, two_communicators)


class Conv1D(nn.Module):
    """As transformers has it: weights [in, out]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 24)), nn.Parameter(torch.randn(24))


def keeps_blocks(comm: Communicator, blocks: Any, sizes: list[int]) -> None:
    """Queries, keys and values in one layer."""
    torch.manual_seed(5)
    whole = Conv1D()
    layer = ad.ColumnParallelLinear.from_linear(whole, comm, blocks=blocks)
    rows = torch.cat([one.chunk(comm.size)[comm.rank] for one in whole.weight.t().split(sizes)])
    assert torch.equal(layer.weight, rows)
    found = ad.full_state_dict(layer, rank0_only=False)
    assert torch.equal(found["weight"], whole.weight) and torch.equal(found["bias"], whole.bias)
    empty = ad.ColumnParallelLinear.from_linear(Conv1D(), comm, blocks=blocks)
    ad.load_full_state_dict(empty, found)
    assert torch.equal(empty.weight, layer.weight) and torch.equal(empty.bias, layer.bias)


def test_blocks_and_transposed_weights_are_put_together(ranks: RankPool) -> None:
    ranks.run(2, keeps_blocks, 3, [8, 8, 8])
    ranks.run(4, keeps_blocks, (12, 4, 8), [12, 4, 8])


KINDS: dict[str, Any] = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.001, momentum=0.9),
    "groups": lambda parameters: torch.optim.AdamW(
        [{"params": (listed := list(parameters))[:2], "lr": 0.1}, {"params": listed[2:]}], lr=0.05
    ),
}


def stops(comm: Communicator, kind: str, path: str) -> None:
    model = loaded(comm)
    optimizer = KINDS[kind](model.parameters())
    steps(model, optimizer, 3)
    checkpoint = {"model": ad.full_state_dict(model), "optimizer": ad.full_optimizer_state_dict(model, optimizer)}
    if comm.rank == 0:
        torch.save(checkpoint, path)


def goes_on(comm: Communicator, kind: str, path: str) -> None:
    """Of a whole optimizer's state on rank 0: two steps more, as the whole model takes them."""
    whole, model = whole_model(), loaded(comm, 6)
    reference, optimizer = (KINDS[kind](one.parameters()) for one in (whole, model))
    steps(whole, reference, 5)
    checkpoint = torch.load(path) if comm.rank == 0 else {"model": None, "optimizer": None}
    ad.load_full_state_dict(model, checkpoint["model"])
    ad.load_full_optimizer_state_dict(model, optimizer, checkpoint["optimizer"])
    steps(model, optimizer, 2)
    torch.testing.assert_close(ad.full_state_dict(model, rank0_only=False), {**whole.state_dict()})
    found = ad.full_optimizer_state_dict(model, optimizer)
    assert found == {} if comm.rank else list(found) == ["state", "param_groups"]
    found = ad.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    expected = {name: reference.state[parameter] for name, parameter in whole.named_parameters()}
    torch.testing.assert_close(found["state"], expected, rtol=1e-9, atol=1e-12)
    assert [name for group in found["param_groups"] for name in group["params"]] == list(expected)
    assert [group["lr"] for group in found["param_groups"]] == [group["lr"] for group in reference.param_groups]


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_goes_on_with_another_number_of_ranks(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "all.pt")
    ranks.run(4, stops, kind, path)
    ranks.run(2, goes_on, kind, path)
