"""What a program of the fault campaign calls beside pynccl: its inputs, what must come out, and marks for the campaign.

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
FOLDER = Path(os.environ.get("PYNCCL_CAMPAIGN_FOLDER", "."))

Array = np.ndarray[Any, Any]
_REDUCE = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum, "avg": np.add}


def sample(step: int, rank: int, count: int) -> Array:
    """The input of a rank of the job to a step: integers from 0 to 3."""
    return (np.arange(count) * (rank + 2) + step * 5 + rank) % 7 % 4


def data(step: int, count: int, dtype: str) -> Tensor:
    return torch.from_numpy(sample(step, RANK, count)).to(getattr(torch, dtype))


def leaf(step: int, count: int) -> Tensor:
    return data(step, count, "float64").requires_grad_()


def cotangent(step: int, like: Tensor) -> Tensor:
    return torch.from_numpy(sample(step + 1000, RANK, like.numel())).to(like.dtype).reshape(like.shape)


def group_of(groups: Sequence[Sequence[int]]) -> list[int]:
    """The ranks of the job that are with this one in a communicator, in their order there."""
    return next((list(group) for group in groups if RANK in group), [])


def expected(step: int, ranks: Sequence[int], operation: str, count: int, op: str = "sum", root: int = 0) -> Any:
    """What this rank receives; None if nothing. `count` is that of the smaller buffer."""
    n, me = len(ranks), list(ranks).index(RANK)
    whole = count * n if operation in ("reduce_scatter", "all_to_all", "scatter") else count
    inputs = [sample(step, rank, whole) for rank in ranks]
    if operation in ("reduce", "gather") and me != root:
        return None
    if operation in ("all_gather", "gather"):
        return np.concatenate(inputs)
    if operation == "broadcast":
        return inputs[root]
    if operation == "scatter":
        return inputs[root][me * count : (me + 1) * count]
    if operation == "all_to_all":
        return np.concatenate([one[me * count : (me + 1) * count] for one in inputs])
    total = functools.reduce(_REDUCE[op], inputs)
    total = total / n if op == "avg" else total
    return total[me * count : (me + 1) * count] if operation == "reduce_scatter" else total


def check(
    step: int, got: Any, ranks: Sequence[int], operation: str, count: int, dtype: str, op: str = "sum", root: int = 0
) -> None:
    want = expected(step, ranks, operation, count, op, root)
    _compare(f"{operation} of step {step}", got, want, dtype)


def check_v(step: int, got: Any, ranks: Sequence[int], operation: str, counts: Sequence[int], dtype: str) -> None:
    """The collectives with a count per rank; all_to_all_v sends counts[j] elements to rank j."""
    n, me = len(ranks), list(ranks).index(RANK)
    own = slice(sum(counts[:me]), sum(counts[: me + 1]))
    if operation == "all_gather_v":
        want = np.concatenate([sample(step, rank, counts[i]) for i, rank in enumerate(ranks)])
    elif operation == "reduce_scatter_v":
        want = functools.reduce(np.add, [sample(step, rank, sum(counts)) for rank in ranks])[own]
    else:
        want = np.concatenate([sample(step, rank, sum(counts))[own] for rank in ranks])
    _compare(f"{operation} of step {step} on {n} ranks", got, want, dtype)


def check_message(step: int, got: Tensor, source: int, dtype: str) -> None:
    """`source` is the rank in the job."""
    _compare(f"message of step {step}", got, sample(step, source, got.numel()), dtype)


def check_backward(step: int, y: Tensor, x: Tensor, ranks: Sequence[int], operation: str, count: int) -> None:
    """The result of a differentiable collective with grad="sum", and the gradient of its input."""
    n, me = len(ranks), list(ranks).index(RANK)
    _compare(f"ad.{operation} of step {step}", y.detach(), expected(step, ranks, operation, count), "float64")
    length = count * n if operation == "all_gather" else count
    cotangents = [sample(step + 1000, rank, length) for rank in ranks]
    if operation == "reduce_scatter":
        want = np.concatenate(cotangents)
    else:
        want = functools.reduce(np.add, cotangents)
        want = want[me * count : (me + 1) * count] if operation == "all_gather" else want
    _compare(f"gradient of ad.{operation} of step {step}", x.grad, want, "float64")


def _compare(what: str, got: Any, want: Any, dtype: str) -> None:
    if want is None:
        right = got is None
    else:
        right = got is not None and torch.equal(got, torch.from_numpy(np.asarray(want)).to(getattr(torch, dtype)))
    if not right:
        print(f"WRONG DATA: {what} on rank {RANK}: got {got}, expected {want}", file=sys.stderr, flush=True)


def die_in(seconds: float) -> None:
    """Have this process killed in the middle of what it will be doing then."""
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def mark(name: str) -> None:
    """Tell the campaign that this rank has come here."""
    (FOLDER / f"mark-{name}").touch()


def wait_for(name: str, limit: float = 15.0) -> None:
    """Wait for what the campaign tells."""
    end = time.monotonic() + limit
    while not (FOLDER / f"mark-{name}").exists() and time.monotonic() < end:
        time.sleep(0.005)
