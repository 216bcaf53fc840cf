"""A plan gives what its call gives, as often as it is launched, and holds what it needs."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from libraries import Stub
from ranks import HOST, RankPool, each_size
from reference import expect, inputs, reduced

import pynccl
from pynccl import Communicator

X, Y = (1 << 20, 12, "float32"), (1 << 30, 12, "float32")


def each_operation(comm: Communicator) -> None:
    n, rank = comm.size, comm.rank
    given = inputs(torch.float32, "sum", 6 * n, n)
    block = slice(6 * rank, 6 * rank + 6)
    total = reduced(given, "sum")
    swapped = torch.cat([x[block] for x in given])
    gathered = torch.cat(given)
    wanted: dict[str, tuple[torch.Tensor, dict[str, Any]]] = {
        "all_reduce": (total, {"op": "sum"}),
        "broadcast": (given[n - 1], {"root": n - 1}),
        "all_gather": (gathered, {}),
        "reduce_scatter": (total[block], {}),
        "all_to_all": (swapped, {}),
        "scatter": (given[0][block], {"root": 0}),
        "all_to_all_v": (swapped, {"send_counts": [6] * n, "recv_counts": [6] * n}),
        "all_gather_v": (gathered, {"counts": [6 * n] * n}),
        "reduce_scatter_v": (total[block], {"counts": [6] * n}),
    }
    for name, (result, options) in wanted.items():
        send, recv = given[rank].clone(), torch.zeros_like(result)
        plan = getattr(comm.plan, name)(send, recv, **options)
        for turn in range(3):
            send.copy_(given[rank] if turn % 2 == 0 else torch.zeros_like(send))  # a plan reads what is there
            plan()
            expect(recv, result if turn % 2 == 0 else torch.zeros_like(result), f"{name}, launch {turn}")


@each_size
def test_a_plan_gives_what_the_call_gives_every_time(ranks: RankPool, n: int) -> None:
    assert ranks.run(n, each_operation) == [None] * n


def rooted_and_peers(comm: Communicator) -> None:
    n, rank = comm.size, comm.rank
    given = inputs(torch.int32, "sum", 4, n)
    at_root = torch.zeros(4 * n if rank == 1 else 0, dtype=torch.int32)
    comm.plan.gather(given[rank], at_root if rank == 1 else None, root=1)()
    total = torch.zeros(4, dtype=torch.int32)
    comm.plan.reduce(given[rank], total if rank == 0 else None, root=0)()
    received = torch.zeros(4, dtype=torch.int32)
    exchange = comm.plan.group([comm.plan.send(given[rank], (rank + 1) % n), comm.plan.recv(received, (rank - 1) % n)])
    for _ in range(2):
        received.zero_()
        exchange()
        expect(received, given[(rank - 1) % n], "recv")
    if rank == 1:
        expect(at_root, torch.cat(given), "gather")
    if rank == 0:
        expect(total, reduced(given, "sum"), "reduce")


@each_size
def test_plans_with_a_root_or_a_peer(ranks: RankPool, n: int) -> None:
    assert ranks.run(n, rooted_and_peers) == [None] * n


def on_another_stream(comm: Communicator) -> list[float]:
    x = torch.tensor([float(comm.rank + 1)])
    plan = comm.plan.all_reduce(x, x)
    stream = pynccl.create_stream()
    plan(stream)
    stream.synchronize()
    first = x.item()
    step = comm.plan.group([plan, plan])
    step(stream)
    stream.synchronize()
    return [first, x.item()]


@each_size
def test_a_plan_runs_on_the_stream_that_it_is_given(ranks: RankPool, n: int) -> None:
    total = n * (n + 1) / 2
    assert ranks.run(n, on_another_stream) == [[total, total * n * n]] * n


def test_a_plan_keeps_its_stream_and_another_can_be_passed() -> None:
    stub = Stub()
    plan = stub.comm().plan.all_reduce(X, Y, "max", stream=11)
    plan()
    plan(22)
    plan()
    assert [call.args["stream"] for call in stub.calls() if call.name == "ncclAllReduce"] == [11, 22, 11]
    first, last = stub.calls()[0], stub.calls()[-1]
    assert first == last
    assert first.args == {"send": X[0], "recv": Y[0], "count": 12, "dtype": 7, "op": 2, "comm": 1, "stream": 11}


def test_making_a_plan_launches_nothing_and_a_launch_is_one_c_call() -> None:
    stub = Stub()
    plan = stub.comm().plan.reduce_scatter(X, (1 << 30, 3, "float32"), stream=0)
    assert stub.names() == []
    plan()
    assert stub.names() == ["ncclReduceScatter"]
    for _ in range(100):
        plan()
    assert stub.names() == ["ncclReduceScatter"] * 101


def test_a_plan_in_a_group_is_recorded_like_a_call() -> None:
    stub = Stub()
    comm = stub.comm()
    plan = comm.plan.send(X, 2, stream=0)
    with pynccl.group():
        comm.recv(Y, 2, stream=0)
        plan()
        comm.plan.group([plan])(5)
        assert stub.names() == []
    assert stub.names() == ["ncclGroupStart", "ncclRecv", "ncclSend", "ncclSend", "ncclGroupEnd"]
    assert stub.calls()[3].args["stream"] == 5
    stub.clear()
    with pytest.raises(KeyError), pynccl.group():
        plan()
        raise KeyError
    assert stub.names() == []


def test_a_plan_can_be_made_in_an_open_group_without_joining_it() -> None:
    stub = Stub()
    comm = stub.comm()
    with pynccl.group():
        plan = comm.plan.all_reduce(X, Y, stream=0)
        comm.send(X, 0, stream=0)
    assert stub.names() == ["ncclGroupStart", "ncclSend", "ncclGroupEnd"]
    stub.clear()
    plan()
    assert stub.names() == ["ncclAllReduce"]


def test_a_group_plan_is_one_group() -> None:
    stub = Stub()
    comm = stub.comm()
    plans = [comm.plan.all_reduce(X, Y, stream=0), comm.plan.send(X, 3, stream=0), comm.plan.recv(Y, 0, stream=0)]
    step = comm.plan.group(plans)
    for _ in range(2):
        stub.clear()
        step()
        assert stub.names() == ["ncclGroupStart", "ncclAllReduce", "ncclSend", "ncclRecv", "ncclGroupEnd"]
    stub.clear()
    comm.plan.group([step, plans[1]])()
    assert stub.names()[1:-1] == ["ncclAllReduce", "ncclSend", "ncclRecv", "ncclSend"]


@pytest.mark.parametrize("n", [2, 4])
def test_a_group_plan_spans_the_communicators_of_one_process(n: int) -> None:
    comms = Communicator.init_all(n)
    xs = [torch.zeros(3) for _ in comms]
    step = comms[0].plan.group([comm.plan.all_reduce(x, x) for comm, x in zip(comms, xs, strict=True)])
    for _ in range(3):
        for comm, x in zip(comms, xs, strict=True):
            x.fill_(comm.rank + 1)
        step()
        assert [x.tolist() for x in xs] == [[n * (n + 1) / 2] * 3] * n
    comms[0].destroy()
    with pytest.raises(pynccl.NcclInvalidUsage, match=rf"rank 0 of {n} on cpu\) was destroyed"):
        step()
    for comm in comms:
        comm.destroy()


def test_a_plan_of_a_communicator_that_has_ended_is_refused() -> None:
    for end, word in ((Communicator.destroy, "destroyed"), (Communicator.abort, "aborted")):
        stub = Stub()
        comm = stub.comm()
        plan = comm.plan.all_reduce(X, Y, stream=0)
        step = comm.plan.group([plan, plan])
        end(comm)
        stub.clear()
        for launch in (plan, step, lambda p=plan: p(5), lambda p=step: p(5)):
            with pytest.raises(pynccl.NcclInvalidUsage, match=f"was {word}; make a new one"):
                launch()
        assert stub.names() == []


def test_a_plan_that_fails_names_its_call() -> None:
    stub = Stub()
    plan = stub.comm().plan.reduce(X, Y, "min", root=1, stream=0)
    stub.fail("ncclReduce", 5)
    with pytest.raises(pynccl.NcclInvalidUsage, match=r"^reduce\(count=12, FLOAT32, MIN, root=1\) failed") as caught:
        plan()
    assert "what the stub has to say" in str(caught.value)


def test_a_group_plan_that_fails_is_closed_all_the_same() -> None:
    stub = Stub()
    comm = stub.comm()
    step = comm.plan.group(
        [comm.plan.send(X, 0, stream=0), comm.plan.recv(Y, 0, stream=0), comm.plan.send(X, 2, stream=0)]
    )
    stub.fail("ncclRecv", 5)
    with pytest.raises(pynccl.NcclInvalidUsage, match=r"^recv\(count=12, FLOAT32, peer=0\) failed"):
        step()
    assert stub.names() == ["ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd"]
    stub.clear()
    stub.fail("ncclGroupEnd", 5)
    with pytest.raises(pynccl.NcclInvalidUsage, match=r"group of 3 calls: send\(count=12, FLOAT32, peer=0\), recv"):
        step()
    assert stub.names() == ["ncclGroupStart", "ncclSend", "ncclRecv", "ncclSend", "ncclGroupEnd"]
    stub.fail("", 0)
    step()  # and is none the worse


def test_an_all_to_all_plan_of_an_old_library_is_sends_and_receives() -> None:
    stub = Stub((2, 21, 5))
    plan = stub.comm(nranks=3, rank=1).plan.all_to_all(X, Y, stream=9)
    for _ in range(2):
        stub.clear()
        plan()
        names = ["ncclSend", "ncclRecv"] * 3
        assert stub.names() == ["ncclGroupStart", *names, "ncclGroupEnd"]
        assert [call.args["buffer"] for call in stub.calls()[1:-1]] == [
            start + 16 * peer for peer in range(3) for start in (X[0], Y[0])
        ]


def test_a_plan_holds_its_buffers_and_gives_them_up_with_itself() -> None:
    comm = Stub().comm(cpu=True)
    x, y = torch.zeros(4), torch.zeros(4)
    alive = [weakref.ref(x), weakref.ref(y)]
    plan = comm.plan.all_reduce(x, y)
    step = comm.plan.group([plan])
    del x, y, plan
    gc.collect()
    assert all(ref() is not None for ref in alive)
    del step
    gc.collect()
    assert all(ref() is None for ref in alive)


def test_arguments_are_checked_when_the_plan_is_made() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    with pytest.raises(ValueError, match=r"reduce_scatter: send has 6 elements, not divisible by 4 ranks"):
        comm.plan.reduce_scatter(torch.zeros(6))
    with pytest.raises(ValueError, match="unknown operator 'mean'"):
        comm.plan.all_reduce(torch.zeros(4), torch.zeros(4), "mean")
    with pytest.raises(TypeError, match="no buffer"):
        comm.plan.all_reduce([1.0])
    with pytest.raises(TypeError, match="is no stream"):
        comm.plan.all_reduce(torch.zeros(4), torch.zeros(4))("stream")
    assert stub.names() == []
    comm.all_reduce(torch.zeros(4))  # no group was left open
    assert stub.names() == ["ncclAllReduce"]


def test_only_operations_can_be_planned() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    for name in ("all_redcue", "rank", "_enqueue", "destroy", "abort", "split", "barrier", "check_alive"):
        with pytest.raises(AttributeError, match=f"'{name}' is no operation of a communicator that can be prepared"):
            getattr(comm.plan, name)
    assert comm.alive and stub.names() == []


def test_a_group_plan_is_made_of_plans() -> None:
    comm = Stub().comm(cpu=True)
    with pytest.raises(ValueError, match=r"plan\.group: no plans were passed; expected at least one"):
        comm.plan.group([])
    with pytest.raises(TypeError, match=r"plan\.group: .* is no plan; pass what comm\.plan\.all_reduce"):
        comm.plan.group([comm.all_reduce])


def disagree(comm: Communicator) -> list[str]:
    """Every rank checks; the last one plans another count."""
    x = torch.zeros(4 + (comm.rank == comm.size - 1))
    good = comm.plan.all_reduce(torch.ones(2), torch.zeros(2))
    good()
    comm.plan.group([good, good])()
    plan = comm.plan.all_reduce(x, x)
    found = []
    for launch in (plan, comm.plan.group([good, plan])):
        with pytest.raises(pynccl.NcclInvalidUsage, match="the ranks of this communicator disagree") as caught:
            launch()
        found.append(str(caught.value))
    return found


def test_plans_are_compared_across_ranks_when_asked_for() -> None:
    pool = RankPool({**HOST, "PYNCCL_CHECK": "1"})
    try:
        for single, grouped in pool.run(2, disagree):
            assert "all_reduce(count=4, FLOAT32, SUM)" in single and "all_reduce(count=5, FLOAT32, SUM)" in single
            assert "all_reduce(count=2, FLOAT32, SUM); all_reduce(count=5" in grouped
            assert "test_plan.py:" in single
    finally:
        pool.close()


def filled_by_the_plan(comm: Communicator) -> list[float]:
    plan = comm.plan.all_reduce(torch.full((2,), float(comm.rank + 1)))
    plan()
    return plan.recv.tolist()


def test_a_plan_that_allocates_says_where(ranks: RankPool) -> None:
    assert ranks.run(2, filled_by_the_plan) == [[3.0, 3.0]] * 2
