"""Training while overlap="auto" tries its ways, and once it has decided: the values of training without overlap; what a
checkpoint computes anew goes as it went at first."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn
from training_programs import (
    BLOCKS,
    PROGRAMS,
    SCATTERED,
    WHOLE,
    Program,
    batch,
    freeze_on_rank_0,
    leave,
    loss_of,
    many_sizes,
    nested,
    not_reentrant,
    parallel_model,
    parameters_of,
    plain_model,
    trained,
    whole,
    with_main_grads,
    without_early_stop,
)
from tried import Routes, Ways, routes, settled, tried_small

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl.comm.call import call_text
from pynccl.comm.observing import Observer, observing
from pynccl_autograd import OverlapConfig
from pynccl_autograd.torch_internals import backward_pass

# Each way of programs once, on some number of ranks; the others, and those in the other layout, are slow.
SOME = (
    ("plain", 3, SCATTERED),
    ("plain", 2, WHOLE),
    ("not reentrant", 2, SCATTERED),
    ("reentrant", 2, SCATTERED),
    ("nested", 2, WHOLE),
    ("reentrant in not reentrant", 2, SCATTERED),
    ("forwards first, nested", 2, SCATTERED),
    ("1F1B, reentrant", 2, SCATTERED),
    ("evaluation", 2, SCATTERED),
    ("many sizes", 2, SCATTERED),
    ("frozen", 2, SCATTERED),
    ("frozen on a rank, not reentrant", 2, SCATTERED),
    ("autocast", 2, SCATTERED),
    ("main_grad", 2, SCATTERED),
    ("gathered anew", 2, SCATTERED),
    ("reduce_dtype", 2, SCATTERED),
)
OTHERS = [(name, 2, layout) for name in PROGRAMS for layout in (SCATTERED, WHOLE) if (name, 2, layout) not in SOME]
CASES = [*SOME, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)]


class Sent(Observer):
    """What was communicated, by what `at` says meanwhile; without what ranks tell each other for a decision."""

    def __init__(self) -> None:
        self.at: Any = None
        self.calls: dict[Any, list[str]] = {}

    def launching(self, calls: Any) -> None:
        """See Observer."""
        for call in calls:
            if call.operation == "check":  # of PYNCCL_CHECK, which tells ranks of each call
                continue
            text = call.compared or call_text(call.operation, call.inputs)
            if "INT64" not in text:
                self.calls.setdefault(self.at, []).append(text)


class Watched(NamedTuple):
    """A program whose blocks tell how their first passes went, and how what is computed anew."""

    program: Program
    noted: Routes
    sent: Sent


@contextlib.contextmanager
def watched(program: Program) -> Iterator[Watched]:
    """The program with a forward pass that tells of its blocks."""
    numbers, sent = itertools.count(), Sent()
    with routes() as noted, observing(sent):

        def telling(block: nn.Module, at: Any) -> Callable[[Tensor], Tensor]:
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
            number = next(numbers)
            blocks = [telling(block, (number, at)) for at, block in enumerate(model)]
            return program.run(blocks, x)  # type: ignore[arg-type]

        yield Watched(program._replace(run=run), noted, sent)


def check_computed_anew(program: Program, noted: Routes, sent: Sent) -> None:
    """The regions of every microbatch went the second time as at first, while ways were tried and afterwards."""
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
    assert set(noted.anew) <= set(noted.first)
    assert recomputed == program.steps * program.microbatches * BLOCKS


NOT_REENTRANT = (not_reentrant, without_early_stop, nested)
PATTERNS = {
    SCATTERED: {"all_gather_matmul", "matmul_reduce_scatter", "column_backward", "row_backward"},
    WHOLE: {"matmul_all_reduce", "copy_backward"},
}


def compare(comm: Communicator, name: str, sequence_parallel: bool) -> None:
    """Train with "auto", and torch's layers alone: losses and parameters."""
    program = PROGRAMS[name]
    plain = plain_model(program.dtype)
    options = dict(program.options)
    keeps = options.pop("save_gathered", True)

    def layers(method: Any) -> nn.Sequential:
        config = OverlapConfig(method, save_gathered=keeps)
        return parallel_model(comm, plain, sequence_parallel, overlap=config, **options)

    auto, off, ways = layers("auto"), layers("off"), Ways()
    with tried_small(100 + comm.rank), observing(ways), watched(program) as seen:
        found = torch.stack(trained(comm, seen.program, auto, sequence_parallel))
    if program.run is not whole:
        check_computed_anew(program, seen.noted, seen.sent)
    if program.before is freeze_on_rank_0:  # which no whole model can
        wanted = torch.stack(trained(comm, program, off, sequence_parallel))
        parameters = parameters_of(off)
    else:
        untouched = leave if program.before is with_main_grads else program.before
        wanted = torch.stack(trained(None, program._replace(before=untouched), plain, False))
        parameters = plain.state_dict()
        if sequence_parallel:
            comm.all_reduce(found, found)
    close = {"rtol": program.tolerance, "atol": program.tolerance}
    torch.testing.assert_close(found, wanted, **close)
    for key, one in parameters_of(auto).items():
        torch.testing.assert_close(one, parameters[key], **close)
    assert {one.pattern for one in ways.took if not one.settled} == PATTERNS[sequence_parallel]
    if program.rows is many_sizes:
        reasons = [decision.reason for layer in (auto[0].up, auto[0].down) for decision in ad.overlap.decisions(layer)]
        assert any("16 shapes of this pass were tried before" in reason for reason in reasons)
    else:
        assert sum(len(settled(layer)) for block in auto for layer in (block.up, block.down)) >= 2 * BLOCKS
        assert {"off", "slices 2", "slices 4", "slices 8", "ring"} <= {one.way for one in ways.took}


@pytest.mark.parametrize(("name", "n", "sequence_parallel"), CASES)
def test_training_with_auto_is_training_without_overlap(
    ranks: RankPool, name: str, n: int, sequence_parallel: bool
) -> None:
    """And what a checkpoint computes anew goes as it went at first."""
    ranks.run(n, compare, name, sequence_parallel)


def checked(comm: Communicator) -> None:
    os.environ["PYNCCL_CHECK"] = "1"  # which the pool takes back
    own = comm.split(0)
    assert own is not None
    with own:
        compare(own, "reentrant", True)


def test_training_where_calls_are_compared(ranks: RankPool) -> None:
    ranks.run(2, checked)


def retried_midway(comm: Communicator, name: str) -> None:
    """Between forward and backward passes: what is computed anew goes as it went, and the backward pass as in a new
    trial."""
    model = parallel_model(comm, plain_model(torch.float64), True)
    x = batch(comm, PROGRAMS[name], 0, 0, True)
    expected: list[Tensor] = []
    with tried_small(comm.rank):
        for step in range(18):
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


@pytest.mark.parametrize("name", ["nested", "reentrant"])
def test_retry_between_a_forward_and_a_backward_pass(ranks: RankPool, name: str) -> None:
    ranks.run(2, retried_midway, name)
