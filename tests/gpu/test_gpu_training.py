"""What a training loop builds on a parallel model on a GPU: checks of inputs and gradients, states, GradScaler."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from gpu.graphs import captured
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd import OverlapConfig


def full(comm: Communicator, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8 * comm.size), nn.Tanh(), nn.Linear(8 * comm.size, 8)).to(comm.device)


def parallel(comm: Communicator, seed: int = 0) -> nn.Module:
    return ad.parallelize(full(comm, seed), comm, {"0": "column", "2": "row"}, False)


def inputs(comm: Communicator, seed: int = 1) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(comm.device)


@contextmanager
def no_waiting(comm: Communicator) -> Iterator[None]:
    """Raise if torch waits for the GPU."""
    if comm.library.is_host:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def needs_ranks(comm: Communicator) -> None:
    if comm.size == 1:
        pytest.skip("one rank has no other to compare with")


def test_other_inputs_on_one_rank_raise_in_the_next_forward_pass(comm: Communicator) -> None:
    needs_ranks(comm)
    model = parallel(comm)
    model(inputs(comm))  # the first inputs are compared whole
    with no_waiting(comm):
        model(inputs(comm))
    own = inputs(comm, comm.rank)
    if not comm.library.is_host:
        model(own)
    with pytest.raises(ValueError, match="on rank 1 has other values than on rank 0"):
        model(own)
    if not comm.library.is_host:  # that forward pass had them too
        with pytest.raises(ValueError, match="previous forward pass on rank 1 has other values"):
            model(inputs(comm))
    model(inputs(comm))


def test_other_gradients_on_one_rank_raise_in_the_next_call(comm: Communicator) -> None:
    needs_ranks(comm)
    model = parallel(comm)

    def clip(drift: float) -> None:
        model(inputs(comm)).square().mean().backward()
        ad.finish_gradients(model)
        model.get_parameter("2.bias").grad.mul_(1 + drift)  # type: ignore[union-attr]
        with no_waiting(comm):
            ad.clip_grad_norm_(model, 1.0)

    clip(0)
    clip(0)
    if not comm.library.is_host:
        clip(comm.rank)
    with pytest.raises(RuntimeError, match=r"the gradient of 2\.bias differs"):
        clip(0 if not comm.library.is_host else comm.rank)


def test_an_overflow_on_one_rank_skips_the_step_of_all(comm: Communicator) -> None:
    model = parallel(comm)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    scaler = ad.GradScaler(comm, init_scale=8.0)
    before = copy.deepcopy(ad.full_state_dict(model, comm, rank0_only=False))
    for overflows in (True, False):
        optimizer.zero_grad()
        scaler.scale(model(inputs(comm)).square().mean()).backward()
        if overflows and comm.rank == comm.size - 1:
            model.get_parameter("0.weight").grad[0, 0] = torch.inf  # type: ignore[index]
        ad.finish_gradients(model)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 4.0
        after = ad.full_state_dict(model, comm, rank0_only=False)
        assert all(torch.equal(after[name], before[name]) == overflows for name in before)


@pytest.mark.parametrize("overlap", ["off", OverlapConfig("slices", chunks=2)], ids=["off", "slices"])
def test_a_captured_step_trains_as_the_unsharded_model_does(comm: Communicator, overlap: Any) -> None:
    """Forward and backward pass, norm of the gradients and optimizer in one graph, which is replayed on new inputs."""
    plain = full(comm).double()
    model = ad.parallelize(copy.deepcopy(plain), comm, {"0": "column", "2": "row"}, False, overlap=overlap)
    models = {"ours": model, "plain": plain}
    optimizers = {name: torch.optim.SGD(one.parameters(), 0.1, momentum=0.9) for name, one in models.items()}
    x = inputs(comm).double()

    def step(name: str) -> list[Tensor]:
        optimizers[name].zero_grad(set_to_none=True)
        loss = models[name](x).square().mean()
        loss.backward()
        if name == "ours":
            ad.finish_gradients(model)
            ad.clip_grad_norm_(model, 0.1)
        else:
            nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizers[name].step()
        return [loss]

    with captured(lambda: step("ours")) as (graph, found):
        for _ in range(2):  # to warm up
            step("plain")
        for seed in range(5):
            x.copy_(inputs(comm, seed).double())
            graph.replay()
            torch.cuda.synchronize()
            torch.testing.assert_close(found[0], step("plain")[0], rtol=1e-9, atol=0)
    states = ad.full_state_dict(model, comm, rank0_only=False)
    torch.testing.assert_close({**states}, {**plain.state_dict()}, rtol=1e-8, atol=1e-10, check_device=False)


def test_states_are_of_shards_and_never_of_the_whole_by_mistake(comm: Communicator, tmp_path: Path) -> None:
    model, other = parallel(comm), parallel(comm, seed=2)
    optimizer, fresh = (torch.optim.AdamW(one.parameters(), 0.1) for one in (model, other))
    model(inputs(comm)).square().mean().backward()
    ad.finish_gradients(model)
    optimizer.step()
    expected: Any = ad.full_state_dict(model, comm, rank0_only=False)
    moments: Any = ad.full_optimizer_state_dict(model, optimizer, comm, rank0_only=False)["state"]
    if comm.size > 1:
        with pytest.raises(TypeError, match="would take a shard for the whole"):
            torch.save(model.state_dict(), io.BytesIO())
    twin = copy.deepcopy(model)
    torch.testing.assert_close(ad.full_state_dict(twin, comm, rank0_only=False), expected, rtol=0, atol=0)
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(optimizer.state_dict())
    assert all(row["exp_avg"].device == torch.device(comm.device) for row in fresh.state.values())
    torch.testing.assert_close(ad.full_state_dict(other, comm, rank0_only=False), expected, rtol=0, atol=0)
    loaded = ad.full_optimizer_state_dict(other, fresh, comm, rank0_only=False)["state"]
    torch.testing.assert_close(loaded, moments, rtol=0, atol=0)
    if comm.size == 1:  # more ranks need a process group
        dcp.save(ad.dcp_state_dict(model), checkpoint_id=tmp_path)
        dcp.load(state := parallel(comm, seed=3).state_dict(), checkpoint_id=tmp_path)
        torch.testing.assert_close({name: x.cpu() for name, x in state.items()}, {**expected}, rtol=0, atol=0)
