"""ad.trace where something is wrong: ranks that raise, are killed, stopped or elsewhere; what it leaves behind."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
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
from pynccl import Communicator
from pynccl.comm import groups, observing
from pynccl_autograd import torch_internals
from pynccl_autograd.tracing import recording, tracing

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from train import read_options  # noqa: E402


def left_alone(comm: Communicator, path: str) -> list[Any]:
    x = torch.ones(4)
    with ad.trace(path, comm):
        comm.all_reduce(x, x)
    left: list[Any] = [observing.observers, groups.records]
    return [*left, torch_internals.is_hooked(nn.Linear(1, 1))]


def test_nothing_is_left_behind(ranks: RankPool, tmp_path: Path) -> None:
    for left in ranks.run(2, left_alone, str(tmp_path / "trace.json")):
        assert left == [[], [], False]


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
    assert max(seconds for *_, seconds in found) < 20
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
    found = slices(read(trace.path))
    assert [one["name"] for one in found if one["cat"] == "user_annotation"] == ["Linear"]
    assert {"aten::linear", "AddmmBackward0"} <= {one["name"] for one in found if one["cat"] == "cpu_op"}
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
    assert written == "trace.json" and "NcclRemoteError" in missing[1] and seconds < 20
    assert len(warned) == 1 and "trace.json has rank 0 alone" in warned[0]
    trace = read(tmp_path / "trace.json")
    assert len(slices(trace, "comm", 0)) == 1 and not slices(trace, "", 1)
    assert list(trace["otherData"]["missing"]) == ["rank 1"]


def test_without_rank_0_each_rank_writes_its_own(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.outcomes(2, leaving, str(tmp_path / "trace.json.gz"), 0, signal.SIGKILL, 40.0)
    assert "SIGKILL" in first.report and second.report == ""
    written, _, seconds, warned = second.value
    assert written == "trace.rank1.json.gz" and seconds < 20
    assert len(warned) == 1 and "trace.rank1.json.gz has rank 1 alone" in warned[0]
    assert len(slices(read(tmp_path / "trace.rank1.json.gz"), "comm", 1)) == 1


def test_a_rank_that_is_stopped_is_waited_for_no_longer_than_said_and_writes_its_own(
    ranks: RankPool, tmp_path: Path
) -> None:
    (written, missing, seconds, _), (own, _, _, warned) = ranks.run(
        2, leaving, str(tmp_path / "trace.json"), 1, signal.SIGSTOP, 1.0
    )
    assert written == "trace.json" and 0.9 < seconds < 20
    assert missing == {1: "NcclTimeout: the other ranks did not come to the end of the block within 1 s"}
    assert own == "trace.rank1.json" and "trace.rank1.json has rank 1 alone" in warned[0]
    assert len(slices(read(tmp_path / "trace.json"), "comm", 0)) == 1
    assert len(slices(read(tmp_path / "trace.rank1.json"), "comm", 1)) == 1
    assert sorted(path.name for path in tmp_path.glob("*trace*")) == ["trace.json", "trace.rank1.json"]


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


def test_a_trace_that_cannot_be_written_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words, said in (
        (["--trace", str(tmp_path)], "Is a directory; pass a file that can be written"),
        (["--trace", "/proc/none/trace.json"], "pass a file that can be written"),
    ):
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        with pytest.raises(SystemExit) as left, contextlib.redirect_stderr(io.StringIO()) as told:
            read_options()
        assert left.value.code == 2
        assert len(told.getvalue().splitlines()) == 1 and said in told.getvalue()
