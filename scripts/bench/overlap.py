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

On a CPU communication takes the time of a modelled link (PYNCCL_HOST_LINK), whose bandwidth is chosen for each case
such that T_comm is --balance times T_mm, or of none. On GPUs there is none, times are those of CUDA events, and the
type is bfloat16.

examples:
  python scripts/bench/overlap.py --rows 16 --balance 1 none --width 8 --hidden 12 --rounds 3
  python scripts/bench/overlap.py --markdown --json out/overlap.json  # long
  python scripts/bench/overlap.py --rows 64 --layer column --passes forward --rounds 99 --check  # long
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from bench.overlap_report import bounds, figures, table
from bench.ranks import here, link_for, linked, measure, rounds_of, run_ranks, slowest, surroundings
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator, progress
from pynccl.bindings.library import gpu_count
from pynccl.tools import command
from pynccl_autograd import OverlapConfig

BY_HAND = {"off": OverlapConfig("off"), "bulk": OverlapConfig("bulk")}
BY_HAND |= {f"slices {chunks}": OverlapConfig("slices", chunks=chunks) for chunks in (2, 4, 8)}
BY_HAND |= {"ring": OverlapConfig("ring")}
WARM = 30  # calls in which "auto" has to decide
LEAST_ROUNDS, SECONDS, BATCH_SECONDS, MOST_CALLS = 4, 3.0, 0.02, 5
Row = dict[str, Any]
Step = Callable[[], tuple[Tensor, ...]]


class Case(NamedTuple):
    """balance: T_comm / T_mm; None without a modelled link"""

    layer: str
    passes: str
    rows: int
    balance: float | None


class Options(NamedTuple):
    ranks: int
    device: str
    cases: tuple[Case, ...]
    rounds: int
    width: int
    hidden: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def link(self, balance: float | None, moves: int, rows: int, t_mm: float) -> str:
        """On which so many collectives of a tensor [rows, width] take `balance` times as long as the matmuls."""
        if balance is None:
            return ""
        nbytes = moves * (self.ranks - 1) / self.ranks * rows * self.width * self.dtype.itemsize
        return link_for(balance * t_mm, moves * (self.ranks - 1), nbytes)


def run(rank: int, options: Options) -> Row:
    """All that was asked for, on one rank."""
    cases = progress.over(options.cases, "measuring", "case", own=rank == 0)
    rows = [_Measured(case, rank, options).row() for case in cases]
    return {"cases": rows}


class _Measured:
    """The measurement of one case."""

    def __init__(self, case: Case, rank: int, options: Options) -> None:
        self.case, self.options, self.device = case, options, here(options.device)
        self.column, self.backward = case.layer == "column", case.passes == "backward"
        self.part, inner = case.rows // options.ranks, options.hidden // options.ranks
        n, k = (inner, options.width) if self.column else (options.width, inner)
        torch.manual_seed(1 + rank)
        self.x = self._normal(self.part if self.column else case.rows, k).requires_grad_(self.backward)
        self.gy = self._normal(case.rows if self.column else self.part, n)
        self.weight = nn.Parameter(self._normal(n, k) * k**-0.5)
        self.whole, self.g_whole = self._normal(case.rows, k), self._normal(case.rows, n)

    def row(self) -> Row:
        case, options = self.case, self.options
        t_mm = _undisturbed(options.device, self.matmuls)
        link = options.link(case.balance, 2 if self.backward else 1, case.rows, t_mm)
        with linked(options.device, link) as comm:
            auto = self._layer(comm, "auto")
            steps: dict[str, Step] = {name: self._step(self._layer(comm, way)) for name, way in BY_HAND.items()}
            steps |= {"plain": self._step(self._plain(comm)), "auto": self._step(auto)}
            calls = settled(steps["auto"], [auto])
            check_equal(f"{case.layer}, {case.passes}, {case.rows} rows", steps)
            times = _timed({**steps, "comm": self._collectives(comm), "mm": self.matmuls}, options)
            decisions = {
                one.pattern: {"way": one.way, "reason": one.reason, "settled": one.settled, "tried": dict(one.tried)}
                for one in ad.overlap.decisions(auto)
            }
        return {**case._asdict(), "link": link, "calls": calls, "decisions": decisions, "times": times}

    def _normal(self, *size: int) -> Tensor:
        return torch.randn(*size).to(self.device, self.options.dtype)

    def _layer(self, comm: Communicator, overlap: Any) -> nn.Module:
        kind: Any = ad.ColumnParallelLinear if self.column else ad.RowParallelLinear
        width, hidden = self.options.width, self.options.hidden
        sizes = (width, hidden) if self.column else (hidden, width)
        like = {"device": self.device, "dtype": self.options.dtype}
        layer: nn.Module = kind(*sizes, comm, bias=False, sequence_parallel=True, overlap=overlap, **like)
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

        return both if self.backward else forward

    def matmuls(self) -> None:
        with torch.no_grad():
            self.whole @ self.weight.t()
            if self.backward:
                self.g_whole @ self.weight
                self.g_whole.t() @ self.whole

    def _collectives(self, comm: Communicator) -> Callable[[], None]:
        """Those of the case, of tensors of their own."""
        parts, wholes = (
            [self._normal(rows, self.options.width) for _ in range(2)] for rows in (self.part, self.case.rows)
        )
        gathers, scatters = self.column or self.backward, not self.column or self.backward

        def call() -> None:
            if gathers:
                comm.all_gather(parts[0], wholes[0])
            if scatters:
                comm.reduce_scatter(wholes[1], parts[1])

        return call


def _undisturbed(device: str, call: Callable[[], Any]) -> float:
    """Seconds of a call: the best of three, once the best of the next three is within 5% of it."""
    found = 0.0
    for _ in range(10):
        before, found = found, min(measure(device, call) for _ in range(3))
        if abs(found - before) <= 0.05 * found:
            break
    return found


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
            tolerance = 1e-3 if one.dtype is torch.float32 else 5e-2
            near, says = tolerance * float(one.abs().max()), f"{what}: the results of {name} are not those of off"
            torch.testing.assert_close(found, one, rtol=tolerance, atol=near, msg=says)


def _timed(calls: Mapping[str, Callable[[], Any]], options: Options) -> dict[str, list[float]]:
    """In so many rounds, of so many calls each, as their time allows. All ways have run before."""
    one = slowest(min(measure(options.device, calls["off"]) for _ in range(3)))
    batch = max(1, min(MOST_CALLS, round(BATCH_SECONDS / one)))
    rounds = max(LEAST_ROUNDS, int(SECONDS / (len(calls) * batch * one)))
    return rounds_of(options.device, calls, min(rounds, options.rounds), batch)


def main() -> int:
    asked = _arguments()
    cases = tuple(
        Case(layer, passes, rows, balance)
        for rows in asked.rows
        for layer in asked.layer
        for passes in asked.passes
        for balance in asked.balance
    )
    options = Options(asked.ranks, asked.device, cases, asked.rounds, asked.width, asked.hidden)
    found = {**surroundings(), **options._asdict(), **run_ranks(options.ranks, options.device, run, options)[0]}
    for row in found["cases"]:
        row |= figures(row, tuple(BY_HAND))
    found["bounds"] = bounds(found["cases"])
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found, asked.markdown))
    return 1 if asked.check and not all(bound["pass"] for bound in found["bounds"]) else 0


def _balance(text: str) -> float | None:
    return None if text == "none" else command.number(0.01, '"none" or a number')(text)


def _arguments() -> argparse.Namespace:
    parser = command.Parser(__doc__, failed="a rank failed, or with --check a bound is not met")
    several: Any = {"nargs": "+"}
    parser.add_argument("--ranks", type=command.whole(2, 64), default=2, help="number of processes (default 2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default cpu")
    parser.add_argument(
        "--rows", type=command.whole(1), default=[64, 256, 1024, 4096], help="default 64 256 1024 4096", **several
    )
    parser.add_argument("--layer", choices=("column", "row"), default=["column", "row"], help="default both", **several)
    parser.add_argument(
        "--passes",
        choices=("forward", "backward"),
        default=["forward", "backward"],
        help="forward alone, backward with forward (default both)",
        **several,
    )
    parser.add_argument(
        "--balance",
        type=_balance,
        metavar="RATIO",
        help="T_comm / T_mm of the modelled link, or none (default 0.5 1 2 none; on GPUs none)",
        **several,
    )
    parser.add_argument("--rounds", type=command.whole(1), default=51, help="of a case, at most (default 51)")
    parser.add_argument("--width", type=command.whole(1), default=1024, help="features of what travels (default 1024)")
    parser.add_argument(
        "--hidden", type=command.whole(1), default=4096, help="features between the layers (default 4096)"
    )
    parser.add_argument("--json", type=command.output_file, metavar="FILE", help="write all that was measured")
    parser.add_argument("--markdown", action="store_true", help="print tables for docs/")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a bound is not met")
    asked = parser.parse_args()
    if problem := _problem(asked):
        parser.error(problem)
    asked.balance = asked.balance or ([None] if asked.device == "cuda" else [0.5, 1.0, 2.0, None])
    return asked


def _problem(asked: argparse.Namespace) -> str:
    """What is wrong with the options; "" if nothing is."""
    if asked.device == "cuda" and gpu_count() < asked.ranks:
        return f"--device is cuda, but there are {gpu_count()} GPUs for {asked.ranks} ranks; use --device cpu"
    if asked.device == "cuda" and asked.balance not in (None, [None]):
        return "--balance is of a link that is modelled on the CPU alone; leave it out with --device cuda"
    if asked.hidden % asked.ranks:
        return f"--hidden is {asked.hidden}, not divisible by {asked.ranks} ranks"
    for rows in asked.rows:
        if rows % asked.ranks:
            return f"--rows is {rows}, expected a multiple of {asked.ranks} ranks"
    return ""


if __name__ == "__main__":
    command.run(main)
