"""Modules that hold communicators can be copied and averaged like other torch modules; pickling them raises."""

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
import torch.multiprocessing  # registers its tensor reducers with multiprocessing
from ranks import RankPool
from small_transformers import MAKE, batch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import pynccl_autograd as ad
from pynccl import Communicator

pytest.importorskip("transformers")


class Holder(nn.Module):
    """A module with communicators in attributes, containers and a partial."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.comm, self.pairs, self.by_comm, self.group = comm, [("first", comm)], {comm: 3.0}, {comm}
        self.call = partial(ad.all_reduce, comm=comm, grad="replicated")

    def forward(self, x: Tensor) -> Tensor:
        assert self.pairs[0][1] is self.comm and self.group == {self.comm}
        return self.call(ad.copy(x, self.comm)) * self.by_comm[self.comm]


def make_model(comm: Communicator) -> Any:
    torch.manual_seed(1)
    model: Any = ad.parallelize(MAKE["llama"](2).double(), comm, ad.plans.llama)
    model.holder, model.drop = Holder(comm), ad.Dropout(0.5, comm)
    return model


def step(model: Any) -> list[Tensor]:
    """Return the loss and the gradients."""
    model.zero_grad()
    loss = model.holder(model.drop(model(**batch(0)).loss))
    loss.backward()
    ad.finish_gradients(model)
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(each, other) for each, other in zip(found, expected, strict=True))


def pickle_and_save(comm: Communicator) -> None:
    """Pickling raises wherever the communicator is held; copying and loading state dicts works."""
    model, restored = make_model(comm).eval(), make_model(comm).eval()
    message = r"a pynccl\.Communicator cannot be pickled: .*Save module\.state_dict\(\) instead of the module"
    for value in (model, model.model.norm, model.holder, ad.Dropout(0.5, comm), ad.nn.Sequential(ad.nn.Copy(comm))):
        for save in (pickle.dumps, lambda value_: torch.save(value_, io.BytesIO()), ForkingPickler.dumps):
            with pytest.raises(TypeError, match=message):
                save(value)
    optimizers = [torch.optim.AdamW(value_.parameters()) for value_ in (model, restored)]
    step(model)
    optimizers[0].step()
    state, optimizer_state = copy.deepcopy((model.state_dict(), optimizers[0].state_dict()))
    restored.load_state_dict(state, assign=True)
    optimizers[1].load_state_dict(optimizer_state)
    assert_equal(step(restored), step(model))


def compare_copies(comm: Communicator) -> None:
    model = make_model(comm)
    for training in (False, True):
        expected = []
        for each_model in (model.train(training), copy.deepcopy(model), AveragedModel(model).module.train(training)):
            ad.rng.seed(3, comm)
            expected.append(step(each_model))
        assert_equal(expected[1], expected[0])
        assert_equal(expected[2], expected[0])


def check_shard_marks(comm: Communicator) -> None:
    """Parameters keep their `shard` mark through copying, averaging, conversion, materialization and loading."""
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
    message = r"splits is \(1, 1\), expected 2 sizes that add up to 4, the size of dimension 0"
    with pytest.raises(ValueError, match=message):
        ad.Shard(comm, 0, (4, 2), (1, 1))


def check_premul_parameter(comm: Communicator) -> None:
    """PreMul of a parameter is a parameter of the module (y = sum_q s_q x_q); PreMul of another tensor is a buffer."""
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
    twin.load_state_dict({"scale": torch.tensor(2.0)}, assign=True)  # replaces the tensor
    assert torch.equal(twin(x).detach(), 2.0 * n * x)
    assert float(scale.detach()) == r - 2.0
    called = torch.func.functional_call(module, {"scale": torch.tensor(3.0)}, (x,))
    assert torch.equal(called, 3.0 * n * x)
    buffer = ad.nn.AllReduce(comm, ad.PreMul(torch.tensor([2.0, 3.0])), grad="sum")
    assert list(buffer.parameters()) == [] and [name for name, _ in buffer.named_buffers()] == ["scale"]
    assert torch.equal(buffer(x), n * torch.tensor([2.0, 6.0]))
    weight = torch.tensor(2.0, requires_grad=True)  # not a parameter, but it still gets its gradient
    ad.nn.AllReduce(comm, ad.PreMul(weight * 3), grad="replicated")(x).sum().backward()
    assert float(weight.grad) == 9.0


@pytest.mark.parametrize("function", [pickle_and_save, compare_copies, check_shard_marks, check_premul_parameter])
def test_modules_with_communicators_are_saved_and_copied(ranks: RankPool, function: Any) -> None:
    ranks.run(2, function)
