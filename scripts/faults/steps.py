"""The steps of a random program of the fault campaign: how each is drawn, and how it is written, one call a line.

A collective is a `Call`, and a wrong call is one with another count, type, operator or root. Sizes are small: what a
campaign looks for is in the calls, not in the bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

FLOATS = ("float32", "float64", "float16", "bfloat16")
DTYPES = (*FLOATS, "int8", "uint8", "int32", "int64")
OPERATORS = ("sum", "prod", "max", "min")
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
WAITING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")  # in which every rank waits for every other
OPERATIONS = (*WAITING, *ROOTED)
ADJOINTS = {"all_reduce": "all_reduce", "reduce_scatter": "all_gather", "all_gather": "reduce_scatter"}
STYLES = ("plain", "plain", "plan", "stream")


@dataclass(frozen=True)
class Comm:
    """A communicator of the program: the variable that has it, and the ranks of the job in it, group by group."""

    name: str
    groups: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> str:
        """The variable that has the list of this rank's group."""
        return f"ranks_{self.name}"

    @property
    def members(self) -> list[int]:
        return sorted(rank for group in self.groups for rank in group)

    @property
    def together(self) -> list[int]:
        """The members that are not alone in their group."""
        return [rank for group in self.groups if len(group) > 1 for rank in group]

    def group(self, rank: int) -> tuple[int, ...]:
        """The group of a rank of the job; empty if it is in none."""
        return next((group for group in self.groups if rank in group), ())


@dataclass(frozen=True)
class Call:
    """A collective or a message with its arguments."""

    operation: str
    count: int
    dtype: str
    op: str = "sum"
    root: int = 0

    def arguments(self) -> str:
        reducing = f', op="{self.op}"' if self.operation in REDUCING else ""
        return reducing + (f", root={self.root}" if self.operation in ROOTED else "")

    def changed(self, what: str, rng: random.Random, comm: Comm) -> Call | None:
        """The call with another count, type, operator or root; None if it has no such thing."""
        smallest = min(map(len, comm.groups))
        if what == "count":
            return replace(self, count=self.count + rng.randint(1, 5))
        if what == "type" and self.operation != "message":
            return replace(self, dtype=rng.choice([one for one in DTYPES if one != self.dtype]))
        if what == "operator" and self.operation in REDUCING:
            return replace(self, op=rng.choice([one for one in OPERATORS if one != self.op]))
        if what == "root" and self.operation in ROOTED and smallest > 1:
            return replace(self, root=(self.root + rng.randint(1, smallest - 1)) % smallest)
        return None


@dataclass
class Block:
    """Lines of a step: what comes before its calls, the calls, and the check of what has come out."""

    before: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)


@dataclass
class Step:
    """One step of a program.

    write  the lines of the step, with these calls in place of its own
    calls  those that a fault may change
    ranks  that take part, of the job
    makes  the communicator that a split makes
    """

    number: int
    kind: str
    comm: Comm
    write: Callable[[Sequence[Call]], Block]
    calls: list[Call] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    makes: Comm | None = None

    def __post_init__(self) -> None:
        self.ranks = self.ranks or self.comm.members

    def wrong(self, what: str, rng: random.Random) -> Block | None:
        """The step with one of its calls wrong; None if nothing in it can be wrong in this way."""
        options = []
        for at, call in enumerate(self.calls if self.comm.together else ()):
            if changed := call.changed(what, rng, self.comm):
                options.append([*self.calls[:at], changed, *self.calls[at + 1 :]])
        return self.write(rng.choice(options)) if options else None


def draw_call(rng: random.Random, comm: Comm, operations: Sequence[str] = OPERATIONS) -> Call:
    operation, dtype = rng.choice(operations), rng.choice(DTYPES)
    exact = dtype in FLOATS and 3 not in map(len, comm.groups)  # thirds are not, in no type
    op = rng.choice((*OPERATORS, "avg") if exact else OPERATORS)
    most = rng.choice([8, 64, 64, 700, 40_000]) if op != "prod" else 64
    return Call(operation, rng.randint(1, most), dtype, op, rng.randrange(min(map(len, comm.groups))))


def collective(
    rng: random.Random, number: int, comm: Comm, style: str = "", operations: Sequence[str] = OPERATIONS
) -> Step:
    """A collective in one of the ways of calling it."""
    call, style = draw_call(rng, comm, operations), style or rng.choice(STYLES)

    def write(calls: Sequence[Call]) -> Block:
        return write_call(number, comm, calls[0], style)

    return Step(number, f"{style} {call.operation}", comm, write, [call])


def write_call(number: int, comm: Comm, call: Call, style: str) -> Block:
    x, y, on = f"x{number}", f"y{number}", f"{comm.name}.{call.operation}"
    whole = f" * {comm.name}.size" if call.operation in ("reduce_scatter", "all_to_all", "scatter") else ""
    block = Block([f'{x} = data({number}, {call.count}{whole}, "{call.dtype}")'])
    arguments = f"{x}{call.arguments()}"
    if style == "plan":
        block.before.append(f"p{number} = {comm.name}.plan.{call.operation}({arguments})")
        block.calls = [f"p{number}()"]
        block.after = [f"{y} = p{number}.recv"]
    elif style == "stream":
        block.calls = [f"{y} = {on}({arguments}, stream=stream)", "stream.synchronize()"]
    elif style == "backward":
        grad = "" if call.operation == "reduce_scatter" else ', grad="sum"'
        block.before.append(f"{x}.requires_grad_()")
        block.calls = [
            f"{y} = ad.{call.operation}({x}, {comm.name}{grad})",
            f'{y}.backward(data({number + 1000}, {y}.numel(), "float64"))',
        ]
        back = f'expected({number + 1000}, {comm.ranks}, "{ADJOINTS[call.operation]}", {call.count})'
        block.after = [f'check({number}, {x}.grad, {back}, "float64")']
    else:
        block.calls = [f"{y} = {on}({arguments})"]
    expected = f'"{call.operation}", {call.count}, "{call.op}", {call.root}'
    block.after.append(f'check({number}, {y}, expected({number}, {comm.ranks}, {expected}), "{call.dtype}")')
    return block


def barrier(rng: random.Random, number: int, comm: Comm) -> Step:
    return Step(number, "barrier", comm, lambda calls: Block(calls=[f"{comm.name}.barrier()"]))


def group(rng: random.Random, number: int, comm: Comm) -> Step:
    """Two or three collectives as one group."""

    def write(calls: Sequence[Call]) -> Block:
        block = Block(calls=["with pynccl.group():"])
        for i, call in enumerate(calls):
            one = write_call(number * 10 + 1000 + i, comm, call, "plain")
            block.before += one.before
            block.calls += [f"    {line}" for line in one.calls]
            block.after += one.after
        return block

    return Step(number, "group", comm, write, [draw_call(rng, comm) for _ in range(rng.randint(2, 3))])


def message(rng: random.Random, number: int, comm: Comm) -> Step:
    """One rank sends, another one receives, the rest goes on."""
    ranks = next((ranks for ranks in comm.groups if len(ranks) > 1), None)
    if ranks is None:
        return collective(rng, number, comm)
    sender, receiver = rng.sample(ranks, 2)
    x, y = f"x{number}", f"y{number}"

    def write(calls: Sequence[Call]) -> Block:
        (call,) = calls
        return Block(
            [
                f'{x} = data({number}, {call.count}, "{call.dtype}")',
                f"{y} = torch.empty({call.count}, dtype=torch.{call.dtype})",
            ],
            [
                f"if RANK == {sender}:",
                f"    {comm.name}.send({x}, {ranks.index(receiver)})",
                f"elif RANK == {receiver}:",
                f"    {comm.name}.recv({y}, {ranks.index(sender)})",
                f'    check({number}, {y}, sample({number}, {sender}, {call.count}), "{call.dtype}")',
            ],
        )

    call = Call("message", rng.choice([2, 80, 5000]), rng.choice(DTYPES))
    return Step(number, "send and recv", comm, write, [call], [sender, receiver])


def backward(rng: random.Random, number: int, comm: Comm) -> Step:
    """A differentiable collective, forwards and backwards."""
    call = Call(rng.choice(list(ADJOINTS)), rng.randint(1, 20), "float64")
    return Step(number, "backward", comm, lambda calls: write_call(number, comm, call, "backward"))


def split(rng: random.Random, number: int, comm: Comm, name: str) -> Step:
    """A communicator of some of the ranks; ranks in none get None."""
    colors = {rank: rng.choice([0, 0, 0, 1]) for rank in comm.members}
    keys = {rank: rng.choice([rank, -rank]) for rank in comm.members}
    groups = []
    for of_parent in comm.groups:
        for color in (0, 1):
            mine = [rank for rank in of_parent if colors[rank] == color]
            groups.append(tuple(sorted(mine, key=lambda rank: (keys[rank], of_parent.index(rank)))))
    made = Comm(name, tuple(one for one in groups if one))
    block = Block(
        [f"{name}, {made.ranks} = None, group_of({[list(one) for one in made.groups]})"],
        [f"{name} = {comm.name}.split({colors}[RANK], {keys}[RANK])"],
        [f"assert {name} is not None and {name}.size == len({made.ranks})"],
    )
    return Step(number, "split", comm, lambda calls: block, makes=made)


KINDS: dict[Callable[[random.Random, int, Comm], Step], int] = {
    collective: 12,
    barrier: 1,
    group: 2,
    message: 3,
    backward: 3,
}


def waiting(rng: random.Random, number: int, comm: Comm) -> Step:
    """A step in which every rank waits for every other."""
    if rng.random() < 0.3:
        return rng.choice((barrier, backward))(rng, number, comm)
    return collective(rng, number, comm, operations=WAITING)


def draw(rng: random.Random, number: int, comm: Comm) -> Step:
    (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
    return kind(rng, number, comm)
