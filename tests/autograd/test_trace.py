"""ad.trace: all that ranks compute and communicate is in one file, where and when it was."""

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
    """Two steps of a model on n ranks, the last of which comes late to the first; what each asked of the
    communicator."""

    n: int
    trace: dict[str, Any]
    asked: list[list[tuple[str, int]]]


@pytest.fixture(scope="module", params=[2, 3])
def traced(request: pytest.FixtureRequest, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Traced:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    asked = ranks.run(request.param, steps, str(path), 2, request.param - 1)
    return Traced(request.param, read(path), asked)


def test_every_collective_is_there_once_on_each_rank_with_its_bytes(traced: Traced) -> None:
    assert len(traced.asked[0]) > 12
    for rank in range(traced.n):
        found = slices(traced.trace, "comm", rank)
        assert [(one["args"]["operation"], one["args"]["bytes"]) for one in found] == traced.asked[rank]
        assert all(one["args"]["dtype"] == "FLOAT32" for one in found)
        plain = [one["args"] for one in found if "layer" not in one["args"] and "function" not in one["args"]]
        assert [one["count"] for one in plain] == [5, 5]
        assert all("traces.py" in one["site"] for one in plain)


def test_layers_and_lanes_are_named(traced: Traced) -> None:
    n, trace, _ = traced
    everybody = "world, ranks " + " ".join(map(str, range(n)))
    for rank in range(n):
        assert list(lanes_of(trace, rank).values()) == ["steps", "cpu", everybody]
        layers = {one["name"] for one in slices(trace, "user_annotation", rank)}
        assert {"Model", "blocks.0", "blocks.1.norm", "blocks.1.down"} <= layers
        communicated = [one["name"] for one in slices(trace, "comm", rank)]
        assert communicated[:2] == ["all_gather blocks.0.up", "reduce_scatter blocks.0.down"]
        assert "reduce_scatter blocks.0.up backward" in communicated
        assert "all_gather blocks.1.down backward" in communicated
        by_layer = {one["args"].get("layer", ""): one["args"] for one in slices(trace, "comm", rank)}
        assert by_layer["blocks.0.up"]["phase"] == "backward"  # the last one of it
        assert by_layer["blocks.0.up"]["function"] == "AllGather.backward"
    named = {one["pid"]: one["args"]["name"] for one in trace["traceEvents"] if one["name"] == "process_name"}
    assert named == {rank: f"rank {rank}" for rank in range(n)}


def test_slices_nest_within_the_steps(traced: Traced) -> None:
    check_nesting(traced.trace)
    for rank in range(traced.n):
        steps = slices(traced.trace, "step", rank)
        assert [one["name"] for one in steps] == ["step 0", "step 1"]
        for one in slices(traced.trace, "comm", rank):
            ends = one["ts"] + one["dur"] - 1e-6
            assert any(step["ts"] <= one["ts"] + 1e-6 and ends <= step["ts"] + step["dur"] for step in steps), one


def test_arrows_join_a_collective_on_all_ranks_and_the_last_is_named(traced: Traced) -> None:
    n, trace, asked = traced
    late = n - 1
    flows = defaultdict(list)
    for one in trace["traceEvents"]:
        if one["ph"] in "stf" and one["cat"] == "collective":
            flows[one["id"]].append(one)
    assert len(flows) == len(asked[0])
    begins = {(one["pid"], one["tid"], one["ts"]): one for one in slices(trace, "comm")}
    for found in flows.values():
        assert sorted(one["pid"] for one in found) == list(range(n))
        assert [one["ph"] for one in found] == ["s", *"t" * (n - 2), "f"]
        assert [one["ts"] for one in found] == sorted(one["ts"] for one in found)
        joined = [begins[one["pid"], one["tid"], one["ts"]] for one in found]
        assert len({one["name"] for one in joined}) == 1
        assert len({one["args"]["last_rank"] for one in joined}) == 1
        # The clocks agree: a collective ends nowhere before it has begun everywhere.
        assert min(one["ts"] + one["dur"] for one in joined) >= max(one["ts"] for one in joined)
    for rank in range(n):
        first = slices(trace, "comm", rank)[0]["args"]
        assert first["last_rank"] == late
        assert (first["waited_us"] == 0) == (rank == late)
        if rank == late:
            assert first["late_us"] > 50e3
        assert first["busbw_GBps"] <= first["algbw_GBps"]


def started(comm: Communicator, path: str) -> None:
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


def test_what_work_hides_is_told_from_what_is_exposed(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, started, str(tmp_path / "trace.json"))
    trace = read(tmp_path / "trace.json")
    check_nesting(trace)
    hidden, exposed = (one for one in slices(trace, "comm", 0) if one["args"]["operation"] == "all_reduce")
    assert lanes_of(trace, 0)[hidden["tid"]] == "world, ranks 0 1, side stream"
    assert hidden["args"]["exposed_us"] == 0 and hidden["args"]["hidden_us"] == pytest.approx(hidden["dur"])
    assert exposed["dur"] > 100e3 and exposed["args"]["exposed_us"] > 0.5 * exposed["dur"]
    waits = [one for one in slices(trace, "exposed", 0) if one["name"] == "waits for communication"]
    assert max(one["dur"] for one in waits) > 50e3
    assert trace["otherData"]["summary"]["rank 0"]["exposed_ms"] > 50


def several(comm: Communicator, path: str) -> None:
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


def test_plans_groups_messages_and_children_are_in_it(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, several, str(tmp_path / "trace.json"))
    trace = read(tmp_path / "trace.json")
    check_nesting(trace)
    rows = [[one["args"] for one in slices(trace, "comm", rank)] for rank in (0, 1)]
    names = [[one["operation"] for one in row] for row in rows]
    common = ["all_reduce", "all_reduce + broadcast", "send + recv"]
    later = ["gather_v", "barrier", "split", "all_reduce", "destroy"]
    assert names == [[*common, "send", *later], [*common, "recv", *later]]
    assert [one["bytes"] for one in rows[0][:4]] == [32, 24, 64, 32]
    assert rows[0][1]["calls"][0].startswith("all_reduce(4 FLOAT32")
    flows = defaultdict(set)
    for one in trace["traceEvents"]:
        if one["ph"] in "stf" and one["cat"] == "collective":
            flows[one["name"]].add(one["pid"])
    messages = [pids for name, pids in flows.items() if ">" in name]
    assert len(messages) == 4 and all(pids == {0, 1} for pids in messages)  # two each way at once, one more, gather_v's
    assert any("split" in name for name in lanes_of(trace, 0).values())


def meshed(comm: Communicator, path: str) -> None:
    with ad.Mesh(comm, {"dp": 2, "tp": 2}) as mesh:
        torch.manual_seed(0)
        model = Model(mesh["tp"], recompute=True)
        data_parallel = ad.DataParallelGradients(model, mesh["dp"])
        with ad.trace(path, comm, model=model):
            model(torch.ones(6, 2, WIDTH)).backward()
        del data_parallel


def test_communicators_of_a_mesh_have_lanes_and_recomputed_layers_are_told(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(4, meshed, str(tmp_path / "trace.json"))
    trace = read(tmp_path / "trace.json")
    check_nesting(trace)
    for rank, (tp, dp) in enumerate((("0 1", "0 2"), ("0 1", "1 3"), ("2 3", "0 2"), ("2 3", "1 3"))):
        found = lanes_of(trace, rank)
        assert {f"tp, ranks {tp}", f"dp, ranks {dp}"} <= {name.partition(", side")[0] for name in found.values()}
        recomputed = [one for one in slices(trace, "comm", rank) if one["args"].get("phase") == "recompute"]
        assert {one["args"]["layer"] for one in recomputed} <= {"blocks.1.up", "blocks.1.down"} and recomputed
        assert not any("has not ended" in one["name"] for one in slices(trace, "", rank))
        averaged = [one for one in slices(trace, "comm", rank) if found[one["tid"]].startswith("dp")]
        assert averaged and all(one["args"]["phase"] == "backward" for one in averaged[:1])
