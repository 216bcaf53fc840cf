"""Tensor-parallel models within torch's DistributedDataParallel and FSDP2, over the other axis of a mesh."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from small_transformers import MAKE, batch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pynccl_autograd as ad
from pynccl import Communicator

pytest.importorskip("transformers")


@contextlib.contextmanager
def device_mesh(comm: Communicator, path: str, mesh: ad.Mesh) -> Iterator[Any]:
    """Over gloo, of the same ranks."""
    dist.init_process_group("gloo", store=dist.FileStore(path, comm.size), rank=comm.rank, world_size=comm.size)
    try:
        yield mesh.to_device_mesh()
    finally:
        gc.collect()  # what holds the group
        comm.barrier()
        dist.destroy_process_group()


def wrapped(model: Any, kind: str, devices: Any, blocks: Any) -> Any:
    if kind == "ddp":
        group = devices["dp"].get_group()
        return DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    with ad.keep_shards(model):
        for block in blocks:
            fully_shard(block, mesh=devices["dp"])
        fully_shard(model, mesh=devices["dp"])
    return model


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def assert_same_state(model: Any, whole: nn.Module, comm: Communicator) -> None:
    """What full_state_dict gathers, on every rank; what it loads again."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    expected = whole.state_dict()
    found = ad.full_state_dict(model, comm, rank0_only=False)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-11, msg=partial("{}: {}".format, name))
    ad.load_full_state_dict(model, {name: value + 1 for name, value in found.items()}, comm=comm)
    for name, value in ad.full_state_dict(model, comm, rank0_only=False).items():
        assert torch.equal(value, found[name] + 1), name


def assert_same_optimizer(model: Any, optimizer: Any, whole: nn.Module, reference: Any, comm: Communicator) -> None:
    """What full_optimizer_state_dict gathers; what it loads again."""
    model = model.module if isinstance(model, DistributedDataParallel) else model
    found = ad.full_optimizer_state_dict(model, optimizer, comm=comm, rank0_only=False)
    for name, parameter in whole.named_parameters():
        buffer = reference.state[parameter]["momentum_buffer"]
        torch.testing.assert_close(found["state"][name]["momentum_buffer"], buffer, rtol=1e-8, atol=1e-10)
    fresh = sgd(model)
    ad.load_full_optimizer_state_dict(model, fresh, found, comm=comm)
    assert {*fresh.state} == {*optimizer.state}
    for key, state in fresh.state.items():
        loaded, before = state["momentum_buffer"], optimizer.state[key]["momentum_buffer"]
        assert type(loaded) is type(before) and torch.equal(loaded, before)


def whole_model() -> Any:
    torch.manual_seed(0)
    return MAKE["llama"](2).double()


def steps(comm: Communicator, path: str, kind: str, sequence_parallel: bool, norm_type: float) -> None:
    with ad.Mesh(comm, {"dp": 2, "tp": 2}) as mesh, device_mesh(comm, path, mesh) as devices:
        steps_of(comm, mesh, devices, kind, sequence_parallel, norm_type)


def steps_of(
    comm: Communicator, mesh: ad.Mesh, devices: Any, kind: str, sequence_parallel: bool, norm_type: float
) -> None:
    """A frame of its own: what it has made ends before the process group."""
    whole = whole_model()
    cut: Any = ad.parallelize(copy.deepcopy(whole), mesh["tp"], ad.plans.llama, sequence_parallel)
    model = wrapped(cut, kind, devices, cut.model.layers)
    optimizer, reference = sgd(model), sgd(whole)
    for step in range(2):
        batches = [batch(10 * step + rank) for rank in range(2)]
        model(**batches[mesh.coordinate["dp"]]).loss.backward()
        for each in batches:
            (whole(**each).loss / 2).backward()
        ad.finish_gradients(model)
        expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.5, norm_type)
        torch.testing.assert_close(ad.clip_grad_norm_(model.parameters(), 0.5, norm_type), expected)
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
    assert_same_optimizer(model, optimizer, whole, reference, comm)
    assert_same_state(model, whole, comm)


@pytest.mark.parametrize(
    ("kind", "sequence_parallel", "norm_type"),
    [("ddp", False, 2.0), ("ddp", True, math.inf), ("fsdp", True, 2.0), ("fsdp", False, math.inf)],
)
def test_steps_are_those_of_the_unsharded_model(
    ranks: RankPool, tmp_path: Path, kind: str, sequence_parallel: bool, norm_type: float
) -> None:
    ranks.run(4, steps, str(tmp_path / "store"), kind, sequence_parallel, norm_type)


def forgotten(comm: Communicator, path: str) -> None:
    with ad.Mesh(comm, {"dp": 2, "tp": 2}) as mesh, device_mesh(comm, path, mesh) as devices:
        refuses(comm, mesh, devices["dp"])


def refuses(comm: Communicator, mesh: ad.Mesh, devices: Any) -> None:
    model: Any = ad.parallelize(whole_model(), mesh["tp"], ad.plans.llama)
    fully_shard(model, mesh=devices)
    lost = r"is a DTensor that does not know whether it is a part, .* within `with pynccl_autograd\.keep_shards"
    for use in (
        lambda: ad.finish_gradients(model),
        lambda: ad.clip_grad_norm_(model.parameters(), 1.0),
        lambda: ad.full_state_dict(model, comm),
        lambda: ad.load_full_state_dict(model, {}, comm=comm),
        lambda: ad.full_optimizer_state_dict(model, sgd(model), comm=comm),
        lambda: ad.dcp_state_dict(model),
        lambda: ad.describe(model),
        lambda: ad.keep_shards(model).__enter__(),
    ):
        with pytest.raises(TypeError, match=lost):
            use()  # type: ignore[no-untyped-call]
    kept: Any = ad.parallelize(whole_model(), mesh["tp"], ad.plans.llama)
    with ad.keep_shards(kept):
        fully_shard(kept, mesh=devices)
    with pytest.raises(TypeError, match=r"model\.embed_tokens\.weight is a DTensor, .* averages its gradients itself"):
        ad.DataParallelGradients(kept, mesh["dp"])
    with pytest.raises(NotImplementedError, match=r"dcp_state_dict: model\.embed_tokens\.weight is a DTensor"):
        ad.dcp_state_dict(kept)


def test_marks_that_fully_shard_drops_are_asked_for(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(4, forgotten, str(tmp_path / "store"))


def made_anew(comm: Communicator) -> None:
    model: Any = ad.parallelize(whole_model(), comm, ad.plans.llama)
    marks = {name: getattr(one, "shard", None) for name, one in model.named_parameters()}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with ad.keep_shards(model):
        model.load_state_dict(state, assign=True)
    assert {name: getattr(one, "shard", None) for name, one in model.named_parameters()}.keys() == marks.keys()
    for name, one in model.named_parameters():
        assert isinstance(marks[name], ad.Shard)
        assert repr(one.shard) == repr(marks[name])  # type: ignore[attr-defined]
    with (
        pytest.raises(TypeError, match=r"keep_shards: model is \[\], expected a torch\.nn\.Module"),
        ad.keep_shards([]),
    ):  # type: ignore[arg-type]
        pass


def test_parameters_that_are_replaced_keep_their_marks(ranks: RankPool) -> None:
    ranks.run(2, made_anew)
