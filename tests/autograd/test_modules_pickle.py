"""Modules with communicators as torch modules: pickled and given a communicator again, copied, averaged, compiled."""

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
from ranks import RankPool, each_size
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd.layers.parts import keep_parts
from pynccl_autograd.layers.shards import shard_of

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


def by_torch(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def by_multiprocessing(model: Any) -> Any:
    return pickle.loads(ForkingPickler.dumps(model))


WAYS = {"pickle": lambda model: pickle.loads(pickle.dumps(model)), "save": by_torch, "processes": by_multiprocessing}


def comes_back(comm: Communicator, way: str) -> None:
    first = comm.split(0, comm.rank)
    assert first is not None
    torch.manual_seed(1)
    model = Model(first)
    expected = step(model, first)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    again, optimizer_again = WAYS[way]({"model": model, "optimizer": optimizer}).values()
    after = step(model, first)
    first.destroy()
    own = [id(one) for one in again.parameters()]
    fresh = comm.split(0, comm.rank)
    assert fresh is not None
    assert ad.set_communicator(again, fresh) is again and [id(one) for one in again.parameters()] == own
    assert again.head.weight is again.embedding.weight
    marks = [shard_of(one) for one in again.parameters()]
    assert [None if mark is None else mark.comm for mark in marks].count(fresh) == len(list(model.parameters())) - 1
    same(step(again, fresh), after)
    assert not torch.equal(after[0], expected[0])
    if way != "processes":  # where parameters that are the model's and the optimizer's become two
        optimizer_again.step()
        assert not torch.equal(step(again, fresh)[0], after[0])
    ad.set_communicator(again, fresh)  # nothing is left to do
    same(step(ad.set_communicator(by_torch(again), fresh), fresh), step(again, fresh))
    fresh.destroy()


@each_size
def test_a_pickled_module_goes_on_with_another_communicator(ranks: RankPool, n: int) -> None:
    for way in WAYS if n == 2 else ("save",):
        ranks.run(n, comes_back, way)


def takes_over(comm: Communicator) -> None:
    """A communicator that ended is replaced in a module that was never pickled."""
    first, second = comm.split(0, comm.rank), comm.split(0, comm.rank)
    assert first is not None and second is not None
    model = Model(first)
    expected = step(model, first)
    first.destroy()
    same(step(ad.set_communicator(model, second), second), expected)
    second.destroy()


def test_a_communicator_that_ended_is_replaced(ranks: RankPool) -> None:
    ranks.run(2, takes_over)


def has_its_part(comm: Communicator) -> None:
    torch.manual_seed(0)
    whole = nn.Linear(256, 512)
    for layer in (
        ad.ColumnParallelLinear.from_linear(whole, comm),
        ad.RowParallelLinear.from_linear(whole, comm),
        ad.VocabParallelHead.from_linear(whole, comm),
        ad.VocabParallelEmbedding.from_embedding(nn.Embedding(512, 256), comm),
    ):
        own = sum(one.nbytes for one in layer.parameters())
        file = io.BytesIO()
        torch.save(layer, file)
        assert own <= len(file.getvalue()) < own + 20_000 < 4 * 256 * 512


def test_a_pickle_has_this_ranks_part(ranks: RankPool) -> None:
    ranks.run(4, has_its_part)


def refuses(comm: Communicator, other: int) -> None:
    model = by_torch(Model(comm))
    assert repr(model.users.comm) == f"<pynccl.Communicator rank {comm.rank} of {comm.size}, out of a pickle>"
    assert f"rank {comm.rank} of {comm.size}" in repr(model) and model.users.comm.rank == comm.rank
    told = rf"was rank {comm.rank} of {comm.size} when it was pickled.*pynccl_autograd.set_communicator\(module, comm\)"
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    x = torch.ones(comm.size, 2, WIDTH, dtype=torch.float64)
    for use in (
        lambda: model(ids_of(comm)),
        lambda: model.up(x),
        lambda: model.down(torch.ones(comm.size, 2, 2 * WIDTH // comm.size, dtype=torch.float64)),
        lambda: model.embedding(ids_of(comm)),
        lambda: model.head(x),
        lambda: model.drop(x),
        lambda: model.gather(x),
        lambda: torch.compile(model.up, backend="eager")(x),
        lambda: ad.finish_gradients(model),
        lambda: ad.clip_grad_norm_(model, 1.0),
        lambda: ad.full_state_dict(model),
        lambda: ad.load_full_state_dict(model, {}),
        lambda: ad.save_full_state_dict(model, "nowhere"),
        lambda: ad.Mesh(model.users.comm, {"tp": comm.size})["tp"],
        lambda: ad.rng.seed(1, model.users.comm),
        lambda: model.users.comm.all_reduce(x),
        lambda: model.users.comm.split(0),
        lambda: model.users.comm.timeout,
        model.users.comm.barrier,
    ):
        with pytest.raises(RuntimeError, match=told):
            use()
    model.users.comm.destroy()  # there is nothing to end
    twin = copy.deepcopy(by_torch(model))
    assert step(ad.set_communicator(twin, comm), comm)
    with pytest.raises(TypeError, match=r"set_communicator: module is 3, expected a torch.nn.Module"):
        ad.set_communicator(3, comm)  # type: ignore[type-var]
    with pytest.raises(TypeError, match=r"set_communicator: comm is 3, expected a pynccl.Communicator"):
        ad.set_communicator(model, 3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=told):
        ad.set_communicator(model, model.users.comm)
    swapped = comm.split(0, -comm.rank)
    assert swapped is not None
    with pytest.raises(
        (ValueError, RuntimeError),
        match=r"is that of rank \d of 3.*comm is rank \d of 3, expected .*the file of this rank",
    ):
        ad.set_communicator(model, swapped)
    fewer = comm.split(0 if comm.rank < other else 1)
    assert fewer is not None
    with pytest.raises(
        ValueError, match=rf"comm is rank . of {fewer.size}, expected rank {comm.rank} of 3.*save ad.full_state_dict"
    ):
        ad.set_communicator(model, fewer)
    swapped.destroy()
    fewer.destroy()
    with pytest.raises(RuntimeError, match=told):  # it is as it was
        model(ids_of(comm))


def test_what_is_not_connected_says_what_to_do_on_every_rank(ranks: RankPool) -> None:
    ranks.run(3, refuses, 2)


def meshed(comm: Communicator) -> None:
    """Parts over the axes of a mesh, and of a part of its part."""
    top = comm.split(0, comm.rank)
    assert top is not None
    mesh = ad.Mesh(top, {"dp": 2, "tp": 2})
    inner = ad.Mesh(mesh["tp"], {"heads": 1, "shared": 2})
    torch.manual_seed(2)
    key = ad.KeyValueLinear(4, 6, inner["heads"], shared=inner["shared"])
    column = ad.ColumnParallelLinear(4, 6, mesh["tp"])
    model: Any = nn.Sequential(key, column, ad.RowParallelLinear(6, 4, mesh["dp"]))
    model.mesh = mesh
    x = torch.randn(3, 4)
    y, z = model[0](x), model[1](x)
    saved, part = (pickle.dumps(one) for one in (model, nn.Sequential(key, column)))
    mesh.close()
    top.destroy()
    fresh = comm.split(0, comm.rank)
    assert fresh is not None
    for given in (fresh, ad.Mesh(fresh, {"dp": 2, "tp": 2})):
        again: Any = ad.set_communicator(pickle.loads(saved), given)
        assert torch.equal(again[0](x), y) and torch.equal(again[1](x), z)
        assert again.mesh.comm is fresh and again.mesh["tp"] is again[1].comm and again.mesh["dp"] is again[2].comm
        assert again[0].comm.size == 1 and again[0].shared.size == 2 and again[0].shared.rank == again[1].comm.rank
        if isinstance(given, ad.Mesh):
            assert given["tp"] is again[1].comm
            both: Any = ad.set_communicator(pickle.loads(part), given["tp"])  # of which all others come
            assert both[1].comm is given["tp"] and torch.equal(both[0](x), y)
    wide = pickle.loads(part)
    with pytest.raises(ValueError, match=r"along tp the module was cut over 2 ranks, the mesh has 4"):
        ad.set_communicator(wide, ad.Mesh(fresh, {"tp": 4}))
    only_here = pickle.loads(part) if comm.rank < 2 else nn.Linear(2, 2)  # as stages of a pipeline have it
    ad.set_communicator(only_here, fresh)
    if isinstance(only_here, nn.Sequential):
        assert torch.equal(only_here[1](x), z)
    (alone,) = Communicator.init_all(1)
    mixed = nn.Sequential(pickle.loads(saved), pickle.loads(pickle.dumps(ad.nn.Copy(alone))))
    alone.destroy()
    with pytest.raises(ValueError, match=r"communicators that do not come from one .*module.part"):
        ad.set_communicator(mixed, fresh)
    fresh.destroy()


def test_communicators_of_a_mesh_are_split_off_again(ranks: RankPool) -> None:
    ranks.run(4, meshed)


def partitioned(comm: Communicator) -> None:
    """Communicators in which some ranks are not."""
    partition = ad.partition.CartesianPartition(comm, (2, 1), ranks=(0, 2))
    module: Any = nn.Sequential(
        ad.partition.AllSumReduce(partition, (0,)), ad.partition.Broadcast(partition, partition)
    )
    x = torch.full((2,), comm.rank + 1.0)
    expected = module[0](x) if partition.active else None
    again: Any = ad.set_communicator(by_torch(module), comm)
    assert again[1].P_x.comm is comm and again[0].partition.ranks == (0, 2)
    if expected is not None:
        assert torch.equal(again[0](x), expected) and float(expected[0]) == 4.0 and again[0].comm.size == 2
    else:
        assert again[0].comm is None


def test_a_partition_of_some_ranks_is_split_off_again(ranks: RankPool) -> None:
    ranks.run(3, partitioned)


# ------------------------------------------------------------------------------------------------- models of others


def transformer(comm: Communicator, kv_heads: int, gather_logits: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8}
    config = LlamaConfig(vocab_size=61, num_key_value_heads=kv_heads, tie_word_embeddings=gather_logits, **sizes)
    torch.manual_seed(1)
    model: Any = LlamaForCausalLM(config).double()
    model = ad.parallelize(model, comm, ad.plans.llama, gather_logits=gather_logits)
    ids = torch.randint(61, (2, 8))

    def stepped(one: Any) -> list[Tensor]:
        one.zero_grad()
        loss = one(input_ids=ids, labels=ids).loss
        loss.backward()
        ad.finish_gradients(one)
        return [loss.detach(), *(parameter.grad for parameter in one.parameters())]

    expected = [one.clone() for one in stepped(model)]
    for twin in (copy.deepcopy(model), AveragedModel(model).module):  # norms have to be marked there, too
        same(stepped(twin), expected)
    for way in WAYS.values():
        again = way(model)
        with pytest.raises(RuntimeError, match="set_communicator"):
            again(input_ids=ids, labels=ids)
        same(stepped(ad.set_communicator(again, comm)), expected)
    if not gather_logits:  # tied ones would become two
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
        same(stepped(model), expected)


@pytest.mark.parametrize(("kv_heads", "gather_logits"), [(2, False), (8, True)])
def test_a_model_of_transformers_is_copied_and_pickled(ranks: RankPool, kv_heads: int, gather_logits: bool) -> None:
    pytest.importorskip("transformers")
    ranks.run(4, transformer, kv_heads, gather_logits)


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
    again = ad.set_communicator(by_torch(model), comm)
    torch._dynamo.reset()
    found = step(torch.compile(again, backend="aot_eager"), comm)
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
    with pytest.raises(TypeError, match=r'a CommOverlap cannot be pickled.*set layer.overlap = "auto"'):
        pickle.dumps(layer)
    layer.overlap = "auto"
    assert torch.equal(ad.set_communicator(by_torch(layer), comm)(x), layer(x))
    overlap.close()
    with pytest.raises(TypeError, match=r"a pynccl.DataParallelGradients cannot be pickled"):
        pickle.dumps(ad.DataParallelGradients(nn.Linear(2, 2), comm))


def test_buffers_of_overlap_are_shared_by_copies_and_not_pickled(ranks: RankPool) -> None:
    ranks.run(2, buffers)
