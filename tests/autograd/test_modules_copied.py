"""Modules with communicators as torch modules: copied, averaged, compiled; they refuse to be pickled."""

from __future__ import annotations

import copy
import io
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
from pynccl_autograd.layers.hooks import keep_parts

WIDTH, WORDS = 12, 13


def scaled(module: nn.Module, args: Any, output: Tensor, *, comm: Communicator) -> Tensor:
    """A hook of the user's."""
    return output * comm.size


class Users(nn.Module):
    """Communicators wherever a user may keep them."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.comm = comm
        self.pairs = [("first", comm), {"second": (comm, 2)}]
        self.by_comm = {comm: 3.0}
        self.several = {comm}
        self.call = partial(ad.all_reduce, comm=comm, grad="replicated")
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        (_, first), second = self.pairs[0], self.pairs[1]["second"][0]  # type: ignore[index]
        assert first is second is self.comm and self.several == {first}  # type: ignore[comparison-overlap]
        return self.call(ad.copy(x * self.scale, first)) * self.by_comm[self.comm]  # type: ignore[arg-type]


class Model(nn.Module):
    """All layers, one after the other; ids [s, b] -> a loss. N divides s."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        made: dict[str, Any] = {"dtype": torch.float64}
        self.embedding = ad.VocabParallelEmbedding(WORDS, WIDTH, comm, sequence_parallel=True, **made)
        self.norm = nn.LayerNorm(WIDTH, **made)
        for parameter in self.norm.parameters():
            parameter.shard = ad.Shard(comm, None, parameter.shape, partial=True)  # type: ignore[attr-defined]
        self.up = ad.ColumnParallelLinear(WIDTH, 2 * WIDTH, comm, sequence_parallel=True, **made)
        self.drop = ad.Dropout(0.5, comm)
        self.down = ad.RowParallelLinear(2 * WIDTH, WIDTH, comm, sequence_parallel=True, **made)
        self.gather = ad.nn.Sequential(ad.nn.AllGather(comm, 0, grad="replicated"))
        self.users = Users(comm)
        self.users.register_forward_hook(partial(scaled, comm=comm))
        self.head = ad.VocabParallelHead(WIDTH, WORDS, comm, gather_output=True, **made)
        self.head.weight = self.embedding.weight
        keep_parts(self)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        y: Tensor = self.head(self.users(self.gather(self.down(self.drop(self.up(self.norm(x)))))))
        return y.square().sum()


def ids_of(comm: Communicator) -> Tensor:
    return torch.arange(4 * comm.size).reshape(2 * comm.size, 2) % WORDS


def step(model: nn.Module, comm: Communicator) -> list[Tensor]:
    """Loss and gradients."""
    ad.rng.seed(3, comm)
    model.zero_grad()
    loss = model(ids_of(comm))
    loss.backward()
    ad.finish_gradients(model)
    norm = ad.clip_grad_norm_(model, 1.0)
    return [loss.detach(), norm, *(one.grad.clone() for one in model.parameters() if one.grad is not None)]


def same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) > 2
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def refuses(comm: Communicator) -> None:
    """On every rank alike, wherever the communicator is: in a layer, a mark, a hook, whatever a user has made."""
    model = Model(comm)
    told = r"a pynccl\.Communicator cannot be pickled: .*Save module\.state_dict\(\) instead of the module"
    optimizer = torch.optim.AdamW(model.parameters())
    for value in (model, model.norm, model.users, model.gather, ad.Dropout(0.5, comm)):
        for save in (pickle.dumps, lambda one: torch.save(one, io.BytesIO()), ForkingPickler.dumps):
            with pytest.raises(TypeError, match=told):
                save(value)
    with pytest.raises(TypeError, match=r"a pynccl\.Mesh cannot be pickled"):
        pickle.dumps(ad.Mesh(comm, {"tp": comm.size}))
    expected = step(model, comm)
    optimizer.step()
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)  # this rank's part
    after = step(model, comm)
    again = Model(comm)
    state, of_optimizer = torch.load(io.BytesIO(file.getvalue()))
    again.load_state_dict(state)
    same(step(again, comm), after)
    assert not torch.equal(after[0], expected[0])
    optimizer_again = torch.optim.AdamW(again.parameters())
    optimizer_again.load_state_dict(of_optimizer)
    for one in (optimizer, optimizer_again):
        one.step()
    same(step(again, comm), step(model, comm))


def test_a_module_says_what_to_save_instead_of_it(ranks: RankPool) -> None:
    ranks.run(3, refuses)


# ------------------------------------------------------------------------------------------------- models of others


def transformer(comm: Communicator, kv_heads: int, tied: bool) -> None:
    torch.manual_seed(1)
    model: Any = MAKE["llama"](kv_heads, tied).double()
    model = ad.parallelize(model, comm, ad.plans.llama, gather_logits=tied)

    def stepped(one: Any) -> list[Tensor]:
        one.zero_grad()
        loss = one(**batch(0)).loss
        loss.backward()
        ad.finish_gradients(one)
        return [loss.detach(), *(parameter.grad for parameter in one.parameters())]

    expected = [one.clone() for one in stepped(model)]
    for twin in (copy.deepcopy(model), AveragedModel(model).module):  # norms have to be marked there, too
        same(stepped(twin), expected)
    with pytest.raises(TypeError, match="cannot be pickled"):
        torch.save(model, io.BytesIO())
    if not tied:  # tied ones would become two
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
        same(stepped(model), expected)


@pytest.mark.parametrize(("kv_heads", "tied"), [(2, False), (8, True)])
def test_a_model_of_transformers_is_copied(ranks: RankPool, kv_heads: int, tied: bool) -> None:
    pytest.importorskip("transformers")
    ranks.run(4, transformer, kv_heads, tied)


# ------------------------------------------------------------------------------------------------- as torch's


def as_torchs(comm: Communicator) -> None:
    torch.manual_seed(1)
    model = Model(comm).eval()
    expected = step(model, comm)
    average: Any = AveragedModel(model)
    average.update_parameters(model)
    assert average.module.up.comm is comm and average.module.users.by_comm == {comm: 3.0}
    assert torch.equal(average(ids_of(comm)), expected[0])
    doubled = {name: 2 * value for name, value in model.named_parameters()}
    called: Any = torch.func.functional_call(model, doubled, (ids_of(comm),))
    with torch.no_grad():
        for parameter in (twin := copy.deepcopy(model)).parameters():
            parameter.mul_(2)
    assert torch.equal(called, twin(ids_of(comm))) and not torch.equal(called, expected[0])
    torch._dynamo.reset()
    found = step(torch.compile(copy.deepcopy(model), backend="aot_eager"), comm)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_averaged_called_with_other_parameters_and_compiled(ranks: RankPool) -> None:
    ranks.run(2, as_torchs)


def buffers(comm: Communicator) -> None:
    overlap = ad.CommOverlap(ad.CommOverlapHelper(comm), (4, 8), torch.float32)
    layer = ad.RowParallelLinear(8, 8, comm, sequence_parallel=True, overlap=overlap)
    twin = copy.deepcopy(layer)
    assert twin.overlap is overlap
    x = torch.ones(4, 8 // comm.size)
    assert torch.equal(twin(x), layer(x))
    with pytest.raises(TypeError, match=r"a CommOverlap cannot be pickled"):
        pickle.dumps(overlap)
    overlap.close()
    with pytest.raises(TypeError, match=r"a pynccl.DataParallelGradients cannot be pickled"):
        pickle.dumps(ad.DataParallelGradients(nn.Linear(2, 2), comm))


def test_buffers_of_overlap_are_shared_by_copies_and_not_pickled(ranks: RankPool) -> None:
    ranks.run(2, buffers)
