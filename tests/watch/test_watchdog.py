"""The watchdog on real ranks: waiting ranks report the missing rank and its line on stderr, and can abort the wait."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hanging
import pytest
import torch
from hanging import all_reduce, elsewhere, group, on_a_stream, place_of, recv, split, standard_error, stderr_of
from ranks import HOST, RankPool

TIMEOUT = {"PYNCCL_WATCH_TIMEOUT": "0.5"}


@pytest.fixture(scope="module")
def watched() -> Iterator[RankPool]:
    """Ranks whose watchdogs report soon."""
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
    """Rank 1 continues once rank 0's watchdog has reported. Rank 0 continues once rank 1 waits for that."""
    there = Path(FOLDER[-1], "there")
    if comm.rank == 0:
        while not there.exists():
            time.sleep(0.01)
    else:
        there.touch()
        elsewhere(FOLDER[-1])


def waits(comm: Any, folder: str, names: list[str]) -> dict[str, str]:
    """Both ranks make these calls, rank 1 late. Return what this rank's watchdog has reported meanwhile."""
    import pynccl
    import pynccl_autograd  # noqa: F401  takes longer than the watchdog's timeout

    bodies = [body for body in EXPECTED if body.__name__ in names]
    for body in bodies:
        FOLDER.append(f"{folder}/{body.__name__}")
        os.makedirs(FOLDER[-1], exist_ok=True)
        own = comm.split(0, config=pynccl.CommConfig(comm_name="mine"))
        for _ in range(2):
            own.all_reduce(torch.ones(2))  # on a busy machine this may take longer than the watchdog's timeout
        with standard_error(FOLDER[-1], comm.rank):
            if body is not backward:
                late(own)
            body(own)
        own.destroy()
    return {body.__name__: stderr_of(f"{folder}/{body.__name__}", comm.rank) for body in bodies}


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


def test_a_waiting_rank_reports_the_missing_rank_and_its_line(watched: RankPool, tmp_path: Path) -> None:
    position = f"its main thread is in {place_of('elsewhere')}, in threading.wait"
    reports: dict[str, str] = {}
    for attempt in range(5):  # on a busy machine, the late rank may answer the request for its stack too late
        names = [body.__name__ for body in EXPECTED if position not in reports.get(body.__name__, "")]
        reports.update(watched.run(2, waits, str(tmp_path / str(attempt)), names)[0])
        if all(position in text for text in reports.values()):
            break
    for body, expected in EXPECTED.items():
        text, name = reports[body.__name__], body.__name__
        assert text.count(expected) == 1 and position in text, (name, text)
        here = __file__ if body is backward else hanging.__file__
        assert place_of("forward" if body is backward else name, here) in text.partition("this rank's stack")[0], name
        assert re.search(rf"/{Path(here).name}:\d+ {name}\n", text), name  # in the stack


def stopped(comm: Any, folder: str) -> tuple[int, str]:
    pids = comm.all_gather(torch.tensor([os.getpid()])).tolist()

    def resume() -> None:
        elsewhere(folder, "is stopped")  # on a busy machine a report of the barrier may come first
        os.kill(pids[1], signal.SIGCONT)

    comm.barrier()
    with standard_error(folder, comm.rank):
        if comm.rank == 0:
            threading.Thread(target=resume).start()
        else:
            os.kill(os.getpid(), signal.SIGSTOP)
        comm.all_reduce(torch.ones(4))
    return os.getpid(), stderr_of(folder, comm.rank)


def test_a_stopped_rank_is_named_and_the_job_continues_once_it_resumes(tmp_path: Path) -> None:
    folder = tmp_path / "watch"
    pool = RankPool({**HOST, **TIMEOUT, "PYNCCL_WATCH_DIR": str(folder)})
    (_, text), (pid, _) = pool.run(2, stopped, str(tmp_path))
    assert len(list(folder.glob("*"))) == 2
    pool.close()
    assert list(folder.glob("*.watch")) == []
    assert text.count(f"rank 1's process {pid} is stopped (SIGSTOP, or a debugger): kill -CONT {pid}") == 1


# Waits that the watchdog aborts


def raises(place: Any, folder: str) -> None:
    """A rank waits in vain, twice, while another communicator stays usable."""
    import pynccl

    for body in (all_reduce, on_a_stream):
        body_folder = f"{folder}/{body.__name__}"
        os.makedirs(body_folder)
        sentence = f"rank 1 never entered all_reduce #1 (comm 'world', 2 ranks, {FLOATS}, {place_of(body.__name__)})"
        with standard_error(body_folder, 0):
            other = pynccl.Communicator.init_all(1)[0]
            comms = pynccl.Communicator.init_all(2)
            for _ in range(2):
                with pytest.raises(pynccl.NcclTimeout, match=re.escape(sentence)):
                    body(comms[0])
            assert other.all_reduce(torch.ones(1)).item() == 1
            pynccl.abort(comms)
        assert sentence in stderr_of(body_folder, 0)
        assert "the communicator is aborted (PYNCCL_WATCH_ACTION=raise)" in stderr_of(body_folder, 0)


def test_the_blocked_call_raises_with_watch_action_raise(tmp_path: Path) -> None:
    pool = RankPool({**HOST, **TIMEOUT, "PYNCCL_WATCH_ACTION": "raise"}, communicators=False)
    pool.run(1, raises, str(tmp_path))
    pool.close()


# Several ranks in one thread

_ONE_THREAD = """
import threading, torch, pynccl
from pynccl.watch import watchdog
comms, x = pynccl.init_all(2), torch.ones(3)
def note(): watchdog._watchdog._note_one_thread(comms[0]._track)
threads = [threading.Thread(target=comm.all_reduce, args=(x,)) for comm in comms]
for thread in threads: thread.start()
for thread in threads: thread.join()
note()
def group():
    with pynccl.group():
        for comm in comms: comm.all_reduce(x)
group()
def look():  # while the group runs
    while any(comm._track.has_returned(comm._track.head) for comm in comms): pass
    note()
thread = threading.Thread(target=look)
thread.start(); group(); thread.join()
print("the threads of the ranks differed, or they were in a group", flush=True)
{call}
"""


@pytest.mark.parametrize("call", ["comms[0].all_reduce(x)", "comms[1].barrier()", "comms[0].split(0)"])
def test_a_thread_that_waits_for_another_rank_of_its_own_is_told_of_groups(call: str, tmp_path: Path) -> None:
    """Soon, and once; not if each rank has its thread."""
    (program := tmp_path / "cell.py").write_text(_ONE_THREAD.format(call=call))
    slow = {"PYNCCL_HOST_LINK": "latency=500ms"}
    environment = {**os.environ, **HOST, **slow, "PYNCCL_WATCH_DIR": str(tmp_path / "watch"), "PYTHONUNBUFFERED": "1"}
    options: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
    with subprocess.Popen([sys.executable, str(program)], **options) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("the threads")
            line = len(program.read_text().splitlines())
            who = f"rank {call[6]} of 2 (comm 'world') waits at cell.py:{line} for other ranks"
            assert process.stdout.readline() == f"pynccl: {who}, which are in this process too\n"
            assert "    with pynccl.group():" in [process.stdout.readline().rstrip()[2:] for _ in range(2)]
        finally:
            process.kill()
