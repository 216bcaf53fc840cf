"""No communicator keeps a process from ending: deadlines, exit, forks, objects that nobody closed, several threads.

What happens at the end of a process is seen in a process of its own, by what its standard error and its stub's log say.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from libraries import Stub, compiled
from ranks import RankPool

import pynccl
from pynccl import Communicator
from pynccl.bindings.abi import HEADER_VERSION

ROOT = Path(__file__).resolve().parents[2]
X, Y = (1 << 20, 12, "float32"), (1 << 30, 12, "float32")
HANGS = 60.0  # seconds after which a process is taken to hang

# Torch is not imported: the stub needs none, and a process starts in a tenth of a second.
PRELUDE = """
import atexit, ctypes, gc, os, sys, threading, pynccl
from pynccl.bindings.abi import UniqueId
stub, library = ctypes.CDLL(os.environ["PYNCCL_LIBRARY"]), pynccl.load()
stub.stub_record.restype = ctypes.c_char_p
X, Y = (1 << 20, 12, "float32"), (1 << 30, 12, "float32")
def make(rank=1, timeout=60.0):
    handle = ctypes.c_void_p()
    library.ncclCommInitRank(ctypes.byref(handle), 4, UniqueId(), rank)
    return pynccl.Communicator(handle.value, library, timeout)
"""


class Ended(NamedTuple):
    code: int
    out: str
    err: str
    calls: list[str]  # names of the C functions that the stub saw, births left out
    seconds: float


def process(folder: Path, source: str, *options: str) -> Ended:
    """Run `source`, which may use what PRELUDE defines, on the stub."""
    script, log = folder / "script.py", folder / "log"
    script.write_text(PRELUDE + source)
    log.write_text("")
    paths = {"PYTHONPATH": str(ROOT), "PYNCCL_LIBRARY": compiled(HEADER_VERSION), "STUB_LOG": str(log)}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", "default", *options, script],
        check=False,
        capture_output=True,
        text=True,
        timeout=HANGS,
        env={**os.environ, **paths},
    )
    seconds = time.monotonic() - started
    calls = [line.split()[0] for line in log.read_text().splitlines()]
    return Ended(done.returncode, done.stdout, done.stderr, [c for c in calls if c != "ncclCommInitRank"], seconds)


# The end of the process

DESTROYED = ["ncclCommGetAsyncError", "ncclCommFinalize", "ncclCommDestroy"]


def test_what_is_open_at_exit_is_destroyed_without_a_word(tmp_path: Path) -> None:
    ended = process(tmp_path, "a, b = make(0), make(1); b.destroy()\n")
    assert (ended.code, ended.err) == (0, "")
    assert ended.calls == DESTROYED * 2


def test_an_exit_by_an_exception_aborts(tmp_path: Path) -> None:
    ended = process(tmp_path, "comm = make()\nraise KeyError('mine')\n")
    assert ended.code == 1
    assert ended.calls == ["ncclCommAbort"]
    assert ended.err.rstrip().endswith("KeyError: 'mine'")
    assert "pynccl" not in ended.err.partition("Traceback")[0] and ended.err.count("Traceback") == 1


def test_an_exit_by_sys_exit_destroys(tmp_path: Path) -> None:
    ended = process(tmp_path, "comm = make()\nsys.exit(3)\n")
    assert (ended.code, ended.err, ended.calls) == (3, "", DESTROYED)


def test_a_peer_that_does_not_come_along_does_not_hold_up_the_exit(tmp_path: Path) -> None:
    source = """
from pynccl.comm import lifecycle
lifecycle.EXIT_SECONDS = 0.5
comm = make()
stub.stub_rule(1, b"ncclCommFinalize", 1000 * 300)
"""
    ended = process(tmp_path, source)
    assert ended.code == 0
    assert ended.err == "pynccl: 1 open communicators did not close within 0.5 s\n"
    assert ended.calls[-1] == "ncclCommFinalize"


def test_a_communicator_that_has_failed_is_aborted_at_exit_at_once(tmp_path: Path) -> None:
    ended = process(tmp_path, 'comm = make()\nstub.stub_rule(0, b"ncclCommGetAsyncError", 6)\n')
    assert (ended.code, ended.err) == (0, "")
    assert ended.calls == ["ncclCommGetAsyncError", "ncclCommAbort"]
    assert ended.seconds < pynccl.comm.lifecycle.EXIT_SECONDS


def test_a_failure_to_close_at_exit_is_told_and_the_rest_is_closed(tmp_path: Path) -> None:
    ended = process(tmp_path, 'a, b = make(0), make(1)\nstub.stub_rule(0, b"ncclCommDestroy", 5)\n')
    assert ended.code == 0
    assert ended.err.count("pynccl: closing <pynccl.Communicator rank") == 2
    assert "ncclCommDestroy on rank 1 of 4 failed: invalid usage" in ended.err
    assert ended.calls.count("ncclCommDestroy") == 2


def test_the_programs_own_exit_handler_may_close_it(tmp_path: Path) -> None:
    ended = process(tmp_path, "comm = make(timeout=5.0)\natexit.register(comm.destroy)\n")
    assert (ended.code, ended.err, ended.calls) == (0, "", DESTROYED)


def test_an_exit_handler_that_closes_it_has_its_deadline(tmp_path: Path) -> None:
    source = """
comm = make(timeout=0.2)
stub.stub_rule(1, b"ncclCommFinalize", 1000 * 300)
def close():
    try:
        comm.destroy()
    except pynccl.NcclTimeout as error:
        print(str(error).splitlines()[0])
    else:
        print("destroyed")
atexit.register(close)
"""
    ended = process(tmp_path, source)
    assert ended.out == "ncclCommFinalize on rank 1 of 4 did not return within 0 s (timeout=0.2)\n"
    assert ended.calls[-1] == "ncclCommAbort"


# Objects that nobody closed


def test_a_collected_communicator_is_a_warning_and_is_closed_at_exit(tmp_path: Path) -> None:
    source = """
def leak():
    return make(2)
comm = leak()
stub.stub_clear()
del comm
gc.collect()
print(stub.stub_record(), flush=True)
"""
    ended = process(tmp_path, source)
    assert ended.code == 0
    assert ended.out == "b''\n"  # nothing was called by the collector
    assert ended.calls == ["ncclCommAbort"]  # but at exit
    site = f"{tmp_path / 'script.py'}:{PRELUDE[: PRELUDE.index('return pynccl')].count(chr(10)) + 1}"
    assert "ResourceWarning: <pynccl.Communicator rank 2 of 4 on cuda:0>, made at " + site in ended.err
    assert "was never closed: call destroy(), or use it in a with statement" in ended.err


def test_a_closed_communicator_is_collected_silently(tmp_path: Path) -> None:
    ended = process(tmp_path, "for end in ('destroy', 'abort'):\n    getattr(make(), end)()\ngc.collect()\n")
    assert (ended.code, ended.err) == (0, "")
    assert ended.calls == [*DESTROYED, "ncclCommAbort"]


# Forks

A_FORK_WITH_THREADS = ("-W", "ignore:This process:DeprecationWarning")  # which Python 3.12 says to whoever forks

FORK = """
comm = make()
plan = comm.plan.all_reduce(X, Y, stream=0)
held, forked = threading.Event(), threading.Event()
def hold():
    with comm.lock:
        held.set()
        forked.wait()
threading.Thread(target=hold, daemon=True).start()  # as a thread does that is in a call: it has no twin in the child
held.wait()
child = os.fork()
if not child:
    stub.stub_clear()
    for use in (lambda: comm.broadcast(X, Y, stream=0), plan, comm.finalize, lambda: comm.split(0), comm.barrier):
        try:
            use()
        except pynccl.NcclInvalidUsage as error:
            print(error, flush=True)
    comm.destroy()
    sys.exit(0)
forked.set()
assert os.waitpid(child, 0)[1] == 0
stub.stub_clear()
plan()
print("parent", stub.stub_record().decode().split()[0], flush=True)
"""


def test_a_forked_child_has_no_communicator_and_its_parent_goes_on(tmp_path: Path) -> None:
    ended = process(tmp_path, FORK, *A_FORK_WITH_THREADS)
    said = "this communicator (rank 1 of 4 on cuda:0) was inherited through a fork, where NCCL cannot work; make a new "
    assert ended.out.count(said) == 5
    assert "parent ncclAllReduce" in ended.out
    assert (ended.code, ended.err) == (0, "")
    assert ended.calls == ["ncclAllReduce", *DESTROYED]  # the child called nothing, at its exit neither


# Deadlines


def left_behind(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if name in thread.name]


def test_a_birth_that_no_other_rank_joins_is_a_timeout() -> None:
    stub = Stub()
    stub.linger("ncclCommInitRank", 1.0)
    with pytest.raises(pynccl.NcclTimeout) as caught:
        Communicator.init(4, bytes(128), 1, library=stub.cpu_library, timeout=0.1)
    assert "ncclCommInitRank(rank=1, nranks=4) did not return within 0 s (timeout=0.1)" in str(caught.value)
    assert "a rank is missing or unreachable: were all ranks started" in str(caught.value)
    for thread in left_behind("ncclCommInitRank"):
        thread.join()


def test_a_peer_that_does_not_come_along_makes_destroy_a_timeout_and_an_abort() -> None:
    stub = Stub()
    comm = stub.comm()
    comm.timeout = 0.1
    stub.linger("ncclCommFinalize", 1.0)
    started = time.monotonic()
    with pytest.raises(pynccl.NcclTimeout, match="the communicator was aborted instead"):
        comm.destroy()
    assert time.monotonic() - started < 1.0
    assert stub.names() == ["ncclCommGetAsyncError", "ncclCommFinalize", "ncclCommAbort"]
    assert not comm.alive
    (thread,) = left_behind("ncclCommFinalize")
    thread.join()
    assert stub.names()[-1] == "ncclCommAbort"  # what is left behind keeps its hands off the freed handle
    comm.destroy()


def test_a_finalize_that_fails_is_raised_and_the_communicator_aborted() -> None:
    stub = Stub()
    comm = stub.comm()
    stub.fail("ncclCommFinalize", 6)
    with pytest.raises(pynccl.NcclRemoteError, match="ncclCommFinalize on rank 1 of 4 failed") as caught:
        comm.destroy()
    assert caught.value.code is pynccl.Result.REMOTE_ERROR
    assert stub.names()[-2:] == ["ncclCommFinalize", "ncclCommAbort"]


def test_several_are_aborted_as_one_group() -> None:
    stub = Stub()
    comms = [stub.comm(rank=rank) for rank in range(3)]
    comms[1].abort()
    stub.clear()
    pynccl.abort(comms)
    assert stub.names() == ["ncclGroupStart", "ncclCommAbort", "ncclCommAbort", "ncclGroupEnd"]
    assert sorted(call.args["rank"] for call in stub.calls()[1:-1]) == [0, 2]
    assert not any(comm.alive for comm in comms)
    stub.clear()
    pynccl.abort(comms)
    pynccl.abort([])
    assert stub.names() == []


def test_an_abort_that_fails_leaves_no_open_group() -> None:
    stub = Stub()
    comms = [stub.comm(rank=rank) for rank in range(2)]
    stub.fail("ncclCommAbort", 5)
    with pytest.raises(pynccl.NcclInvalidUsage, match="ncclCommAbort failed"):
        pynccl.abort(comms)
    assert stub.names() == ["ncclGroupStart", "ncclCommAbort", "ncclCommAbort", "ncclGroupEnd"]


def test_an_abort_that_a_live_graph_holds_up_goes_on_in_the_background() -> None:
    stub = Stub()
    comms = [stub.comm(rank=rank) for rank in range(2)]
    stub.linger("ncclCommAbort", 0.5)
    with pytest.warns(RuntimeWarning, match=r"the abort of 2 communicators has not returned after 0\.1 s and goes on"):
        pynccl.abort(comms, timeout=0.1)
    assert "ncclGroupEnd" not in stub.names()  # so the caller was not kept
    with pytest.raises(pynccl.NcclInvalidUsage, match="was aborted"):
        comms[0].broadcast(X, Y, stream=0)
    (thread,) = left_behind("ncclCommAbort")
    thread.join()
    assert stub.names() == ["ncclGroupStart", "ncclCommAbort", "ncclCommAbort", "ncclGroupEnd"]


# Several threads


def overlapping(stub: Stub, bodies: list[Callable[[], Any]]) -> int:
    """How many calls began while another was in the library, all bodies run twenty times in threads of their own."""
    before = stub.cdll.stub_overlaps()
    go = threading.Barrier(len(bodies))

    def run(body: Callable[[], Any]) -> None:
        go.wait()
        for _ in range(20):
            body()

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return int(stub.cdll.stub_overlaps() - before)


def test_threads_take_turns_on_a_communicator() -> None:
    stub = Stub()
    one, other = stub.comm(cpu=True), stub.comm(cpu=True)
    x = torch.zeros(4)
    stub.linger("ncclAllReduce", 0.001)

    def in_a_group() -> None:
        with pynccl.group():
            one.all_reduce(x, x)
            one.all_reduce(x)

    plan = one.plan.all_reduce(x, x)
    bodies = [lambda: one.all_reduce(x, x), lambda: one.all_reduce(x), plan, in_a_group, one.plan.group([plan, plan])]
    assert overlapping(stub, [*bodies, lambda: plan(7), one.barrier]) == 0
    assert overlapping(stub, [lambda: one.all_reduce(x, x), lambda: other.all_reduce(x, x)]) > 0  # they are free


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANGS
    while not condition():
        assert time.monotonic() < deadline
        os.sched_yield()


def test_destroy_waits_for_the_call_of_another_thread() -> None:
    stub = Stub()
    comm = stub.comm()
    stub.linger("ncclBroadcast", 0.3)
    before = stub.cdll.stub_overlaps()
    thread = threading.Thread(target=lambda: comm.broadcast(X, Y, stream=0))
    thread.start()
    wait_for(lambda: "ncclBroadcast" in stub.names())
    comm.timeout = 0.05
    with pytest.raises(pynccl.NcclTimeout, match=r"a call of another thread has not returned for 0\.05 s; abort"):
        comm.destroy()
    assert comm.alive
    comm.timeout = HANGS
    comm.destroy()
    thread.join()
    assert stub.names()[-1] == "ncclCommDestroy"
    assert stub.cdll.stub_overlaps() - before == 2  # each time ncclCommGetAsyncError, which may be asked at any time


def in_a_call(comm: Communicator) -> bool:
    """Whether another thread is in a call on `comm`."""
    free = comm.lock.acquire(blocking=False)
    if free:
        comm.lock.release()
    return not free


def freed_by_abort(comm: Communicator) -> str:
    own = comm.split(0)
    assert own is not None
    if comm.rank == 1:
        comm.barrier()  # alive, so that nothing but the abort of rank 0 can free rank 0
        own.abort()
        return ""
    found: list[BaseException] = []

    def wait_for_ever() -> None:
        try:
            own.recv(torch.zeros(1 << 20), 1)  # which rank 1 never sends
        except pynccl.NcclError as error:
            found.append(error)

    thread = threading.Thread(target=wait_for_ever, daemon=True)
    thread.start()
    wait_for(lambda: in_a_call(own))
    own.abort()
    thread.join(20)
    assert not thread.is_alive()
    comm.barrier()
    return str(found[0])


def test_an_abort_frees_a_thread_that_is_blocked(ranks: RankPool) -> None:
    said, _ = ranks.run(2, freed_by_abort)
    assert "was aborted; make a new one" in said or "REMOTE_ERROR" in said


# Ranks of a real job, on the host library

ONE_FAILS = """
import pynccl, torch
comm = pynccl.init(timeout=30)
comm.all_reduce(torch.ones(4))
if comm.rank == 1:
    raise KeyError("mine")
comm.all_reduce(torch.ones(1 << 20))
"""

FORKS_AND_FORGETS = """
import os, pynccl, sys, torch
comm = pynccl.init(timeout=30)
x = comm.all_reduce(torch.ones(4))
child = os.fork()
if not child:
    try:
        comm.all_reduce(x, x)
    except pynccl.NcclInvalidUsage as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
print(comm.all_reduce(x).tolist(), flush=True)
"""


def job(folder: Path, source: str, *options: str) -> list[tuple[int, str, str]]:
    """(exit code, standard output, standard error) of two ranks that nobody watches over."""
    (folder / "job.py").write_text(source)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    common = {"PYTHONPATH": str(ROOT), "PYNCCL_LIBRARY": "host", "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "default::ResourceWarning", *options, "job.py"],
            cwd=folder,
            env={**os.environ, **common, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=HANGS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]


def test_a_rank_that_ends_by_an_exception_is_an_error_on_the_other(tmp_path: Path) -> None:
    (code, _, err), (failed, _, first) = job(tmp_path, ONE_FAILS)
    assert (code, failed) == (1, 1)
    assert "pynccl.bindings.errors.NcclRemoteError: all_reduce(count=1048576, FLOAT32, SUM) failed" in err
    assert first.rstrip().endswith("KeyError: 'mine'")


def test_ranks_may_fork_and_need_not_destroy(tmp_path: Path) -> None:
    for rank, (code, out, err) in enumerate(job(tmp_path, FORKS_AND_FORGETS, *A_FORK_WITH_THREADS)):
        child, parent = out.splitlines()[0], out.splitlines()[-1]
        assert f"this communicator (rank {rank} of 2 on cpu) was inherited through a fork" in child
        assert parent == "[4.0, 4.0, 4.0, 4.0]"
        assert (code, err) == (0, "")
