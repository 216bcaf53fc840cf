"""If a rank is killed inside a collective, the other ranks raise soon and do not hang."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import ranks
import torch
from ranks import Place, RankPool
from rendezvous_servers import AT_ONCE, free_port, set_environment

import pynccl


def lose_a_rank(place: Place, port: int, victim: int, streamed: bool) -> tuple[str, str, float]:
    """Return (first error, error of the next call, seconds from the last success to the first error)."""
    set_environment(place.rank, place.size, port)
    comm = pynccl.init()
    x, stream = torch.ones(1 << 14), pynccl.create_stream() if streamed else None
    comm.all_reduce(x, x, op="max")
    if place.rank == victim:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    last = time.monotonic()
    with pytest.raises(pynccl.NcclRemoteError) as first:
        while True:
            comm.all_reduce(x, x, op="max", stream=stream)
            if stream is not None:
                stream.synchronize()
            last = time.monotonic()
    seconds = time.monotonic() - last
    with pytest.raises(pynccl.NcclRemoteError) as second:
        comm.all_reduce(torch.ones(1))
    comm.abort()
    return str(first.value), str(second.value), seconds


@pytest.mark.parametrize(("victim", "streamed"), [(0, False), (2, True)])  # rank 0 serves the stores
def test_killed_rank_raises_on_other_ranks(monkeypatch: pytest.MonkeyPatch, victim: int, streamed: bool) -> None:
    monkeypatch.setattr(ranks, "GRACE_SECONDS", AT_ONCE)  # the other ranks need time to report
    pool = RankPool(communicators=False)
    outcomes = pool.outcomes(4, lose_a_rank, free_port(), victim, streamed)
    pool.close()
    assert "died: SIGKILL" in outcomes.pop(victim).report
    for outcome in outcomes:
        assert not outcome.report
        first, second, seconds = outcome.value
        assert streamed or first.startswith("all_reduce(count=16384, FLOAT32, MAX) failed")
        assert second.startswith("all_reduce(count=1, FLOAT32, SUM) failed")
        assert "REMOTE_ERROR" in first and "REMOTE_ERROR" in second
        assert "a peer died or became unreachable: look for the first error in the other ranks' logs" in second
        assert seconds < AT_ONCE
