"""PYNCCL_CHECK=1: mismatched calls raise on every rank, with both calls and their source lines."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from libraries import Stub
from ranks import RankPool, each_size

import pynccl
from pynccl import Communicator
from pynccl.interop.handles import vouched


def split_with_check(comm: Communicator) -> Communicator:
    """Return a communicator of the same ranks, created with PYNCCL_CHECK=1."""
    os.environ["PYNCCL_CHECK"] = "1"
    child = comm.split(0)
    assert child is not None and child.checking
    return child


F = torch.ones(4)
Call = Callable[[Communicator], Any]
# The call of rank 1 and its text in the message, then the same for the other ranks.
DISAGREEMENTS: list[tuple[Call, str, Call, str]] = [
    (
        lambda c: c.all_reduce(F), "all_reduce(count=4, FLOAT32, SUM)",
        lambda c: c.broadcast(F), "broadcast(count=4, FLOAT32, root=0)",
    ),
    (
        lambda c: c.all_reduce(F), "all_reduce(count=4, FLOAT32, SUM)",
        lambda c: c.all_reduce(torch.ones(5)), "all_reduce(count=5, FLOAT32, SUM)",
    ),
    (
        lambda c: c.reduce(F, op="max", root=1), "reduce(count=4, FLOAT32, MAX, root=1)",
        lambda c: c.reduce(F, op="avg", root=0), "reduce(count=4, FLOAT32, AVG, root=0)",
    ),
    (
        lambda c: c.scatter_v(None, torch.ones(1), counts=[1] * 3), "scatter_v(counts=[1, 1, 1], FLOAT32, root=0)",
        lambda c: c.scatter_v(F[:3], torch.ones(c.rank), counts=[0, 1, 2]),
        "scatter_v(counts=[0, 1, 2], FLOAT32, root=0)",
    ),
]  # fmt: skip


def mismatched_calls(comm: Communicator) -> list[str]:
    child, messages = split_with_check(comm), []
    x = torch.tensor(float(child.rank))
    for of_rank_1, _, of_the_others, _ in DISAGREEMENTS:
        with pytest.raises(pynccl.NcclInvalidUsage) as caught:
            (of_rank_1 if child.rank == 1 else of_the_others)(child)
        messages.append(str(caught.value))
        with pytest.raises(pynccl.NcclInvalidUsage):
            child.all_reduce(x, x, op="min" if child.rank else "max")
        assert x.item() == child.rank  # nothing was launched
        assert child.all_reduce(x).item() == child.size * (child.size - 1) / 2  # the communicator stays usable
    child.destroy()
    return messages


def test_mismatch_is_raised_on_every_rank(ranks: RankPool) -> None:
    for rank, messages in enumerate(ranks.run(3, mismatched_calls)):
        for message, (_, ours, _, theirs) in zip(messages, DISAGREEMENTS, strict=True):
            assert "the ranks disagree (PYNCCL_CHECK=1)" in message
            shown = dict(re.findall(r"rank (\d): (.*) at .*test_consistency\.py:\d+", message))
            assert shown["1"] == ours
            assert theirs in (shown.get("0"), shown.get("2"))
            assert shown[str(rank)] == (ours if rank == 1 else theirs)
            assert "every rank must make the same collective calls in the same order" in message


def matching_calls(comm: Communicator) -> None:
    n = comm.size
    child, other = split_with_check(comm), split_with_check(comm)
    x = torch.full((4,), float(child.rank + 1))
    received = torch.zeros(child.rank + 1)
    with pynccl.group():
        total = child.all_reduce(x)
        maximum = other.all_reduce(x, op="max")
        # Sends and receives differ by rank and are not compared.
        child.send(torch.ones((child.rank + 1) % n + 1), (child.rank + 1) % n)
        child.recv(received, (child.rank - 1) % n)
    assert received.tolist() == [1.0] * (child.rank + 1)
    assert (total[0].item(), maximum[0].item()) == (n * (n + 1) / 2, n)
    assert (child.gather(x, root=1) is None) == (child.rank != 1)
    other.destroy()
    child.destroy()


@each_size
def test_matching_calls_pass(ranks: RankPool, n: int) -> None:
    ranks.run(n, matching_calls)


# During CUDA graph capture

X, Y = (1 << 20, 12, "float32"), (1 << 30, 12, "float32")
CAPTURED = vouched(0xCAFE)  # the stream that is captured


@pytest.mark.usefixtures("unwatched")  # the stream that the driver is asked about is none
def test_blocking_calls_raise_during_graph_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver

    monkeypatch.setenv("PYNCCL_CHECK", "1")
    answers: dict[int, tuple[int, int]] = {CAPTURED: (0, 1)}  # stream -> the driver's (result, capture status)
    monkeypatch.setattr("pynccl.comm.consistency.gpu_count", lambda: 1)
    monkeypatch.setattr(driver, "cuStreamIsCapturing", lambda stream: answers.get(int(stream), (0, 0)))
    stub = Stub()
    comm = stub.comm()
    plan = comm.plan.all_reduce(X, Y, stream=0)
    message = (
        r"^all_reduce\(count=12, FLOAT32, SUM\) with PYNCCL_CHECK=1 cannot run during CUDA graph capture: it .*nothing "
        "was launched. Compare the calls outside the capture"
    )

    for call in (lambda: comm.all_reduce(X, Y, stream=CAPTURED), lambda: plan(CAPTURED)):
        with pytest.raises(pynccl.NcclInvalidUsage, match=message):
            call()
    assert stub.names() == []
    comm.send(X, 0, stream=CAPTURED)  # not compared, so it is allowed
    assert stub.names() == ["ncclSend"]
    stub.clear()
    answers[0] = (906, 0)  # error for the default stream while another stream is captured
    with pytest.raises(pynccl.NcclInvalidUsage, match=r"^barrier\(\) cannot run during .*before the capture or after"):
        comm.barrier()
    with pytest.raises(pynccl.NcclInvalidUsage, match=r"^split\(\) with PYNCCL_CHECK=1 cannot run during CUDA"):
        comm.split(0)
    assert stub.names() == [] and comm._scratch_memory is None
    answers[0] = (0, 1)
    Stub().comm(cpu=True).barrier()  # the host library has no captures
