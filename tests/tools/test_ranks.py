"""The pool that other tests rest on: results in rank order, failures that name the rank, a fresh start after one."""

from __future__ import annotations

import os
import signal
import sys
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


def thread_count(comm: Place) -> int:
    return torch.get_num_threads()


def double(comm: Place, x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def set_variable(comm: Place, name: str) -> None:
    os.environ[name] = "1"


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


def bare_assert(comm: Place) -> None:
    found = 41 + comm.rank
    assert found == 42


def print_and_raise(comm: Place) -> None:
    print("printed by python")
    os.write(2, b"printed by C\n")
    raise ValueError


def kill_rank_1(comm: Place) -> int:
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return comm.rank


def not_picklable(comm: Place) -> Any:
    return threading.Lock()


def sum_of_ranks(comm: pynccl.Communicator) -> list[float]:
    return comm.all_reduce(torch.full((3,), float(comm.rank + 1))).tolist()


def test_results_come_in_rank_order(bare: RankPool) -> None:
    assert bare.run(3, place, "a", 5) == [(rank, 3, "a", 5) for rank in range(3)]


def test_ranks_are_processes_that_stay(bare: RankPool) -> None:
    pids = bare.run(4, process_id)
    assert len({*pids, os.getpid()}) == 5
    assert bare.run(2, process_id) == pids[:2]
    assert bare.run(4, process_id) == pids


def test_a_rank_has_one_torch_thread(bare: RankPool) -> None:
    assert bare.run(2, thread_count) == [1, 1]


def test_tensors_travel_both_ways(bare: RankPool) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    for result in bare.run(2, double, x):
        torch.testing.assert_close(result, 2 * x, rtol=0, atol=0)


def test_environment_is_restored_after_a_call(bare: RankPool) -> None:
    bare.run(2, set_variable, "RANKS_TEST_VARIABLE")
    assert bare.run(2, variable, "RANKS_TEST_VARIABLE") == [None, None]


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


def test_outcomes_tell_who_failed_without_raising(bare: RankPool) -> None:
    outcomes = bare.outcomes(3, raise_on, [1])
    assert [outcome.value for outcome in outcomes] == [0, None, 2]
    assert [type(outcome.error) for outcome in outcomes] == [type(None), ValueError, type(None)]


def test_a_bare_assert_shows_its_values(bare: RankPool) -> None:
    with pytest.raises(RankError, match="found = 41"):
        bare.run(2, bare_assert)


def test_what_a_failing_rank_printed_is_shown(bare: RankPool) -> None:
    with pytest.raises(RankError) as caught:
        bare.run(1, print_and_raise)
    assert "printed by python" in str(caught.value) and "printed by C" in str(caught.value)


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


def test_a_function_that_cannot_travel_is_refused(bare: RankPool) -> None:
    with pytest.raises(TypeError, match="define the function at module level"):
        bare.run(2, lambda comm: None)


def test_a_result_that_cannot_travel_is_an_error(bare: RankPool) -> None:
    with pytest.raises(RankError, match="cannot pickle"):
        bare.run(2, not_picklable)


def test_variables_of_a_pool_are_per_rank() -> None:
    pool = RankPool({"RANKS_TEST_HOST": "host{rank}", "HOME": None}, communicators=False)
    try:
        assert pool.run(2, variable, "RANKS_TEST_HOST") == ["host0", "host1"]
        assert pool.run(2, variable, "HOME") == [None, None]
    finally:
        pool.close()


@each_size
def test_communicators_span_the_ranks(ranks: RankPool, n: int) -> None:
    assert ranks.run(n, sum_of_ranks) == [[n * (n + 1) / 2] * 3] * n


def test_this_process_is_left_alone_by_the_pool(bare: RankPool) -> None:
    environment, path = dict(os.environ), list(sys.path)
    bare.run(2, place)
    assert (dict(os.environ), sys.path) == (environment, path)
