"""No wait outlives a failure: killed, frozen and interrupted ranks, forks, early exits; the error names who is lost."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from host_calls import kill_later
from ranks import HOST, Place, RankPool

import pynccl
from pynccl import Communicator
from pynccl.bindings.abi import Result
from pynccl.host import connect, init as host_init
from pynccl.host.failure import HostFailure

ROOT = Path(__file__).parents[2]
MODES = ("shm", "sockets")


@pytest.fixture
def pools() -> Iterator[Callable[..., RankPool]]:
    """Makes pools of ranks that a test may kill, over a transport; with a time-out that is to elapse, or without."""
    made: list[RankPool] = []

    def pool(transport: str, timeout: str | None = None, **options: bool) -> RankPool:
        names = {"PYNCCL_HOST_TRANSPORT": transport, "PYNCCL_HOST_TIMEOUT": timeout}
        made.append(RankPool({**HOST, **names}, **options))  # type: ignore[arg-type]
        return made[-1]

    yield pool
    for one in made:
        one.close()


# What ranks do for ever; each by calls of its own.


def reducing(comm: Communicator, count: int) -> Callable[[], object]:
    x = torch.ones(count)
    return lambda: comm.all_reduce(x, x, op="max")


def messages(comm: Communicator, count: int) -> Callable[[], object]:
    """In a ring: a rank talks to its neighbours alone."""
    x, y = torch.ones(count), torch.zeros(count)

    def ring() -> None:
        with pynccl.group():
            comm.send(x, (comm.rank + 1) % comm.size)
            comm.recv(y, (comm.rank - 1) % comm.size)

    return ring


def splitting(comm: Communicator, _: int) -> Callable[[], object]:
    def once() -> None:
        child = comm.split(0, -comm.rank)  # in which the ranks have other numbers
        assert child is not None
        child.destroy()

    return once


def joining(comm: Communicator, victim: int) -> Callable[[], object]:
    """The victim is killed between saying hello and connecting."""
    uid = torch.tensor(list(bytes(pynccl.get_unique_id())), dtype=torch.uint8)
    identity = bytes(comm.broadcast(uid, root=0).tolist())
    if comm.rank == victim:
        connect.Connecting.run = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    return lambda: Communicator.init(comm.size, identity, comm.rank, timeout=30)


def lost(comm: Communicator, call: Callable[[], object]) -> str:
    with pytest.raises(pynccl.NcclRemoteError) as failed:
        while True:
            call()
    comm.abort()
    return str(failed.value)


# Killed


def until_one_dies(comm: Communicator, what: Callable[..., Callable[[], object]], count: int, victim: int) -> str:
    call = what(comm, count)
    if what is not joining:
        kill_later(comm, victim, 0.2)
    return lost(comm, call)


WAYS = ((reducing, 4 << 20, 0), (messages, 3, 1), (messages, 1 << 20, 2))
IN_CALLS = [(mode, *way) for mode in MODES for way in WAYS]
IN_INITS = [("shm", splitting, 0, 2), ("shm", joining, 0, 0), ("sockets", joining, 2, 2)]


@pytest.mark.parametrize(("mode", "what", "count", "victim"), IN_CALLS + IN_INITS)
def test_a_killed_rank_is_named_by_all(
    pools: Callable[..., RankPool], mode: str, what: Callable[..., Callable[[], object]], count: int, victim: int
) -> None:
    outcomes = pools(mode).outcomes(3, until_one_dies, what, count, victim)
    assert "died: SIGKILL" in outcomes.pop(victim).report
    for outcome in outcomes:
        assert not outcome.report
        text = outcome.value
        if what is splitting:
            assert "ncclCommSplit" in text and f"rank {victim}" in text
        elif what is joining:  # rank 0 has the store
            store = victim == 0 and "the store of the process that made the unique id" in text
            assert store or (f"rank {victim}" in text and "its process has ended" in text)
        else:
            assert f"lost rank {victim}: its process has ended" in text
        assert "rank -1" not in text


# Frozen


def until_one_freezes(
    comm: Communicator, what: Callable[..., Callable[[], object]], count: int, victim: int, folder: str
) -> str:
    """The victim is killed when all others have failed, or the pool would wait for it."""
    pids = comm.all_gather(torch.tensor([os.getpid()])).tolist()
    call = what(comm, count)
    if what is splitting and comm.rank == victim:  # where the ranks of the child, which are connected, agree
        vars(host_init)["agree"] = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
    killer = (victim + 2) % comm.size  # which, of four, does not talk to the victim in a ring
    if what is not splitting and comm.rank == killer:
        threading.Timer(0.2, os.kill, (pids[victim], signal.SIGSTOP)).start()
    text = lost(comm, call)
    Path(folder, str(comm.rank)).touch()
    if comm.rank == killer:
        while len(os.listdir(folder)) < comm.size - 1:
            time.sleep(0.01)
        os.kill(pids[victim], signal.SIGKILL)
    return text


@pytest.mark.parametrize(
    ("mode", "what", "size", "count", "victim"),
    [
        ("shm", reducing, 3, 4, 0),  # rank 0 has the store
        ("sockets", reducing, 3, 4 << 20, 0),
        ("shm", messages, 4, 4, 1),
        ("sockets", messages, 4, 4, 1),
        ("sockets", splitting, 3, 0, 0),
    ],
)
def test_a_frozen_rank_is_named_by_all(
    pools: Callable[..., RankPool],
    tmp_path: Path,
    mode: str,
    what: Callable[..., Callable[[], object]],
    size: int,
    count: int,
    victim: int,
) -> None:
    pool = pools(mode, "0.7")
    outcomes = pool.outcomes(size, until_one_freezes, what, count, victim, str(tmp_path), timeout=60)
    says = "its rank 2 is rank 0 of this one" if what is splitting else "within the time-out, frozen or late"
    assert "died: SIGKILL" in outcomes.pop(victim).report
    for outcome in outcomes:
        assert not outcome.report
        assert f"rank {victim}" in outcome.value and says in outcome.value


# Interrupted


def interrupted_calls(_: Place) -> dict[str, bool]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    small, large = torch.ones(4), torch.ones(1 << 20)

    def in_a_group(comm: Communicator) -> None:
        with pynccl.group():
            comm.send(small, 1)
            comm.recv(small.clone(), 1)

    def several(comm: Communicator) -> None:
        others = Communicator.init_all(2)
        with pynccl.group():
            for one in (others[0], comm):
                one.all_reduce(small)

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
        "several": several,
        "barrier": lambda comm: comm.barrier(),
        "plan": lambda comm: comm.plan.all_reduce(small, small)(),
        "split": lambda comm: comm.split(0),
        "stream": on_a_stream,
        "signal": lambda comm: comm.wait_signal(1, stream=0),
        "init": lambda _: Communicator.init(2, pynccl.get_unique_id(), 0),
    }
    heard = {}
    for name, call in calls.items():
        comms = Communicator.init_all(2)
        try:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            call(comms[0])
        except KeyboardInterrupt:
            heard[name] = True
        with pytest.raises(pynccl.NcclInvalidArgument):  # nothing is left for the next call
            comms[1].library.check(comms[1].library.ncclMemFree(1), "ncclMemFree")
        pynccl.abort(comms)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return {name: heard.get(name, False) for name in calls}


@pytest.mark.parametrize("mode", MODES)
def test_ctrl_c_is_heard_in_every_blocking_call(pools: Callable[..., RankPool], mode: str) -> None:
    (heard,) = pools(mode, communicators=False).run(1, interrupted_calls)
    assert all(heard.values()), heard


# The end of a process

ENDS = """
import os, sys, torch, pynccl
from pynccl.comm import finalize
from host_calls import call, init_all
from pynccl.host import HostStream
finalize.EXIT_SECONDS = 0.5  # communicators whose calls were left behind do not close
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
try:
    pynccl.Communicator.init(2, pynccl.get_unique_id(), 0, timeout=0.5)
except pynccl.NcclTimeout as error:
    print(str(error).splitlines()[0])
comm, other = pynccl.Communicator.init_all(2)
comm.timeout = 0.5
try:
    comm.split(0)
except pynccl.NcclTimeout as error:
    print(str(error).splitlines()[0])
third, fourth = init_all(2)  # by the functions of C: nobody ends them
streams = [HostStream(), HostStream()]
call("ncclRecv", data.data_ptr(), 4, 7, 1, third, streams[0].handle)
streams[1].wait(streams[0].record())
for i in range(3):
    call("ncclAllReduce", data.data_ptr(), data.data_ptr(), 4, 7, 0, third, streams[i % 2].handle)
print("leaving")
"""


def test_a_process_ends_whatever_it_has_forked_left_behind_or_queued() -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests/support", "PYNCCL_LIBRARY": "host"}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", ENDS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    *forked, init, split, leaving = done.stdout.splitlines()
    assert (done.returncode, leaving) == (0, "leaving")
    assert "terminate" not in done.stderr and "Traceback" not in done.stderr
    assert forked == ["child: True", "parent: 7", "2.0"] * 2
    assert init.startswith("ncclCommInitRank(") and "still waits for ranks [1]" in init
    assert split.startswith("ncclCommSplit(color=0, key=0)") and "still waits for ranks [1]" in split


# Connections


def test_a_rank_whose_connections_break_at_once_is_an_error_that_names_it() -> None:
    """Its process is being killed: connections are accepted, and reset before or after the greeting."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(0.3)
        own = connect.Listener(local=True)
        broken = connect.read_endpoint(own.endpoint)._replace(port=door.getsockname()[1])

        def reset_all() -> None:
            with contextlib.suppress(TimeoutError):
                for _ in range(40):
                    sock, _ = door.accept()
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    sock.close()
            door.close()

        resetting = threading.Thread(target=reset_all)
        resetting.start()
        names, endpoints = ["rank 0", "rank 1"], [json.dumps(broken), own.endpoint]
        with pytest.raises(HostFailure, match=r"test: rank 0 cannot be reached.*its process has ended") as failed:
            connect.Connecting(own, 1, endpoints, "test", names, lambda: None).run(20)
        resetting.join()
    assert failed.value.code is Result.REMOTE_ERROR


def test_a_connection_that_is_reset_once_it_was_made_is_left_to_the_first_wait() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()) as mine:
        theirs, _ = door.accept()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.close()
        assert select.select([mine], [], [], 10)[0]
        with pytest.raises(OSError):
            mine.getpeername()
        connect.Connecting._configure(mine)
        assert not mine.getblocking()


def listening(place: Place, launch: dict[str, str]) -> list[str]:
    """The addresses at which this process listens, as the kernel writes them."""
    os.environ.update(launch)
    pynccl.get_unique_id()
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    own = {os.readlink(link) for link in links if os.path.lexists(link)}
    found = []
    for table in ("tcp", "tcp6"):
        for fields in map(str.split, Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]):
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.append(fields[1].partition(":")[0])
    return found


@pytest.mark.parametrize(
    "launch",
    [{"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node7"}, {"MASTER_ADDR": "127.0.0.1"}],
)
def test_a_job_on_one_machine_listens_on_the_loopback_alone(
    pools: Callable[..., RankPool], launch: dict[str, str]
) -> None:
    (found,) = pools("shm", communicators=False).run(1, listening, launch)
    assert found == ["0100007F"]
