"""One run of the fault campaign: start the ranks of a program, strike, wait for all of them, and look what is left."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.nodes import Nodes
from faults.programs import LOSSY_TIMEOUT, TIMEOUT, Program

ROOT = Path(__file__).resolve().parents[2]
WATCH_SECONDS = 2
DEADLINE = 20.0  # seconds from the fault after which a rank that is still there hangs
LOSSY_DEADLINE = 60.0
INSIDE_SECONDS = 0.15  # from a rank's mark to the strike: by then it is inside its call
BY_CAMPAIGN = {
    "kill-in-call": signal.SIGKILL,
    "in-init": signal.SIGKILL,
    "in-split": signal.SIGKILL,
    "in-destroy": signal.SIGKILL,
    "stop-in-call": signal.SIGSTOP,
    "ctrl-c": signal.SIGINT,
}


@dataclass
class Rank:
    """A rank of a run: exit code (negative: signal), None while it runs; what it has printed.

    left  when its program had ended, well or by an exception; at: when the process had
    """

    number: int
    pid: int
    status: int | None = None
    left: float = 0.0
    at: float = 0.0
    out: str = ""
    err: str = ""


@dataclass
class Ended:
    """What is known after a run. hung: ranks that had to be killed after the deadline; struck: when the fault came."""

    ranks: list[Rank]
    hung: list[int] = field(default_factory=list)
    struck: float = 0.0
    processes: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)


class Server:
    """The process that forks ranks; see ranks.py. torch: whether it has imported what ranks need."""

    def __init__(self, torch: bool = True) -> None:
        paths = [str(ROOT), str(ROOT / "scripts")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYNCCL_LIBRARY": "host", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "scripts" / "faults" / "ranks.py"), *(["--preload"] if torch else [])],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the campaign alone, and for the rank that it picks
        )
        self.said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.ended: dict[int, tuple[int, float]] = {}
        threading.Thread(target=self._listen, daemon=True).start()
        ready = self._next("ready")
        # Where it shares /dev/shm with the rest of the machine nobody can say whose files are in it.
        self.shared_memory = Path(f"/proc/{ready['pid']}/root/dev/shm") if ready["apart"] else None

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.put(json.loads(line))
        self.said.put({"gone": True})

    def _next(self, key: str) -> Any:
        while True:
            words = self.said.get(timeout=120)
            if "ended" in words:
                self.ended[words["ended"]] = (words["status"], words["at"])
            elif key in words:
                return words[key]
            else:
                raise RuntimeError(f"the server of ranks says {words}")

    def start(self, job: dict[str, Any]) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job).encode() + b"\n")
        self.process.stdin.flush()
        return int(self._next("started"))

    def poll(self, seconds: float) -> None:
        """Hear who has ended; returns at the first news, or after so many seconds."""
        with contextlib.suppress(queue.Empty):
            words = self.said.get(timeout=seconds)
            if "ended" not in words:
                raise RuntimeError(f"the server of ranks says {words}")
            self.ended[words["ended"]] = (words["status"], words["at"])

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def run(program: Program, folder: Path, server: Server, nodes: Nodes | None, watch: str) -> Ended:
    """Run it in `folder`, which is new."""
    for name in ("cwd", "tmp", "watch/a", "watch/b"):
        (folder / name).mkdir(parents=True)
    (folder / "program.py").write_text(program.text)
    if nodes:
        nodes.start(0.05 if program.fault.name == "packet-loss" else 0.0, program.seed)
    ranks = _start(program, folder, server, nodes, watch)
    ended = Ended(ranks, struck=time.monotonic())
    try:
        _wait(program, folder, server, nodes, ended)
    finally:
        _end(server, ended)
    for rank in ranks:
        rank.out = _text(folder / f"rank{rank.number}.out")
        rank.err = _text(folder / f"rank{rank.number}.err")
        rank.left = float(_text(folder / f"rank{rank.number}.left") or rank.at)
    ended.processes = _left_processes(ranks)
    ended.files = _left_files(program, folder, ended)
    for path in server.shared_memory.iterdir() if server.shared_memory else ():
        ended.files.append(f"/dev/shm/{path.name}")
        path.unlink()
    return ended


def _start(program: Program, folder: Path, server: Server, nodes: Nodes | None, watch: str) -> list[Rank]:
    port, ranks = _free_port(), []
    for rank in range(program.size):
        side = 0 if not nodes or rank in program.fault.nodes[0] else 1
        on_node = len(program.fault.nodes[side]) if nodes else program.size
        local = rank - (len(program.fault.nodes[0]) if side else 0)
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "PYTHONPATH") if name in os.environ}
        env = {
            **kept,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts")]),
            "PYNCCL_LIBRARY": "host",
            "PYNCCL_HOST_TIMEOUT": str(LOSSY_TIMEOUT if program.fault.name == "packet-loss" else TIMEOUT),
            "PYNCCL_WATCH": watch,
            "PYNCCL_WATCH_DIR": str(folder / "watch" / "ab"[side]),
            "PYNCCL_WATCH_TIMEOUT": str(WATCH_SECONDS),
            "PYNCCL_CAMPAIGN_FOLDER": str(folder),
            "TMPDIR": str(folder / "tmp"),
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "WORLD_SIZE": str(program.size),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(on_node),
            "MASTER_ADDR": nodes.addresses[0] if nodes else "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        job = {"program": str(folder / "program.py"), "folder": str(folder), "rank": rank, "env": env}
        if nodes:  # they would find out that they share memory, as no two machines do
            env["PYNCCL_HOST_TRANSPORT"] = "sockets"
            job |= {"network": f"/proc/{os.getpid()}/root/run/netns/{nodes.names[side]}", "node": f"node-{'ab'[side]}"}
        ranks.append(Rank(rank, server.start(job)))
    return ranks


_ports = iter(range(15_000 + os.getpid() % 1000 * 10, 32_000))
_ports_lock = threading.Lock()


def _free_port() -> int:
    """Below the range from which the kernel takes the ports of clients."""
    with _ports_lock:
        for port in _ports:
            with socket.socket() as sock, contextlib.suppress(OSError):
                sock.bind(("127.0.0.1", port))
                return port
    raise RuntimeError("no free port")


def _wait(program: Program, folder: Path, server: Server, nodes: Nodes | None, ended: Ended) -> None:
    """Until all ranks have ended, or the deadline has passed."""
    fault = program.fault
    limit = LOSSY_DEADLINE if fault.name == "packet-loss" else DEADLINE
    here, go = folder / "mark-here", folder / "mark-go"
    victim = ended.ranks[fault.rank] if fault.rank >= 0 else None
    struck = marked = 0.0
    while time.monotonic() < ended.struck + limit:
        server.poll(0.02)
        running = _update(server, ended)
        if not running:
            return
        now = time.monotonic()
        if not marked and here.exists():
            marked = now
        if marked and not struck and now >= marked + INSIDE_SECONDS:
            struck = ended.struck = time.monotonic()
            if nodes and fault.name == "link-cut":
                nodes.cut(silently=program.seed % 2 == 0)
            elif victim and victim.status is None:
                _signal(victim, BY_CAMPAIGN[fault.name])
            if fault.name != "ctrl-c":
                go.touch()
        if struck and victim and (victim.status is not None or now > struck + 3) and not go.exists():
            go.touch()
        if "stop" in fault.name and running == [victim]:
            _signal(running[0], signal.SIGKILL)


def _update(server: Server, ended: Ended) -> list[Rank]:
    """The ranks that still run."""
    for rank in ended.ranks:
        if rank.status is None and rank.pid in server.ended:
            rank.status, rank.at = server.ended.pop(rank.pid)
    return [rank for rank in ended.ranks if rank.status is None]


def _end(server: Server, ended: Ended) -> None:
    """Kill who is still there; before, let them say where they are."""
    running = _update(server, ended)
    ended.hung = [rank.number for rank in running]
    for number in (signal.SIGUSR1, signal.SIGKILL):
        for rank in running:
            _signal(rank, number)
        if running and number == signal.SIGUSR1:
            time.sleep(0.5)  # faulthandler writes from within the signal
    while _update(server, ended):
        server.poll(1)


def _signal(rank: Rank, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended, and the server has not said so yet
        os.kill(rank.pid, number)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _left_processes(ranks: list[Rank]) -> list[str]:
    """Processes of the sessions that the ranks have opened; they are killed."""
    sessions = {rank.pid for rank in ranks}
    left = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, fields = stat.read_text().rpartition(")")
            if int(fields.split()[3]) in sessions:
                left.append(f"{name})")
                os.kill(int(stat.parent.name), signal.SIGKILL)
    return left


def _left_files(program: Program, folder: Path, ended: Ended) -> list[str]:
    """Files that nobody asked for. A process that ended uncleanly leaves its watch files, and those who met halfway
    the file where they met: both on purpose."""
    clean = all(rank.status == 0 for rank in ended.ranks)
    fault = program.fault
    halfway = (fault.place == "init" or fault.name in ("before-init", "link-cut")) and not clean
    left = [path for name in ("cwd", "tmp") for path in (folder / name).rglob("*")]
    left = [path for path in left if not (halfway and path.name == "meeting")]
    if clean:
        left += [path for path in (folder / "watch").rglob("*") if path.name not in ("a", "b")]
    else:  # what the ranks of two nodes have told each other
        left = [path for path in left if not (path.name.startswith("meeting.") and path.suffix == ".watch")]
    return sorted(str(path.relative_to(folder)) for path in left)
