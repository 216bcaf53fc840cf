"""Random programs of the fault campaign, written as Python with one call a line, and one fault in each.

The seed says all: how many ranks, on one node or two, how they find each other, the steps, the fault, its rank and its
place. The lines of all calls are known, so that what an error names can be held against them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from faults.steps import KINDS, Block, Comm, Step, collective, draw_call, split

# What ends a process where it stands. What hits it in a call comes from the campaign, when it has said where it is.
STATEMENTS = {
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "stop": "os.kill(os.getpid(), signal.SIGSTOP)",
    "exception": 'raise ValueError("no sample 17 in shard 3")',
    "os-exit": "os._exit(3)",
    "early-exit": "sys.exit(0)",
}
STATUS = {"exception": 1, "os-exit": 3, "early-exit": 0, "ctrl-c": -2}  # in which they end; the others are killed
IN_A_CALL = ("kill-in-call", "stop-in-call", "ctrl-c", "in-init", "in-split", "in-destroy")
WRONG = ("count", "type", "operator", "root")
CALLS = (*WRONG, "left-out", "order")
NODES = ("link-cut", "packet-loss")
FAULTS = ("none", *STATEMENTS, "kill-in-call", "stop-in-call", *CALLS, "ctrl-c", "before-init", *IN_A_CALL[3:], *NODES)

TIMEOUT = 5  # seconds that a communicator waits
LOSSY_TIMEOUT = 20  # where packets are lost: TCP sends the same one again after 1, 3, 7 s

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
    """What goes wrong in a run, and what an error should name.

    rank     of the job; -1: none; status: the exit code with which it ends
    step     index of the step at which it happens
    either   of two ranks that disagree either may be blamed: these two; else empty
    lines    of the program: any of them is right; empty where there is no line to name
    soon     seconds until a thread of the rank kills it, whatever it does then; 0: the campaign strikes
    comm     of the call that is left out: its rank's next call of it shows that, as its next call of all does
    place    "step", or what the rank is inside of: "init", "split", "destroy"
    nodes    ranks on each of two nodes; empty where all are on one
    """

    name: str
    rank: int = -1
    step: int = -1
    other: int = -1  # the rank that comes late, so that `rank` waits
    status: int = -9
    soon: float = 0.0
    comm: Comm | None = None
    place: str = "step"
    either: set[int] = field(default_factory=set)
    lines: set[int] = field(default_factory=set)
    nodes: tuple[tuple[int, ...], ...] = ()


@dataclass
class Program:
    """A program as text.

    comms   line of a call -> its communicator
    """

    seed: int
    size: int
    meeting: str
    fault: Fault
    text: str = ""
    comms: dict[int, Comm] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)


class Writer:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def emit(self, text: str) -> int:
        """Add a line; its number."""
        self.lines.append(text)
        return len(self.lines)


def fault_of(seed: int) -> str:
    """Which fault a seed has, if none is asked for: all in turn, a control first."""
    return FAULTS[seed % len(FAULTS)]


def make(seed: int, only: str = "") -> Program:
    """The program of this seed, with the fault that is asked for, or the seed's."""
    name = only or fault_of(seed)
    rng = random.Random(f"{seed} {name}")
    size = rng.choice([2, 2, 3, 3, 4])
    program = Program(seed, size, rng.choice(["environment", "file"]), Fault(name))
    if rng.random() < 0.2 or name in NODES:
        first = rng.randint(1, size - 1)
        program.fault.nodes = (tuple(range(first)), tuple(range(first, size)))
    program.steps = draw_steps(rng, size, rng.randint(8, 18))
    place(rng, program)
    write(rng, program)
    return program


def draw_steps(rng: random.Random, size: int, count: int) -> list[Step]:
    world = Comm("comm", (tuple(range(size)),))
    comms, steps = [world], []
    for number in range(1, count + 1):
        comm = rng.choice([world, *comms])
        if len(comms) < 3 and rng.random() < 0.12:
            steps.append(split(rng, number, comm, f"child{len(comms)}"))
            comms.append(steps[-1].makes or world)
        else:
            kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
            steps.append(kind(rng, number, comm))
    return steps


def place(rng: random.Random, program: Program) -> None:
    """Choose rank and step of the fault; steps are added where none fits."""
    fault, steps, size = program.fault, program.steps, program.size
    fault.status = STATUS.get(fault.name, -9)
    fault.rank = rng.randrange(size) if fault.name not in ("none", "packet-loss") else -1
    world, number = Comm("comm", (tuple(range(size)),)), 100
    at = rng.randrange(len(steps))
    if fault.name in IN_A_CALL:
        fault.place = fault.name.removeprefix("in-") if fault.name.startswith("in-") else "step"
        if fault.name in ("stop-in-call", "ctrl-c"):
            fault.place = rng.choice(["step", "step", "init", "split"])
        late = split(rng, number, world, "late") if fault.place == "split" else _waiting(rng, number, world)
        steps.insert(at, late)
    elif fault.name in WRONG:
        fits = [i for i, step in enumerate(steps) if fault.name in step.wrong]
        at = rng.choice(fits) if fits else at
        while fault.name not in steps[at].wrong:
            steps.insert(at, collective(rng, number, world))
        fault.rank = rng.choice(steps[at].wrong[fault.name][0])
        fault.either = _pair(steps[at], fault.rank)
    elif fault.name in ("left-out", "order"):
        at = _before_another(rng, steps, at, world, fault.name == "order")
        shared = [rank for rank in steps[at].ranks if any(rank in g and len(g) > 1 for g in steps[at].comm.groups)]
        fault.rank = rng.choice(shared)
        fault.either = {0, 1} if size == 2 else set()
    if fault.name == "in-destroy" or (fault.name == "kill-in-call" and rng.random() < 0.5):
        fault.soon = rng.choice([0.0001, 0.0005, 0.001, 0.005, 0.02])
    fault.step = at
    fault.other = rng.choice([rank for rank in range(size) if rank != fault.rank])


def _pair(step: Step, rank: int) -> set[int]:
    """The two ranks that disagree if this one calls something else, where they are only two."""
    together = next(group for group in step.comm.groups if rank in group)
    if step.kind == "ring":  # with the one of which it receives
        return {rank, together[together.index(rank) - 1]}
    ranks = set(step.ranks) & set(together)
    return ranks if len(ranks) == 2 else set()


def _waiting(rng: random.Random, number: int, comm: Comm) -> Step:
    while True:
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        step = kind(rng, number, comm)
        if step.waits:
            return step


def _before_another(rng: random.Random, steps: list[Step], at: int, world: Comm, both: bool) -> int:
    """Put a collective of all ranks behind the step at `at`, of another operation; `both`: two of them, together."""
    step = steps[at]
    if both or not any(len(group) > 1 for group in step.comm.groups):
        step = collective(rng, 100, world, style=rng.choice(("plain", "plan", "stream")))
        steps.insert(at, step)
    own = step.call.operation if step.call else ""
    others = [one for one in ("all_reduce", "all_gather", "all_to_all", "reduce_scatter") if one != own]
    steps.insert(at + 1, collective(rng, 101, world, draw_call(rng, world, others), "plain"))
    return at


def write(rng: random.Random, program: Program) -> None:
    """The text, and the lines that are right to name."""
    out, fault, name = Writer(), program.fault, program.fault.name
    out.emit(f'"""Seed {program.seed}: {program.size} ranks, {name}"""')
    for line in HEAD.splitlines():
        out.emit(line)
    if name == "before-init":
        how = rng.choice(["kill", "os-exit"])
        fault.status = STATUS.get(how, -9)
        out.emit(f"if RANK == {fault.rank}: {STATEMENTS[how]}")
    _late(out, program, "init")
    join = "pynccl.init(" if program.meeting == "environment" else 'pynccl.from_file("meeting", RANK, SIZE, '
    out.emit(f"comm = {join}timeout={LOSSY_TIMEOUT if name == 'packet-loss' else TIMEOUT})")
    out.emit("ranks_comm = list(range(SIZE))")
    out.emit("stream = pynccl.create_stream()")
    skip = -1
    for i, step in enumerate(program.steps):
        out.emit(f"# {step.number}: {step.kind}")
        if i == fault.step:
            skip = _write_fault(out, program, i)
        elif i != skip:
            _write_block(out, program, step, step.block)
    children = [step.makes for step in reversed(program.steps) if step.makes]
    for comm in (
        *children,
        Comm("comm", (tuple(range(program.size)),)),
    ):  # a wrong call shows at the next one at latest
        number = out.emit(f"{comm.name}.barrier()")
        program.comms[number] = comm
        _meets_what_was_left_out(program.fault, comm, [number])
    if rng.random() < 0.7 or fault.place == "destroy":
        for comm in children:
            out.emit(f"{comm.name}.destroy()")
        _late(out, program, "destroy")
        out.emit("comm.destroy()")
    out.emit('print("done", flush=True)')
    program.text = "\n".join(out.lines) + "\n"


def _late(out: Writer, program: Program, place: str) -> None:
    """If the fault is here: its rank says that it is about to enter the next call; another one comes there late."""
    fault = program.fault
    if fault.name not in IN_A_CALL or fault.place != place:
        return
    if fault.soon:
        out.emit(f"if RANK == {fault.rank}: die_in({fault.soon})")
    else:
        out.emit(f'if RANK == {program.fault.rank}: mark("here")')
        out.emit(f'if RANK == {program.fault.other}: wait_for("go")')


def _write_block(out: Writer, program: Program, step: Step, block: Block, indent: str = "") -> set[int]:
    """Lines of the calls."""
    for line in block.before:
        out.emit(indent + line)
    calls = [out.emit(indent + line) for line in block.calls]
    program.comms.update(dict.fromkeys(calls, step.comm))
    _meets_what_was_left_out(program.fault, step.comm, calls)
    for line in block.after:
        out.emit(indent + line)
    return set(calls)


def _meets_what_was_left_out(fault: Fault, comm: Comm, calls: list[int]) -> None:
    """Once: these are the first calls that the rank makes in the place of those that it has left out."""
    if calls and fault.comm is not None and fault.comm.name == comm.name:
        fault.lines |= set(calls)
        fault.comm = None


def _write_fault(out: Writer, program: Program, at: int) -> int:
    """The step with the fault; the index of a step that is written with it, else -1."""
    fault, name, step = program.fault, program.fault.name, program.steps[at]
    mine = f"if RANK == {fault.rank}:"
    if name in CALLS:
        return _write_calls(out, program, at)
    if name in STATEMENTS:
        line = out.emit(f"{mine} {STATEMENTS[name]}")
        fault.lines = {line} if name == "exception" else set()
    elif name == "link-cut":
        out.emit(f'{mine} mark("here"); wait_for("go")')
    elif fault.place in ("step", "split"):
        _late(out, program, fault.place)
    _write_block(out, program, step, step.block)
    return -1


def _write_calls(out: Writer, program: Program, at: int) -> int:
    """What the others call at this step, and, on lines of its own, what the rank to blame calls there."""
    fault, name = program.fault, program.fault.name
    step, following = program.steps[at], program.steps[at + 1 : at + 2]
    if step.makes:
        out.emit(step.block.before[0])  # the one that leaves the split out knows the variables, too
    out.emit(f"if RANK != {fault.rank}:")
    for one in (step, *following) if name == "order" else (step,):
        _write_block(out, program, one, one.block, "    ")
    if name == "left-out":
        fault.comm = step.comm
        fault.lines = _write_block(out, program, following[0], following[0].block)
        return at + 1
    out.emit("else:")
    if name == "order":
        fault.lines = _write_block(out, program, following[0], following[0].block, "    ")
        _write_block(out, program, step, step.block, "    ")
        return at + 1
    fault.lines = _write_block(out, program, step, step.wrong[name][1], "    ")
    return -1
