"""A mesh and data-parallel training go on with the ranks that are left.

The parameters are dyadic numbers, so that sums of gradients are exact in any order. A step with these members must be
equal, bit for bit, to that of a reference: plain torch in one process.
"""

from __future__ import annotations

import gc
import random
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from elastic import SECONDS, ElasticRanks, elastic_ranks, join, kill_self
from ranks import Place, RankPool
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator, NcclError, NcclInvalidUsage, NcclRemoteError


@pytest.fixture(scope="module")
def elastic() -> Iterator[ElasticRanks]:
    with elastic_ranks() as found:
        yield found


def until_it_raises(comm: Communicator) -> NcclError:
    """Use the communicator until a rank of its generation has died."""
    with pytest.raises(NcclError) as caught:
        while True:
            comm.all_reduce(torch.ones(3))
            time.sleep(0.01)  # leaves the cores to the others
    return caught.value


# ---------------------------------------------------------------------------------------------------------- Mesh

GRID = np.arange(6).reshape(1, 3, 2)
SHORTER = [GRID[:, [0, 2]], GRID[:, [0, 2], 1:]]  # without dp 1, then without tp 0


def shorten(place: Place, port: int) -> None:
    mesh = ad.Mesh(join(place, port), {"pp": 1, "dp": 3, "tp": 2})
    for number, left in enumerate(SHORTER):
        old, kept = mesh, mesh["tp"]  # some of these lose no rank
        old["dp"].barrier()
        if place.rank not in left:
            kill_self()
        until_it_raises(kept)
        began = time.monotonic()
        closed = place.rank in (1, 4)
        if closed:  # also before the new generation is made
            old.close()
        mesh = old.survivors(timeout=SECONDS)
        assert mesh.comm is old.comm.survivors() and mesh.comm.generation == number + 1
        assert tuple(mesh.shape.items()) == tuple(zip(("pp", "dp", "tp"), left.shape, strict=True))
        assert tuple(mesh.coordinate.values()) == tuple(int(index[0]) for index in np.where(left == place.rank))
        for at, axis in enumerate(mesh):
            index: list[Any] = list(mesh.coordinate.values())
            index[at] = slice(None)
            members = mesh[axis].all_gather(torch.tensor([place.rank])).tolist()
            assert members == left[tuple(index)].tolist()
        for use in (partial(old.__getitem__, "dp"), old.comm.barrier, kept.barrier)[: 2 if closed else 3]:
            with pytest.raises(NcclRemoteError, match=rf"generation {number} has ended: (.|\n)* call survivors\(\)"):
                use()
        with old:
            old.close()
        with pytest.raises(ArithmeticError), old:
            raise ArithmeticError
        assert time.monotonic() - began < SECONDS


def test_a_mesh_without_whole_slices_is_shorter(elastic: ElasticRanks) -> None:
    left = {int(rank) for rank in SHORTER[-1].flatten()}
    elastic.run(6, set(range(6)) - left, shorten)


def break_slice(place: Place, port: int) -> str:
    old = ad.Mesh(join(place, port), {"pp": 1, "dp": 2, "tp": 2})
    if place.rank == 3:
        kill_self()
    until_it_raises(old.comm)
    with pytest.raises(NcclRemoteError) as caught:
        old.survivors(timeout=SECONDS)
    comm = old.comm.survivors(timeout=SECONDS)  # it stays usable
    assert comm.size == 3 and comm.all_reduce(torch.ones(1)).item() == 3
    assert comm.verdict and caught.value.verdict == comm.verdict and comm.verdict in str(caught.value)
    assert ad.Mesh(comm, {"dp": 3, "tp": 1})["dp"].size == 3
    if place.rank == 2:  # the rest of the slice
        kill_self()
    until_it_raises(comm)
    mesh = old.survivors(timeout=SECONDS)
    assert mesh.shape == {"pp": 1, "dp": 1, "tp": 2} and mesh.comm.generation == 2
    assert mesh["tp"].all_gather(torch.tensor([place.rank])).tolist() == [0, 1]
    return str(caught.value)


def test_a_mesh_that_lost_part_of_a_slice_names_it_on_all_ranks(elastic: ElasticRanks) -> None:
    (text,) = set(elastic.run(4, {2, 3}, break_slice).values())
    assert text.startswith("Mesh.survivors: tp of dp 1 lost rank 3. No axis can be shortened")
    assert "mesh.comm.survivors() returns the communicator of the 3 that are left" in text


# ------------------------------------------------------------------------------------------------ data parallelism

STEPS, WIDTH = 8, 6
POINTS = (
    "forward",
    "backward 2",
    "backward 0",
    "passed",
    "commit",
    "committed",
    "stepped",
    "survivors",
    "agree",
    "use",
)


class Training:
    """A replica, its optimizer, and the steps that this rank has taken."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))
        self.model.double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=2.0**-6, momentum=0.5)
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        for one in self.model.parameters():
            one.copy_((one.clamp(-4, 4) * 256).round() / 256)

    def loss(self, rank: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randint(-3, 4, (5, 4), generator=generator).double()
        loss: Tensor = self.model(x).sum()
        return loss

    def step(self) -> None:
        self.optimizer.step()
        self.round()

    def values(self) -> list[Any]:
        momenta = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        return [one.tolist() for one in (*self.model.parameters(), *momenta)]


class Step(NamedTuple):
    """A committed step: the ranks whose gradients it averages, and what it leads to."""

    members: tuple[int, ...]
    values: list[Any]


def reference(members: list[tuple[int, ...]]) -> list[Step]:
    """Return the steps of plain torch, with these members."""
    training, steps = Training(), []
    for step, ranks in enumerate(members):
        training.optimizer.zero_grad()
        for rank in ranks:
            training.loss(rank, step).backward()
        for one in training.model.parameters():
            assert one.grad is not None
            one.grad /= len(ranks)
        training.step()
        steps.append(Step(ranks, training.values()))
    return steps


def train(place: Place, port: int, kills: dict[int, tuple[int, str]], as_view: bool) -> dict[int, Step]:
    """Train while ranks die. kills: rank -> step and point at which it dies. Return the steps taken here."""
    comm, training, step, steps, ready = join(place, port), Training(), 0, {}, True
    data_parallel = ad.DataParallelGradients(training.model, comm, 64, gradient_as_bucket_view=as_view)

    def at(point: str) -> None:
        if place.rank in kills and kills[place.rank][1] == point and step >= kills[place.rank][0]:
            kill_self()

    def commit_barrier(self: Communicator, barrier: Callable[[Communicator], None] = Communicator.barrier) -> None:
        at("commit")
        barrier(self)
        at("committed")

    training.model[2].register_forward_hook(lambda *_: at("forward"))
    for index in (0, 2):
        training.model[index].register_full_backward_hook(
            partial(lambda at_point, *_: at(at_point), f"backward {index}")
        )
    hooks = count_hooks(training.model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, "barrier", commit_barrier)
        while step < STEPS:
            try:
                if not ready:
                    comm = comm.survivors(timeout=SECONDS)
                    at("survivors")
                    newest = comm.agree(step, timeout=SECONDS)
                    at("agree")
                    comm.sync_state(training.model, training.optimizer, timeout=SECONDS)
                    step = newest  # now, since sync_state raises if a rank dies meanwhile
                    at("use")
                    data_parallel.use(comm)
                    assert all(one.grad is None for one in training.model.parameters())
                    ready = True
                data_parallel.zero_grad()
                training.loss(place.rank, step).backward()
                at("passed")
                comm.commit(timeout=SECONDS)
                training.step()
                step += 1
                steps[step - 1] = Step(comm._generation.members, training.values())
                at("stepped")
            except NcclError:
                ready = False
    assert count_hooks(training.model) == hooks
    return steps


def count_hooks(model: nn.Module) -> list[int]:
    found = [len(one._forward_hooks) for one in model.modules()]
    return found + [len(one._post_accumulate_grad_hooks or ()) for one in model.parameters()]


@pytest.mark.parametrize("seed", range(4))
def test_training_with_random_deaths_equals_a_reference_with_the_same_members(elastic: ElasticRanks, seed: int) -> None:
    draw = random.Random(seed)
    kills = {rank: (draw.randrange(STEPS - 1), draw.choice(POINTS)) for rank in draw.sample(range(4), 3)}
    found = elastic.run(4, None, train, kills, seed % 2 == 1)
    members = []
    for step in range(STEPS):
        (those,) = {one[step].members for one in found.values() if step in one}
        members.append(those)
    assert members[0] == (0, 1, 2, 3) or min(step for step, _ in kills.values()) == 0
    expected = reference(members)
    for steps in found.values():
        for step, one in steps.items():
            assert one == expected[step], step


class Backwards(nn.Module):
    """Its gradients come in another order than that of its parameters: the buckets are rebuilt."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x).tanh()
        return x


def refuse(*_: object) -> None:
    raise ArithmeticError("refused")


def use_after_a_broken_pass(comm: Communicator, as_view: bool) -> None:
    old, new = comm.split(0, comm.rank), comm.split(None if comm.rank == 1 else 0)
    assert old is not None
    model, x = Backwards(), torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(comm.rank))
    data_parallel = ad.DataParallelGradients(model, old, 400, gradient_as_bucket_view=as_view)
    for _ in range(2):
        model(x).sum().backward()
    names = [bucket.names for bucket in data_parallel._buckets]
    handle = model.layers[5].register_full_backward_hook(refuse)
    with pytest.raises(ArithmeticError):
        model(x).sum().backward()
    assert 0 < len(data_parallel._launched) < len(names)  # in flight
    handle.remove()
    old.abort()
    if new is None:
        return
    with pytest.raises(NcclInvalidUsage, match="was aborted"):
        data_parallel.use(old)
    gone = weakref.ref(old)
    del old
    data_parallel.use(new)
    gc.collect()
    assert gone() is None and all(one.grad is None for one in model.parameters())
    fresh = Backwards()
    fresh.load_state_dict(model.state_dict())
    other = ad.DataParallelGradients(fresh, new, 400, gradient_as_bucket_view=as_view, broadcast=False)
    for index in range(3):
        for one in (model, fresh):
            (one(x).sum() * (index + 1)).backward()
        for grad, expected in zip(model.parameters(), fresh.parameters(), strict=True):
            assert grad.grad is not None and expected.grad is not None and torch.equal(grad.grad, expected.grad)
        assert [one.names for one in data_parallel._buckets] == [one.names for one in other._buckets]
    assert [one.names for one in data_parallel._buckets] == names  # rebuilt again, in the order of the gradients


@pytest.mark.parametrize("as_view", [False, True])
def test_use_is_bit_for_bit_a_new_object(ranks: RankPool, as_view: bool) -> None:
    ranks.run(4, use_after_a_broken_pass, as_view)


def use_wrong(comm: Communicator) -> None:
    model = nn.Linear(3, 2)
    data_parallel = ad.DataParallelGradients(model, comm)
    with pytest.raises(TypeError, match=r"comm is .comm., expected a pynccl\.Communicator"):
        data_parallel.use("comm")  # type: ignore[arg-type]
    other = ad.DataParallelGradients(nn.Linear(3 + comm.rank, 2), comm.split(comm.rank))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rank 1 and rank 0 differ in names, shapes, dtypes"):
        other.use(comm)
    assert other.comm.size == 1
    model(torch.full((1, 3), float(comm.rank))).sum().backward()
    assert model.weight.grad is not None
    with pytest.raises(ValueError, match="rank 1 and rank 0 differ in bucket_bytes"):
        ad.DataParallelGradients(model, comm.split(comm.rank), 100 + comm.rank).use(comm)  # type: ignore[arg-type]
    assert model.weight.grad.tolist() == [[0.5] * 3] * 2  # an error leaves it


def test_use_of_a_wrong_communicator_changes_nothing(ranks: RankPool) -> None:
    ranks.run(2, use_wrong)


# ------------------------------------------------------------------------------------------- a mesh of two replicas

SLICES = ad.OverlapConfig("slices", chunks=2)
W1, W2 = torch.arange(32.0).view(8, 4).double() % 5 - 2, torch.arange(32.0).view(4, 8).double() % 7 - 3
ROWS = 8


class Overlapped(nn.Module):
    """Two tensor-parallel matmuls on shards of the sequence, on any communicator `tp`."""

    def __init__(self, tp: Communicator) -> None:
        super().__init__()
        self.tp = tp
        self.w1 = nn.Parameter(W1.chunk(2)[tp.rank].clone())
        self.w2 = nn.Parameter(W2.chunk(2, 1)[tp.rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        hidden = ad.all_gather_matmul(x, self.w1, self.tp, overlap=SLICES)
        return ad.matmul_reduce_scatter(hidden.relu(), self.w2, self.tp, overlap=SLICES)


def batch(replica: int, step: int) -> Tensor:
    return torch.randint(-3, 4, (ROWS, 4), generator=torch.Generator().manual_seed(10 * step + replica)).double()


def train_overlapped(place: Place, port: int, point: str) -> list[list[Any]]:
    """Train on a 2x2 mesh; replica 1 dies in step 1. Return this rank's shards after each step."""
    mesh = ad.Mesh(join(place, port), {"dp": 2, "tp": 2})
    model, replica, part = Overlapped(mesh["tp"]), place.rank // 2, place.rank % 2
    found: list[list[Any]] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-8)
    data_parallel = ad.DataParallelGradients(model, mesh["dp"], 64)

    def at(here: str) -> None:
        if replica == 1 and len(found) == 1 and here == point:
            kill_self()

    ready = True
    while len(found) < 3:
        try:
            if not ready:
                mesh = mesh.survivors(timeout=SECONDS)
                assert mesh.shape == {"dp": 1, "tp": 2} and mesh.comm.agree(len(found)) == len(found)
                model.tp = mesh["tp"]
                data_parallel.use(mesh["dp"])
                ready = True
            y = model(batch(replica, len(found)).chunk(2)[part])
            at("forward")
            y.register_hook(lambda _: at("backward"))
            model.w2.register_hook(lambda _: at("between"))
            y.sum().backward()
            mesh.comm.commit(timeout=SECONDS)
            optimizer.step()
            optimizer.zero_grad()
            found.append([model.w1.tolist(), model.w2.tolist()])
        except NcclError:
            at(point)  # all of the replica
            ready = False
    return found


@pytest.mark.parametrize("point", ["backward", "between"])
def test_overlapped_training_on_a_mesh_goes_on_without_a_replica(elastic: ElasticRanks, point: str) -> None:
    found = elastic.run(4, {2, 3}, train_overlapped, point)
    w1, w2 = nn.Parameter(W1.clone()), nn.Parameter(W2.clone())
    optimizer = torch.optim.SGD([w1, w2], lr=2.0**-8)
    for step, replicas in enumerate([(0, 1), (0,), (0,)]):
        optimizer.zero_grad()
        for replica in replicas:
            loss = ((batch(replica, step) @ w1.T).relu() @ w2.T).sum()
            (loss / len(replicas)).backward()
        optimizer.step()
        for rank, steps in found.items():
            assert steps[step] == [w1.chunk(2)[rank].tolist(), w2.chunk(2, 1)[rank].tolist()], (rank, step)


def parallel_net(comm: Communicator) -> nn.Module:
    torch.manual_seed(0)
    return ad.parallelize(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), comm, {"0": "column", "1": "row"}, False)


def use_what_has_ended(place: Place, port: int, folder: str) -> None:
    mesh = ad.Mesh(join(place, port), {"dp": 2, "tp": 2})
    comm, tp, x = mesh.comm, mesh["tp"], torch.ones(3, 4, requires_grad=True)
    model, plain = parallel_net(tp), nn.Linear(4, 4)
    data_parallel, scaler = ad.DataParallelGradients(plain, comm), ad.GradScaler(comm, init_scale=4.0)
    optimizer, partition = torch.optim.Adam(model.parameters()), ad.CartesianPartition(comm, (2, 2))
    ad.set_shard(plain.weight, ad.Shard(tp, None, plain.weight.shape, partial=True))
    along = partition.axes_comm(0)
    scaler.scale(model(x).square().sum()).backward()
    optimizer.step()
    expected = model(x)  # its backward pass is still to come
    plain(x).sum().backward()
    if place.rank > 1:
        kill_self()
    until_it_raises(comm)
    new = mesh.survivors(timeout=SECONDS)
    began = time.monotonic()
    uses: list[Callable[[], Any]] = [
        *(expected.sum().backward, lambda: model(x), lambda: plain(x).sum().backward(), data_parallel.finish),
        *(lambda: ad.finish_gradients(plain), lambda: ad.clip_grad_norm_(model, 1.0)),
        *(lambda: scaler.unscale_(optimizer), lambda: partition.axes_comm(1), lambda: ad.full_state_dict(model)),
        *(lambda: ad.save_full_state_dict(model, folder), lambda: ad.AllSumReduce(partition, (0,))(x)),
        lambda: ad.all_gather_matmul(x, x, along, overlap=SLICES),  # type: ignore[arg-type]
    ]
    for use in uses:
        with pytest.raises(NcclRemoteError, match="generation 0 has ended"):
            use()
    partition.destroy()
    assert time.monotonic() - began < SECONDS / 2
    # All of it is made again.
    data_parallel.use(new.comm)
    assert plain(x).sum().backward() is None
    again = parallel_net(new["tp"])
    again.load_state_dict(model.state_dict())
    optimizer_again = torch.optim.Adam(again.parameters())
    optimizer_again.load_state_dict(optimizer.state_dict())
    assert torch.equal(again(x), expected)
    scaler_again = ad.GradScaler(new.comm)
    scaler_again.load_state_dict(scaler.state_dict())
    scaler_again.scale(again(x).sum()).backward()
    scaler_again.step(optimizer_again)
    scaler_again.update()
    assert scaler_again.get_scale() == 4.0 and not torch.equal(again(x), expected)
    ad.clip_grad_norm_(again, 1.0)
    assert ad.CartesianPartition(new.comm, (1, 2)).axes_comm(1).size == 2  # type: ignore[union-attr]


def test_what_is_kept_of_an_ended_generation_raises_and_can_be_made_again(
    elastic: ElasticRanks, tmp_path: Path
) -> None:
    elastic.run(4, {2, 3}, use_what_has_ended, str(tmp_path))
