"""The program of the elastic campaign: training that goes on without the ranks that it loses.

`main(job)` is a rank, or what starts or serves the ranks of this job. Each rank appends what it does to log-RANK, lines
of JSON. A step's contributions and gradients depend on the parameters, the step and the rank of the launch alone, so
that `reference` computes in one process what the ranks must have: the sums are in rank order, as the host library's.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import pynccl
from pynccl.watch.folder import start_ticks, state_of
from pynccl.watch.records import DEAD

WRONG, OUT = 9, 4  # exit codes: wrong data; the others went on without this rank
MEET_SECONDS, CALL_SECONDS = 15.0, 4.0  # of survivors, agree, ..; of a collective and of commit
STEP_PLACES = {  # in the loop: what a job has to do to come there; "": nothing
    **dict.fromkeys(("compute", "all_reduce", "commit", "committed"), ""),
    **{name: name for name in ("overlap", "plan", "chain", "groups", "save")},
    "between": "groups",
}
MEETING_PLACES = ("survivors", "agree", "sync", "syncing")


@dataclass
class Fault:
    """What happens to a rank when it comes to a place for the n-th time (`visit`).

    rank   of the launch; the number of ranks: the process that serves the store
    delay  seconds from there, while the rank goes on; 0: there
    pause  of a stop: seconds until it is continued"""

    rank: int
    kind: str
    place: str
    visit: int
    delay: float = 0.0
    pause: float = 0.0


@dataclass
class Job:
    """launcher: "fork" (by the campaign), "starter", "agents" (one torchrun a rank), "restart" (torchrun's own way)

    separate  the two nodes look like two machines
    extras    of "overlap", "plan", "chain", "groups", "save": what a step does besides its all_reduce"""

    seed: int
    size: int
    steps: int
    launcher: str
    transport: str
    separate: bool
    watch: bool
    destroy: bool
    extras: list[str]
    faults: list[Fault]
    folder: str = ""
    env: dict[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """Return the source of its program."""
        return f"from faults.elastic_job import Fault, Job, main\n\nmain({self!r})\n"


# ------------------------------------------------------------------------------------------------------- the arithmetic


class State:
    """The model, its optimizer, and the history: for each step the generation that committed it, and its members."""

    def __init__(self, job: Job) -> None:
        torch.manual_seed(job.seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.5)
        self.history = torch.full((job.steps, 1 + job.size), -1)
        self.step = 0

    def gradient(self, rank: int) -> torch.Tensor:
        source = torch.Generator().manual_seed(1000 * self.step + rank)
        x, y = (torch.randint(-4, 5, (6, width), generator=source).double() for width in (5, 3))
        loss = (self.model(x) - y).square().sum()
        return torch.cat([each.reshape(-1) for each in torch.autograd.grad(loss, list(self.model.parameters()))])

    def advance(self, total: torch.Tensor, generation: int, members: list[int]) -> None:
        sizes = [each.numel() for each in self.model.parameters()]
        for parameter, part in zip(self.model.parameters(), total.split(sizes), strict=True):
            parameter.grad = (part / len(members)).view_as(parameter)
        self.optimizer.step()
        row = [generation, *(int(rank in members) for rank in range(self.history.shape[1] - 1))]
        self.history[self.step] = torch.tensor(row)
        self.step += 1

    def digest(self) -> str:
        momentum = [each.get("momentum_buffer") for each in self.optimizer.state.values()]
        parts = [*self.model.parameters(), *(each for each in momentum if each is not None)]
        return hashlib.sha1(b"".join(each.detach().numpy().tobytes() for each in parts)).hexdigest()[:12]


def reference(job: Job, steps: list[tuple[int, list[int]]]) -> list[str]:
    """Return the digest after each step, given its generation and members."""
    state, digests = State(job), []
    for generation, members in steps:
        total = state.gradient(members[0])
        for rank in members[1:]:
            total = total + state.gradient(rank)
        state.advance(total, generation, members)
        digests.append(state.digest())
    return digests


def contribution(step: int, rank: int, salt: int) -> torch.Tensor:
    return torch.arange(1000.0, dtype=torch.float64) + (97 * step + salt) * (rank + 1)


# ------------------------------------------------------------------------------------------------------------- the rank


class Inside(NamedTuple):
    """An object of sync_state whose copy is a place."""

    at: Callable[[], None]

    def state_dict(self) -> dict[str, Any]:
        self.at()
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at()


class Rank:
    def __init__(self, job: Job) -> None:
        self.job, self.rank, self.state = job, int(os.environ["RANK"]), State(job)
        self.log_file = os.open(f"{job.folder}/log-{self.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.visits: dict[str, int] = {}
        self.place, self.peers = "init", list(range(job.size))  # where it is, and with whom
        self.stream = pynccl.create_stream()
        os.write(self.log_file, f"{os.getpid()} {start_ticks()}\n".encode())

    def log(self, event: str, **more: Any) -> None:
        line = {"event": event, "at": time.monotonic(), **more}
        os.write(self.log_file, (json.dumps(line) + "\n").encode())

    def at(self, place: str, peers: list[int] | None = None) -> None:
        """Note where this rank is, and let a fault happen."""
        self.place, self.peers = place, self.members if peers is None else peers
        self.visits[place] = self.visits.get(place, 0) + 1
        for fault in self.job.faults:
            if (fault.rank, fault.place, fault.visit) == (self.rank, place, self.visits[place]):
                if fault.delay:
                    timer = threading.Timer(fault.delay, self.strike, [fault])
                    timer.daemon = True
                    timer.start()
                else:
                    self.strike(fault)

    def strike(self, fault: Fault) -> None:
        self.log("fault", kind=fault.kind, place=self.place, planned=fault.place)
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind == "stop":
            stop(self.job.folder, fault.pause)
        elif fault.kind == "os-exit":
            os._exit(3)
        elif fault.kind == "exit":
            sys.exit(0)
        elif fault.kind == "exception":
            raise ValueError("no sample 17 in shard 3")
        elif fault.kind == "impatient":
            self.patience = 1e-4
        elif fault.kind == "cut":
            Path(self.job.folder, "struck").touch()

    # What all ranks do

    def run(self) -> None:
        job, restarts = self.job, self.job.launcher == "restart"
        self.members, self.patience = list(range(job.size)), CALL_SECONDS
        self.comm = pynccl.init(elastic=True, timeout=60)
        if restarts and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
            job.faults = []
            self.check_sum("first")
        fresh = True
        while True:
            try:
                if not fresh:
                    self.recover()
                fresh = True
                self.make_groups()
                while self.state.step < job.steps:
                    self.one_step()
                self.at("commit")
                self.comm.commit(CALL_SECONDS)
                break
            except pynccl.NcclError as error:
                first = str(error).partition("\n")[0]
                self.log("error", place=self.place, peers=self.peers, type=type(error).__name__, text=first[:400])
                if self.place == "survivors":  # what it raises ends this rank
                    self.log("out", text=first[:400])
                    sys.exit(OUT)
                if restarts:
                    raise
                fresh = False
        rows = self.state.history.tolist()
        self.log("end", state=self.state.digest(), members=self.members, history=rows, verdict=self.comm.verdict)
        if job.destroy:
            with contextlib.suppress(pynccl.NcclError):
                self.comm.destroy()

    def recover(self) -> None:
        self.at("survivors")
        self.comm = self.comm.survivors(MEET_SECONDS)
        self.place = "first"
        self.log("survivors", generation=self.comm.generation, verdict=self.comm.verdict)
        self.check_sum("first")
        self.at("agree")
        before = self.state.step
        try:
            newest = self.comm.agree(before, MEET_SECONDS)
        except RuntimeError as error:
            if "load a checkpoint" not in str(error):
                raise
            self.state, before = State(self.job), 0  # the one of step 0
            self.log("anew")
            newest = self.comm.agree(0, MEET_SECONDS)
        state, self.state.step = self.state, newest
        self.at("sync")
        inside = Inside(partial(self.at, "syncing"))
        self.comm.sync_state(state.model, inside, state.optimizer, state.history, timeout=MEET_SECONDS)
        behind, generation = before < state.step, self.comm.generation
        self.log("synced", step=state.step, behind=behind, state=state.digest(), generation=generation)

    def check_sum(self, event: str) -> None:
        """Find the members, by the first collective of a generation."""
        ranks = torch.zeros(self.comm.size, dtype=torch.int64)
        self.comm.all_gather(torch.tensor([self.rank]), ranks)
        self.members = ranks.tolist()
        self.log(event, generation=self.comm.generation, members=self.members)

    def make_groups(self) -> None:
        comm, index = self.comm, self.comm.rank
        self.groups: list[tuple[Any, list[int]]] = []
        if "plan" in self.job.extras:
            self.buffer = torch.zeros(1000, dtype=torch.float64)
            self.plan = comm.plan.all_reduce(self.buffer, self.buffer)
        if "groups" in self.job.extras:
            for number, color in enumerate(((lambda i: i % 2), (lambda i: i // 2))):
                if number:
                    self.at("between")
                peers = [rank for i, rank in enumerate(self.members) if color(i) == color(index)]
                self.groups.append((comm.split(color(index), index), peers))

    def one_step(self) -> None:
        comm, state, step = self.comm, self.state, self.state.step
        self.checks: list[tuple[torch.Tensor, torch.Tensor]] = []  # what a call will write, and what it has to be
        self.at("compute", [])
        time.sleep((7 * step + 3 * self.rank + self.job.seed) % 5 * 0.004)
        total = state.gradient(self.rank)
        self.at("all_reduce")
        if "overlap" in self.job.extras:
            for part in (*total.chunk(3), self.summed(1, self.members)):
                comm.all_reduce(part, part, stream=self.stream)
            self.at("overlap")
        else:
            comm.all_reduce(total, total)
        self.other_calls()
        self.at("commit")
        limit, self.patience = self.patience, CALL_SECONDS
        comm.commit(limit)
        for found, expected in self.checks:
            if not torch.equal(found, expected):
                print(f"WRONG DATA: step {step}: {found[:3]}, not {expected[:3]}", file=sys.stderr, flush=True)
                os._exit(WRONG)
        state.advance(total, comm.generation, self.members)
        self.log("step", step=step, generation=comm.generation, members=self.members, state=state.digest())
        self.at("committed", [])
        if "save" in self.job.extras and step % comm.size == comm.rank:
            self.save(step)

    def summed(self, salt: int, peers: list[int]) -> torch.Tensor:
        """Return this rank's contribution to a sum over these ranks, in place."""
        step = self.state.step
        value = contribution(step, self.rank, salt)
        self.checks.append((value, torch.stack([contribution(step, rank, salt) for rank in peers]).sum(0)))
        return value

    def other_calls(self) -> None:
        comm, step, index = self.comm, self.state.step, self.comm.rank
        if "plan" in self.job.extras:
            self.buffer.copy_(self.summed(2, self.members))
            self.checks[-1] = (self.buffer, self.checks[-1][1])
            self.at("plan")
            self.plan()
        if "chain" in self.job.extras:  # a rank waits only for the one before
            before = self.members[max(index - 1, 0)]
            got = contribution(step, self.rank, 3)
            self.checks.append((got, contribution(step, before, 3)))
            self.at("chain", [before])
            if index:
                comm.recv(got, index - 1)
            if index + 1 < comm.size:
                comm.send(contribution(step, self.rank, 3), index + 1)
        for salt, (group, peers) in enumerate(self.groups, 4):
            value = self.summed(salt, peers)
            self.at("groups", peers)
            group.all_reduce(value, value)

    def save(self, step: int) -> None:
        file = Path(self.job.folder, f"checkpoint-{self.rank}")
        file.write_text(json.dumps([self.comm.generation, step, self.state.digest()]))
        self.at("save")
        self.comm.check_generation()
        moving = time.monotonic()
        file.replace(file.with_name("checkpoint"))
        self.log("saved", generation=self.comm.generation, step=step, moving=moving)


# -------------------------------------------------------------------------------------- what starts or serves the ranks


def main(job: Job) -> None:
    """Be what this process of the job is: a rank, the store, or a launcher, which replaces this process."""
    job.folder = os.environ["PYNCCL_CAMPAIGN_FOLDER"]
    number, program = int(os.environ["RANK"]), sys.argv[0]
    if number == job.size and job.launcher in ("fork", "agents"):
        serve(job)
        return
    launched = os.environ.get("ELASTIC_LAUNCHED") == "1"
    os.environ["ELASTIC_LAUNCHED"] = "1"
    os.environ |= job.env
    store = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if job.launcher == "fork":
        os.environ |= {"WORLD_SIZE": str(job.size), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        del os.environ["LOCAL_WORLD_SIZE"]  # which counts the store
    elif not launched:
        Path(job.folder, f"agent-{number}").write_text(f"{os.getpid()} {start_ticks()}\n")
        os.environ["ELASTIC_STORE"] = store
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        agents = [f"--nnodes={job.size}", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint={store}"]
        words = {
            "starter": [sys.executable, str(Path(__file__).parents[1] / "recipes/elastic_start.py"), str(job.size)],
            "agents": [*torchrun, *agents, "--rdzv-conf=is_host=0", f"--rdzv-id={job.seed}"],
            "restart": [*torchrun, "--standalone", f"--nproc-per-node={job.size}", "--max-restarts=3"],
        }[job.launcher]
        os.execv(words[0], [*words, program])
    elif job.launcher == "agents":  # torchrun's MASTER_ADDR is the agent of rank 0, which may be lost
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = os.environ["ELASTIC_STORE"].split(":")
    if launched:
        torch.set_num_threads(1)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with its launcher, also if stopped
    if job.separate:
        import pynccl.bootstrap.generation as generation
        from pynccl.watch import folder

        node = os.uname().nodename
        for module in (folder, generation):
            vars(module)["machine"] = lambda: node
    Rank(job).run()


def ended(folder: str, names: str, count: int) -> bool:
    """Return whether `count` processes have written these files, which begin with a pid and its start, and are over."""
    texts = [path.read_text().partition("\n")[0].split() for path in Path(folder).glob(names)]
    found = [state_of(int(pid), int(start)) == DEAD for pid, start in filter(None, texts)]
    return len(found) == count and all(found)


def stop(folder: str, pause: float) -> None:
    """Stop this process. The campaign continues it."""
    Path(folder, f"stop-{os.getpid()}-{time.monotonic_ns()}").write_text(f"{os.getpid()} {pause}")
    os.kill(os.getpid(), signal.SIGSTOP)


def serve(job: Job) -> None:
    """Serve the store until all ranks have ended."""
    for fault in job.faults:
        if fault.rank == job.size:
            threading.Timer(fault.delay, stop, [job.folder, fault.pause]).start()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = torch.distributed.TCPStore(host, port, is_master=True, wait_for_workers=False)
    names = "agent-*" if job.launcher == "agents" else "log-*"
    while not ended(job.folder, names, job.size):
        time.sleep(0.05)
    del store
