"""Expected values of `python -m pynccl explain`, computed with NumPy for all ranks at once.

Gradients use the transposed matrix of the forward pass, since all operations are linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Arrays = list[np.ndarray]


def outputs(name: str, xs: Sequence[Any]) -> Arrays:
    """Return the output of every rank. The root is rank 0."""
    xs = [np.asarray(x, dtype=float) for x in xs]
    n = len(xs)
    none = np.zeros(0)
    if name == "all_reduce":
        return [np.sum(xs, axis=0)] * n
    if name == "reduce_scatter":
        return np.split(np.sum(xs, axis=0), n)
    if name == "all_gather":
        return [np.concatenate(xs)] * n
    if name == "broadcast":
        return [xs[0]] * n
    if name == "reduce":
        return [np.sum(xs, axis=0), *(np.zeros_like(x) for x in xs[1:])]
    if name == "scatter":
        return np.split(xs[0], n)
    if name == "gather":
        return [np.concatenate(xs), *[none] * (n - 1)]
    if name == "all_to_all":
        parts = [np.split(x, n) for x in xs]
        return [np.concatenate([parts[source][rank] for source in range(n)]) for rank in range(n)]
    if name == "permute":
        return [xs[rank - 1] for rank in range(n)]
    if name == "send_recv":
        return [xs[0] if rank == 1 else np.zeros_like(xs[rank]) for rank in range(n)]
    if name == "halo_exchange":
        ys = [x.copy() for x in xs]
        for left in range(n - 1):
            ys[left][-1], ys[left + 1][0] = xs[left + 1][1], xs[left][-2]
        return ys
    if name == "copy":
        return xs
    assert name == "split"
    return [np.split(x, n)[rank] for rank, x in enumerate(xs)]


def gradients(name: str, grad: str, xs: Sequence[Any], gs: Sequence[Any]) -> Arrays:
    """Return the gradient of every rank's input for these cotangents of the outputs."""
    gs = [np.asarray(g, dtype=float) for g in gs]
    if grad == "replicated":  # one y, and one cotangent of it
        gs = [gs[0], *(np.zeros_like(g) for g in gs[1:])]
    ends = np.cumsum([len(x) for x in xs])
    # Row i: the outputs of all ranks for the i-th unit vector of the inputs.
    matrix = [np.concatenate(outputs(name, np.split(unit_vector, ends[:-1]))) for unit_vector in np.eye(int(ends[-1]))]
    found = np.split(np.stack(matrix) @ np.concatenate(gs), ends[:-1])
    return [np.sum(found, axis=0)] * len(xs) if name in ("copy", "split") else found
