"""DDP and related features with "pynccl": every program is bitwise equal to the same one with gloo.

Every program of PROGRAMS runs on two ranks, once with each backend, and returns its losses, gradients and parameters.
Models are initialized differently on each rank, since DDP synchronizes them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as functional
from process_groups import process_group
from ranks import TORCHRUN, Place, RankPool
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

Results = list[torch.Tensor]
KEPT: list[
    Any
] = []  # keeps gloo's groups: if a callback in one of gloo's threads drops the last reference, the process aborts
SMALL = {"bucket_cap_mb": 0.0002}  # one or two buckets per layer


def layers(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), *more, nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.spare = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, odd: bool) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.first(self.second(x) if odd else x)  # uses the same weight twice


class Words(nn.Embedding):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((x * 5).long().abs()).mean(1)  # different words on each rank


def batch(step: int, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank)).to(dtype)


def backward(model: nn.Module, step: int, *args: Any) -> Results:
    """Run a forward and backward pass; return the loss and the state of the model."""
    loss = model(batch(step, dist.get_rank(), next(model.parameters()).dtype), *args).square().mean()
    loss.backward()
    return [loss.detach(), *state(model)]


def state(model: nn.Module) -> Results:
    gradients = [torch.zeros(0) if p.grad is None else p.grad for p in model.parameters()]
    return [(x.to_dense() if x.is_sparse else x).clone() for x in (*gradients, *model.state_dict().values())]


def train(
    model: nn.Module, number: int = 4, optimizer: Any = None, args: Callable[[int], Any] = lambda _: ()
) -> Results:
    results, optimizer = [], optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(number):
        optimizer.zero_grad()
        results += backward(model, step, *args(step))
        optimizer.step()
    return results + state(model)


def train_ddp(group: Any, make: Callable[[], nn.Module] = layers, **options: Any) -> Results:
    return train(DDP(make(), process_group=group, **options))


def mean(group: Any) -> Results:
    """Also compare with one process that has all ranks' samples."""
    model, single = DDP(layers().double(), process_group=group), layers().double()
    single.load_state_dict(model.module.state_dict())
    results = backward(model, 0)
    single(torch.cat([batch(0, rank, torch.float64) for rank in range(2)])).square().mean().backward()
    torch.testing.assert_close(state(model.module), state(single))
    return results


def joined(group: Any) -> Results:
    """Train with join(): rank 1 has two more batches."""
    results, number = [], 2 + 2 * dist.get_rank()
    for by_initial_size in (True, False):
        model = DDP(layers(nn.BatchNorm1d(16)), process_group=group, **SMALL)
        with model.join(divide_by_initial_world_size=by_initial_size):
            results += train(model, number)
        results += state(model)
    with pytest.raises(RuntimeError, match="exhausted"), model.join(throw_on_early_termination=True):
        train(model, number)
    return results


def accumulated(group: Any) -> Results:
    model, results = DDP(layers(), process_group=group), []
    for step in (0, 2):
        with model.no_sync():
            results += backward(model, step)
        results += backward(model, step + 1)
    return results


def unused(group: Any, **options: Any) -> Results:
    """One layer is unused on all ranks, another is used at different steps on each rank."""
    model = DDP(Parts(), process_group=group, find_unused_parameters=True, **SMALL, **options)
    return train(model, args=lambda step: ((step // 2 + dist.get_rank()) % 2 == 1,))


def mistakes(group: Any) -> Results:
    """Parameters without a gradient, and different parameters on rank 1. The group stays usable."""
    model = DDP(Parts(), process_group=group)
    backward(model, 0, True)
    with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
        backward(model, 1, True)
    with pytest.raises(RuntimeError, match="DDP expects same model across all ranks"):
        DDP(Parts() if dist.get_rank() else layers()[:1], process_group=group)
    return train_ddp(group)


def debugged(group: Any) -> Results:
    """Train with debug level DETAIL, as with TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    results = unused(group) + train_ddp(group, static_graph=True)
    dist.set_debug_level(dist.DebugLevel.OFF)
    return results


def hooked(group: Any, hook: Any, make_state: Callable[[Any], Any] = lambda group: group, **options: Any) -> Results:
    model = DDP(layers(), process_group=group, **options)
    # The lambda has no annotations: torch rejects hooks whose annotations are strings.
    model.register_comm_hook(make_state(group), lambda of, bucket: hook(of, bucket))  # noqa: PLW0108
    return train(model, 5)


def in_double(group: Any, bucket: Any) -> Any:
    future = dist.all_reduce(bucket.buffer().double(), group=group, async_op=True).get_future()
    return future.then(lambda done: done.value()[0] / 2).then(lambda done: done.value().float())


def zero(group: Any, **options: Any) -> Results:
    model = DDP(layers(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, process_group=group, lr=0.01, **options)
    results = train(model, 3, optimizer)
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        results += [
            x.clone()
            for state_of_parameter in optimizer.state_dict()["state"].values()
            for x in state_of_parameter.values()
        ]
    with Join([model, optimizer]):
        results += train(model, 1 + dist.get_rank(), optimizer)
    return results + state(model)


def zero_in_backward(group: Any) -> Results:
    """From the third step on, a bucket's owner steps and broadcasts during the backward pass. torch rejects gloo."""
    model, results = DDP(layers(), process_group=group), []
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    if dist.get_backend(group) != "gloo":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, group, False, True, lr=0.05)
        model.register_comm_hook(group, hook_with_zero_step(default_hooks.allreduce_hook, model, optimizer))
    for step in range(5):
        model.zero_grad()
        results += backward(model, step)[:1]
        if step > 1:  # no-op if the backward pass has done it
            optimizer.step()
    return results + state(model)


def local(group: Any) -> Results:
    """Local SGD: from the third step on, ranks train alone, and models are averaged every other step."""
    model = DDP(layers(), process_group=group)
    single, _ = dist.new_subgroups(group_size=1, backend=dist.get_backend(group))
    of_hook = post_localSGD_hook.PostLocalSGDState(group, single, start_localSGD_iter=2)
    model.register_comm_hook(of_hook, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=2, process_group=group)
    return train(model, 5, PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager))


def differentiable(group: Any) -> Results:
    """Run torch.distributed.nn.functional: each rank's gradients depend on all ranks' losses."""
    r, results = dist.get_rank(), []
    calls: list[Callable[[Any], Any]] = [
        lambda x: functional.all_reduce(x, group=group),
        lambda x: functional.broadcast(x, 1, group=group),
        lambda x: functional.reduce(x, 1, group=group) * r,  # the result on rank 0 is undefined
        lambda x: functional.all_gather(x, group=group),
        lambda x: functional.gather(x, 1, group=group),
        lambda x: functional.scatter([*x.chunk(2)], 1, group=group),
        lambda x: functional.all_to_all_single(torch.empty(4, 6), x, group=group),
        lambda x: functional.reduce_scatter(torch.empty(2, 6), [*x.chunk(2)], group=group),
    ]
    for call in calls:
        x = batch(1, r).requires_grad_()
        found = torch.stack([*call(x * 2)])
        results += [found, *torch.autograd.grad(found.square().sum() * (r + 1), x)]
    return results


POWER = partial(powerSGD_hook.PowerSGDState, start_powerSGD_iter=2, min_compression_rate=1)
PROGRAMS: dict[str, Callable[[Any], Results]] = {
    "plain": train_ddp,
    "small buckets": partial(train_ddp, **SMALL),
    "views": partial(train_ddp, gradient_as_bucket_view=True, **SMALL),
    "static graph": partial(train_ddp, static_graph=True, **SMALL),
    "bfloat16": partial(train_ddp, make=lambda: layers().bfloat16()),
    "sparse": partial(train_ddp, make=lambda: nn.Sequential(Words(32, 5, sparse=True), nn.Linear(5, 3)), **SMALL),
    "buffers": partial(train_ddp, make=lambda: layers(nn.BatchNorm1d(16))),
    "own buffers": partial(train_ddp, make=lambda: layers(nn.BatchNorm1d(16)), broadcast_buffers=False),
    "on a mesh": lambda group: train(DDP(layers(), device_mesh=dist.DeviceMesh.from_group(group, "cpu"))),
    "mean": mean,
    "join": joined,
    "no_sync": accumulated,
    "unused": unused,
    "unused views": partial(unused, gradient_as_bucket_view=True),
    "mistakes": mistakes,
    "debugged": debugged,
    "allreduce_hook": partial(hooked, hook=default_hooks.allreduce_hook, **SMALL),
    "fp16_compress_hook": partial(hooked, hook=default_hooks.fp16_compress_hook, **SMALL),
    "bf16_compress_hook": partial(hooked, hook=default_hooks.bf16_compress_hook, gradient_as_bucket_view=True),
    "powerSGD_hook": partial(hooked, hook=powerSGD_hook.powerSGD_hook, make_state=POWER),  # waits in callbacks
    "in double": partial(hooked, hook=in_double, **SMALL),
    "zero": zero,
    "zero views": partial(zero, parameters_as_bucket_view=True),
    "zero in backward": zero_in_backward,
    "local": local,
    "differentiable": differentiable,
}


def compare_with_gloo(place: Place, path: str, name: str) -> None:
    with process_group("pynccl", place, path):
        results: list[Results] = []
        KEPT.append(dist.new_group(backend="gloo"))
        for group in (dist.group.WORLD, KEPT[-1]):
            torch.manual_seed(place.rank)
            results.append(PROGRAMS[name](group))
        for number, (x, y) in enumerate(zip(*results, strict=True)):
            assert x.dtype == y.dtype and torch.equal(x, y), (number, x, y)


@pytest.mark.parametrize("name", PROGRAMS)
def test_ddp_matches_gloo(processes: RankPool, tmp_path: Path, name: str) -> None:
    processes.run(2, compare_with_gloo, str(tmp_path / "store"), name)


SCRIPT = """
import torch, torch.distributed as dist, pynccl.torch_backend
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("pynccl")
torch.manual_seed(7)
data, models = TensorDataset(torch.randn(32, 6), torch.randn(32, 2)), [torch.nn.Linear(6, 2) for _ in range(2)]
models[1].load_state_dict(models[0].state_dict())
for model, of, size in (DDP(models[0]), {}, 2), (models[1], {"num_replicas": 1, "rank": 0}, 2 * dist.get_world_size()):
    optimizer, sampler = torch.optim.AdamW(model.parameters(), lr=0.01), DistributedSampler(data, **of)
    for x, y in DataLoader(data, batch_size=size, sampler=sampler):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
torch.testing.assert_close(models[0].state_dict(), models[1].state_dict())
dist.destroy_process_group()
print("done")
"""


@pytest.mark.slow
def test_ddp_under_torchrun(tmp_path: Path) -> None:
    """Four processes with distributed samplers get the same model as one process with all samples."""
    (tmp_path / "job.py").write_text(SCRIPT)
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "PYNCCL_LIBRARY": "host",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, *TORCHRUN, "--nproc-per-node=4", str(tmp_path / "job.py")]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0 and done.stdout.count("done") == 4, done.stderr
