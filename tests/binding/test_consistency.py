"""PYNCCL_CHECK=1: ranks whose calls disagree all hear of it, with both calls and the lines they were made from."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from libraries import Stub
from processes import overlapping
from ranks import RankPool, each_size

import pynccl
from pynccl import Communicator

Calls = tuple[Callable[[Communicator], Any], Callable[[Communicator], Any]]


def checked(comm: Communicator) -> Communicator:
    """A communicator of the same ranks, made with the check on."""
    os.environ["PYNCCL_CHECK"] = "1"
    own = comm.split(0)
    assert own is not None and own.checking
    return own


F, D = torch.float32, torch.float64

# What rank 1 calls, and what the others call, and both as the message has them.
DISAGREEMENTS: list[tuple[Calls, tuple[str, str]]] = [
    (
        (lambda c: c.all_reduce(torch.ones(4)), lambda c: c.broadcast(torch.ones(4))),
        ("all_reduce(count=4, FLOAT32, SUM)", "broadcast(count=4, FLOAT32, root=0)"),
    ),
    (
        (lambda c: c.all_reduce(torch.ones(4)), lambda c: c.all_reduce(torch.ones(5))),
        ("all_reduce(count=4, FLOAT32, SUM)", "all_reduce(count=5, FLOAT32, SUM)"),
    ),
    (
        (lambda c: c.all_gather(torch.ones(4, dtype=F)), lambda c: c.all_gather(torch.ones(4, dtype=D))),
        ("all_gather(count=4, FLOAT32)", "all_gather(count=4, FLOAT64)"),
    ),
    (
        (lambda c: c.all_reduce(torch.ones(4), op="max"), lambda c: c.all_reduce(torch.ones(4), op="avg")),
        ("all_reduce(count=4, FLOAT32, MAX)", "all_reduce(count=4, FLOAT32, AVG)"),
    ),
    (
        (lambda c: c.reduce(torch.ones(4), root=1), lambda c: c.reduce(torch.ones(4), root=0)),
        ("reduce(count=4, FLOAT32, SUM, root=1)", "reduce(count=4, FLOAT32, SUM, root=0)"),
    ),
]


def disagree(comm: Communicator) -> list[str]:
    own, messages = checked(comm), []
    x = torch.tensor(float(own.rank))
    for (of_rank_1, of_the_others), _ in DISAGREEMENTS:
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
        for message, (_, (ours, theirs)) in zip(messages, DISAGREEMENTS, strict=True):
            assert "the ranks of this communicator disagree (PYNCCL_CHECK=1)" in message
            shown = dict(re.findall(r"rank (\d): (.*) at .*test_consistency\.py:\d+", message))
            assert shown["1"] == ours
            assert theirs in (shown.get("0"), shown.get("2"))
            assert shown[str(rank)] == (ours if rank == 1 else theirs)
            assert "every rank must make the same collective calls in the same order" in message


def disagree_on_two_lines(comm: Communicator) -> str:
    own = checked(comm)
    with own, pytest.raises(pynccl.NcclInvalidUsage) as caught:
        if own.rank == 0:
            own.all_reduce(torch.ones(4))  # the line of rank 0
        else:
            with pynccl.group():
                own.all_gather(torch.ones(4))
                own.broadcast(torch.ones(4))  # inside the group of rank 1
    return str(caught.value)


def test_the_lines_of_both_calls_are_named(ranks: RankPool) -> None:
    lines = Path(__file__).read_text().splitlines()
    first = next(i for i, line in enumerate(lines, 1) if line.endswith("# the line of rank 0"))
    group = range(first + 2, first + 5)  # a group is launched at its end, which Python counts to its first line
    for message in ranks.run(2, disagree_on_two_lines):
        shown = {int(rank): int(line) for rank, line in re.findall(r"rank (\d): .*test_consistency\.py:(\d+)", message)}
        assert shown[0] == first
        assert shown[1] in group
        assert "rank 1: all_gather(count=4, FLOAT32); broadcast(count=4, FLOAT32, root=0) at " in message


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


def are_checking(comm: Communicator) -> list[tuple[bool, bool]]:
    found = []
    for value in (None, "0", "", "1"):
        if value is not None:
            os.environ["PYNCCL_CHECK"] = value
        own = comm.split(0)
        assert own is not None
        with own:
            found.append((comm.checking, own.checking))
    return found


def test_the_check_is_off_unless_asked_for(ranks: RankPool) -> None:
    assert ranks.run(2, are_checking) == [[(False, False)] * 3 + [(False, True)]] * 2


# On the stub, which gathers nothing: the rows of all ranks are empty, and so alike


@pytest.fixture
def check_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYNCCL_CHECK", "1")


@pytest.mark.usefixtures("check_is_on")
def test_a_comparison_that_is_in_progress_is_waited_for_until_the_deadline_or_its_error() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    stub.fail("ncclAllGather", 7)
    stub.progress("ncclGroupEnd", polls=3)
    comm.all_reduce(torch.ones(4))
    comparison = ["ncclGroupStart", "ncclAllGather", "ncclGroupEnd"]
    assert stub.names() == [*comparison, *["ncclCommGetAsyncError"] * 3, "ncclAllReduce"]
    stub.clear()
    comm.timeout = 0.05
    stub.progress("ncclGroupEnd", polls=1 << 30)
    with pytest.raises(pynccl.NcclTimeout, match=r"all_gather of PYNCCL_CHECK is still in progress after 0\.05"):
        comm.barrier()
    comm.timeout = 60
    stub.progress("ncclGroupEnd", polls=1, final=6)
    with pytest.raises(pynccl.NcclRemoteError, match=r"^all_gather of PYNCCL_CHECK failed"):
        comm.barrier()
    assert "ncclAllReduce" not in stub.names()


@pytest.mark.usefixtures("check_is_on")
def test_a_comparison_takes_its_turn_on_the_communicators() -> None:
    stub = Stub()
    one, other = stub.comm(cpu=True), stub.comm(cpu=True)
    x = torch.zeros(4)
    stub.linger("ncclAllGather", 0.001)

    def both(first: Communicator, second: Communicator) -> None:
        with pynccl.group():
            first.all_reduce(x, x)
            second.all_reduce(x, x)

    # No split here: what it makes is made in the thread of the call, where it asks for its rank.
    bodies = [lambda: one.all_reduce(x, x), one.barrier, lambda: both(one, other), lambda: both(other, one)]
    assert overlapping(stub, bodies) == 0


@pytest.mark.parametrize("checking", [False, True])
def test_a_wait_that_an_abort_ends_is_no_meeting_of_the_ranks(monkeypatch: pytest.MonkeyPatch, checking: bool) -> None:
    monkeypatch.setenv("PYNCCL_CHECK", str(int(checking)))
    stub = Stub()
    comm = stub.comm(cpu=True)
    monkeypatch.setattr("pynccl.comm.scratch.Scratch.wait", lambda self: comm.abort())
    with pytest.raises(pynccl.NcclInvalidUsage, match="was aborted; make a new one"):
        comm.barrier()
    assert stub.names()[-1] == "ncclCommAbort" and ("ncclAllReduce" in stub.names()) != checking


# In the capture of a CUDA graph

X, Y = (1 << 20, 12, "float32"), (1 << 30, 12, "float32")
CAPTURED = 0xCAFE  # the stream that is captured


def captures(monkeypatch: pytest.MonkeyPatch, answers: dict[int, tuple[int, int]]) -> None:
    """Let the driver answer so of these streams: (result, capture status)."""
    from cuda.bindings import driver

    monkeypatch.setattr("pynccl.comm.consistency.gpu_count", lambda: 1)
    monkeypatch.setattr(driver, "cuStreamIsCapturing", lambda stream: answers.get(int(stream), (0, 0)))


@pytest.mark.usefixtures("check_is_on")
def test_a_comparison_in_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub()
    comm = stub.comm()
    captures(monkeypatch, {CAPTURED: (0, 1)})
    plan = comm.plan.all_reduce(X, Y, stream=0)
    said = (
        r"^all_reduce\(count=12, FLOAT32, SUM\) with PYNCCL_CHECK=1 in the capture of a CUDA graph: it waits .*nothing "
        "was done. Compare the calls outside the capture"
    )

    def grouped() -> None:
        with pynccl.group():
            comm.send(X, 0, stream=0)
            comm.all_reduce(X, Y, stream=CAPTURED)

    for call in (lambda: comm.all_reduce(X, Y, stream=CAPTURED), lambda: plan(CAPTURED), grouped):
        with pytest.raises(pynccl.NcclInvalidUsage, match=said):
            call()
    assert stub.names() == []
    comm.send(X, 0, stream=CAPTURED)  # which is not compared
    assert stub.names() == ["ncclSend"]


# What the driver answers, and whether torch's current stream is captured: torch's current stream; a stream that blocks
# the default one; the default stream of the thread.
@pytest.mark.parametrize(("answers", "torchs"), [({}, True), ({0: (906, 0)}, False), ({0: (0, 1)}, False)])
def test_a_barrier_and_a_split_in_a_capture_are_refused(
    monkeypatch: pytest.MonkeyPatch, answers: dict[int, tuple[int, int]], torchs: bool
) -> None:
    captures(monkeypatch, answers)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: torchs)
    for checking in (False, True):
        monkeypatch.setenv("PYNCCL_CHECK", str(int(checking)))
        stub = Stub()
        comm = stub.comm()
        with pytest.raises(pynccl.NcclInvalidUsage, match=r"^barrier\(\) in the capture .*before the capture or after"):
            comm.barrier()
        if checking:
            with pytest.raises(pynccl.NcclInvalidUsage, match=r"^split\(\) with PYNCCL_CHECK=1 in the capture"):
                comm.split(0)
        assert stub.names() == [] and comm._scratch is None


def test_what_is_not_captured_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    captures(monkeypatch, {CAPTURED: (201, 1)})  # of a context that is not there
    assert not pynccl.comm.consistency.captured(CAPTURED) and not pynccl.comm.consistency.captured(0)
    comm = Stub().comm(cpu=True)
    captures(monkeypatch, {0: (0, 1)})
    comm.barrier()  # the host library knows no captures
    assert comm._scratch is not None
