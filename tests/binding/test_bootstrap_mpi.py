"""Ranks meet by MPI. A module of mpi4py's shape stands in, over a process group of torch."""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

import pytest
import torch.distributed as dist
from meetings import AT_ONCE, End, end_of, total
from ranks import Place, RankPool

from pynccl import Communicator

MULTIPLE, FUNNELED = 3, 1


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


def install(place: Place, level: int) -> Comm:
    comm = Comm(place)
    names = {"COMM_WORLD": comm, "COMM_TYPE_SHARED": 7, "THREAD_MULTIPLE": MULTIPLE, "Query_thread": lambda: level}
    sys.modules["mpi4py"] = types.ModuleType("mpi4py")
    sys.modules["mpi4py"].MPI = types.SimpleNamespace(**names)  # type: ignore[attr-defined]
    return comm


def meets(place: Place, path: str) -> dict[str, Any]:
    """In turn; a collective that is given up leaves the group useless, and comes last."""
    store = dist.FileStore(path, place.size)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size)
    found: dict[str, Any] = {}
    for level in (MULTIPLE, FUNNELED):
        comm = install(place, level)
        found[f"level {level}"] = total(Communicator.from_mpi(timeout=50)), comm.threads == {"MainThread"}
    install(place, MULTIPLE)
    wrong: list[Any] = [3, [], "world"]
    found["wrong"] = [end_of(lambda given=given: Communicator.from_mpi(given)) for given in wrong]
    found["fails"] = end_of(lambda: Communicator.from_mpi(device="cuda" if place.rank else None))
    if place.rank:
        store.wait(["done"])
    else:
        found["late"] = end_of(lambda: Communicator.from_mpi(timeout=1.0))
        store.set("done", "")
    return found


@pytest.fixture(scope="module")
def met(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank."""
    pool = RankPool(communicators=False)
    try:
        return pool.run(2, meets, str(tmp_path_factory.mktemp("mpi") / "store"))
    finally:
        pool.close()


def test_the_ranks_of_mpi_become_a_communicator(met: list[dict[str, Any]]) -> None:
    for found in met:
        assert found[f"level {MULTIPLE}"] == (3.0, False)
        assert found[f"level {FUNNELED}"] == (3.0, True)  # MPI is called in the main thread alone


def test_what_goes_wrong_is_said(met: list[dict[str, Any]]) -> None:
    first, second = met
    for end in first["wrong"]:
        assert end.error == "TypeError"
        assert "expected an mpi4py communicator, or None for COMM_WORLD" in end.message
    assert second["fails"].error == "ValueError" and "the host library works on the CPU" in second["fails"].message
    assert first["fails"].error == "NcclRemoteError"
    assert first["fails"].message == f"rank 1 could not start: ValueError: {second['fails'].message}"
    late: End = first["late"]
    assert late.error == "NcclTimeout" and late.seconds < AT_ONCE
    assert "rank 0 of the MPI communicator's 2 waited 1 s for the others" in late.message
