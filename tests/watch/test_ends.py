"""How a rank has ended is in the error of those who waited for it, with its line, whoever started its process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# One interpreter that has torch loaded, of which the ranks of one job after the other are forked.
START = """
import multiprocessing, os, signal, sys, torch, torch.multiprocessing, pynccl
folder, *ways = sys.argv[1:]

def waits(way):
    comm = pynccl.from_file(f"{folder}/{way}", 0, 2)
    comm.all_reduce(torch.ones(4))
    stream = pynccl.create_stream() if way == "stream" else None
    try:
        comm.all_reduce(torch.ones(4), stream=stream)
        if stream is not None:
            stream.synchronize()
    except pynccl.NcclRemoteError as error:
        with open(f"{folder}/{way}.new", "w") as file:
            file.write(str(error))
        os.rename(f"{folder}/{way}.new", f"{folder}/{way}.error")

def joins(way):
    pynccl.from_file(f"{folder}/{way}", 1, 2).all_reduce(torch.ones(4))
"""

SCRIPTS = (
    START
    + """
def forked():
    children = []
    for way in ways:
        for rank in range(2):
            children.append(os.fork())
            if not children[-1]:
                return way, rank
    for child in children:
        os.waitpid(child, 0)
    os._exit(0)

way, rank = forked()
if rank == 0:
    waits(way)
    os._exit(0)
joins(way)
if way in ("raises", "stream"):
    raise ValueError("no such file")  # raises
elif way == "exits":
    sys.exit()
elif way == "code":
    sys.exit(3)
elif way == "_exit":
    os._exit(3)
elif way == "abort":
    os.abort()
else:
    os.kill(os.getpid(), signal.SIGKILL)
"""
)

CHILDREN = (
    START
    + """
def raises(way):
    joins(way)
    raise ValueError("no such file")  # raises

def rank(number, way):
    (raises if number else waits)(way)

def start(way):
    if way == "torch":
        started = torch.multiprocessing.start_processes(rank, (way,), nprocs=2, join=False, start_method="fork")
        return started.processes
    processes = []
    for number in range(2):
        context = multiprocessing.get_context(way if number else "fork")
        processes.append(context.Process(target=rank, args=(number, way)))
        processes[-1].start()
    return processes

if __name__ == "__main__":
    for process in [process for way in ways for process in start(way)]:
        process.join()
"""
)


def errors_of(source: str, folder: Path, *ways: str) -> dict[str, str]:
    """The error of rank 0 in each job."""
    script = folder / "train.py"
    script.write_text(source)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    environment["PYNCCL_WATCH_DIR"] = str(folder / "watch")
    command = [sys.executable, str(script), str(folder), *ways]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=60)
    found = {way: folder / f"{way}.error" for way in ways}
    missing = [way for way, path in found.items() if not path.exists()]
    assert not missing, f"no error for {missing}; {done.stderr}"
    return {way: path.read_text() for way, path in found.items()}


def line_of_the_error(source: str) -> str:
    [number] = [number for number, line in enumerate(source.splitlines(), 1) if line.endswith("# raises")]
    return f"train.py:{number}"


BY_ITSELF = (
    r"rank 1 exited by itself \d\.\d s ago \(the end of its program, or sys.exit\); "
    r"rank 0 gave up after \d\.\d s in all_reduce #2 \(comm 'world', 2 ranks, "
)
PLAIN = {
    "raises": rf"rank 1 left by ValueError at {line_of_the_error(SCRIPTS)} \d\.\d s ago: no such file; ",
    "stream": rf"rank 1 left by ValueError at {line_of_the_error(SCRIPTS)} \d\.\d s ago: no such file; ",
    "exits": BY_ITSELF,
    "code": BY_ITSELF,
    "_exit": r"rank 1's process \d+ was killed or crashed \(no last word\) within the last \d\.\d s",
    "abort": r"rank 1's process \d+ was killed or crashed \(no last word\) within the last \d\.\d s",
    "kill": r"rank 1's process \d+ was killed or crashed \(no last word\) within the last \d\.\d s",
}


def test_the_end_of_a_script_is_told(tmp_path: Path) -> None:
    errors = errors_of(SCRIPTS, tmp_path, *PLAIN)
    for way, expected in PLAIN.items():
        assert re.search(expected, errors[way]), (way, errors[way])


def test_the_exception_of_a_child_that_catches_it_itself_is_told(tmp_path: Path) -> None:
    errors = errors_of(CHILDREN, tmp_path, "fork", "spawn", "torch")
    expected = rf"rank 1 left by ValueError at {line_of_the_error(CHILDREN)} \d\.\d s ago: no such file; "
    for way, error in errors.items():
        assert re.search(expected, error), (way, error)
