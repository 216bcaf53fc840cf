"""--trace of train.py: a few steps of all ranks in one file for ui.perfetto.dev."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from types import TracebackType

from torch import nn

import pynccl
import pynccl_autograd as ad
from pynccl.tools import command

STEPS = 3


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace",
        type=command.output_file,
        metavar="FILE",
        help="write when each layer computes and each collective travels, on all ranks, to FILE (.json, .json.gz), for "
        "ui.perfetto.dev; docs/trace.md explains it",
    )
    parser.add_argument(
        "--trace-steps",
        type=command.whole(1),
        default=STEPS,
        metavar="N",
        help="steps that are in it; the first one of the run is not, where there are more (%(default)s)",
    )


class StepTrace:
    """Around a training loop: `with StepTrace(...) as traced: for n in range(steps): with traced.step(n): ...`

    said  what to tell the user at the end, on rank 0"""

    def __init__(self, options: argparse.Namespace, comm: pynccl.Communicator, model: nn.Module) -> None:
        self.path, self.comm, self.model = options.trace, comm, model
        self.first = min(1, options.steps - 1)
        self.last = min(self.first + options.trace_steps, options.steps) - 1
        self.said = ""
        self._open = contextlib.ExitStack()
        self._trace: ad.Tracing | None = None

    def __enter__(self) -> StepTrace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """One step of the optimizer, and what is traced around it."""
        if self.path is None or not self.first <= number <= self.last:
            yield
            return
        if number == self.first:
            self._trace = self._begin()
        assert self._trace is not None
        with self._trace.span(f"step {number + 1}"):
            yield
        if number == self.last:
            self._open.close()
            self.said = describe(self._trace)

    def _begin(self) -> ad.Tracing:
        try:
            return self._open.enter_context(ad.trace(self.path, self.comm, model=self.model))
        except (OSError, RuntimeError) as error:
            if self.comm.rank == 0:
                print(f"{os.path.basename(sys.argv[0])}: {error}", file=sys.stderr)
            raise SystemExit(1) from None


def describe(trace: ad.Tracing) -> str:
    """ "wrote trace.json: ..."; "" on ranks that wrote nothing."""
    if trace.path is None:
        return ""
    rows = trace.summary.values()
    block, communication, exposed = (
        sum(row[name] for row in rows) / len(rows) for name in ("block_ms", "communication_ms", "exposed_ms")
    )
    return (
        f"wrote {trace.path}: {len(rows)} rank{'s' if len(rows) > 1 else ''}, {block:.1f} ms, of which "
        f"{communication:.1f} ms with communication, {exposed:.1f} ms of it exposed (means over ranks); "
        "open it at ui.perfetto.dev"
    )
