"""No wait outlives a failure: killed, frozen and interrupted ranks, forks, early exits, strangers at the door."""

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
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks import HOST, RankPool

import pynccl
from pynccl import Communicator
from pynccl.bindings.abi import Result
from pynccl.host import connect, init as host_init
from pynccl.host.failure import HostFailure

ROOT = Path(__file__).parents[2]
SOON = 2.0  # seconds; a second on a machine that has other work too


@pytest.fixture
def doomed(transport: str) -> Iterator[RankPool]:
    """Ranks that a test may kill."""
    pool = RankPool({**HOST, "PYNCCL_HOST_TIMEOUT": "2", "PYNCCL_HOST_TRANSPORT": transport})
    yield pool
    pool.close()


@pytest.fixture
def patient(transport: str) -> Iterator[RankPool]:
    """Ranks that a test may kill, with time-outs that none of them lives to see."""
    pool = RankPool({**HOST, "PYNCCL_HOST_TRANSPORT": transport})
    yield pool
    pool.close()


def freeze_and_kill(pids: list[int], victim: int, kill_after: float | None) -> None:
    """Stop a rank, which then is in the middle of whatever it did, and kill it."""
    os.kill(pids[victim], signal.SIGSTOP)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pids[victim], signal.SIGKILL)


def all_reduce_until_it_fails(
    comm: Communicator, victim: int, count: int, kill_after: float | None
) -> tuple[str, float]:
    """(error, seconds from the death of the victim)."""
    pids = comm.all_gather(torch.tensor([os.getpid()])).tolist()
    x = torch.ones(count)
    killer = min(set(range(comm.size)) - {victim})
    died = [0.0]

    def end() -> None:
        freeze_and_kill(pids, victim, kill_after)
        died[0] = time.monotonic()

    if comm.rank == killer:
        threading.Timer(0.3, end).start()
    with pytest.raises(pynccl.NcclRemoteError) as lost:
        while True:
            comm.all_reduce(x, x, op="max")
    failed = time.monotonic()
    comm.abort()
    if (
        comm.rank == killer and kill_after is None
    ):  # or the pool would wait for it; the others have their time-outs first
        threading.Timer(2.0, os.kill, (pids[victim], signal.SIGKILL)).start()
    return str(lost.value), failed - died[0] if comm.rank == killer else 0.0


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_killed_in_the_middle_of_a_large_message_is_named_by_all(patient: RankPool, victim: int) -> None:
    for _ in range(2):
        outcomes = patient.outcomes(3, all_reduce_until_it_fails, victim, 4 << 20, 0.4)
        assert "died: SIGKILL" in outcomes.pop(victim).report
        for outcome in outcomes:
            assert not outcome.report
            text, seconds = outcome.value
            assert f"lost rank {victim}: its process has ended" in text
            assert "rank -1" not in text and seconds < SOON


@pytest.mark.parametrize("count", [4, 4 << 20])
def test_a_frozen_rank_is_named_within_the_timeout(doomed: RankPool, count: int) -> None:
    victim = 0  # whose process has the store
    outcomes = doomed.outcomes(3, all_reduce_until_it_fails, victim, count, None, timeout=15)
    assert "died: SIGKILL" in outcomes[0].report
    for outcome in outcomes[1:]:
        assert not outcome.report
        assert "rank 0" in outcome.value[0] and "within the time-out, frozen or late" in outcome.value[0]
        assert outcome.value[1] < 2.0 + SOON


def ring_until_it_fails(comm: Communicator, victim: int) -> str:
    pids = comm.all_gather(torch.tensor([os.getpid()])).tolist()
    x, y = torch.ones(4), torch.zeros(4)
    if comm.rank == (victim + 2) % comm.size:  # which does not talk to the victim
        threading.Timer(0.3, freeze_and_kill, (pids, victim, None)).start()
        threading.Timer(5.0, os.kill, (pids[victim], signal.SIGKILL)).start()
    with pytest.raises(pynccl.NcclRemoteError) as lost:
        while True:
            with pynccl.group():
                comm.send(x, (comm.rank + 1) % comm.size)
                comm.recv(y, (comm.rank - 1) % comm.size)
    comm.abort()
    return str(lost.value)


def test_a_frozen_rank_is_named_also_by_those_who_do_not_talk_to_it(doomed: RankPool) -> None:
    outcomes = doomed.outcomes(4, ring_until_it_fails, 1, timeout=15)
    assert "died: SIGKILL" in outcomes.pop(1).report
    for outcome in outcomes:
        assert not outcome.report
        assert "rank 1" in outcome.value and "within the time-out, frozen or late" in outcome.value


def split_while_one_dies(comm: Communicator, victim: int) -> str:
    if comm.rank == victim:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with pytest.raises(pynccl.NcclRemoteError) as lost:
        while True:
            child = comm.split(0, -comm.rank)  # in which the ranks have other numbers
            assert child is not None
            child.destroy()
    comm.abort()
    return str(lost.value)


def test_a_death_during_a_split_names_the_rank_of_the_parent(patient: RankPool) -> None:
    outcomes = patient.outcomes(3, split_while_one_dies, 2)
    assert "died: SIGKILL" in outcomes.pop().report
    for outcome in outcomes:
        assert "ncclCommSplit" in outcome.value and "rank 2" in outcome.value and "rank -1" not in outcome.value


def split_in_which_one_freezes(comm: Communicator, victim: int) -> str:
    """The victim stops where the ranks of the child, which are connected, agree on a transport."""
    pids = comm.all_gather(torch.tensor([os.getpid()])).tolist()
    if comm.rank == victim:
        vars(host_init)["agree"] = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
    if comm.rank == (victim + 1) % comm.size:
        threading.Timer(5.0, os.kill, (pids[victim], signal.SIGKILL)).start()
    with pytest.raises(pynccl.NcclRemoteError) as lost:
        comm.split(0, -comm.rank)
    comm.abort()
    return str(lost.value)


def test_a_rank_frozen_in_a_split_is_named_by_its_number_in_the_parent(doomed: RankPool) -> None:
    outcomes = doomed.outcomes(3, split_in_which_one_freezes, 0, timeout=15)
    assert "died: SIGKILL" in outcomes.pop(0).report
    for outcome in outcomes:
        assert not outcome.report
        assert "its rank 2 is rank 0 of this one" in outcome.value


def die_instead_of_connecting(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def init_while_one_dies(comm: Communicator, victim: int) -> tuple[str, float]:
    """(error, seconds) of a rank whose peer is killed between saying hello and connecting."""
    uid = torch.tensor(list(bytes(pynccl.get_unique_id())), dtype=torch.uint8)
    identity = bytes(comm.broadcast(uid).tolist())
    if comm.rank == victim:
        connect.Connecting.run = die_instead_of_connecting  # type: ignore[assignment, method-assign]
    began = time.monotonic()
    with pytest.raises(pynccl.NcclRemoteError) as lost:
        Communicator.init(comm.size, identity, comm.rank, timeout=30)
    comm.abort()
    return str(lost.value), time.monotonic() - began


@pytest.mark.parametrize("victim", [0, 2])
def test_a_death_during_init_is_noticed_at_once(patient: RankPool, victim: int) -> None:
    outcomes = patient.outcomes(3, init_while_one_dies, victim)
    assert "died: SIGKILL" in outcomes.pop(victim).report
    for outcome in outcomes:
        assert not outcome.report
        text = outcome.value[0]
        of_the_store = victim == 0 and "the store of the process that made the unique id" in text
        assert of_the_store or (f"rank {victim}" in text and "its process has ended" in text)
        assert outcome.value[1] < 1.0 + SOON


def one_rank_leaves(comm: Communicator, way: str) -> str:
    if comm.rank == 1:
        if way == "abort":
            comm.abort()
        elif way == "destroy":
            comm.destroy()
        return ""
    with pytest.raises(pynccl.NcclRemoteError) as lost:
        comm.all_reduce(torch.ones(4))
    comm.abort()
    return str(lost.value)


@pytest.mark.parametrize(("way", "why"), [("abort", "it aborted"), ("destroy", "it has destroyed the communicator")])
def test_how_a_rank_has_left_is_told(patient: RankPool, way: str, why: str) -> None:
    says, _ = patient.run(2, one_rank_leaves, way)
    assert f"lost rank 1: {why}" in says


def other_two_go_on(comm: Communicator) -> list[float]:
    """Rank 0 and 1 still work together after rank 2 has parted in order."""
    x = comm.all_reduce(torch.ones(3))
    if comm.rank == 2:
        comm.destroy()
        return x.tolist()
    for _ in range(20):
        with pynccl.group():
            comm.send(x, 1 - comm.rank)
            comm.recv(x, 1 - comm.rank)
        time.sleep(0.05)  # longer in all than a rank that vanished would be forgiven
    comm.abort()
    return x.tolist()


def test_a_rank_that_has_destroyed_is_no_failure_for_the_others(patient: RankPool) -> None:
    assert patient.run(3, other_two_go_on) == [[3.0] * 3] * 3


# Whole processes


def python(code: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env={**env, **environment}, stdout=pipe, stderr=subprocess.STDOUT, text=True)


INTERRUPTED = """
    import os, signal, threading, time, torch, pynccl
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits it ignored
    small, large = torch.ones(4), torch.ones(1 << 20)

    def in_a_group(comm):
        with pynccl.group():
            comm.send(small, 1)
            comm.recv(small.clone(), 1)

    def several(comm):
        others = pynccl.Communicator.init_all(2)
        with pynccl.group():
            for one in (others[0], comm):
                one.all_reduce(small)

    def on_a_stream(comm):
        stream = pynccl.create_stream()
        comm.all_reduce(small, small, stream=stream)
        stream.synchronize()

    calls = {
        "small": lambda comm: comm.all_reduce(small, small), "large": lambda comm: comm.all_reduce(large, large),
        "recv": lambda comm: comm.recv(small, 1), "send": lambda comm: comm.send(large, 1), "group": in_a_group,
        "several": several, "barrier": lambda comm: comm.barrier(),
        "plan": lambda comm: comm.plan.all_reduce(small, small)(),
        "split": lambda comm: comm.split(0), "stream": on_a_stream,
        "init": lambda comm: pynccl.Communicator.init(2, pynccl.get_unique_id(), 0),
    }
    for name, call in calls.items():
        comms = pynccl.Communicator.init_all(2)
        sent = []
        def interrupt():
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)
        threading.Timer(0.2, interrupt).start()
        try:
            call(comms[0])
        except KeyboardInterrupt:
            print(name, "heard", time.monotonic() - sent[0] < 1.0, flush=True)
        pynccl.abort(comms)
    print("done", flush=True)
"""


@pytest.mark.usefixtures("transport")
def test_ctrl_c_is_heard_in_every_blocking_call() -> None:
    process = python(INTERRUPTED, PYNCCL_LIBRARY="host")
    output, _ = process.communicate(timeout=60)
    names = ("small", "large", "recv", "send", "group", "several", "barrier", "plan", "split", "stream", "init")
    assert (process.returncode, output.split("\n")[:-1]) == (0, [*(f"{name} heard True" for name in names), "done"])


FORKED = """
    import os, sys, time, torch, pynccl
    comms = pynccl.Communicator.init_all(2)
    stream = pynccl.create_stream()
    large = torch.ones(1 << 20)
    comms[0].all_reduce(large, large, stream=stream)  # under way, on a thread that the child does not have
    def reduced():
        with pynccl.group():
            out = [comm.all_reduce(torch.ones(2)) for comm in comms]
        return out[0].tolist()
    started = time.monotonic()
    if (child := os.fork()) == 0:
        try:
            comms[1].all_reduce(torch.ones(2))
        except pynccl.NcclInvalidUsage as error:
            print("child:", "inherited through a fork" in str(error), flush=True)
        sys.exit(7)
    _, status = os.waitpid(child, 0)
    print("parent:", os.waitstatus_to_exitcode(status), time.monotonic() - started < 5, flush=True)
    comms[1].all_reduce(torch.ones(1 << 20))
    stream.synchronize()
    print(reduced(), flush=True)
"""


@pytest.mark.usefixtures("transport")
def test_a_forked_child_exits_and_leaves_the_parents_connections_alone() -> None:
    process = python(FORKED, PYNCCL_LIBRARY="host", PYTHONWARNINGS="ignore::DeprecationWarning")
    output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, "child: True\nparent: 7 True\n[2.0, 2.0]\n")


LEFT_BEHIND = """
    import sys, torch, pynccl
    if sys.argv[1] == "init":
        pynccl.Communicator.init(2, pynccl.get_unique_id(), 0, timeout=0.5)
    comm, other = pynccl.Communicator.init_all(2)
    comm.timeout = 1.2
    comm.split(0)
"""


@pytest.mark.parametrize(("call", "says"), [("split", "ncclCommSplit(color=0, key=0)"), ("init", "ncclCommInitRank(")])
def test_a_call_that_its_deadline_left_behind_does_not_crash_the_exit(call: str, says: str) -> None:
    process = python(LEFT_BEHIND, call, PYNCCL_LIBRARY="host")
    output, _ = process.communicate(timeout=30)
    last = output.strip().split("\npynccl.")[-1]
    assert process.returncode == 1 and "terminate" not in output
    assert last.startswith(f"NcclTimeout: {says}") and "still waits for ranks [1]" in last
    assert call == "init" or "ncclCommInitRank" not in last


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
        with pytest.raises(HostFailure, match=r"test: rank 0 cannot be reached.*its process has ended") as lost:
            connect.Connecting(own, 1, endpoints, "test", names, lambda: None).run(20)
        resetting.join()
    assert lost.value.code is Result.REMOTE_ERROR


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


LISTENING = """
    import os, torch, pynccl
    identity = pynccl.get_unique_id()
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    own = {os.readlink(link) for link in links if os.path.lexists(link)}
    for table in ("tcp", "tcp6"):
        for line in open(f"/proc/self/net/{table}").readlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                print(fields[1].partition(":")[0])
"""
LOOPBACK = "0100007F"  # as the kernel writes 127.0.0.1


@pytest.mark.parametrize(
    "launch",
    [{"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node7"}, {"MASTER_ADDR": "127.0.0.1"}],
)
def test_a_job_on_one_machine_listens_on_the_loopback_alone(launch: dict[str, str]) -> None:
    output, _ = python(LISTENING, PYNCCL_LIBRARY="host", **launch).communicate(timeout=30)
    assert output.split() == [LOOPBACK]
