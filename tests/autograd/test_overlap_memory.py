"""Overlapped layers need no more memory after many steps than after one; an error does not affect the next call."""

from __future__ import annotations

import gc
import itertools
import threading
from typing import Any

import pytest
import torch
from ranks import RankPool
from test_overlap_schedule import results, same_bits
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl.bindings import workers
from pynccl_autograd import OverlapConfig
from pynccl_autograd.overlap import reduce
from pynccl_autograd.overlap.buffers import Buffers
from pynccl_autograd.state import state_of

SEQUENCE, WIDTH = 64, 32
SLICES = OverlapConfig("slices", chunks=3)


def held_resources(comm: Communicator) -> tuple[int, int, int]:
    """Return the bytes of the buffers, the number of tensors and that of threads, without those that stand by."""
    gc.collect()
    tensors = sum(issubclass(type(each), Tensor) for each in gc.get_objects())
    threads = set(threading.enumerate()) - workers._workers
    return state_of(comm, Buffers).nbytes, tensors, len(threads)


def many_steps(comm: Communicator) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return the resources held after the first step and after the last."""
    options: dict[str, Any] = {"comm": comm, "sequence_parallel": True, "overlap": SLICES}
    column = ad.ColumnParallelLinear(WIDTH, WIDTH * 2, **options)
    row = ad.RowParallelLinear(WIDTH * 2, WIDTH, **options)
    x = torch.randn(SEQUENCE // comm.size, 2, WIDTH)
    found: list[tuple[int, int, int]] = []
    for _ in range(100):
        row(column(x)).square().sum().backward()
        for parameter in (*column.parameters(), *row.parameters()):
            parameter.grad = None
        found.append(held_resources(comm) if len(found) in (0, 99) else (0, 0, 0))
    return found[0], found[-1]


def test_many_steps_hold_no_more_memory_than_the_first(ranks: RankPool) -> None:
    for first, last in ranks.run(2, many_steps):
        assert first[0] == last[0] > 0
        assert last[1] <= first[1] and last[2] <= first[2]


class InjectedError(Exception):
    """The error that the tests inject."""


def fail_once(patch: pytest.MonkeyPatch, owner: Any, name: str, at: int) -> None:
    """Patch the function so that only its call number `at` raises."""
    plain, calls = getattr(owner, name), itertools.count()

    def call(*args: Any, **options: Any) -> Any:
        if next(calls) == at:
            raise InjectedError
        return plain(*args, **options)

    patch.setattr(owner, name, call)


# Failures in forward and backward passes; an exchange computes its sums in the thread of its lane.
FAILURES: list[tuple[str, OverlapConfig, Any, str]] = [
    ("all_gather_matmul", SLICES, Communicator, "all_gather"),
    ("all_gather_matmul", SLICES, Communicator, "reduce_scatter"),
    ("matmul_reduce_scatter", SLICES, Communicator, "reduce_scatter"),
    ("matmul_reduce_scatter", SLICES, Communicator, "all_gather"),
    ("matmul_all_reduce", SLICES, Communicator, "all_reduce"),
    ("copy_matmul", SLICES, Communicator, "all_reduce"),
    ("matmul_reduce_scatter", OverlapConfig("exchange", chunks=3), reduce, "sum_in_order"),
]


def check_after_errors(comm: Communicator) -> list[str]:
    """Return what is wrong after the first, second or third call of a function has raised."""
    buffers, wrong = state_of(comm, Buffers), []
    for name, config, owner, what in FAILURES:
        buffers.drop()
        expected = results(name, config, comm)
        needed = buffers.nbytes
        for at in range(3):
            with pytest.MonkeyPatch.context() as patch:
                fail_once(patch, owner, what, at)
                with pytest.raises(InjectedError):
                    results(name, config, comm)
            if buffers._lock.locked() or buffers.nbytes:
                wrong.append(f"{name}, {what} {at}: the buffers are kept, {buffers.nbytes} bytes")
            if not same_bits(results(name, config, comm), expected) or buffers.nbytes != needed:
                wrong.append(f"{name}, {what} {at}: the next call gives other bits")
    return wrong


def test_an_error_in_a_pass_does_not_affect_the_next_call(ranks: RankPool) -> None:
    assert ranks.run(2, check_after_errors) == [[]] * 2
