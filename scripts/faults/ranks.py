"""A process that has imported torch and pynccl once, and forks ranks of fault campaigns on demand.

Reads one JSON object a line from standard input: {"program", "folder", "rank", "env", "network"}, and answers
{"started": pid}; when a rank has ended it says {"ended": pid, "status": ..., "at": ...}. A rank is forked at the top
level of this script, so that its program ends as a script does: excepthook, atexit, exit code, death by Ctrl-C.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import os
import random
import select
import signal
import sys
import time
from pathlib import Path
from types import CodeType
from typing import Any

PR_SET_PDEATHSIG = 1
CLONE_NEWNET, CLONE_NEWUTS, CLONE_NEWNS = 0x40000000, 0x04000000, 0x00020000
MS_REC, MS_SLAVE = 0x4000, 0x80000
POLL_SECONDS = 0.01


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
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        print(json.dumps({"warning": f"{threads} threads before the fork"}), flush=True)


def own_shared_memory() -> bool:
    """A /dev/shm of this process and its children alone, so that what they leave in it is theirs; False if it may not
    be had."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC | MS_SLAVE, None):
        return False
    return not libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None)


def serve() -> dict[str, Any] | None:
    """Fork ranks until standard input ends. Returns in each of them with what was asked, and at last with None."""
    children: set[int] = set()
    buffer = b""
    while True:
        if select.select([0], [], [], POLL_SECONDS)[0]:
            chunk = os.read(0, 1 << 16)
            if not chunk:
                return None
            buffer += chunk
        while b"\n" in buffer:
            line, _, buffer = buffer.partition(b"\n")
            job: dict[str, Any] = json.loads(line)
            pid = os.fork()
            if pid == 0:
                return job
            children.add(pid)
            say({"started": pid})
        for pid in list(children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                children.discard(pid)
                say({"ended": pid, "status": os.waitstatus_to_exitcode(status), "at": time.monotonic()})


def say(words: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def become_rank(job: dict[str, Any]) -> CodeType:
    """Make this process the rank that was asked for; its program, compiled."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also where it is stopped, and the campaign was killed
    if job.get("network"):
        enter_node(job["network"], job["node"])
    folder, rank = Path(job["folder"]), job["rank"]
    for number, name in ((0, os.devnull), (1, folder / f"rank{rank}.out"), (2, folder / f"rank{rank}.err")):
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(folder / "cwd")
    random.seed()
    sys.argv = [job["program"]]
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    return compile(Path(job["program"]).read_text(), job["program"], "exec")


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
    say({"ready": {"pid": os.getpid(), "apart": apart}})
    asked = serve()
    if asked is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
        code = become_rank(asked)
        left = Path(asked["folder"]) / f"rank{asked['rank']}.left"
        try:
            exec(code, {"__name__": "__main__", "__file__": asked["program"], "__builtins__": __builtins__})
        finally:
            left.write_text(str(time.monotonic()))  # interpreters with torch take half a second more to end
