"""What a program of the fault campaign calls besides pynccl: inputs, what must come out, and what strikes a rank.

Inputs are small integers, so that every sum is exact in every data type. What must come out is computed by NumPy from
the inputs of all ranks.
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
FOLDER = Path.cwd().parent  # of the run

Array = np.ndarray[Any, Any]
_REDUCE = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum, "avg": np.add}


def sample(step: int, rank: int, count: int) -> Array:
    """The input of a rank of the job to a step: integers from 0 to 3."""
    return (np.arange(count) * (rank + 2) + step * 5 + rank) % 7 % 4


def data(step: int, count: int, dtype: str) -> Tensor:
    return torch.from_numpy(sample(step, RANK, count)).to(getattr(torch, dtype))


def group_of(groups: Sequence[Sequence[int]]) -> list[int]:
    """The ranks of the job that are with this one in a communicator, in their order there."""
    return next((list(group) for group in groups if RANK in group), [])


def expected(step: int, ranks: Sequence[int], operation: str, count: int, op: str = "sum", root: int = 0) -> Any:
    """What this rank receives; None if nothing. `count` is that of the smaller buffer."""
    n, me = len(ranks), list(ranks).index(RANK)
    if operation in ("reduce", "gather") and me != root:
        return None
    blocks = n if operation in ("reduce_scatter", "all_to_all", "scatter") else 1
    inputs, own = [sample(step, rank, blocks * count) for rank in ranks], slice(me * count, (me + 1) * count)
    if operation in ("all_gather", "gather"):
        return np.concatenate(inputs)
    if operation == "all_to_all":
        return np.concatenate([one[own] for one in inputs])
    if operation in ("broadcast", "scatter"):
        return inputs[root][own] if blocks > 1 else inputs[root]
    total: Array = functools.reduce(_REDUCE[op], inputs)
    total = total / n if op == "avg" else total
    return total[own] if blocks > 1 else total


def check(step: int, got: Any, want: Any, dtype: str) -> None:
    """Say so if this is not what must come out."""
    if want is None:
        right = got is None
    else:
        right = got is not None and torch.equal(got, torch.from_numpy(np.asarray(want)).to(getattr(torch, dtype)))
    if not right:
        print(f"WRONG DATA: step {step} on rank {RANK}: got {got}, expected {want}", file=sys.stderr, flush=True)


def strike(number: signal.Signals, seconds: float) -> None:
    """Have this process hit by a signal in the middle of what it will be doing then."""

    def hit() -> None:
        mark("struck")
        signal.pthread_kill(threading.main_thread().ident or 0, number)

    threading.Timer(seconds, hit).start()


def come_late(seconds: float) -> None:
    """Let another rank wait in its next call until it has been struck, and so much longer."""
    wait_for("struck")
    time.sleep(seconds)


def mark(name: str) -> None:
    """Tell the campaign and the other ranks that it has come to this, and when."""
    (FOLDER / name).write_text(str(time.monotonic()))


def wait_for(name: str, limit: float = 15.0) -> None:
    end = time.monotonic() + limit
    while not (FOLDER / name).exists() and time.monotonic() < end:
        time.sleep(0.005)
