"""Gradients that sequence parallelism leaves partial, finished while the backward pass goes on."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pynccl_autograd as ad
from pynccl import Communicator

LAYERS, SEQUENCE, BATCH, WIDTH = 2, 8, 2, 6


class Model(nn.Module):
    """Blocks on a part of the sequence, which comes first. The norm of all of them is used by each, too."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.ups = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(LAYERS))
        self.downs = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(LAYERS))
        self.of_all = nn.LayerNorm(WIDTH)
        self.reentrant: bool | None = None  # of checkpoints; None: there are none

    def block(self, index: int, x: Tensor) -> Tensor:
        y: Tensor = self.downs[index](self.ups[index](self.norms[index](self.of_all(x))).tanh())
        return x + y

    def forward(self, x: Tensor) -> Tensor:
        for index in range(LAYERS):
            if self.reentrant is None:
                x = self.block(index, x)
            else:
                x = checkpoint(self.block, index, x, use_reentrant=self.reentrant)
        y: Tensor = self.of_all(x)
        return y


def models(comm: Communicator) -> tuple[Model, Model]:
    """The unsharded one, and its parts."""
    torch.manual_seed(5)
    whole = Model().double()
    for parameter in whole.parameters():
        nn.init.normal_(parameter)
    plan = {"norms.*": "sequence", "of_all": "sequence", "ups.*": "column", "downs.*": "row"}
    return whole, ad.parallelize(copy.deepcopy(whole), comm, plan, seq_dim=0)  # type: ignore[return-value]


def passes(comm: Communicator, whole: Model, model: Model, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(SEQUENCE, BATCH, WIDTH, dtype=torch.float64, requires_grad=True)
    whole(x).square().sum().backward()
    own = x.detach().chunk(comm.size)[comm.rank].requires_grad_()
    model(own).square().sum().backward()


def agree(whole: Model, model: Model) -> None:
    for (name, parameter), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert parameter.grad is not None and expected.grad is not None
        found = parameter.shard.gather(parameter.grad)  # type: ignore[attr-defined]
        torch.testing.assert_close(found, expected.grad, rtol=1e-10, atol=1e-10, msg=partial("{}: {}".format, name))


def counted(comm: Communicator) -> list[int]:
    """Of each all_reduce from now on the number of elements."""
    sizes: list[int] = []
    real = comm.all_reduce

    def all_reduce(x: Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(x.numel())
        return real(x, *args, **options)

    comm.all_reduce = all_reduce  # type: ignore[method-assign, assignment]
    return sizes


def finishes(comm: Communicator, reentrant: bool | None) -> None:
    whole, model = models(comm)
    model.reentrant = reentrant
    handle = ad.finish_gradients_in_backward(model)
    sizes = counted(comm)
    passes(comm, whole, model, 0)
    agree(whole, model)
    if reentrant is None:  # biases of the row-parallel layers, which sum them themselves, and norms
        assert sizes == [WIDTH] * (LAYERS + 2 * (LAYERS + 1))
    before = sizes[:]
    ad.finish_gradients(model)
    assert sizes == before
    agree(whole, model)
    for to_none in (True, False):  # several passes add up, whatever was there before
        model.zero_grad(to_none)
        whole.zero_grad(to_none)
        for seed in range(2):
            passes(comm, whole, model, seed)
            agree(whole, model)
            for one in (*model.parameters(), *whole.parameters()):
                assert one.grad is not None
                one.grad.mul_(0.5)
    handle.remove()
    handle.remove()
    model.zero_grad()
    whole.zero_grad()
    passes(comm, whole, model, 0)
    ad.finish_gradients(model)
    agree(whole, model)
    ad.finish_gradients_in_backward(model).remove()
    del comm.all_reduce


@pytest.mark.parametrize(("n", "reentrant"), [(4, None), (2, True), (2, False)])
def test_gradients_are_whole_when_backward_returns(ranks: RankPool, n: int, reentrant: bool | None) -> None:
    """Within checkpoints of both kinds, too."""
    ranks.run(n, finishes, reentrant)


class Fails(torch.autograd.Function):
    """Whose backward raises, where told."""

    wanted = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        if Fails.wanted:
            raise RuntimeError("as was wanted")
        return dy


def goes_on(comm: Communicator) -> None:
    whole, model = models(comm)
    ad.finish_gradients_in_backward(model)
    before, model.ups[0].forward = model.ups[0].forward, lambda x: before(Fails.apply(x))  # type: ignore[method-assign]
    for _ in range(2):
        Fails.wanted = True
        with pytest.raises(RuntimeError, match="as was wanted"):
            passes(comm, whole, model, 1)
        Fails.wanted = False
        model.zero_grad()
        whole.zero_grad()
        passes(comm, whole, model, 2)
        agree(whole, model)
    before_grads = [one.grad.clone() for one in model.parameters()]  # type: ignore[union-attr]
    x = torch.ones(SEQUENCE // comm.size, BATCH, WIDTH, dtype=torch.float64)
    torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    for one, grad in zip(model.parameters(), before_grads, strict=True):
        assert one.grad is not None and torch.equal(one.grad, grad)  # which leaves .grad alone
    passes(comm, whole, model, 3)
    agree(whole, model)


def test_after_a_pass_that_raised_and_one_that_leaves_grad_alone(ranks: RankPool) -> None:
    ranks.run(2, goes_on)


def refuses(comm: Communicator) -> None:
    whole, model = models(comm)
    handle = ad.finish_gradients_in_backward(model)
    with pytest.raises(RuntimeError, match="has it already; call it once for a model"):
        ad.finish_gradients_in_backward(model.norms)
    with pytest.raises(TypeError, match="expected a module or its parameters"):
        ad.finish_gradients_in_backward([3])  # type: ignore[list-item]
    twin = copy.deepcopy(model)  # has parameters of its own
    model.zero_grad()
    passes(comm, whole, twin, 0)
    ad.finish_gradients(twin)
    agree(whole, twin)
    handle.remove()


def test_what_is_refused(ranks: RankPool) -> None:
    ranks.run(2, refuses)
