"""ad.anchor enters the backward pass on every rank, and PYNCCL_CHECK=1 reports where ranks disagree in it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import pytest
import torch
from ranks import RankPool
from torch import Tensor

import pynccl
import pynccl_autograd as ad
from pynccl import Communicator


def checking_communicator(comm: Communicator) -> Communicator:
    os.environ["PYNCCL_CHECK"] = "1"
    checked_comm = comm.split(0)
    assert checked_comm is not None and checked_comm.checking
    return checked_comm


def disagreements(comm: Communicator) -> list[str]:
    """Errors of a rank that enters a different adjoint, and of cotangents that should be equal and are not."""
    messages = []
    with checking_communicator(comm) as checked_comm:  # equal up to rounding, NaN and infinities: no error
        x = torch.ones(3, requires_grad=True)
        g = torch.tensor([float("nan"), float("inf"), 1.0 + 1e-7 * checked_comm.rank])
        ad.all_reduce(x, checked_comm, grad="replicated").backward(g)
        assert x.grad.tolist()[1:] == g.tolist()[1:]
    checked_comm = checking_communicator(comm)
    x = torch.ones(2, requires_grad=True)
    first = ad.all_reduce(x, checked_comm, grad="sum")
    second = ad.all_reduce(x, checked_comm, grad="sum")
    loss = second.sum() if checked_comm.rank == 1 else first.sum()
    with checked_comm, pytest.raises(pynccl.NcclInvalidUsage) as caught:
        loss.backward()
    messages.append(str(caught.value))
    calls: list[Callable[[Tensor, Communicator], Tensor]] = [
        lambda x, checked_comm: ad.all_gather(x, checked_comm, 0, grad="replicated"),
        lambda x, checked_comm: ad.all_reduce([x, x], checked_comm, grad="replicated")[0],
        lambda x, checked_comm: ad.start(ad.all_gather, x, checked_comm, 0, grad="replicated").wait(),
    ]
    for call in calls:
        checked_comm = checking_communicator(comm)
        y = call(torch.ones(2, 2, requires_grad=True), checked_comm)
        g = torch.ones_like(y)
        g[1, 0] += checked_comm.rank
        with checked_comm, pytest.raises(pynccl.NcclInvalidUsage) as caught:
            y.backward(g)
        messages.append(str(caught.value))
    return messages


def test_backward_disagreements_name_the_ranks_and_their_forward_lines(ranks: RankPool) -> None:
    for rank, (branch, *unequal) in enumerate(ranks.run(3, disagreements)):
        assert "disagree in the backward pass" in branch and "ad.anchor" in branch
        assert f"rank {rank}: backward of all_reduce, forward call no. {2 if rank == 1 else 1}" in branch
        lines = {int(line) for line in re.findall(r"test_anchor\.py:(\d+)", branch)}
        assert len(lines) == 2 and max(lines) - min(lines) == 1
        for message in unequal:
            assert "the cotangents differ" in message and re.search(r"test_anchor\.py:\d+", message)
            assert "index (1, 0)" in message and "rank 0 has 1, rank 1 has 2" in message


def checked_transforms(comm: Communicator) -> list[str]:
    """Compare cotangents within torch.func: the gradients of equal ones, and the errors of those that differ."""
    messages, x = [], torch.arange(6.0).view(3, 2)
    for derivative in (torch.func.grad, lambda f: torch.func.vmap(torch.func.grad(f))):
        with checking_communicator(comm) as checked_comm:

            def loss(x: Tensor, factor: float) -> Tensor:
                return (ad.all_reduce(x * x, checked_comm, grad="replicated") * factor).sum()

            assert torch.equal(derivative(lambda x: loss(x, 1.0))(x), 2 * x)
            with pytest.raises(pynccl.NcclInvalidUsage) as caught:
                derivative(lambda x: loss(x, 1.0 + checked_comm.rank))(x)
            messages.append(str(caught.value))
    return messages


def test_cotangents_are_compared_in_transforms_of_torch_func(ranks: RankPool) -> None:
    for messages in ranks.run(2, checked_transforms):
        assert all("the cotangents differ" in one and "rank 0 has 1, rank 1 has 2" in one for one in messages)


def test_outputs_of_any_dtype_get_zero_gradients() -> None:
    for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float64, torch.complex64):
        loss, y = torch.ones((), requires_grad=True), torch.full((3,), 7.0).to(dtype).requires_grad_()
        anchored = ad.anchor(loss, y, torch.arange(3))
        anchored.backward()
        assert (
            anchored.dtype is torch.float32 and anchored.item() == 1.0 and loss.grad is not None and y.grad is not None
        )
        assert loss.grad.item() == 1.0 and y.grad.dtype is dtype and y.grad.to(torch.complex64).tolist() == [0.0] * 3


# A third-order gradient penalty, where one rank leaves the outputs unused


def inputs(n: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(4, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(n)]


def penalties(loss: Tensor, xs: list[Tensor]) -> list[list[Tensor]]:
    """Gradients of the loss, each time after adding the squared norm of the previous gradient to it."""
    found = []
    for _ in range(3):
        gradient = torch.autograd.grad(loss, xs, create_graph=True)
        found.append([g.detach() for g in gradient])
        loss = loss + torch.stack([(g**2).sum() for g in gradient]).sum()
    return found


def output_loss(y: Tensor, z: Tensor) -> Tensor:
    return (y**4).sum() + (y[0] * z).sum() + (z**3).sum()


def gradient_penalty(comm: Communicator) -> list[Tensor]:
    x = inputs(comm.size)[comm.rank]
    y = ad.all_reduce(x.sin(), comm, grad="sum")
    z = ad.all_gather(x * 2, comm, grad="sum")
    y, z = (y, z) if comm.rank == 0 else (y + float("nan"), z + float("inf"))  # unused values do not matter
    loss = output_loss(y, z) if comm.rank == 0 else ad.anchor(torch.zeros(()).double(), y, z, torch.arange(3), x[:0])
    return [gradient for (gradient,) in penalties(loss + (x**3).sum(), [x])]


def test_a_gradient_penalty_enters_the_collectives_of_unused_outputs(ranks: RankPool) -> None:
    xs = inputs(2)
    loss = output_loss(torch.stack([x.sin() for x in xs]).sum(0), torch.cat([x * 2 for x in xs]))
    expected = penalties(loss + torch.stack([(x**3).sum() for x in xs]).sum(), xs)
    for rank, found in enumerate(ranks.run(2, gradient_penalty)):
        for gradient, expected_gradients in zip(found, expected, strict=True):
            torch.testing.assert_close(gradient, expected_gradients[rank], rtol=1e-10, atol=1e-10)
