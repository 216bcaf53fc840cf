"""What a program has posted and does not wait for is no wait: neither the watchdog nor the hang tool reports it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_groups import process_group
from ranks import HOST, Place, RankPool

from pynccl.tools.hang import jobs
from pynccl.watch.verdict import judge

SECONDS = 40.0  # until the watchdog has reported
TIMEOUT = 0.3  # of the watchdog


def recv(x: torch.Tensor, comm: Any) -> Callable[[], object]:
    work = dist.irecv(x, 1)
    assert work is not None
    return work.wait


def send(x: torch.Tensor, comm: Any) -> Callable[[], object]:
    work = dist.isend(x, 1)
    assert work is not None
    return work.wait


def all_reduce(x: torch.Tensor, comm: Any) -> Callable[[], object]:
    return dist.all_reduce(x, async_op=True).wait


def future(x: torch.Tensor, comm: Any) -> Callable[[], object]:
    work = dist.all_reduce(x, async_op=True)
    return lambda: work.get_future().wait()


def start(x: torch.Tensor, comm: Any) -> Callable[[], object]:
    import pynccl_autograd as ad

    return ad.start(ad.all_reduce, x, comm, grad="sum").wait


def stream(x: torch.Tensor, comm: Any) -> Callable[[], object]:
    import pynccl

    side = pynccl.create_stream()
    comm.all_reduce(x, stream=side)
    return side.synchronize


def close(x: torch.Tensor, comm: Any) -> Callable[[], object]:
    import pynccl

    side: Any = pynccl.create_stream()
    comm.all_reduce(x, stream=side)
    return side.close


def chained_streams(x: torch.Tensor, comm: Any) -> Callable[[], object]:
    import pynccl

    side, last = pynccl.create_stream(), pynccl.create_stream()
    comm.all_reduce(x, stream=side)
    last.wait(side)
    return lambda: (last.synchronize(), side)


POSTS = (recv, send, all_reduce, future, start, stream, close, chained_streams)
# What rank 1 calls for each, once rank 0's watchdog has reported that it waits.
ANSWERS: dict[Any, Callable[[torch.Tensor, Any], object]] = {
    recv: lambda x, comm: dist.send(x, 0),
    send: lambda x, comm: dist.recv(x, 0),
    all_reduce: lambda x, comm: dist.all_reduce(x),
    future: lambda x, comm: dist.all_reduce(x),
}


def sentence() -> str:
    """Return what the hang tool says, also of short waits."""
    job, _, _ = jobs.find([os.environ["PYNCCL_WATCH_DIR"]], None)
    return judge(job.processes).sentence


def polls(count: int) -> None:
    """Let this process's watchdog poll a few times."""
    from pynccl.watch import watchdog

    dog = watchdog._watchdog
    assert dog is not None
    first, end = dog.polls, time.monotonic() + SECONDS
    while dog.polls < first + count and time.monotonic() < end:
        time.sleep(0.01)


def _reported(log: Path) -> bool:
    return log.exists() and "stack, innermost" in log.read_text()


def post_and_wait(place: Place, path: str, folder: str) -> dict[str, tuple[str, str, str]]:
    """Rank 0 posts each call, waits for it, and rank 1 answers then. Return what rank 0's watchdog printed before the
    wait, what the hang tool said then, and what the watchdog printed after it."""
    import pynccl
    from pynccl.host import stream as host_stream

    found = {}
    with process_group("pynccl", place, path):
        comm, x = pynccl.Communicator.from_process_group(), torch.ones(3)
        for post in POSTS:
            log = Path(folder, f"{post.__name__}{place.rank}")
            dist.barrier()  # on a busy machine the watchdog may report it: before the redirection
            file = os.open(log, os.O_WRONLY | os.O_CREAT)
            os.dup2(file, 2)
            os.close(file)
            if place.rank == 0:
                wait = post(x, comm)
                until = time.monotonic() + 2 * TIMEOUT
                while time.monotonic() < until:
                    polls(2)
                before, said = log.read_text(), sentence()
                wait()
                found[post.__name__] = (before, said, log.read_text())
            else:
                waiting, end = Path(folder, f"{post.__name__}0"), time.monotonic() + SECONDS
                while not _reported(waiting) and time.monotonic() < end:
                    time.sleep(0.01)
                ANSWERS.get(post, lambda x, comm: comm.all_reduce(x))(x, comm)
        done = dist.all_reduce(x, async_op=True)
        done.wait()
        done.get_future().wait()  # of a completed call
        assert not host_stream._waits
    return found


@pytest.mark.timeout(300)
def test_a_posted_call_is_reported_once_the_program_waits_for_it(tmp_path: Path) -> None:
    pool = RankPool(
        {**HOST, "PYNCCL_WATCH_TIMEOUT": str(TIMEOUT), "PYNCCL_WATCH_DIR": str(tmp_path / "watch")},
        communicators=False,
    )
    found, _ = pool.run(2, post_and_wait, str(tmp_path / "store"), str(tmp_path), timeout=240)
    pool.close()
    assert list(found) == [post.__name__ for post in POSTS]
    for name, (before, said, after) in found.items():
        assert before == "" and said.startswith("no rank is stuck"), (name, before, said)
        assert "rank 1 never " in after and "rank 0 has waited " in after, (name, after)
