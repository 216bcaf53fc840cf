"""The pool that other tests rest on: results in rank order, failures that name the rank, a fresh start after one."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ranks as ranks_module
import torch
from ranks import Place, RankError, RankPool, each_size

import pynccl


@pytest.fixture(scope="module")
def bare() -> Iterator[RankPool]:
    """Ranks without communicators: the pool alone, whatever becomes of pynccl."""
    pool = RankPool(communicators=False)
    yield pool
    pool.close()


def place(comm: Place, *args: Any) -> tuple[Any, ...]:
    return (*comm, *args)


def process_id(comm: Place) -> int:
    return os.getpid()


def double(comm: Place, x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def variable(comm: Place, name: str) -> str | None:
    return os.environ.get(name)


def raise_on(comm: Place, failing: list[int]) -> int:
    if comm.rank in failing:
        raise ValueError(f"no luck on {comm.rank}")
    return comm.rank


def raise_on_0_block_on_1(comm: Place) -> None:
    if comm.rank == 0:
        raise ValueError("rank 0 leaves")
    threading.Event().wait()


def block_forever_here(comm: Place) -> None:
    threading.Event().wait()


def kill_rank_1(comm: Place) -> int:
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return comm.rank


def sum_of_ranks(comm: pynccl.Communicator) -> list[float]:
    return comm.all_reduce(torch.full((3,), float(comm.rank + 1))).tolist()


def test_an_exception_names_rank_and_place_and_pool_starts_anew(bare: RankPool) -> None:
    before = bare.run(3, process_id)
    with pytest.raises(RankError) as caught:
        bare.run(3, raise_on, [1, 2])
    message = str(caught.value)
    assert message.startswith("2 of 3 ranks failed")
    assert "rank 1 raised" in message and "no luck on 1" in message and "in raise_on" in message
    assert "rank 2 raised" in message and "rank 0" not in message
    assert isinstance(caught.value.__cause__, ValueError)
    assert not set(bare.run(3, process_id)) & set(before)


def test_a_hang_shows_the_stacks_of_all_ranks(bare: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        bare.run(2, block_forever_here, timeout=1)
    message = str(caught.value)
    assert "rank 0 did not finish within 1 s" in message and "rank 1 did not finish" in message
    assert message.count("in block_forever_here") == 2


def test_ranks_left_waiting_by_a_failed_one_are_not_waited_for(bare: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "GRACE_SECONDS", 0.5)
    bare.run(2, place)
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        bare.run(2, raise_on_0_block_on_1, timeout=60)
    assert time.monotonic() - start < 20
    assert "rank 0 leaves" in str(caught.value)
    assert "rank 1 was still running" in str(caught.value) and "in raise_on_0_block_on_1" in str(caught.value)


def test_a_killed_rank_is_reported_and_replaced(bare: RankPool) -> None:
    with pytest.raises(RankError, match="rank 1 died: SIGKILL"):
        bare.run(3, kill_rank_1)
    assert len(bare.run(3, process_id)) == 3


@each_size
def test_communicators_span_the_ranks(ranks: RankPool, n: int) -> None:
    assert ranks.run(n, sum_of_ranks) == [[n * (n + 1) / 2] * 3] * n
