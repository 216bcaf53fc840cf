"""No communicator keeps a process from ending: its exit, forks, objects that nobody closed.

What happens at the end of a process is seen in a process of its own, by what its standard error and its stub's log say.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from processes import A_FORK_WITH_THREADS, DESTROYED, HANGS, PRELUDE, ROOT, process

import pynccl

# The end of the process


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
from pynccl.comm import finalize
finalize.EXIT_SECONDS = 0.5
comm = make()
stub.stub_rule(1, b"ncclCommFinalize", 1000 * 300)
"""
    ended = process(tmp_path, source)
    assert ended.code == 0
    assert ended.err == "pynccl: 1 open communicators did not close within 0.5 s\n"
    assert ended.calls[-1] == "ncclCommFinalize"


def test_one_that_was_collected_and_does_not_end_is_counted(tmp_path: Path) -> None:
    source = """
from pynccl.comm import finalize
finalize.EXIT_SECONDS = 0.5
def leak():
    make(2)
leak()
gc.collect()
stub.stub_rule(1, b"ncclCommAbort", 1000 * 300)
"""
    ended = process(tmp_path, source)
    assert ended.code == 0
    assert ended.err.endswith("pynccl: 1 open communicators did not close within 0.5 s\n")


def test_a_communicator_that_has_failed_is_aborted_at_exit_at_once(tmp_path: Path) -> None:
    ended = process(tmp_path, 'comm = make()\nstub.stub_rule(0, b"ncclCommGetAsyncError", 6)\n')
    assert (ended.code, ended.err) == (0, "")
    assert ended.calls == ["ncclCommGetAsyncError", "ncclCommAbort"]
    assert ended.seconds < pynccl.comm.finalize.EXIT_SECONDS


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
    assert "pynccl.NcclRemoteError: all_reduce(count=1048576, FLOAT32, SUM) failed" in err
    assert first.rstrip().endswith("KeyError: 'mine'")


def test_ranks_may_fork_and_need_not_destroy(tmp_path: Path) -> None:
    for rank, (code, out, err) in enumerate(job(tmp_path, FORKS_AND_FORGETS, *A_FORK_WITH_THREADS)):
        child, parent = out.splitlines()[0], out.splitlines()[-1]
        assert f"this communicator (rank {rank} of 2 on cpu) was inherited through a fork" in child
        assert parent == "[4.0, 4.0, 4.0, 4.0]"
        assert (code, err) == (0, "")
