"""Ranks find each other by environment, store, file or process group; those that do not come, or cannot, are named."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from meetings import AT_ONCE, free_port, set_environment, total
from ranks import TORCHRUN, Place, RankPool

import pynccl
import pynccl_autograd
from pynccl import Communicator
from pynccl.bindings.workers import Clock
from pynccl.bootstrap import from_process_group
from pynccl.bootstrap.stores import _file_store

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bare() -> Iterator[RankPool]:
    """Processes that have not met."""
    pool = RankPool(communicators=False)
    yield pool
    pool.close()


@pytest.fixture
def port() -> int:
    return free_port()


def message_of(error: type[Exception], call: Callable[[], Any]) -> tuple[str, float]:
    """(what `call` says, seconds until then)."""
    started = time.monotonic()
    with pytest.raises(error) as caught:
        call()
    return str(caught.value), time.monotonic() - started


# The environment


@pytest.mark.parametrize("missing", [["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"], ["WORLD_SIZE"]], ids=len)
def test_outside_torchrun_lines_that_work_are_shown(monkeypatch: pytest.MonkeyPatch, missing: list[str]) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in missing:
        monkeypatch.delenv(name)
    with pytest.raises(pynccl.NcclInvalidUsage) as caught:
        pynccl.init()
    assert f"{', '.join(missing)} not set: this process was not started by torchrun" in str(caught.value)
    assert "torchrun --standalone --nproc-per-node=2 train.py\n" in str(caught.value)
    assert "Communicator.init" in str(caught.value) and "pynccl.init_all()" in str(caught.value)


def test_the_two_packages_have_one_version_and_init_all_gives_the_communicators_of_one_process() -> None:
    from importlib.metadata import version

    assert pynccl.__version__ == pynccl_autograd.__version__ == version("pynccl-autograd")
    comms = pynccl.init_all(2, library=pynccl.load("host"))
    assert [(comm.rank, comm.size) for comm in comms] == [(0, 2), (1, 2)]
    pynccl.abort(comms)


@pytest.mark.parametrize(("rank", "size"), [("2", "2"), ("-1", "2"), ("0", "0"), ("one", "2"), ("0", "")])
def test_an_impossible_rank_is_refused(monkeypatch: pytest.MonkeyPatch, rank: str, size: str) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(pynccl.NcclInvalidUsage) as caught:
        pynccl.init()
    assert f"RANK={rank!r}, WORLD_SIZE={size!r}: expected integers with 0 <= RANK < WORLD_SIZE" in str(caught.value)
    assert "torchrun --standalone" in str(caught.value)


def by_hand(place: Place, port: int) -> list[float]:
    set_environment(place.rank, place.size, port)
    comm = pynccl.init(timeout=20)
    assert (comm.rank, comm.size, comm.timeout) == (place.rank, place.size, 20)
    return [total(comm), total(Communicator.from_env())]


@pytest.mark.parametrize("n", [1, 3])
def test_variables_set_by_hand_suffice(bare: RankPool, n: int, port: int) -> None:
    assert bare.run(n, by_hand, port) == [[n * (n + 1) / 2] * 2] * n


SCRIPT = """
import os, pynccl, torch
comm = pynccl.init()
x = torch.full((3,), float(comm.rank + 1))
comm.all_reduce(x, x)
again = pynccl.Communicator.from_env()
assert again.all_gather(torch.tensor([again.rank])).tolist() == list(range(again.size))
with open(f"{os.environ['REPORT']}/{comm.rank}", "w") as report:
    report.write(f"{comm!r} {x.tolist()}")
"""


def test_torchrun_starts_a_job(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "REPORT": str(tmp_path), "PYNCCL_LIBRARY": "host"}
    command = [sys.executable, *TORCHRUN, "--nproc-per-node=2", str(tmp_path / "job.py")]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text() == f"<pynccl.Communicator rank {rank} of 2 on cpu> [3.0, 3.0, 3.0]"


# Ranks that never come, or cannot go on


def comes_to_a_job_of_4(place: Place, port: int) -> tuple[str, float]:
    set_environment(place.rank, 4, port)
    return message_of(pynccl.NcclTimeout, lambda: pynccl.init(timeout=2))


def test_ranks_that_never_come_are_named(bare: RankPool, port: int) -> None:
    for rank, (message, seconds) in enumerate(bare.run(2, comes_to_a_job_of_4, port)):
        assert f"rank {rank} of 4 waited 2 s: ranks [2, 3] never came" in message
        assert 1.9 < seconds < AT_ONCE


def comes_without_rank_0(place: Place, port: int) -> tuple[str, float]:
    set_environment(1, 2, port)
    return message_of(pynccl.NcclTimeout, lambda: pynccl.init(timeout=2))


def test_a_job_without_its_rank_0_says_where_it_was_looked_for(bare: RankPool, port: int) -> None:
    [(message, seconds)] = bare.run(1, comes_without_rank_0, port)
    assert f"rank 1 reached no store at 127.0.0.1:{port} within 2 s: has rank 0 started there?" in message
    assert seconds < AT_ONCE


def joins_alone(place: Place) -> tuple[str, float]:
    identity = pynccl.get_unique_id()
    return message_of(pynccl.NcclTimeout, lambda: Communicator.init(3, identity, 1, timeout=2))


def test_an_explicit_init_names_the_missing_ranks_too(bare: RankPool) -> None:
    [(message, seconds)] = bare.run(1, joins_alone)
    assert "ncclCommInitRank(rank=1, nranks=3) did not return within 2 s (timeout=2)" in message
    assert "[0, 2]" in message
    assert "were all ranks started, with the same world size and id?" in message
    assert 1.9 < seconds < AT_ONCE


def one_cannot_start(place: Place, port: int, broken: int) -> tuple[str, float]:
    set_environment(place.rank, place.size, port)
    if place.rank == broken:
        os.environ["PYNCCL_LIBRARY"] = "/nowhere/libnccl.so.2"
        return message_of(pynccl.NcclLibraryNotFound, pynccl.init)
    return message_of(pynccl.NcclRemoteError, pynccl.init)


@pytest.mark.parametrize("broken", [0, 2])
def test_a_rank_that_cannot_start_tells_the_others(bare: RankPool, port: int, broken: int) -> None:
    answers = bare.run(3, one_cannot_start, port, broken)
    for rank, (message, seconds) in enumerate(answers):
        assert "PYNCCL_LIBRARY=/nowhere/libnccl.so.2: " in message
        assert seconds < AT_ONCE
        if rank != broken:
            assert f"rank {broken} could not start: NcclLibraryNotFound: " in message


def outlives_rank_0(place: Place, port: int) -> tuple[str, float]:
    set_environment(place.rank, 3, port)
    if place.rank == 0:
        message_of(pynccl.NcclTimeout, lambda: pynccl.init(timeout=1))
        os._exit(0)
    return message_of(pynccl.NcclRemoteError, pynccl.init)


def test_the_end_of_the_process_that_serves_the_store_is_noticed(bare: RankPool, port: int) -> None:
    first, second = bare.outcomes(2, outlives_rank_0, port)
    assert "died: exit code 0" in first.report
    message, seconds = second.value
    assert "rank 1 of 3 lost the store at which the ranks meet" in message
    assert "rank 0, or torchrun's agent) has ended; look for its first error" in message
    assert seconds < AT_ONCE


# Other ways to meet


def by_file(place: Place, path: str) -> float:
    return total(pynccl.from_file(path, place.rank, place.size, timeout=20))


def test_ranks_meet_in_a_file(bare: RankPool, tmp_path: Path) -> None:
    assert bare.run(3, by_file, str(tmp_path / "meeting")) == [6.0] * 3


def by_classmethods(place: Place, path: str) -> list[float]:
    store = torch.distributed.FileStore(f"{path}.store", place.size)
    in_file = pynccl.Communicator.from_file(path, place.rank, place.size, timeout=20)
    at_store = pynccl.Communicator.from_store(store, place.rank, place.size, timeout=20)
    return [total(in_file), total(at_store)]


def test_a_file_and_a_store_make_communicators_by_classmethods_too(bare: RankPool, tmp_path: Path) -> None:
    assert bare.run(2, by_classmethods, str(tmp_path / "meeting")) == [[3.0, 3.0]] * 2


def comes_to_a_file_for_2(place: Place, path: str) -> tuple[str, float]:
    return message_of(pynccl.NcclTimeout, lambda: pynccl.from_file(path, 0, 2, timeout=1))


def test_a_rank_that_misses_a_meeting_in_a_file_is_named(bare: RankPool, tmp_path: Path) -> None:
    [(message, _)] = bare.run(1, comes_to_a_file_for_2, str(tmp_path / "meeting"))
    assert "rank 0 of 2 waited 1 s: ranks [1] never came" in message


def test_a_rank_beyond_the_size_is_refused_by_a_store() -> None:
    with pytest.raises(ValueError, match=r"rank is 3, expected 0\.\.1 for 2 ranks"):
        pynccl.from_store(torch.distributed.HashStore(), 3, 2)


def by_process_group(place: Place, path: str) -> list[float]:
    import torch.distributed as dist

    store = dist.FileStore(path, place.size)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size)
    try:
        results = [total(Communicator.from_process_group())]
        last_two = dist.new_group([place.size - 2, place.size - 1])
        if place.rank >= place.size - 2:
            results.append(total(from_process_group(last_two)))
        mesh = dist.init_device_mesh("cpu", (place.size,))
        return [*results, total(from_process_group(mesh))]
    finally:
        dist.destroy_process_group()


def test_a_process_group_becomes_a_communicator(bare: RankPool, tmp_path: Path) -> None:
    assert bare.run(3, by_process_group, str(tmp_path / "group")) == [[6.0, 6.0], [6.0, 3.0, 6.0], [6.0, 3.0, 6.0]]


def broken_process_group(place: Place, path: str, variable: str, value: str, own: Any) -> tuple[str, float]:
    """Rank 0 alone has a variable that is wrong, for which it raises `own`."""
    import torch.distributed as dist

    store = dist.FileStore(path, place.size)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size)
    try:
        if place.rank:
            return message_of(pynccl.NcclRemoteError, from_process_group)
        os.environ[variable] = value
        return message_of(own, from_process_group)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("variable", "value", "own"),
    [
        ("PYNCCL_LIBRARY", "/nowhere/libnccl.so.2", pynccl.NcclLibraryNotFound),
        ("LOCAL_RANK", "first", pynccl.NcclInvalidUsage),
    ],
)
def test_a_process_group_hears_of_a_rank_0_with_a_wrong_variable(
    bare: RankPool, tmp_path: Path, variable: str, value: str, own: Any
) -> None:
    given = str(tmp_path / "group"), variable, value, own
    for message, seconds in bare.run(2, broken_process_group, *given, timeout=20):
        assert variable in message or variable == "PYNCCL_LIBRARY"
        assert value in message
        assert seconds < AT_ONCE


def test_the_file_of_a_meeting_which_holds_the_id_is_its_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        _file_store(str(tmp_path / "meeting"), Clock(10)).set("id", b"the secret of the ranks")
    finally:
        os.umask(before)
    assert (tmp_path / "meeting").stat().st_mode & 0o777 == 0o600
