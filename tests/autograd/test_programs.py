"""Whole programs on several ranks beside the same program in one process, forwards and backwards.

Experts that rows are sent to, a pipeline of stages: what is left to a user is only the model.
"""

from __future__ import annotations

import torch
from ranks import RankPool
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# Experts: each rank holds one; rows go where the gate says, and come back


def gate(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """(expert of each row, its weight)."""
    scores = (x @ w).softmax(1)
    chosen = scores.argmax(1)
    return chosen, scores.gather(1, chosen[:, None])


def experts_here(x: Tensor, gate_w: Tensor, expert: Tensor, comm: Communicator) -> Tensor:
    chosen, weight = gate(x, ad.copy(gate_w, comm))
    order = chosen.argsort(stable=True)
    sends = chosen.bincount(minlength=comm.size)
    given = ad.all_to_all(x[order], comm, send_splits=sends)  # the others tell how much they send
    recvs = ad.all_to_all(sends, comm)
    made = torch.tanh(given @ expert)
    back = ad.all_to_all(made, comm, send_splits=recvs, recv_splits=sends)
    return torch.zeros_like(x).index_copy(0, order, back) * weight


def check_experts(comm: Communicator) -> int:
    n, r = comm.size, comm.rank
    rows = [4 + 3 * q for q in range(n)]
    x_all, gate_w = random(sum(rows), 6, seed=1), random(6, n, seed=2)
    gate_w[:, 0] += 1.0  # so that some experts get more than others
    experts = [random(6, 6, seed=10 + q).requires_grad_() for q in range(n)]
    x_ref, gate_ref = x_all.clone().requires_grad_(), gate_w.clone().requires_grad_()
    chosen, weight = gate(x_ref, gate_ref)
    y_ref = torch.stack([torch.tanh(row @ experts[int(e)]) for row, e in zip(x_ref, chosen, strict=True)]) * weight
    y_ref.square().sum().backward()

    x = x_all.split(rows)[r].clone().requires_grad_()
    own_gate, expert = gate_w.clone().requires_grad_(), experts[r].detach().clone().requires_grad_()
    y = experts_here(x, own_gate, expert, comm)
    torch.testing.assert_close(y, y_ref.detach().split(rows)[r], **CLOSE)
    y.square().sum().backward()
    torch.testing.assert_close(x.grad, x_ref.grad.split(rows)[r], **CLOSE)
    torch.testing.assert_close(own_gate.grad, gate_ref.grad, **CLOSE)
    wanted = experts[r].grad if experts[r].grad is not None else torch.zeros(6, 6, dtype=torch.float64)
    torch.testing.assert_close(expert.grad, wanted, **CLOSE)
    return int((chosen == r).sum())


def test_experts_that_rows_are_sent_to_train_as_in_one_process(ranks: RankPool) -> None:
    assert len(set(ranks.run(3, check_experts))) > 1  # uneven


# A pipeline: rank r is stage r; activations go on, gradients come back


def pipeline(x: Tensor, stage: torch.nn.Module, comm: Communicator) -> Tensor:
    """The last stage's output on the last rank, zeros elsewhere; the first step by another function than the rest."""
    last, outputs = comm.size - 1, list[Tensor]()
    for step in range(last):
        at = comm.rank == step
        made = stage(x) if at else torch.zeros_like(x)
        if step:
            moved = ad.permute(made, comm, [(step, step + 1)])
        elif comm.rank in (step, step + 1):
            moved = ad.send_recv(made, comm, target=step + 1 if at else None, source=None if at else step)
        else:
            continue
        outputs.append(moved)
        x = moved if comm.rank == step + 1 else x
    return ad.anchor(stage(x) if comm.rank == last else torch.zeros_like(x), *outputs)


def check_pipeline(comm: Communicator) -> None:
    n, r = comm.size, comm.rank
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Tanh()) for _ in range(n)))
    model.double()
    own = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Tanh()).double()
    own.load_state_dict(model[r].state_dict())
    for batch in (random(3, 5, seed=1), random(3, 5, seed=2)):  # gradients of both add up
        leaf = batch.clone().requires_grad_()
        expected = model(leaf)
        expected.square().sum().backward()
        x = (batch if r == 0 else torch.zeros_like(batch)).clone().requires_grad_()
        y = pipeline(x, own, comm)
        if r == n - 1:
            torch.testing.assert_close(y, expected.detach(), **CLOSE)
        y.square().sum().backward()
        if r == 0:
            torch.testing.assert_close(x.grad, leaf.grad, **CLOSE)
    for parameter, wanted in zip(own.parameters(), model[r].parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted.grad, **CLOSE)


def test_a_pipeline_of_stages_trains_as_in_one_process(ranks: RankPool) -> None:
    ranks.run(3, check_pipeline)
