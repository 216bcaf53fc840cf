"""Training while overlap="auto" tries its ways, and once it has decided: the values of layers on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from ranks import RankPool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from tried import IN, OUT, ROWS, Ways, settled, tried_small

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl.comm.observers import observing
from pynccl_autograd.overlap.routes import MOST_SHAPES

STEPS = 28  # the trials of 20 and 24 calls, the decisions, and some after them
BLOCKS = 2


class Block(nn.Module):
    """x + down(gelu(up(x))), of layers of ours or of torch's."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(x)))
        return y


def not_reentrant(model: nn.Sequential, x: Tensor) -> Tensor:
    for block in model:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def reentrant(model: nn.Sequential, x: Tensor) -> Tensor:
    x = x.requires_grad_()  # or torch makes no gradients in it
    for block in model:
        x = checkpoint(block, x, use_reentrant=True)
    return x


def nested(model: nn.Sequential, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(lambda x: not_reentrant(model, x), x.requires_grad_(), use_reentrant=False)
    return y


class Program(NamedTuple):
    """A way to train.

    run       the forward pass of a microbatch
    ahead     so many forward passes are made before their backward passes, of three microbatches
    many      rows that change from step to step
    evaluate  without gradients, every third step"""

    run: Callable[[nn.Sequential, Tensor], Tensor] = lambda model, x: model(x)
    scattered: bool = True
    ahead: int = 1
    many: bool = False
    evaluate: bool = False
    options: dict[str, Any] = {}  # noqa: RUF012
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-9


PROGRAMS = {
    "plain": Program(),
    "whole": Program(scattered=False),
    "reentrant": Program(reentrant),
    "nested": Program(nested, scattered=False),
    "forwards first, nested": Program(nested, ahead=3),
    "1F1B, reentrant": Program(reentrant, ahead=2),
    "evaluation": Program(not_reentrant, evaluate=True),
    "many sizes": Program(not_reentrant, many=True),
    "reduce_dtype": Program(options={"reduce_dtype": torch.float64}, dtype=torch.float32, tolerance=1e-4),
}


def loss_of(y: Tensor) -> Tensor:
    return y.double().square().sum() / ROWS


def batch(comm: Communicator | None, program: Program, step: int, number: int) -> Tensor:
    """The rows of this rank, or all."""
    torch.manual_seed(1000 * step + number)
    x = torch.randn(ROWS + 12 * (step % (MOST_SHAPES + 2)) * program.many, IN, dtype=program.dtype)
    return x.chunk(comm.size)[comm.rank].clone() if comm is not None and program.scattered else x


def trained(comm: Communicator | None, program: Program, model: nn.Sequential) -> Tensor:
    """The losses of all steps on this rank's rows, and of evaluations."""
    losses = []
    for step in range(STEPS * (1 + program.many)):
        under_way: list[Tensor] = []
        for number in range(3 if program.ahead > 1 else 1):
            under_way.append(loss_of(program.run(model, batch(comm, program, step, number))))
            losses.append(under_way[-1].detach())
            if len(under_way) == program.ahead:
                under_way.pop(0).backward()
        for loss in under_way:
            loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.02)
                parameter.grad = None
        if program.evaluate and step % 3 == 1:
            with torch.inference_mode():
                losses.append(loss_of(program.run(model, batch(comm, program, step, 9))).clone())
    return torch.stack(losses)


def compare(comm: Communicator, name: str) -> None:
    """Losses and parameters."""
    program, ways = PROGRAMS[name], Ways()
    torch.manual_seed(11)
    plain = nn.Sequential(*(Block(nn.Linear(IN, OUT), nn.Linear(OUT, IN)) for _ in range(BLOCKS))).to(program.dtype)
    auto: Any = nn.Sequential(
        *(
            Block(
                ad.ColumnParallelLinear.from_linear(block.up, comm, program.scattered, **program.options),
                ad.RowParallelLinear.from_linear(block.down, comm, program.scattered, **program.options),
            )
            for block in plain
        )
    )
    with tried_small(100 + comm.rank), observing(ways):
        found, wanted = trained(comm, program, auto), trained(None, program, plain)
    if program.scattered:
        comm.all_reduce(found, found)
    close = {"rtol": program.tolerance, "atol": program.tolerance}
    torch.testing.assert_close(found, wanted, **close)
    for key, one in ad.full_state_dict(auto).items():
        torch.testing.assert_close(one, plain.state_dict()[key], **close)
    if program.many:
        reasons = [decision.reason for layer in (auto[0].up, auto[0].down) for decision in ad.overlap.decisions(layer)]
        assert any("16 shapes of this pass were tried before" in reason for reason in reasons)
    else:
        assert sum(len(settled(layer)) for block in auto for layer in (block.up, block.down)) >= 2 * BLOCKS
        assert {"off", "slices 2", "slices 4", "slices 8", "ring"} <= {one.way for one in ways.took}


@pytest.mark.parametrize("name", PROGRAMS)
def test_training_with_auto_is_training_without_overlap(ranks: RankPool, name: str) -> None:
    ranks.run(3 if name == "plain" else 2, compare, name, timeout=200)
