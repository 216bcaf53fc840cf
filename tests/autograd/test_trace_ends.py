"""ad.trace where something is wrong: ranks that raise, are killed, stopped or elsewhere; what it leaves behind."""

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
    assert observers.observers == [] and groups.records == []  # nothing is left behind
    return caught, None if trace.path is None else trace.path.name, time.monotonic() - began


@pytest.mark.parametrize("who", [0, 1])
def test_an_exception_is_the_users_own_and_what_was_recorded_is_there(
    ranks: RankPool, tmp_path: Path, who: int
) -> None:
    found = ranks.run(2, raising, str(tmp_path / "trace.json"), who)
    assert [caught for caught, *_ in found] == ["'mine'" if rank == who else "" for rank in (0, 1)]
    assert [path for _, path, _ in found] == ["trace.json", None]
    assert max(seconds for *_, seconds in found) < 20
    trace = read(tmp_path / "trace.json")
    assert trace["otherData"]["raised"] == {f"rank {who}": "KeyError: 'mine'"}
    assert [len(slices(trace, "comm", rank)) for rank in (0, 1)] == [1, 1]
    ended = [one for one in trace["traceEvents"] if one["ph"] == "i"]
    assert [(one["pid"], one["name"]) for one in ended] == [(who, "raised KeyError: 'mine'")]


def refused(comm: Communicator, folder: str, case: str) -> tuple[str, bool]:
    """(the error, whether the block was entered)"""
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
    ("case", "words"), [("nowhere", "cannot be written"), ("folder", "is a folder"), ("nested", "under way")]
)
def test_what_cannot_be_is_said_on_every_rank_before_the_block(
    ranks: RankPool, tmp_path: Path, case: str, words: str
) -> None:
    for text, entered in ranks.run(2, refused, str(tmp_path), case):
        assert "trace: " in text and words in text and not entered


def test_arguments_that_are_wrong_are_said() -> None:
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"path": 3}, TypeError, "path is 3"),
        ({"comm": "comm"}, TypeError, "comm is 'comm'"),
        ({"timeout": 0}, ValueError, "timeout is 0"),
        ({"model": 3}, TypeError, "model is"),
    ]
    for arguments, kind, words in wrong:
        with pytest.raises(kind, match=words):
            ad.trace(**{"path": "a.json", **arguments})


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
    found = slices(read(trace.path))
    assert [one["name"] for one in found if one["cat"] == "user_annotation"] == ["Linear"]
    assert {"aten::linear", "AddmmBackward0"} <= {one["name"] for one in found if one["cat"] == "cpu_op"}
    with pytest.raises(RuntimeError, match="entered before"), trace:
        pass


def leaving(comm: Communicator, path: str, who: int) -> tuple[Any, ...]:
    """A rank is killed in the block; what another one finds."""
    trace = ad.trace(path, comm, timeout=40.0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with trace:
            comm.all_reduce(torch.ones(4))
            if comm.rank == who:
                os.kill(os.getpid(), signal.SIGKILL)
            with contextlib.suppress(NcclError):  # until it is dead
                comm.barrier()
    written = None if trace.path is None else trace.path.name
    return written, trace.missing, [str(one.message) for one in said if "trace: " in str(one.message)]


# Without rank 0 each of the others writes its own.
@pytest.mark.parametrize(("who", "name"), [(1, "trace.json"), (0, "trace.rank1.json")])
def test_a_rank_that_was_killed_is_missing_and_nobody_waits_for_it(
    ranks: RankPool, tmp_path: Path, who: int, name: str
) -> None:
    outcomes = ranks.outcomes(2, leaving, str(tmp_path / "trace.json"), who)
    assert "SIGKILL" in outcomes[who].report and outcomes[1 - who].report == ""
    written, missing, warned = outcomes[1 - who].value
    assert written == name and len(warned) == 1 and f"{name} has rank {1 - who} alone" in warned[0]
    trace = read(tmp_path / name)
    assert slices(trace, "comm", 1 - who) and not slices(trace, "", who)
    if who == 1:
        assert "NcclRemoteError" in missing[1] and list(trace["otherData"]["missing"]) == ["rank 1"]


def far_apart(comm: Communicator, path: str) -> None:
    """As on two machines, with clocks that differ by 100 seconds."""
    with pytest.MonkeyPatch.context() as patch:
        shift = 100.0 * comm.rank
        for module in (recording, tracing):
            patch.setattr(module, "now", lambda: time.perf_counter() + shift)
        steps(comm, path, 1)


def test_times_of_another_machine_are_moved_to_the_clock_of_rank_0(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, far_apart, str(tmp_path / "trace.json"))
    trace = read(tmp_path / "trace.json")
    ahead = trace["otherData"]["clock_offset_us"]["rank 1"]
    assert abs(ahead - 100e6) < 50e3
    assert max(one["ts"] for one in slices(trace)) < 20e6
    for a, b in zip(slices(trace, "comm", 0), slices(trace, "comm", 1), strict=True):
        assert a["name"] == b["name"]
        assert min(x["ts"] + x["dur"] for x in (a, b)) >= max(x["ts"] for x in (a, b)) - 50e3
