"""Training while overlap="auto" tries its ways, and once it has decided: the values of training without overlap; what a
checkpoint computes anew goes as it went at first."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from ranks import RankPool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from tried import IN, OUT, ROWS, Ways, routes, settled, tried_small

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl.comm.call import call_text
from pynccl.comm.observing import Observer, observing
from pynccl_autograd import OverlapConfig
from pynccl_autograd.overlap.routes import MOST_SHAPES
from pynccl_autograd.torch_internals import backward_pass

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
    y: Tensor = model(x)
    return y


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


PROGRAMS = {
    "plain": Program(whole, one_after_the_other),
    "not reentrant": Program(not_reentrant, one_after_the_other),
    "reentrant": Program(reentrant, one_after_the_other),
    "nested": Program(nested, one_after_the_other),
    "nested reentrant": Program(nested_reentrant, one_after_the_other),
    "reentrant in not reentrant": Program(reentrant_in_another, one_after_the_other),
    "not reentrant in reentrant": Program(another_in_reentrant, one_after_the_other),
    "no early stop": Program(without_early_stop, one_after_the_other),
    "accumulation": Program(whole, one_after_the_other, 3, steps=10),
    "forwards first, not reentrant": Program(not_reentrant, forwards_first, 3, steps=10),
    "forwards first, nested": Program(nested, forwards_first, 3, steps=10),
    "forwards first, reentrant": Program(reentrant, forwards_first, 3, steps=10),
    "1F1B, not reentrant": Program(not_reentrant, one_forward_one_backward, 4, steps=8),
    "1F1B, reentrant": Program(reentrant, one_forward_one_backward, 4, steps=8),
    "evaluation": Program(not_reentrant, one_after_the_other, evaluate=3),
    "evaluation, reentrant": Program(reentrant, one_after_the_other, evaluate=3),
    "two sizes": Program(whole, one_after_the_other, rows=lambda step: ROWS + 24 * (step % 2), steps=2 * STEPS),
    "many sizes": Program(not_reentrant, one_after_the_other, rows=many_sizes, steps=2 * STEPS),
    "frozen": Program(whole, one_after_the_other, before=freeze),
    "frozen, not reentrant": Program(not_reentrant, one_after_the_other, before=freeze),
    "frozen on a rank, not reentrant": Program(not_reentrant, one_after_the_other, before=freeze_on_rank_0),
    "autocast": Program(not_reentrant, one_after_the_other, around=bfloat16, dtype=torch.float32, tolerance=3e-2),
    "main_grad": Program(
        not_reentrant, one_after_the_other, before=with_main_grads, options={"grad_accumulation_fusion": True}
    ),
    "gathered anew": Program(whole, one_after_the_other, options={"save_gathered": False}),
    "gathered anew, not reentrant": Program(not_reentrant, one_after_the_other, options={"save_gathered": False}),
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


def compare_with_whole(
    comm: Communicator, program: Program, plain: nn.Sequential, found: list[Tensor], sequence_parallel: bool
) -> None:
    """Train torch's layers alone; their losses are those of all ranks."""
    if program.before is with_main_grads:
        program = program._replace(before=leave)
    expected = trained(None, program, plain, False)
    losses = torch.stack(found)
    if sequence_parallel:
        comm.all_reduce(losses, losses)
    torch.testing.assert_close(losses, torch.stack(expected), rtol=program.tolerance, atol=program.tolerance)


def compare(comm: Communicator, name: str, sequence_parallel: bool, seed: int) -> set[str]:
    """Train with "auto", with "off", and torch's layers alone; the ways that were kept."""
    program = PROGRAMS[name]
    plain = plain_model(program.dtype)
    options = dict(program.options)
    keeps = options.pop("save_gathered", True)
    off, auto = (
        parallel_model(comm, plain, sequence_parallel, overlap=OverlapConfig(method, save_gathered=keeps), **options)
        for method in ("off", "auto")
    )
    ways = Ways()
    with tried_small(100 * seed + comm.rank), observing(ways):
        found = trained(comm, program, auto, sequence_parallel)
    without = trained(comm, program, off, sequence_parallel)
    close = {"rtol": program.tolerance, "atol": program.tolerance}
    for mine, its in zip(found, without, strict=True):
        torch.testing.assert_close(mine, its, **close)
    if program.before is not freeze_on_rank_0:  # which no whole model can
        compare_with_whole(comm, program, plain, found, sequence_parallel)
        wanted = plain.state_dict()
    else:
        wanted = parameters_of(off)
    for of in (auto, off):
        for key, one in parameters_of(of).items():
            torch.testing.assert_close(one, wanted[key], **close)
    tried = {one.pattern for one in ways.took if not one.settled}
    patterns = {"all_gather_matmul", "matmul_reduce_scatter", "column_backward", "row_backward"}
    assert tried == (patterns if sequence_parallel else {"matmul_all_reduce", "copy_backward"})
    kept = [way for block in auto for layer in (block.up, block.down) for way in settled(layer).values()]
    if program.rows is many_sizes:
        reasons = [decision.reason for layer in (auto[0].up, auto[0].down) for decision in ad.overlap.decisions(layer)]
        assert any("16 shapes of this pass were tried before" in reason for reason in reasons)
    else:
        assert len(kept) >= (8 if sequence_parallel else 4)
    return {one.way for one in ways.took}


EVERY_SIZE = ("plain", "not reentrant")
CASES = [(name, n) for name in PROGRAMS for n in ((2, 3, 4) if name in EVERY_SIZE else (2,))]


@pytest.mark.parametrize(("name", "n"), CASES)
def test_training_with_auto_is_training_without_overlap(ranks: RankPool, name: str, n: int) -> None:
    """With sequence_parallel, and without."""
    for sequence_parallel in (True, False):
        for seen in ranks.run(n, compare, name, sequence_parallel, 1):
            assert {"off", "slices 2"} <= seen
            assert "ring" in seen or name == "many sizes"


def checked(comm: Communicator, name: str) -> None:
    os.environ["PYNCCL_CHECK"] = "1"  # which the pool takes back
    own = comm.split(0)
    assert own is not None
    with own:
        for sequence_parallel in (True, False):
            compare(own, name, sequence_parallel, 3)


@pytest.mark.parametrize("name", ["not reentrant", "reentrant"])
def test_training_where_calls_are_compared(ranks: RankPool, name: str) -> None:
    ranks.run(2, checked, name)


def retried_midway(comm: Communicator, name: str) -> None:
    """Between forward and backward passes: what is computed anew goes as it went, and the backward pass as in a new
    trial."""
    model = parallel_model(comm, plain_model(torch.float64), True)
    x = batch(comm, PROGRAMS[name], 0, 0, True)
    expected: list[Tensor] = []
    with tried_small(comm.rank):
        for step in range(40):
            y = PROGRAMS[name].run(model, x)
            if step % 11 == 3:
                ad.overlap.retry(model)
            loss_of(y).backward()
            found = [one.grad for one in model.parameters() if one.grad is not None]
            assert len(found) == 8
            expected = expected or found
            for mine, its in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, its, rtol=1e-10, atol=1e-12)
            model.zero_grad()
    for layer in (model[0].up, model[1].down):
        assert not any(one.settled for one in ad.overlap.decisions(layer))  # 3 steps since the last time


@pytest.mark.parametrize("name", ["plain", "not reentrant", "nested", "reentrant"])
def test_retry_between_a_forward_and_a_backward_pass(ranks: RankPool, name: str) -> None:
    ranks.run(2, retried_midway, name)


# ---------------------------------------------------------------------------------------------- computed anew


class Sent(Observer):
    """What was communicated, by what `at` says meanwhile; without what ranks tell each other for a decision."""

    def __init__(self) -> None:
        self.at: Any = None
        self.calls: dict[Any, list[str]] = {}

    def launching(self, calls: Any) -> None:
        """See Observer."""
        for call in calls:
            text = call.compared or call_text(call.operation, call.inputs)
            if "INT64" not in text:
                self.calls.setdefault(self.at, []).append(text)


def as_at_first(comm: Communicator, name: str, sequence_parallel: bool, seed: int) -> tuple[int, set[str | None]]:
    """Whether the regions of every microbatch went the second time as at first; of how many, and which ways."""
    program = PROGRAMS[name]
    model = parallel_model(comm, plain_model(program.dtype), sequence_parallel)
    program.before(model)
    sent = Sent()
    seen: set[str | None] = set()
    number = 0
    with tried_small(100 * seed + comm.rank), routes() as noted, observing(sent):

        def telling(block: Block, at: Any) -> Callable[[Tensor], Tensor]:
            def forward(x: Tensor) -> Tensor:
                before = noted.at, sent.at
                noted.at, sent.at = at, (at, backward_pass() >= 0)
                try:
                    y: Tensor = block(x)
                finally:
                    noted.at, sent.at = before
                return y

            return forward

        def run(model: nn.Sequential, x: Tensor) -> Tensor:
            nonlocal number
            number += 1
            return program.run([telling(block, (number, at)) for at, block in enumerate(model)], x)  # type: ignore[arg-type]

        for step in range(program.steps):
            batches = [batch(comm, program, step, one, sequence_parallel) for one in range(program.microbatches)]
            program.step(run, model, batches)
            descend(model)
            if program.evaluate and step % program.evaluate == 1:
                with torch.no_grad():
                    run(model, batches[0].detach())
    recomputed = 0
    for at, first in noted.first.items():
        again = noted.anew.get(at)
        if again is None:
            assert program.evaluate  # what was evaluated has no backward pass
            continue
        recomputed += 1
        if program.run not in NOT_REENTRANT:  # whose first pass does not know that there will be a backward pass
            first, again = ([route._replace(composed=True) for route in found if route.way] for found in (first, again))
        times, rest = divmod(len(again), len(first))
        assert times and not rest and again == times * first, (at, first, again)
        calls, calls_again = sent.calls.get((at, False), []), sent.calls.get((at, True), [])
        assert calls_again == times * calls, (at, calls, calls_again)
        seen |= {route.way for route in first}
    assert set(noted.anew) <= set(noted.first)
    return recomputed, seen


NOT_REENTRANT = (not_reentrant, without_early_stop, nested)
REGIONS = (
    "not reentrant",
    "no early stop",
    "nested",
    "reentrant",
    "nested reentrant",
    "reentrant in not reentrant",
    "not reentrant in reentrant",
    "frozen on a rank, not reentrant",
    "evaluation",
    "evaluation, reentrant",
    "forwards first, not reentrant",
    "forwards first, nested",
    "forwards first, reentrant",
    "1F1B, not reentrant",
    "1F1B, reentrant",
)


@pytest.mark.parametrize("name", REGIONS)
def test_what_a_checkpoint_computes_anew_goes_as_it_went_at_first(ranks: RankPool, name: str) -> None:
    """While ways are tried, at the step that decides and after it; several microbatches under way."""
    program = PROGRAMS[name]
    for sequence_parallel in (True, False):
        for recomputed, ways in ranks.run(2, as_at_first, name, sequence_parallel, 2):
            assert recomputed == program.steps * program.microbatches * BLOCKS
            assert {"off", "slices 2", "slices 4", "slices 8", "ring"} <= ways
