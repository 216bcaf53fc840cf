"""Every output is a new tensor: not a view, does not share memory with the input, and can be changed in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from ranks import RankPool
from semantics import OPERATIONS, Case, tensors
from torch import Tensor

from pynccl import Communicator

Map = Callable[[Tensor], Tensor]


def loss(y: Tensor) -> Tensor:
    return (y * y.conj()).real.sum() if y.is_complex() else (y * y).sum()


def gradient_after(call: Map, x0: Tensor, change: Map) -> Tensor:
    """Return the gradient after `change` of the output; check that x is unchanged."""
    x = x0.clone().requires_grad_()
    (dx,) = torch.autograd.grad(loss(change(call(x * 1.0))), x)
    assert torch.equal(x.detach(), x0)
    return dx


def check_output(call: Map, x0: Tensor, what: str, saves_output: bool = False) -> None:
    """Check memory, in-place changes and the unchanged input, plainly, under no_grad and in inference mode."""
    if saves_output:  # like torch.amax, whose derivative needs the result
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradient_after(call, x0, lambda y: y.mul_(2))
        gradient_after(call, x0, lambda y: y * 2)  # runs the backward collectives, so that the ranks stay in step
    else:
        in_place = gradient_after(call, x0, lambda y: y.mul_(2).add_(1))
        assert torch.equal(in_place, gradient_after(call, x0, lambda y: y * 2 + 1)), f"{what}: gradient"
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            x = x0.clone()
            y = call(x)
            assert not y._is_view() and y is not x, f"{what}, {mode.__name__}"
            if y.numel() and x.numel():
                assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr(), f"{what}, {mode.__name__}"
            y.add_(1)
            assert torch.equal(x, x0), f"{what}, {mode.__name__}: the input has changed"


def check_all_outputs(comm: Communicator) -> None:
    for name, operation in OPERATIONS.items():
        saves_output = name.split()[-1] in ("max", "min", "prod")
        for dtype, dim in ((torch.float64, 0), (torch.complex128, 2)):
            if dtype.is_complex and "complex" in operation.cannot:
                continue
            case = Case(comm.size, 0 if "any dim" in operation.cannot else dim)
            x = tensors(operation, case, 1, dtype)[comm.rank]
            call: Map = partial(operation.call, comm=comm, case=case)
            what = f"{name}, dim {dim}, {dtype}"
            check_output(call, x, what, saves_output)
            if not saves_output:
                found = torch.func.grad(lambda t, call=call: loss(call(t).mul_(2)))(x)
                assert torch.equal(found, torch.func.grad(lambda t, call=call: loss(call(t) * 2))(x)), f"{what}: grad"


def test_outputs_are_new_tensors_that_can_be_changed_in_place(ranks: RankPool) -> None:
    ranks.run(2, check_all_outputs)
