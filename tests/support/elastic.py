"""Ranks of an elastic communicator, some of which are killed. Their store is in the process of the test."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import pytest
import ranks
from ranks import HOST, Place, RankPool
from torch.distributed import TCPStore

import pynccl
from pynccl import Communicator

SECONDS = 20.0  # within which the ranks must meet


def join(place: Place, port: int) -> Communicator:
    """Make the communicator of generation 0."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=SECONDS))
    return pynccl.from_store(store, place.rank, place.size, elastic=True, timeout=SECONDS)


def kill_self() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


class ElasticRanks:
    """Runs function(place, port of the store, *args) on ranks that may die."""

    def __init__(self) -> None:
        self.pool = RankPool(HOST, communicators=False)

    def run(self, n: int, killed: set[int] | None, function: Callable[..., Any], *args: Any) -> dict[int, Any]:
        """Return the results of the ranks that return: all but those `killed`, if given."""
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        outcomes = self.pool.outcomes(n, function, store.port, *args, timeout=50)
        dead = {one.rank for one in outcomes if one.report.startswith(f"rank {one.rank} died: SIGKILL")}
        wrong = [one.report for one in outcomes if one.report and one.rank not in dead]
        assert not wrong, "\n\n".join(wrong)
        assert killed is None or dead == killed
        return {one.rank: one.value for one in outcomes if one.rank not in dead}


@contextmanager
def elastic_ranks() -> Iterator[ElasticRanks]:
    found = ElasticRanks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "GRACE_SECONDS", 60.0)  # the others go on after a death
        yield found
    found.pool.close()
