"""The backward pass is entered on every rank, and PYNCCL_CHECK=1 says where ranks disagree in it."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
from ranks import RankPool, each_size
from semantics import OPERATIONS, Case, tensors

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


@each_size
def test_a_rank_whose_input_needs_no_gradient_serves_those_whose_does(ranks: RankPool, n: int) -> None:
    assert ranks.run(n, only_one_rank_needs_a_gradient) == [list(OPERATIONS)] * n


class NoGradient(torch.autograd.Function):
    """The identity, whose backward gives nothing, as a user's Function may."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> None:
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


def nothing_where_no_derivatives_are_recorded(comm: Communicator) -> None:
    x = torch.ones(comm.size, 2)
    with torch.no_grad():
        assert not ad.all_reduce(x, comm, grad="sum").requires_grad
        assert not ad.reduce_scatter(x.requires_grad_(), comm).requires_grad
    assert not ad.all_reduce(torch.arange(3), comm, grad="sum").requires_grad
    assert not ad.all_gather(torch.tensor([True, comm.rank == 0]), comm, grad="sum").requires_grad


def test_no_node_under_no_grad_and_for_integers(ranks: RankPool) -> None:
    ranks.run(2, nothing_where_no_derivatives_are_recorded)


def anchored_inputs(comm: Communicator) -> list[float]:
    """The anchor is on the output itself, so its cotangent is 0 and the gradient is rank 0's alone."""
    x = torch.full((3,), comm.rank + 1.0, requires_grad=True)
    y = ad.all_gather(x, comm, grad="sum")
    loss = (y * torch.arange(1.0, 3 * comm.size + 1)).sum() if comm.rank == 0 else ad.anchor(torch.zeros(()), y)
    loss.backward()
    return x.grad.tolist()


@each_size
def test_anchor_enters_the_backward_of_an_unused_output_with_zeros(ranks: RankPool, n: int) -> None:
    assert ranks.run(n, anchored_inputs) == [[3 * r + 1.0, 3 * r + 2.0, 3 * r + 3.0] for r in range(n)]


def anchor_by_itself() -> None:
    loss, y = torch.tensor(2.0, requires_grad=True), torch.full((2,), float("inf"), requires_grad=True)
    anchored = ad.anchor(loss * 3, y)
    assert float(anchored.detach()) == 6.0
    anchored.backward()
    assert float(loss.grad) == 3.0 and y.grad.tolist() == [0.0, 0.0]


def test_anchor_leaves_the_loss_and_adds_zero_also_to_infinite_outputs() -> None:
    anchor_by_itself()
    loss = torch.tensor(1.0)
    assert ad.anchor(loss) is loss and ad.anchor(loss, torch.arange(2)) is loss
    assert float(ad.anchor(loss, torch.ones(2))) == 1.0
    g = torch.func.grad(lambda x: ad.anchor((x**2).sum(), x * 5))(torch.tensor([1.0, 2.0]))
    assert g.tolist() == [2.0, 4.0]
    t = torch.func.jvp(lambda x: ad.anchor((x**2).sum(), x * 5), (torch.ones(2),), (torch.ones(2),))[1]
    assert float(t) == 4.0


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


def unequal_cotangents(comm: Communicator, name: str) -> str:
    own = checked(comm)
    x = torch.ones(2, 2, requires_grad=True)
    if name == "started":
        y = ad.start(ad.all_gather, x, own, 0, grad="replicated").wait()
    elif name == "max":
        y = ad.all_reduce(x, own, "max", grad="replicated")
    else:
        y = ad.all_gather(x, own, 0, grad="replicated")
    g = torch.ones_like(y)
    g[1, 0] += own.rank
    with own, pytest.raises(pynccl.NcclInvalidUsage) as caught:
        y.backward(g)
    return str(caught.value)


@pytest.mark.parametrize("name", ["all_gather", "max", "started"])
def test_replicated_cotangents_that_differ_are_an_error_with_rank_and_values(ranks: RankPool, name: str) -> None:
    for message in ranks.run(3, unequal_cotangents, name):
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
