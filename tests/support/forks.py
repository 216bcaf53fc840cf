"""Commands as a user launches them, without the seconds that a new interpreter takes to load torch.

    with Forks() as forks:
        ended = forks.run(("scripts/recipes/ddp.py",), 2, folder, {"PYNCCL_LIBRARY": "host"})     # of each rank

The fork server of the ranks, which has loaded torch, forks; what it forks runs a script, or a module as -m does, with
the arguments, the folder, the environment, standard output and error of its own.
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
SECONDS = 100.0  # of patience, on a busy machine


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def _free_port() -> int:
    """Below those that the kernel hands out, one of which another process may get before rank 0 listens."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", random.randrange(10_000, 20_000)))
            return int(probe.getsockname()[1])


class Forks:
    """What has been asked of the server; used by several threads."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._starting = threading.Lock()

    def run(self, words: tuple[str, ...], ranks: int, folder: Path, environment: dict[str, str]) -> list[Ended]:
        """What came of each rank of a launch of `words`; of one process outside a launch for 0 ranks."""
        context = multiprocessing.get_context("forkserver")
        own = {**pool.ENVIRONMENT, "OMP_NUM_THREADS": "1", **environment}
        if ranks:
            own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
            own |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        started = []
        with self._starting, pool._single_threaded_environment():
            context.set_forkserver_preload(pool._PRELOAD)
            for rank in range(max(ranks, 1)):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks else {}
                files = [folder / f".{next(self._numbers)}.{name}" for name in ("out", "err")]
                process = context.Process(target=_child, args=(words, str(folder), files, {**own, **place}))
                process.start()
                started.append((process, files))
        end = time.monotonic() + SECONDS
        for process, _ in started:
            process.join(max(0.0, end - time.monotonic()))
        late = [process.kill() for process, _ in started if process.exitcode is None]
        assert not late, f"{words} takes more than {SECONDS} s"
        return [Ended(process.exitcode or 0, *(file.read_text() for file in files)) for process, files in started]

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        pass


# ------------------------------------------------------------------------------------------------ in what is forked


def _child(words: tuple[str, ...], folder: str, files: list[Path], environment: dict[str, str]) -> None:
    """Never comes back."""
    code = 1
    try:
        for number, path in enumerate(files, 1):
            os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", closefd=False, buffering=1)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        code = _code_of(words)
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        os._exit(code)


def _code_of(words: tuple[str, ...]) -> int:
    """The exit code of what is run, handlers of atexit included."""
    import torch

    torch.set_num_threads(1)
    try:
        _run(words)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()  # as the interpreter does
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    return code


def _run(words: tuple[str, ...]) -> None:
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        script = ROOT / words[0]
        sys.argv = [str(script), *words[1:]]
        sys.path.insert(0, str(script.parent))
        sys.modules["__main__"].__dict__["__file__"] = str(script)  # for processes that are spawned
        runpy.run_path(str(script), run_name="__main__")
