"""The errors of waiting ranks say how another rank exited and at which line, however its process was started."""

from __future__ import annotations

import re
from pathlib import Path

from forks import Forks

PROGRAM = """
import json, multiprocessing, os, signal, sys, torch, torch.multiprocessing, traceback, pynccl
how, rank = sys.argv[1], int(os.environ["RANK"])

def join():
    comm = pynccl.init()
    comm.all_reduce(torch.ones(4))
    return comm

def raises(*_):
    join()
    assert sys.version_info >= (3, 13) or traceback.print_exc.__code__.co_filename == traceback.__file__
    raise ValueError("no such file")  # raises

if rank == 0:
    comm = join()
    stream = pynccl.create_stream() if how == "raises, on a stream" else None
    comm.all_reduce(torch.ones(4), stream=stream)
    stream.synchronize()
elif how == "raises in a library":
    join()
    json.loads("no such file")  # library
elif how.startswith("raises"):
    raises()
elif how == "a child of multiprocessing":
    child = multiprocessing.get_context("fork").Process(target=raises)
    child.start()
    child.join()
elif how == "a child of torch":
    torch.multiprocessing.start_processes(raises, nprocs=1, start_method="fork")
else:
    join()
    {"exits": sys.exit, "_exit": lambda: os._exit(3), "kill": lambda: os.kill(os.getpid(), 9)}[how]()
"""
LINE, LIBRARY_LINE = (
    next(number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith(f"# {marker}"))
    for marker in ("raises", "library")
)
RAISED = rf"rank 1 exited with ValueError at program.py:{LINE} \d+\.\d s ago: no such file; "
KILLED = r"rank 1's process \d+ was killed or crashed \(no exit recorded\) within the last \d+\.\d s"
EXITS = {
    "raises": RAISED,
    "raises, on a stream": RAISED,
    "raises in a library": rf"rank 1 exited with JSONDecodeError at program.py:{LIBRARY_LINE} \d+\.\d s ago: ",
    "a child of multiprocessing": RAISED,
    "a child of torch": RAISED,
    "exits": r"rank 1 exited by itself \d+\.\d s ago \(the end of its program, or sys.exit\); "
    r"rank 0 gave up after \d+\.\d s in all_reduce #2 \(comm 'world', 2 ranks, ",
    "_exit": KILLED,
    "kill": KILLED,
}


def test_the_error_says_how_a_rank_exited(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with Forks() as forks:
        for how, expected in EXITS.items():
            variables = {"PYNCCL_LIBRARY": "host", "PYNCCL_WATCH_DIR": str(tmp_path / "watch")}
            waited, _ = forks.run((str(program), how), 2, tmp_path, variables)
            error = waited.err.partition("NcclRemoteError")[2]
            assert re.search(expected, error), (how, waited.err)
