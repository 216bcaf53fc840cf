"""Modules with communicators as torch modules: copied, averaged; they refuse to be pickled."""

from __future__ import annotations

import copy
import io
import math
import pickle
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.multiprocessing  # with which multiprocessing pickles tensors its own way
from ranks import RankPool
from small_transformers import MAKE, batch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import pynccl_autograd as ad
from pynccl import Communicator

pytest.importorskip("transformers")


class Users(nn.Module):
    """Communicators wherever a user may keep them."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.comm, self.pairs, self.by_comm, self.several = comm, [("first", comm)], {comm: 3.0}, {comm}
        self.call = partial(ad.all_reduce, comm=comm, grad="replicated")

    def forward(self, x: Tensor) -> Tensor:
        assert self.pairs[0][1] is self.comm and self.several == {self.comm}
        return self.call(ad.copy(x, self.comm)) * self.by_comm[self.comm]


def made(comm: Communicator) -> Any:
    torch.manual_seed(1)
    model: Any = ad.parallelize(MAKE["llama"](2).double(), comm, ad.plans.llama)
    model.users, model.drop = Users(comm), ad.Dropout(0.5, comm)
    return model


def step(model: Any) -> list[Tensor]:
    """Loss and gradients."""
    model.zero_grad()
    loss = model.users(model.drop(model(**batch(0)).loss))
    loss.backward()
    ad.finish_gradients(model)
    return [loss.detach(), *(one.grad.clone() for one in model.parameters())]


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def refuses(comm: Communicator) -> None:
    """Wherever the communicator is: in a layer, a mark, whatever a user has made. What to save is state dicts."""
    model, again = made(comm).eval(), made(comm).eval()
    told = r"a pynccl\.Communicator cannot be pickled: .*Save module\.state_dict\(\) instead of the module"
    for value in (model, model.model.norm, model.users, ad.Dropout(0.5, comm), ad.nn.Sequential(ad.nn.Copy(comm))):
        for save in (pickle.dumps, lambda one: torch.save(one, io.BytesIO()), ForkingPickler.dumps):
            with pytest.raises(TypeError, match=told):
                save(value)
    optimizers = [torch.optim.AdamW(one.parameters()) for one in (model, again)]
    step(model)
    optimizers[0].step()
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizers[0].state_dict()), file)  # this rank's part
    state, of_optimizer = torch.load(io.BytesIO(file.getvalue()))
    again.load_state_dict(state, assign=True)
    optimizers[1].load_state_dict(of_optimizer)
    same(step(again), step(model))


def copied(comm: Communicator) -> None:
    model = made(comm)
    for training in (False, True):
        expected = []
        for one in (model.train(training), copy.deepcopy(model), AveragedModel(model).module.train(training)):
            ad.rng.seed(3, comm)
            expected.append(step(one))
        same(expected[1], expected[0])
        same(expected[2], expected[0])


def marks_stay(comm: Communicator) -> None:
    """Copied, averaged, converted, moved from the meta device, loaded in its place."""
    linear = ad.ColumnParallelLinear(4, 4, comm)
    with torch.device("meta"):
        empty = ad.ColumnParallelLinear(4, 4, comm)
    assigned = copy.deepcopy(empty)
    assigned.load_state_dict({name: torch.ones(p.shape) for name, p in empty.named_parameters()}, assign=True)
    assert assigned.weight.device.type == "cpu"
    copies = [linear, copy.deepcopy(linear), copy.copy(linear), AveragedModel(linear).module]
    for layer in (*copies, copy.deepcopy(linear).double(), empty, assigned, empty.to_empty(device="cpu")):
        shards = [getattr(parameter, "shard", None) for parameter in layer.parameters()]
        assert len(shards) == 2 and all(isinstance(shard, ad.Shard) and shard.comm is comm for shard in shards)
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([math.nan, 1.0])
    with pytest.raises(RuntimeError, match="the norm of the gradients is nan"):
        ad.clip_grad_norm_(parameter, 1.0, error_if_nonfinite=True)
    with pytest.raises(ValueError, match=r"splits is \(1, 1\), expected 2 sizes that add up to 4, that of dimension 0"):
        ad.Shard(comm, 0, (4, 2), (1, 1))


def scales(comm: Communicator) -> None:
    """PreMul of a parameter: trained, loaded and copied as any; y = sum_q s_q x_q. Another tensor is a buffer."""
    n, r = comm.size, comm.rank
    scale = torch.nn.Parameter(torch.tensor(r + 1.0))
    module = ad.nn.AllReduce(comm, ad.PreMul(scale), grad="replicated")
    assert dict(module.named_parameters()) == {"scale": scale} and list(module.state_dict()) == ["scale"]
    x = torch.tensor([1.0, 2.0])
    y = module(x)
    assert torch.equal(y.detach(), sum(q + 1.0 for q in range(n)) * x)
    y.sum().backward()
    assert float(scale.grad) == 3.0
    torch.optim.SGD(module.parameters(), lr=1.0).step()
    assert torch.equal(module(x).detach(), sum(q - 2.0 for q in range(n)) * x)
    twin = copy.deepcopy(module, {id(comm): comm})
    twin.load_state_dict({"scale": torch.tensor(2.0)}, assign=True)  # another tensor in the place of the old
    assert torch.equal(twin(x).detach(), 2.0 * n * x)
    assert float(scale.detach()) == r - 2.0
    called = torch.func.functional_call(module, {"scale": torch.tensor(3.0)}, (x,))
    assert torch.equal(called, 3.0 * n * x)
    buffer = ad.nn.AllReduce(comm, ad.PreMul(torch.tensor([2.0, 3.0])), grad="sum")
    assert list(buffer.parameters()) == [] and [name for name, _ in buffer.named_buffers()] == ["scale"]
    assert torch.equal(buffer(x), n * torch.tensor([2.0, 6.0]))
    weight = torch.tensor(2.0, requires_grad=True)  # not a parameter, and computed from: its gradient still arrives
    ad.nn.AllReduce(comm, ad.PreMul(weight * 3), grad="replicated")(x).sum().backward()
    assert float(weight.grad) == 9.0


@pytest.mark.parametrize("function", [refuses, copied, marks_stay, scales])
def test_modules_with_communicators_are_saved_and_copied_as_torchs(ranks: RankPool, function: Any) -> None:
    ranks.run(2, function)
