"""If a rank dies, stops, or skips a collective of torch.distributed, the other ranks' error names it and its line."""

from __future__ import annotations

import contextlib
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
from process_groups import process_group
from ranks import HOST, Place, RankPool
from rendezvous_servers import AT_ONCE

from pynccl import NcclError, NcclRemoteError, NcclTimeout

SOON = timedelta(seconds=2)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankPool]:
    monkeypatch.setattr(ranks, "GRACE_SECONDS", AT_ONCE)  # the other ranks need time to report
    pool = RankPool(HOST, communicators=False)
    yield pool
    pool.close()


def line_of(marker: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    [number] = [number for number, line in enumerate(lines, 1) if line.endswith(f"  # {marker}")]
    return rf"{Path(__file__).name}:{number}\b"


def train_with_fault(place: Place, path: str, how: str, synced: str) -> str:
    """Return the error of DDP training in which rank 1 fails in its third step as `how` says."""
    with process_group("pynccl", place, path):
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
        with pytest.raises(RuntimeError) as raised:
            for step in range(5):
                if step == 2:
                    set_timeout(dist.group.WORLD)
                if place.rank == 1 and step == 2:
                    if how == "kill":
                        os.kill(os.getpid(), signal.SIGKILL)
                    if how == "stop":
                        os.kill(os.getpid(), signal.SIGSTOP)  # the parent continues it
                    Path(synced).touch()
                    wait_for_others(synced)
                model(torch.ones(2, 8)).sum().backward()  # step
        with pytest.raises(NcclError):
            dist.all_reduce(torch.ones(1))
        Path(f"{synced}.{place.rank}").touch()
    return str(raised.value)


def set_timeout(group: Any, timeout: timedelta = SOON) -> None:
    """Shorten the timeout; earlier steps may take longer on a busy machine."""
    group.set_timeout(timeout)


def wait_for_others(synced: str) -> None:
    """Wait until both other ranks have raised."""
    pause = threading.Event()
    for rank in (0, 2):
        while not Path(f"{synced}.{rank}").exists():
            pause.wait(0.05)  # late


def test_ddp_error_names_killed_rank(processes: RankPool, tmp_path: Path) -> None:
    outcomes = processes.outcomes(3, train_with_fault, str(tmp_path / "store"), "kill", str(tmp_path / "late"))
    assert "died: SIGKILL" in outcomes.pop(1).report
    for outcome in outcomes:
        assert not outcome.report, outcome.report
        assert re.search(r"rank 1's process \d+ was killed", outcome.value), outcome.value
        assert re.search(rf"all_reduce #\d+ .*{line_of('step')}", outcome.value), outcome.value


def test_ddp_error_names_late_rank_and_line(processes: RankPool, tmp_path: Path) -> None:
    where = rf"rank 1: .*its main thread is in {line_of('late')}"
    for attempt in range(5):  # on a busy machine, the late rank may report its position too late
        paths = str(tmp_path / f"store{attempt}"), str(tmp_path / f"late{attempt}")
        texts = processes.run(3, train_with_fault, paths[0], "late", paths[1])
        if all(re.search(where, text) for text in (texts[0], texts[2])):
            break
    for text in (texts[0], texts[2]):
        assert re.search(rf"rank 1 never entered all_reduce #\d+ .*{line_of('step')}", text), text
        assert re.search(where, text), text
    assert "rank 0" in texts[1] or "rank 2" in texts[1]  # the late rank learns why the others left


def test_ddp_error_names_stopped_rank(processes: RankPool, tmp_path: Path) -> None:
    def resume() -> None:
        for number in (0, 2):
            while not (tmp_path / f"late.{number}").exists() and not over.wait(0.05):
                pass
        for worker in processes._workers:
            os.kill(worker.process.pid or 0, signal.SIGCONT)

    over = threading.Event()
    thread = threading.Thread(target=resume)
    thread.start()
    try:
        outcomes = processes.outcomes(3, train_with_fault, str(tmp_path / "store"), "stop", str(tmp_path / "late"))
    finally:
        over.set()
        thread.join()
    for rank in (0, 2):
        assert re.search(r"rank 1's process \d+ is stopped \(SIGSTOP", outcomes[rank].value), outcomes[rank]


def skip_calls(place: Place, path: str) -> list[str]:
    """Return the errors of calls that rank 1 skips, each on its own group. Every call must honour the timeout."""
    found = []
    with process_group("pynccl", place, path):
        groups = [dist.new_group() for _ in range(4)]
        if place.rank == 0:
            for group in groups:
                set_timeout(group, timedelta(seconds=0.5))
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


def test_timeout_of_every_call_names_missing_rank(processes: RankPool, tmp_path: Path) -> None:
    texts = processes.run(2, skip_calls, str(tmp_path / "store"))[0]
    names = ("all_reduce #1", "all_gather #1", "barrier #1")
    for text, name in zip(texts[:3], names, strict=True):
        assert f"rank 1 never entered {name} (comm 'group" in text, text
    assert "recv: rank 1 never called send" in texts[3]


def mismatched_calls(place: Place, path: str) -> str:
    os.environ["PYNCCL_CHECK"] = "1"
    try:
        with process_group("pynccl", place, path), pytest.raises(NcclError) as raised:
            dist.all_reduce(torch.ones(2 + place.rank))
    finally:
        del os.environ["PYNCCL_CHECK"]
    return str(raised.value)


def test_pynccl_check_reports_mismatch(processes: RankPool, tmp_path: Path) -> None:
    for text in processes.run(2, mismatched_calls, str(tmp_path / "store")):
        assert "count=2" in text and "count=3" in text, text


def recv_from_killed_peer(place: Place, path: str, messages: int) -> str:
    """Return the error of a recv whose sender was killed after `messages` messages."""
    with process_group("pynccl", place, path):
        x = torch.ones(2)
        for _ in range(messages):
            dist.send(x, 0) if place.rank == 1 else dist.recv(x, 1)
        if place.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(NcclRemoteError) as raised:
            dist.recv(x, 1)
    return str(raised.value)


@pytest.mark.parametrize("messages", [0, 1])
def test_recv_from_killed_peer_raises(processes: RankPool, tmp_path: Path, messages: int) -> None:
    outcomes = processes.outcomes(2, recv_from_killed_peer, str(tmp_path / "store"), messages)
    assert not outcomes[0].report, outcomes[0].report
    assert re.search(r"rank 1.*process \d+ was killed", outcomes[0].value), outcomes[0].value


class Stopped(Exception):
    """An exception of the user's own."""


def raising_handler(place: Place, path: str, kind: type[BaseException]) -> list[str]:
    """Rank 0's signal handler raises in calls that wait for rank 1. Return the calls that it did not end."""
    store = dist.FileStore(f"{path}-done", 2)
    x, large = torch.ones(4), torch.ones(1 << 20)

    def handler(*_: object) -> None:
        raise kind(7)

    with process_group("pynccl", place, path):
        calls: dict[str, Any] = {
            "all_reduce": lambda group: dist.all_reduce(x, group=group),
            "all_reduce, async": lambda group: dist.all_reduce(x, group=group, async_op=True).wait(),
            "all_gather": lambda group: dist.all_gather([x.clone(), x.clone()], x, group=group),
            "barrier": lambda group: dist.barrier(group=group),
            "recv": lambda group: dist.recv(x, 1, group=group),
            "send": lambda group: dist.send(large, 1, group=group),
            "all_gather_object": lambda group: dist.all_gather_object([None, None], 1, group=group),
        }
        groups = [dist.new_group(backend="pynccl") for _ in calls]
        for group in groups:
            dist.barrier(group=group)  # makes its communicator
        left = list(calls)
        if place.rank == 1:
            store.wait(["done"])
            return []
        signal.signal(signal.SIGALRM, handler)
        for (name, call), group in zip(calls.items(), groups, strict=True):
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with contextlib.suppress(NcclError):
                try:
                    call(group)
                except kind:
                    left.remove(name)
        store.set("done", "")
        return left


@pytest.mark.parametrize("kind", [SystemExit, TimeoutError, Stopped])
def test_the_exception_of_a_signal_handler_ends_every_call(
    processes: RankPool, tmp_path: Path, kind: type[BaseException]
) -> None:
    assert processes.run(2, raising_handler, str(tmp_path / "store"), kind) == [[], []]
