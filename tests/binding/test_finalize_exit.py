"""Communicators neither keep a process from exiting nor stay usable in a forked child.

Each test of process exit runs in its own process, which is checked by its stderr and the log of its stub.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from processes import DESTROYED, IGNORE_FORK_WARNING, process

# source, exit code, pattern of stderr, C calls in any order
EXITS: dict[str, tuple[str, int, str, list[str]]] = {
    "open communicators are destroyed": (
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
    "a failed destroy is reported and the rest is destroyed": (
        'a, b = make(0), make(1)\nstub.stub_rule(0, b"ncclCommDestroy", 5)\n',
        0,
        r"(?=.*ncclCommDestroy on rank 1 of 4 failed: invalid usage)(pynccl: closing <pynccl\.Communicator rank .*){2}",
        DESTROYED * 2,
    ),
    "a hanging finalize does not block the exit": (
        """
from pynccl.bindings import workers
workers.EXIT_SECONDS = 2  # where there is a driver, cuda.core is imported meanwhile
comm = make()
stub.stub_rule(1, b"ncclCommFinalize", 1000 * 300)
""",
        0,
        r"pynccl: 1 open communicators did not close within 2 s\n",
        DESTROYED[:2],
    ),
    "after an exception there is less time": (
        'comm = make()\nstub.stub_rule(1, b"ncclCommAbort", 1000 * 300)\nraise KeyError("mine")\n',
        1,
        r"Traceback((?!Traceback).)*KeyError: 'mine'\npynccl: 1 open communicators did not close within 3 s\n",
        ["ncclCommAbort"],
    ),
    "a garbage-collected communicator warns and is aborted at exit": (
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
def test_open_communicators_at_exit(tmp_path: Path, end: str) -> None:
    source, code, stderr, calls = EXITS[end]
    ended = process(tmp_path, source)
    assert re.fullmatch(stderr, ended.err, re.DOTALL), ended.err
    assert (ended.code, sorted(ended.calls)) == (code, sorted(calls))


STAGES = """
import time
from pynccl.bindings import workers
workers.EXIT_SECONDS, workers.LEFT_BEHIND_SECONDS = 2, 600
left_behind = workers.WorkerCall(lambda: time.sleep(600), "left behind")
comm = make()
stub.stub_rule(1, b"ncclCommFinalize", 1000 * 600)
"""


def test_the_waits_at_exit_do_not_add_up(tmp_path: Path) -> None:
    ended = process(tmp_path, STAGES)
    assert (ended.code, ended.err) == (0, "pynccl: 1 open communicators did not close within 2 s\n")
    assert ended.seconds < 10


# Forks

FORK = """
comm = make()
plan = comm.plan.all_reduce(X, Y, stream=0)
held, forked = threading.Event(), threading.Event()
def hold():
    with comm._lock:
        held.set()
        forked.wait()
threading.Thread(target=hold, daemon=True).start()  # like a thread inside a call, which does not exist in the child
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


def test_communicator_is_unusable_in_forked_child(tmp_path: Path) -> None:
    ended = process(tmp_path, FORK, *IGNORE_FORK_WARNING)
    message = (
        "this communicator (rank 1 of 4 on cuda:0) was inherited through a fork, where NCCL cannot work; make a new "
    )
    assert ended.out.count(message) == 5
    assert "parent ncclAllReduce" in ended.out
    assert (ended.code, ended.err) == (0, "")
    assert ended.calls == ["ncclAllReduce", *DESTROYED]  # the child called nothing, not even at exit
