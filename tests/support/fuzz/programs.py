"""Random programs of differentiable collectives: drawn, simulated in one process, and written as Python.

A program is a list of steps on variables v0, v1, ...; the first ones are its leaves. Each kind of step (local_steps.py,
collective_steps.py, exchange_steps.py, partition_steps.py) defines how to draw it, how to compute all ranks' results
from all ranks' inputs in plain torch, and how to write it for one rank with pynccl_autograd. The simulation is an
independent reference: the ranks must find the derivatives that torch computes from it.

A variable is either replicated (all ranks hold the same value; its cotangents are equal on all ranks and count once) or
not. Collectives with grad="replicated" make replicated variables, `copy` and `split` undo this, and no step mixes the
two. So the precondition of the convention holds in every program.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

Proposal = tuple[tuple[int, ...], dict[str, Any]]  # inputs, arguments

MAX_ELEMENTS = 96  # of a tensor on one rank
LARGEST = 1e3  # larger values would lose digits
LOW = {torch.float32: 2e-4, torch.bfloat16: 8e-2, torch.complex64: 2e-4}  # tolerance of the lower precisions
TOLERANCE = 1e-10
NEAR = 1e-6  # the order of different values that are closer may change by rounding


class Value(NamedTuple):
    """All ranks' tensors of one variable; the same tensor n times if it is replicated."""

    ys: tuple[Tensor, ...]
    replicated: bool

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(y.shape) for y in self.ys]

    @property
    def same_shape(self) -> bool:
        """Whether all ranks have the same shape."""
        return len(set(self.shapes)) == 1


class Step(NamedTuple):
    kind: str
    inputs: tuple[int, ...]
    args: dict[str, Any]


class Text(NamedTuple):
    """The source of a step: an expression, or a collective ad.<function>(x, comm, <rest>)."""

    expression: str = ""
    function: str = ""
    x: str = ""
    rest: str = ""
    startable: bool = False


class Unfit(Exception):
    """The drawn step does not fit the existing variables."""


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
        """Return (inputs, arguments). Raises Unfit."""
        raise NotImplementedError

    @staticmethod
    def simulate(values: Sequence[Value], args: dict[str, Any], n: int) -> Value:
        raise NotImplementedError

    @staticmethod
    def write(names: Sequence[str], args: dict[str, Any]) -> Text:
        raise NotImplementedError


class Leaf(NamedTuple):
    """An input: one tensor per rank, without gradient; the same one n times if it is replicated."""

    ys: tuple[Tensor, ...]
    replicated: bool


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
    """Draws a program step by step."""

    def __init__(self, seed: int, n: int, dtype: torch.dtype, excluded: frozenset[str] = frozenset()) -> None:
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.seed, self.n, self.dtype, self.excluded = seed, n, dtype, excluded
        self.leaves: list[Leaf] = []
        self.steps: list[Step] = []
        self.values: list[Value] = []
        self.used: set[int] = set()
        self.dead: set[int] = set()  # changed in place: must not be read any more

    @property
    def exact(self) -> bool:
        """Whether the program is in double precision."""
        return self.dtype not in LOW

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def number(self) -> float:
        return self.rng.choice([-2.0, -1.5, -1.0, -0.5, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0])

    def pick(self, fits: Callable[[Value], bool]) -> int:
        """Pick a variable that fits, preferring unused ones."""
        found = [i for i, value in enumerate(self.values) if i not in self.dead and fits(value)]
        if not found:
            raise Unfit
        fresh = [i for i in found if i not in self.used]
        return self.rng.choice(fresh if fresh and self.chance(0.7) else found)

    def pick_unreplicated(self, fits: Callable[[Value], bool] = lambda value: True) -> int:
        return self.pick(lambda value: not value.replicated and fits(value))

    def dim(self, value: Value) -> int:
        """Draw a dimension that all ranks' tensors have."""
        dims = min(y.dim() for y in value.ys)
        if dims != max(y.dim() for y in value.ys) or not dims:
            raise Unfit
        return self.rng.randrange(dims)

    def either_sign(self, dim: int, value: Value) -> int:
        """Return the dimension, sometimes as a negative index."""
        return dim - value.ys[0].dim() if self.chance(0.3) else dim

    def parts(self, size: int) -> list[int]:
        """Split `size` into one random number per rank; some may be 0."""
        marks = sorted(self.rng.randint(0, size) for _ in range(self.n - 1))
        return [b - a for a, b in zip([0, *marks], [*marks, size], strict=True)]

    def leaf(self, replicated: bool) -> None:
        dims = self.rng.choice([0, 1, 2, 2, 2, 3])
        shape = [self.rng.choice([1, 2, 3, 4, self.n, 2 * self.n]) for _ in range(dims)]
        if dims and self.chance(0.04):
            shape[self.rng.randrange(dims)] = 0
        shapes = [list(shape) for _ in range(self.n)]
        if not replicated and dims and self.chance(0.25):
            dim = self.rng.randrange(dims)
            for rank_shape in shapes:
                rank_shape[dim] = self.rng.randint(0, 4)
        integers = self.chance(0.3)
        ys = [self.tensor(rank_shape, integers) for rank_shape in shapes[:1] * self.n] if replicated else None
        made = (ys[0],) * self.n if ys else tuple(self.tensor(rank_shape, integers) for rank_shape in shapes)
        self.leaves.append(Leaf(made, replicated))
        grown = [y.clone().requires_grad_() for y in (made[:1] if replicated else made)]
        self.values.append(Value(tuple(grown) * (self.n if replicated else 1), replicated))

    def tensor(self, shape: Sequence[int], integers: bool = False) -> Tensor:
        """Draw distinct values, or small integers (with ties and zeros)."""
        low = self.dtype in (torch.float32, torch.bfloat16, torch.complex64)

        def part() -> Tensor:
            if integers or low:
                scale = 1.0 if integers else 8.0
                drawn = torch.randint(int(-3 * scale), int(3 * scale) + 1, tuple(shape), generator=self.generator)
                return drawn.double() / scale
            return torch.randn(tuple(shape), generator=self.generator, dtype=torch.float64)

        return torch.complex(part(), part()) if self.dtype.is_complex else part()

    def step(self) -> None:
        """Draw one more step that fits."""
        kinds = [
            kind
            for _, kind in sorted(
                Kind.known.items()
            )  # sorted, so that a seed gives the same program for any order of imports
            if not kind.traits & self.excluded and (self.exact or kind.linear) and kind.weight
        ]
        for _ in range(60):
            kind = self.rng.choices(kinds, [kind.weight for kind in kinds])[0]
            try:
                inputs, args = kind.propose(self)
                value = kind.simulate([self.values[i] for i in inputs], args, self.n)
                check_size(value)
            except Unfit:
                continue
            self.steps.append(Step(kind.__name__, inputs, args))
            self.values.append(value)
            self.used.update(inputs)
            if "inplace" in kind.traits:
                self.dead.add(inputs[0])
            return

    def program(self, steps: int) -> Program:
        for i in range(self.rng.randint(1, 3)):
            self.leaf(replicated=i > 0 and self.chance(0.4))
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
    """Return the program of this seed on n ranks, without kinds of steps that have an excluded trait."""
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
    """Return all variables of all ranks, differentiable."""
    values = list(leaves)
    for step in program.steps:
        values.append(Kind.known[step.kind].simulate([values[i] for i in step.inputs], step.args, program.n))
    return values
