"""Steps that are modules: parallel linear layers, and movements between partitions. See programs.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .collective_steps import total
from .programs import Draw, Kind, Proposal, Text, Unfit, Value


class _Linear(Kind):
    """A parallel layer, or a Sequential of a linear layer and a collective, applied to an input and a weight."""

    linear = False
    layer = ""
    traits = frozenset({"layer"})

    @classmethod
    def weights(cls, draw: Draw, x: Value) -> int:
        """Pick a variable that is not replicated and can be the weight for this input."""
        features = {y.shape[-1] for y in x.ys}
        if len(features) != 1:
            raise Unfit
        return draw.pick_unreplicated(lambda w: _matrix(w) and w.ys[0].dim() == 2 and w.ys[0].shape[1] in features)

    @classmethod
    def with_bias(cls, draw: Draw, x: int) -> Proposal:
        """Return a proposal; row-parallel layers have a bias half of the time."""
        w = cls.weights(draw, draw.values[x])
        out = draw.values[w].ys[0].shape[0]
        if cls.layer.startswith("row") and draw.chance(0.5):
            return (x, w, draw.pick(lambda value: value.replicated and tuple(value.ys[0].shape) == (out,))), {
                "bias": True
            }
        return (x, w), {}

    @classmethod
    def write(cls, names: Sequence[str], args: dict[str, Any]) -> Text:
        return Text(f"layer({cls.layer!r}, comm, {', '.join(names)}, bias={args.get('bias', False)})")


def _matrix(value: Value) -> bool:
    return value.same_shape and value.ys[0].dim() >= 2 and bool(value.ys[0].numel())


class ColumnParallel(_Linear):
    """x is replicated, the rows of W are sharded."""

    layer = "column"

    @classmethod
    def propose(cls, draw: Draw) -> Proposal:
        x = draw.pick(lambda value: value.replicated and _matrix(value))
        return (x, cls.weights(draw, draw.values[x])), {}

    @staticmethod
    def simulate(values: Sequence[Value], args: dict[str, Any], n: int) -> Value:
        return Value(tuple(F.linear(x, w) for x, w in zip(values[0].ys, values[1].ys, strict=True)), False)


class ColumnParallelSequence(_Linear):
    layer = "column sequence"

    @classmethod
    def propose(cls, draw: Draw) -> Proposal:
        x = draw.pick_unreplicated(_matrix)
        return (x, cls.weights(draw, draw.values[x])), {}

    @staticmethod
    def simulate(values: Sequence[Value], args: dict[str, Any], n: int) -> Value:
        x = torch.cat(list(values[0].ys))
        return Value(tuple(F.linear(x, w) for w in values[1].ys), False)


class GatherLinear(ColumnParallelSequence):
    layer = "gather linear"


class RowParallel(_Linear):
    """x and the columns of W are sharded; the sum is replicated."""

    layer = "row"

    @classmethod
    def propose(cls, draw: Draw) -> Proposal:
        return cls.with_bias(draw, draw.pick_unreplicated(_matrix))

    @staticmethod
    def simulate(values: Sequence[Value], args: dict[str, Any], n: int) -> Value:
        y = total([F.linear(x, w) for x, w in zip(values[0].ys, values[1].ys, strict=True)])
        if args.get("bias"):
            y = y + values[2].ys[0]
        return Value((y,) * n, True)


class LinearReduce(RowParallel):
    layer = "linear reduce"


class RowParallelSequence(_Linear):
    layer = "row sequence"

    @classmethod
    def propose(cls, draw: Draw) -> Proposal:
        return cls.with_bias(
            draw, draw.pick_unreplicated(lambda value: _matrix(value) and value.ys[0].shape[0] % draw.n == 0)
        )

    @staticmethod
    def simulate(values: Sequence[Value], args: dict[str, Any], n: int) -> Value:
        parts = total([F.linear(x, w) for x, w in zip(values[0].ys, values[1].ys, strict=True)]).chunk(n)
        return Value(tuple(part + values[2].ys[0] if args.get("bias") else part for part in parts), False)


class LinearScatter(RowParallelSequence):
    layer = "linear scatter"


# ------------------------------------------------------------------------------------------------------- partitions

GRIDS: dict[int, list[tuple[int, ...]]] = {1: [(1,), (1, 1)], 2: [(2,), (1, 2), (2, 1)], 3: [(3,), (1, 3), (3, 1)]}
GRIDS[4] = [(4,), (2, 2), (1, 4), (4, 1)]


def _grid(draw: Draw, dims: int | None = None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw (shape, ranks) of a partition; it may omit some ranks."""
    size = draw.n if draw.chance(0.6) else draw.rng.randint(1, draw.n)
    found = [shape for shape in GRIDS[size] if dims is None or len(shape) == dims]
    ranks = tuple(range(size)) if draw.chance(0.5) else tuple(draw.rng.sample(range(draw.n), size))
    return draw.rng.choice(found), ranks


def _block(x: Tensor, shape: Sequence[int], position: int) -> Tensor:
    """Return the block at `position`. The first blocks of a dimension may be larger by one row."""
    for dim, (parts, i) in enumerate(zip(shape, _coordinates(position, shape), strict=True)):
        x = x.tensor_split(parts, dim)[i]
    return x


class _Partitioned(Kind):
    """Written as `text`, formatted with the name of its input and its arguments."""

    traits = frozenset({"partition"})
    weight = 0.8
    text: ClassVar[str] = ""

    @classmethod
    def write(cls, names: Sequence[str], args: dict[str, Any]) -> Text:
        return Text(cls.text.format(*names, **args))


class OnlyOn(_Partitioned):
    """An empty tensor on the ranks outside a partition."""

    text = "{0} if comm.rank in {ranks} else {0}.flatten()[:0]"
    local = True

    @staticmethod
    def propose(draw: Draw) -> Proposal:
        _, ranks = _grid(draw)
        at = draw.pick_unreplicated(lambda value: value.same_shape and value.ys[0].dim() > 0)
        return (at,), {"ranks": ranks}

    @staticmethod
    def simulate(values: Sequence[Value], args: dict[str, Any], n: int) -> Value:
        return Value(tuple(y if r in args["ranks"] else y.reshape(-1)[:0] for r, y in enumerate(values[0].ys)), False)


def _active(draw: Draw, ranks: Sequence[int]) -> int:
    """Pick a variable with the same shape on `ranks` and no elements on the others."""

    def fits(value: Value) -> bool:
        shapes = value.shapes
        inactive = [r for r in range(draw.n) if r not in ranks]
        return len({shapes[r] for r in ranks}) == 1 and not any(value.ys[r].numel() for r in inactive)

    return draw.pick_unreplicated(fits)


class AllSumReduce(_Partitioned):
    text = "between('AllSumReduce', comm, {shape}, {ranks}, {axes})({0})"
    weight = 2.0

    @staticmethod
    def propose(draw: Draw) -> Proposal:
        shape, ranks = _grid(draw)
        axes = tuple(axis for axis in range(len(shape)) if draw.chance(0.6))
        return (_active(draw, ranks),), {"shape": shape, "ranks": ranks, "axes": axes}

    @staticmethod
    def simulate(values: Sequence[Value], args: dict[str, Any], n: int) -> Value:
        ys, shape, ranks, axes = values[0].ys, args["shape"], args["ranks"], args["axes"]

        def kept(r: int) -> tuple[int, ...]:
            return tuple(0 if i in axes else at for i, at in enumerate(_coordinates(ranks.index(r), shape)))

        def reduced(r: int) -> Tensor:
            return total([ys[q] for q in ranks if kept(q) == kept(r)]) if r in ranks else ys[r] * 1

        return Value(tuple(reduced(r) for r in range(n)), False)


def _coordinates(position: int, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(position, shape))


def _origins(small: Sequence[int], large: Sequence[int]) -> list[int]:
    """Return, for each position of the large grid, the position of the small grid that it is broadcast from."""
    positions = np.arange(int(np.prod(small))).reshape(small)
    return [int(i) for i in np.broadcast_to(positions, large).reshape(-1)]


def _two_grids(draw: Draw) -> dict[str, Any]:
    (small, small_ranks), (large, large_ranks) = _grid(draw), _grid(draw)
    ones = (1,) * (len(large) - len(small))
    if len(small) > len(large) or any(a not in (1, b) for a, b in zip(ones + small, large, strict=True)):
        raise Unfit
    return {"small": small, "small_ranks": small_ranks, "large": large, "large_ranks": large_ranks}


class BroadcastBetween(_Partitioned):
    text = "between('Broadcast', comm, {small}, {small_ranks}, {large}, {large_ranks})({0})"

    @staticmethod
    def propose(draw: Draw) -> Proposal:
        args = _two_grids(draw)
        return (_active(draw, args["small_ranks"]),), args

    @staticmethod
    def simulate(values: Sequence[Value], args: dict[str, Any], n: int) -> Value:
        ys = values[0].ys
        origins = _origins(args["small"], args["large"])
        made = [ys[0].new_zeros(0) for _ in range(n)]
        for position, r in enumerate(args["large_ranks"]):
            made[r] = ys[args["small_ranks"][origins[position]]]
        return Value(tuple(made), False)


class SumReduceBetween(_Partitioned):
    text = "between('SumReduce', comm, {large}, {large_ranks}, {small}, {small_ranks})({0})"

    @staticmethod
    def propose(draw: Draw) -> Proposal:
        args = _two_grids(draw)
        return (_active(draw, args["large_ranks"]),), args

    @staticmethod
    def simulate(values: Sequence[Value], args: dict[str, Any], n: int) -> Value:
        ys = values[0].ys
        goals = _origins(args["small"], args["large"])
        made = [ys[0].new_zeros(0) for _ in range(n)]
        for position, r in enumerate(args["small_ranks"]):
            made[r] = total([ys[q] for q, goal in zip(args["large_ranks"], goals, strict=True) if goal == position])
        return Value(tuple(made), False)


class Blocks(_Partitioned):
    """Repartition a tensor of which each rank passes its block."""

    @staticmethod
    def propose(draw: Draw) -> Proposal:
        at = draw.pick_unreplicated(lambda value: value.same_shape and value.ys[0].dim() in (1, 2))
        dims = draw.values[at].ys[0].dim()
        (source, source_ranks), (goal, goal_ranks) = _grid(draw, dims), _grid(draw, dims)
        return (at,), {"source": source, "source_ranks": source_ranks, "goal": goal, "goal_ranks": goal_ranks}

    @staticmethod
    def simulate(values: Sequence[Value], args: dict[str, Any], n: int) -> Value:
        """Build the global tensor from block p of the rank at position p, then split it by the goal."""
        ys, shape = values[0].ys, args["source"]
        whole = torch.zeros_like(ys[0])
        for position, r in enumerate(args["source_ranks"]):
            mask = torch.zeros(ys[0].shape, dtype=torch.bool)
            _block(mask, shape, position).fill_(True)
            whole = whole + ys[r] * mask
        made = [ys[0].new_zeros(0) for _ in range(n)]
        for position, r in enumerate(args["goal_ranks"]):
            made[r] = _block(whole, args["goal"], position)
        return Value(tuple(made), False)

    @staticmethod
    def write(names: Sequence[str], args: dict[str, Any]) -> Text:
        source = f"{args['source']}, {args['source_ranks']}"
        module = f"between('Repartition', comm, {source}, {args['goal']}, {args['goal_ranks']})"
        return Text(f"{module}(block({names[0]}, comm, {source}))")


def block(x: Tensor, comm: Any, shape: Sequence[int], ranks: Sequence[int]) -> Tensor:
    """Return this rank's block of x on a partition."""
    return _block(x, shape, list(ranks).index(comm.rank)) if comm.rank in ranks else x.flatten()[:0]
