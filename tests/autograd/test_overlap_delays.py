"""Overlapped layers whose lanes run late, each in its own time: the same bits; NaN where a buffer is used wrongly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from deferred import deferred_lanes, poisoned_workspaces
from ranks import RankPool
from test_overlap_schedule import CASES, ON_ONE, ON_TWO, OTHERS, Variant, tensors
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd import OverlapConfig

SEEDS = 20
LATE = 0.0005  # seconds: some times what a piece takes
GATHERED_TWICE = tuple(OverlapConfig(method, save_gathered=False) for method in ("slices", "ring"))
WAYS = (*ON_ONE, *ON_TWO, OTHERS[0], *GATHERED_TWICE)
MORE: dict[str, tuple[dict[str, Any], ...]] = {
    "all_gather_matmul": ({}, {"return_gathered": True}),
    "matmul_all_reduce": ({}, {"hand_off": True}),
    "matmul_reduce_scatter": ({}, {"reduce_dtype": torch.float32}),
    "copy_matmul": ({}, {"reduce_dtype": torch.float32}),
}


def variants(name: str) -> list[Variant]:
    return [
        Variant(way, dtype=torch.bfloat16 if "reduce_dtype" in more else torch.float32, more=tuple(more.items()))
        for way in WAYS
        for more in MORE[name]
    ]


def results(name: str, variant: Variant, comm: Communicator) -> list[Tensor]:
    """Outputs and gradients."""
    leaves = tensors(name, variant, comm)
    y = CASES[name].function(*leaves[:2], comm, leaves[2], overlap=variant.way, **dict(variant.more))
    outputs = [part * 1 for part in y] if isinstance(y, (tuple, ad.overlap.Slices)) else [y]
    there = [out.detach().clone() for out in outputs]  # at once: what comes too late is not there
    loss = sum((out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum() for out in outputs)
    loss.backward()  # type: ignore[union-attr]
    return there + [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]


def same_bits(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def repetitions_that_differ(comm: Communicator, name: str) -> list[str]:
    """Every way at once with lanes that only run ahead; then one after the other, late by chance."""
    expected = [(variant, results(name, variant, comm)) for variant in variants(name)]
    differ = []
    with poisoned_workspaces():
        for variant, wanted in expected:
            with deferred_lanes():
                if not same_bits(results(name, variant, comm), wanted):
                    differ.append(f"{variant}, no delay")
        for seed in range(SEEDS):
            variant, wanted = expected[seed % len(expected)]
            with deferred_lanes(seed * comm.size + comm.rank, LATE):
                if not same_bits(results(name, variant, comm), wanted):
                    differ.append(f"{variant}, seed {seed}")
    return differ


@pytest.mark.parametrize(("name", "n"), list(zip(CASES, (2, 3, 2, 3), strict=True)))
def test_lanes_that_run_late_give_the_same_bits(ranks: RankPool, name: str, n: int) -> None:
    assert ranks.run(n, repetitions_that_differ, name) == [[]] * n
