"""Steps that are exchanges: all_to_all, permute, send_recv, halo_exchange. See programs.py and collective_steps.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .collective_steps import _Collective, joined, joins, options, slices
from .programs import Draw, Proposal, Text, Unfit, Value


class AllToAll(_Collective):
    """Equal slices, along one dimension or from one dimension to another."""

    takes = ("split_dim", "concat_dim")
    weight = 2.5

    @staticmethod
    def propose(draw: Draw) -> Proposal:
        at = draw.pick_unreplicated(lambda value: value.same_shape)
        value = draw.values[at]
        split, concat = draw.dim(value), draw.dim(value)
        if value.ys[0].shape[split] % draw.n:
            raise Unfit
        return (at,), {"split_dim": draw.either_sign(split, value), "concat_dim": draw.either_sign(concat, value)}

    @staticmethod
    def simulate(values: Sequence[Value], args: dict[str, Any], n: int) -> Value:
        parts = [y.chunk(n, args["split_dim"]) if y.numel() else _empty_parts(y, args, n) for y in values[0].ys]
        return Value(tuple(torch.cat([part[r] for part in parts], args["concat_dim"]) for r in range(n)), False)


def _empty_parts(y: Tensor, args: dict[str, Any], n: int) -> list[Tensor]:
    return slices(y, {"dim": args["split_dim"], "splits": None}, n)


class UnevenAllToAll(_Collective):
    """Any sizes along one dimension; between two dimensions, one size per receiver and one per sender."""

    @staticmethod
    def propose(draw: Draw) -> Proposal:
        at, args = joins(draw)
        value = draw.values[at]
        if not value.ys[0].dim():
            raise Unfit
        split = args["dim"] % value.ys[0].dim()
        if value.same_shape and value.ys[0].dim() > 1 and draw.chance(0.4):
            concat = draw.rng.choice([dim for dim in range(value.ys[0].dim()) if dim != split])
            sends = [draw.parts(value.ys[0].shape[split])] * draw.n
            recvs = [[value.ys[0].shape[concat]] * draw.n] * draw.n
        else:
            concat = split
            sends = [draw.parts(y.shape[split]) for y in value.ys]
            recvs = [[sends[q][r] for q in range(draw.n)] for r in range(draw.n)]
        return (at,), {"split_dim": split, "concat_dim": concat, "sends": sends, "recvs": recvs}

    @staticmethod
    def simulate(values: Sequence[Value], args: dict[str, Any], n: int) -> Value:
        parts = [
            slices(y, {"dim": args["split_dim"], "splits": sizes}, n)
            for y, sizes in zip(values[0].ys, args["sends"], strict=True)
        ]
        return Value(tuple(torch.cat([part[r] for part in parts], args["concat_dim"]) for r in range(n)), False)

    @staticmethod
    def write(names: Sequence[str], args: dict[str, Any]) -> Text:
        sizes = f"send_splits={args['sends']}[comm.rank], recv_splits={args['recvs']}[comm.rank]"
        return Text("", "all_to_all", names[0], joined(options(args, "split_dim", "concat_dim"), sizes), True)


class Permute(_Collective):
    @staticmethod
    def propose(draw: Draw) -> Proposal:
        at = draw.pick_unreplicated(lambda value: value.same_shape)
        pairs = [(q, r) for q in range(draw.n) for r in range(draw.n)]
        return (at,), {"edges": draw.rng.sample(pairs, draw.rng.randint(0, min(len(pairs), 2 * draw.n)))}

    @staticmethod
    def simulate(values: Sequence[Value], args: dict[str, Any], n: int) -> Value:
        ys = values[0].ys
        sums = [sum((ys[q] for q, to in args["edges"] if to == r), torch.zeros_like(ys[r])) for r in range(n)]
        return Value(tuple(sums), False)

    write = staticmethod(lambda names, args: Text("", "permute", names[0], repr(args["edges"]), True))


class SendRecv(_Collective):
    """Pairs of a sender and a receiver. Ranks without a peer call it too, although they need not."""

    @staticmethod
    def propose(draw: Draw) -> Proposal:
        at = draw.pick_unreplicated(lambda value: value.same_shape)
        targets: list[int | None] = [None] * draw.n
        count = draw.rng.randint(0, draw.n)
        senders, receivers = draw.rng.sample(range(draw.n), count), draw.rng.sample(range(draw.n), count)
        for sender, receiver in zip(senders, receivers, strict=True):
            targets[sender] = receiver
        sources = [targets.index(r) if r in targets else None for r in range(draw.n)]
        return (at,), {"targets": targets, "sources": sources}

    @staticmethod
    def simulate(values: Sequence[Value], args: dict[str, Any], n: int) -> Value:
        ys = values[0].ys
        sources = args["sources"]
        return Value(tuple(torch.zeros_like(ys[r]) if q is None else ys[q] for r, q in enumerate(sources)), False)

    @staticmethod
    def write(names: Sequence[str], args: dict[str, Any]) -> Text:
        rest = f"target={args['targets']}[comm.rank], source={args['sources']}[comm.rank]"
        return Text("", "send_recv", names[0], rest, True)


class HaloExchange(_Collective):
    takes = ("dim", "halo")

    @staticmethod
    def propose(draw: Draw) -> Proposal:
        at, args = joins(draw)
        value = draw.values[at]
        if not value.ys[0].dim():
            raise Unfit
        smallest = min(shape[args["dim"]] for shape in value.shapes)
        left, right = draw.rng.randint(0, 2), draw.rng.randint(0, 2)
        if smallest - left - right < max(left, right):
            raise Unfit
        return (at,), {"dim": args["dim"], "halo": (left, right)}

    @staticmethod
    def simulate(values: Sequence[Value], args: dict[str, Any], n: int) -> Value:
        ys, dim, (left, right) = values[0].ys, args["dim"], args["halo"]
        made = []
        for r, y in enumerate(ys):
            size = y.shape[dim]
            low, inner, high = y.split([left, size - left - right, right], dim)
            if r > 0:
                before = ys[r - 1]
                low = before.narrow(dim, before.shape[dim] - right - left, left)
            if r < n - 1:
                high = ys[r + 1].narrow(dim, left, right)
            made.append(torch.cat([low, inner, high], dim))
        return Value(tuple(made), False)
