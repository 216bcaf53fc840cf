"""Compare overlap="auto" in tensor-parallel layers with every fixed schedule.

A case is a layer, its forward pass with or without the backward pass, and a number of rows over all ranks. "column" is
[width -> hidden] sharded by outputs, "row" is [hidden -> width] sharded by inputs, both without biases and with
sequence_parallel=True. Every rank is a process with one torch thread. All ranks start each measurement at the same
time; the slowest rank counts. Each round starts with a different schedule. It measures

    off                 the collective and the matmul one after the other
    off again           the same, to compare it with itself: if the two differ by more than 3%, the machine was too
                        noisy, the table says "cannot tell", and the bounds leave the case out
    plain               F.linear and pynccl_autograd's all_gather or reduce_scatter, without a layer
    bulk, slices 2, 4, 8, ring    fixed schedules, for both passes
    auto                after its race
    comm, mm            only the collectives, and only the matmuls in torch

The results of all are compared with "off" before timing. A ratio is the median of the ratios of the rounds, and so is
the efficiency of "auto", (T_off - T) / min(T_comm, T_mm), where T is the time of "auto" and
T_x that of x. A case runs as many rounds as fit into 12 seconds, at least 4 and at most --rounds. In each round short
calls are repeated for about 20 ms, at most 5 times.

Communication runs over a simulated link (PYNCCL_HOST_LINK), whose bandwidth is chosen for each case so that T_comm is
--balance times T_mm, or over none. On GPUs it runs over what connects them, and times last until the GPU is done. Ranks
share a GPU if there are too few: they communicate through a socket, and take turns unless scripts/gpu/under_mps.py runs
this script. --hidden then sets the balance. Such ranks compete for the GPU's cores: their matmuls take longer together
than alone, and a rank that waits leaves its cores to the other. No ratio of theirs is that of two GPUs.

examples:
  python scripts/bench/overlap.py --rows 16 --balance 1 none --width 8 --hidden 12 --rounds 3
  python scripts/bench/overlap.py --markdown  # long: 16 cases, ten minutes on two cores
  python scripts/gpu/under_mps.py python scripts/bench/overlap.py --device cuda --hidden 32768  # long; needs a GPU
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from bench.ranks import columns, completed, link_for, linked, rounds_of, run_ranks, slowest, surroundings, undisturbed
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator, progress
from pynccl.tools import command
from pynccl_autograd import OverlapConfig

FIXED = {"off": OverlapConfig("off"), "bulk": OverlapConfig("bulk")}
FIXED |= {f"slices {chunks}": OverlapConfig("slices", chunks=chunks) for chunks in (2, 4, 8)}
FIXED |= {"ring": OverlapConfig("ring")}
WARM = 300  # calls within which "auto" must decide
MIN_ROUNDS, SECONDS, BATCH_SECONDS, MAX_CALLS = 4, 12.0, 0.02, 5
SAME = 0.03  # difference of "off" from itself above which a case cannot tell
GAIN = 0.92  # ratio to T_off below which a schedule gains 8% or more
Step = Callable[[], tuple[Tensor, ...]]
Times = Mapping[str, Sequence[float]]


class Case(NamedTuple):
    """A case. balance: T_comm / T_mm, or None without a simulated link."""

    rows: int
    layer: str
    backward: bool
    balance: float | None

    def cells(self) -> list[str]:
        balance = "none" if self.balance is None else f"{self.balance:g}"
        return [self.layer, "+ backward" if self.backward else "forward", str(self.rows), balance]

    def __str__(self) -> str:
        layer, passes, rows, balance = self.cells()
        return f"{layer}, {passes}, {rows} rows, T_comm/T_mm {balance}"


class Result(NamedTuple):
    """Result of a case.

    calls   number of calls until "auto" decided
    chosen  its schedules, forward and backward
    times   seconds of each round
    """

    case: Case
    calls: int
    chosen: list[str]
    times: Times

    def ratio(self, one: str, other: str = "off") -> float:
        """Return the median ratio over the rounds."""
        return statistics.median(a / b for a, b in zip(self.times[one], self.times[other], strict=True))

    @property
    def hides(self) -> bool:
        """Whether there is something to hide: the shorter of communication and matmuls takes 10% of "off" or more."""
        return min(self.ratio("comm"), self.ratio("mm")) >= 0.1

    @property
    def tells(self) -> bool:
        """Whether "off" takes as long as itself."""
        return abs(self.ratio("off again") - 1) <= SAME

    @property
    def best(self) -> str:
        """The fastest fixed schedule."""
        return min(FIXED, key=self.ratio)

    @property
    def efficiency(self) -> float:
        rounds = zip(*(self.times[name] for name in ("off", "auto", "comm", "mm")), strict=True)
        return statistics.median((off - auto) / min(comm, mm) for off, auto, comm, mm in rounds)


# ------------------------------------------------------------------------------------------------------- on each rank


def run(rank: int, cases: Sequence[Case], options: argparse.Namespace) -> list[Result]:
    torch.manual_seed(1 + rank)
    return [_Measurement(case, options).result() for case in progress.over(cases, "measuring", "case", own=rank == 0)]


class _Measurement:
    """The measurement of one case."""

    def __init__(self, case: Case, options: argparse.Namespace) -> None:
        self.case, self.options = case, options
        randn = partial(torch.randn, device=options.device)  # on the current GPU
        self.local_rows, inner = case.rows // options.ranks, options.hidden // options.ranks
        self.column = case.layer == "column"
        n, k = (inner, options.width) if self.column else (options.width, inner)
        self.x = randn(self.local_rows if self.column else case.rows, k).requires_grad_(case.backward)
        self.gy = randn(case.rows if self.column else self.local_rows, n)
        self.weight = nn.Parameter(randn(n, k) * k**-0.5)
        self.full_x, self.full_gy = randn(case.rows, k), randn(case.rows, n)
        self.shard, self.full = randn(self.local_rows, options.width), randn(case.rows, options.width)

    def result(self) -> Result:
        case = self.case
        with linked(self._link(), self.x.device) as comm:
            auto = self._layer(comm, "auto")
            steps: dict[str, Step] = {name: self._step(self._layer(comm, fixed)) for name, fixed in FIXED.items()}
            steps |= {"off again": steps["off"], "plain": self._step(self._plain(comm)), "auto": self._step(auto)}
            calls = calls_until_settled(steps["auto"], [auto])
            check_equal(str(case), steps)
            times = _timed({**steps, "comm": self._collectives(comm), "mm": self.matmuls}, self.options.rounds)
            return Result(case, calls, [one.schedule for one in ad.overlap.decisions(auto)], times)

    def _link(self) -> str:
        """Return the link on which the case's collectives take `balance` times as long as its matmuls."""
        if self.case.balance is None:
            return ""
        steps = (1 + self.case.backward) * (self.options.ranks - 1)
        nbytes = steps / self.options.ranks * self.case.rows * self.options.width * torch.float32.itemsize
        return link_for(self.case.balance * undisturbed(self.matmuls), steps, nbytes)

    def _layer(self, comm: Communicator, overlap: Any) -> nn.Module:
        kind: Any = ad.ColumnParallelLinear if self.column else ad.RowParallelLinear
        sizes = (self.options.width, self.options.hidden)[:: 1 if self.column else -1]
        layer: nn.Module = kind(*sizes, comm, bias=False, sequence_parallel=True, overlap=overlap)
        layer.weight = self.weight
        return layer

    def _plain(self, comm: Communicator) -> Callable[[Tensor], Tensor]:
        if self.column:
            return lambda x: F.linear(ad.all_gather(x, comm, grad="sum"), self.weight)
        return lambda x: ad.reduce_scatter(F.linear(x, self.weight), comm)

    def _step(self, layer: Callable[[Tensor], Tensor]) -> Step:
        def forward() -> tuple[Tensor, ...]:
            with torch.no_grad():
                return (layer(self.x),)

        def forward_backward() -> tuple[Tensor, ...]:
            y = layer(self.x)
            return y.detach(), *torch.autograd.grad(y, (self.x, self.weight), self.gy)

        return forward_backward if self.case.backward else forward

    def matmuls(self) -> None:
        with torch.no_grad():
            self.full_x @ self.weight.t()
            if self.case.backward:
                self.full_gy @ self.weight
                self.full_gy.t() @ self.full_x

    def _collectives(self, comm: Communicator) -> Callable[[], None]:
        """Return a function that runs the collectives of the case, on separate tensors."""

        def call() -> None:
            if self.column or self.case.backward:
                comm.all_gather(self.shard, self.full)
            if not self.column or self.case.backward:
                comm.reduce_scatter(self.full, self.shard)

        return call


def calls_until_settled(step: Step, layers: Sequence[nn.Module]) -> int:
    """Return the number of calls after which "auto" has settled on all ranks, or WARM + 1."""
    for number in range(1, WARM + 1):
        step()
        if not slowest(not all(one.settled for layer in layers for one in ad.overlap.decisions(layer))):
            return number
    return WARM + 1


def check_equal(what: str, steps: Mapping[str, Step]) -> None:
    """Check that all schedules compute the same. Raises AssertionError with the name of the schedule."""
    results = [tensor.clone() for tensor in steps["off"]()]
    for name, step in steps.items():
        for expected, found in zip(results, step(), strict=True):
            atol, message = 1e-3 * float(expected.abs().max()), f"{what}: the results of {name} differ from off"
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=atol, msg=message)


def _timed(calls: Mapping[str, Callable[[], Any]], max_rounds: int) -> dict[str, list[float]]:
    """Return seconds per call of each round, with as many rounds and calls as time allows. All calls have warmed up."""
    seconds = slowest(min(completed(calls["off"]) for _ in range(3)))
    batch = max(1, min(MAX_CALLS, round(BATCH_SECONDS / seconds)))
    rounds = max(MIN_ROUNDS, int(SECONDS / (len(calls) * batch * seconds)))
    return rounds_of(calls, min(rounds, max_rounds), batch, completed)


# ------------------------------------------------------------------------------------------------------------- tables


def case_lines(found: Sequence[Result]) -> list[list[str]]:
    """Return the table of cases, with times as ratios to "off"."""
    names = ["off again", *list(FIXED)[1:], "plain", "auto"]
    head = ["layer", "pass", "rows", "comm/mm", "off ms", *names[:-1], "auto/off", "auto/best", "eff.", "calls"]
    lines = [[*head, "chosen"]]
    for one in found:
        *cells, balance = one.case.cells()
        cells += [f"{balance} ({one.ratio('comm', 'mm'):.2f})", f"{statistics.median(one.times['off']) * 1e3:.1f}"]
        cells += [f"{one.ratio(name):.2f}" for name in names]
        efficiency = f"{one.efficiency:.2f}" if one.hides else ""
        chosen = ", ".join(one.chosen) or "-"
        cells += [f"{one.ratio('auto', one.best):.2f}", efficiency, str(one.calls)]
        cells.append(chosen if one.tells else f"{chosen}; cannot tell")
        lines.append(cells)
    return lines


def bound_lines(found: Sequence[Result]) -> list[list[str]]:
    """Return the table of bounds, each with its worst case among those that can tell."""
    decided, found = found, [one for one in found if one.tells]
    gaining = [one for one in found if one.ratio(one.best) <= GAIN]
    declined = [one for one in found if set(one.chosen) <= {"off"}]
    balanced = [one for one in found if one.case.balance == 1 and one.case.rows >= 1024]
    forward = [one for one in balanced if not one.case.backward]
    backward = [one for one in balanced if one.case.backward]
    condition = "T_comm = T_mm, 1024 rows or more"
    return [
        ["bound", "limit", "worst", "case", ""],
        _bound("auto / off", 1.05, found, lambda one: one.ratio("auto")),
        _bound(
            "auto / best fixed schedule, if it gains 8% or more", 1.10, gaining, lambda one: one.ratio("auto", one.best)
        ),
        _bound(f"efficiency, forward, {condition}", -0.75, forward, lambda one: -one.efficiency),
        _bound(f"efficiency, + backward, {condition}", -0.8, backward, lambda one: -one.efficiency),
        _bound("calls until decided", 263, decided, lambda one: one.calls),
        _bound("auto that chose off / F.linear and collective", 1.02, declined, lambda one: one.ratio("auto", "plain")),
    ]


def _bound(what: str, max_: float, found: Sequence[Result], figure: Callable[[Result], float]) -> list[str]:
    """Return a row for the upper bound `max_` of the figure. A negative `max_` is a lower bound of -figure."""
    limit = f"<= {max_:g}" if max_ > 0 else f">= {-max_:g}"
    if not found:
        return [what, limit, "", "no case", "PASS"]
    worst = max(found, key=figure)
    return [what, limit, f"{abs(figure(worst)):.3f}", str(worst.case), "PASS" if figure(worst) <= max_ else "FAIL"]


def main() -> None:
    options = _arguments()
    sizes = itertools.product(options.rows, options.layer, (False, True), options.balance)
    found = run_ranks(options.ranks, run, [Case(*one) for one in sizes], options, device=options.device)
    tables = [case_lines(found), *([bound_lines(found)] if options.device == "cpu" else [])]  # of the simulated link
    print("\n\n".join(columns(lines, options.markdown) for lines in tables))
    print(f"\n{sum(one.tells for one in found)} of {len(found)} cases can tell.")
    figures = f"{options.ranks} ranks, width {options.width}, hidden {options.hidden}"
    print(f"\n{surroundings(options.device, options.ranks)}; {figures}. The columns of schedules are ratios to off.")


def _balance(text: str) -> float | None:
    return None if text == "none" else command.number(0.01, '"none" or a number')(text)


def _arguments() -> argparse.Namespace:
    parser = command.Parser(__doc__, failed="a rank failed")
    positive = command.integer(1)
    parser.add_argument("--ranks", type=command.integer(2, 64), default=2, help="number of processes (%(default)s)")
    rows = "total rows of all ranks (256 1024)"
    parser.add_argument("--rows", type=positive, nargs="+", default=[256, 1024], help=rows)
    layers = "layers to measure (both)"
    parser.add_argument("--layer", nargs="+", choices=("column", "row"), default=["column", "row"], help=layers)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the layers are (%(default)s)")
    parser.add_argument("--balance", type=_balance, nargs="+", metavar="RATIO",
                        help="T_comm / T_mm of the simulated link, or none (1 none; on cuda: none)")  # fmt: skip
    parser.add_argument("--rounds", type=positive, default=51, help="maximum number of rounds per case (%(default)s)")
    parser.add_argument("--width", type=positive, default=1024, help="input and output features (%(default)s)")
    parser.add_argument("--hidden", type=positive, default=4096, help="features between the layers (%(default)s)")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables for docs/")
    options = parser.parse_args()
    if options.device == "cuda" and options.balance not in (None, [None]):
        parser.error("--balance is for the simulated link of the CPU; with --device cuda, choose --rows and --hidden")
    if options.device == "cuda" and not torch.cuda.device_count():
        parser.error(f"--device cuda: torch {torch.__version__} finds no GPU; use --device cpu")
    options.balance = options.balance or ([1.0, None] if options.device == "cpu" else [None])
    for name, value in (*(("rows", rows) for rows in options.rows), ("hidden", options.hidden)):
        if value % options.ranks:
            parser.error(f"--{name} is {value}, expected a multiple of {options.ranks} ranks")
    return options


if __name__ == "__main__":
    command.run(main)
