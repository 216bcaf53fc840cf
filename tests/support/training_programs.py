"""PROGRAMS: ways to train a small model, on whole layers or on layers cut over the ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from tried import IN, OUT, ROWS

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd.overlap.routes import MOST_SHAPES

STEPS = 28  # the trials of 20 and 24 calls, the decisions, and some after them
RATE = 0.05
BLOCKS = 2


class Block(nn.Module):
    """x + down(gelu(up(x))), of layers of ours or of torch's."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(x)))
        return y


def plain_model(dtype: torch.dtype) -> nn.Sequential:
    """Whole, on one process; equal on all ranks."""
    torch.manual_seed(11)
    return nn.Sequential(*(Block(nn.Linear(IN, OUT), nn.Linear(OUT, IN)) for _ in range(BLOCKS))).to(dtype)


def parallel_model(comm: Communicator, plain: nn.Sequential, sequence_parallel: bool, **options: Any) -> nn.Sequential:
    """The same weights, over the ranks."""
    return nn.Sequential(
        *(
            Block(
                ad.ColumnParallelLinear.from_linear(block.up, comm, sequence_parallel, **options),
                ad.RowParallelLinear.from_linear(block.down, comm, sequence_parallel, **options),
            )
            for block in plain
        )
    )


Run = Callable[[nn.Sequential, Tensor], Tensor]  # a forward pass
Step = Callable[[Run, nn.Sequential, list[Tensor]], list[Tensor]]  # forward and backward passes: losses


def leave(model: nn.Sequential) -> None:
    """As it is."""


class Program(NamedTuple):
    """A way to train.

    run     the forward pass of a microbatch
    step    of microbatches
    rows    of the whole, in a step
    before  of a model, before the first step
    around  what a step runs in
    options of the parallel layers
    evaluate  every so many steps
    tolerance relative to a reference in the same type"""

    run: Run
    step: Step
    microbatches: int = 1
    rows: Callable[[int], int] = lambda step: ROWS
    before: Callable[[nn.Sequential], None] = leave
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    options: dict[str, Any] = {}  # noqa: RUF012
    dtype: torch.dtype = torch.float64
    evaluate: int = 0
    tolerance: float = 1e-9
    steps: int = STEPS


def loss_of(y: Tensor) -> Tensor:
    return y.double().square().sum() / ROWS


def whole(model: nn.Sequential, x: Tensor) -> Tensor:
    for block in model:
        x = block(x)
    return x


def not_reentrant(model: nn.Sequential, x: Tensor) -> Tensor:
    for block in model:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def without_early_stop(model: nn.Sequential, x: Tensor) -> Tensor:
    with set_checkpoint_early_stop(False):
        return not_reentrant(model, x)


def reentrant(model: nn.Sequential, x: Tensor) -> Tensor:
    x = x.requires_grad_()  # or torch makes no gradients in it
    for block in model:
        x = checkpoint(block, x, use_reentrant=True)
    return x


def within(inner: Run, use_reentrant: bool) -> Run:
    """All that `inner` does, in one more region around it."""

    def program(model: nn.Sequential, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(lambda x: inner(model, x), x.requires_grad_(), use_reentrant=use_reentrant)
        return y

    return program


nested, nested_reentrant = within(not_reentrant, False), within(reentrant, True)
reentrant_in_another, another_in_reentrant = within(reentrant, False), within(not_reentrant, True)


def one_after_the_other(run: Run, model: nn.Sequential, batches: list[Tensor]) -> list[Tensor]:
    """Gradients of several are accumulated."""
    losses = []
    for x in batches:
        loss = loss_of(run(model, x))
        loss.backward()
        losses.append(loss.detach())
    return losses


def forwards_first(run: Run, model: nn.Sequential, batches: list[Tensor]) -> list[Tensor]:
    """As GPipe: all forward passes, then the backward passes in reverse order."""
    losses = [loss_of(run(model, x)) for x in batches]
    for loss in reversed(losses):
        loss.backward()
    return [loss.detach() for loss in losses]


def one_forward_one_backward(run: Run, model: nn.Sequential, batches: list[Tensor]) -> list[Tensor]:
    """As a pipeline's first stage of two: two are in flight, the oldest goes back first."""
    under_way: list[Tensor] = []
    losses = []
    for x in batches:
        under_way.append(loss_of(run(model, x)))
        losses.append(under_way[-1])
        if len(under_way) == 2:
            under_way.pop(0).backward()
    for loss in under_way:
        loss.backward()
    return [loss.detach() for loss in losses]


def freeze_on_rank_0(model: nn.Sequential) -> None:
    """There less is saved for the backward pass."""
    if model[0].up.comm.rank == 0:
        model[0].up.weight.requires_grad_(False)
        model[1].down.requires_grad_(False)


def freeze(model: nn.Sequential) -> None:
    """A weight, a bias, and all that lies before them."""
    model[0].up.requires_grad_(False)
    model[0].down.bias.requires_grad_(False)
    model[1].down.weight.requires_grad_(False)


def with_main_grads(model: nn.Sequential) -> None:
    """On layers that add to them; the reference leaves them alone."""
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]


def bfloat16() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def many_sizes(step: int) -> int:
    return ROWS + 12 * (step % (MOST_SHAPES + 2))


SCATTERED, WHOLE = True, False  # sequence_parallel
PROGRAMS = {
    "plain": Program(whole, one_after_the_other),
    "not reentrant": Program(not_reentrant, one_after_the_other),
    "reentrant": Program(reentrant, one_after_the_other),
    "nested": Program(nested, one_after_the_other),
    "nested reentrant": Program(nested_reentrant, one_after_the_other),
    "reentrant in not reentrant": Program(reentrant_in_another, one_after_the_other),
    "not reentrant in reentrant": Program(another_in_reentrant, one_after_the_other),
    "no early stop": Program(without_early_stop, one_after_the_other),
    "forwards first, nested": Program(nested, forwards_first, 3, steps=10),
    "forwards first, reentrant": Program(reentrant, forwards_first, 3, steps=10),
    "1F1B, not reentrant": Program(not_reentrant, one_forward_one_backward, 4, steps=8),
    "1F1B, reentrant": Program(reentrant, one_forward_one_backward, 4, steps=8),
    "evaluation": Program(not_reentrant, one_after_the_other, evaluate=3),
    "evaluation, reentrant": Program(reentrant, one_after_the_other, evaluate=3),
    "many sizes": Program(not_reentrant, one_after_the_other, rows=many_sizes, steps=2 * STEPS),
    "frozen": Program(whole, one_after_the_other, before=freeze),
    "frozen on a rank, not reentrant": Program(not_reentrant, one_after_the_other, before=freeze_on_rank_0),
    "autocast": Program(not_reentrant, one_after_the_other, around=bfloat16, dtype=torch.float32, tolerance=3e-2),
    "main_grad": Program(
        not_reentrant, one_after_the_other, before=with_main_grads, options={"grad_accumulation_fusion": True}
    ),
    "gathered anew": Program(whole, one_after_the_other, options={"save_gathered": False}),
    "reduce_dtype": Program(
        whole, one_after_the_other, options={"reduce_dtype": torch.float64}, dtype=torch.float32, tolerance=1e-4
    ),
}


def descend(model: nn.Module) -> None:
    """Gradient descent, by main_grad where that has the gradient."""
    with torch.no_grad():
        for parameter in model.parameters():
            added = getattr(parameter, "main_grad", None)
            for gradient in (parameter.grad, added):
                if gradient is not None:
                    parameter.sub_(gradient, alpha=RATE)
            parameter.grad = None
            if added is not None:
                added.zero_()


def batch(comm: Communicator | None, program: Program, step: int, number: int, sequence_parallel: bool) -> Tensor:
    """The rows of this rank, or all."""
    torch.manual_seed(1000 * step + number)
    x = torch.randn(program.rows(step), IN, dtype=program.dtype)
    return x.chunk(comm.size)[comm.rank].clone() if comm is not None and sequence_parallel else x


def trained(comm: Communicator | None, program: Program, model: nn.Sequential, sequence_parallel: bool) -> list[Tensor]:
    """The losses of all steps on this rank's rows, and of evaluations."""
    program.before(model)
    losses = []
    for step in range(program.steps):
        batches = [batch(comm, program, step, one, sequence_parallel) for one in range(program.microbatches)]
        with program.around():
            losses += program.step(program.run, model, batches)
        descend(model)
        if program.evaluate and step % program.evaluate == 1:
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    losses.append(loss_of(program.run(model, batches[0].detach())).clone())
    return losses


def parameters_of(model: nn.Sequential) -> dict[str, Tensor]:
    """Whole, on every rank."""
    return {name: one.detach() for name, one in ad.full_state_dict(model).items()}
