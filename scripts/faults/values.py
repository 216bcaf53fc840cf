"""Helpers for programs of the fault campaign: inputs, expected results, and signals that hit a rank.

Inputs are small integers, so that every sum is exact in every data type. NumPy computes the expected results from the
inputs of all ranks.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
FOLDER = Path(os.environ.get("PYNCCL_CAMPAIGN_FOLDER", "."))

Array = np.ndarray[Any, Any]
_REDUCE = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum, "avg": np.add}


def sample(step: int, rank: int, count: int) -> Array:
    """Return the input of a rank of the job to a step: integers from 0 to 3."""
    return (np.arange(count) * (rank + 2) + step * 5 + rank) % 7 % 4


def data(step: int, count: int, dtype: str) -> Tensor:
    return torch.from_numpy(sample(step, RANK, count)).to(getattr(torch, dtype))


def group_of(groups: Sequence[Sequence[int]]) -> list[int]:
    """Return the ranks of the job in this rank's group, in the order of the communicator."""
    return next((list(group) for group in groups if RANK in group), [])


def expected(step: int, ranks: Sequence[int], operation: str, count: int, op: str = "sum", root: int = 0) -> Any:
    """Return what this rank receives; None if nothing. `count` is that of the smaller buffer."""
    n, me = len(ranks), list(ranks).index(RANK)
    if operation in ("reduce", "gather") and me != root:
        return None
    if operation in ("all_gather", "gather"):
        return expected_v(step, ranks, "all_gather_v", [count] * n)
    if operation in ("reduce_scatter", "all_to_all"):
        return expected_v(step, ranks, f"{operation}_v", [count] * n, op)
    if operation == "scatter":
        return sample(step, ranks[root], count * n)[me * count : (me + 1) * count]
    if operation == "broadcast":
        return sample(step, ranks[root], count)
    return _reduced([sample(step, rank, count) for rank in ranks], op)


def expected_v(step: int, ranks: Sequence[int], operation: str, counts: Sequence[int], op: str = "sum") -> Array:
    """Return the result of a collective with one count per rank. all_to_all_v sends counts[j] elements to rank j."""
    me = list(ranks).index(RANK)
    if operation == "all_gather_v":
        return np.concatenate([sample(step, rank, count) for rank, count in zip(ranks, counts, strict=True)])
    own = slice(sum(counts[:me]), sum(counts[: me + 1]))
    inputs = [sample(step, rank, sum(counts))[own] for rank in ranks]
    return _reduced(inputs, op) if operation == "reduce_scatter_v" else np.concatenate(inputs)


def _reduced(inputs: Sequence[Array], op: str) -> Array:
    total: Array = functools.reduce(_REDUCE[op], inputs)
    return total / len(inputs) if op == "avg" else total


def check(step: int, got: Any, expected: Any, dtype: str) -> None:
    """Print WRONG DATA to stderr if `got` is not the expected result."""
    if expected is None:
        right = got is None
    else:
        right = got is not None and torch.equal(got, torch.from_numpy(np.asarray(expected)).to(getattr(torch, dtype)))
    if not right:
        print(f"WRONG DATA: step {step} on rank {RANK}: got {got}, expected {expected}", file=sys.stderr, flush=True)


def strike(number: signal.Signals, seconds: float) -> None:
    """Send this process a signal after so many seconds, in the middle of a call."""

    def hit() -> None:
        mark("struck")
        signal.pthread_kill(threading.main_thread().ident or 0, number)

    threading.Timer(seconds, hit).start()


def come_late(seconds: float) -> None:
    """Enter the next call only after the signal has hit the other rank, and `seconds` later."""
    wait_for("struck")
    time.sleep(seconds)


def mark(name: str) -> None:
    """Signal an event to the campaign and the other ranks, with its time."""
    (FOLDER / name).write_text(str(time.monotonic()))


def wait_for(name: str, limit: float = 15.0) -> None:
    end = time.monotonic() + limit
    while not (FOLDER / name).exists() and time.monotonic() < end:
        time.sleep(0.005)
