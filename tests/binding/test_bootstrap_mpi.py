"""Ranks meet by MPI. Where mpi4py is not installed, a module of its shape stands in, over a process group of torch."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from meetings import End, end_of, total
from ranks import Place, RankPool

import pynccl
from pynccl import Communicator

MULTIPLE, FUNNELED = 3, 1


@pytest.fixture
def bare() -> Iterator[RankPool]:
    """Processes of their own for each test: a collective that was given up leaves them useless."""
    pool = RankPool(communicators=False)
    yield pool
    pool.close()


class Comm:
    """What from_mpi uses of mpi4py.MPI.Comm."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.threads: set[str] = set()

    def Get_rank(self) -> int:
        return self.place.rank

    def Get_size(self) -> int:
        return self.place.size

    def Split_type(self, kind: int) -> Comm:
        assert kind == 7
        dist.barrier()
        return self

    def Free(self) -> None:
        pass

    def allgather(self, sent: Any) -> list[Any]:
        self.threads.add(threading.current_thread().name)
        parts: list[Any] = [None] * self.place.size
        dist.all_gather_object(parts, sent)
        return parts


def install(place: Place, path: str, level: int) -> Comm:
    store = dist.FileStore(path, place.size)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size)
    comm = Comm(place)
    names = {"COMM_WORLD": comm, "COMM_TYPE_SHARED": 7, "THREAD_MULTIPLE": MULTIPLE, "Query_thread": lambda: level}
    sys.modules["mpi4py"] = types.ModuleType("mpi4py")
    sys.modules["mpi4py"].MPI = types.SimpleNamespace(**names)  # type: ignore[attr-defined]
    return comm


def by_mpi(place: Place, path: str, level: int) -> tuple[float, bool]:
    comm = install(place, path, level)
    return total(Communicator.from_mpi(timeout=20)), comm.threads == {"MainThread"}


@pytest.mark.parametrize("level", [MULTIPLE, FUNNELED])
def test_the_ranks_of_mpi_become_a_communicator(bare: RankPool, tmp_path: Path, level: int) -> None:
    in_main_thread = level != MULTIPLE
    assert bare.run(2, by_mpi, str(tmp_path / "mpi"), level) == [(3.0, in_main_thread)] * 2


def one_fails(place: Place, path: str) -> End:
    install(place, path, MULTIPLE)
    return end_of(lambda: Communicator.from_mpi(timeout=20, device="cuda" if place.rank else None))


def test_a_rank_that_cannot_start_tells_the_others_by_mpi(bare: RankPool, tmp_path: Path) -> None:
    first, second = bare.run(2, one_fails, str(tmp_path / "mpi"))
    assert second.error == "ValueError" and "the host library works on the CPU" in second.message
    assert first.error == "NcclRemoteError"
    assert first.message == f"rank 1 could not start: ValueError: {second.message}"


def nonsense(place: Place, path: str) -> list[End]:
    wrong: list[Any] = [3, [], "world"]
    install(place, path, MULTIPLE)
    return [end_of(lambda given=given: Communicator.from_mpi(given, timeout=5)) for given in wrong]


def test_what_is_no_communicator_of_mpi_is_refused(bare: RankPool, tmp_path: Path) -> None:
    [ends] = bare.run(1, nonsense, str(tmp_path / "mpi"))
    assert [end.error for end in ends] == ["TypeError"] * 3
    assert all("expected an mpi4py communicator, or None for COMM_WORLD" in end.message for end in ends)


def one_is_late(place: Place, path: str) -> End:
    install(place, path, MULTIPLE)
    store = dist.FileStore(f"{path}-done", 2)
    if place.rank:
        store.wait(["done"])
        return End("", "", 0.0)
    end = end_of(lambda: pynccl.Communicator.from_mpi(timeout=1.0))
    store.set("done", "")
    return end


def test_a_rank_that_never_calls_is_given_up_by_mpi(bare: RankPool, tmp_path: Path) -> None:
    end, _ = bare.run(2, one_is_late, str(tmp_path / "mpi"))
    assert end.error == "NcclTimeout"
    assert "rank 0 of the MPI communicator's 2 waited 1 s for the others" in end.message
    assert end.seconds < 2.0
