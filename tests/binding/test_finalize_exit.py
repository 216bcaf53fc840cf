"""No communicator keeps a process from ending: its exit, forks, objects that nobody closed.

What happens at the end of a process is seen in a process of its own, by what its standard error and its stub's log say.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import A_FORK_WITH_THREADS, DESTROYED, HANGS, PRELUDE, ROOT, process

# source, exit code, what its standard error is, its calls in whatever order
EXITS: dict[str, tuple[str, int, str, list[str]]] = {
    "what is open is destroyed, and what was closed is silent": (
        "a, b = make(0), make(1); b.destroy(); make(2).abort(); gc.collect()\n",
        0,
        "",
        [*DESTROYED, "ncclCommAbort", *DESTROYED],
    ),
    "an exception aborts": (
        "comm = make()\nraise KeyError('mine')\n",
        1,
        r"Traceback((?!Traceback).)*KeyError: 'mine'\n",
        ["ncclCommAbort"],
    ),
    "sys.exit destroys": ("comm = make()\nsys.exit(3)\n", 3, "", DESTROYED),
    "the program's own exit handler closes it": (
        "comm = make(timeout=5.0)\natexit.register(comm.destroy)\n",
        0,
        "",
        DESTROYED,
    ),
    "one that has failed is aborted": (
        'comm = make()\nstub.stub_rule(0, b"ncclCommGetAsyncError", 6)\n',
        0,
        "",
        ["ncclCommGetAsyncError", "ncclCommAbort"],
    ),
    "a failure to close is told and the rest is closed": (
        'a, b = make(0), make(1)\nstub.stub_rule(0, b"ncclCommDestroy", 5)\n',
        0,
        r"(?=.*ncclCommDestroy on rank 1 of 4 failed: invalid usage)(pynccl: closing <pynccl\.Communicator rank .*){2}",
        DESTROYED * 2,
    ),
    "a peer that does not come along does not hold it up": (
        """
from pynccl.comm import finalize
finalize.EXIT_SECONDS = 0.3
comm = make()
stub.stub_rule(1, b"ncclCommFinalize", 1000 * 300)
""",
        0,
        r"pynccl: 1 open communicators did not close within 0\.3 s\n",
        DESTROYED[:2],
    ),
    "one that was collected and does not end is counted": (
        """
from pynccl.comm import finalize
finalize.EXIT_SECONDS = 0.3
make(2)
gc.collect()
stub.stub_rule(1, b"ncclCommAbort", 1000 * 300)
""",
        0,
        r".*ResourceWarning.*pynccl: 1 open communicators did not close within 0\.3 s\n",
        ["ncclCommAbort"],
    ),
}


@pytest.mark.parametrize("end", EXITS)
def test_an_exit(tmp_path: Path, end: str) -> None:
    source, code, says, calls = EXITS[end]
    ended = process(tmp_path, source)
    assert ended.code == code
    assert re.fullmatch(says, ended.err, re.DOTALL), ended.err
    assert sorted(ended.calls) == sorted(calls)


def test_an_exit_handler_that_closes_it_has_its_deadline(tmp_path: Path) -> None:
    source = """
comm = make(timeout=0.2)
stub.stub_rule(1, b"ncclCommFinalize", 1000 * 300)
def close():
    try:
        comm.destroy()
    except pynccl.NcclTimeout as error:
        print(str(error).splitlines()[0])
atexit.register(close)
"""
    ended = process(tmp_path, source)
    assert ended.out == "ncclCommFinalize on rank 1 of 4 did not return within 0 s (timeout=0.2)\n"
    assert ended.calls[-1] == "ncclCommAbort"


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


# Memory that NCCL may use until a communicator has ended

WATCHED = """
class Watched:
    nbytes = 1 << 20
    def __del__(self):
        print("freed after", *(line.split()[0] for line in stub.stub_record().decode().splitlines()), flush=True)
comms = [make(0), make(1)]
for comm in comms:
    comm._scratch = Watched()
del comm
stub.stub_clear()
"""
# Of two communicators one was collected; the child that is forked then frees the memory of neither.
COLLECTED_AND_FORKED = """
comms.pop()
gc.collect()
child = os.fork()
if not child:
    del comms
    gc.collect()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
print("child has ended", flush=True)
"""


@pytest.mark.parametrize("end", ["exception", "collected and forked"])
def test_memory_is_freed_after_the_end_of_its_communicator(tmp_path: Path, end: str) -> None:
    more = "raise KeyError\n" if end == "exception" else COLLECTED_AND_FORKED
    ended = process(tmp_path, WATCHED + more, *A_FORK_WITH_THREADS)
    calls = ["ncclCommAbort"] * 2 if end == "exception" else ["ncclCommAbort", *DESTROYED]
    assert ended.calls == calls
    before = [] if end == "exception" else ["child has ended"]
    assert ended.out.splitlines() == [*before, *[f"freed after {' '.join(calls)}"] * 2]


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


# Ranks of a real job, on the host library: both fork, then one ends by an exception

JOB = """
import os, pynccl, torch
comm = pynccl.init(timeout=30)
x = comm.all_reduce(torch.ones(4))
child = os.fork()
if not child:
    os._exit(7)
assert os.waitpid(child, 0)[1]
print(comm.all_reduce(x).tolist(), flush=True)
(own,), stream = pynccl.Communicator.init_all(1), pynccl.create_stream()
for i in range(300):  # queued when the process ends
    own.all_reduce(torch.ones(20_000), stream=stream)
if comm.rank == 1:
    raise KeyError("mine")
comm.all_reduce(torch.ones(1 << 20))
"""


def job(folder: Path, source: str, *options: str) -> list[tuple[int, str, str]]:
    """(exit code, standard output, standard error) of two ranks that nobody watches over."""
    (folder / "job.py").write_text(source)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    common = {"PYTHONPATH": str(ROOT), "PYNCCL_LIBRARY": "host", "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = [
        subprocess.Popen(
            [sys.executable, *options, "job.py"],
            cwd=folder,
            env={**os.environ, **common, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank)},
            text=True,
            **pipes,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=HANGS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]


def test_ranks_may_fork_and_one_that_ends_by_an_exception_is_an_error_on_the_other(tmp_path: Path) -> None:
    (code, out, err), (failed, _, first) = job(tmp_path, JOB, *A_FORK_WITH_THREADS)
    assert (code, failed, out) == (1, 1, "[4.0, 4.0, 4.0, 4.0]\n")
    assert "pynccl.NcclRemoteError: all_reduce(count=1048576, FLOAT32, SUM) failed" in err
    assert first.rstrip().endswith("KeyError: 'mine'")
