"""Random jobs: the programs of all ranks follow one global order, so they finish. job_faults.py breaks them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from simulator import Comm, Job, Op, Step

STREAMS = (1, 2)
SIDE_STREAM = 3
COLLECTIVES = ("all_reduce", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier")
DTYPES = ("FLOAT32", "BFLOAT16")


@dataclass
class Draft:
    """A random job before it is played.

    main, side  the steps of each rank's main thread, and of its second thread"""

    rng: random.Random
    size: int
    cuda: bool
    comms: dict[str, Comm] = field(default_factory=dict)
    main: list[list[Step]] = field(default_factory=list)
    side: dict[int, list[Step]] = field(default_factory=dict)
    usable: list[str] = field(default_factory=list)
    line: int = 10
    owed: list[tuple[int, int, str, Op]] = field(default_factory=list)  # source, target, route, its send
    exits: bool = False
    broken: tuple[str, int] = ("", 0)
    hidden: int = -1  # the rank whose record is missing

    def job(self) -> Job:
        threads = [(rank, False, steps) for rank, steps in enumerate(self.main)]
        threads += [(rank, True, steps) for rank, steps in self.side.items()]
        job = Job(self.comms.values(), threads, self.rng.randrange(1 << 30), self.cuda)
        job.exits, job.broken = self.exits, self.broken
        if self.hidden >= 0:
            job.ranks[self.hidden].recorded = False
        return job

    def copy(self) -> Draft:
        main, side = [list(steps) for steps in self.main], {rank: list(steps) for rank, steps in self.side.items()}
        return dataclasses.replace(self, main=main, side=side)

    # Emit steps

    def emit(self, rank: int, *ops: Op, blocking: bool = False) -> None:
        """Add a call or a group, which blocks or goes to a stream."""
        rng = self.rng
        stream = 0 if blocking or (not self.cuda and rng.random() < 0.5) else rng.choice(STREAMS)
        self.main[rank].append(Step(ops, stream, line=ops[0].line))
        if stream and rng.random() < 0.3:
            self.main[rank].append(Step(act="wait", streams=(stream,)))

    def collective(self, name: str) -> Op:
        rng = self.rng
        self.line += 1
        operation = rng.choice(COLLECTIVES)
        if operation == "barrier":
            return Op(name, operation, self.line)
        op = rng.choice(("SUM", "MAX")) if "reduce" in operation else ""
        root = rng.randrange(len(self.comms[name].ranks)) if operation == "broadcast" else -1
        return Op(name, operation, self.line, rng.choice((1024, 4096)), rng.choice(DTYPES), op, root)

    def message(self, name: str, operation: str, peer: int, count: int) -> Op:
        return Op(name, operation, self.line, count, "FLOAT32", peer=peer)


def draw(rng: random.Random) -> Draft:
    """Return a random job."""
    size = rng.choice((2, 3, 3, 4, 4, 5, 6))
    draft = Draft(rng, size, rng.random() < 0.4, main=[[] for _ in range(size)])
    _make_comms(draft)
    plans: list[Callable[[Draft], None]] = [_collective] * 9
    plans += [_two_in_a_group, add_exchange, _batch, _message, add_signal, _early_recv, _early_recv, _settle, _settle]
    if rng.random() < 0.35:
        plans += [_split]
    if rng.random() < 0.15:
        plans += [_init]
    for _ in range(rng.randint(6, 14)):
        rng.choice(plans)(draft)
    if rng.random() < 0.3:
        _side_threads(draft)
    if rng.random() < 0.25:
        _by_all(draft, rng.choice(("shrink", "grow")))
    while draft.owed:
        _settle(draft)
    for rank in range(size):
        draft.main[rank].append(Step(act="wait", streams=STREAMS))
    if rng.random() < 0.4:
        _tear_down(draft)
    return draft


def _make_comms(draft: Draft) -> None:
    rng, size = draft.rng, draft.size
    comms = [Comm("world", tuple(range(size)), listed=rng.random() < 0.5, made=rng.random() < 0.6)]
    if size >= 4 and size % 2 == 0 and rng.random() < 0.7:
        half = size // 2
        comms += [Comm(f"tp{i}", tuple(range(i * half, i * half + half)), parent="world") for i in range(2)]
        comms += [Comm(f"dp{i}", (i, i + half), parent="world") for i in range(half)]
    elif size > 2:
        comms.append(Comm("pair", tuple(sorted(rng.sample(range(size), 2))), parent="world"))
        comms.append(Comm("some", tuple(sorted(rng.sample(range(size), size - 1))), parent="world"))
    made = comms[0].made
    draft.comms = {comm.name: dataclasses.replace(comm, made=made or comm is comms[0]) for comm in comms}
    draft.comms["world"] = comms[0]
    draft.usable = ["world"]
    if made:
        draft.usable = [*draft.comms]
        return
    for rank in range(size):
        draft.main[rank].append(Step((Op("world", "init", 3),), line=3))
    others = [comm for comm in comms if comm is not comms[0]]
    for comm in others:  # each is made by a further init
        draft.comms[comm.name] = dataclasses.replace(comm, made=False, parent="")
        _join(draft, comm.name)


def _join(draft: Draft, name: str) -> None:
    draft.line += 1
    for rank in draft.comms[name].ranks:
        draft.main[rank].append(Step((Op(name, "init", draft.line),), line=draft.line))
    draft.usable.append(name)


def _collective(draft: Draft) -> None:
    name = draft.rng.choice(draft.usable)
    op = draft.collective(name)
    for rank in draft.comms[name].ranks:
        draft.emit(rank, op, blocking=op.operation == "barrier")


def _two_in_a_group(draft: Draft) -> None:
    """Two collectives of two communicators in one group, in any order."""
    names = draft.rng.sample(draft.usable, 2) if len(draft.usable) > 1 else draft.usable * 2
    pair = [draft.collective(name) for name in names]
    for rank in range(draft.size):
        ops = [op for op in pair if rank in draft.comms[op.comm].ranks]
        if names[0] != names[1]:
            draft.rng.shuffle(ops)
        if ops:
            draft.emit(rank, *ops)


def _two(draft: Draft) -> tuple[str, int, int]:
    """Return a communicator and two of its ranks."""
    name = draft.rng.choice(draft.usable)
    draft.line += 1
    first, second = draft.rng.sample(range(len(draft.comms[name].ranks)), 2)
    return name, first, second


def _message(draft: Draft) -> None:
    name, source, target = _two(draft)
    count, ranks = draft.rng.choice((8, 16)), draft.comms[name].ranks
    draft.emit(ranks[source], draft.message(name, "send", target, count))
    draft.emit(ranks[target], draft.message(name, "recv", source, count))


def add_exchange(draft: Draft) -> None:
    """Two ranks send and receive, in opposite orders."""
    name, first, second = _two(draft)
    ranks, counts = draft.comms[name].ranks, draft.rng.choices((8, 16), k=2)
    for count, source, target in ((counts[0], first, second), (counts[1], second, first)):
        draft.emit(ranks[first], draft.message(name, "send" if source == first else "recv", second, count))
        draft.emit(ranks[second], draft.message(name, "recv" if target == second else "send", first, count))


def _batch(draft: Draft) -> None:
    """Each rank sends to the next one, in a group with its recv."""
    name = draft.rng.choice(draft.usable)
    draft.line += 1
    ranks = draft.comms[name].ranks
    n = len(ranks)
    for at, rank in enumerate(ranks):
        ops = [draft.message(name, "send", (at + 1) % n, 8), draft.message(name, "recv", (at - 1) % n, 8)]
        draft.rng.shuffle(ops)
        draft.emit(rank, *ops)


def add_signal(draft: Draft) -> None:
    name, source, target = _two(draft)
    ranks = draft.comms[name].ranks
    draft.emit(ranks[source], Op(name, "signal", draft.line, peer=target))
    draft.emit(ranks[target], Op(name, "wait_signal", draft.line, peer=source))


def _early_recv(draft: Draft) -> None:
    """Post a recv whose send comes later. It has a communicator and a stream of its own."""
    source, target = draft.rng.sample(range(draft.size), 2)
    name = f"route{len(draft.comms)}"
    route = not draft.cuda or draft.rng.random() < 0.5
    draft.comms[name] = Comm(name, (source, target), parent="world", route=route)
    draft.line += 1
    count = draft.rng.choice((8, 16))
    draft.main[target].append(Step((draft.message(name, "recv", 0, count),), 10 + len(draft.comms), line=draft.line))
    draft.owed.append((source, target, name, draft.message(name, "send", 1, count)))


def _settle(draft: Draft) -> None:
    """Send the message for which a recv was posted, and wait for it."""
    if not draft.owed:
        return
    source, target, name, send = draft.owed.pop(draft.rng.randrange(len(draft.owed)))
    draft.line += 1
    stream = next(step.stream for step in draft.main[target] for op in step.ops if op.comm == name)
    draft.main[source].append(Step((dataclasses.replace(send, line=draft.line),), stream, line=draft.line))
    draft.main[source].append(Step(act="wait", streams=(stream,)))
    draft.main[target].append(Step(act="wait", streams=(stream,)))


def _split(draft: Draft) -> None:
    """Split the world into two parts."""
    name = f"split{len(draft.comms)}"
    some = sorted(draft.rng.sample(range(draft.size), draft.rng.randint(1, draft.size - 1)))
    parts = {f"{name}-0": tuple(some), f"{name}-1": tuple(set(range(draft.size)) - set(some))}
    draft.line += 1
    for rank in range(draft.size):
        makes = tuple(part for part, ranks in parts.items() if rank in ranks)
        draft.main[rank].append(Step((Op("world", "split", draft.line, makes=makes),), line=draft.line))
    for part, ranks in parts.items():
        draft.comms[part] = Comm(part, ranks, parent="world", listed=False, made=False)
        if len(ranks) > 1:
            draft.usable.append(part)


def _init(draft: Draft) -> None:
    """Make a communicator of some ranks."""
    name = f"late{len(draft.comms)}"
    ranks = tuple(sorted(draft.rng.sample(range(draft.size), draft.rng.randint(2, draft.size))))
    draft.comms[name] = Comm(name, ranks, made=False)
    _join(draft, name)


def _by_all(draft: Draft, operation: str, name: str = "world") -> None:
    ranks = draft.comms[name].ranks
    draft.line += 1
    excluded = (draft.rng.randrange(len(ranks)),) if operation == "shrink" and len(ranks) > 2 else ()
    for at, rank in enumerate(ranks):
        if at not in excluded:
            step = Step((Op(name, operation, draft.line, excluded=excluded),), line=draft.line)
            draft.main[rank].append(step)


def _tear_down(draft: Draft) -> None:
    finalizes = draft.rng.random() < 0.5
    for name in draft.usable[::-1]:
        for operation in ("finalize", "destroy") if finalizes else ("destroy",):
            _by_all(draft, operation, name)
    draft.exits = draft.rng.random() < 0.5


def _side_threads(draft: Draft) -> None:
    """Second threads, which use communicators of their own."""
    rng = draft.rng
    ranks = tuple(sorted(rng.sample(range(draft.size), rng.randint(2, draft.size))))
    for name in ("side0", "side1"):
        draft.comms[name] = Comm(name, ranks, parent="world", side=True)
    draft.side = {rank: [] for rank in ranks}
    for _ in range(rng.randint(2, 5)):
        op = draft.collective(rng.choice(("side0", "side1")))
        for rank in ranks:
            stream = SIDE_STREAM if draft.cuda and op.operation != "barrier" else 0
            draft.side[rank].append(Step((op,), stream, line=op.line))
            if stream:
                draft.side[rank].append(Step(act="wait", streams=(SIDE_STREAM,)))
