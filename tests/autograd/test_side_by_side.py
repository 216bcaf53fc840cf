"""The same calls on torch.distributed.nn, on the functional collectives, and here: where torch is wrong, and we right.

Each case is a function of x, equal but for the library, with the loss sum_r <y_r, r + 1>. What is right comes from
torch's own derivative of a single-process reference. The tests also say how torch errs, so that they show when a
release of torch has caught up; they skip then.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator

INPUTS = ((1.0, 5.0), (3.0, 2.0))
N = len(INPUTS)

Reference = Callable[[Sequence[Tensor]], list[Tensor]]


def stacked(reduce: Callable[[Tensor], Tensor]) -> Reference:
    return lambda xs: [reduce(torch.stack(list(xs)))] * N


# name -> (reference, ours, torch's)
CASES: dict[str, tuple[Reference, Callable[[Tensor, Communicator], Tensor], Callable[[Tensor], Tensor]]] = {
    "nn all_reduce max": (
        stacked(lambda x: x.amax(0)),
        lambda x, comm: ad.all_reduce(x, comm, "max", grad="sum"),
        lambda x: _nn().all_reduce(x, op=_ops().MAX),
    ),
    "nn all_reduce prod": (
        stacked(lambda x: x.prod(0)),
        lambda x, comm: ad.all_reduce(x, comm, "prod", grad="sum"),
        lambda x: _nn().all_reduce(x, op=_ops().PRODUCT),
    ),
    "nn reduce_scatter avg": (
        lambda xs: list(torch.stack(list(xs)).mean(0).chunk(N)),
        lambda x, comm: ad.reduce_scatter(x, comm, op="avg"),
        lambda x: _nn().reduce_scatter(torch.zeros(1), list(x.chunk(N)), op=_ops().AVG),
    ),
    "functional broadcast": (
        lambda xs: [xs[0]] * N,
        lambda x, comm: ad.broadcast(x, comm, 0, grad="sum"),
        lambda x: _functional().broadcast(x, 0, _world()) + 0,
    ),
}


def _ops() -> Any:
    import torch.distributed as dist

    return dist.ReduceOp


def _world() -> Any:
    import torch.distributed as dist

    return dist.group.WORLD


def _nn() -> Any:
    import torch.distributed.nn.functional as nn

    return nn


def _functional() -> Any:
    import torch.distributed._functional_collectives as functional

    return functional


def in_process_group(comm: Communicator, folder: str, fn: Callable[[], Any]) -> Any:
    import torch.distributed as dist

    warnings.simplefilter("ignore")  # deprecations of what is compared with
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=comm.rank, world_size=comm.size)
    try:
        return fn()
    finally:
        dist.destroy_process_group()


def gradients(comm: Communicator, folder: str, name: str) -> tuple[Any, Any, Any]:
    """(right, ours, torch's), each (output, gradient) of this rank."""
    reference, ours, theirs = CASES[name]
    xs = [torch.tensor(row, requires_grad=True) for row in INPUTS]
    ys = reference(xs)
    grads = torch.autograd.grad(sum(((r + 1) * y).sum() for r, y in enumerate(ys)), xs, materialize_grads=True)
    right = ys[comm.rank].tolist(), grads[comm.rank].tolist()

    def measured(fn: Callable[[Tensor], Tensor]) -> tuple[list[float], list[float]]:
        x = torch.tensor(INPUTS[comm.rank], requires_grad=True)
        y = fn(x)
        (dx,) = torch.autograd.grad(y, x, torch.full_like(y, comm.rank + 1.0))
        return y.tolist(), dx.tolist()

    found = measured(lambda x: ours(x, comm))
    return right, found, in_process_group(comm, folder, lambda: measured(theirs))


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_that_torch_gets_wrong_is_right_here(ranks: RankPool, tmp_path: Path, name: str) -> None:
    torch_is_right = []
    for right, ours, theirs in ranks.run(N, gradients, str(tmp_path), name):
        assert ours == right
        assert theirs[0] == right[0]  # the same function: torch's output is right
        torch_is_right.append(theirs[1] == right[1])
    if all(torch_is_right):
        pytest.skip(f"torch {torch.__version__} gets this right too")


def refused(comm: Communicator, folder: str) -> tuple[list[str], list[float]]:
    """What the functional collectives refuse to differentiate, and our gradient of the same."""
    x = torch.tensor(INPUTS[comm.rank], requires_grad=True)

    def theirs() -> list[str]:
        messages = []
        for call in (
            lambda: _functional().all_reduce(x, "max", _world()) + 0,
            lambda: _functional().reduce_scatter_tensor(x, "avg", 0, _world()) + 0,
        ):
            y = call()
            try:
                torch.autograd.grad(y.sum(), x)
                messages.append("")
            except RuntimeError as error:
                messages.append(str(error))
        return messages

    messages = in_process_group(comm, folder, theirs)
    (of_max,) = torch.autograd.grad(ad.all_reduce(x, comm, "max", grad="sum").sum(), x)
    (of_avg,) = torch.autograd.grad(ad.reduce_scatter(x, comm, op="avg").sum(), x)
    return messages, [*of_max.tolist(), *of_avg.tolist()]


def test_what_the_functional_collectives_refuse_has_a_gradient_here(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(N, refused, str(tmp_path))
    assert [ours for _, ours in found] == [[0.0, 2.0, 0.5, 0.5], [2.0, 0.0, 0.5, 0.5]]
    if not all(all(messages) for messages, _ in found):
        pytest.skip(f"torch {torch.__version__} differentiates these too")


def tangents(comm: Communicator, folder: str) -> tuple[list[float], list[float]]:
    x, t = torch.tensor(INPUTS[comm.rank]), torch.full((2,), comm.rank + 1.0)
    ours = torch.func.jvp(lambda x: x * ad.all_reduce(x, comm, grad="sum"), (x,), (t,))[1]
    functional = lambda x: x * _functional().all_reduce(x, "sum", _world())  # noqa: E731
    theirs = in_process_group(comm, folder, lambda: torch.func.jvp(functional, (x,), (t,))[1])
    return ours.tolist(), theirs.tolist()


def test_the_tangent_that_the_functional_collectives_drop_is_kept_here(ranks: RankPool, tmp_path: Path) -> None:
    """d(x * S) = dx * S + x * dS with S = (4, 7), dS = (3, 3)."""
    (ours0, theirs0), (ours1, theirs1) = ranks.run(N, tangents, str(tmp_path))
    assert ours0 == [1 * 4 + 1 * 3.0, 1 * 7 + 5 * 3.0] and ours1 == [2 * 4 + 3 * 3.0, 2 * 7 + 2 * 3.0]
    if (theirs0, theirs1) == (ours0, ours1):
        pytest.skip(f"torch {torch.__version__} keeps it too")
    assert theirs0 == [4.0, 7.0]  # dS is gone, and nothing said so
