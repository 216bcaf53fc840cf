"""Ranks that never come, cannot go on or contradict each other: the others hear of it, and at once where they can."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from meetings import AT_ONCE, End, end_of, free_port, interrupted, set_environment, total
from ranks import Place, RankPool
from stores import Counted
from torch.distributed.distributed_c10d import _set_pg_timeout

import pynccl
from pynccl.bindings.workers import Clock
from pynccl.bootstrap import env, from_process_group
from pynccl.bootstrap.rendezvous import Rendezvous

LATE = "NcclTimeout"


@pytest.fixture(scope="module")
def bare() -> Iterator[RankPool]:
    """Processes that have not met."""
    pool = RankPool(communicators=False)
    yield pool
    pool.close()


# Ranks that cannot go on, or contradict each other


def cannot_start(place: Place, port: int, broken: int) -> End:
    set_environment(place.rank, place.size, port)
    if place.rank == broken:
        os.environ["PYNCCL_LIBRARY"] = "/nowhere/libnccl.so.2"
    return end_of(pynccl.init)


@pytest.mark.parametrize("broken", [0, 2])
def test_a_rank_that_cannot_start_tells_the_others(bare: RankPool, broken: int) -> None:
    for rank, end in enumerate(bare.run(3, cannot_start, free_port(), broken)):
        assert end.error == ("NcclLibraryNotFound" if rank == broken else "NcclRemoteError")
        assert "PYNCCL_LIBRARY=/nowhere/libnccl.so.2: " in end.message
        assert rank == broken or f"rank {broken} could not start: NcclLibraryNotFound: " in end.message
        assert end.seconds < AT_ONCE


def claims(place: Place, port: int, said: list[tuple[int, int]]) -> End:
    set_environment(*said[place.rank], port)
    return end_of(pynccl.init)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            [(0, 2), (1, 3)],
            (") says there are 2 ranks, rank 1 (process ", ") says 3: WORLD_SIZE, or nranks, has to be the same on"),
        ),
        (
            [(0, 3), (1, 3), (1, 3)],
            ("two processes say that they are rank 1: process ", "every process needs a RANK of its own"),
        ),
    ],
    ids=["sizes", "ranks"],
)
def test_ranks_that_contradict_each_other_all_hear_of_it(bare: RankPool, said: Any, words: tuple[str, ...]) -> None:
    for end in bare.run(len(said), claims, free_port(), said):
        assert end.error == "NcclInvalidUsage" and all(word in end.message for word in words)
        assert end.seconds < AT_ONCE


def broken_process_group(place: Place, path: str, name: str, value: str) -> End:
    """Rank 0 alone has a variable that is wrong."""
    dist.init_process_group("gloo", store=dist.FileStore(path, place.size), rank=place.rank, world_size=place.size)
    if place.rank == 0:
        os.environ[name] = value
    try:
        return end_of(from_process_group)
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "value", "own"),
    [("PYNCCL_LIBRARY", "/nowhere/libnccl.so.2", "NcclLibraryNotFound"), ("LOCAL_RANK", "first", "NcclInvalidUsage")],
)
def test_a_process_group_hears_of_a_rank_0_with_a_wrong_variable(
    bare: RankPool, tmp_path: Path, name: str, value: str, own: str
) -> None:
    ends = bare.run(2, broken_process_group, str(tmp_path / "group"), name, value)
    assert [end.error for end in ends] == [own, "NcclRemoteError"]
    assert all(value in end.message and end.seconds < AT_ONCE for end in ends)


# Ranks that never come


def comes_to_a_job_of_4(place: Place, port: int) -> End:
    set_environment(place.rank, 4, port)
    return end_of(lambda: pynccl.init(timeout=1))


def test_ranks_that_never_come_are_named(bare: RankPool) -> None:
    for rank, end in enumerate(bare.run(2, comes_to_a_job_of_4, free_port())):
        assert end.error == LATE and f"rank {rank} of 4 waited 1 s: ranks [2, 3] never came" in end.message


def tries(place: Place, port: int, ranks: list[int], timeout: float) -> str:
    """How it ends for those of `ranks`."""
    if place.rank not in ranks:
        return ""
    set_environment(place.rank, place.size, port)
    return end_of(lambda: total(pynccl.init(timeout=timeout))).error or "met"


def test_ranks_that_missed_each_other_meet_at_the_next_call(bare: RankPool) -> None:
    port = free_port()
    assert bare.run(2, tries, port, [1], 0.3) == ["", LATE]
    assert bare.run(2, tries, port, [0], 0.3) == [LATE, ""]
    assert bare.run(2, tries, port, [0, 1], 50.0) == ["met", "met"]


def outlives_rank_0(place: Place, port: int) -> End:
    set_environment(place.rank, 3, port)
    if place.rank == 0:
        end_of(lambda: pynccl.init(timeout=1))
        os._exit(0)
    return end_of(pynccl.init)


def test_the_end_of_the_process_that_serves_the_store_is_noticed(bare: RankPool) -> None:
    first, second = bare.outcomes(2, outlives_rank_0, free_port())
    assert "died: exit code 0" in first.report
    assert second.value.error == "NcclRemoteError" and second.value.seconds < AT_ONCE
    assert "rank 1 of 3 lost the store at which the ranks meet" in second.value.message
    assert "rank 0, or torchrun's agent) has ended; look for its first error" in second.value.message


def fails_and_ends(place: Place, port: int, heard: str) -> End:
    set_environment(place.rank, 2, port)
    if place.rank:
        end = end_of(pynccl.init)
        Path(heard).touch()
        return end

    def sleep(seconds: float) -> None:
        while not os.path.exists(heard):
            time.sleep(0.01)

    env.time = SimpleNamespace(sleep=sleep)  # type: ignore[assignment]
    os.environ["PYNCCL_LIBRARY"] = "/nowhere/libnccl.so.2"
    end_of(pynccl.init)
    atexit._run_exitfuncs()
    os._exit(0)


def test_the_reason_outlives_the_rank_that_serves_the_store(bare: RankPool, tmp_path: Path) -> None:
    first, second = bare.outcomes(2, fails_and_ends, free_port(), str(tmp_path / "heard"))
    assert "died: exit code 0" in first.report
    assert second.value.error == "NcclRemoteError" and second.value.seconds < AT_ONCE
    assert "rank 0 could not start: NcclLibraryNotFound: PYNCCL_LIBRARY=/nowhere" in second.value.message


def one_is_interrupted(place: Place, port: int) -> End:
    set_environment(place.rank, 3, port)
    return interrupted(pynccl.init, after=1.0) if place.rank == 1 else end_of(pynccl.init)


def test_the_others_hear_of_a_rank_that_was_interrupted(bare: RankPool) -> None:
    end, own = bare.run(2, one_is_interrupted, free_port())
    assert own.error == "KeyboardInterrupt"
    assert (end.error, end.message) == ("NcclRemoteError", "rank 1 was interrupted (Ctrl-C)")
    assert max(end.seconds, own.seconds) < AT_ONCE


def has_a_peer_that_never_calls(place: Place, path: str) -> list[End]:
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=2, timeout=timedelta(seconds=60))
    if place.rank:
        store.wait(["done"], timedelta(seconds=50))
        return []
    ends = []
    for own_timeout in (1800.0, 0.5):
        _set_pg_timeout(timedelta(seconds=own_timeout))  # not for its start, which takes its time on a busy machine
        ends.append(end_of(lambda: from_process_group(timeout=0.5)))
    ends.append(interrupted(from_process_group))
    store.set("done", "")
    return ends


def test_a_process_group_with_a_late_rank_is_given_up(tmp_path: Path) -> None:
    pool = RankPool(communicators=False)  # its ranks are left with a group that does not answer
    ends, _ = pool.run(2, has_a_peer_that_never_calls, str(tmp_path / "group"))
    pool.close()
    assert [end.error for end in ends] == [LATE, LATE, "KeyboardInterrupt"]
    for end in ends[:2]:
        assert "rank 0 of 2 waited 0.5 s: ranks [1] never came" in end.message
    assert max(end.seconds for end in ends) < AT_ONCE


# The store


WORDS = ("the server", "again")


def meet(nranks: int, come: int, timeout: float) -> tuple[list[int], list[str]]:
    """Ranks 0..come-1 of nranks meet in threads: (operations of each but for turns of waiting, what each said)."""
    shared = dist.HashStore()
    stores = [Counted(shared, turns=("over", "rank/0")) for _ in range(come)]
    said = [""] * come

    def one(rank: int) -> None:
        try:
            said[rank] = Rendezvous(stores[rank], rank, nranks, Clock(timeout), *WORDS).join(b"id").decode()
        except pynccl.NcclTimeout as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(come)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [store.total() for store in stores], said


def test_ranks_ask_the_store_as_often_among_many_as_among_few() -> None:
    many, said = meet(48, 48, 50)
    assert set(said) == {"id"} and max(many) <= 8
    counts, said = meet(2000, 2, 0.5)
    assert max(counts) < 10  # who is missing is one question
    assert all("of 2000 waited 0.5 s: ranks [2, 3, 4, " in text and "1999] never came" in text for text in said)


def test_who_comes_last_hears_of_a_rank_that_came_and_failed() -> None:
    store = dist.HashStore()
    first = Rendezvous(store, 0, 2, Clock(50), *WORDS)
    first._come_in(b"id")  # the part of join() before it waits, in which it is interrupted
    first.report(KeyboardInterrupt())
    with pytest.raises(pynccl.NcclRemoteError, match="rank 0 was interrupted"):
        Rendezvous(store, 1, 2, Clock(50), *WORDS).join(b"")


class Slow(dict[str, str]):
    """A store that answers late, as one on another continent or on a busy machine."""

    def add(self, key: str, amount: int) -> int:
        time.sleep(0.4)
        self[key] = str(int(self.get(key, "0")) + amount)
        return int(self[key])

    def set(self, key: str, value: str) -> None:
        time.sleep(0.4)
        self[key] = value


def test_a_rank_that_cannot_start_tells_it_to_a_slow_store() -> None:
    store = Slow()
    Rendezvous(store, 1, 2, Clock(30), "a server", "come once").report(ValueError("no such device"))
    assert store["over"] == "remote\nrank 1 could not start: ValueError: no such device"
