"""ad.trace with ranks that raise, are killed or run on another node, and with wrong arguments."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import nn
from traces import read, slices, steps

import pynccl_autograd as ad
from pynccl import Communicator, NcclError
from pynccl.comm import groups, observers
from pynccl_autograd.tracing import recording, tracing


def raise_in_block(comm: Communicator, path: str, culprit: int) -> tuple[str, str | None, float]:
    began, caught = time.monotonic(), ""
    trace = ad.trace(path, comm, timeout=20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with trace:
                comm.all_reduce(torch.ones(2))
                if comm.rank == culprit:
                    raise KeyError("mine")
        except KeyError as error:
            caught = str(error)
    comm.barrier()  # the communicator is unaffected
    assert observers.observers == [] and groups.records == []  # the observers are removed
    return caught, None if trace.path is None else trace.path.name, time.monotonic() - began


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_exception_propagates_and_the_recorded_events_are_written(
    ranks: RankPool, tmp_path: Path, culprit: int
) -> None:
    found = ranks.run(2, raise_in_block, str(tmp_path / "trace.json"), culprit)
    assert [caught for caught, *_ in found] == ["'mine'" if rank == culprit else "" for rank in (0, 1)]
    assert [path for _, path, _ in found] == ["trace.json", None]
    assert max(seconds for *_, seconds in found) < 20
    trace = read(tmp_path / "trace.json")
    assert trace["otherData"]["raised"] == {f"rank {culprit}": "KeyError: 'mine'"}
    assert [len(slices(trace, "comm", rank)) for rank in (0, 1)] == [1, 1]
    ended = [event for event in trace["traceEvents"] if event["ph"] == "i"]
    assert [(event["pid"], event["name"]) for event in ended] == [(culprit, "raised KeyError: 'mine'")]


def enter_bad_trace(comm: Communicator, folder: str, case: str) -> tuple[str, bool]:
    """Return the error and whether the block was entered."""
    entered, text = False, ""
    path = {"nowhere": f"{folder}/no/such/trace.json", "folder": folder}.get(case, f"{folder}/{case}.json")
    nested = case == "nested" and comm.rank == 0
    with ad.trace(f"{folder}/outer.json") if nested else contextlib.nullcontext():
        try:
            with ad.trace(path, comm):
                entered = True
        except (OSError, RuntimeError) as error:
            text = str(error)
    return text, entered


@pytest.mark.parametrize(
    ("case", "words"), [("nowhere", "cannot be written"), ("folder", "is a folder"), ("nested", "already active")]
)
def test_an_impossible_trace_raises_on_every_rank_before_the_block(
    ranks: RankPool, tmp_path: Path, case: str, words: str
) -> None:
    for text, entered in ranks.run(2, enter_bad_trace, str(tmp_path), case):
        assert "trace: " in text and words in text and not entered


def test_wrong_arguments_raise() -> None:
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"path": 3}, TypeError, "path is 3"),
        ({"comm": "comm"}, TypeError, "comm is 'comm'"),
        ({"timeout": 0}, ValueError, "timeout is 0"),
        ({"model": 3}, TypeError, "model is"),
    ]
    for arguments, kind, words in wrong:
        with pytest.raises(kind, match=words):
            ad.trace(**{"path": "a.json", **arguments})


def test_a_single_process_and_an_empty_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ad.trace(tmp_path / "empty.json") as trace:
        pass
    assert trace.path == tmp_path / "empty.json"
    assert slices(read(trace.path)) == []
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    with ad.trace(tmp_path / "own.json.gz") as trace:
        nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    assert trace.path == tmp_path / "own.rank2.json.gz"
    found = slices(read(trace.path))
    assert [event["name"] for event in found if event["cat"] == "user_annotation"] == ["Linear"]
    assert {"aten::linear", "AddmmBackward0"} <= {event["name"] for event in found if event["cat"] == "cpu_op"}
    with pytest.raises(RuntimeError, match="entered before"), trace:
        pass


def kill_in_block(comm: Communicator, path: str, culprit: int) -> tuple[Any, ...]:
    """Kill a rank in the block; return what the other rank finds."""
    trace = ad.trace(path, comm, timeout=40.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with trace:
            comm.all_reduce(torch.ones(4))
            if comm.rank == culprit:
                os.kill(os.getpid(), signal.SIGKILL)
            with contextlib.suppress(NcclError):  # until the other rank is dead
                comm.barrier()
    written = None if trace.path is None else trace.path.name
    return written, trace.missing, [str(event.message) for event in caught if "trace: " in str(event.message)]


# Without rank 0 each remaining rank writes its own file.
@pytest.mark.parametrize(("culprit", "name"), [(1, "trace.json"), (0, "trace.rank1.json")])
def test_a_killed_rank_is_missing_and_the_others_do_not_wait_for_it(
    ranks: RankPool, tmp_path: Path, culprit: int, name: str
) -> None:
    outcomes = ranks.outcomes(2, kill_in_block, str(tmp_path / "trace.json"), culprit)
    assert "SIGKILL" in outcomes[culprit].report and outcomes[1 - culprit].report == ""
    written, missing, warned = outcomes[1 - culprit].value
    assert written == name and len(warned) == 1 and f"{name} has only rank {1 - culprit}," in warned[0]
    trace = read(tmp_path / name)
    assert slices(trace, "comm", 1 - culprit) and not slices(trace, "", culprit)
    if culprit == 1:
        assert "NcclRemoteError" in missing[1] and list(trace["otherData"]["missing"]) == ["rank 1"]


def trace_with_shifted_clock(comm: Communicator, path: str) -> None:
    """Simulate two nodes whose clocks differ by 100 seconds."""
    with pytest.MonkeyPatch.context() as patch:
        shift = 100.0 * comm.rank
        for module in (recording, tracing):
            patch.setattr(module, "now", lambda: time.perf_counter() + shift)
        steps(comm, path, 1)


def test_times_of_another_node_are_converted_to_the_clock_of_rank_0(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, trace_with_shifted_clock, str(tmp_path / "trace.json"))
    trace = read(tmp_path / "trace.json")
    ahead = trace["otherData"]["clock_offset_us"]["rank 1"]
    assert abs(ahead - 100e6) < 50e3
    assert max(event["ts"] for event in slices(trace)) < 20e6
    for a, b in zip(slices(trace, "comm", 0), slices(trace, "comm", 1), strict=True):
        assert a["name"] == b["name"]
        assert min(x["ts"] + x["dur"] for x in (a, b)) >= max(x["ts"] for x in (a, b)) - 50e3
