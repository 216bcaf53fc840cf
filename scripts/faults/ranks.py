"""Run the ranks of a fault campaign on one node or two, and collect their output and what they leave behind.

`Server` starts a process that runs this file: it imports torch and pynccl once, and forks the ranks of one run at a
time. It forks at module level, so that a rank's program exits as a script does: excepthook, atexit, exit code, death by
Ctrl-C.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import itertools
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

from faults.nodes import Nodes, enter_network
from faults.programs import Program

from pynccl.watch.folder import ENDED

ROOT = Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join([str(ROOT), str(ROOT / "scripts")])
WATCH_SECONDS = 2
DEADLINE = 25.0  # seconds from the start, after which a running rank counts as hung
LOSSY_DEADLINE = 60.0
LOSS = 0.05  # share of the packets


@dataclass
class Rank:
    """A rank of a run: its exit code (negative: signal) and its output.

    at    when the process exited
    left  when its program ended, cleanly or by an exception
    """

    number: int
    status: int
    at: float
    left: float
    out: str
    err: str


@dataclass
class RunResult:
    """The result of a run. hung: ranks killed after the deadline; struck: when the fault occurred."""

    ranks: list[Rank]
    hung: list[int] = field(default_factory=list)
    struck: float = 0.0
    processes: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)


class Server:
    """The process that forks ranks, controlled by lines of JSON."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, "PYTHONPATH": PATHS, "PYNCCL_LIBRARY": "host", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that a terminal's Ctrl-C reaches only the campaign
        )
        ready = self._answer()
        # If it shares /dev/shm with other processes, files there cannot be attributed to the run.
        self.shared_memory = Path(f"/proc/{ready['pid']}/root/dev/shm") if ready["private_shm"] else None

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that forks ranks exited with {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def run(self, job: dict[str, Any], meanwhile: Callable[[], None]) -> dict[str, Any]:
        """Run a job, {"folder", "ranks": [{"env", "network", "node"}], "limit", "stopped"}, and return {"pids",
        "status", "at", "hung"}. `meanwhile` is called periodically."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(job), file=self.process.stdin, flush=True)
        while not select.select([self.process.stdout], [], [], 0.02)[0]:
            meanwhile()
        return self._answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def run(
    program: Program,
    folder: Path,
    server: Server,
    nodes: Nodes | None,
    limit: float = DEADLINE,
    meanwhile: Callable[[], None] = lambda: None,
) -> RunResult:
    """Run a program in `folder`, which must be new.   meanwhile: called periodically"""
    for name in ("cwd", "tmp", "watch/a", "watch/b"):
        (folder / name).mkdir(parents=True)
    (folder / "program.py").write_text(program.text)
    fault = program.fault
    if nodes:
        nodes.start(LOSS if fault.name == "packet-loss" else 0.0, program.seed)

    def cut() -> None:
        if nodes and fault.name == "link-cut" and (folder / "struck").exists() and not (folder / "cut").exists():
            nodes.cut(silently=program.seed % 2 == 0)
            (folder / "cut").touch()
        meanwhile()

    began = time.monotonic()
    port = next(_ports)
    job = {
        "folder": str(folder),
        "ranks": [_rank(program, rank, folder, nodes, port) for rank in range(program.size)],
        "limit": LOSSY_DEADLINE if fault.name == "packet-loss" else limit,
        "stopped": fault.rank if "stop" in fault.name else -1,
    }
    found = server.run(job, cut)
    ended = RunResult([], found["hung"], float(_text(folder / "struck") or began))
    for rank, (status, at) in enumerate(zip(found["status"], found["at"], strict=True)):
        left = float(_text(folder / f"rank{rank}.left") or at)
        out, err = _text(folder / f"rank{rank}.out"), _text(folder / f"rank{rank}.err")
        ended.ranks.append(Rank(rank, status, at, left, out, err))
    ended.processes = _left_processes(found["pids"])
    ended.files = _left_files(program, folder, ended)
    for path in server.shared_memory.iterdir() if server.shared_memory else ():
        ended.files.append(f"/dev/shm/{path.name}")
        path.unlink()
    return ended


# Below the kernel's range of client ports, and different from the ports of a campaign that runs at the same time.
_ports = itertools.cycle(range(15_000 + os.getpid() % 1000 * 10, 32_000))


def _rank(program: Program, rank: int, folder: Path, nodes: Nodes | None, port: int) -> dict[str, Any]:
    """Return the description of one rank of a job."""
    ranks_of = program.fault.nodes if nodes else (tuple(range(program.size)),)
    side = next(side for side, ranks in enumerate(ranks_of) if rank in ranks)
    env = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    env |= {
        "PYTHONPATH": PATHS,
        "PYNCCL_LIBRARY": "host",
        "PYNCCL_HOST_TIMEOUT": str(program.timeout),
        "PYNCCL_WATCH_DIR": str(folder / "watch" / "ab"[side]),
        "PYNCCL_WATCH_TIMEOUT": str(WATCH_SECONDS),
        "PYNCCL_CAMPAIGN_FOLDER": str(folder),
        "TMPDIR": str(folder / "tmp"),
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "WORLD_SIZE": str(program.size),
        "LOCAL_RANK": str(ranks_of[side].index(rank)),
        "LOCAL_WORLD_SIZE": str(len(ranks_of[side])),
        "MASTER_ADDR": nodes.addresses[0] if nodes else "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if not nodes:
        return {"env": env, "network": "", "node": ""}
    env["PYNCCL_HOST_TRANSPORT"] = "sockets"  # both namespaces share memory, which real nodes do not
    network = f"/proc/{os.getpid()}/root/run/netns/{nodes.names[side]}"
    return {"env": env, "network": network, "node": f"node-{'ab'[side]}"}


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _left_processes(pids: list[int]) -> list[str]:
    """Kill the processes that remain in the sessions of the ranks, and return them."""
    left = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, fields = stat.read_text().rpartition(")")
            if int(fields.split()[3]) in pids:
                left.append(f"{name})")
                os.kill(int(stat.parent.name), signal.SIGKILL)
    return left


def _left_files(program: Program, folder: Path, ended: RunResult) -> list[str]:
    """Return unexpected files. Three kinds are left on purpose: the watch files of a process that exited uncleanly, the
    record of the last job that exited cleanly, and the rendezvous file of ranks that failed during initialization."""
    clean = all(rank.status == 0 for rank in ended.ranks)
    halfway = (program.fault.place in ("start", "init") or program.fault.name == "link-cut") and not clean
    left = [path for name in ("cwd", "tmp") for path in (folder / name).rglob("*")]
    left = [path for path in left if not (halfway and path.name == "rendezvous")]
    if clean:
        files = (path for path in (folder / "watch").rglob("*") if path.suffix != ENDED)
        left += [path for path in files if path.name not in ("a", "b")]
    else:  # the exchange between the ranks of two nodes
        left = [path for path in left if not (path.name.startswith("rendezvous.") and path.suffix == ".watch")]
    return sorted(str(path.relative_to(folder)) for path in left)


# In the process that forks ranks

PR_SET_PDEATHSIG = 1
CLONE_NEWUTS, CLONE_NEWNS = 0x04000000, 0x00020000
MS_REC, MS_SLAVE = 0x4000, 0x80000


def preload() -> None:
    """Import the modules that every rank needs, before the first fork. The imports must not start threads."""
    import numpy  # noqa: F401
    import torch
    import torch.distributed

    import pynccl.bindings.library
    import pynccl.comm.communicator
    import pynccl.host  # noqa: F401
    import pynccl_autograd  # noqa: F401

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # else an exiting rank writes to, and so copies, every page with an object on it
    assert len(os.listdir("/proc/self/task")) == 1, "an import started a thread, so ranks cannot be forked"


def mount_private_shm() -> bool:
    """Mount a private /dev/shm for this process and its children, so that files left there are theirs. Return False if
    that is not permitted."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) or libc.mount(b"none", b"/", None, MS_REC | MS_SLAVE, None):
        return False
    return not libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None)


def serve() -> tuple[dict[str, Any], int] | None:
    """Serve until stdin ends, then return None. In each forked rank, return its run and number."""
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
    """Wait until all ranks exit. After `limit` seconds, make the remaining ranks print their stacks and kill them.

    stopped  rank that a SIGSTOP stops: it is killed once all others have exited; -1: none
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
                time.sleep(0.5)  # faulthandler writes upon the first signal
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
    """Make this process a rank of the run, and return its compiled program."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also if this rank is stopped, or the campaign is killed
    folder, job = Path(run["folder"]), run["ranks"][rank]
    if job["network"]:
        enter_node(job["network"], job["node"])
    for number, name in ((0, os.devnull), (1, folder / f"rank{rank}.out"), (2, folder / f"rank{rank}.err")):
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(folder / "cwd")
    random.seed()
    tempfile.tempdir = None  # torch cached it before TMPDIR was set for this rank
    program = folder / "program.py"
    sys.argv = [str(program)]
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    return compile(program.read_text(), str(program), "exec")


def enter_node(network: str, node: str) -> None:
    """Join the network namespace of this path, with the host name `node`."""
    enter_network(network)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWUTS) or libc.sethostname(node.encode(), len(node)):
        raise OSError(ctypes.get_errno(), f"cannot set the host name {node}")


if __name__ == "__main__":
    private_shm = mount_private_shm()
    preload()
    print(json.dumps({"pid": os.getpid(), "private_shm": private_shm}), flush=True)
    found = serve()
    if found is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        code = become_rank(*found)
        left = Path(found[0]["folder"]) / f"rank{found[1]}.left"
        try:
            exec(code, {"__name__": "__main__", "__file__": sys.argv[0], "__builtins__": __builtins__})
        finally:
            left.write_text(str(time.monotonic()))  # an interpreter with torch takes half a second more to exit
