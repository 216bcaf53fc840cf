"""Generate the random programs of the fault campaign: Python source with one call per line and one fault.

The seed determines everything: the world size, one node or two, the rendezvous, the steps, the fault, its rank and its
place. The generator records the line of every call, so that the lines named in errors can be checked.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from faults.steps import Block, Comm, Step, collective, draw, split


@dataclass(frozen=True)
class Kind:
    """A kind of fault: a statement, a signal or a wrong call.

    statement  statement that the culprit executes
    signal     signal that the culprit receives during a call
    call       the culprit makes another call than the other ranks
    places     possible places: "start", "init", "step", "split" (a step that is a split), "destroy"
    status     exit code of the culprit
    nodes      whether it needs two nodes
    """

    statement: str = ""
    signal: str = ""
    call: bool = False
    places: tuple[str, ...] = ("step",)
    status: int = -9
    nodes: bool = False


_KILL, _WAITING = "os.kill(os.getpid(), signal.SIGKILL)", ("step", "step", "init", "split")
FAULTS = {
    "none": Kind(),
    "kill": Kind(_KILL),
    "stop": Kind("os.kill(os.getpid(), signal.SIGSTOP)"),
    "exception": Kind('raise ValueError("no sample 17 in shard 3")', status=1),
    "os-exit": Kind("os._exit(3)", status=3),
    "early-exit": Kind("sys.exit(0)", status=0),
    "kill-in-call": Kind(signal="SIGKILL"),
    "stop-in-call": Kind(signal="SIGSTOP", places=_WAITING),
    "count": Kind(call=True),
    "type": Kind(call=True),
    "operator": Kind(call=True),
    "root": Kind(call=True),
    "left-out": Kind(call=True),
    "order": Kind(call=True),
    "ctrl-c": Kind(signal="SIGINT", places=_WAITING, status=-2),
    "before-init": Kind(_KILL, places=("start",)),
    "in-init": Kind(signal="SIGKILL", places=("init",)),
    "in-split": Kind(signal="SIGKILL", places=("split",)),
    "in-destroy": Kind(signal="SIGKILL", places=("destroy",)),
    "link-cut": Kind('mark("struck"); wait_for("cut")', nodes=True),
    "packet-loss": Kind(nodes=True),
}
BLAMELESS = ("none", "packet-loss")

TIMEOUT = 5  # seconds, of a communicator
LOSSY_TIMEOUT = 20  # with packet loss: TCP retransmits a packet after 1, 3, 7 s
INSIDE_SECONDS = 0.15  # after this time, a rank is inside its call if another rank is late
CTRL_C_SECONDS = 2.0  # delay of the late rank, so that only Ctrl-C can end the wait

HEAD = """\
import os
import signal
import sys

import torch
from faults.values import *

import pynccl
import pynccl_autograd as ad
"""


@dataclass
class Fault:
    """The fault of a run, and what an error should name.

    rank    the culprit's rank in the job; -1: none
    place   one of the kind's places
    step    index of the step at which the fault occurs
    delay   seconds from there to the signal
    either  two ranks that disagree, of which an error may blame either; else empty
    lines   lines of the program of which an error must name one; empty if there is no line to name
    comm    communicator of a left-out call: the culprit's next call of it reveals the fault, as does its next call
            of any communicator
    nodes   ranks on each of two nodes; empty if all ranks are on one
    """

    name: str
    rank: int = -1
    place: str = "step"
    step: int = -1
    delay: float = 0.0
    either: set[int] = field(default_factory=set)
    lines: set[int] = field(default_factory=set)
    comm: Comm | None = None
    nodes: tuple[tuple[int, ...], ...] = ()

    @property
    def kind(self) -> Kind:
        return FAULTS[self.name]


@dataclass
class Program:
    """A program and its source text.

    rendezvous  "environment" or "file"
    wrong       the culprit's block in the step of the fault, if its arguments are wrong
    comms       line of a call -> its communicator
    """

    seed: int
    size: int
    rendezvous: str
    fault: Fault
    text: str = ""
    steps: list[Step] = field(default_factory=list)
    wrong: Block | None = None
    comms: dict[int, Comm] = field(default_factory=dict)

    @property
    def world(self) -> Comm:
        return Comm("comm", (tuple(range(self.size)),))

    @property
    def timeout(self) -> int:
        return LOSSY_TIMEOUT if self.fault.name == "packet-loss" else TIMEOUT

    def emit(self, line: str) -> int:
        """Add a line and return its number."""
        self.text += f"{line}\n"
        return self.text.count("\n")

    def emit_block(self, step: Step, block: Block | None = None, indent: str = "") -> set[int]:
        """Add a step, or `block` in its place, and return the lines of its calls."""
        block = block or step.write(step.calls)
        for line in block.before:
            self.emit(indent + line)
        lines = {self.emit(indent + line) for line in block.calls}
        self.record(lines, step.comm)
        for line in block.after:
            self.emit(indent + line)
        return lines

    def record(self, lines: set[int], comm: Comm) -> None:
        """Record that these lines are calls. The first calls after a left-out call reveal it."""
        self.comms.update(dict.fromkeys(lines, comm))
        if self.fault.comm is not None and self.fault.comm.name == comm.name:
            self.fault.lines |= lines
            self.fault.comm = None


def fault_of(seed: int) -> str:
    """Return the default fault of a seed. Successive seeds cycle through all faults, beginning with the control."""
    return list(FAULTS)[seed % len(FAULTS)]


def make(seed: int, only: str = "") -> Program:
    """Return the program of this seed, with the fault `only` or the seed's own."""
    fault = Fault(only or fault_of(seed))
    rng = random.Random(f"{seed} {fault.name}")
    program = Program(seed, rng.choice([2, 2, 3, 3, 4]), rng.choice(["environment", "file"]), fault)
    if rng.random() < 0.2 or fault.kind.nodes:
        first = rng.randint(1, program.size - 1)
        fault.nodes = (tuple(range(first)), tuple(range(first, program.size)))
    program.steps = draw_steps(rng, program.world, rng.randint(8, 18))
    if fault.name not in BLAMELESS:
        place(rng, program)
    write(rng, program)
    return program


def draw_steps(rng: random.Random, world: Comm, count: int) -> list[Step]:
    comms, steps = [world], []
    for number in range(1, count + 1):
        comm = rng.choice([world, *comms])
        if len(comms) < 3 and rng.random() < 0.12:
            steps.append(split(rng, number, comm, f"child{len(comms)}"))
            comms.append(steps[-1].makes or world)
        else:
            steps.append(draw(rng, number, comm))
    return steps


def place(rng: random.Random, program: Program) -> None:
    """Choose place, step and rank of the fault. Insert a step if no step fits."""
    fault, steps, world = program.fault, program.steps, program.world
    fault.place = rng.choice(fault.kind.places)
    fault.rank = rng.randrange(program.size)
    at = rng.randrange(len(steps))
    if fault.kind.signal:
        fault.delay = INSIDE_SECONDS
        if fault.place == "destroy" or (fault.name == "kill-in-call" and rng.random() < 0.5):
            fault.delay = rng.choice([0.0001, 0.0005, 0.001, 0.005, 0.02])
        steps.insert(at, split(rng, 100, world, "late") if fault.place == "split" else _draw_waiting(rng, world))
    elif fault.name in ("left-out", "order"):
        _insert_another(rng, program, at)
        fault.rank = rng.choice([rank for rank in steps[at].ranks if rank in steps[at].comm.with_peers])
        fault.either = {0, 1} if program.size == 2 else set()
    elif fault.kind.call:
        fits = [i for i, step in enumerate(steps) if step.wrong(fault.name, rng)]
        at = rng.choice(fits) if fits else at
        while not (wrong := steps[at].wrong(fault.name, rng)):
            steps.insert(at, collective(rng, 100, world))
        program.wrong = wrong
        fault.rank = rng.choice([rank for rank in steps[at].ranks if rank in steps[at].comm.with_peers])
        fault.either = _pair(steps[at], fault.rank)
    fault.step = at


def _pair(step: Step, rank: int) -> set[int]:
    """Return the two ranks that disagree if `rank` makes another call; empty if more than two ranks take part."""
    group = step.comm.group(rank)
    if step.kind == "ring":  # it disagrees with the rank from which it receives
        return {rank, group[group.index(rank) - 1]}
    ranks = set(step.ranks) & set(group)
    return ranks if len(ranks) == 2 else set()


def _draw_waiting(rng: random.Random, comm: Comm) -> Step:
    while not (step := draw(rng, 100, comm)).waits:
        pass
    return step


def _insert_another(rng: random.Random, program: Program, at: int) -> None:
    """Insert a collective of all ranks, of another operation, after step `at`. For "order" both steps are new."""
    steps, world = program.steps, program.world
    if program.fault.name == "order" or not steps[at].comm.with_peers:
        steps.insert(at, collective(rng, 100, world, rng.choice(("plain", "plan", "stream"))))
    used = [call.operation for call in steps[at].calls[:1]]
    others = [name for name in ("all_reduce", "all_gather", "all_to_all", "reduce_scatter") if name not in used]
    steps.insert(at + 1, collective(rng, 101, world, "plain", others))


def write(rng: random.Random, program: Program) -> None:
    """Write the source text, and fill in the lines that an error may name."""
    fault, steps = program.fault, program.steps
    program.emit(f'"""Seed {program.seed}: {program.size} ranks, {fault.name}"""\n{HEAD}')
    strike(program, "start")
    strike(program, "init")
    join = "pynccl.init(" if program.rendezvous == "environment" else 'pynccl.from_file("rendezvous", RANK, SIZE, '
    program.emit(f"comm = {join}timeout={program.timeout})\nranks_comm = list(range(SIZE))")
    program.emit("stream = pynccl.create_stream()")
    at = 0
    while at < len(steps):
        program.emit(f"# {steps[at].number}: {steps[at].kind}")
        if at == fault.step and fault.kind.call:
            at += write_calls(program, steps[at], steps[at + 1 :])
            continue
        if at == fault.step and fault.place in ("step", "split"):
            strike(program, fault.place)
        program.emit_block(steps[at])
        at += 1
    children = [step.makes for step in reversed(steps) if step.makes]
    for comm in (*children, program.world):  # the next call reveals a wrong call at the latest
        program.record({program.emit(f"{comm.name}.barrier()")}, comm)
    if rng.random() < 0.7 or fault.place == "destroy":
        for comm in children:
            program.emit(f"{comm.name}.destroy()")
        strike(program, "destroy")
        program.emit("comm.destroy()")
    program.emit('print("done", flush=True)')


def strike(program: Program, where: str) -> None:
    """Write the fault if it is here: the culprit's statement, or a signal in the call that follows."""
    fault = program.fault
    if fault.place != where or fault.rank < 0:
        return
    if fault.kind.statement:
        line = program.emit(f"if RANK == {fault.rank}: {fault.kind.statement}")
        fault.lines = {line} if fault.name == "exception" else set()
    elif fault.kind.signal:
        program.emit(f"if RANK == {fault.rank}: strike(signal.{fault.kind.signal}, {fault.delay})")
        if fault.delay == INSIDE_SECONDS:
            late = CTRL_C_SECONDS if fault.name == "ctrl-c" else 0
            program.emit(f"if RANK == {(fault.rank + 1) % program.size}: come_late({late})")


def write_calls(program: Program, step: Step, following: Sequence[Step]) -> int:
    """Write the calls of the other ranks and, on separate lines, the culprit's. Return how many steps that covers."""
    fault = program.fault
    if step.makes:
        program.emit(step.write(()).before[0])  # also for the rank that leaves the split out
    program.emit(f"if RANK != {fault.rank}:")
    program.emit_block(step, indent="    ")
    if fault.name == "left-out":
        fault.comm = step.comm
        fault.lines = program.emit_block(following[0])
        return 2
    if fault.name == "order":
        program.emit_block(following[0], indent="    ")
        program.emit("else:")
        fault.lines = program.emit_block(following[0], indent="    ")
        program.emit_block(step, indent="    ")
        return 2
    program.emit("else:")
    fault.lines = program.emit_block(step, program.wrong, "    ")
    return 1
