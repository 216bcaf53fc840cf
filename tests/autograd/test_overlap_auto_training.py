"""Training with overlap="auto", during its races and after the decisions, gives the values of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from overlap_auto import IN, OUT, ROWS, RandomClock, Schedules, chosen_by_races, tune_small_layers
from ranks import RankPool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd.overlap.choose import MAX_SHAPES
from pynccl_autograd.overlap.lanes import observing

STEPS = 28  # short races of 22 and 24 calls, the decisions, and some after them
BLOCKS = 2


class Block(nn.Module):
    """x + down(gelu(up(x))), with parallel or plain torch layers."""

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
    x = x.requires_grad_()  # otherwise torch computes no gradients within it
    for block in model:
        x = checkpoint(block, x, use_reentrant=True)
    return x


def nested(model: nn.Sequential, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(lambda x: not_reentrant(model, x), x.requires_grad_(), use_reentrant=False)
    return y


class Program(NamedTuple):
    """A training procedure.

    run       forward pass of a microbatch
    ahead     number of forward passes before the first backward pass, of three microbatches
    many      whether the number of rows changes from step to step
    evaluate  whether every third step also runs without gradients"""

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
    """Return this rank's rows, or all rows."""
    torch.manual_seed(1000 * step + number)
    x = torch.randn(ROWS + 12 * (step % (MAX_SHAPES + 2)) * program.many, IN, dtype=program.dtype)
    own = x.chunk(comm.size)[comm.rank].clone() if comm is not None and program.scattered else x
    return own.requires_grad_()  # so that the first layer has a backward pass to choose for


def losses_of(comm: Communicator | None, program: Program, model: nn.Sequential) -> Tensor:
    """Return the losses of all steps and evaluations on this rank's rows."""
    losses = []
    for step in range(STEPS * (1 + program.many)):
        in_flight: list[Tensor] = []
        for number in range(3 if program.ahead > 1 else 1):
            in_flight.append(loss_of(program.run(model, batch(comm, program, step, number))))
            losses.append(in_flight[-1].detach())
            if len(in_flight) == program.ahead:
                in_flight.pop(0).backward()
        for loss in in_flight:
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
    """Compare losses and parameters with one process."""
    program, schedules = PROGRAMS[name], Schedules()
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
    layers = [layer for block in auto for layer in (block.up, block.down)]
    with tune_small_layers(RandomClock(100 + comm.rank)), observing(schedules):
        found, expected = losses_of(comm, program, auto), losses_of(None, program, plain)
        chosen = sum(len(chosen_by_races(layer)) for layer in layers)
        reasons = [decision.reason for layer in layers for decision in ad.overlap.decisions(layer)]
    if program.scattered:
        comm.all_reduce(found, found)
    close = {"rtol": program.tolerance, "atol": program.tolerance}
    torch.testing.assert_close(found, expected, **close)
    for key, value in ad.full_state_dict(auto).items():
        torch.testing.assert_close(value, plain.state_dict()[key], **close)
    if program.many:
        assert any("16 numbers of rows were tried before" in reason for reason in reasons)
    else:
        assert chosen >= 2 * BLOCKS
        assert {"off", "slices 2", "slices 4", "slices 8", "ring"} <= {value.schedule for value in schedules.chosen}


@pytest.mark.parametrize("name", PROGRAMS)
def test_training_with_auto_equals_training_without_overlap(ranks: RankPool, name: str) -> None:
    ranks.run(3 if name == "plain" else 2, compare, name, timeout=200)
