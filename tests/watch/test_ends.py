"""How a rank has ended is in the error of those who waited for it, with its line, whoever started its process."""

from __future__ import annotations

import re
from pathlib import Path

from forks import Forks

PROGRAM = """
import multiprocessing, os, signal, sys, torch, torch.multiprocessing, pynccl
way, rank = sys.argv[1], int(os.environ["RANK"])

def joins():
    comm = pynccl.init()
    comm.all_reduce(torch.ones(4))
    return comm

def raises(*_):
    joins()
    raise ValueError("no such file")  # raises

if rank == 0:
    comm = joins()
    stream = pynccl.create_stream() if way == "raises, on a stream" else None
    comm.all_reduce(torch.ones(4), stream=stream)
    stream.synchronize()
elif way.startswith("raises"):
    raises()
elif way == "a child of multiprocessing":
    child = multiprocessing.get_context("fork").Process(target=raises)
    child.start()
    child.join()
elif way == "a child of torch":
    torch.multiprocessing.start_processes(raises, nprocs=1, start_method="fork")
else:
    joins()
    {"exits": sys.exit, "_exit": lambda: os._exit(3), "kill": lambda: os.kill(os.getpid(), 9)}[way]()
"""
[LINE] = [number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# raises")]
RAISED = rf"rank 1 left by ValueError at program.py:{LINE} \d+\.\d s ago: no such file; "
KILLED = r"rank 1's process \d+ was killed or crashed \(no last word\) within the last \d+\.\d s"
WAYS = {
    "raises": RAISED,
    "raises, on a stream": RAISED,
    "a child of multiprocessing": RAISED,
    "a child of torch": RAISED,
    "exits": r"rank 1 exited by itself \d+\.\d s ago \(the end of its program, or sys.exit\); "
    r"rank 0 gave up after \d+\.\d s in all_reduce #2 \(comm 'world', 2 ranks, ",
    "_exit": KILLED,
    "kill": KILLED,
}


def test_the_end_of_a_rank_is_told(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with Forks() as forks:
        for way, expected in WAYS.items():
            variables = {"PYNCCL_LIBRARY": "host", "PYNCCL_WATCH_DIR": str(tmp_path / "watch")}
            waited, _ = forks.run((str(program), way), 2, tmp_path, variables)
            error = waited.err.partition("NcclRemoteError")[2]
            assert re.search(expected, error), (way, waited.err)
