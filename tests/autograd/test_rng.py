"""Random numbers of tensor-parallel models: equal or different on each rank, reproducible, recomputed identically."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import RankPool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pynccl_autograd as ad
from pynccl import Communicator


def draws(comm: Communicator) -> list[list[float]]:
    """Draw numbers outside and inside of ad.rng.sharded, twice."""
    found = []
    for _ in range(2):
        found.append(torch.rand(4).tolist())
        with ad.rng.sharded(comm):
            found.append(torch.rand(4).tolist())
    return found


def draw_after_seeds(comm: Communicator) -> list[list[list[float]]]:
    """Draw after seeding, and after unequal draws, an error in a block and a restored state."""
    found = []
    for seed in (7, 7, 8):
        ad.rng.seed(seed, comm)
        found.append(draws(comm))
    with pytest.raises(KeyError), ad.rng.sharded(comm):
        torch.rand(10 + 700 * comm.rank)
        with ad.rng.sharded(comm):
            torch.rand(comm.rank + 1)
        raise KeyError
    state = copy.deepcopy(ad.rng.get_state())
    found.append(draws(comm))
    ad.rng.seed(4, comm)
    ad.rng.set_state(state)
    assert draws(comm) == found[-1]
    return found


def test_numbers_are_equal_outside_a_block_and_differ_between_ranks_within(ranks: RankPool) -> None:
    results = ranks.run(3, draw_after_seeds)
    first, again, other, _ = results[0]
    assert first == again and all(a != b for a, b in zip(first, other, strict=True))
    assert first[0] != first[2] and first[1] != first[3]
    for each_draw in zip(*results, strict=True):
        assert [len({str(on_rank[place]) for on_rank in each_draw}) for place in range(4)] == [1, 3, 1, 3]


def dropout(comm: Communicator) -> tuple[list[bool], list[bool]]:
    x = torch.ones(400)
    ad.rng.seed(5, comm)
    per_rank, same = ad.Dropout(0.25, comm), ad.Dropout(0.25, comm, sharded=False)
    y, z = per_rank(x), same(x)
    kept = y != 0
    torch.testing.assert_close(y[kept], torch.full_like(y[kept], 1 / 0.75))
    assert 240 < int(kept.sum()) < 360
    torch.manual_seed(5)  # the block has drawn one number
    torch.empty((), dtype=torch.int64).random_()
    torch.testing.assert_close(z, F.dropout(x, 0.25))
    state = torch.get_rng_state()
    assert per_rank.eval()(x) is x and torch.equal(state, torch.get_rng_state())

    def block(x: Tensor) -> Tensor:
        with ad.rng.sharded(comm):
            return F.dropout(x * 2, 0.5) + 1

    found = []
    for f in (block, torch.compile(block, backend="eager")):
        ad.rng.seed(9, comm)
        found.append(f(x))
    assert torch.equal(*found)
    return kept.tolist(), (z != 0).tolist()


def test_dropout_masks_differ_between_ranks_only_for_sharded_activations(ranks: RankPool) -> None:
    (own_0, same_0), (own_1, same_1) = ranks.run(2, dropout)
    assert own_0 != own_1 and same_0 == same_1


def compare_checkpoints(comm: Communicator) -> None:
    linear, per_rank, same = nn.Linear(16, 16).double(), ad.Dropout(0.5, comm), nn.Dropout(0.5)

    def region(x: Tensor) -> Tensor:
        return per_rank(torch.tanh(linear(same(torch.tanh(linear(per_rank(x)))))))

    value = torch.randn(5, 16, dtype=torch.float64)
    results = []
    for use_reentrant in ("plain", False, True):
        ad.rng.seed(6, comm)
        x = value.clone().requires_grad_()
        y = region(x) if use_reentrant == "plain" else checkpoint(region, x, use_reentrant=use_reentrant)
        y = region(y)  # draws more numbers before the recomputation
        y.square().sum().backward()
        results.append((y.detach(), x.grad, torch.rand(2).double()))
    for plain, *recomputed in zip(*results, strict=True):
        for found in recomputed:
            torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)


def test_checkpointing_recomputes_with_the_same_numbers(ranks: RankPool) -> None:
    ranks.run(2, compare_checkpoints)


def check_errors(comm: Communicator) -> None:
    other = comm.split(0, comm.rank)
    assert other is not None

    def within(call: Any) -> None:
        with ad.rng.sharded(other):
            call()

    torch.manual_seed(comm.rank)
    different = r"states of torch.s generators differ between ranks.*call ad\.rng\.seed\(seed, comm\)"
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: within(int), RuntimeError, r"call ad\.rng\.seed\(seed, comm\)"),
        (lambda: ad.Dropout(0.5, other, sharded=False)(torch.ones(3)), RuntimeError, different),
        (lambda: ad.rng.seed(comm.rank, other), ValueError, r"the ranks passed the seeds \[0, 1\]"),
        (lambda: ad.rng.seed(2**63 - 1, other) or within(ad.rng.get_state), RuntimeError, "call it outside"),
        (lambda: ad.rng.set_state({"cpu": torch.zeros(3)}), ValueError, r"rng\.set_state: state"),
    ]
    for call, kind, text in cases:
        with pytest.raises(kind, match=text):
            call()
    other.destroy()


def test_wrong_use_raises(ranks: RankPool) -> None:
    ranks.run(2, check_errors)
