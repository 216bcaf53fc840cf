"""How often a rank asks the store at which ranks meet: as often among many ranks as among few."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist
from stores import Counted

from pynccl import NcclRemoteError, NcclTimeout
from pynccl.bindings.workers import Clock
from pynccl.bootstrap.rendezvous import Rendezvous

WORDS = ("the server", "again")


def meet(nranks: int, come: int, timeout: float) -> tuple[list[int], list[str]]:
    """Ranks 0..come-1 of nranks meet in threads: (operations of each but for turns of waiting, what each said)."""
    shared = dist.HashStore()
    stores = [Counted(shared, turns=("over", "rank/0")) for _ in range(come)]
    said = [""] * come

    def one(rank: int) -> None:
        try:
            said[rank] = Rendezvous(stores[rank], rank, nranks, Clock(timeout), *WORDS).join(b"id").decode()
        except NcclTimeout as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(come)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [store.total() for store in stores], said


def test_ranks_that_meet_ask_the_store_as_often_among_48_as_among_3() -> None:
    few, said = meet(3, 3, 20)
    many, others = meet(48, 48, 20)
    assert set(said + others) == {"id"}
    most, least = (max(found) for found in (many, few))
    assert most <= 8
    assert most - least <= 1  # who comes last finds all there, and does not look at rank 0's size


@pytest.mark.parametrize("nranks", [8, 2000])
def test_who_is_missing_is_one_question_whatever_the_number_of_ranks(nranks: int) -> None:
    [first, second], said = meet(nranks, 2, 0.5)
    assert first < 10 and second < 10
    assert all(f"of {nranks} waited 0.5 s: ranks [2, 3, 4, " in text for text in said)
    assert all(f"{nranks - 1}] never came" in text for text in said)


def test_who_comes_last_hears_of_a_rank_that_came_and_failed() -> None:
    store = dist.HashStore()
    first = Rendezvous(store, 0, 2, Clock(20), *WORDS)
    first._come_in(b"id")  # the part of join() before it waits, in which it is interrupted
    first.report(KeyboardInterrupt())
    with pytest.raises(NcclRemoteError, match="rank 0 was interrupted"):
        Rendezvous(store, 1, 2, Clock(20), *WORDS).join(b"")
