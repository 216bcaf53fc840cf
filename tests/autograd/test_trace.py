"""ad.trace: all that ranks compute and communicate is in one file, where and when it was, and nothing hangs for it."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import TORCHRUN, RankPool, each_size
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pynccl
import pynccl_autograd as ad
from pynccl import Communicator
from pynccl.comm import groups, observing
from pynccl_autograd import streams, torch_internals
from pynccl_autograd.overlap import OverlapConfig, lanes
from pynccl_autograd.tracing import marks, meeting, tracing

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from train_trace import trace_problem  # noqa: E402

Event = dict[str, Any]
WIDTH, HIDDEN, ROWS = 12, 24, 12
METHODS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send", "recv")


class Block(nn.Module):
    def __init__(self, comm: Communicator, overlap: Any = "off") -> None:
        super().__init__()
        options: dict[str, Any] = {"sequence_parallel": True, "overlap": overlap, "device": comm.device}
        self.norm = nn.LayerNorm(WIDTH)
        self.up = ad.ColumnParallelLinear(WIDTH, HIDDEN, comm, **options)
        self.down = ad.RowParallelLinear(HIDDEN, WIDTH, comm, **options)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


class Model(nn.Module):
    def __init__(self, comm: Communicator, overlap: Any = "off", recompute: bool = False) -> None:
        super().__init__()
        self.comm, self.recompute = comm, recompute
        self.blocks = nn.ModuleList([Block(comm, overlap), Block(comm, overlap)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x = checkpoint(self.blocks[1], x, use_reentrant=False) if self.recompute else self.blocks[1](x)
        return ad.all_reduce(x.pow(2).sum(), self.comm, grad="sum")


def read(path: Path | str) -> dict[str, Any]:
    path = Path(path)
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    found: dict[str, Any] = json.loads(text)
    return found


def slices(trace: dict[str, Any], category: str = "", pid: int | None = None) -> list[Event]:
    found = [one for one in trace["traceEvents"] if one["ph"] == "X" and (pid is None or one["pid"] == pid)]
    return [one for one in found if one["cat"] == category] if category else found


def lanes_of(trace: dict[str, Any], pid: int) -> dict[int, str]:
    names = [one for one in trace["traceEvents"] if one["name"] == "thread_name" and one["pid"] == pid]
    return {one["tid"]: one["args"]["name"] for one in names}


def heard(comm: Communicator) -> list[tuple[str, int]]:
    """What is asked of the communicator from now on, (operation, bytes): by its methods, which are replaced."""
    calls: list[tuple[str, int]] = []

    def listening(name: str) -> Any:
        method = getattr(comm, name)

        def call(send: Any, *args: Any, **options: Any) -> Any:
            blocks = comm.size if name in ("all_gather", "all_to_all") else 1
            calls.append((name, send.nbytes * blocks))
            return method(send, *args, **options)

        return call

    for name in METHODS:
        setattr(comm, name, listening(name))
    return calls


def unheard(comm: Communicator) -> None:
    for name in METHODS:
        delattr(comm, name)


def steps(comm: Communicator, path: str, count: int, late: int = -1) -> list[tuple[str, int]]:
    """Some steps of a model; the rank `late` comes late to the first. Returns what was asked of the communicator."""
    torch.manual_seed(0)
    model, x = Model(comm), torch.randn(ROWS // comm.size, 2, WIDTH)
    with ad.trace(path, comm, model=model) as trace:
        calls = heard(comm)
        try:
            for number in range(count):
                with trace.span(f"step {number}"):
                    if comm.rank == late and number == 0:
                        time.sleep(0.2)
                    model(x).backward()
                    x = x + comm.all_reduce(torch.ones(5)).sum()
        finally:
            unheard(comm)
    return calls


@each_size
def test_every_collective_is_there_once_on_each_rank_with_its_bytes(ranks: RankPool, n: int, tmp_path: Path) -> None:
    asked = ranks.run(n, steps, str(tmp_path / "trace.json"), 2)
    trace = read(tmp_path / "trace.json")
    assert len(asked[0]) > 12
    for rank in range(n):
        found = slices(trace, "comm", rank)
        assert [(one["args"]["operation"], one["args"]["bytes"]) for one in found] == asked[rank]
        assert all(one["args"]["dtype"] == "FLOAT32" for one in found)
        plain = [one["args"] for one in found if "layer" not in one["args"] and "function" not in one["args"]]
        assert [one["count"] for one in plain] == [5, 5]
        assert all("test_trace.py" in one["site"] for one in plain)


@each_size
def test_layers_and_lanes_are_named(ranks: RankPool, n: int, tmp_path: Path) -> None:
    ranks.run(n, steps, str(tmp_path / "trace.json"), 1)
    trace = read(tmp_path / "trace.json")
    everybody = "world, ranks " + " ".join(map(str, range(n)))
    for rank in range(n):
        assert list(lanes_of(trace, rank).values()) == ["steps", "compute", everybody]
        computed = {one["name"] for one in slices(trace, "compute", rank)}
        assert {"Model", "blocks.0", "blocks.1.norm", "blocks.1.down", "backward"} <= computed
        assert {"blocks.1.down backward", "blocks.0.up backward", "blocks.0.norm backward"} <= computed
        communicated = [one["name"] for one in slices(trace, "comm", rank)]
        assert communicated[:2] == ["all_gather blocks.0.up", "reduce_scatter blocks.0.down"]
        assert "reduce_scatter blocks.0.up backward" in communicated
        assert "all_gather blocks.1.down backward" in communicated
        by_layer = {one["args"].get("layer", ""): one["args"] for one in slices(trace, "comm", rank)}
        assert by_layer["blocks.0.up"]["phase"] == "backward"  # the last one of it
        assert by_layer["blocks.0.up"]["function"] == "AllGather.backward"
    named = {one["pid"]: one["args"]["name"] for one in trace["traceEvents"] if one["name"] == "process_name"}
    assert named == {rank: f"rank {rank}" for rank in range(n)}


def check_nesting(trace: dict[str, Any]) -> None:
    """Slices of a lane lie within each other or apart; those of communicators apart."""
    by_lane = defaultdict(list)
    for one in slices(trace):
        by_lane[one["pid"], one["tid"]].append(one)
    for found in by_lane.values():
        open_until: list[float] = []
        for one in sorted(found, key=lambda one: (one["ts"], -one["dur"])):
            begin, end = one["ts"], one["ts"] + one["dur"]
            while open_until and open_until[-1] <= begin + 1e-6:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-6, one
            assert not open_until or one["cat"] != "comm", one
            open_until.append(end)


@each_size
def test_slices_nest_within_the_steps(ranks: RankPool, n: int, tmp_path: Path) -> None:
    ranks.run(n, steps, str(tmp_path / "trace.json"), 2)
    trace = read(tmp_path / "trace.json")
    check_nesting(trace)
    for rank in range(n):
        found = slices(trace, "step", rank)
        assert [one["name"] for one in found] == ["step 0", "step 1"]
        for one in slices(trace, "", rank):
            begin, end = one["ts"], one["ts"] + one["dur"]
            assert any(step["ts"] <= begin and end <= step["ts"] + step["dur"] + 1e-6 for step in found), one


@each_size
def test_arrows_join_a_collective_on_all_ranks_and_the_last_is_named(ranks: RankPool, n: int, tmp_path: Path) -> None:
    late = n - 1
    asked = ranks.run(n, steps, str(tmp_path / "trace.json"), 2, late)
    trace = read(tmp_path / "trace.json")
    flows = defaultdict(list)
    for one in trace["traceEvents"]:
        if one["ph"] in "stf":
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
        if rank == late:
            assert first["late_us"] > 50e3 and first["waited_us"] == 0
        else:
            assert first["late_us"] < 200e3 and first["waited_us"] > 0
        assert first["busbw_GBps"] <= first["algbw_GBps"]


def test_the_file_is_what_perfetto_reads(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, steps, str(tmp_path / "trace.json"), 1)
    trace = read(tmp_path / "trace.json")
    assert set(trace) == {"displayTimeUnit", "otherData", "traceEvents"}
    needed = {
        "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
        "M": {"name", "pid", "tid", "args"},
        "s": {"name", "cat", "pid", "tid", "ts", "id"},
        "t": {"name", "cat", "pid", "tid", "ts", "id"},
        "f": {"name", "cat", "pid", "tid", "ts", "id", "bp"},
        "C": {"name", "pid", "tid", "ts", "args"},
    }
    for one in trace["traceEvents"]:
        assert set(one) - {"ph"} == needed[one["ph"]], one
        assert one["ph"] == "M" or (one["ts"] >= 0 and one.get("dur", 0) >= 0)
    counts = [one["args"]["value"] for one in trace["traceEvents"] if one["ph"] == "C" and one["pid"] == 0]
    assert counts[-1] == 0 and max(counts) == max(one["args"]["bytes"] for one in slices(trace, "comm", 0))
    assert trace["otherData"]["clocks"] == "all ranks have the clock of one machine"
    assert set(trace["otherData"]["summary"]) == {"rank 0", "rank 1"}


def test_a_path_that_ends_in_gz_is_compressed(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, steps, str(tmp_path / "trace.json.gz"), 1)
    assert len(slices(read(tmp_path / "trace.json.gz"), "step")) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json.gz"]


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
        if one["ph"] in "stf":
            flows[one["name"]].add(one["pid"])
    messages = [pids for name, pids in flows.items() if ">" in name]
    assert len(messages) == 4 and all(pids == {0, 1} for pids in messages)  # two each way at once, one more, gather_v's
    assert any("split" in name for name in lanes_of(trace, 0).values())


class Gathering(nn.Module):
    """Takes its input by name, and a module within it gathers it."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self.scale, self.comm = nn.Parameter(torch.ones(1)), comm

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * ad.all_gather(x, self.comm, grad="sum")


def gathered_before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    assert isinstance(module, Gathering)
    return args, {"x": ad.all_reduce(kwargs["x"], module.comm, grad="sum")}


def named_inputs(comm: Communicator, path: str) -> None:
    model = Gathering(comm)
    model.register_forward_pre_hook(gathered_before, with_kwargs=True)
    x = 2 * torch.ones(3, requires_grad=True)
    with ad.trace(path, comm):
        ad.all_reduce(model(x=3 * x).sum(), comm, grad="sum").backward()


def test_what_hooks_of_a_module_communicate_is_of_that_module(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, named_inputs, str(tmp_path / "trace.json"))
    assert [one["name"] for one in slices(read(tmp_path / "trace.json"), "comm", 0)] == [
        "all_reduce Gathering",
        "all_gather Gathering",
        "all_reduce",
        "all_reduce backward",
        "reduce_scatter Gathering backward",
        "all_reduce Gathering backward",
    ]


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


def overlapped(comm: Communicator, path: str) -> None:
    torch.manual_seed(0)
    model = Model(comm, OverlapConfig(method="slices", chunks=2))
    with ad.trace(path, comm, model=model):
        model(torch.ones(ROWS // comm.size, 2, WIDTH)).backward()


def test_pieces_of_overlapped_matmuls_are_within_their_layers(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, overlapped, str(tmp_path / "trace.json"))
    trace = read(tmp_path / "trace.json")
    check_nesting(trace)
    pieces = [one for one in slices(trace, "compute", 0) if one["args"].get("method") == "slices"]
    assert {one["args"]["layer"] for one in pieces} == {f"blocks.{n}.{name}" for n in (0, 1) for name in ("up", "down")}
    assert {one["args"]["phase"] for one in pieces} == {"forward", "backward"}
    for piece in pieces:
        layer = piece["args"]["layer"] + (" backward" if piece["args"]["phase"] == "backward" else "")
        within = [one for one in slices(trace, "compute", 0) if one["name"] == layer]
        assert any(one["ts"] <= piece["ts"] and piece["ts"] + piece["dur"] <= one["ts"] + one["dur"] for one in within)
    beside = [one for one in slices(trace, "comm", 0) if lanes_of(trace, 0)[one["tid"]].endswith("side stream")]
    assert {one["args"]["operation"] for one in beside} >= {"all_gather", "reduce_scatter"}


def left_alone(comm: Communicator, path: str) -> tuple[list[Any], ...]:
    x = torch.ones(4)
    for _ in range(3):
        comm.all_reduce(x, x)
    kept = comm._fast["all_reduce"].launch
    before = kept(x, x, "sum", None, None) is not None
    with ad.trace(path, comm):
        within = kept(x, x, "sum", None, None) is not None
    left: list[Any] = [observing.observers, groups.records, streams.waits, lanes.observers]
    left.append(torch_internals.is_hooked(nn.Linear(1, 1)))
    return [before, within, kept(x, x, "sum", None, None) is not None], left


def test_nothing_is_left_behind_and_calls_are_quick_again(ranks: RankPool, tmp_path: Path) -> None:
    for quick, left in ranks.run(2, left_alone, str(tmp_path / "trace.json")):
        assert quick == [True, False, True]
        assert left == [[], [], [], [], False]


def limited(comm: Communicator, path: str) -> None:
    with ad.trace(path, comm, limit=10):
        for _ in range(25):
            comm.all_reduce(torch.ones(2))


def test_what_is_above_the_limit_is_counted(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, limited, str(tmp_path / "trace.json"))
    trace = read(tmp_path / "trace.json")
    assert len(slices(trace, "comm", 1)) == 10
    assert trace["otherData"]["dropped"] == {"rank 0": 15, "rank 1": 15}


def raising(comm: Communicator, path: str, who: int) -> tuple[str, str | None, float]:
    began, caught = time.monotonic(), ""
    trace = ad.trace(path, comm, timeout=20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with trace:
                comm.all_reduce(torch.ones(2))
                if comm.rank == who:
                    raise KeyError("mine")
        except KeyError as error:
            caught = str(error)
    comm.barrier()  # the communicator has heard nothing of it
    return caught, None if trace.path is None else trace.path.name, time.monotonic() - began


@pytest.mark.parametrize("who", [0, 1])
def test_an_exception_is_the_users_own_and_what_was_recorded_is_there(
    ranks: RankPool, tmp_path: Path, who: int
) -> None:
    found = ranks.run(2, raising, str(tmp_path / "trace.json"), who)
    assert [caught for caught, *_ in found] == ["'mine'" if rank == who else "" for rank in (0, 1)]
    assert [path for _, path, _ in found] == ["trace.json", None]
    assert max(seconds for *_, seconds in found) < 10
    trace = read(tmp_path / "trace.json")
    assert trace["otherData"]["raised"] == {f"rank {who}": "KeyError: 'mine'"}
    assert [len(slices(trace, "comm", rank)) for rank in (0, 1)] == [1, 1]
    ended = [one for one in trace["traceEvents"] if one["ph"] == "i"]
    assert [(one["pid"], one["name"]) for one in ended] == [(who, "raised KeyError: 'mine'")]


def refused(comm: Communicator, folder: str, case: str) -> tuple[str, bool, bool]:
    """(the error, whether the block was entered, whether another trace works afterwards)"""
    entered, text = False, ""
    path = {"nowhere": f"{folder}/no/such/trace.json", "folder": folder}.get(case, f"{folder}/{case}.json")
    outer = ad.trace(f"{folder}/outer.json") if case == "nested" and comm.rank == 0 else None
    try:
        if outer is not None:
            outer.__enter__()
        with ad.trace(path, comm):
            entered = True
    except (OSError, RuntimeError) as error:
        text = str(error)
    finally:
        if outer is not None:
            outer.__exit__(None, None, None)
    with ad.trace(f"{folder}/after-{case}.json", comm):
        comm.all_reduce(torch.ones(2))
    return text, entered, comm.rank > 0 or bool(slices(read(f"{folder}/after-{case}.json"), "comm", 1))


@pytest.mark.parametrize(
    ("case", "words"), [("nowhere", "cannot be written"), ("folder", "is a folder"), ("nested", "under way")]
)
def test_what_cannot_be_is_said_on_every_rank_before_the_block(
    ranks: RankPool, tmp_path: Path, case: str, words: str
) -> None:
    for text, entered, after in ranks.run(2, refused, str(tmp_path), case):
        assert "trace: " in text and words in text
        assert not entered and after


def test_arguments_that_are_wrong_are_said() -> None:
    for arguments, words in (
        ((3,), "path is 3"),
        (("a.json", "comm"), "comm is 'comm'"),
    ):
        with pytest.raises(TypeError, match=words):
            ad.trace(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout is 0"):
        ad.trace("a.json", timeout=0)
    with pytest.raises(ValueError, match="limit"):
        ad.trace("a.json", limit=0)
    with pytest.raises(TypeError, match="model is"):
        ad.trace("a.json", model=3)  # type: ignore[arg-type]


def test_one_process_alone_and_nothing_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ad.trace(tmp_path / "empty.json") as trace:
        pass
    assert trace.path == tmp_path / "empty.json"
    assert slices(read(trace.path)) == []
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    with ad.trace(tmp_path / "own.json.gz") as trace:
        nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    assert trace.path == tmp_path / "own.rank2.json.gz"
    assert [one["name"] for one in slices(read(trace.path))] == ["Linear", "backward", "Linear backward"]
    with pytest.raises(RuntimeError, match="entered before"), trace:
        pass


def test_a_forked_child_leaves_the_file_to_its_parent(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        with ad.trace(tmp_path / "trace.json") as trace, trace.span("both"):
            child = os.fork()
            if not child:
                trace.__exit__(None, None, None)
                os._exit(5 if trace.path is None else 6)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
            assert list(tmp_path.iterdir()) == []
    assert [one["name"] for one in slices(read(tmp_path / "trace.json"))] == ["both"]


def test_ranks_of_one_process_are_in_its_one_file(tmp_path: Path) -> None:
    comms = Communicator.init_all(2, library=pynccl.load("host"))
    with ad.trace(tmp_path / "trace.json"), pynccl.group():
        for comm in comms:
            comm.all_reduce(torch.ones(3))
    for comm in comms:
        comm.destroy()
    trace = read(tmp_path / "trace.json")
    assert [lanes_of(trace, 0)[one["tid"]].partition(", its ")[2] for one in slices(trace, "comm")] == [
        "rank 0",
        "rank 1",
    ]
    check_nesting(trace)


def state_of(pid: int) -> str:
    """R, S, ...; T: stopped, Z or X: dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"


def leaving(comm: Communicator, path: str, who: int, how: int, timeout: float) -> tuple[Any, ...]:
    """A rank is killed or stopped in the block; what another one finds, in how many seconds; it lets that go on."""
    pids = comm.all_gather(torch.tensor([os.getpid()])).tolist()
    trace = ad.trace(path, comm, timeout=timeout)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with trace:
            comm.all_reduce(torch.ones(4))
            if comm.rank == who:
                os.kill(os.getpid(), how)
            while comm.rank != who and state_of(pids[who]) not in "TZX":
                time.sleep(0.01)
            began = time.monotonic()
    seconds = time.monotonic() - began
    if how == signal.SIGSTOP and comm.rank != who:
        os.kill(pids[who], signal.SIGCONT)
    written = None if trace.path is None else trace.path.name
    return written, trace.missing, seconds, [str(one.message) for one in said if "trace: " in str(one.message)]


def test_a_rank_that_was_killed_is_missing_and_nobody_waits_for_it(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.outcomes(2, leaving, str(tmp_path / "trace.json"), 1, signal.SIGKILL, 40.0)
    assert "SIGKILL" in second.report and first.report == ""
    written, missing, seconds, warned = first.value
    assert written == "trace.json" and missing[1].startswith("it has ended") and seconds < 20
    assert len(warned) == 1 and "trace.json lacks ranks: rank 1" in warned[0]
    trace = read(tmp_path / "trace.json")
    assert len(slices(trace, "comm", 0)) == 1 and not slices(trace, "", 1)
    assert list(trace["otherData"]["missing"]) == ["rank 1"]


def test_without_rank_0_each_rank_writes_its_own(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.outcomes(2, leaving, str(tmp_path / "trace.json.gz"), 0, signal.SIGKILL, 40.0)
    assert "SIGKILL" in first.report and second.report == ""
    written, _, seconds, warned = second.value
    assert written == "trace.rank1.json.gz" and seconds < 20
    assert len(warned) == 1 and "rank 0 has left the block, or has ended" in warned[0]
    assert len(slices(read(tmp_path / "trace.rank1.json.gz"), "comm", 1)) == 1


def test_a_rank_that_is_stopped_is_waited_for_no_longer_than_said_and_writes_its_own(
    ranks: RankPool, tmp_path: Path
) -> None:
    (written, missing, seconds, _), (own, _, _, warned) = ranks.run(
        2, leaving, str(tmp_path / "trace.json"), 1, signal.SIGSTOP, 1.0
    )
    assert written == "trace.json" and 0.9 < seconds < 20
    assert missing == {1: "it did not come to the end of the block within 1 s"}
    assert own == "trace.rank1.json" and "rank 0 has left the block" in warned[0]
    assert len(slices(read(tmp_path / "trace.json"), "comm", 0)) == 1
    assert len(slices(read(tmp_path / "trace.rank1.json"), "comm", 1)) == 1
    assert sorted(path.name for path in tmp_path.glob("*trace*")) == ["trace.json", "trace.rank1.json"]


def test_clocks_are_compared_by_questions() -> None:
    ahead = 1234.5
    ours, theirs = socket.socketpair()

    def answers() -> None:
        while meeting._receive(theirs, 1) == meeting._ASK:
            meeting._send(theirs, struct.pack("!d", time.perf_counter() + ahead))

    thread = threading.Thread(target=answers)
    thread.start()
    found = meeting._compare(ours)
    meeting._send(ours, meeting._DONE)
    thread.join(10)
    assert abs(found.seconds - ahead) <= found.uncertainty < 0.05
    drifted = meeting.Offset(found.seconds + 2.0, found.uncertainty)
    between = meeting._between(found, drifted)
    assert between.seconds == pytest.approx(ahead + 1.0, abs=0.1) and between.uncertainty >= 1.0
    for one in (ours, theirs):
        one.close()


def far_apart(comm: Communicator, path: str) -> None:
    """As on two machines, with clocks that differ by 100 seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "machine", lambda: f"machine of rank {comm.rank}")
        patch.setattr(meeting, "_names", lambda: ["127.0.0.1"])
        shift = 100.0 * comm.rank
        for module in (meeting, marks, tracing):
            patch.setattr(module, "now", lambda: time.perf_counter() + shift)
        steps(comm, path, 1)


def test_times_of_another_machine_are_moved_to_the_clock_of_rank_0(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, far_apart, str(tmp_path / "trace.json"))
    trace = read(tmp_path / "trace.json")
    (ahead,) = re.findall(r"rank 1 ([+-][\d.]+) us", trace["otherData"]["clocks"])
    uncertain = trace["otherData"]["uncertainty_us"]["rank 1"]
    assert 0 < uncertain < 50e3 and abs(float(ahead) - 100e6) <= uncertain
    assert max(one["ts"] for one in slices(trace)) < 20e6
    for a, b in zip(slices(trace, "comm", 0), slices(trace, "comm", 1), strict=True):
        assert a["name"] == b["name"]
        assert min(x["ts"] + x["dur"] for x in (a, b)) >= max(x["ts"] for x in (a, b)) - uncertain


def test_train_py_writes_a_trace_of_its_steps(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--layers", "1", "--width", "32", "--seq", "32", "--batch", "2", "--steps", "4"]
    options += ["--out", str(tmp_path), "--trace", str(tmp_path / "trace.json.gz"), "--trace-steps", "2"]
    command = [sys.executable, *TORCHRUN, "--nproc-per-node=2", str(SCRIPTS / "train.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"wrote \S+trace.json.gz: 2 ranks, [\d.]+ ms, of which [\d.]+ ms with comm", done.stdout)
    trace = read(tmp_path / "trace.json.gz")
    check_nesting(trace)
    for rank in (0, 1):
        assert [one["name"] for one in slices(trace, "step", rank)] == ["step 2", "step 3"]
        layers = {one["args"].get("layer") for one in slices(trace, "comm", rank)}
        assert {"blocks.0.attention.qkv", "blocks.0.attention.out", "blocks.0.up", "blocks.0.down"} <= layers


def test_a_trace_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    options = {"trace": str(tmp_path / "trace.json"), "trace_steps": 3}
    for wrong, words in (
        ({"trace": str(tmp_path)}, "expected the path of a file"),
        ({"trace": f"{tmp_path}/no/trace.json"}, "there is no folder"),
        ({"trace_steps": 0}, "--trace-steps is 0"),
    ):
        assert words in trace_problem(argparse.Namespace(**options | wrong))
    assert trace_problem(argparse.Namespace(**options)) == ""
    command = [sys.executable, str(SCRIPTS / "train.py"), "--trace", str(tmp_path), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and "train.py: rank 0: error: --trace" in done.stderr
