"""Tensor-parallel models within torch's DistributedDataParallel and FSDP2, over the other axis of a mesh."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
from collections.abc import Iterator
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


def meshed(comm: Communicator, path: str, function: Any, *args: Any) -> None:
    """In a frame of its own: what the function has made ends before the process group."""
    with ad.Mesh(comm, {"dp": 2, "tp": 2}) as mesh, device_mesh(comm, path, mesh) as devices:
        function(comm, mesh, devices["dp"], *args)


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def whole_model() -> Any:
    torch.manual_seed(0)
    return MAKE["llama"](2).double()


def assert_same_state(cut: Any, optimizer: Any, whole: nn.Module, reference: Any, comm: Communicator) -> None:
    """What is gathered of the model and its optimizer, on every rank; what is loaded again."""
    found = ad.full_state_dict(cut, comm, rank0_only=False)
    torch.testing.assert_close(found, {**whole.state_dict()}, rtol=1e-9, atol=1e-11)
    ad.load_full_state_dict(cut, {name: value + 1 for name, value in found.items()}, comm=comm)
    for name, value in ad.full_state_dict(cut, comm, rank0_only=False).items():
        assert torch.equal(value, found[name] + 1), name
    states = ad.full_optimizer_state_dict(cut, optimizer, comm=comm, rank0_only=False)
    expected = {name: reference.state[parameter] for name, parameter in whole.named_parameters()}
    torch.testing.assert_close(states["state"], expected, rtol=1e-8, atol=1e-10)
    fresh = sgd(cut)
    ad.load_full_optimizer_state_dict(cut, fresh, states, comm=comm)
    for key, state in optimizer.state.items():
        loaded, before = fresh.state[key]["momentum_buffer"], state["momentum_buffer"]
        assert type(loaded) is type(before) and torch.equal(loaded, before)


def steps(
    comm: Communicator, mesh: ad.Mesh, devices: Any, kind: str, sequence_parallel: bool, norm_type: float
) -> None:
    whole = whole_model()
    cut: Any = ad.parallelize(copy.deepcopy(whole), mesh["tp"], ad.plans.llama, sequence_parallel)
    model: Any = cut
    if kind == "ddp":
        model = DistributedDataParallel(cut, process_group=devices.get_group(), gradient_as_bucket_view=True)
    else:
        with ad.keep_shards(cut):
            for block in (*cut.model.layers, cut):
                fully_shard(block, mesh=devices)
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
    assert_same_state(cut, optimizer, whole, reference, comm)


@pytest.mark.parametrize(
    ("kind", "sequence_parallel", "norm_type"), [("ddp", True, 2.0), ("fsdp", True, math.inf), ("fsdp", False, 2.0)]
)
def test_steps_are_those_of_the_unsharded_model(
    ranks: RankPool, tmp_path: Path, kind: str, sequence_parallel: bool, norm_type: float
) -> None:
    ranks.run(4, meshed, str(tmp_path / "store"), steps, kind, sequence_parallel, norm_type)


def refuses(comm: Communicator, mesh: ad.Mesh, devices: Any) -> None:
    model: Any = ad.parallelize(whole_model(), mesh["tp"], ad.plans.llama)
    fully_shard(model, mesh=devices)
    lost = r"is a DTensor that does not know whether it is a part, .* within `with pynccl_autograd\.keep_shards"
    for use in (ad.finish_gradients, ad.clip_grad_norm_, ad.full_state_dict):
        options = {"max_norm": 1.0} if use is ad.clip_grad_norm_ else {}
        with pytest.raises(TypeError, match=lost):
            use(model, **options)  # type: ignore[operator]
    kept: Any = ad.parallelize(whole_model(), mesh["tp"], ad.plans.llama)
    with ad.keep_shards(kept):
        fully_shard(kept, mesh=devices)
    with pytest.raises(TypeError, match=r"model\.embed_tokens\.weight is a DTensor, .* averages its gradients itself"):
        ad.DataParallelGradients(kept, mesh["dp"])


def test_marks_that_fully_shard_drops_are_asked_for(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(4, meshed, str(tmp_path / "store"), refuses)
