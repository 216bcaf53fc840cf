"""How calls and processes ended is in the record as a code, whatever the texts of the exceptions say."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from faults import ranks as fault_ranks
from faults.programs import Fault, Program

from pynccl.bindings.errors import Outcome
from pynccl.tools.hang import jobs
from pynccl.watch.layout import CommEnd, ProcessEnd
from pynccl.watch.records import ProcessRecord
from pynccl.watch.verdict import judge

HEAD = """\
import os, signal, sys, threading, time, torch, pynccl
R = int(os.environ["RANK"])
comm = pynccl.init(timeout=8)
x = torch.ones(4)
comm.all_reduce(x)
"""
DIES = "if R == 1: os._exit(3)\n"
Expected = tuple[tuple[ProcessEnd, Outcome], Outcome, tuple[str, list[int]]]
LOST: Expected = (ProcessEnd.CALL_FAILED, Outcome.PEER_LOST), Outcome.PEER_LOST, ("dead", [1])
OWN: Expected = (ProcessEnd.EXCEPTION, Outcome.PENDING), Outcome.PENDING, ("dead", [0])
DIFFER: Expected = (ProcessEnd.CALL_FAILED, Outcome.MISMATCH), Outcome.MISMATCH, ("mismatch", [0, 1])

# Name -> (program of two ranks; how rank 0 ended; outcome of its last call; kind and culprits of the verdict)
PROGRAMS: dict[str, tuple[str, tuple[ProcessEnd, Outcome], Outcome, tuple[str, list[int]]]] = {
    "a lost peer": (DIES + "comm.all_reduce(x)", *LOST),
    "an exception raised from the error": (
        DIES + "try: comm.all_reduce(x)\nexcept pynccl.NcclError as error: raise KeyError('x') from error",
        *LOST,
    ),
    "an exception raised while the error is handled": (
        DIES + "try: comm.all_reduce(x)\nexcept pynccl.NcclError: raise KeyError('x')",
        *LOST,
    ),
    "an exception group of the error": (
        DIES + "try: comm.all_reduce(x)\nexcept pynccl.NcclError as error: raise ExceptionGroup('tasks', [error])",
        *LOST,
    ),
    "an error that has crossed C++": (
        DIES + "future = torch.futures.Future()\n"
        "def then(_): comm.all_reduce(x)\n"
        "after = future.then(then)\nfuture.set_result(1)\nafter.wait()",
        *LOST,
    ),
    "an own exception that sounds like others' fault": (
        "class RemoteTimeoutError(Exception): pass\n"
        "if R == 0: raise RemoteTimeoutError('lost rank 1: the ranks disagree')\n"
        "comm.all_reduce(x)",
        *OWN,
    ),
    "an own exception whose text raises": (
        "class Own(Exception):\n    def __str__(self): raise ValueError\nif R == 0: raise Own\ncomm.all_reduce(x)",
        *OWN,
    ),
    "an own exception, and destroy() in finally": (
        "try:\n"
        "    if R == 1: time.sleep(5)\n"
        "    comm.all_reduce(x, stream=pynccl.create_stream('cpu'))\n"
        "    if R == 0: raise KeyError('mine')\n"
        "finally:\n"
        "    comm.timeout = 1\n"
        "    comm.destroy()",
        (ProcessEnd.EXCEPTION, Outcome.PENDING),
        Outcome.TIMED_OUT,
        ("dead", [0]),
    ),
    "Ctrl-C": (
        "if R == 0: signal.raise_signal(signal.SIGINT)\ncomm.all_reduce(x)",
        (ProcessEnd.INTERRUPTED, Outcome.PENDING),
        Outcome.PENDING,
        ("dead", [0]),
    ),
    "Ctrl-C within a call": (
        "if R == 0:\n"
        "    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "    comm.all_reduce(x)\n"
        "else:\n"
        "    time.sleep(2)\n"
        "    comm.all_reduce(x)",
        (ProcessEnd.INTERRUPTED, Outcome.PENDING),
        Outcome.INTERRUPTED,
        ("dead", [0]),
    ),
    "kill": (
        "if R == 0: os.kill(os.getpid(), signal.SIGKILL)\ncomm.all_reduce(x)",
        (ProcessEnd.KILLED, Outcome.PENDING),
        Outcome.PENDING,
        ("dead", [0]),
    ),
    "other calls": (
        "comm.all_reduce(x) if R == 0 else comm.all_gather(x)",
        *DIFFER,
    ),
    "other calls, compared": (
        "os.environ['PYNCCL_CHECK'] = '1'\n"
        "checked = comm.split(0)\n"
        "checked.all_reduce(x) if R == 0 else checked.all_gather(x)",
        *DIFFER,
    ),
    "abort() in another thread": (
        "if R == 0:\n"
        "    threading.Timer(0.5, comm.abort).start()\n"
        "    comm.all_reduce(x)\n"
        "else:\n"
        "    time.sleep(3)\n"
        "    comm.all_reduce(x)",
        (ProcessEnd.CALL_FAILED, Outcome.ABORTED_BY_PROGRAM),
        Outcome.ABORTED_BY_PROGRAM,
        ("dead", [0]),
    ),
}


@pytest.fixture(scope="module")
def server() -> Iterator[fault_ranks.Server]:
    server = fault_ranks.Server()
    yield server
    server.close()


def records_of(source: str, folder: Path, server: fault_ranks.Server) -> tuple[list[ProcessRecord], str]:
    ended = fault_ranks.run(Program(0, 2, "environment", Fault("none"), HEAD + source + "\n"), folder, server, None)
    assert not ended.hung
    job, _, _ = jobs.find([str(folder / "watch" / "a")], None)
    return sorted(job.processes, key=lambda process: process.rank), "".join(rank.err for rank in ended.ranks)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_record_says_how_it_ended(server: fault_ranks.Server, tmp_path: Path, name: str) -> None:
    source, expected, outcome, (kind, culprits) = PROGRAMS[name]
    processes, text = records_of(source, tmp_path, server)
    first = processes[0]
    assert (first.ending, first.outcome) == expected, (first.end, text)
    last: Any = max((call for comm in first.comms for call in comm.calls), key=lambda call: call.issued)
    assert (last.outcome, last.code) == (outcome, 1 if outcome == Outcome.PEER_LOST else last.code), text
    verdict = judge(processes)
    assert (verdict.kind, sorted(rank for _, rank in verdict.culprits)) == (kind, culprits), verdict.sentence
    if name == "abort() in another thread":
        assert first.comms[0].ended == CommEnd.ABORTED
