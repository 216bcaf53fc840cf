"""PYNCCL_CHECK=1: ranks whose calls disagree all hear of it, with both calls and the lines they were made from."""

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


def checked(comm: Communicator) -> Communicator:
    """A communicator of the same ranks, made with the check on."""
    os.environ["PYNCCL_CHECK"] = "1"
    own = comm.split(0)
    assert own is not None and own.checking
    return own


F = torch.ones(4)
Call = Callable[[Communicator], Any]
# What rank 1 calls and how the message has it; the same of the others.
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


def disagree(comm: Communicator) -> list[str]:
    own, messages = checked(comm), []
    x = torch.tensor(float(own.rank))
    for of_rank_1, _, of_the_others, _ in DISAGREEMENTS:
        with pytest.raises(pynccl.NcclInvalidUsage) as caught:
            (of_rank_1 if own.rank == 1 else of_the_others)(own)
        messages.append(str(caught.value))
        with pytest.raises(pynccl.NcclInvalidUsage):
            own.all_reduce(x, x, op="min" if own.rank else "max")
        assert x.item() == own.rank  # nothing was launched
        assert own.all_reduce(x).item() == own.size * (own.size - 1) / 2  # and the communicator stays usable
    own.destroy()
    return messages


def test_a_disagreement_is_shown_to_every_rank(ranks: RankPool) -> None:
    for rank, messages in enumerate(ranks.run(3, disagree)):
        for message, (_, ours, _, theirs) in zip(messages, DISAGREEMENTS, strict=True):
            assert "the ranks of this communicator disagree (PYNCCL_CHECK=1)" in message
            shown = dict(re.findall(r"rank (\d): (.*) at .*test_consistency\.py:\d+", message))
            assert shown["1"] == ours
            assert theirs in (shown.get("0"), shown.get("2"))
            assert shown[str(rank)] == (ours if rank == 1 else theirs)
            assert "every rank must make the same collective calls in the same order" in message


def agree(comm: Communicator) -> None:
    n = comm.size
    own, other = checked(comm), checked(comm)
    x = torch.full((4,), float(own.rank + 1))
    received = torch.zeros(own.rank + 1)
    with pynccl.group():
        total = own.all_reduce(x)
        most = other.all_reduce(x, op="max")
        # Sends and receives differ from rank to rank, and are not compared.
        own.send(torch.ones((own.rank + 1) % n + 1), (own.rank + 1) % n)
        own.recv(received, (own.rank - 1) % n)
    assert received.tolist() == [1.0] * (own.rank + 1)
    assert (total[0].item(), most[0].item()) == (n * (n + 1) / 2, n)
    assert (own.gather(x, root=1) is None) == (own.rank != 1)
    other.destroy()
    own.destroy()


@each_size
def test_calls_that_agree_are_left_alone(ranks: RankPool, n: int) -> None:
    ranks.run(n, agree)


# In the capture of a CUDA graph

X, Y = (1 << 20, 12, "float32"), (1 << 30, 12, "float32")
CAPTURED = 0xCAFE  # the stream that is captured


def test_what_waits_is_refused_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver

    monkeypatch.setenv("PYNCCL_CHECK", "1")
    answers = {CAPTURED: (0, 1)}  # of the driver: (result, capture status)
    monkeypatch.setattr("pynccl.comm.consistency.gpu_count", lambda: 1)
    monkeypatch.setattr(driver, "cuStreamIsCapturing", lambda stream: answers.get(int(stream), (0, 0)))
    stub = Stub()
    comm = stub.comm()
    plan = comm.plan.all_reduce(X, Y, stream=0)
    said = (
        r"^all_reduce\(count=12, FLOAT32, SUM\) with PYNCCL_CHECK=1 in the capture of a CUDA graph: it waits .*nothing "
        "was done. Compare the calls outside the capture"
    )

    for call in (lambda: comm.all_reduce(X, Y, stream=CAPTURED), lambda: plan(CAPTURED)):
        with pytest.raises(pynccl.NcclInvalidUsage, match=said):
            call()
    assert stub.names() == []
    comm.send(X, 0, stream=CAPTURED)  # which is not compared
    assert stub.names() == ["ncclSend"]
    stub.clear()
    answers[0] = (906, 0)  # of a stream that blocks the default one
    with pytest.raises(pynccl.NcclInvalidUsage, match=r"^barrier\(\) in the capture .*before the capture or after"):
        comm.barrier()
    with pytest.raises(pynccl.NcclInvalidUsage, match=r"^split\(\) with PYNCCL_CHECK=1 in the capture"):
        comm.split(0)
    assert stub.names() == [] and comm._scratch is None
    answers[0] = (0, 1)
    Stub().comm(cpu=True).barrier()  # the host library knows no captures
