"""A failure ends every wait: killed, frozen and interrupted ranks, forks, early exits. Errors name the lost rank."""

from __future__ import annotations

import contextlib
import ctypes
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
from pynccl import Communicator, NcclRemoteError
from pynccl.host import init as host_init

ROOT = Path(__file__).parents[2]


# Calls that ranks repeat until one is lost


def reducing(comm: Communicator, count: int, _: int) -> Callable[[], object]:
    x = torch.ones(count)
    return lambda: comm.all_reduce(x, x, op="max")


def messages(comm: Communicator, count: int, _: int) -> Callable[[], object]:
    """A ring: each rank communicates with its neighbors only."""
    x, y = torch.ones(count), torch.zeros(count)

    def ring() -> None:
        with pynccl.group():
            comm.send(x, (comm.rank + 1) % comm.size)
            comm.recv(y, (comm.rank - 1) % comm.size)

    return ring


def joining(comm: Communicator, _: int, victim: int) -> Callable[[], object]:
    """The victim is killed after it has announced itself and before it connects."""
    uid = torch.tensor(list(bytes(pynccl.get_unique_id())), dtype=torch.uint8)
    identity = bytes(comm.broadcast(uid, root=0).tolist())
    if comm.rank == victim:
        vars(host_init)["Connecting"] = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    return lambda: Communicator.init(comm.size, identity, comm.rank, timeout=30)


Body = Callable[[Communicator, int, int], Callable[[], object]]


def run_until_a_rank_is_lost(comm: Communicator, what: Body, how: int, count: int, victim: int, folder: str) -> str:
    """Return this rank's error. A frozen victim is killed once all others have failed, else the pool waits for it."""
    pids = comm.all_gather(torch.tensor([os.getpid()])).tolist()
    call = what(comm, count, victim)
    killer = (victim + 2) % comm.size  # not a neighbor of the victim in the ring
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
        ("shm", reducing, signal.SIGSTOP, 4, 0),  # rank 0 hosts the store
        ("sockets", messages, signal.SIGSTOP, 4, 1),
    ],
)
def test_all_survivors_name_a_lost_rank(
    tmp_path: Path, mode: str, what: Body, how: signal.Signals, count: int, victim: int
) -> None:
    pool = RankPool({**HOST, TRANSPORT: mode, "PYNCCL_HOST_TIMEOUT": "2" if how == signal.SIGSTOP else None})
    with contextlib.closing(pool):
        outcomes = pool.outcomes(4, run_until_a_rank_is_lost, what, how, count, victim, str(tmp_path))
    assert "died: SIGKILL" in outcomes.pop(victim).report
    for outcome in outcomes:
        assert not outcome.report
        text = outcome.value
        assert f"rank {victim}" in text or "the store of the process that made the unique id" in text
        expected = "within the timeout (frozen or late)" if how == signal.SIGSTOP else "its process has ended"
        assert what is joining or expected in text
        assert "rank -1" not in text


# Interrupted


class Stopped(BaseException):
    """An exception of the user's own."""


# Exception that the signal handler of a test raises -> what the other ranks read about it.
RAISED = {
    KeyboardInterrupt: "it was interrupted (Ctrl-C)",
    SystemExit: "it raised SystemExit(7)",
    TimeoutError: "it raised TimeoutError(7)",
    Stopped: "it raised Stopped(7)",
}


def raise_in_handler(kind: type[BaseException]) -> None:
    """Make SIGALRM raise `kind(7)`."""

    def handler(*_: object) -> None:
        raise kind(7)

    signal.signal(signal.SIGALRM, handler)


def interrupted_calls(_: Place, kind: type[BaseException]) -> list[str]:
    """Return the calls that an exception of a signal handler did not end."""
    raise_in_handler(kind)
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
        "barrier": lambda comm: comm.barrier(),
        "recv": lambda comm: comm.recv(small, 1),
        "send": lambda comm: comm.send(large, 1),
        "group": in_a_group,
        "plan": lambda comm: comm.plan.all_reduce(small, small)(),
        "window": lambda comm: comm.window(torch.ones(1 << 12)),
        "split": lambda comm: comm.split(0),
        "stream": on_a_stream,
        "signal": lambda comm: comm.wait_signal(1, stream=0),
        "init": lambda _: Communicator.init(2, pynccl.get_unique_id(), 0),
    }
    left = list(calls)
    for name, call in calls.items():
        comms = Communicator.init_all(2)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with contextlib.suppress(pynccl.NcclError):
            try:
                call(comms[0])
            except kind as error:
                assert error.args == (7,)
                left.remove(name)
        with pytest.raises(pynccl.NcclInvalidArgument):  # no exception is left for the next call
            comms[1].library.check(comms[1].library.ncclMemFree(1), "ncclMemFree")
        pynccl.abort(comms)
    return left


@pytest.mark.parametrize("kind", RAISED)
@pytest.mark.parametrize("mode", ["shm", "sockets"])
def test_an_exception_of_a_signal_handler_ends_every_blocking_call(mode: str, kind: type[BaseException]) -> None:
    with contextlib.closing(RankPool({**HOST, TRANSPORT: mode}, communicators=False)) as pool:
        assert pool.run(1, interrupted_calls, kind) == [[]]


def raised_in_recv(comm: Communicator, kind: type[BaseException]) -> str:
    """Rank 0 waits for rank 1, and its signal handler raises. Return what each rank reads."""
    if comm.rank == 0:
        raise_in_handler(kind)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(kind):
            comm.recv(torch.ones(4), 1)
        with pytest.raises(pynccl.NcclError) as failed:
            comm.recv(torch.ones(4), 1)
    else:
        while comm.async_error() == 0:
            pass
        with pytest.raises(NcclRemoteError) as failed:
            comm.send(torch.ones(4), 0)
    comm.abort()
    return str(failed.value)


@pytest.mark.parametrize("kind", RAISED)
def test_the_other_ranks_read_which_exception_a_signal_handler_raised(kind: type[BaseException]) -> None:
    with contextlib.closing(RankPool()) as pool:
        own, others = pool.run(2, raised_in_recv, kind)
    happened = RAISED[kind].removeprefix("it ")
    assert f"on rank 0 of 2 {happened}" in own
    assert f"lost rank 0: it {happened}" in others


def left_split(comm: Communicator) -> str:
    """Rank 0 leaves split() by an exception before rank 1 calls it. Return what rank 1 reads."""
    other = comm.split(0)
    if comm.rank == 0:
        raise_in_handler(SystemExit)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(SystemExit):
            comm.split(0)
        other.send(torch.ones(1), 1)
        return ""
    other.recv(torch.ones(1), 0)
    child = comm.split(0)
    with pytest.raises(NcclRemoteError) as failed:
        child.all_reduce(torch.ones(1))
    return str(failed.value)


def test_a_rank_that_left_split_aborts_the_new_communicator() -> None:
    with contextlib.closing(RankPool()) as pool:
        assert "lost rank 0: it aborted the communicator" in pool.run(2, left_split)[1]


def async_exception(_: Place) -> list[str]:
    """Set an exception in a thread that waits in the host library; return what it raises."""
    comms, ended = Communicator.init_all(2), []

    def wait() -> None:
        try:
            comms[0].recv(torch.ones(1), 1)
        except BaseException as error:
            ended.append(type(error).__name__)

    thread = threading.Thread(target=wait)
    thread.start()
    while not comms[0]._track.head:  # it is in the call
        pass
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Stopped)) == 1
    thread.join(20)
    return ended


def test_an_exception_that_another_thread_sets_ends_the_wait() -> None:
    with contextlib.closing(RankPool(HOST, communicators=False)) as pool:
        assert pool.run(1, async_exception) == [["Stopped"]]


def aborts_and_raises(_: Place) -> None:
    """A signal handler aborts the communicator that the main thread waits on, and exits."""
    comms = Communicator.init_all(2)

    def handler(*_: object) -> None:
        comms[0].abort()
        raise SystemExit(7)

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(SystemExit):
        comms[0].recv(torch.ones(1), 1)


def test_a_signal_handler_can_abort_the_communicator_and_exit() -> None:
    with contextlib.closing(RankPool(HOST, communicators=False)) as pool:
        pool.run(1, aborts_and_raises)


# Exit of a process

ENDS = """
import os, sys, torch, pynccl
from host_calls import call, init_all
from pynccl.host import HostStream
data = torch.zeros(4)
for os.environ["PYNCCL_HOST_TRANSPORT"] in ("shm", "sockets"):
    comms = pynccl.Communicator.init_all(2)
    stream, large = pynccl.create_stream(), torch.ones(1 << 20)
    comms[0].all_reduce(large, large, stream=stream)  # in progress, on a thread that the child does not have
    if (child := os.fork()) == 0:
        try:
            comms[1].all_reduce(data)
        except pynccl.NcclInvalidUsage as error:
            print("child:", "inherited through a fork" in str(error), flush=True)
        sys.exit(7)
    print("parent:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    comms[1].all_reduce(torch.ones(1 << 20))  # over the connections that the child has not closed
    stream.synchronize()
    print(large[0].item(), flush=True)
    pynccl.abort(comms)
raw, _ = init_all(2)  # through the C functions: it is never destroyed
stream = HostStream()
for name, *arguments in (("ncclRecv", 4, 7, 1), ("ncclAllReduce", data.data_ptr(), 4, 7, 0)):
    call(name, data.data_ptr(), *arguments, raw, stream.handle)
print("leaving")
"""


def test_a_process_exits_despite_forks_and_queued_operations() -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests/support", "PYNCCL_LIBRARY": "host"}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", ENDS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "terminate" not in done.stderr and "Traceback" not in done.stderr
    assert done.stdout.splitlines() == ["child: True", "parent: 7", "2.0"] * 2 + ["leaving"]
