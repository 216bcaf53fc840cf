"""No communicator keeps a process from ending: its exit, forks, objects that nobody closed.

What happens at the end of a process is seen in a process of its own, by what its standard error and its stub's log say.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from meetings import free_port
from processes import A_FORK_WITH_THREADS, DESTROYED, HANGS, ROOT, process

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
    "one that was collected is a warning, and is aborted here but not by the collector": (
        """
def leak():
    make(2)
leak()
gc.collect()
assert stub.stub_record().split()[0] == b"ncclCommInitRank" and len(stub.stub_record().splitlines()) == 1
""",
        0,
        r"\S*script\.py:\d+: ResourceWarning: <pynccl\.Communicator rank 2 of 4 on cuda:0>, made at \S*script\.py:\d+, "
        r"was never closed: call destroy\(\), or use it in a with statement.*",
        ["ncclCommAbort"],
    ),
}


@pytest.mark.parametrize("end", EXITS)
def test_an_exit(tmp_path: Path, end: str) -> None:
    source, code, says, calls = EXITS[end]
    ended = process(tmp_path, source)
    assert re.fullmatch(says, ended.err, re.DOTALL), ended.err
    assert (ended.code, sorted(ended.calls)) == (code, sorted(calls))


# Memory that NCCL may use until a communicator has ended

# Of two communicators one was collected; the child that is forked then frees the memory of neither.
COLLECTED_AND_FORKED = """
class Watched:
    nbytes = 1 << 20
    def __del__(self):
        print("freed after", *(line.split()[0] for line in stub.stub_record().decode().splitlines()), flush=True)
comms = [make(0), make(1)]
for comm in comms:
    comm._scratch = Watched()
del comm
stub.stub_clear()
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


def test_memory_is_freed_after_the_end_of_its_communicator(tmp_path: Path) -> None:
    ended = process(tmp_path, COLLECTED_AND_FORKED, *A_FORK_WITH_THREADS)
    calls = ["ncclCommAbort", *DESTROYED]
    assert ended.calls == calls
    assert ended.out.splitlines() == ["child has ended", *[f"freed after {' '.join(calls)}"] * 2]


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


def test_ranks_may_fork_and_one_that_ends_by_an_exception_is_an_error_on_the_other(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    common = {"PYTHONPATH": str(ROOT), "PYNCCL_LIBRARY": "host", "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, *A_FORK_WITH_THREADS, tmp_path / "job.py"],
            env={**os.environ, **common, "RANK": str(rank)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        (out, err), (_, first) = [process.communicate(timeout=HANGS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert ([process.returncode for process in processes], out) == ([1, 1], "[4.0, 4.0, 4.0, 4.0]\n")
    assert "pynccl.NcclRemoteError: all_reduce(count=1048576, FLOAT32, SUM) failed" in err
    assert first.rstrip().endswith("KeyError: 'mine'")
