"""One run of the fault campaign: start the ranks of a program, wait for all of them, and look what is left."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.nodes import Nodes
from faults.programs import Program

ROOT = Path(__file__).resolve().parents[2]
PATHS = os.pathsep.join([str(ROOT), str(ROOT / "scripts")])
WATCH_SECONDS = 2
DEADLINE = 25.0  # seconds from the start after which a rank that is still there hangs
LOSSY_DEADLINE = 60.0
LOSS = 0.05  # of the packets


@dataclass
class Rank:
    """A rank of a run: exit code (negative: signal); what it has printed.

    left  when its program had ended, well or by an exception; at: when the process had
    """

    number: int
    status: int
    at: float
    left: float
    out: str
    err: str


@dataclass
class Ended:
    """What is known after a run. hung: ranks that had to be killed after the deadline; struck: when the fault came."""

    ranks: list[Rank]
    hung: list[int] = field(default_factory=list)
    struck: float = 0.0
    processes: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)


class Server:
    """The process that forks ranks; see ranks.py."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "scripts" / "faults" / "ranks.py")],
            env={**os.environ, "PYTHONPATH": PATHS, "PYNCCL_LIBRARY": "host", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the campaign alone, and for the rank that it picks
        )
        ready = self._answer()
        # Where it shares /dev/shm with the rest of the machine nobody can say whose files are in it.
        self.shared_memory = Path(f"/proc/{ready['pid']}/root/dev/shm") if ready["apart"] else None

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that forks ranks has ended with {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def run(self, job: dict[str, Any], meanwhile: Callable[[], None]) -> dict[str, Any]:
        """What ranks.py says of this run."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(job), file=self.process.stdin, flush=True)
        while not select.select([self.process.stdout], [], [], 0.02)[0]:
            meanwhile()
        return self._answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def run(program: Program, folder: Path, server: Server, nodes: Nodes | None) -> Ended:
    """Run it in `folder`, which is new."""
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

    began = time.monotonic()
    port = next(_ports)
    job = {
        "folder": str(folder),
        "ranks": [_rank(program, rank, folder, nodes, port) for rank in range(program.size)],
        "limit": LOSSY_DEADLINE if fault.name == "packet-loss" else DEADLINE,
        "stopped": fault.rank if "stop" in fault.name else -1,
    }
    found = server.run(job, cut)
    ended = Ended([], found["hung"], float(_text(folder / "struck") or began))
    for rank, (status, at) in enumerate(zip(found["status"], found["at"], strict=True)):
        left = float(_text(folder / f"rank{rank}.left") or at)
        out, err = _text(folder / f"rank{rank}.out"), _text(folder / f"rank{rank}.err")
        ended.ranks.append(Rank(rank, status, at, left, out, err))
    ended.processes = _left_processes(found["pids"])
    ended.files = _left_files(folder, all(rank.status == 0 for rank in ended.ranks))
    for path in server.shared_memory.iterdir() if server.shared_memory else ():
        ended.files.append(f"/dev/shm/{path.name}")
        path.unlink()
    return ended


# Below the range from which the kernel takes the ports of clients, and other ones than another campaign beside this.
_ports = itertools.cycle(range(15_000 + os.getpid() % 1000 * 10, 32_000))


def _rank(program: Program, rank: int, folder: Path, nodes: Nodes | None, port: int) -> dict[str, Any]:
    """A rank as ranks.py wants it."""
    together = program.fault.nodes if nodes else (tuple(range(program.size)),)
    side = next(side for side, ranks in enumerate(together) if rank in ranks)
    env = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    env |= {
        "PYTHONPATH": PATHS,
        "PYNCCL_LIBRARY": "host",
        "PYNCCL_HOST_TIMEOUT": str(program.timeout),
        "PYNCCL_WATCH_DIR": str(folder / "watch" / "ab"[side]),
        "PYNCCL_WATCH_TIMEOUT": str(WATCH_SECONDS),
        "TMPDIR": str(folder / "tmp"),
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "WORLD_SIZE": str(program.size),
        "LOCAL_RANK": str(together[side].index(rank)),
        "LOCAL_WORLD_SIZE": str(len(together[side])),
        "MASTER_ADDR": nodes.addresses[0] if nodes else "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if not nodes:
        return {"env": env, "network": "", "node": ""}
    env["PYNCCL_HOST_TRANSPORT"] = "sockets"  # they would find out that they share memory, as no two machines do
    network = f"/proc/{os.getpid()}/root/run/netns/{nodes.names[side]}"
    return {"env": env, "network": network, "node": f"node-{'ab'[side]}"}


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _left_processes(pids: list[int]) -> list[str]:
    """Processes of the sessions that the ranks have opened; they are killed."""
    left = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, fields = stat.read_text().rpartition(")")
            if int(fields.split()[3]) in pids:
                left.append(f"{name})")
                os.kill(int(stat.parent.name), signal.SIGKILL)
    return left


def _left_files(folder: Path, clean: bool) -> list[str]:
    """Files that nobody asked for. clean: all ranks ended well; else they leave their watch files, on purpose."""
    left = [path for name in ("cwd", "tmp", "watch" * clean) if name for path in (folder / name).rglob("*")]
    return sorted(str(path.relative_to(folder)) for path in left if path.parent.name != "watch")
