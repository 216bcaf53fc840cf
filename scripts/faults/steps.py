"""The kinds of steps of a random program of the fault campaign: how each is drawn and written, one call a line.

What can be wrong in a call (its count, type, operator, root) is what `Call` says; a wrong call is one with another
value. Sizes are small: what a campaign is after is in the calls, not in the bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
FLOATS = DTYPES[:4]
OPERATORS = ("sum", "prod", "max", "min")
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
OPERATIONS = ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
WAITING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")  # in which every rank waits for every other
STYLES = ("plain", "plain", "into", "plan", "stream")


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

    def number(self, rank: int) -> int:
        """Number of a rank of the job in its group; -1 if it is in none."""
        return next((group.index(rank) for group in self.groups if rank in group), -1)


@dataclass(frozen=True)
class Call:
    """A collective with its arguments."""

    operation: str
    count: int
    dtype: str
    op: str = "sum"
    root: int = 0

    def arguments(self) -> str:
        reducing = f', op="{self.op}"' if self.operation in REDUCING else ""
        return reducing + (f", root={self.root}" if self.operation in ROOTED else "")

    def data(self, comm: Comm) -> str:
        """How many elements this rank passes."""
        whole = self.operation in ("reduce_scatter", "all_to_all", "scatter")
        return f"{self.count} * {comm.name}.size" if whole else str(self.count)

    def check(self) -> str:
        return f'"{self.operation}", {self.count}, "{self.dtype}", "{self.op}", {self.root}'


@dataclass
class Block:
    """Lines of a step: what comes before its calls, the calls, and the check of what has come out."""

    before: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)


@dataclass
class Step:
    """One step of a program.

    block   what all ranks do
    wrong   by the name of the fault: (who may do it, what that one does instead)
    ranks   that take part, of the job
    waits   whether every rank that takes part waits for every other
    call    the collective, where the step is one
    """

    number: int
    kind: str
    comm: Comm
    block: Block
    ranks: list[int]
    wrong: dict[str, tuple[list[int], Block]] = field(default_factory=dict)
    waits: bool = False
    call: Call | None = None
    makes: Comm | None = None


def draw_call(rng: random.Random, comm: Comm, operations: Sequence[str] = OPERATIONS) -> Call:
    operation = rng.choice(operations)
    dtype = rng.choice(DTYPES)
    op = rng.choice((*OPERATORS, "avg") if dtype in FLOATS and 3 not in map(len, comm.groups) else OPERATORS)
    most = rng.choice([8, 64, 64, 700, 40_000]) if op != "prod" else 64
    root = rng.randrange(min(len(group) for group in comm.groups))
    return Call(operation, rng.randint(1, most), dtype, op, root)


def wrong_calls(rng: random.Random, call: Call, comm: Comm) -> dict[str, Call]:
    """The same call with one thing changed, by the name of the fault."""
    found = {
        "count": replace(call, count=call.count + rng.randint(1, 5)),
        "type": replace(call, dtype=rng.choice([one for one in DTYPES if one != call.dtype])),
    }
    if call.operation in REDUCING:
        found["operator"] = replace(call, op=rng.choice([one for one in OPERATORS if one != call.op]))
    smallest = min(len(group) for group in comm.groups)
    if call.operation in ROOTED and smallest > 1:
        found["root"] = replace(call, root=(call.root + rng.randint(1, smallest - 1)) % smallest)
    return found


def collective(rng: random.Random, number: int, comm: Comm, call: Call | None = None, style: str = "") -> Step:
    """A collective in one of the ways of calling it."""
    call = call or draw_call(rng, comm)
    style = style or rng.choice(STYLES)
    if style == "into" and call.operation not in ("all_reduce", "broadcast"):
        style = "plain"
    step = Step(number, f"{style} {call.operation}", comm, write_call(number, comm, call, style), comm.members)
    together = [rank for group in comm.groups if len(group) > 1 for rank in group]
    if together:
        wrong = wrong_calls(rng, call, comm)
        step.wrong = {name: (together, write_call(number, comm, one, style)) for name, one in wrong.items()}
    step.waits = call.operation in WAITING and len(comm.groups) == 1
    step.call = call
    return step


def write_call(number: int, comm: Comm, call: Call, style: str) -> Block:
    x, y = f"x{number}", f"y{number}"
    block = Block([f'{x} = data({number}, {call.data(comm)}, "{call.dtype}")'])
    given = f"{x}{call.arguments()}"
    if style == "into":
        block.before.append(f"{y} = torch.empty_like({x})")
        block.calls = [f"{comm.name}.{call.operation}({x}, {y}{call.arguments()})"]
    elif style == "plan":
        block.before.append(f"p{number} = {comm.name}.plan.{call.operation}({given})")
        block.calls = [f"p{number}()"]
        block.after = [f"{y} = p{number}.recv"]
    elif style == "stream":
        block.calls = [f"{y} = {comm.name}.{call.operation}({given}, stream=stream)", "stream.synchronize()"]
    else:
        block.calls = [f"{y} = {comm.name}.{call.operation}({given})"]
    block.after.append(f"check({number}, {y}, {comm.ranks}, {call.check()})")
    return block


def uneven(rng: random.Random, number: int, comm: Comm) -> Step:
    """A collective with a count per rank."""
    if len({len(group) for group in comm.groups}) > 1:
        return collective(rng, number, comm)
    operation, dtype = rng.choice(("all_gather_v", "reduce_scatter_v", "all_to_all_v")), rng.choice(DTYPES)
    counts = [rng.randint(0, 9) for _ in comm.groups[0]]
    x, y, me = f"x{number}", f"y{number}", f"{comm.name}.rank"
    total = f"{counts}[{me}]" if operation == "all_gather_v" else str(sum(counts))
    given = f"send_counts={counts}, recv_counts=[{counts}[{me}]] * {comm.name}.size"
    given = given if operation == "all_to_all_v" else f"counts={counts}"
    block = Block(
        [f'{x} = data({number}, {total}, "{dtype}")'],
        [f"{y} = {comm.name}.{operation}({x}, {given})"],
        [f'check_v({number}, {y}, {comm.ranks}, "{operation}", {counts}, "{dtype}")'],
    )
    return Step(number, operation, comm, block, comm.members)


def barrier(rng: random.Random, number: int, comm: Comm) -> Step:
    block = Block([], [f"{comm.name}.barrier()"])
    return Step(number, "barrier", comm, block, comm.members, waits=len(comm.groups) == 1)


def group(rng: random.Random, number: int, comm: Comm) -> Step:
    """Two or three collectives as one group; one of them may be wrong."""
    calls = [draw_call(rng, comm) for _ in range(rng.randint(2, 3))]
    step = Step(number, "group", comm, _write_group(number, comm, calls), comm.members)
    at = rng.randrange(len(calls))
    together = [rank for ranks in comm.groups if len(ranks) > 1 for rank in ranks]
    for name, one in wrong_calls(rng, calls[at], comm).items() if together else ():
        step.wrong[name] = (together, _write_group(number, comm, [*calls[:at], one, *calls[at + 1 :]]))
    return step


def _write_group(number: int, comm: Comm, calls: Sequence[Call]) -> Block:
    block = Block(calls=["with pynccl.group():"])
    for i, call in enumerate(calls):
        one = write_call(number * 10 + 1000 + i, comm, call, "plain")
        block.before += one.before
        block.calls += [f"    {line}" for line in one.calls]
        block.after += one.after
    return block


def ring(rng: random.Random, number: int, comm: Comm) -> Step:
    """Everybody sends to the next rank and receives of the one before, as one group."""
    count, dtype = rng.choice([3, 50, 3000]), rng.choice(DTYPES)

    def write(received: int) -> Block:
        x, y = f"x{number}", f"y{number}"
        return Block(
            [f'{x} = data({number}, {count}, "{dtype}")', f"{y} = torch.empty({received}, dtype=torch.{dtype})"],
            [
                "with pynccl.group():",
                f"    {comm.name}.send({x}, ({comm.name}.rank + 1) % {comm.name}.size)",
                f"    {comm.name}.recv({y}, ({comm.name}.rank - 1) % {comm.name}.size)",
            ],
            [f'check_message({number}, {y}, {comm.ranks}[{comm.name}.rank - 1], "{dtype}")'],
        )

    together = [rank for ranks in comm.groups if len(ranks) > 1 for rank in ranks]
    wrong = {"count": (together, write(count + 2))} if together else {}
    return Step(number, "ring", comm, write(count), comm.members, wrong)


def message(rng: random.Random, number: int, comm: Comm) -> Step:
    """One rank sends, another one receives, the rest goes on."""
    ranks = next((ranks for ranks in comm.groups if len(ranks) > 1), None)
    if ranks is None:
        return collective(rng, number, comm)
    sender, receiver = rng.sample(ranks, 2)
    count, dtype = rng.choice([2, 80, 5000]), rng.choice(DTYPES)

    def write(sent: int, received: int) -> Block:
        x, y = f"x{number}", f"y{number}"
        to, source = comm.number(receiver), comm.number(sender)
        before = [f'{x} = data({number}, {sent}, "{dtype}")', f"{y} = torch.empty({received}, dtype=torch.{dtype})"]
        calls = ["if RANK == " + f"{sender}:", f"    {comm.name}.send({x}, {to})", f"elif RANK == {receiver}:"]
        calls += [f"    {comm.name}.recv({y}, {source})", f'    check_message({number}, {y}, {sender}, "{dtype}")']
        return Block(before, calls)

    wrong = {"count": ([sender, receiver], write(count + 1, count + 2))}
    return Step(number, "send and recv", comm, write(count, count), [sender, receiver], wrong)


def split(rng: random.Random, number: int, comm: Comm, name: str) -> Step:
    """A communicator of some of the ranks; ranks in none get None."""
    ranks = [rank for ranks in comm.groups for rank in ranks]
    colors = {rank: rng.choice([0, 0, 0, 1]) for rank in ranks}
    keys = {rank: rng.choice([rank, -rank]) for rank in ranks}
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
    return Step(number, "split", comm, block, comm.members, waits=len(comm.groups) == 1, makes=made)


def backward(rng: random.Random, number: int, comm: Comm) -> Step:
    """A differentiable collective, forwards and backwards."""
    operation, count = rng.choice(("all_reduce", "reduce_scatter", "all_gather")), rng.randint(1, 20)
    x, y = f"x{number}", f"y{number}"
    length = f"{count} * {comm.name}.size" if operation == "reduce_scatter" else str(count)
    grad = "" if operation == "reduce_scatter" else ', grad="sum"'
    block = Block(
        [f"{x} = leaf({number}, {length})"],
        [f"{y} = ad.{operation}({x}, {comm.name}{grad})", f"{y}.backward(cotangent({number}, {y}))"],
        [f'check_backward({number}, {y}, {x}, {comm.ranks}, "{operation}", {count})'],
    )
    return Step(number, "backward", comm, block, comm.members, waits=len(comm.groups) == 1)


KINDS: dict[Callable[[random.Random, int, Comm], Step], int] = {
    collective: 10,
    uneven: 2,
    barrier: 1,
    group: 2,
    ring: 2,
    message: 2,
    backward: 3,
}
