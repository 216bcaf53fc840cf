"""ad.trace: one file with the computation and communication of all ranks, on its lanes and at its times."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from ranks import RankPool
from traces import WIDTH, Model, check_nesting, lanes_of, read, slices, steps

import pynccl
import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd import streams


class Traced(NamedTuple):
    """A trace of two steps on n ranks, where the last rank is late at first, and the calls that each rank made."""

    n: int
    trace: dict[str, Any]
    calls: list[list[tuple[str, int]]]


@pytest.fixture(scope="module", params=[2, 3])
def traced(request: pytest.FixtureRequest, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    calls = ranks.run(request.param, steps, str(path), 2, request.param - 1)
    return Traced(request.param, read(path), calls)


def test_every_collective_is_traced_once_per_rank_with_its_bytes(traced: Traced) -> None:
    assert len(traced.calls[0]) > 12
    for rank in range(traced.n):
        found = slices(traced.trace, "comm", rank)
        assert [(event["args"]["operation"], event["args"]["bytes"]) for event in found] == traced.calls[rank]
        found = [event for event in found if event["args"]["dtype"] == "FLOAT32"]
        assert len(traced.calls[rank]) - len(found) == 2  # the ranks compare what x of the two column layers needs
        plain = [event["args"] for event in found if "layer" not in event["args"] and "function" not in event["args"]]
        assert [event["count"] for event in plain] == [5, 5]
        assert all("traces.py" in event["site"] for event in plain)


def test_layers_and_lanes_are_named(traced: Traced) -> None:
    n, trace, _ = traced
    world_lane = "world, ranks " + " ".join(map(str, range(n)))
    for rank in range(n):
        assert list(lanes_of(trace, rank).values()) == ["steps", "cpu", world_lane]
        layers = {event["name"] for event in slices(trace, "user_annotation", rank)}
        assert {"Model", "blocks.0", "blocks.1.norm", "blocks.1.down"} <= layers
        communicated = [event["name"] for event in slices(trace, "comm", rank)]
        assert communicated[1:3] == ["all_gather blocks.0.up", "reduce_scatter blocks.0.down"]
        assert "reduce_scatter blocks.0.up backward" in communicated
        assert "all_gather blocks.1.down backward" in communicated
        by_layer = {event["args"].get("layer", ""): event["args"] for event in slices(trace, "comm", rank)}
        assert by_layer["blocks.0.up"]["phase"] == "backward"  # the last call of this layer
        assert by_layer["blocks.0.up"]["function"] == "AllGatherMatmul.backward"
    named = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert named == {rank: f"rank {rank}" for rank in range(n)}


def test_slices_nest_within_the_steps(traced: Traced) -> None:
    check_nesting(traced.trace)
    for rank in range(traced.n):
        steps = slices(traced.trace, "step", rank)
        assert [event["name"] for event in steps] == ["step 0", "step 1"]
        for event in slices(traced.trace, "comm", rank):
            ends = event["ts"] + event["dur"] - 1e-6
            assert any(step["ts"] <= event["ts"] + 1e-6 and ends <= step["ts"] + step["dur"] for step in steps), event


def test_arrows_connect_a_collective_across_ranks_and_the_last_rank_is_named(traced: Traced) -> None:
    n, trace, calls = traced
    late = n - 1
    flows = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] in "stf" and event["cat"] == "collective":
            flows[event["id"]].append(event)
    assert len(flows) == len(calls[0])
    begins = {(event["pid"], event["tid"], event["ts"]): event for event in slices(trace, "comm")}
    for found in flows.values():
        assert sorted(event["pid"] for event in found) == list(range(n))
        assert [event["ph"] for event in found] == ["s", *"t" * (n - 2), "f"]
        assert [event["ts"] for event in found] == sorted(event["ts"] for event in found)
        joined = [begins[event["pid"], event["tid"], event["ts"]] for event in found]
        assert len({event["name"] for event in joined}) == 1
        assert len({event["args"]["last_rank"] for event in joined}) == 1
        # The clocks agree: a collective ends only after all ranks have begun it.
        assert min(event["ts"] + event["dur"] for event in joined) >= max(event["ts"] for event in joined)
    for rank in range(n):
        first = slices(trace, "comm", rank)[0]["args"]
        assert first["last_rank"] == late
        assert (first["waited_us"] == 0) == (rank == late)
        if rank == late:
            assert first["late_us"] > 50e3
        assert first["busbw_GBps"] <= first["algbw_GBps"]


def start_hidden_and_exposed(comm: Communicator, path: str) -> None:
    x = torch.ones(1000)
    with ad.trace(path, comm) as trace:
        with trace.span("hidden"):
            work = ad.start(ad.all_reduce, x, comm, grad="sum")
            while not streams.side_stream(comm).stream.query():  # type: ignore[attr-defined]
                time.sleep(0.001)
            work.wait()
            comm.barrier()
        with trace.span("exposed"):
            if comm.rank == 1:
                time.sleep(0.2)
            ad.start(ad.all_reduce, x, comm, grad="sum").wait()


def test_hidden_and_exposed_communication_are_distinguished(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, start_hidden_and_exposed, str(tmp_path / "trace.json"))
    trace = read(tmp_path / "trace.json")
    check_nesting(trace)
    hidden, exposed = (event for event in slices(trace, "comm", 0) if event["args"]["operation"] == "all_reduce")
    assert lanes_of(trace, 0)[hidden["tid"]] == "world, ranks 0 1, side stream"
    assert hidden["args"]["exposed_us"] == 0 and hidden["args"]["hidden_us"] == pytest.approx(hidden["dur"])
    assert exposed["dur"] > 100e3 and exposed["args"]["exposed_us"] > 0.5 * exposed["dur"]
    waits = [event for event in slices(trace, "exposed", 0) if event["name"] == "waits for communication"]
    assert max(event["dur"] for event in waits) > 50e3
    assert trace["otherData"]["summary"]["rank 0"]["exposed_ms"] > 50


def call_plans_groups_and_children(comm: Communicator, path: str) -> None:
    peer, x = 1 - comm.rank, torch.ones(8)
    plan = comm.plan.all_reduce(x)
    group = comm.plan.group([comm.plan.all_reduce(torch.ones(4)), comm.plan.broadcast(torch.ones(2))])
    with ad.trace(path, comm):
        plan()
        group()
        with pynccl.group():
            comm.send(x, peer)
            comm.recv(torch.empty(8), peer)
        if comm.rank == 0:
            comm.send(x, 1)
        else:
            comm.recv(x, 0)
        comm.gather_v(torch.ones(comm.rank + 1), torch.empty(3) if comm.rank == 0 else None, counts=[1, 2])
        comm.barrier()
        child = comm.split(0)
        assert child is not None
        child.all_reduce(x)
        child.destroy()


def test_plans_groups_messages_and_child_communicators_are_traced(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, call_plans_groups_and_children, str(tmp_path / "trace.json"))
    trace = read(tmp_path / "trace.json")
    check_nesting(trace)
    rows = [[event["args"] for event in slices(trace, "comm", rank)] for rank in (0, 1)]
    names = [[event["operation"] for event in row] for row in rows]
    common = ["all_reduce", "all_reduce + broadcast", "send + recv"]
    later = ["gather_v", "barrier", "split", "all_reduce", "destroy"]
    assert names == [[*common, "send", *later], [*common, "recv", *later]]
    assert [event["bytes"] for event in rows[0][:4]] == [32, 24, 64, 32]
    assert rows[0][1]["calls"][0].startswith("all_reduce(4 FLOAT32")
    flows = defaultdict(set)
    for event in trace["traceEvents"]:
        if event["ph"] in "stf" and event["cat"] == "collective":
            flows[event["name"]].add(event["pid"])
    messages = [pids for name, pids in flows.items() if ">" in name]
    assert len(messages) == 4 and all(
        pids == {0, 1} for pids in messages
    )  # one pair at once, one more, one of gather_v
    assert any("split" in name for name in lanes_of(trace, 0).values())


def train_on_mesh(comm: Communicator, path: str) -> None:
    with ad.Mesh(comm, {"dp": 2, "tp": 2}) as mesh:
        torch.manual_seed(0)
        model = Model(mesh["tp"], recompute=True)
        data_parallel = ad.DataParallelGradients(model, mesh["dp"])
        with ad.trace(path, comm, model=model):
            model(torch.ones(6, 2, WIDTH)).backward()
        del data_parallel


def test_mesh_communicators_have_lanes_and_recomputed_layers_are_marked(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(4, train_on_mesh, str(tmp_path / "trace.json"))
    trace = read(tmp_path / "trace.json")
    check_nesting(trace)
    for rank, (tp, dp) in enumerate((("0 1", "0 2"), ("0 1", "1 3"), ("2 3", "0 2"), ("2 3", "1 3"))):
        found = lanes_of(trace, rank)
        assert {f"tp, ranks {tp}", f"dp, ranks {dp}"} <= {name.partition(", side")[0] for name in found.values()}
        recomputed = [event for event in slices(trace, "comm", rank) if event["args"].get("phase") == "recompute"]
        assert {event["args"]["layer"] for event in recomputed} <= {"blocks.1.up", "blocks.1.down"} and recomputed
        assert not any("not ended" in event["name"] for event in slices(trace, "", rank))
        averaged = [event for event in slices(trace, "comm", rank) if found[event["tid"]].startswith("dp")]
        assert averaged and all(event["args"]["phase"] == "backward" for event in averaged[:1])
