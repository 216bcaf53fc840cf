"""Random numbers of tensor-parallel models: equal or each rank's own, reproducible, the same in a recomputation."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from ranks import RankPool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pynccl_autograd as ad
from pynccl import Communicator


def draws(comm: Communicator) -> list[list[float]]:
    """Of a model's pass: equal, own, equal, own."""
    found = []
    for cut in (False, True, False, True):
        if cut:
            with ad.rng.cut(comm):
                found.append(torch.rand(4).tolist())
        else:
            found.append(torch.rand(4).tolist())
    return found


def seeded(comm: Communicator) -> list[list[list[float]]]:
    passes = []
    for seed in (7, 7, 8):
        ad.rng.seed(seed, comm)
        passes.append(draws(comm))
    return passes


@pytest.mark.parametrize("n", [2, 3])
def test_numbers_are_equal_outside_of_a_block_and_differ_within(ranks: RankPool, n: int) -> None:
    results = ranks.run(n, seeded)
    first, again, other = results[0]
    assert first == again and all(a != b for a, b in zip(first, other, strict=True))
    assert first[0] != first[2] and first[1] != first[3]
    for place, cut in enumerate((False, True, False, True)):
        different = {str(passes[0][place]) for passes in results}
        assert len(different) == (n if cut else 1)


def unequal_amounts(comm: Communicator) -> list[float]:
    ad.rng.seed(3, comm)
    with ad.rng.cut(comm):
        torch.rand(10 + 700 * comm.rank)
        with ad.rng.cut(comm):
            torch.rand(comm.rank + 1)
    try:
        with ad.rng.cut(comm):
            raise KeyError
    except KeyError:
        pass
    state = copy.deepcopy(ad.rng.get_state())
    expected = draws(comm)
    ad.rng.seed(4, comm)
    ad.rng.set_state(state)
    assert draws(comm) == expected
    assert len(set(map(tuple, comm.all_gather(state["cpu"]).reshape(comm.size, -1).tolist()))) == 1
    return torch.rand(3).tolist()


def test_the_generators_stay_equal_whatever_is_drawn_or_raised_in_a_block_and_can_be_restored(ranks: RankPool) -> None:
    first, *others = ranks.run(3, unequal_amounts)
    assert others == [first, first]


def module(comm: Communicator) -> tuple[list[bool], list[bool]]:
    x = torch.ones(400)
    ad.rng.seed(5, comm)
    own, same = ad.Dropout(0.25, comm), ad.Dropout(0.25, comm, cut=False)
    y = own(x)
    kept = y != 0
    torch.testing.assert_close(y[kept], torch.full_like(y[kept], 1 / 0.75))
    assert 240 < int(kept.sum()) < 360
    z = same(x)
    torch.manual_seed(5)  # one number was taken for the block
    torch.empty((), dtype=torch.int64).random_()
    torch.testing.assert_close(z, F.dropout(x, 0.25))
    state = torch.get_rng_state()
    assert own.eval()(x) is x and torch.equal(state, torch.get_rng_state())
    w = x.clone()
    assert ad.Dropout(1.0, comm, inplace=True)(w) is w and not w.any()
    assert isinstance(copy.deepcopy(own), nn.Dropout) and f"rank {comm.rank} of 2" in repr(own)
    return kept.tolist(), (z != 0).tolist()


def test_dropout_keeps_other_elements_on_each_rank_only_where_they_are_cut(ranks: RankPool) -> None:
    (own_0, same_0), (own_1, same_1) = ranks.run(2, module)
    assert own_0 != own_1 and same_0 == same_1


class Region(nn.Module):
    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.own, self.same = ad.Dropout(0.5, comm), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.same(torch.tanh(self.linear(self.own(x))))
        return self.own(torch.tanh(self.linear(y)))


def recomputes(comm: Communicator) -> None:
    for use_reentrant in (False, True):
        recomputes_by(comm, use_reentrant)


def recomputes_by(comm: Communicator, use_reentrant: bool) -> None:
    torch.manual_seed(0)
    region = Region(comm).double()
    value = torch.randn(5, 16, dtype=torch.float64)
    results = []
    for way in ("plain", "checkpoint"):
        ad.rng.seed(6, comm)
        region.zero_grad()
        x = value.clone().requires_grad_()
        y = region(x) if way == "plain" else checkpoint(region, x, use_reentrant=use_reentrant)
        y = region(y)  # draws on, before the recomputation
        y.square().sum().backward()
        assert x.grad is not None and region.linear.weight.grad is not None
        results.append((y.detach(), x.grad.clone(), region.linear.weight.grad.clone(), torch.rand(2).double()))
    for plain, recomputed in zip(*results, strict=True):
        torch.testing.assert_close(plain, recomputed, rtol=1e-12, atol=1e-12)


def test_a_checkpoint_draws_the_same_numbers_again(ranks: RankPool) -> None:
    ranks.run(2, recomputes)


def compiles(comm: Communicator) -> list[float]:
    region = ad.Dropout(0.5, comm)
    ad.rng.seed(9, comm)
    x = torch.ones(32)
    eager = region(x * 2) + 1

    def f(x: Tensor) -> Tensor:
        y: Tensor = region(x * 2) + 1
        return y

    ad.rng.seed(9, comm)
    assert torch.equal(torch.compile(f, backend="eager")(x), eager)

    def block(x: Tensor) -> Tensor:
        with ad.rng.cut(comm):
            return F.dropout(x * 2, 0.5) + 1

    ad.rng.seed(9, comm)
    assert torch.equal(torch.compile(block, backend="eager")(x), eager)
    return eager.tolist()


def test_compiled_it_draws_the_same(ranks: RankPool) -> None:
    first, second = ranks.run(2, compiles)
    assert first != second


def wrong(comm: Communicator) -> None:
    other = comm.split(0, comm.rank)
    assert other is not None
    with pytest.raises(RuntimeError, match=r"call ad\.rng\.seed\(seed, comm\)"):
        ad.rng.cut(other).__enter__()
    for state_of in (comm.rank, 3):
        torch.manual_seed(state_of)
        for cut in (True, False):
            if state_of == 3:  # the same on all ranks
                ad.Dropout(0.5, other, cut)(torch.ones(3))
                continue
            with pytest.raises(RuntimeError, match=r"other states on other ranks.*call ad\.rng\.seed\(seed, comm\)"):
                ad.Dropout(0.5, other, cut)(torch.ones(3))
    with pytest.raises(ValueError, match="the ranks passed the seeds \\[0, 1\\]"):
        ad.rng.seed(comm.rank, other)
    for seed in (-1, 2**63, 1.5, None):
        with pytest.raises(ValueError, match="expected an integer from 0"):
            ad.rng.seed(seed, other)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"rng\.seed: comm is None"):
        ad.rng.seed(1, None)  # type: ignore[arg-type]
    ad.rng.seed(2**63 - 1, other)
    state = ad.rng.get_state()
    with ad.rng.cut(other):
        for refused in (ad.rng.get_state, lambda: ad.rng.set_state(state)):
            with pytest.raises(RuntimeError, match="call it outside"):
                refused()
    for bad, kind in (({}, ValueError), ({"cpu": torch.zeros(3)}, ValueError), (state["cpu"], TypeError)):
        with pytest.raises(kind, match=r"rng\.set_state: state"):
            ad.rng.set_state(bad)  # type: ignore[arg-type]
    for p in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="Dropout: p is"):
            ad.Dropout(p, other)
    with pytest.raises(TypeError, match="Dropout: p is"):
        ad.Dropout("0.5", other)  # type: ignore[arg-type]
    other.destroy()


def test_what_is_wrong_is_said(ranks: RankPool) -> None:
    ranks.run(2, wrong)
