"""What `python -m pynccl explain` has to show, computed with NumPy from the definitions, all ranks in one place.

Gradients come from the forward: of a linear operation its matrix is written down column by column, and transposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Arrays = list[np.ndarray]


def outputs(name: str, op: str, xs: Sequence[Any], counts: Sequence[int], root: int = 0) -> Arrays:
    """What every rank gets. counts: elements of each rank's block."""
    xs = [np.asarray(x, dtype=float) for x in xs]
    n = len(xs)
    ends = np.cumsum(counts)
    cut = [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]
    none = np.zeros(0)
    if name == "all_reduce":
        return [reduced(op, xs)] * n
    if name == "reduce_scatter":
        return [reduced(op, xs)[block] for block in cut]
    if name == "all_gather":
        return [np.concatenate(xs)] * n
    if name == "broadcast":
        return [xs[root]] * n
    if name == "reduce":
        return [reduced(op, xs) if rank == root else np.zeros_like(xs[rank]) for rank in range(n)]
    if name == "scatter":
        return [xs[root][block] for block in cut]
    if name == "gather":
        return [np.concatenate(xs) if rank == root else none for rank in range(n)]
    if name == "all_to_all":
        sizes = [[counts[(target - source) % n] for target in range(n)] for source in range(n)]
        parts = [np.split(x, np.cumsum(own)[:-1]) for x, own in zip(xs, sizes, strict=True)]
        return [np.concatenate([parts[source][rank] for source in range(n)]) for rank in range(n)]
    if name == "permute":
        return [xs[rank - 1] for rank in range(n)]
    if name == "send_recv":
        return [xs[root] if rank == (root + 1) % n else np.zeros_like(xs[rank]) for rank in range(n)]
    if name == "halo_exchange":
        ys = [x.copy() for x in xs]
        for left in range(n - 1):
            ys[left][-1], ys[left + 1][0] = xs[left + 1][1], xs[left][-2]
        return ys
    if name == "copy":
        return xs
    assert name == "split"
    return [x[block] for x, block in zip(xs, cut, strict=True)]


def reduced(op: str, xs: Arrays) -> np.ndarray:
    return np.asarray((np.mean if op == "avg" else np.sum)(np.stack(xs), axis=0))


def gradients(name: str, op: str, grad: str, xs: Arrays, gs: Arrays, counts: Sequence[int], root: int = 0) -> Arrays:
    """What every rank's x gets of these cotangents of the outputs."""
    if grad == "replicated":  # one y, and one cotangent of it
        gs = [gs[0], *(np.zeros_like(g) for g in gs[1:])]
    matrix = _matrix(name, op, xs, counts, root)
    ends = np.cumsum([len(x) for x in xs])[:-1]
    found = np.split(matrix.T @ np.concatenate(gs), ends)
    return [np.sum(found, axis=0)] * len(xs) if name in ("copy", "split") else found


def _matrix(name: str, op: str, xs: Arrays, counts: Sequence[int], root: int) -> np.ndarray:
    """Column by column: what an element of an input does to all outputs."""
    ends = np.cumsum([len(x) for x in xs])
    columns = []
    for one in np.eye(int(ends[-1])):
        columns.append(np.concatenate(outputs(name, op, np.split(one, ends[:-1]), counts, root)))
    return np.stack(columns, axis=1)
