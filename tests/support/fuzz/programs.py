"""Random programs of differentiable collectives: drawn, simulated in one process, and written as Python.

A program is a list of steps on variables v0, v1, ...; the first ones are its leaves. Each kind of step (local_steps.py,
collective_steps.py, partition_steps.py) says how it is drawn, how all ranks' results follow from all ranks' inputs in
plain torch, and how one rank writes it with pynccl_autograd. The simulation is an independent reference: torch's own
derivatives of it are what the ranks must find.

A variable is "one" (one logical value that all ranks hold, with cotangents that are equal on all ranks and count once)
or each rank's own. Collectives with grad="replicated" make the former of the latter, `copy` and `split` undo it; a step
never mixes the two. So the precondition of the convention holds in every program.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

Proposal = tuple[tuple[int, ...], dict[str, Any]]  # inputs, what else is given

MAX_ELEMENTS = 96  # of a tensor on one rank
LARGEST = 1e3  # values beyond would cost digits
LOW = {torch.float32: 2e-4, torch.bfloat16: 8e-2, torch.complex64: 2e-4}  # tolerance of what is not double precision
TOLERANCE = 1e-10
NEAR = 1e-6  # values that are closer, and not equal, may be ordered otherwise after rounding


class Value(NamedTuple):
    """What the ranks hold of one variable; the same tensor n times if it is one value."""

    ys: tuple[Tensor, ...]
    one: bool

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(y.shape) for y in self.ys]

    @property
    def even(self) -> bool:
        """Whether all ranks have one shape."""
        return len(set(self.shapes)) == 1


class Step(NamedTuple):
    kind: str
    inputs: tuple[int, ...]
    given: dict[str, Any]


class Text(NamedTuple):
    """How a rank writes a step: an expression, or a collective ad.<function>(x, comm, <rest>)."""

    expression: str = ""
    function: str = ""
    x: str = ""
    rest: str = ""
    startable: bool = False


class Unfit(Exception):
    """The step that was drawn does not fit the variables at hand."""


class Kind:
    """A kind of step. Registered under its class name."""

    weight: ClassVar[float] = 1.0
    linear: ClassVar[bool] = True
    local: ClassVar[bool] = False
    traits: ClassVar[frozenset[str]] = frozenset()  # what modes may exclude: "partition", "inplace", "differs", ...
    known: ClassVar[dict[str, type[Kind]]] = {}

    def __init_subclass__(cls) -> None:
        if not cls.__name__.startswith("_"):
            Kind.known[cls.__name__] = cls

    @staticmethod
    def propose(draw: Draw) -> Proposal:
        """(inputs, what else is given); raises Unfit."""
        raise NotImplementedError

    @staticmethod
    def simulate(values: Sequence[Value], given: dict[str, Any], n: int) -> Value:
        raise NotImplementedError

    @staticmethod
    def write(names: Sequence[str], given: dict[str, Any]) -> Text:
        raise NotImplementedError


class Leaf(NamedTuple):
    """An input: one tensor per rank, without gradient; the same one n times if it is one value."""

    ys: tuple[Tensor, ...]
    one: bool


class Program(NamedTuple):
    seed: int
    n: int
    dtype: torch.dtype
    leaves: tuple[Leaf, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]

    @property
    def names(self) -> list[str]:
        return [f"v{i}" for i in range(len(self.leaves) + len(self.steps))]


class Draw:
    """A program in the making."""

    def __init__(self, seed: int, n: int, dtype: torch.dtype, excluded: frozenset[str] = frozenset()) -> None:
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.seed, self.n, self.dtype, self.excluded = seed, n, dtype, excluded
        self.leaves: list[Leaf] = []
        self.steps: list[Step] = []
        self.values: list[Value] = []
        self.used: set[int] = set()
        self.dead: set[int] = set()  # changed in place: no longer to be read

    @property
    def exact(self) -> bool:
        """Whether the program is in double precision."""
        return self.dtype not in LOW

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def number(self) -> float:
        return self.rng.choice([-2.0, -1.5, -1.0, -0.5, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0])

    def pick(self, fits: Callable[[Value], bool]) -> int:
        """A variable that fits, rather one that was not used yet."""
        found = [i for i, value in enumerate(self.values) if i not in self.dead and fits(value)]
        if not found:
            raise Unfit
        fresh = [i for i in found if i not in self.used]
        return self.rng.choice(fresh if fresh and self.chance(0.7) else found)

    def own(self, fits: Callable[[Value], bool] = lambda value: True) -> int:
        return self.pick(lambda value: not value.one and fits(value))

    def dim(self, value: Value) -> int:
        """A dimension that all ranks' tensors have."""
        dims = min(y.dim() for y in value.ys)
        if dims != max(y.dim() for y in value.ys) or not dims:
            raise Unfit
        return self.rng.randrange(dims)

    def either_sign(self, dim: int, value: Value) -> int:
        """The same dimension, counted from either end."""
        return dim - value.ys[0].dim() if self.chance(0.3) else dim

    def parts(self, size: int) -> list[int]:
        """`size` as a sum of one number per rank, some of them 0."""
        marks = sorted(self.rng.randint(0, size) for _ in range(self.n - 1))
        return [b - a for a, b in zip([0, *marks], [*marks, size], strict=True)]

    def leaf(self, one: bool) -> None:
        dims = self.rng.choice([0, 1, 2, 2, 2, 3])
        shape = [self.rng.choice([1, 2, 3, 4, self.n, 2 * self.n]) for _ in range(dims)]
        if dims and self.chance(0.04):
            shape[self.rng.randrange(dims)] = 0
        shapes = [list(shape) for _ in range(self.n)]
        if not one and dims and self.chance(0.25):
            dim = self.rng.randrange(dims)
            for own in shapes:
                own[dim] = self.rng.randint(0, 4)
        integers = self.chance(0.3)
        ys = [self.tensor(own, integers) for own in shapes[:1] * self.n] if one else None
        made = (ys[0],) * self.n if ys else tuple(self.tensor(own, integers) for own in shapes)
        self.leaves.append(Leaf(made, one))
        grown = [y.clone().requires_grad_() for y in (made[:1] if one else made)]
        self.values.append(Value(tuple(grown) * (self.n if one else 1), one))

    def tensor(self, shape: Sequence[int], integers: bool = False) -> Tensor:
        """Values that differ; small integers (with ties and zeros) on demand."""
        low = self.dtype in (torch.float32, torch.bfloat16, torch.complex64)

        def part() -> Tensor:
            if integers or low:
                scale = 1.0 if integers else 8.0
                drawn = torch.randint(int(-3 * scale), int(3 * scale) + 1, tuple(shape), generator=self.generator)
                return drawn.double() / scale
            return torch.randn(tuple(shape), generator=self.generator, dtype=torch.float64)

        return torch.complex(part(), part()) if self.dtype.is_complex else part()

    def step(self) -> None:
        """One more step, whatever fits."""
        kinds = [
            kind
            for _, kind in sorted(Kind.known.items())  # whatever the order of imports: a seed stands for a program
            if not kind.traits & self.excluded and (self.exact or kind.linear) and kind.weight
        ]
        for _ in range(60):
            kind = self.rng.choices(kinds, [kind.weight for kind in kinds])[0]
            try:
                inputs, given = kind.propose(self)
                value = kind.simulate([self.values[i] for i in inputs], given, self.n)
                check_size(value)
            except Unfit:
                continue
            self.steps.append(Step(kind.__name__, inputs, given))
            self.values.append(value)
            self.used.update(inputs)
            if "inplace" in kind.traits:
                self.dead.add(inputs[0])
            return

    def program(self, steps: int) -> Program:
        for i in range(self.rng.randint(1, 3)):
            self.leaf(one=i > 0 and self.chance(0.4))
        for _ in range(steps):
            self.step()
        last = len(self.values)
        sinks = [i for i in range(len(self.leaves), last) if i not in self.used and i not in self.dead]
        if not sinks:
            sinks = [i for i in range(len(self.leaves), last) if i not in self.dead][-1:]
        return Program(self.seed, self.n, self.dtype, tuple(self.leaves), tuple(self.steps), tuple(sinks))


def check_size(value: Value) -> None:
    for y in value.ys:
        if y.numel() > MAX_ELEMENTS or (y.numel() and not bool(y.detach().abs().max() <= LARGEST)):
            raise Unfit


def draw(seed: int, n: int, *, excluded: frozenset[str] = frozenset(), dtype: torch.dtype | None = None) -> Program:
    """The program of this seed, on n ranks; without steps of the kinds with an excluded trait."""
    rng = random.Random(seed * 7919 + n)
    if dtype is None:
        kinds = [torch.float64] * 12 + [torch.complex128] * 3 + [torch.float32, torch.bfloat16]
        dtype = rng.choice(kinds)
    if dtype.is_complex:
        excluded = excluded | {"real"}
    while True:
        program = Draw(rng.randrange(1 << 48), n, dtype, excluded).program(rng.randint(1, 9))
        if program.outputs and any(not Kind.known[step.kind].local for step in program.steps):
            return program._replace(seed=seed)


def simulate(program: Program, leaves: Sequence[Value]) -> list[Value]:
    """All variables, of all ranks; differentiable."""
    values = list(leaves)
    for step in program.steps:
        values.append(Kind.known[step.kind].simulate([values[i] for i in step.inputs], step.given, program.n))
    return values
