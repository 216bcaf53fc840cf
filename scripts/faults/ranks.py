"""A process that has imported torch and pynccl once, and forks the ranks of one run of the fault campaign at a time.

Reads a run as a line of JSON: {"folder", "ranks": [{"env", "network", "node"}], "limit", "stopped"}; starts its ranks,
waits for them, and answers with a line: {"pids", "status", "at", "hung"}. A rank is forked at the top level of this
script, so that its program ends as a script does: excepthook, atexit, exit code, death by Ctrl-C.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import CodeType
from typing import Any

PR_SET_PDEATHSIG = 1
CLONE_NEWNET, CLONE_NEWUTS, CLONE_NEWNS = 0x40000000, 0x04000000, 0x00020000
MS_REC, MS_SLAVE = 0x4000, 0x80000


def preload() -> None:
    """What every rank needs, imported before the first fork; it must not start threads."""
    import numpy  # noqa: F401
    import torch
    import torch.distributed

    import pynccl.bindings.library
    import pynccl.comm.communicator
    import pynccl.host  # noqa: F401
    import pynccl_autograd  # noqa: F401

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # else a rank would touch, and so copy, every page with an object on it when it ends
    assert len(os.listdir("/proc/self/task")) == 1, "an import has started a thread, so ranks cannot be forked"


def own_shared_memory() -> bool:
    """A /dev/shm of this process and its children alone, so that what they leave in it is theirs; False if it may not
    be had."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC | MS_SLAVE, None):
        return False
    return not libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None)


def serve() -> tuple[dict[str, Any], int] | None:
    """Serve until standard input ends, then return None. Returns in each rank with its run and number."""
    while line := sys.stdin.readline():
        run = json.loads(line)
        pids = []
        for rank in range(len(run["ranks"])):
            pids.append(os.fork())
            if pids[-1] == 0:
                return run, rank
        print(json.dumps({"pids": pids, **wait(pids, run["limit"], run["stopped"])}), flush=True)
    return None


def wait(pids: list[int], limit: float, stopped: int) -> dict[str, Any]:
    """Until all ranks have ended; who is still there after so many seconds says where, and is killed.

    stopped  the rank that is stopped by SIGSTOP: it is killed once all others have ended; -1: none
    """
    ended: dict[int, tuple[int, float]] = {}  # exit code (negative: signal), and when
    deadline = time.monotonic() + limit
    hung: list[int] = []
    while running := [rank for rank in range(len(pids)) if rank not in ended]:
        if running == [stopped]:
            os.kill(pids[stopped], signal.SIGKILL)
        elif time.monotonic() > deadline and not hung:
            hung = running
            for number in (signal.SIGUSR1, signal.SIGKILL):
                for rank in running:
                    os.kill(pids[rank], number)
                time.sleep(0.5)  # faulthandler writes from within the first one
        time.sleep(0.01)
        for rank in running:
            done, status = os.waitpid(pids[rank], os.WNOHANG)
            if done:
                ended[rank] = os.waitstatus_to_exitcode(status), time.monotonic()
    return {
        "status": [ended[rank][0] for rank in range(len(pids))],
        "at": [ended[rank][1] for rank in range(len(pids))],
        "hung": hung,
    }


def become_rank(run: dict[str, Any], rank: int) -> CodeType:
    """Make this process a rank of the run; its program, compiled."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also where it is stopped, and the campaign was killed
    folder, own = Path(run["folder"]), run["ranks"][rank]
    if own["network"]:
        enter_node(own["network"], own["node"])
    for number, name in ((0, os.devnull), (1, folder / f"rank{rank}.out"), (2, folder / f"rank{rank}.err")):
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(own["env"])
    os.chdir(folder / "cwd")
    random.seed()
    tempfile.tempdir = None  # torch has asked for it before TMPDIR was this rank's
    program = folder / "program.py"
    sys.argv = [str(program)]
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    return compile(program.read_text(), str(program), "exec")


def enter_node(network: str, node: str) -> None:
    """Join the network namespace that this path stands for, under a host name of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    file = os.open(network, os.O_RDONLY)
    if libc.setns(file, CLONE_NEWNET) or libc.unshare(CLONE_NEWUTS) or libc.sethostname(node.encode(), len(node)):
        raise OSError(ctypes.get_errno(), f"cannot become a process of {network}")
    os.close(file)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # programs import faults.values
    apart = own_shared_memory()
    if "--preload" in sys.argv:
        preload()
    print(json.dumps({"pid": os.getpid(), "apart": apart}), flush=True)
    found = serve()
    if found is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
        code = become_rank(*found)
        left = Path(found[0]["folder"]) / f"rank{found[1]}.left"
        try:
            exec(code, {"__name__": "__main__", "__file__": sys.argv[0], "__builtins__": __builtins__})
        finally:
            left.write_text(str(time.monotonic()))  # interpreters with torch take half a second more to end
