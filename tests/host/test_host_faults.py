"""No wait outlives a failure: killed, frozen and interrupted ranks, forks, early exits; the error names who is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from host_calls import TRANSPORT
from ranks import HOST, Place, RankPool

import pynccl
from pynccl import Communicator
from pynccl.host import init as host_init

ROOT = Path(__file__).parents[2]


# What ranks do for ever


def reducing(comm: Communicator, count: int, _: int) -> Callable[[], object]:
    x = torch.ones(count)
    return lambda: comm.all_reduce(x, x, op="max")


def messages(comm: Communicator, count: int, _: int) -> Callable[[], object]:
    """In a ring: a rank talks to its neighbours alone."""
    x, y = torch.ones(count), torch.zeros(count)

    def ring() -> None:
        with pynccl.group():
            comm.send(x, (comm.rank + 1) % comm.size)
            comm.recv(y, (comm.rank - 1) % comm.size)

    return ring


def joining(comm: Communicator, _: int, victim: int) -> Callable[[], object]:
    """The victim is killed between saying hello and connecting."""
    uid = torch.tensor(list(bytes(pynccl.get_unique_id())), dtype=torch.uint8)
    identity = bytes(comm.broadcast(uid, root=0).tolist())
    if comm.rank == victim:
        vars(host_init)["Connecting"] = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    return lambda: Communicator.init(comm.size, identity, comm.rank, timeout=30)


Body = Callable[[Communicator, int, int], Callable[[], object]]


def until_one_is_lost(comm: Communicator, what: Body, how: int, count: int, victim: int, folder: str) -> str:
    """One that is frozen is killed when all others have failed, or the pool would wait for it."""
    pids = comm.all_gather(torch.tensor([os.getpid()])).tolist()
    call = what(comm, count, victim)
    killer = (victim + 2) % comm.size  # which does not talk to the victim in a ring
    if what is not joining and comm.rank == killer:
        threading.Timer(0.2, os.kill, (pids[victim], how)).start()
    with pytest.raises(pynccl.NcclRemoteError) as failed:
        while True:
            call()
    comm.abort()
    Path(folder, str(comm.rank)).touch()
    if comm.rank == killer and how == signal.SIGSTOP:
        while len(os.listdir(folder)) < comm.size - 1:
            time.sleep(0.01)
        os.kill(pids[victim], signal.SIGKILL)
    return str(failed.value)


@pytest.mark.parametrize(
    ("mode", "what", "how", "count", "victim"),
    [
        ("shm", reducing, signal.SIGKILL, 4 << 20, 0),
        ("sockets", messages, signal.SIGKILL, 1 << 20, 2),
        ("shm", joining, signal.SIGKILL, 0, 0),
        ("sockets", joining, signal.SIGKILL, 0, 2),
        ("shm", reducing, signal.SIGSTOP, 4, 0),  # rank 0 has the store
        ("sockets", messages, signal.SIGSTOP, 4, 1),
    ],
)
def test_a_lost_rank_is_named_by_all(
    tmp_path: Path, mode: str, what: Body, how: signal.Signals, count: int, victim: int
) -> None:
    pool = RankPool({**HOST, TRANSPORT: mode, "PYNCCL_HOST_TIMEOUT": "2" if how == signal.SIGSTOP else None})
    with contextlib.closing(pool):
        outcomes = pool.outcomes(4, until_one_is_lost, what, how, count, victim, str(tmp_path))
    assert "died: SIGKILL" in outcomes.pop(victim).report
    for outcome in outcomes:
        assert not outcome.report
        text = outcome.value
        assert f"rank {victim}" in text or "the store of the process that made the unique id" in text
        says = "within the time-out, frozen or late" if how == signal.SIGSTOP else "its process has ended"
        assert what is joining or says in text
        assert "rank -1" not in text


# Interrupted


def interrupted_calls(_: Place) -> list[str]:
    """Those in which Ctrl-C was heard."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    small, large = torch.ones(4), torch.ones(1 << 20)

    def in_a_group(comm: Communicator) -> None:
        with pynccl.group():
            comm.send(small, 1)
            comm.recv(small.clone(), 1)

    def on_a_stream(comm: Communicator) -> None:
        stream = pynccl.create_stream()
        comm.all_reduce(small, small, stream=stream)
        stream.synchronize()

    calls: dict[str, Callable[[Communicator], object]] = {
        "small": lambda comm: comm.all_reduce(small, small),
        "large": lambda comm: comm.all_reduce(large, large),
        "recv": lambda comm: comm.recv(small, 1),
        "send": lambda comm: comm.send(large, 1),
        "group": in_a_group,
        "plan": lambda comm: comm.plan.all_reduce(small, small)(),
        "split": lambda comm: comm.split(0),
        "stream": on_a_stream,
        "signal": lambda comm: comm.wait_signal(1, stream=0),
        "init": lambda _: Communicator.init(2, pynccl.get_unique_id(), 0),
    }
    unheard = list(calls)
    for name, call in calls.items():
        comms = Communicator.init_all(2)
        try:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            call(comms[0])
        except KeyboardInterrupt:
            unheard.remove(name)
        with pytest.raises(pynccl.NcclInvalidArgument):  # nothing is left for the next call
            comms[1].library.check(comms[1].library.ncclMemFree(1), "ncclMemFree")
        pynccl.abort(comms)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return unheard


@pytest.mark.parametrize("mode", ["shm", "sockets"])
def test_ctrl_c_is_heard_in_every_blocking_call(mode: str) -> None:
    with contextlib.closing(RankPool({**HOST, TRANSPORT: mode}, communicators=False)) as pool:
        assert pool.run(1, interrupted_calls) == [[]]


# The end of a process

ENDS = """
import os, sys, torch, pynccl
from host_calls import call, init_all
from pynccl.host import HostStream
data = torch.zeros(4)
for os.environ["PYNCCL_HOST_TRANSPORT"] in ("shm", "sockets"):
    comms = pynccl.Communicator.init_all(2)
    stream, large = pynccl.create_stream(), torch.ones(1 << 20)
    comms[0].all_reduce(large, large, stream=stream)  # under way, on a thread that the child does not have
    if (child := os.fork()) == 0:
        try:
            comms[1].all_reduce(data)
        except pynccl.NcclInvalidUsage as error:
            print("child:", "inherited through a fork" in str(error), flush=True)
        sys.exit(7)
    print("parent:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    comms[1].all_reduce(torch.ones(1 << 20))  # over the connections that the child has left alone
    stream.synchronize()
    print(large[0].item(), flush=True)
    pynccl.abort(comms)
one, _ = init_all(2)  # by the functions of C: nobody ends it
stream = HostStream()
for name, *arguments in (("ncclRecv", 4, 7, 1), ("ncclAllReduce", data.data_ptr(), 4, 7, 0)):
    call(name, data.data_ptr(), *arguments, one, stream.handle)
print("leaving")
"""


def test_a_process_ends_whatever_it_has_forked_or_queued() -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests/support", "PYNCCL_LIBRARY": "host"}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", ENDS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "terminate" not in done.stderr and "Traceback" not in done.stderr
    assert done.stdout.splitlines() == ["child: True", "parent: 7", "2.0"] * 2 + ["leaving"]
