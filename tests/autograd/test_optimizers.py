"""Optimizers of sharded parameters, GradScaler, and replicated gradients that drift apart."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator

PLAN = {"0": "column", "1": "row", "2": "replicated"}


def make(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4), nn.LayerNorm(4)).to(dtype)


def sharded(comm: Communicator, dtype: torch.dtype = torch.float64) -> nn.Module:
    return ad.parallelize(make(dtype), comm, PLAN, sequence_parallel=False)


def backward(model: nn.Module, step: int = 0) -> None:
    weight = next(model.parameters())
    x = torch.arange(18.0).view(3, 6).sin().add(step).to(weight)
    model(x).square().cumsum(0).sum().backward()


class Lamb(torch.optim.SGD):
    """Stands for optimizers of other packages, which this package knows by their names."""


ELEMENTWISE: list[Any] = [
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
]
WHOLE: list[Any] = [torch.optim.Adafactor, torch.optim.LBFGS, Lamb]
WHOLE += [torch.optim.Muon] if hasattr(torch.optim, "Muon") else []


def step_elementwise(comm: Communicator) -> None:
    for kind in ELEMENTWISE:
        plain, model = make(), sharded(comm)
        for each in (plain, model):
            optimizer = kind(each.parameters(), lr=0.1)
            for step in range(3):
                optimizer.zero_grad()
                backward(each, step)
                optimizer.step()
        found = ad.full_state_dict(model, rank0_only=False)
        torch.testing.assert_close(found, {**plain.state_dict()}, rtol=1e-8, atol=1e-9, msg=f"{kind}")


def refuse_whole(comm: Communicator) -> None:
    muon = getattr(torch.optim, "Muon", None)  # takes matrices only
    for kind in WHOLE:
        model = sharded(comm)
        before = [one.detach().clone() for one in model.parameters()]
        optimizer = kind([one for one in model.parameters() if one.dim() == 2 or kind is not muon])
        backward(model)
        with pytest.raises(TypeError, match=rf"{kind.__name__}\.step: a parameter is Shard\(.* AdamW"):
            optimizer.step(lambda: torch.zeros(()))
        with pytest.raises(TypeError, match="AdamW"):
            torch.compile(lambda optimizer=optimizer: optimizer.step(lambda: torch.zeros(())), backend="eager")()
        assert all(map(torch.equal, before, model.parameters()))
        replicated = [model.get_parameter(name) for name in ("1.bias", "2.weight", "2.bias")]
        if kind is not muon:
            kind(replicated).step(lambda: torch.zeros(()))
        late = torch.optim.SGD(replicated, 0.1)
        late.step()
        late.add_param_group({"params": [model[0].weight]})  # type: ignore[index]
        late.step()


def step_in_backward(comm: Communicator) -> None:
    """torch's "optimizer step in backward" is refused while gradients are local or partial, and right after."""

    def hooked(model: nn.Module) -> nn.Module:
        optimizers = {one: torch.optim.SGD([one], 0.1) for one in model.parameters()}
        for one in model.parameters():
            one.register_post_accumulate_grad_hook(lambda p: (optimizers[p].step(), optimizers[p].zero_grad())[1])
        return model

    model = make()
    averaging = ad.DataParallelGradients(model, comm)
    hooked(model)
    with pytest.raises(RuntimeError, match=r"SGD\.step: called in the backward pass, .* call step\(\) after backward"):
        backward(model, comm.rank)
    with averaging.no_sync():  # of this rank alone, as asked
        backward(model, comm.rank)
    averaging.remove()
    backward(model)
    partial: Any = nn.Sequential(make())
    plan = {"0": "sequence_begin", "0.0": "column", "0.1": "row", "0.2": ["sequence", "sequence_end"]}
    hooked(ad.parallelize(partial, comm, plan, seq_dim=0))
    x = torch.arange(24.0, dtype=torch.float64).view(4, 6).sin()
    with pytest.raises(RuntimeError, match=r"is partial until it is summed .* finish_gradients_in_backward\(model\)"):
        partial(x).square().cumsum(0).sum().backward()
    plain = make()
    for one in partial.parameters():
        one.grad = None
    ad.load_full_state_dict(partial, {f"0.{name}": value for name, value in plain.state_dict().items()})
    ad.finish_gradients_in_backward(partial)
    for each in (partial, hooked(plain)):
        each(x).square().cumsum(0).sum().backward()
    found = ad.full_state_dict(partial, rank0_only=False)
    torch.testing.assert_close(found, {f"0.{name}": value for name, value in plain.state_dict().items()})


def scale_gradients(comm: Communicator) -> None:
    """A scaler's decisions are those of a scaler of the unsharded model, with an inf in one rank's shard."""
    plain, model = make(torch.float32), sharded(comm, torch.float32)
    scalers = (
        torch.amp.GradScaler("cpu", 64.0, growth_interval=2),
        ad.GradScaler(comm, init_scale=64.0, growth_interval=2),
    )
    optimizers = [torch.optim.SGD(each.parameters(), 0.01) for each in (plain, model)]
    for step in range(5):
        for each, scaler, optimizer in zip((plain, model), scalers, optimizers, strict=True):
            optimizer.zero_grad()
            x = torch.arange(18.0).view(3, 6).sin() + step
            scaler.scale(each(x).square().cumsum(0).sum()).backward()
            last: Any = each[0].weight.grad[-1]  # type: ignore[index]
            if step in (1, 3) and (each is plain or comm.rank == comm.size - 1):
                last[0] = math.inf
            if step > 2:
                scaler.unscale_(optimizer)
                if step != 3:
                    (ad.clip_grad_norm_ if each is model else nn.utils.clip_grad_norm_)(each.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        found = ad.full_state_dict(model, rank0_only=False)
        torch.testing.assert_close(found, {**plain.state_dict()}, rtol=1e-5, atol=1e-6)
    assert scalers[1].get_scale() != 64.0
    lone = nn.Parameter(torch.ones(2))  # a rank without a gradient takes part
    lone.grad = torch.tensor([math.nan, 1.0]) if comm.rank == 0 else None
    scaler, optimizer = ad.GradScaler(comm), torch.optim.SGD([lone], 1.0)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(lone.detach(), torch.ones(2)) and scaler.get_scale() == 32768.0
    state = scaler.state_dict()
    (other := ad.GradScaler(comm)).load_state_dict(state)
    assert other.get_scale() == 32768.0
    with pytest.raises(TypeError, match=r"GradScaler: comm is 'cpu', expected a pynccl\.Communicator"):
        ad.GradScaler("cpu")  # type: ignore[arg-type]


class Counting:
    """Counts the collectives of a communicator, within `with`."""

    def __init__(self, comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        make_call = type(comm).all_reduce

        def counted(*args: Any, **options: Any) -> Any:
            self.calls += 1
            return make_call(*args, **options)

        monkeypatch.setattr(type(comm), "all_reduce", counted)


def find_drift(comm: Communicator, norm_type: float) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        model = sharded(comm, dtype)
        weight: Any = model.get_parameter("2.weight")
        backward(model)
        with pytest.MonkeyPatch.context() as monkeypatch:
            counting = Counting(comm, monkeypatch)
            norm = ad.clip_grad_norm_(model, 1e9, norm_type)
        assert counting.calls == 1  # that of the norm
        plain = make(dtype)
        backward(plain)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e9, norm_type)
        torch.testing.assert_close(norm, expected.to(norm), rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=0)
        for drift in (1.5, math.nan, math.inf, None):
            backward(model)
            right = weight.grad.clone()
            if comm.rank == comm.size - 1:
                weight.grad = None if drift is None else weight.grad * drift
            text = r"clip_grad_norm_: the gradient of 2\.weight differs between the ranks"
            with pytest.raises(RuntimeError, match=text):
                ad.clip_grad_norm_(model.parameters(), 1.0, norm_type)
            weight.grad = right
        weight.grad.mul_(1 + 1e-7 * comm.rank)  # rounding
        ad.clip_grad_norm_(model.parameters(), 1.0, norm_type)
        weight.grad.fill_(math.nan)  # on all ranks alike
        assert ad.clip_grad_norm_(model.parameters(), 1.0, norm_type).isnan()


def step_compiled(comm: Communicator) -> None:
    """The state of an optimizer that only steps within torch.compile holds shards too."""
    models = [sharded(comm), sharded(comm)]
    compiled, eager = (torch.optim.AdamW(model.parameters(), 0.1) for model in models)
    step = torch.compile(compiled.step, backend="eager")
    for number in range(3):
        for model in models:
            model.zero_grad()
            backward(model, number)
        step()
        eager.step()
    states = [optimizer.state_dict()["state"] for optimizer in (compiled, eager)]
    assert type(states[0][0]["exp_avg"]).__name__ == "ShardTensor"
    moments = [[row["exp_avg"] + 0 for row in state.values()] for state in states]
    torch.testing.assert_close(*moments, rtol=1e-2, atol=1e-5)  # torch counts compiled steps in float32
    with pytest.raises(ValueError, match="but the parameter is Shard"):
        eager.load_state_dict({**eager.state_dict(), "state": {**states[0], 0: states[0][2]}})


@pytest.mark.parametrize("check", [step_elementwise, refuse_whole, step_in_backward, step_compiled, scale_gradients])
def test_optimizers_of_sharded_parameters(ranks: RankPool, check: Any) -> None:
    ranks.run(2, check)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_clip_grad_norm_finds_replicated_gradients_that_differ(ranks: RankPool, norm_type: float) -> None:
    ranks.run(2, find_drift, norm_type)


def test_copied_optimizers(ranks: RankPool) -> None:
    ranks.run(2, copy_optimizer)


def copy_optimizer(comm: Communicator) -> None:
    model = sharded(comm)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    backward(model)
    optimizer.step()
    _, twin = copy.deepcopy((model, optimizer))
    for each in (optimizer, twin):
        each.step()
        assert type(each.state_dict()["state"][0]["exp_avg"].to_local()) is Tensor
