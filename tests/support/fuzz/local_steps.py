"""Local steps, between the collectives of a random program. See programs.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from .programs import Draw, Kind, Proposal, Text, Unfit, Value


def mapped(value: Value, function: Callable[[Tensor, int], Tensor]) -> Value:
    """Apply function(y, rank) to each rank's tensor, or once to a replicated value."""
    if value.replicated:
        return Value((function(value.ys[0], 0),) * len(value.ys), True)
    return Value(tuple(function(y, r) for r, y in enumerate(value.ys)), False)


class _Local(Kind):
    """Written as `text`, formatted with the names of its inputs and its arguments."""

    local = True
    text: ClassVar[str] = ""

    @classmethod
    def write(cls, names: Sequence[str], args: dict[str, Any]) -> Text:
        return Text(cls.text.format(*names, **args))


UNARY: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "sin": ("{0}.sin()", torch.sin),
    "tanh": ("torch.tanh({0})", torch.tanh),
    "square": ("{0} * {0}", lambda x: x**2),
    "shared": ("{0} * {0}.cos()", lambda x: x * torch.cos(x)),
}


class Unary(_Local):
    """A nonlinear function; for complex numbers only one without fast growth."""

    weight = 2.0
    linear = False

    @staticmethod
    def propose(draw: Draw) -> Proposal:
        names = ["square"] if draw.dtype.is_complex else list(UNARY)
        return (draw.pick(lambda value: True),), {"name": draw.rng.choice(names)}

    simulate = staticmethod(lambda values, args, n: mapped(values[0], lambda y, r: UNARY[args["name"]][1](y)))

    write = staticmethod(lambda names, args: Text(UNARY[args["name"]][0].format(names[0])))


class Branch(_Local):
    """A different function on each rank."""

    linear = False
    traits = frozenset({"differs"})

    @staticmethod
    def propose(draw: Draw) -> Proposal:
        names = ["square", "double"] if draw.dtype.is_complex else [*UNARY, "double"]
        return (draw.pick_unreplicated(),), {"names": [draw.rng.choice(names) for _ in range(draw.n)]}

    @staticmethod
    def simulate(values: Sequence[Value], args: dict[str, Any], n: int) -> Value:
        def apply(y: Tensor, r: int) -> Tensor:
            name = args["names"][r]
            return y + y if name == "double" else UNARY[name][1](y)

        return mapped(values[0], apply)

    @staticmethod
    def write(names: Sequence[str], args: dict[str, Any]) -> Text:
        texts = [("{0} * 2" if name == "double" else UNARY[name][0]).format(names[0]) for name in args["names"]]
        return Text(" ".join(f"({text}) if comm.rank == {r} else" for r, text in enumerate(texts)) + " None")


class Scale(_Local):
    """Multiply by a number, which differs by rank unless the value is replicated."""

    text = "{0} * {by}[comm.rank]"
    weight = 1.5

    @staticmethod
    def propose(draw: Draw) -> Proposal:
        at = draw.pick(lambda value: True)
        factor = draw.number()
        return (at,), {"by": [factor if draw.values[at].replicated else draw.number() for _ in range(draw.n)]}

    simulate = staticmethod(lambda values, args, n: mapped(values[0], lambda y, r: y * args["by"][r]))


def _pair(draw: Draw, fits: Callable[[Value, Value], bool]) -> tuple[int, int]:
    a = draw.pick(lambda value: True)
    return a, draw.pick(lambda value: value.replicated == draw.values[a].replicated and fits(draw.values[a], value))


def _zipped(values: Sequence[Value], function: Callable[..., Tensor]) -> Value:
    first = values[0]
    if first.replicated:
        return Value((function(*(value.ys[0] for value in values)),) * len(first.ys), True)
    return Value(tuple(function(*ys) for ys in zip(*(value.ys for value in values), strict=True)), False)


class Add(_Local):
    text = "{0} + {1}"
    weight = 1.5
    propose: Any = staticmethod(lambda draw: (_pair(draw, lambda a, b: a.shapes == b.shapes), {}))
    simulate = staticmethod(lambda values, args, n: _zipped(values, torch.add))


class Multiply(Add):
    text = "{0} * {1}"
    linear = False
    simulate = staticmethod(lambda values, args, n: _zipped(values, torch.mul))


class Gram(_Local):
    """x @ x.T of matrices: a matmul whose output has another shape."""

    text = "{0} @ {0}.T"
    linear = False
    propose: Any = staticmethod(lambda draw: ((draw.pick(lambda value: all(y.dim() == 2 for y in value.ys)),), {}))
    simulate = staticmethod(lambda values, args, n: mapped(values[0], lambda y, r: torch.einsum("ij,kj->ik", y, y)))


class Matmul(_Local):
    """x @ w of two variables."""

    text = "{0} @ {1}"
    linear = False

    @staticmethod
    def propose(draw: Draw) -> Proposal:
        def fits(a: Value, b: Value) -> bool:
            return all(x.dim() == y.dim() == 2 and x.shape[1] == y.shape[0] for x, y in zip(a.ys, b.ys, strict=True))

        return _pair(draw, fits), {}

    simulate = staticmethod(lambda values, args, n: _zipped(values, lambda x, y: torch.einsum("ij,jk->ik", x, y)))


class Cat(_Local):
    text = "torch.cat([{0}, {1}], {dim})"

    @staticmethod
    def propose(draw: Draw) -> Proposal:
        # Not shape (0,): torch drops it from second derivatives, and such a rank would skip their collectives.
        a = draw.pick(lambda value: (0,) not in value.shapes)
        dim = draw.dim(draw.values[a])

        def fits(value: Value) -> bool:
            if (0,) in value.shapes:
                return False
            pairs = zip(draw.values[a].ys, value.ys, strict=True)
            return value.replicated == draw.values[a].replicated and all(
                x.dim() == y.dim() and all(p == q for d, (p, q) in enumerate(zip(x.shape, y.shape)) if d != dim)  # noqa: B905
                for x, y in pairs
            )

        return (a, draw.pick(fits)), {"dim": dim}

    simulate = staticmethod(lambda values, args, n: _zipped(values, lambda x, y: torch.cat([x, y], args["dim"])))


class Transpose(_Local):
    """A non-contiguous view."""

    text = "{0}.transpose({dims[0]}, {dims[1]})"
    weight = 1.5

    @staticmethod
    def propose(draw: Draw) -> Proposal:
        at = draw.pick(lambda value: all(y.dim() >= 2 for y in value.ys))
        return (at,), {"dims": sorted(draw.rng.sample(range(min(y.dim() for y in draw.values[at].ys)), 2))}

    @staticmethod
    def simulate(values: Sequence[Value], args: dict[str, Any], n: int) -> Value:
        return mapped(values[0], lambda y, r: y.movedim(args["dims"], args["dims"][::-1]))


class Slice(_Local):
    """Some rows of a dimension; if not replicated, they may differ by rank and be empty."""

    text = "{0}[({dim} * (slice(None),)) + (slice(*{rows}[comm.rank]),)]"
    weight = 1.2

    @staticmethod
    def propose(draw: Draw) -> Proposal:
        at = draw.pick(lambda value: True)
        value = draw.values[at]
        dim = draw.dim(value)
        uneven = not value.replicated and (not value.same_shape or draw.chance(0.4))
        rows = []
        for y in value.ys:
            start = draw.rng.randint(0, max(0, y.shape[dim] - 1))
            rows.append((start, draw.rng.randint(min(start + (not uneven), y.shape[dim]), y.shape[dim])))
        return (at,), {"dim": dim, "rows": rows if uneven else rows[:1] * draw.n}

    @staticmethod
    def simulate(values: Sequence[Value], args: dict[str, Any], n: int) -> Value:
        def select(y: Tensor, r: int) -> Tensor:
            start, stop = args["rows"][r]
            return y.index_select(args["dim"], torch.arange(start, stop))

        return mapped(values[0], select)


class Expand(_Local):
    """A stride of 0."""

    text = "{0}.expand({times}, *{0}.shape)"

    @staticmethod
    def propose(draw: Draw) -> Proposal:
        at = draw.pick(lambda value: all(y.dim() <= 2 for y in value.ys))
        return (at,), {"times": draw.rng.choice([1, 2, 3, draw.n])}

    simulate = staticmethod(lambda values, args, n: mapped(values[0], lambda y, r: torch.stack([y] * args["times"])))


class Sum(_Local):
    """Sum over one dimension, or over all to a 0-dimensional tensor."""

    text = "{0}.sum({dim})"

    @staticmethod
    def propose(draw: Draw) -> Proposal:
        at = draw.pick(lambda value: True)
        return (at,), {"dim": "" if draw.chance(0.4) else draw.dim(draw.values[at])}

    @staticmethod
    def simulate(values: Sequence[Value], args: dict[str, Any], n: int) -> Value:
        return mapped(values[0], lambda y, r: y.sum() if args["dim"] == "" else y.sum(args["dim"]))


class Conjugate(_Local):
    """A lazy conjugate of complex numbers, with torch's conjugate bit."""

    text = "{0}.conj()"
    weight = 0.5

    @staticmethod
    def propose(draw: Draw) -> Proposal:
        if not draw.dtype.is_complex:
            raise Unfit
        return (draw.pick(lambda value: True),), {}

    simulate = staticmethod(lambda values, args, n: mapped(values[0], lambda y, r: torch.conj_physical(y)))


class InPlace(_Local):
    """Change the output of a collective in place."""

    text = "{0}.{how}"
    weight = 0.8
    traits = frozenset({"inplace"})

    @staticmethod
    def propose(draw: Draw) -> Proposal:
        def fits(i: int) -> bool:
            step = draw.steps[i - len(draw.leaves)] if i >= len(draw.leaves) else None
            if step is None or i in draw.used or Kind.known[step.kind].local:
                return False
            kept = step.args.get("op") in ("max", "min", "prod")  # saved for the backward pass: torch raises
            return not kept and "partition" not in Kind.known[step.kind].traits

        found = [i for i in range(len(draw.values)) if i not in draw.dead and fits(i)]
        if not found:
            raise Unfit
        return (draw.rng.choice(found),), {"how": draw.rng.choice(["mul_(3.0)", "add_(0.5)", "neg_()"])}

    @staticmethod
    def simulate(values: Sequence[Value], args: dict[str, Any], n: int) -> Value:
        change = {"mul_(3.0)": lambda y, r: y * 3, "add_(0.5)": lambda y, r: y + 0.5, "neg_()": lambda y, r: -y}
        return mapped(values[0], change[args["how"]])
