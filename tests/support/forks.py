"""Commands as a user launches them, without the seconds that a new interpreter takes to load torch.

    with Forks() as forks:
        ended = forks.run(("scripts/recipes/ddp.py",), 2, folder, {"PYNCCL_LIBRARY": "host"})     # of each rank

A server process has loaded torch and the project, and forks; what it forks runs a script, or a module as -m does, with
the arguments, the folder, the environment, standard output and error of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = dict(os.environ)  # not what a test had set while the server was started
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
    """The server, and what has been asked of it; used by several threads."""

    def __init__(self) -> None:
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**ENVIRONMENT, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        self._codes: dict[int, int] = {}
        self._number = 0
        self._news = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()

    def run(self, words: tuple[str, ...], ranks: int, folder: Path, environment: dict[str, str]) -> list[Ended]:
        """What came of each rank of a launch of `words`; of one process outside a launch for 0 ranks."""
        port = str(_free_port())
        numbers = []
        for rank in range(max(ranks, 1)):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            place |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            numbers.append(self._start(words, folder, {**environment, **(place if ranks else {})}))
        with self._news:
            done = self._news.wait_for(lambda: all(number in self._codes for number in numbers), SECONDS)
        assert done, f"{words} takes more than {SECONDS} s"
        return [self._ended(folder, number) for number in numbers]

    def _start(self, words: tuple[str, ...], folder: Path, environment: dict[str, str]) -> int:
        with self._news:
            number = self._number = self._number + 1
            job = {"number": number, "words": words, "folder": str(folder), "environment": environment}
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        return number

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            number, code = json.loads(line)
            with self._news:
                self._codes[number] = code
                self._news.notify_all()

    def _ended(self, folder: Path, number: int) -> Ended:
        out, err = ((folder / f".{number}.{name}").read_text() for name in ("out", "err"))
        return Ended(self._codes[number], out, err)

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(SECONDS)


# -------------------------------------------------------------------------------------------------- in the server


def serve() -> None:
    """Fork for each line of standard input; a line [number, exit code] for each that has ended. Ends with its input."""

    import pynccl_autograd  # noqa: F401  and with it torch

    running: dict[int, int] = {}
    text = b""
    while True:
        if select.select([0], [], [], 0.02)[0]:
            more = os.read(0, 1 << 16)
            if not more:
                break
            *lines, text = (text + more).split(b"\n")
            for line in lines:
                job = json.loads(line)
                pid = os.fork()
                if not pid:
                    _child(job)
                running[pid] = job["number"]
        with contextlib.suppress(ChildProcessError):
            while (gone := os.waitpid(-1, os.WNOHANG))[0]:
                if (number := running.pop(gone[0], None)) is not None:
                    print(json.dumps([number, os.waitstatus_to_exitcode(gone[1])]), flush=True)
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def _child(job: dict[str, Any]) -> None:
    """Never comes back."""
    code = 1
    try:
        _redirect(job)
        code = _code_of(job)
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        os._exit(code)


def _redirect(job: dict[str, Any]) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "out"), (2, "err")):
        path = Path(job["folder"], f".{job['number']}.{name}")
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False, buffering=1)
    os.chdir(job["folder"])
    os.environ.update(job["environment"])


def _code_of(job: dict[str, Any]) -> int:
    """The exit code of what is run, handlers of atexit included."""
    import atexit

    import torch

    torch.set_num_threads(1)
    try:
        _run(job["words"])
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


def _run(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        script = ROOT / words[0]
        sys.argv = [str(script), *words[1:]]
        sys.path.insert(0, str(script.parent))
        sys.modules["__main__"].__dict__["__file__"] = str(script)  # for processes that are spawned
        runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    serve()
