"""Data-parallel training goes on with the ranks that are left.

The parameters are dyadic numbers, so that sums of gradients are exact in any order. A step with these members must be
equal, bit for bit, to that of a reference: plain torch in one process.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from elastic import SECONDS, ElasticRanks, elastic_ranks, join, kill_self
from ranks import Place, RankPool
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator, NcclError, NcclInvalidUsage


@pytest.fixture(scope="module")
def elastic() -> Iterator[ElasticRanks]:
    with elastic_ranks() as found:
        yield found


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
