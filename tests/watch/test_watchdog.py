"""The watchdog on real ranks: who waits is told, on stderr, who is missing and at which line; and the wait can end."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hanging
import pytest
import torch
from hanging import all_reduce, elsewhere, group, on_a_stream, place_of, recv, said, split, standard_error
from ranks import HOST, RankPool

TIMEOUT = {"PYNCCL_WATCH_TIMEOUT": "0.5"}


@pytest.fixture(scope="module")
def watched() -> Iterator[RankPool]:
    """Ranks whose watchdogs speak soon."""
    pool = RankPool({**HOST, **TIMEOUT})
    yield pool
    pool.close()


def backward(comm: Any) -> None:
    import pynccl_autograd as functions

    y = functions.all_reduce(torch.ones(4, requires_grad=True), comm=comm, grad="sum")  # forward
    late(comm)
    y.sum().backward()  # backward


FOLDER: list[str] = []


def late(comm: Any) -> None:
    """Rank 1 goes on once rank 0's watchdog has spoken; rank 0 goes on once it waits for that."""
    there = Path(FOLDER[-1], "there")
    if comm.rank == 0:
        while not there.exists():
            time.sleep(0.01)
    else:
        there.touch()
        elsewhere(FOLDER[-1])


def waits(comm: Any, folder: str, names: list[str]) -> dict[str, str]:
    """Rank 1 comes late to these calls, which are made by both; what this rank's watchdog has said meanwhile."""
    import pynccl
    import pynccl_autograd  # noqa: F401  takes longer than the watchdog's patience

    bodies = [body for body in EXPECTED if body.__name__ in names]
    for body in bodies:
        FOLDER.append(f"{folder}/{body.__name__}")
        os.makedirs(FOLDER[-1], exist_ok=True)
        own = comm.split(0, config=pynccl.CommConfig(comm_name="mine"))
        for _ in range(2):
            own.all_reduce(torch.ones(2))  # on a busy machine this may take longer than the watchdog's patience
        with standard_error(FOLDER[-1], comm.rank):
            if body is not backward:
                late(own)
            body(own)
        own.destroy()
    return {body.__name__: said(f"{folder}/{body.__name__}", comm.rank) for body in bodies}


FLOATS = "FLOAT32 x 4"
NEVER = "rank 1 never entered {} (comm 'mine', 2 ranks, {})"
EXPECTED = {
    all_reduce: NEVER.format("all_reduce #3", f"{FLOATS}, {place_of('all_reduce')}"),
    on_a_stream: NEVER.format("all_reduce #3", f"{FLOATS}, {place_of('on_a_stream')}"),
    split: NEVER.format("split #3", place_of("split")),
    group: NEVER.format("all_gather #3", f"{FLOATS}, {place_of('group')}"),
    recv: "rank 1 never called send to rank 0",
    backward: "rank 1 never entered all_reduce #4 (AllReduce.backward of the forward call at "
    + place_of("forward", __file__),
}


def test_who_waits_is_told_who_is_missing_and_where(watched: RankPool, tmp_path: Path) -> None:
    asked = f"its main thread is in {place_of('elsewhere')} elsewhere"
    told: dict[str, str] = {}
    for attempt in range(5):  # on a busy machine, who is asked where it is may answer too late
        names = [body.__name__ for body in EXPECTED if asked not in told.get(body.__name__, "")]
        told.update(watched.run(2, waits, str(tmp_path / str(attempt)), names)[0])
        if all(asked in text for text in told.values()):
            break
    for body, expected in EXPECTED.items():
        text, name = told[body.__name__], body.__name__
        assert text.count(expected) == 1 and asked in text, (name, text)
        here = __file__ if body is backward else hanging.__file__
        assert place_of("forward" if body is backward else name, here) in text.partition("this rank's stack")[0], name
        assert re.search(rf"/{Path(here).name}:\d+ {name}\n", text), name  # in the stack


def stopped(comm: Any, folder: str) -> tuple[int, str]:
    pids = comm.all_gather(torch.tensor([os.getpid()])).tolist()

    def go_on() -> None:
        elsewhere(folder)
        os.kill(pids[1], signal.SIGCONT)

    comm.barrier()
    with standard_error(folder, comm.rank):
        if comm.rank == 0:
            threading.Thread(target=go_on).start()
        else:
            os.kill(os.getpid(), signal.SIGSTOP)
        comm.all_reduce(torch.ones(4))
    return os.getpid(), said(folder, comm.rank)


def test_a_stopped_rank_is_named_and_the_job_goes_on_with_it_and_ends_well(tmp_path: Path) -> None:
    folder = tmp_path / "watch"
    pool = RankPool({**HOST, **TIMEOUT, "PYNCCL_WATCH_DIR": str(folder)})
    (_, text), (pid, _) = pool.run(2, stopped, str(tmp_path))
    assert len(list(folder.glob("*"))) == 2
    pool.close()
    assert list(folder.iterdir()) == []
    assert text.count(f"rank 1's process {pid} is stopped (SIGSTOP, or a debugger): kill -CONT {pid}") == 1


# Waits that end


def raises(place: Any, folder: str) -> None:
    """A rank waits in vain, twice, while another communicator lives on."""
    import pynccl

    for body in (all_reduce, on_a_stream):
        own = f"{folder}/{body.__name__}"
        os.makedirs(own)
        sentence = f"rank 1 never entered all_reduce #1 (comm 'world', 2 ranks, {FLOATS}, {place_of(body.__name__)})"
        with standard_error(own, 0):
            other = pynccl.Communicator.init_all(1)[0]
            comms = pynccl.Communicator.init_all(2)
            for _ in range(2):
                with pytest.raises(pynccl.NcclTimeout, match=re.escape(sentence)):
                    body(comms[0])
            assert other.all_reduce(torch.ones(1)).item() == 1
            pynccl.abort(comms)
        assert sentence in said(own, 0)
        assert "the communicator is aborted (PYNCCL_WATCH_ACTION=raise)" in said(own, 0)


def test_the_blocked_call_raises_if_asked_to(tmp_path: Path) -> None:
    pool = RankPool({**HOST, **TIMEOUT, "PYNCCL_WATCH_ACTION": "raise"}, communicators=False)
    pool.run(1, raises, str(tmp_path))
    pool.close()
