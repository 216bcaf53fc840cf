"""A plan gives the result of its call at every launch and keeps its buffers alive."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from libraries import Stub
from ranks import RankPool
from reference import expect, inputs, reduced

import pynccl
from pynccl import Communicator

X, Y = (1 << 20, 12, "float32"), (1 << 30, 12, "float32")


def check_each_operation(comm: Communicator) -> None:
    n, rank = comm.size, comm.rank
    xs = inputs(torch.float32, "sum", 6 * n, n)
    block = slice(6 * rank, 6 * rank + 6)
    total = reduced(xs, "sum")
    swapped = torch.cat([x[block] for x in xs])
    gathered = torch.cat(xs)
    wanted: dict[str, tuple[torch.Tensor | None, dict[str, Any]]] = {
        "all_reduce": (total, {"op": "sum"}),
        "broadcast": (xs[n - 1], {"root": n - 1}),
        "all_gather": (gathered, {}),
        "reduce_scatter": (total[block], {}),
        "all_to_all": (swapped, {}),
        "scatter": (xs[0][block], {"root": 0}),
        "gather": (gathered if rank == 1 else None, {"root": 1}),
        "reduce": (total if rank == 0 else None, {"root": 0}),
        "all_to_all_v": (swapped, {"send_counts": [6] * n, "recv_counts": [6] * n}),
        "all_gather_v": (gathered, {"counts": [6 * n] * n}),
        "reduce_scatter_v": (total[block], {"counts": [6] * n}),
    }
    for name, (result, options) in wanted.items():
        send, recv = xs[rank].clone(), None if result is None else torch.zeros_like(result)
        plan = getattr(comm.plan, name)(send, recv, **options)
        for turn in range(3):
            send.copy_(xs[rank] if turn % 2 == 0 else torch.zeros_like(send))  # a launch reads the current contents
            plan()
            if recv is not None and result is not None:
                expect(recv, result if turn % 2 == 0 else torch.zeros_like(result), f"{name}, launch {turn}")
    received = torch.zeros(6 * n)
    exchange = comm.plan.group([comm.plan.send(xs[rank], (rank + 1) % n), comm.plan.recv(received, (rank - 1) % n)])
    for _ in range(2):
        received.zero_()
        exchange()
        expect(received, xs[(rank - 1) % n], "recv")
    filled = comm.plan.all_reduce(xs[rank])
    filled()
    expect(filled.recv, total, "recv allocated by the plan")


def check_another_stream(comm: Communicator) -> None:
    n = comm.size
    x = torch.tensor([float(comm.rank + 1)])
    plan, stream, total = comm.plan.all_reduce(x, x), pynccl.create_stream(), n * (n + 1) / 2
    for launch, result in ((plan, total), (comm.plan.group([plan, plan]), total * n * n)):
        launch(stream)
        stream.synchronize()
        assert x.item() == result


def test_plan_matches_direct_call(ranks: RankPool) -> None:
    ranks.run(3, check_each_operation)
    ranks.run(3, check_another_stream)


def test_plan_launch_is_one_c_call() -> None:
    stub = Stub()
    plan = stub.comm().plan.all_reduce(X, Y, "max", stream=11)
    assert stub.names() == []
    plan()
    plan(22)
    plan()
    assert [call.args["stream"] for call in stub.calls() if call.name == "ncclAllReduce"] == [11, 22, 11]
    first, _, last = stub.calls()
    assert first == last
    assert first.args == {"send": X[0], "recv": Y[0], "count": 12, "dtype": 7, "op": 2, "comm": 1, "stream": 11}


def test_plans_inside_groups() -> None:
    stub = Stub()
    comm = stub.comm()
    reduce, send = comm.plan.all_reduce(X, Y, stream=0), comm.plan.send(X, 3, stream=0)
    step = comm.plan.group([reduce, comm.plan.recv(Y, 0, stream=0)])
    for _ in range(2):
        stub.clear()
        comm.plan.group([step, send])()
        assert stub.names() == ["ncclGroupStart", "ncclAllReduce", "ncclRecv", "ncclSend", "ncclGroupEnd"]
    stub.clear()
    with pynccl.group():
        plan = comm.plan.send(X, 2, stream=0)
        comm.recv(Y, 2, stream=0)
        plan()
        comm.plan.group([plan])(5)
        assert stub.names() == []
    assert stub.names() == ["ncclGroupStart", "ncclRecv", "ncclSend", "ncclSend", "ncclGroupEnd"]
    assert stub.calls()[3].args["stream"] == 5


def test_plan_of_ended_communicator_raises() -> None:
    stub = Stub()
    comm = stub.comm()
    plan = comm.plan.all_reduce(X, Y, stream=0)
    step = comm.plan.group([plan, plan])
    comm.abort()
    stub.clear()
    for launch in (plan, step, lambda: plan(5), lambda: step(5)):
        with pytest.raises(pynccl.NcclInvalidUsage, match="was aborted; make a new one"):
            launch()
    assert stub.names() == []
