"""Draw and write the steps of a random program of the fault campaign, one call per line.

A collective is a `Call`. A wrong call has another count, data type, operator or root. Sizes are small: the campaign
tests calls, not throughput.
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
WAITING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")  # every rank waits for every other
OPERATIONS = (*WAITING, *ROOTED)
STYLES = ("plain", "plain", "into", "plan", "stream")


@dataclass(frozen=True)
class Comm:
    """A communicator of the program: its variable, and its ranks of the job, group by group."""

    name: str
    groups: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> str:
        """Return the variable with the ranks of this rank's group."""
        return f"ranks_{self.name}"

    @property
    def members(self) -> list[int]:
        return sorted(rank for group in self.groups for rank in group)

    @property
    def with_peers(self) -> list[int]:
        """Return the members that are not alone in their group."""
        return [rank for group in self.groups if len(group) > 1 for rank in group]

    def group(self, rank: int) -> tuple[int, ...]:
        """Return the group of a rank of the job; empty if it is in none."""
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
        """Return the call with another count, data type, operator or root; None if it has none."""
        smallest = min(map(len, comm.groups))
        if what == "count":
            return replace(self, count=self.count + rng.randint(1, 5))
        if what == "type" and self.operation != "message":
            return replace(self, dtype=rng.choice([dtype for dtype in DTYPES if dtype != self.dtype]))
        if what == "operator" and self.operation in REDUCING:
            return replace(self, op=rng.choice([op for op in OPERATORS if op != self.op]))
        if what == "root" and self.operation in ROOTED and smallest > 1:
            return replace(self, root=(self.root + rng.randint(1, smallest - 1)) % smallest)
        return None


@dataclass
class Block:
    """Lines of a step: preparation, calls, and checks of the results."""

    before: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)


@dataclass
class Step:
    """One step of a program.

    write  returns the lines of the step with the calls passed to it
    calls  calls that a fault may change
    ranks  participating ranks of the job
    waits  whether each participating rank waits for all others
    makes  the communicator that a split creates
    """

    number: int
    kind: str
    comm: Comm
    write: Callable[[Sequence[Call]], Block]
    calls: list[Call] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    waits: bool = False
    makes: Comm | None = None

    def __post_init__(self) -> None:
        self.ranks = self.ranks or self.comm.members
        self.waits = self.waits and len(self.comm.groups) == 1

    def wrong(self, what: str, rng: random.Random) -> Block | None:
        """Return the step with one wrong call; None if no call can be wrong in this way."""
        options = []
        for at, call in enumerate(self.calls if self.comm.with_peers else ()):
            if changed := call.changed(what, rng, self.comm):
                options.append([*self.calls[:at], changed, *self.calls[at + 1 :]])
        return self.write(rng.choice(options)) if options else None


def draw_call(rng: random.Random, comm: Comm, operations: Sequence[str] = OPERATIONS) -> Call:
    operation, dtype = rng.choice(operations), rng.choice(DTYPES)
    exact = dtype in FLOATS and 3 not in map(len, comm.groups)  # thirds are never exact
    op = rng.choice((*OPERATORS, "avg") if exact else OPERATORS)
    max_count = rng.choice([8, 64, 64, 700, 40_000]) if op != "prod" else 64
    return Call(operation, rng.randint(1, max_count), dtype, op, rng.randrange(min(map(len, comm.groups))))


def collective(
    rng: random.Random, number: int, comm: Comm, style: str = "", operations: Sequence[str] = OPERATIONS
) -> Step:
    """A collective in one of the calling styles."""
    call, style = draw_call(rng, comm, operations), style or rng.choice(STYLES)
    if style == "into" and call.operation not in ("all_reduce", "broadcast"):
        style = "plain"
    waits = call.operation in WAITING
    return Step(
        number,
        f"{style} {call.operation}",
        comm,
        lambda calls: write_call(number, comm, calls[0], style),
        [call],
        waits=waits,
    )


def write_call(number: int, comm: Comm, call: Call, style: str) -> Block:
    x, y, on = f"x{number}", f"y{number}", f"{comm.name}.{call.operation}"
    whole = f" * {comm.name}.size" if call.operation in ("reduce_scatter", "all_to_all", "scatter") else ""
    block = Block([f'{x} = data({number}, {call.count}{whole}, "{call.dtype}")'])
    arguments = f"{x}{call.arguments()}"
    if style == "into":
        block.before.append(f"{y} = torch.empty_like({x})")
        block.calls = [f"{on}({x}, {y}{call.arguments()})"]
    elif style == "plan":
        block.before.append(f"p{number} = {comm.name}.plan.{call.operation}({arguments})")
        block.calls = [f"p{number}()"]
        block.after = [f"{y} = p{number}.recv"]
    elif style == "stream":
        block.calls = [f"{y} = {on}({arguments}, stream=stream)", "stream.synchronize()"]
    else:
        block.calls = [f"{y} = {on}({arguments})"]
    expected = f'"{call.operation}", {call.count}, "{call.op}", {call.root}'
    block.after.append(f'check({number}, {y}, expected({number}, {comm.ranks}, {expected}), "{call.dtype}")')
    return block


def uneven(rng: random.Random, number: int, comm: Comm) -> Step:
    """A collective with one count per rank."""
    if len({len(group) for group in comm.groups}) > 1:
        return collective(rng, number, comm)
    operation, dtype = rng.choice(("all_gather_v", "reduce_scatter_v", "all_to_all_v")), rng.choice(DTYPES)
    counts = [rng.randint(0, 9) for _ in comm.groups[0]]
    own = f"{counts}[{comm.name}.rank]"
    total = own if operation == "all_gather_v" else str(sum(counts))
    arguments = f"counts={counts}"
    if operation == "all_to_all_v":
        arguments = f"send_counts={counts}, recv_counts=[{own}] * {comm.name}.size"
    block = Block(
        [f'x{number} = data({number}, {total}, "{dtype}")'],
        [f"y{number} = {comm.name}.{operation}(x{number}, {arguments})"],
        [f'check({number}, y{number}, expected_v({number}, {comm.ranks}, "{operation}", {counts}), "{dtype}")'],
    )
    return Step(number, operation, comm, lambda calls: block)


def barrier(rng: random.Random, number: int, comm: Comm) -> Step:
    return Step(number, "barrier", comm, lambda calls: Block(calls=[f"{comm.name}.barrier()"]), waits=True)


def group(rng: random.Random, number: int, comm: Comm) -> Step:
    """Two or three collectives as one group."""

    def write(calls: Sequence[Call]) -> Block:
        block = Block(calls=["with pynccl.group():"])
        for i, call in enumerate(calls):
            member = write_call(number * 10 + 1000 + i, comm, call, "plain")
            block.before += member.before
            block.calls += [f"    {line}" for line in member.calls]
            block.after += member.after
        return block

    return Step(number, "group", comm, write, [draw_call(rng, comm) for _ in range(rng.randint(2, 3))])


def ring(rng: random.Random, number: int, comm: Comm) -> Step:
    """Each rank sends to the next rank and receives from the previous one, in one group. A fault changes the recv."""
    own = Call("message", rng.choice([3, 50, 3000]), rng.choice(DTYPES))
    x, y, me, size = f"x{number}", f"y{number}", f"{comm.name}.rank", f"{comm.name}.size"

    def write(calls: Sequence[Call]) -> Block:
        return Block(
            [
                f'{x} = data({number}, {own.count}, "{own.dtype}")',
                f"{y} = torch.empty({calls[0].count}, dtype=torch.{own.dtype})",
            ],
            [
                "with pynccl.group():",
                f"    {comm.name}.send({x}, ({me} + 1) % {size})",
                f"    {comm.name}.recv({y}, ({me} - 1) % {size})",
            ],
            [f'check({number}, {y}, sample({number}, {comm.ranks}[{me} - 1], {calls[0].count}), "{own.dtype}")'],
        )

    return Step(number, "ring", comm, write, [own])


def message(rng: random.Random, number: int, comm: Comm) -> Step:
    """One rank sends and another receives; the others continue."""
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
    """A differentiable collective: forward and backward pass."""
    operation, count = rng.choice(("all_reduce", "reduce_scatter", "all_gather")), rng.randint(1, 20)
    x, y = f"x{number}", f"y{number}"
    length = f"{count} * {comm.name}.size" if operation == "reduce_scatter" else str(count)
    grad = "" if operation == "reduce_scatter" else ', grad="sum"'
    adjoint = {"all_reduce": "all_reduce", "reduce_scatter": "all_gather", "all_gather": "reduce_scatter"}[operation]
    y_expected = f'expected({number}, {comm.ranks}, "{operation}", {count})'
    grad_expected = f'expected({number + 1000}, {comm.ranks}, "{adjoint}", {count})'
    block = Block(
        [f'{x} = data({number}, {length}, "float64").requires_grad_()'],
        [
            f"{y} = ad.{operation}({x}, {comm.name}{grad})",
            f'{y}.backward(data({number + 1000}, {y}.numel(), "float64"))',
        ],
        [
            f'check({number}, {y}.detach(), {y_expected}, "float64")',
            f'check({number}, {x}.grad, {grad_expected}, "float64")',
        ],
    )
    return Step(number, "backward", comm, lambda calls: block, waits=True)


def split(rng: random.Random, number: int, comm: Comm, name: str) -> Step:
    """A split. Each rank of `comm` gets color 0 or 1."""
    colors = {rank: rng.choice([0, 0, 0, 1]) for rank in comm.members}
    keys = {rank: rng.choice([rank, -rank]) for rank in comm.members}
    groups = []
    for parent_group in comm.groups:
        for color in (0, 1):
            members = [rank for rank in parent_group if colors[rank] == color]
            groups.append(tuple(sorted(members, key=lambda rank: (keys[rank], parent_group.index(rank)))))
    made = Comm(name, tuple(group for group in groups if group))
    block = Block(
        [f"{name}, {made.ranks} = None, group_of({[list(group) for group in made.groups]})"],
        [f"{name} = {comm.name}.split({colors}[RANK], {keys}[RANK])"],
        [f"assert {name} is not None and {name}.size == len({made.ranks})"],
    )
    return Step(number, "split", comm, lambda calls: block, waits=True, makes=made)


KINDS: dict[Callable[[random.Random, int, Comm], Step], int] = {
    collective: 10,
    uneven: 2,
    barrier: 1,
    group: 2,
    ring: 2,
    message: 2,
    backward: 3,
}


def draw(rng: random.Random, number: int, comm: Comm) -> Step:
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    return kind(rng, number, comm)
