"""The backward pass is entered on every rank, and PYNCCL_CHECK=1 says where ranks disagree in it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import RankPool
from semantics import OPERATIONS, Case, tensors
from torch import Tensor

import pynccl
import pynccl_autograd as ad
from pynccl import Communicator


def only_one_rank_needs_a_gradient(comm: Communicator) -> list[str]:
    """For every operation: the gradient on the last rank equals that which it has where all ranks need one."""
    for name, operation in OPERATIONS.items():
        case = Case(comm.size)
        x = tensors(operation, case, 1)[comm.rank]
        found = []
        for needed in (True, comm.rank == comm.size - 1):
            leaf = x.clone().requires_grad_(needed)
            y = operation.call(leaf, comm, case)
            assert y.requires_grad
            (y**2).sum().backward()
            found.append(leaf.grad)
        if comm.rank == comm.size - 1:
            assert torch.equal(*found), name
        else:
            assert found[1] is None, name
    return list(OPERATIONS)


@pytest.mark.parametrize("n", [2, 3])
def test_a_rank_whose_input_needs_no_gradient_serves_those_whose_does(ranks: RankPool, n: int) -> None:
    assert ranks.run(n, only_one_rank_needs_a_gradient) == [list(OPERATIONS)] * n


class NoGradient(torch.autograd.Function):
    """The identity, whose backward gives nothing, as a user's Function may."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> None:
        return None


def a_cotangent_that_is_missing(comm: Communicator) -> list[list[float]]:
    """Rank 1's output meets a Function without a gradient: its part is zero, and the others do not wait for ever."""
    found = []
    for op in ("sum", "max"):
        x = torch.ones(2, requires_grad=True)
        y = ad.all_reduce(x, comm, op, grad="sum")
        (NoGradient.apply(y) if comm.rank == 1 else y).sum().backward()
        found.append(x.grad.tolist())
    return found


def test_a_missing_cotangent_counts_as_zero(ranks: RankPool) -> None:
    for found in ranks.run(3, a_cotangent_that_is_missing):
        assert found == [[2.0] * 2, pytest.approx([2 / 3] * 2)]


def test_anchor_leaves_the_loss_and_adds_zero_also_to_infinite_outputs() -> None:
    loss, y = torch.tensor(2.0, requires_grad=True), torch.full((2,), float("inf"), requires_grad=True)
    anchored = ad.anchor(loss * 3, y)
    assert float(anchored.detach()) == 6.0
    anchored.backward()
    assert float(loss.grad) == 3.0 and y.grad.tolist() == [0.0, 0.0]
    loss = torch.tensor(1.0)
    assert ad.anchor(loss) is loss and ad.anchor(loss, torch.arange(2)) is loss
    assert float(ad.anchor(loss, torch.ones(2))) == 1.0


def checked(comm: Communicator) -> Communicator:
    os.environ["PYNCCL_CHECK"] = "1"
    own = comm.split(0)
    assert own is not None and own.checking
    return own


def another_branch(comm: Communicator) -> str:
    """Rank 1 leaves the first output unused, and so enters the second adjoint where the others enter the first."""
    own = checked(comm)
    x = torch.ones(2, requires_grad=True)
    first = ad.all_reduce(x, own, grad="sum")
    second = ad.all_reduce(x, own, grad="sum")
    loss = second.sum() if own.rank == 1 else first.sum()
    with own, pytest.raises(pynccl.NcclInvalidUsage) as caught:
        loss.backward()
    return str(caught.value)


def test_ranks_in_different_backwards_are_named_with_their_forward_lines(ranks: RankPool) -> None:
    messages = ranks.run(3, another_branch)
    for rank, message in enumerate(messages):
        assert "disagree in the backward pass" in message and "ad.anchor" in message
        assert f"rank {rank}: backward of all_reduce, forward call no. {2 if rank == 1 else 1}" in message
        lines = {int(line) for line in re.findall(r"test_anchor\.py:(\d+)", message)}
        assert len(lines) == 2 and max(lines) - min(lines) == 1


def unequal_cotangents(comm: Communicator) -> list[str]:
    messages = []
    calls: list[Callable[[Tensor, Communicator], Tensor]] = [
        lambda x, own: ad.all_gather(x, own, 0, grad="replicated"),
        lambda x, own: ad.all_reduce(x, own, "max", grad="replicated"),
        lambda x, own: ad.start(ad.all_gather, x, own, 0, grad="replicated").wait(),
    ]
    for call in calls:
        own = checked(comm)
        y = call(torch.ones(2, 2, requires_grad=True), own)
        g = torch.ones_like(y)
        g[1, 0] += own.rank
        with own, pytest.raises(pynccl.NcclInvalidUsage) as caught:
            y.backward(g)
        messages.append(str(caught.value))
    return messages


def test_replicated_cotangents_that_differ_are_an_error_with_rank_and_values(ranks: RankPool) -> None:
    for messages in ranks.run(3, unequal_cotangents):
        for message in messages:
            assert 'grad="replicated", but the cotangents differ' in message
            assert "index (1, 0)" in message and "rank 0 has 1, rank 1 has 2" in message
            assert re.search(r"test_anchor\.py:\d+", message)


def agreeing_backward(comm: Communicator) -> list[list[float]]:
    """With the check on, what is right stays right: all operations, rounding, infinities, second order."""
    results: list[list[float]] = []
    with checked(comm) as own:
        for operation in OPERATIONS.values():
            for convention in ("sum", "replicated"):
                case = Case(own.size, grad=convention)
                x = tensors(operation, case, 1)[own.rank].requires_grad_()
                y = operation.call(x, own, case)
                (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
                if dx.requires_grad:
                    torch.autograd.grad(dx.sum(), x, allow_unused=True)
                results.append(dx.detach().flatten().tolist())
        x = torch.ones(3, requires_grad=True)
        g = torch.tensor([float("nan"), float("inf"), 1.0 + 1e-7 * own.rank])
        ad.all_reduce(x, own, grad="replicated").backward(g)
        assert x.grad.tolist()[1:] == g.tolist()[1:]
    return results


def test_the_check_lets_pass_what_is_right(ranks: RankPool) -> None:
    for results in ranks.run(2, agreeing_backward):
        assert len(results) == 2 * len(OPERATIONS) and all(results)


def backward_calls(comm: Communicator) -> Any:
    """Permutes may be made by some ranks only: send_recv between ranks 0 and 1 of 3, with the check on."""
    with checked(comm) as own:
        if own.rank == 2:
            return None
        x = torch.full((2,), own.rank + 1.0, requires_grad=True)
        y = ad.send_recv(x, own, target=1) if own.rank == 0 else ad.send_recv(x, own, source=0)
        (y * 3).sum().backward()
        return y.tolist(), x.grad.tolist()


def test_send_recv_concerns_its_two_ranks_only(ranks: RankPool) -> None:
    assert ranks.run(3, backward_calls) == [([0.0, 0.0], [3.0, 3.0]), ([1.0, 1.0], [0.0, 0.0]), None]


# Derivatives of any order: a gradient penalty where one rank leaves an output unused


def inputs(n: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(4, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(n)]


def penalties(loss: Tensor, xs: list[Tensor], order: int) -> list[list[Tensor]]:
    """The gradient of the loss, of the loss with a penalty on that gradient, of that with a penalty on its own, ..."""
    found = []
    for _ in range(order):
        gradient = torch.autograd.grad(loss, xs, create_graph=True)
        found.append([g.detach() for g in gradient])
        loss = loss + torch.stack([(g**2).sum() for g in gradient]).sum()
    return found


def used(y: Tensor, z: Tensor) -> Tensor:
    return (y**4).sum() + (y[0] * z).sum() + (z**3).sum()


def own(x: Tensor) -> Tensor:
    return (x**3).sum()


def reference(n: int, order: int) -> list[list[Tensor]]:
    """In one process: rank 0 alone uses the outputs."""
    xs = inputs(n)
    loss = used(torch.stack([x.sin() for x in xs]).sum(0), torch.cat([x * 2 for x in xs]))
    return penalties(loss + torch.stack([own(x) for x in xs]).sum(), xs, order)


def gradient_penalty(comm: Communicator, order: int) -> list[Tensor]:
    x = inputs(comm.size)[comm.rank]
    y = ad.all_reduce(x.sin(), comm, grad="sum")
    z = ad.all_gather(x * 2, comm, grad="sum")
    y, z = (y, z) if comm.rank == 0 else (y + float("nan"), z + float("inf"))  # what is not used does not matter
    loss = used(y, z) if comm.rank == 0 else ad.anchor(torch.zeros(()).double(), y, z, torch.arange(3), x[:0])
    return [gradient for (gradient,) in penalties(loss + own(x), [x], order)]


def test_a_gradient_penalty_enters_the_collectives_of_unused_outputs(ranks: RankPool) -> None:
    expected = reference(2, 3)
    for rank, found in enumerate(ranks.run(2, gradient_penalty, 3)):
        assert len(found) == 3
        for order, gradient in enumerate(found):
            torch.testing.assert_close(gradient, expected[order][rank], rtol=1e-10, atol=1e-10)


def by_torch_func(comm: Communicator) -> list[Tensor]:
    """Gradient of a gradient, its tangent, per sample, and forward over forward."""
    x = inputs(comm.size)[comm.rank].detach()

    def loss(t: Tensor) -> Tensor:
        y = ad.all_reduce(t.sin(), comm, grad="sum")
        return (y**4).sum() if comm.rank == 0 else ad.anchor((t**2).sum(), y)

    def penalty(t: Tensor) -> Tensor:
        return (torch.func.grad(loss)(t) ** 2).sum()

    return [
        torch.func.grad(penalty)(x),
        torch.func.jvp(torch.func.grad(loss), (x,), (x,))[1],
        torch.func.vmap(torch.func.grad(loss))(torch.stack([x, 2 * x])),
        torch.func.jvp(lambda t: torch.func.jvp(loss, (t,), (x,))[1], (x,), (x,))[1],
    ]


def test_anchor_under_torch_func(ranks: RankPool) -> None:
    xs = torch.stack([x.detach() for x in inputs(2)])

    def losses(ts: Tensor) -> tuple[Tensor, Tensor]:
        return (ts.sin().sum(0) ** 4).sum(), (ts[1] ** 2).sum()

    def total(ts: Tensor) -> Tensor:
        return torch.stack(losses(ts)).sum()

    gradient = torch.func.grad(total)
    twice = torch.func.jvp(lambda t: torch.stack(torch.func.jvp(losses, (t,), (xs,))[1]), (xs,), (xs,))[1]
    for rank, (second, tangent, samples, forward) in enumerate(ranks.run(2, by_torch_func)):
        torch.testing.assert_close(second, torch.func.grad(lambda t: (gradient(t) ** 2).sum())(xs)[rank])
        torch.testing.assert_close(tangent, torch.func.jvp(gradient, (xs,), (xs,))[1][rank])
        torch.testing.assert_close(samples, torch.stack([gradient(xs)[rank], gradient(2 * xs)[rank]]))
        torch.testing.assert_close(forward, twice[rank])
