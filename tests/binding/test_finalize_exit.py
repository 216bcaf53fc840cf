"""No communicator keeps a process from ending, nor lives on in a forked child.

What happens at the end of a process is seen in a process of its own, by what its standard error and its stub's log say.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from processes import A_FORK_WITH_THREADS, DESTROYED, process

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
