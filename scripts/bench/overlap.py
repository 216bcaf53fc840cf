"""What overlap="auto" makes of tensor-parallel layers, beside every way chosen by hand.

A case is a layer, its forward pass alone or with the backward pass, and a number of rows of all ranks. "column" is
[width -> hidden] cut by its outputs, "row" [hidden -> width] cut by its inputs, both without biases and with
sequence_parallel=True. Every rank is a process with one torch thread. In every round all of these are measured, one
after the other, beginning with another one each time, from a moment at which all ranks begin; the slowest rank counts:

    off                 the collective and the matmul one after the other
    plain               F.linear and all_gather or reduce_scatter of pynccl_autograd, without a layer
    bulk, slices 2, 4, 8, ring    chosen by hand, for both passes
    auto                once it has decided; at most 30 calls go before
    comm, mm            its collectives alone, and its matmuls alone by torch

All have to give the results of "off" before they are timed. A ratio is the median of the rounds' ratios. The efficiency
of "auto" is (T_off - T) / min(T_comm, T_mm), likewise. A case has so many rounds as fit into 3 seconds, 4 at least and
--rounds at most; in each, calls that are short are repeated for about 20 ms, 5 times at most.

Communication takes the time of a modelled link (PYNCCL_HOST_LINK), whose bandwidth is chosen for each case such that
T_comm is --balance times T_mm, or of none.

examples:
  python scripts/bench/overlap.py --rows 16 --balance 1 none --width 8 --hidden 12 --rounds 3
  python scripts/bench/overlap.py --markdown  # long
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from bench.ranks import columns, link_for, linked, measure, rounds_of, run_ranks, slowest, surroundings, undisturbed
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator, progress
from pynccl.tools import command
from pynccl_autograd import OverlapConfig

BY_HAND = {"off": OverlapConfig("off"), "bulk": OverlapConfig("bulk")}
BY_HAND |= {f"slices {chunks}": OverlapConfig("slices", chunks=chunks) for chunks in (2, 4, 8)}
BY_HAND |= {"ring": OverlapConfig("ring")}
WARM = 30  # calls in which "auto" has to decide
LEAST_ROUNDS, SECONDS, BATCH_SECONDS, MOST_CALLS = 4, 3.0, 0.02, 5
GAIN = 0.92  # of T_off: who takes less gains 8% or more
Step = Callable[[], tuple[Tensor, ...]]
Times = Mapping[str, Sequence[float]]


class Case(NamedTuple):
    """balance: T_comm / T_mm; None without a modelled link"""

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


class Found(NamedTuple):
    """What was measured. calls: until "auto" had decided; chosen: what, forward and backward; times: of each round."""

    case: Case
    calls: int
    chosen: list[str]
    times: Times

    def ratio(self, one: str, other: str = "off") -> float:
        """Of each round; the median."""
        return statistics.median(a / b for a, b in zip(self.times[one], self.times[other], strict=True))

    @property
    def best(self) -> str:
        """The fastest of those chosen by hand."""
        return min(BY_HAND, key=self.ratio)

    @property
    def efficiency(self) -> float:
        rounds = zip(*(self.times[name] for name in ("off", "auto", "comm", "mm")), strict=True)
        return statistics.median((off - auto) / min(comm, mm) for off, auto, comm, mm in rounds)


# ------------------------------------------------------------------------------------------------------- on each rank


def run(rank: int, cases: Sequence[Case], options: argparse.Namespace) -> list[Found]:
    torch.manual_seed(1 + rank)
    return [_Measured(case, options).found() for case in progress.over(cases, "measuring", "case", own=rank == 0)]


class _Measured:
    """The measurement of one case."""

    def __init__(self, case: Case, options: argparse.Namespace) -> None:
        self.case, self.options = case, options
        self.part, inner = case.rows // options.ranks, options.hidden // options.ranks
        self.column = case.layer == "column"
        n, k = (inner, options.width) if self.column else (options.width, inner)
        self.x = torch.randn(self.part if self.column else case.rows, k).requires_grad_(case.backward)
        self.gy = torch.randn(case.rows if self.column else self.part, n)
        self.weight = nn.Parameter(torch.randn(n, k) * k**-0.5)
        self.whole, self.g_whole = torch.randn(case.rows, k), torch.randn(case.rows, n)

    def found(self) -> Found:
        case = self.case
        with linked(self._link()) as comm:
            auto = self._layer(comm, "auto")
            steps: dict[str, Step] = {name: self._step(self._layer(comm, way)) for name, way in BY_HAND.items()}
            steps |= {"plain": self._step(self._plain(comm)), "auto": self._step(auto)}
            calls = settled(steps["auto"], [auto])
            check_equal(str(case), steps)
            times = _timed({**steps, "comm": self._collectives(comm), "mm": self.matmuls}, self.options.rounds)
            return Found(case, calls, [one.way for one in ad.overlap.decisions(auto)], times)

    def _link(self) -> str:
        """On which the case's collectives take `balance` times as long as its matmuls."""
        if self.case.balance is None:
            return ""
        steps = (1 + self.case.backward) * (self.options.ranks - 1)
        nbytes = steps / self.options.ranks * self.case.rows * self.options.width * torch.float32.itemsize
        return link_for(self.case.balance * undisturbed(self.matmuls), steps, nbytes)

    def _layer(self, comm: Communicator, overlap: Any) -> nn.Module:
        kind: Any = ad.ColumnParallelLinear if self.column else ad.RowParallelLinear
        sizes = (self.options.width, self.options.hidden)[:: 1 if self.column else -1]
        layer: nn.Module = kind(*sizes, comm, bias=False, sequence_parallel=True, overlap=overlap, device="cpu")
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

        def both() -> tuple[Tensor, ...]:
            y = layer(self.x)
            return y.detach(), *torch.autograd.grad(y, (self.x, self.weight), self.gy)

        return both if self.case.backward else forward

    def matmuls(self) -> None:
        with torch.no_grad():
            self.whole @ self.weight.t()
            if self.case.backward:
                self.g_whole @ self.weight
                self.g_whole.t() @ self.whole

    def _collectives(self, comm: Communicator) -> Callable[[], None]:
        """Those of the case, of tensors of their own."""
        part, whole = torch.randn(self.part, self.options.width), torch.randn(self.case.rows, self.options.width)

        def call() -> None:
            if self.column or self.case.backward:
                comm.all_gather(part, whole)
            if not self.column or self.case.backward:
                comm.reduce_scatter(whole, part)

        return call


def settled(step: Step, layers: Sequence[nn.Module]) -> int:
    """After how many calls "auto" has decided for good, on all ranks; one more than WARM if not in those."""
    for number in range(1, WARM + 1):
        step()
        if not slowest(not all(one.settled for layer in layers for one in ad.overlap.decisions(layer))):
            return number
    return WARM + 1


def check_equal(what: str, steps: Mapping[str, Step]) -> None:
    """Every way computes the same. AssertionError with its name."""
    expected = [one.clone() for one in steps["off"]()]
    for name, step in steps.items():
        for one, found in zip(expected, step(), strict=True):
            near, says = 1e-3 * float(one.abs().max()), f"{what}: the results of {name} are not those of off"
            torch.testing.assert_close(found, one, rtol=1e-3, atol=near, msg=says)


def _timed(calls: Mapping[str, Callable[[], Any]], most: int) -> dict[str, list[float]]:
    """In so many rounds, of so many calls each, as their time allows. All ways have run before."""
    one = slowest(min(measure(calls["off"]) for _ in range(3)))
    batch = max(1, min(MOST_CALLS, round(BATCH_SECONDS / one)))
    rounds = max(LEAST_ROUNDS, int(SECONDS / (len(calls) * batch * one)))
    return rounds_of(calls, min(rounds, most), batch)


# ------------------------------------------------------------------------------------------------------------- tables


def case_lines(found: Sequence[Found]) -> list[list[str]]:
    """Times as ratios to "off"."""
    ways = [*list(BY_HAND)[1:], "plain", "auto"]
    head = ["layer", "pass", "rows", "comm/mm", "off ms", *ways[:-1], "auto/off", "auto/best", "eff.", "calls"]
    lines = [[*head, "chosen"]]
    for one in found:
        *cells, balance = one.case.cells()
        cells += [f"{balance} ({one.ratio('comm', 'mm'):.2f})", f"{statistics.median(one.times['off']) * 1e3:.1f}"]
        cells += [f"{one.ratio(name):.2f}" for name in ways]
        efficiency = "" if one.case.balance is None else f"{one.efficiency:.2f}"
        cells += [f"{one.ratio('auto', one.best):.2f}", efficiency, str(one.calls), ", ".join(one.chosen) or "-"]
        lines.append(cells)
    return lines


def bound_lines(found: Sequence[Found]) -> list[list[str]]:
    """What has to hold, and the worst case of each."""
    gaining = [one for one in found if one.ratio(one.best) <= GAIN]
    declined = [one for one in found if set(one.chosen) <= {"off"}]
    balanced = [one for one in found if one.case.balance == 1 and one.case.rows >= 1024]
    forward, backward = ([one for one in balanced if one.case.backward is way] for way in (False, True))
    of_balanced = "T_comm = T_mm, 1024 rows and more"
    return [
        ["bound", "asked for", "worst", "case", ""],
        _bound("auto / off", 1.05, found, lambda one: one.ratio("auto")),
        _bound(
            "auto / best by hand, where that gains 8% or more", 1.10, gaining, lambda one: one.ratio("auto", one.best)
        ),
        _bound(f"efficiency, forward, {of_balanced}", -0.75, forward, lambda one: -one.efficiency),
        _bound(f"efficiency, + backward, {of_balanced}", -0.8, backward, lambda one: -one.efficiency),
        _bound("calls until decided", 25, found, lambda one: one.calls),
        _bound("auto that chose off / F.linear and collective", 1.02, declined, lambda one: one.ratio("auto", "plain")),
    ]


def _bound(what: str, most: float, found: Sequence[Found], figure: Callable[[Found], float]) -> list[str]:
    """`most` that the figure may be; where it is negative, the other way round: the least that -figure may be."""
    asked = f"<= {most:g}" if most > 0 else f">= {-most:g}"
    if not found:
        return [what, asked, "", "no case", "PASS"]
    worst = max(found, key=figure)
    return [what, asked, f"{abs(figure(worst)):.3f}", str(worst.case), "PASS" if figure(worst) <= most else "FAIL"]


def main() -> None:
    asked = _arguments()
    cases = [Case(*one) for one in itertools.product(asked.rows, asked.layer, (False, True), asked.balance)]
    found = run_ranks(asked.ranks, run, cases, asked)
    print("\n\n".join(columns(lines, asked.markdown) for lines in (case_lines(found), bound_lines(found))))
    print(
        f"\n{surroundings()}; {asked.ranks} ranks, width {asked.width}, hidden {asked.hidden}. Ways are ratios to off."
    )


def _balance(text: str) -> float | None:
    return None if text == "none" else command.number(0.01, '"none" or a number')(text)


def _arguments() -> argparse.Namespace:
    parser = command.Parser(__doc__, failed="a rank failed")
    whole = command.whole(1)
    parser.add_argument("--ranks", type=command.whole(2, 64), default=2, help="number of processes (%(default)s)")
    parser.add_argument("--rows", type=whole, nargs="+", default=[64, 256, 1024, 4096], help="of all ranks")
    parser.add_argument("--layer", nargs="+", choices=("column", "row"), default=["column", "row"], help="(both)")
    parser.add_argument("--balance", type=_balance, nargs="+", default=[0.5, 1.0, 2.0, None], metavar="RATIO",
                        help="T_comm / T_mm of the modelled link, or none (0.5 1 2 none)")  # fmt: skip
    parser.add_argument("--rounds", type=whole, default=51, help="of a case, at most (%(default)s)")
    parser.add_argument("--width", type=whole, default=1024, help="features of what travels (%(default)s)")
    parser.add_argument("--hidden", type=whole, default=4096, help="features between the layers (%(default)s)")
    parser.add_argument("--markdown", action="store_true", help="print tables for docs/")
    asked = parser.parse_args()
    for name, value in (*(("rows", rows) for rows in asked.rows), ("hidden", asked.hidden)):
        if value % asked.ranks:
            parser.error(f"--{name} is {value}, expected a multiple of {asked.ranks} ranks")
    return asked


if __name__ == "__main__":
    command.run(main)
