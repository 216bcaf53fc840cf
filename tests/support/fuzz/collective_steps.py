"""Steps that are collectives: functions of pynccl_autograd, and the same in plain torch on all ranks' tensors.

See programs.py. Steps that exchange data between pairs of ranks are in exchange_steps.py."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import reduce
from operator import mul
from typing import Any, ClassVar

import torch
from torch import Tensor

from .programs import NEAR, Draw, Kind, Proposal, Text, Unfit, Value


def same(y: Tensor, n: int, grad: str) -> Value:
    """Return y on all ranks: a replicated value under grad="replicated", otherwise one value per rank."""
    return Value((y,) * n, grad == "replicated")


def total(ys: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(ys)).sum(0)


def options(args: dict[str, Any], *names: str) -> str:
    """Return the named keyword arguments that are not None, as source."""
    found = [f"{name}={args[name]!r}" for name in names if args.get(name) is not None]
    return ", ".join(found)


def convention(draw: Draw) -> str:
    return draw.rng.choice(["sum", "sum", "replicated"])


def reduce_dtype(draw: Draw) -> torch.dtype | None:
    wide = {torch.bfloat16: torch.float32, torch.float32: torch.float64, torch.float64: torch.float64}
    return wide.get(draw.dtype) if draw.chance(0.3) else None


def joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


class _Collective(Kind):
    """Written as a call of the function named like the class in snake case, with the arguments in `takes`."""

    weight = 2.0
    takes: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def write(cls, names: Sequence[str], args: dict[str, Any]) -> Text:
        function = re.sub(r"\B([A-Z])", r"_\1", cls.__name__).lower()
        return Text("", function, names[0], options(args, *cls.takes), True)


class AllReduce(_Collective):
    weight = 5.0
    OPS = ("sum", "avg", "premul", "scaled", "max", "min", "prod")

    @staticmethod
    def propose(draw: Draw) -> Proposal:
        ops = ["sum", "avg", "premul", "scaled"] if draw.exact else ["sum", "avg", "premul"]
        ops += ["prod"] * draw.exact + ["max", "min"] * (draw.exact and not draw.dtype.is_complex)
        op = draw.rng.choice(ops)
        at = draw.pick_unreplicated(lambda value: value.same_shape)
        value = draw.values[at]
        inputs: tuple[int, ...] = (at,)
        if op in ("max", "min"):
            check_apart(value.ys, op)
        if op == "scaled":
            inputs = (at, draw.pick_unreplicated(lambda other: other.shapes == value.shapes))
        args: dict[str, Any] = {"op": op, "grad": convention(draw), "reduce_dtype": reduce_dtype(draw)}
        if op == "premul":
            args["scales"] = [draw.number() for _ in range(draw.n)]
        return inputs, args

    @staticmethod
    def simulate(values: Sequence[Value], args: dict[str, Any], n: int) -> Value:
        ys = values[0].ys
        match args["op"]:
            case "sum":
                y = total(ys)
            case "avg":
                y = total(ys) / n
            case "premul":
                y = total([x * scale for x, scale in zip(ys, args["scales"], strict=True)])
            case "scaled":
                y = total([x * scale for x, scale in zip(ys, values[1].ys, strict=True)])
            case "max":
                y = torch.stack(ys).amax(0)
            case "min":
                y = torch.stack(ys).amin(0)
            case _:
                y = reduce(mul, ys)
        return same(y, n, args["grad"])

    @staticmethod
    def write(names: Sequence[str], args: dict[str, Any]) -> Text:
        op = repr(args["op"])
        if args["op"] == "premul":
            op = f"ad.PreMul({args['scales']}[comm.rank])"
        elif args["op"] == "scaled":
            op = f"ad.PreMul({names[1]})"
        rest = joined(op, options(args, "grad", "reduce_dtype"))
        return Text("", "all_reduce", names[0], rest, args["op"] not in ("max", "min", "prod"))


def check_apart(ys: Sequence[Tensor], op: str) -> None:
    """Raise Unfit if two values are so close that rounding may decide which rank has the extremum."""
    stacked = torch.stack(list(ys)).detach()
    away = (stacked - (stacked.amax(0) if op == "max" else stacked.amin(0))).abs()
    if bool(((away > 0) & (away < NEAR)).any()):
        raise Unfit


class Ignored(Kind):
    """A sum without gradient that only some ranks use. The others must make the call, too."""

    weight = 2.0

    @staticmethod
    def propose(draw: Draw) -> Proposal:
        at = draw.pick_unreplicated(lambda value: value.same_shape)
        return (at,), {"users": [rank for rank in range(draw.n) if draw.chance(0.4)]}

    @staticmethod
    def simulate(values: Sequence[Value], args: dict[str, Any], n: int) -> Value:
        ys = values[0].ys
        y = total(ys).detach()
        return Value(tuple(x + y if rank in args["users"] else x + 0 for rank, x in enumerate(ys)), False)

    @staticmethod
    def write(names: Sequence[str], args: dict[str, Any]) -> Text:
        call = f'ad.all_reduce({names[0]}.detach(), comm, grad="sum").detach()'
        return Text(f"{names[0]} + {call} if comm.rank in {args['users']} else ({call}, {names[0]} + 0)[1]")


class Twice(Kind):
    """The sum of one tensor twice: equal calls, which a compiler may merge on some ranks and not on others."""

    weight = 2.0

    @staticmethod
    def propose(draw: Draw) -> Proposal:
        at = draw.pick_unreplicated(lambda value: value.same_shape)
        return (at,), {"copies": [draw.chance(0.5) for _ in range(draw.n)]}

    simulate = staticmethod(lambda values, args, n: same(total(values[0].ys) * 2, n, "sum"))

    @staticmethod
    def write(names: Sequence[str], args: dict[str, Any]) -> Text:
        again = f"({names[0]} * 1 if {args['copies']}[comm.rank] else {names[0]})"
        return Text(" + ".join(f'ad.all_reduce({x}, comm, grad="sum")' for x in (names[0], again)))


class Copy(_Collective):
    takes = ("reduce_dtype",)
    propose = staticmethod(
        lambda draw: ((draw.pick(lambda value: value.replicated),), {"reduce_dtype": reduce_dtype(draw)})
    )
    simulate = staticmethod(lambda values, args, n: Value(values[0].ys, False))


def _cut(draw: Draw, at: int) -> dict[str, Any]:
    """Draw dim= and splits= for a tensor of which all ranks hold all of it."""
    value = draw.values[at]
    dim = draw.dim(value)
    size = value.ys[0].shape[dim]
    splits = draw.parts(size) if size % draw.n or draw.chance(0.3) else None
    return {"dim": draw.either_sign(dim, value), "splits": splits}


def slices(y: Tensor, args: dict[str, Any], n: int) -> list[Tensor]:
    dim = args["dim"] % y.dim()
    sizes = args["splits"] or [y.shape[dim] // n] * n
    starts = [sum(sizes[:r]) for r in range(n)]
    return [y.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=True)]


class ReduceScatter(_Collective):
    takes = ("dim", "op", "splits", "reduce_dtype")
    weight = 3.0

    @staticmethod
    def propose(draw: Draw) -> Proposal:
        at = draw.pick_unreplicated(lambda value: value.same_shape)
        op = draw.rng.choice(["sum", "avg"])
        return (at,), {**_cut(draw, at), "op": op, "reduce_dtype": reduce_dtype(draw)}

    @staticmethod
    def simulate(values: Sequence[Value], args: dict[str, Any], n: int) -> Value:
        y = total(values[0].ys) / (n if args["op"] == "avg" else 1)
        return Value(tuple(slices(y, args, n)), False)


class Split(_Collective):
    takes = ("dim", "splits")

    @staticmethod
    def propose(draw: Draw) -> Proposal:
        at = draw.pick(lambda value: value.replicated)
        return (at,), _cut(draw, at)

    simulate = staticmethod(lambda values, args, n: Value(tuple(slices(values[0].ys[0], args, n)), False))


def joins(draw: Draw) -> tuple[int, dict[str, Any]]:
    """Pick a variable whose tensors can be concatenated over the ranks, and draw dim= and splits=."""

    def fits(value: Value) -> bool:
        return len({y.dim() for y in value.ys}) == 1

    at = draw.pick_unreplicated(fits)
    value = draw.values[at]
    if not value.ys[0].dim():
        return at, {"dim": 0}
    dims = [
        dim
        for dim in range(value.ys[0].dim())
        if len({(*shape[:dim], *shape[dim + 1 :]) for shape in value.shapes}) == 1
    ]
    if not dims:
        raise Unfit
    dim = draw.rng.choice(dims)
    sizes = [shape[dim] for shape in value.shapes]
    splits = sizes if len(set(sizes)) > 1 or draw.chance(0.2) else None
    return at, {"dim": draw.either_sign(dim, value), "splits": splits}


def _joined_up(ys: Sequence[Tensor], args: dict[str, Any]) -> Tensor:
    return torch.stack(list(ys)) if not ys[0].dim() else torch.cat(list(ys), args["dim"])


class AllGather(_Collective):
    takes = ("dim", "grad", "splits", "reduce_dtype")
    weight = 3.0

    @staticmethod
    def propose(draw: Draw) -> Proposal:
        at, args = joins(draw)
        return (at,), {**args, "grad": convention(draw), "reduce_dtype": reduce_dtype(draw)}

    simulate = staticmethod(lambda values, args, n: same(_joined_up(values[0].ys, args), n, args["grad"]))


class Gather(_Collective):
    takes = ("root", "dim", "splits")

    @staticmethod
    def propose(draw: Draw) -> Proposal:
        at, args = joins(draw)
        return (at,), {**args, "root": draw.rng.randrange(draw.n)}

    @staticmethod
    def simulate(values: Sequence[Value], args: dict[str, Any], n: int) -> Value:
        ys, dim = values[0].ys, args["dim"]
        whole = _joined_up(ys, args)
        others = [(y if y.dim() else y.reshape(1)).narrow(dim, 0, 0) for y in ys]
        return Value(tuple(whole if r == args["root"] else others[r] for r in range(n)), False)


class Broadcast(_Collective):
    takes = ("root", "grad", "reduce_dtype")

    @staticmethod
    def propose(draw: Draw) -> Proposal:
        at = draw.pick_unreplicated(lambda value: value.same_shape)
        args = {"root": draw.rng.randrange(draw.n), "grad": convention(draw), "reduce_dtype": reduce_dtype(draw)}
        return (at,), args

    simulate = staticmethod(lambda values, args, n: same(values[0].ys[args["root"]], n, args["grad"]))


class Reduce(_Collective):
    takes = ("root", "op", "reduce_dtype")

    @staticmethod
    def propose(draw: Draw) -> Proposal:
        at = draw.pick_unreplicated(lambda value: value.same_shape)
        args = {"root": draw.rng.randrange(draw.n), "op": draw.rng.choice(["sum", "avg"])}
        return (at,), {**args, "reduce_dtype": reduce_dtype(draw)}

    @staticmethod
    def simulate(values: Sequence[Value], args: dict[str, Any], n: int) -> Value:
        y = total(values[0].ys) / (n if args["op"] == "avg" else 1)
        return Value(tuple(y if r == args["root"] else torch.zeros_like(y) for r in range(n)), False)


class Scatter(_Collective):
    takes = ("root", "dim", "splits")

    @staticmethod
    def propose(draw: Draw) -> Proposal:
        at = draw.pick_unreplicated(lambda value: value.same_shape)
        return (at,), {**_cut(draw, at), "root": draw.rng.randrange(draw.n)}

    simulate = staticmethod(lambda values, args, n: Value(tuple(slices(values[0].ys[args["root"]], args, n)), False))
