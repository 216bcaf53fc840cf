"""Run commands as a user does, but fork them from a process that has already loaded torch, which saves seconds.

    with Forks() as forks:
        finished = forks.run(("scripts/recipes/ddp.py",), 2, folder, {"PYNCCL_LIBRARY": "host"})  # one result per rank

The child, forked by the ranks' fork server, runs a script, or a module as with -m, with its own arguments, folder,
environment, stdout and stderr.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import multiprocessing
import os
import random
import runpy
import socket
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import ranks as pool

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 100.0  # timeout, long enough for a busy machine


class Finished(NamedTuple):
    code: int
    out: str
    err: str


def _free_port() -> int:
    """Return a free port below the kernel's ephemeral range, so that no other process gets it before rank 0 listens."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", random.randrange(10_000, 20_000)))
            return int(probe.getsockname()[1])


class Forks:
    """Starts commands through the fork server. Thread-safe."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._starting = threading.Lock()

    def run(self, command: tuple[str, ...], ranks: int, folder: Path, environment: dict[str, str]) -> list[Finished]:
        """Run `command` and return the result of each rank. With 0 ranks, run one process outside a launch."""
        context = multiprocessing.get_context("forkserver")
        variables = {**pool.ENVIRONMENT, "OMP_NUM_THREADS": "1", **environment}
        if ranks:
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
            variables |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        started = []
        with self._starting, pool._single_threaded_environment():
            context.set_forkserver_preload(pool._PRELOAD)
            for rank in range(max(ranks, 1)):
                rank_variables = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks else {}
                files = [folder / f".{next(self._numbers)}.{name}" for name in ("out", "err")]
                process = context.Process(
                    target=_child, args=(command, str(folder), files, {**variables, **rank_variables})
                )
                process.start()
                started.append((process, files))
        end = time.monotonic() + SECONDS
        for process, _ in started:
            process.join(max(0.0, end - time.monotonic()))
        late = [process.kill() for process, _ in started if process.exitcode is None]
        assert not late, f"{command} took longer than {SECONDS} s"
        return [Finished(process.exitcode or 0, *(file.read_text() for file in files)) for process, files in started]

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        pass


# -------------------------------------------------------------------------------------------- in the forked process


def _child(command: tuple[str, ...], folder: str, files: list[Path], environment: dict[str, str]) -> None:
    """Run the command and exit; does not return."""
    code = 1
    try:
        for number, path in enumerate(files, 1):
            os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False, buffering=1)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        code = _code_of(command)
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        os._exit(code)


def _code_of(command: tuple[str, ...]) -> int:
    """Run the command and its atexit handlers, and return the exit code."""
    import torch

    torch.set_num_threads(1)
    try:
        _run(command)
        code = 0
    except SystemExit as finished:
        code = finished.code if isinstance(finished.code, int) else 0 if finished.code is None else 1
    except BaseException:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()  # as the interpreter does
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    return code


def _run(command: tuple[str, ...]) -> None:
    if command[0] == "-m":
        sys.argv = list(command[1:])
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        script = ROOT / command[0]
        sys.argv = [str(script), *command[1:]]
        sys.path.insert(0, str(script.parent))
        sys.modules["__main__"].__dict__["__file__"] = str(script)  # for spawned processes
        runpy.run_path(str(script), run_name="__main__")
