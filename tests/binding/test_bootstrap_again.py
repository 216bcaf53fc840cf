"""Ranks meet again at a store that they, or processes before them, have used: after success, failures and deaths."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import Place, RankPool
from rendezvous_servers import AT_ONCE, End, end_of, free_port, total

import pynccl

TIMEOUT = 1.0
SIZE = 3


def lasting_store(path: str) -> Any:
    """Return the store of a file that stays when nobody has it open: a FileStore of a world size may remove it."""
    return dist.FileStore(path)


def store_at(place: Place, where: str) -> Any:
    """Return the store of a file, or of a port that rank 0 serves."""
    if where.startswith("/"):
        return lasting_store(where)
    limit = timedelta(seconds=50)
    return dist.TCPStore("127.0.0.1", int(where), is_master=place.rank == 0, wait_for_workers=False, timeout=limit)


def wait_until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 50
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def pass_gate(store: Any, name: str, n: int) -> None:
    """Wait until n ranks are here."""
    store.add(f"gates/{name}", 1)
    wait_until(lambda: int(store.get(f"gates/{name}")) >= n)


def init(store: Any, place: Place, timeout: float = 50, **options: Any) -> End:
    """Make a communicator at the store; check its sum."""

    def check() -> None:
        found = total(pynccl.from_store(store, place.rank, place.size, timeout=timeout, **options))
        assert found == place.size * (place.size + 1) / 2

    return end_of(check)


@pytest.mark.parametrize("kind", ["file", "port"])
def test_one_store_serves_20_calls_and_another_world_size(processes: RankPool, tmp_path: Path, kind: str) -> None:
    ends = processes.run(SIZE, init_many_times, str(tmp_path / "store") if kind == "file" else str(free_port()))
    assert [end.error for rank in ends for end in rank] == [""] * (SIZE * 20 + SIZE - 1 + SIZE)


def init_many_times(place: Place, where: str) -> list[End]:
    store = store_at(place, where)
    ends = [init(store, place) for _ in range(20)]
    if place.rank < SIZE - 1:
        ends.append(init(store, Place(place.rank, SIZE - 1)))
    pass_gate(store, "two", SIZE)  # calls at one store are made one after the other
    ends.append(init(store, place))
    pass_gate(store, "end", SIZE)  # rank 0 may be serving it
    return ends


# A failure in between: which rank, how; then all ranks call it again


def fail_to_start(place: Place, store: Any, broken: int) -> End:
    """One rank cannot start, before or after the others come."""
    if place.rank != broken:
        return init(store, place)
    return init(store, place, device="cuda:0")


def fail_first(place: Place, store: Any, broken: int) -> End:
    """One rank has failed before the others come."""
    if place.rank == broken:
        end = init(store, place, device="cuda:0")
        pass_gate(store, "failed first", SIZE)
        return end
    pass_gate(store, "failed first", SIZE)
    return init(store, place)


def exit_while_waiting(place: Place, store: Any, ended: int) -> End:
    """A signal handler ends one rank while it waits for the last one, which comes later."""
    gate = f"exit of {ended}"
    if place.rank == SIZE - 1:
        pass_gate(store, gate, SIZE)
        return init(store, place)
    before = signal.signal(signal.SIGALRM, lambda *_: sys.exit("SIGALRM"))
    signal.setitimer(signal.ITIMER_REAL, 0.5 if place.rank == ended else 0)
    end = init(store, place)
    signal.signal(signal.SIGALRM, before)
    pass_gate(store, gate, SIZE)
    return end


def come_alone(place: Place, store: Any, alone: int) -> End:
    return init(store, place, TIMEOUT) if place.rank == alone else End("", "", 0)


def miss(place: Place, store: Any, missing: int) -> End:
    """One rank does not come."""
    return init(store, place, TIMEOUT) if place.rank != missing else End("", "", 0)


def come_late(place: Place, store: Any, late: int) -> End:
    """One rank comes when the others have given up."""
    if place.rank == late:
        pass_gate(store, f"late {late}", SIZE)
        return init(store, place, TIMEOUT)
    end = init(store, place, TIMEOUT)
    pass_gate(store, f"late {late}", SIZE)
    return end


FAILURES: list[tuple[Callable[[Place, Any, int], End], int, list[str], str]] = [
    (fail_first, 2, ["NcclRemoteError", "NcclRemoteError", "ValueError"], "the host library works on the CPU"),
    (exit_while_waiting, 1, ["NcclRemoteError", "SystemExit", "NcclRemoteError"], "SIGALRM"),
    (exit_while_waiting, 0, ["SystemExit", "NcclRemoteError", "NcclRemoteError"], "SIGALRM"),
    (come_alone, 1, ["", "NcclTimeout", ""], "ranks [0, 2] never joined"),
    (come_alone, 0, ["NcclTimeout", "", ""], "ranks [1, 2] never joined"),
    (fail_to_start, 0, ["ValueError", "NcclRemoteError", "NcclRemoteError"], "the host library works on the CPU"),
    (fail_to_start, 2, ["NcclRemoteError", "NcclRemoteError", "ValueError"], "the host library works on the CPU"),
    (miss, 0, ["", "NcclTimeout", "NcclTimeout"], "ranks [0] never joined"),
    (miss, 1, ["NcclTimeout", "", "NcclTimeout"], "ranks [1] never joined"),
    (come_late, 2, ["NcclTimeout", "NcclTimeout", "NcclTimeout"], "ranks [2] never joined"),
]


def fail_and_repeat(place: Place, where: str) -> list[tuple[End, End]]:
    store, ends = store_at(place, where), []
    for number, (failure, rank, _, _) in enumerate(FAILURES):
        failed = failure(place, store, rank)
        pass_gate(store, f"after {number}", SIZE)
        ends.append((failed, init(store, place)))
    pass_gate(store, "end", SIZE)
    return ends


@pytest.mark.parametrize("kind", ["file", "port"])
def test_all_ranks_can_init_again_after_one_failed(processes: RankPool, tmp_path: Path, kind: str) -> None:
    found = processes.run(SIZE, fail_and_repeat, str(tmp_path / "store") if kind == "file" else str(free_port()))
    for number, (failure, rank, errors, message) in enumerate(FAILURES):
        ends = [of_rank[number] for of_rank in found]
        case = (failure.__name__, rank, ends)
        assert [failed.error for failed, _ in ends] == errors, case
        assert all(message in failed.message for failed, _ in ends if failed.error), case
        assert all(failed.seconds < AT_ONCE for failed, _ in ends), case
        assert [again.error for _, again in ends] == [""] * SIZE, case
    late = found[2][-1][0].message
    assert late.startswith("rank 2 of 3 waited 1 s: it came too late, and rank 0 has not called again since\n  rank ")


# Processes that died while they waited, at a store that outlives them


def die_in_rendezvous(place: Place, path: str) -> None:
    """Join as ranks 0 and 2 of 3, and end once both have."""
    store, rank = lasting_store(path), 2 * place.rank
    threading.Thread(target=lambda: pynccl.from_store(store, rank, SIZE, timeout=50), daemon=True).start()
    wait_until(lambda: store.check(["1/rank/0/1", "1/rank/2/1"]))
    os._exit(3)


def start_after_deaths(place: Place, path: str) -> End:
    store = lasting_store(path)
    if place.rank == 0:  # the other ranks find the rendezvous of the dead ranks, and wait there
        wait_until(lambda: store.check(["1/rank/1/1", "1/rank/2/2"]))
    return init(store, place)


def test_new_processes_replace_those_that_died_in_rendezvous(processes: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    outcomes = processes.outcomes(2, die_in_rendezvous, path)
    assert all("died: exit code 3" in outcome.report for outcome in outcomes)
    assert [end.error for end in processes.run(SIZE, start_after_deaths, path)] == [""] * SIZE


def start_two_after_deaths(place: Place, path: str) -> End:
    store = lasting_store(path)
    if place.rank == 0:  # rank 1 finds the rendezvous of the dead ranks, which had another world size
        wait_until(lambda: store.check(["1/differs"]))
    return init(store, place)


def test_new_processes_of_another_world_size_replace_those_that_died(processes: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    processes.outcomes(2, die_in_rendezvous, path)
    assert [end.error for end in processes.run(2, start_two_after_deaths, path)] == [""] * 2


def fail_alone(place: Place, path: str) -> End:
    """Fail to start as rank 2, which the others, that are not there yet, would learn."""
    return init(lasting_store(path), Place(2, SIZE), device="cuda:0")


def come_alone_at(place: Place, path: str) -> End:
    return come_alone(place, lasting_store(path), 1)


def start_after_failure(place: Place, path: str) -> End:
    return init(lasting_store(path), place)


def test_failure_of_an_earlier_run_does_not_reach_a_later_one(processes: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    [end] = processes.run(1, fail_alone, path)
    assert end.error == "ValueError"
    later = RankPool(communicators=False)
    try:
        alone = later.run(SIZE, come_alone_at, path)[1]
        assert alone.error == "NcclTimeout" and "ranks [0, 2] never joined" in alone.message
        assert "before this process started, the last call at this store failed: rank 2 could not" in alone.message
        assert [end.error for end in later.run(SIZE, start_after_failure, path)] == [""] * SIZE
    finally:
        later.close()


# Contradictions


def init_as(place: Place, path: str, ranks: list[int]) -> End:
    return init(lasting_store(path), Place(ranks[place.rank], SIZE))


@pytest.mark.parametrize("ranks", [[0, 0], [1, 1, 0], [0, 0, 1]])
def test_two_processes_with_one_rank_raise_on_all_ranks(processes: RankPool, tmp_path: Path, ranks: list[int]) -> None:
    for end in processes.run(len(ranks), init_as, str(tmp_path / "store"), ranks):
        assert end.error == "NcclInvalidUsage" and end.seconds < AT_ONCE, end
        assert f"two processes have rank {min(ranks, key=lambda rank: -ranks.count(rank))}: process " in end.message


def init_in_two_threads(place: Place, path: str) -> list[End]:
    store, ends = dist.FileStore(path, 2), []  # the other rank is missing
    threads = [threading.Thread(target=lambda: ends.append(init(store, Place(0, 2)))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends


def test_two_calls_at_the_same_time_and_store_raise(processes: RankPool, tmp_path: Path) -> None:
    [ends] = processes.run(1, init_in_two_threads, str(tmp_path / "store"))
    assert len(ends) == 2
    for end in ends:
        assert end.error == "NcclInvalidUsage" and "rank 0 called it twice at the same time (process " in end.message
        assert end.seconds < AT_ONCE
