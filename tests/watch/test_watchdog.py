"""The watchdog on real ranks: who waits is told, on stderr, who is missing and at which line; and nothing else."""

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
from hanging import (
    SPEAKS,
    all_reduce,
    barrier,
    elsewhere,
    group,
    on_a_stream,
    place_of,
    plan,
    recv,
    said,
    send,
    split,
    standard_error,
)
from processes import process
from ranks import HOST, RankPool

TIMEOUT = 0.5


@pytest.fixture(scope="module")
def watched() -> Iterator[RankPool]:
    """Ranks whose watchdogs speak soon."""
    pool = RankPool({**HOST, "PYNCCL_WATCH_TIMEOUT": str(TIMEOUT)})
    yield pool
    pool.close()


def init(comm: Any) -> None:
    import pynccl

    identity = torch.zeros(128, dtype=torch.uint8)
    if comm.rank == 0:
        identity[:] = torch.frombuffer(bytearray(bytes(pynccl.get_unique_id())), dtype=torch.uint8)
    comm.broadcast(identity, identity)
    late(comm)
    config = pynccl.CommConfig(comm_name="newer")
    pynccl.Communicator.init(comm.size, identity.numpy().tobytes(), comm.rank, config=config)  # init


def backward(comm: Any) -> None:
    import pynccl_autograd as functions

    y = functions.all_reduce(torch.ones(4, requires_grad=True), comm=comm, grad="sum")  # forward
    late(comm)
    y.sum().backward()  # backward


def loads(comm: Any) -> None:
    """What takes longer than the watchdog's patience."""
    import pynccl_autograd  # noqa: F401


# From where the other rank comes late, if not before all of it
LATE_WITHIN = (init, backward)
FOLDER: list[str] = []


def late(comm: Any, seconds: float = 0.0) -> None:
    """The last rank goes on once the others' watchdogs have spoken; they go on once it waits for that."""
    there = Path(FOLDER[-1], "there")
    if comm.rank < comm.size - 1:
        while not there.exists():
            time.sleep(0.01)
    else:
        there.touch()
        elsewhere(FOLDER[-1], range(comm.size - 1))
        time.sleep(seconds)


def waits(comm: Any, folder: str, names: list[str], seconds: float = 0.0) -> dict[str, str]:
    """The last rank comes late to these calls, which are made by all; what this rank's watchdog has said meanwhile."""
    import pynccl

    for name in names:
        body = globals()[name]
        FOLDER.append(f"{folder}/{name}")
        os.makedirs(FOLDER[-1], exist_ok=True)
        own = comm.split(0, config=pynccl.CommConfig(comm_name="mine"))
        for _ in range(2):
            own.all_reduce(torch.ones(2))  # on a busy machine this may take longer than the watchdog's patience
        with standard_error(FOLDER[-1], comm.rank):
            if body not in LATE_WITHIN:
                late(own, seconds)
            body(own)
        own.destroy()
    return {name: said(f"{folder}/{name}", comm.rank) for name in names}


FLOATS = "FLOAT32 x 4"
NEVER = "rank 1 never entered {} (comm 'mine', 2 ranks, {})"
EXPECTED = {
    all_reduce: NEVER.format("all_reduce #3", f"{FLOATS}, {place_of('all_reduce')}"),
    on_a_stream: NEVER.format("all_reduce #3", f"{FLOATS}, {place_of('on_a_stream')}"),
    split: NEVER.format("split #3", place_of("split")),
    barrier: NEVER.format("barrier #3", place_of("barrier")),
    plan: NEVER.format("all_reduce #3", f"{FLOATS}, {place_of('plan')}"),
    group: NEVER.format("all_gather #3", f"{FLOATS}, {place_of('group')}"),
    recv: "rank 1 never called send to rank 0",
    send: "rank 1 never called recv from rank 0",
    init: "nothing is known of rank 1 of comm 'newer': no record here",
    backward: "rank 1 never entered all_reduce #4 (AllReduce.backward of the forward call at "
    + place_of("forward", __file__),
}


def only_told(text: str) -> bool:
    """Whether a rank has said nothing, or that others wait for it: with its next look, or after the test."""
    heads = [line for line in text.splitlines() if not line.startswith(" ")]
    return set(heads) <= {f"{SPEAKS}other ranks wait for this one"}


@pytest.fixture(scope="module")
def told(watched: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], dict[str, str]]:
    """What the watchdogs of both ranks have said of each call."""
    watched.run(2, loads)
    first, other = watched.run(2, waits, str(tmp_path_factory.mktemp("waits")), [body.__name__ for body in EXPECTED])
    return first, other


@pytest.mark.parametrize("body", EXPECTED, ids=lambda body: body.__name__)
def test_who_waits_is_told_who_is_missing_and_where(told: tuple[dict[str, str], dict[str, str]], body: Any) -> None:
    text, other = (one[body.__name__] for one in told)
    assert body in LATE_WITHIN or only_told(other)
    assert text.count(EXPECTED[body]) == 1
    assert (f"its main thread is in {place_of('elsewhere')} elsewhere" in text) == (body is not init)
    here = __file__ if body in LATE_WITHIN else hanging.__file__
    marker = "forward" if body is backward else body.__name__
    assert place_of(marker, here) in text.partition("this rank's stack")[0]
    assert re.search(rf"/{Path(here).name}:\d+ {body.__name__}\n", text)  # in the stack


def test_all_that_wait_are_told_once(watched: RankPool, tmp_path: Path) -> None:
    *texts, other = watched.run(3, waits, str(tmp_path), ["all_reduce"], 1.5 * TIMEOUT)
    assert only_told(other["all_reduce"])
    for rank, text in enumerate(one["all_reduce"] for one in texts):
        assert text.count(SPEAKS) == 1
        assert f"{SPEAKS}rank {rank} of 3 (comm 'mine') has waited" in text
        assert f"rank 2 never entered all_reduce #3 (comm 'mine', 3 ranks, {FLOATS}, {place_of('all_reduce')})" in text


def stopped(comm: Any, folder: str) -> tuple[int, str]:
    pids = comm.all_gather(torch.tensor([os.getpid()])).tolist()

    def go_on() -> None:
        elsewhere(folder, [0])
        os.kill(pids[1], signal.SIGCONT)

    comm.barrier()
    with standard_error(folder, comm.rank):
        if comm.rank == 0:
            threading.Thread(target=go_on).start()
        else:
            os.kill(os.getpid(), signal.SIGSTOP)
        for _ in range(10):
            comm.all_reduce(torch.ones(4))  # stopped
    return os.getpid(), said(folder, comm.rank)


def test_a_stopped_rank_is_named_and_the_job_goes_on_with_it_and_ends_well(tmp_path: Path) -> None:
    folder = tmp_path / "watch"
    pool = RankPool({**HOST, "PYNCCL_WATCH_TIMEOUT": str(TIMEOUT), "PYNCCL_WATCH_DIR": str(folder)})
    (_, text), (pid, other) = pool.run(2, stopped, str(tmp_path))
    assert len(list(folder.glob("*"))) == 2
    pool.close()
    assert list(folder.iterdir()) == []
    assert text.count(f"rank 1's process {pid} is stopped (SIGSTOP, or a debugger): kill -CONT {pid}") == 1
    assert "is stopped" not in other


def several_threads(comm: Any, folder: str) -> str:
    import pynccl

    names = [f"t{i}" for i in range(6)]
    comms = [comm.split(0, config=pynccl.CommConfig(comm_name=name)) for name in names]
    comm.barrier()
    with standard_error(folder, comm.rank):
        if comm.rank == 1:
            elsewhere(folder, [0])
            while said(folder, 0).count(SPEAKS) < len(names):
                time.sleep(0.01)
        threads = [threading.Thread(target=all_reduce, args=(one,)) for one in comms]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return said(folder, comm.rank)


def test_many_threads_that_wait_are_all_told(watched: RankPool, tmp_path: Path) -> None:
    text, other = watched.run(2, several_threads, str(tmp_path))
    assert only_told(other) and text.count(SPEAKS) == 6
    for name in (f"t{i}" for i in range(6)):
        assert text.count(f"rank 1 never entered all_reduce #1 (comm '{name}', 2 ranks, {FLOATS}, ") == 1


def forks(comm: Any, folder: str) -> tuple[str, list[str]]:
    comm.all_reduce(torch.ones(2))
    if comm.rank == 1:
        return "", []
    child = os.fork()
    if child == 0:
        with standard_error(folder, 0):
            try:
                in_the_child(folder)
            except BaseException as error:
                Path(folder, "raised").write_text(repr(error))
        os._exit(0)
    os.waitpid(child, 0)
    return said(folder, 0), [one.read_text() for one in Path(folder).glob("raised")]


def in_the_child(folder: str) -> None:
    import pynccl

    assert "pynccl watchdog" not in [thread.name for thread in threading.enumerate()]
    assert not own_files()
    comms = pynccl.Communicator.init_all(2)
    assert own_files()
    waiter = threading.Thread(target=all_reduce, args=(comms[0],))
    waiter.start()
    elsewhere(folder, [0])
    all_reduce(comms[1])
    waiter.join()


def own_files() -> list[Path]:
    return list(Path(os.environ["PYNCCL_WATCH_DIR"]).glob(f"*-{os.getpid()}-*"))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_is_watched_once_it_has_a_communicator(watched: RankPool, tmp_path: Path) -> None:
    (text, raised), _ = watched.run(2, forks, str(tmp_path))
    assert raised == []
    assert text.count("rank 1 never entered all_reduce #1 (comm 'world', 2 ranks") == 1


# What is not said


DROPPED = """
import time
from pynccl.watch import watchdog
comm = make()
run = comm.plan.all_reduce(X, Y, stream=0)
run()
run()
del comm, run
gc.collect()
looks = watchdog._watchdog.looks
while watchdog._watchdog.looks < looks + 12:
    time.sleep(0.01)
"""


def test_nobody_waits_in_a_communicator_that_was_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYNCCL_WATCH_TIMEOUT", "0.2")
    ended = process(tmp_path, DROPPED)
    assert ended.code == 0 and "was never closed" in ended.err
    assert SPEAKS not in ended.err


def comes_late(comm: Any, folder: str, seconds: float) -> tuple[str, list[str]]:
    with standard_error(folder, comm.rank):
        comm.barrier()
        if comm.rank == 1:
            time.sleep(seconds)
        comm.all_reduce(torch.ones(4))
    return said(folder, comm.rank), [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize(
    ("settings", "seconds", "thread"),
    [
        ({"PYNCCL_WATCH_TIMEOUT": "30"}, 0.6, True),
        ({"PYNCCL_WATCH_TIMEOUT": "0"}, 0.4, True),
        ({"PYNCCL_WATCH_TIMEOUT": "0.1", "PYNCCL_WATCH": "off"}, 0.4, False),
    ],
    ids=["slow", "0", "off"],
)
def test_nothing_is_said(tmp_path: Path, settings: dict[str, str], seconds: float, thread: bool) -> None:
    pool = RankPool({**HOST, **settings})
    for text, threads in pool.run(2, comes_late, str(tmp_path), seconds):
        assert text == ""
        assert ("pynccl watchdog" in threads) == thread
    pool.close()
