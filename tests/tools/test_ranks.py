"""The pool that other tests rest on: a failure names the rank and its place, a hang its stacks; the next call works."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
import ranks as ranks_module
from ranks import Place, RankError, RankPool


@pytest.fixture(scope="module")
def bare() -> Iterator[RankPool]:
    """Ranks without communicators: the pool alone, whatever becomes of pynccl."""
    pool = RankPool(communicators=False)
    yield pool
    pool.close()


def fail(comm: Place, how: str) -> int:
    """On rank 1; rank 0 then waits for ever, rank 2 returns."""
    if comm.rank == 1 and how == "raises":
        raise ValueError("no luck")
    if comm.rank == 1 and how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank < 2:
        threading.Event().wait()
    return comm.rank


def process_id(comm: Place) -> int:
    return os.getpid()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises", ["rank 1 raised", "ValueError: no luck", "in fail"]),
        ("dies", ["rank 1 died: SIGKILL"]),
        ("hangs", ["rank 1 did not finish within 1 s; its stacks:"]),
    ],
)
def test_a_failure_names_rank_and_place_and_the_pool_starts_anew(
    bare: RankPool, how: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_module, "GRACE_SECONDS", 0.3)
    before = bare.run(3, process_id)
    with pytest.raises(RankError, match=r"^2 of 3 ranks failed") as caught:
        bare.run(3, fail, how, timeout=1 if how == "hangs" else 60)
    message = str(caught.value)
    assert all(text in message for text in [*said, "rank 0", "in fail"]) and "rank 2 r" not in message
    assert isinstance(caught.value.__cause__, ValueError) is (how == "raises")
    assert not set(bare.run(3, process_id)) & set(before)
