"""A rank that dies, stops, or skips a collective of torch.distributed: the others' error names it, and its line."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from meetings import AT_ONCE
from process_groups import group_over
from ranks import HOST, Place, RankPool

from pynccl import NcclError, NcclRemoteError, NcclTimeout

SOON = timedelta(seconds=2)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankPool]:
    monkeypatch.setattr(ranks, "GRACE_SECONDS", AT_ONCE)  # the others have something to do yet
    pool = RankPool(HOST, communicators=False)
    yield pool
    pool.close()


def line_of(marker: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    [number] = [number for number, line in enumerate(lines, 1) if line.endswith(f"  # {marker}")]
    return rf"{Path(__file__).name}:{number}\b"


def trains(place: Place, path: str, how: str, synced: str) -> str:
    """The error with which DDP ends where rank 1 does this in its third step."""
    with group_over("pynccl", place, path):
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
        with pytest.raises(RuntimeError) as raised:
            for step in range(5):
                if step == 2:
                    limited(dist.group.WORLD)
                if place.rank == 1 and step == 2:
                    if how == "kill":
                        os.kill(os.getpid(), signal.SIGKILL)
                    if how == "stop":
                        os.kill(os.getpid(), signal.SIGSTOP)  # the parent continues it
                    Path(synced).touch()
                    waiting(synced)
                model(torch.ones(2, 8)).sum().backward()  # step
        with pytest.raises(NcclError):
            dist.all_reduce(torch.ones(1))
        Path(f"{synced}.{place.rank}").touch()
    return str(raised.value)


def limited(group: Any, timeout: timedelta = SOON) -> None:
    """From now on: on a busy machine what went before may take longer."""
    group.set_timeout(timeout)


def waiting(synced: str) -> None:
    """Until both others have given up."""
    pause = threading.Event()
    for rank in (0, 2):
        while not Path(f"{synced}.{rank}").exists():
            pause.wait(0.05)  # late


def test_ddp_names_the_rank_that_was_killed(processes: RankPool, tmp_path: Path) -> None:
    outcomes = processes.outcomes(3, trains, str(tmp_path / "store"), "kill", str(tmp_path / "late"))
    assert "died: SIGKILL" in outcomes.pop(1).report
    for outcome in outcomes:
        assert not outcome.report, outcome.report
        assert re.search(r"rank 1's process \d+ was killed", outcome.value), outcome.value
        assert re.search(rf"all_reduce #\d+ .*{line_of('step')}", outcome.value), outcome.value


def test_ddp_names_the_rank_that_comes_late_and_its_line(processes: RankPool, tmp_path: Path) -> None:
    where = rf"rank 1: .*its main thread is in {line_of('late')}"
    for attempt in range(5):  # on a busy machine, who is asked where it is may answer too late
        paths = str(tmp_path / f"store{attempt}"), str(tmp_path / f"late{attempt}")
        texts = processes.run(3, trains, paths[0], "late", paths[1])
        if all(re.search(where, text) for text in (texts[0], texts[2])):
            break
    for text in (texts[0], texts[2]):
        assert re.search(rf"rank 1 never entered all_reduce #\d+ .*{line_of('step')}", text), text
        assert re.search(where, text), text
    assert "rank 0" in texts[1] or "rank 2" in texts[1]  # who comes then hears why it was left


def test_ddp_names_the_rank_that_is_stopped(processes: RankPool, tmp_path: Path) -> None:
    def go_on() -> None:
        for number in (0, 2):
            while not (tmp_path / f"late.{number}").exists() and not over.wait(0.05):
                pass
        for worker in processes._workers:
            os.kill(worker.process.pid or 0, signal.SIGCONT)

    over = threading.Event()
    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        outcomes = processes.outcomes(3, trains, str(tmp_path / "store"), "stop", str(tmp_path / "late"))
    finally:
        over.set()
        thread.join()
    for rank in (0, 2):
        assert re.search(r"rank 1's process \d+ is stopped \(SIGSTOP", outcomes[rank].value), outcomes[rank]


def skips(place: Place, path: str) -> list[str]:
    """What calls raise of which rank 1 makes none, each on a group of its own: all of them honour the timeout."""
    found = []
    with group_over("pynccl", place, path):
        groups = [dist.new_group() for _ in range(4)]
        if place.rank == 0:
            for group in groups:
                limited(group, timedelta(seconds=0.5))
            x = torch.ones(2)
            calls: list[Any] = [
                lambda group: dist.all_reduce(x, group=group),
                lambda group: dist.all_gather_into_tensor(torch.empty(4), x, group=group, async_op=True).wait(),
                dist.barrier,
                lambda group: dist.recv(x, 1, group=group),
            ]
            for call, group in zip(calls, groups, strict=True):
                with pytest.raises(NcclTimeout) as raised:
                    call(group)
                found.append(str(raised.value))
            work = dist.all_reduce(x, async_op=True)
            with pytest.raises(NcclTimeout, match=r"wait\(0.2 s\)"):
                work.wait(timedelta(seconds=0.2))
            assert not work.is_completed()
            dist.new_group(backend="gloo").barrier().wait()
            work.wait()
        else:
            dist.new_group(backend="gloo").barrier().wait()
            dist.all_reduce(torch.ones(2))
    return found


def test_every_call_honours_the_timeout_and_names_who_is_missing(processes: RankPool, tmp_path: Path) -> None:
    texts = processes.run(2, skips, str(tmp_path / "store"))[0]
    names = ("all_reduce #1", "all_gather #1", "barrier #1")
    for text, name in zip(texts[:3], names, strict=True):
        assert f"rank 1 never entered {name} (comm 'group" in text, text
    assert "recv: rank 1 never called send" in texts[3]


def disagree(place: Place, path: str) -> str:
    os.environ["PYNCCL_CHECK"] = "1"
    try:
        with group_over("pynccl", place, path), pytest.raises(NcclError) as raised:
            dist.all_reduce(torch.ones(2 + place.rank))
    finally:
        del os.environ["PYNCCL_CHECK"]
    return str(raised.value)


def test_calls_are_compared_if_asked_for(processes: RankPool, tmp_path: Path) -> None:
    for text in processes.run(2, disagree, str(tmp_path / "store")):
        assert "count=2" in text and "count=3" in text, text


def lost_message(place: Place, path: str, messages: int) -> str:
    """The error of a recv whose sender has died after so many messages."""
    with group_over("pynccl", place, path):
        x = torch.ones(2)
        for _ in range(messages):
            dist.send(x, 0) if place.rank == 1 else dist.recv(x, 1)
        if place.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(NcclRemoteError) as raised:
            dist.recv(x, 1)
    return str(raised.value)


@pytest.mark.parametrize("messages", [0, 1])
def test_a_peer_that_dies_ends_a_message(processes: RankPool, tmp_path: Path, messages: int) -> None:
    outcomes = processes.outcomes(2, lost_message, str(tmp_path / "store"), messages)
    assert not outcomes[0].report, outcomes[0].report
    assert re.search(r"rank 1.*process \d+ was killed", outcomes[0].value), outcomes[0].value
