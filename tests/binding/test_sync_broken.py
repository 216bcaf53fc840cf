"""The source of sync_state dies while it sends: no rank goes on with a part of its state."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from elastic import SECONDS, ElasticRanks, elastic_ranks, join, kill_self
from ranks import Place
from torch import Tensor

from pynccl import Communicator, NcclError
from pynccl.bootstrap import sync_state


@pytest.fixture(scope="module")
def elastic() -> Iterator[ElasticRanks]:
    with elastic_ranks() as found:
        yield found


def go_on(place: Place, port: int, steps: list[int], copied: int) -> tuple[int, list[float]] | str:
    """Rank 1 dies when it has sent `copied` of two tensors. Return step and state, or the error that ends the program.

    steps  of each rank, which are also the values of its state"""
    comm, step, copy = join(place, port), steps[place.rank], sync_state._copy
    state = [torch.full((3,), float(step)) for _ in range(2)]
    sent: list[Tensor] = []

    def copy_or_die(group: Communicator, one: Tensor) -> None:
        if place.rank == 1 and len(sent) == copied:
            kill_self()
        sent.append(one)
        copy(group, one)

    sync_state._copy = copy_or_die
    while True:
        try:
            step = comm.agree(step, timeout=SECONDS)  # also if sync_state then fails
            comm.sync_state(*state, timeout=SECONDS)
            assert comm.agree(step) == step == comm.agree(step)
            return step, [one.mean().item() for one in state]
        except NcclError:
            comm = comm.survivors(timeout=SECONDS)
        except RuntimeError as error:
            assert comm.agree(2) == 2  # from a checkpoint
            return str(error)


@pytest.mark.parametrize("copied", [0, 1])
def test_another_rank_that_has_the_newest_state_sends_it(elastic: ElasticRanks, copied: int) -> None:
    assert elastic.run(4, {1}, go_on, [3, 4, 3, 4], copied) == dict.fromkeys((0, 2, 3), (4, [4.0, 4.0]))


def test_ranks_without_a_whole_state_say_so(elastic: ElasticRanks) -> None:
    found = elastic.run(3, {1}, go_on, [3, 4, 2], 1)
    assert set(found) == {0, 2}
    assert all(str(text).startswith("agree: no rank has a whole state") for text in found.values())
