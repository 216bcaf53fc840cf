"""Compare training steps of DataParallelGradients and torch's DistributedDataParallel: time and hidden communication.

Every rank is a process with one torch thread. A step is forward and backward of a stack of residual MLPs on the same
data: without communication ("compute"), with DataParallelGradients ("ours"), and with DistributedDataParallel ("DDP"),
both with buckets of --bucket-mb. Each round runs a step of all three, starting with a different one, at an agreed time
on all ranks; the slowest rank counts. The gradients of both are compared. Figures are medians over rounds;
"DDP / ours" is the median of the ratios of each round, with quartiles.

plain   ours over the host library (shared memory, or PYNCCL_HOST_TRANSPORT), DDP over gloo, without a simulated link.
link    both over the same simulated link. Its bandwidth makes communication 40% of a step without overlap: T_comm, the
        time to average all buckets alone, is 2/3 of "compute". Hidden is 1 - (T - T_compute) / T_comm.

The link is the one of PYNCCL_HOST_LINK: each operation gets a slot on a FIFO queue when it is launched and completes no
earlier than the slot ends. The host library implements it. For DDP, a communication hook starts gloo's all_reduce of
the bucket and reserves 2(p-1) latencies and 2(p-1)/p of its bytes on a separate link (pynccl.host.link), as the host
library does for an all_reduce; a thread waits for gloo and for the end of the slot, then completes DDP's future. So DDP
also computes during communication. Both use our T_comm, since they send the same bytes.

--asleep: each layer sleeps instead of multiplying, as if a GPU computed and the CPU cores were free. Hidden
communication then depends on the order and size of the buckets and on launch costs, and little on the machine's load.

examples:
  python scripts/bench/data_parallel.py --width 64 --layers 2 --rounds 3
  python scripts/bench/data_parallel.py  # long
  python scripts/bench/data_parallel.py --ranks 4 --width 256 --layers 12 --bucket-mb 1 4 25  # long
  python scripts/bench/data_parallel.py --asleep 4 --width 256 --layers 12  # long
"""

from __future__ import annotations

import argparse
import copy
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from bench.ranks import columns, link_text, linked, rounds_of, run_ranks, surroundings, undisturbed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pynccl_autograd as ad
from pynccl import Communicator, progress
from pynccl.host.link import Link, parse, sleep_until
from pynccl.tools import command

WARM = 3  # untimed rounds: DDP rebuilds its buckets after the first step
LINK_SHARE = 0.4  # share of communication in a step without overlap


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


class AsleepBlock(nn.Module):
    """Block that sleeps instead of computing, with about as many parameters."""

    def __init__(self, width: int, milliseconds: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(4 * width, width)) for _ in range(2))
        self.seconds = milliseconds / 1e3

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = _Asleep.apply(x, weight, self.seconds / len(self.weights))
        return x


class _Asleep(torch.autograd.Function):
    """Sleep a third of the time in forward and the rest in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.shape, ctx.seconds = weight.shape, seconds
        time.sleep(seconds / 3)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(ctx.seconds * 2 / 3)
        return grad, grad.mean().expand(ctx.shape).contiguous(), None


def stack(options: argparse.Namespace) -> nn.Sequential:
    width, asleep = options.width, options.asleep
    return nn.Sequential(*(AsleepBlock(width, asleep) if asleep else Block(width) for _ in range(options.layers)))


# ------------------------------------------------------------------------------------------------------- on each rank


def run(rank: int, options: argparse.Namespace) -> list[list[str]]:
    """Return the rows of the table: for each bucket size, plain and over the link."""
    pairs = [(bucket_mb, row) for bucket_mb in options.bucket_mb for row in (_plain_row, _linked_row)]
    cases = progress.over(pairs, "measuring", "case", own=rank == 0)
    return [row(options, bucket_mb) for bucket_mb, row in cases]


def _plain_row(options: argparse.Namespace, bucket_mb: float) -> list[str]:
    with linked("") as comm:
        return _Measurement(options, comm, bucket_mb, "").row()


def _linked_row(options: argparse.Namespace, bucket_mb: float) -> list[str]:
    """Measure over a link on which communication takes LINK_SHARE, plus the ranks' own work for it."""
    with linked("") as comm:
        plain = _Measurement(options, comm, bucket_mb, "")
        compute = undisturbed(plain.compute)
        nbytes = plain.nbytes * 2 * (comm.size - 1) / comm.size
    text = link_text(nbytes / (compute * LINK_SHARE / (1 - LINK_SHARE)))
    with linked(text) as comm:
        return _Measurement(options, comm, bucket_mb, text).row()


class _Measurement:
    """The steps of a model and their times. link: a value of PYNCCL_HOST_LINK, or ""."""

    def __init__(self, options: argparse.Namespace, comm: Communicator, bucket_mb: float, link: str) -> None:
        self.options, self.ranks, self.bucket_mb, self.link = options, comm.size, bucket_mb, link
        torch.manual_seed(0)
        self.reference = stack(options)
        self.nbytes = sum(parameter.nbytes for parameter in self.reference.parameters())
        torch.manual_seed(1 + comm.rank)
        self.x = torch.randn(options.rows, options.width, requires_grad=options.asleep > 0)
        self.model = copy.deepcopy(self.reference)
        self.ours = ad.DataParallelGradients(self.model, comm, bucket_mb * 2**20)
        self.ddp = DistributedDataParallel(copy.deepcopy(self.reference), bucket_cap_mb=bucket_mb)
        if (parsed := parse(link)) is not None:
            self.ddp.register_comm_hook(_LinkedSum(parsed), _linked_sum)

    def compute(self) -> None:
        self._step(self.reference, self.reference.zero_grad)

    def _step(self, model: nn.Module, zero_grad: Callable[[], None]) -> None:
        zero_grad()
        model(self.x).square().mean().backward()

    def row(self) -> list[str]:
        calls: dict[str, Callable[[], None]] = {
            "compute": self.compute,
            "ours": lambda: self._step(self.model, self.ours.zero_grad),
            "ddp": lambda: self._step(self.ddp, self.ddp.zero_grad),
        }
        if self.link:
            calls["comm"] = self.ours.finish  # averages the buckets without computation
        rounds_of(calls, WARM)
        seconds = rounds_of(calls, self.options.rounds)
        times = [f"{1e3 * statistics.median(seconds[n]):.1f}" if n in seconds else "" for n in TIMES]
        faster = [b / a for a, b in zip(seconds["ours"], seconds["ddp"], strict=True)]
        sizes = [f"{self.options.width} x {self.options.layers}", f"{self.nbytes / 1e6:.1f}", f"{self.bucket_mb:g}"]
        cells = ["link" if self.link else "plain", str(self.ranks), *sizes, *times, _spread(faster, ".2f")]
        return [*cells, self._hidden("ours", seconds), self._hidden("ddp", seconds), f"{self._difference():.0e}"]

    def _hidden(self, name: str, seconds: dict[str, list[float]]) -> str:
        """Return the hidden share of communication, or "" without a link."""
        if not self.link:
            return ""
        rounds = zip(seconds[name], seconds["compute"], seconds["comm"], strict=True)
        return _spread([1 - (step - compute) / comm for step, compute, comm in rounds], ".0%")

    def _difference(self) -> float:
        """Return the largest relative difference of the gradients. Raises FailedError if it exceeds 1e-4."""
        self._step(self.model, self.ours.zero_grad)
        self._step(self.ddp, self.ddp.zero_grad)
        found = 0.0
        for one, other in zip(self.model.parameters(), self.ddp.module.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            found = max(found, ((one.grad - other.grad).abs().max() / other.grad.abs().max()).item())
        if found > 1e-4:
            raise command.FailedError(f"the gradients differ by {found:.0e}")
        return found


class _LinkedSum:
    """Average a bucket over gloo, completing no earlier than the simulated link allows."""

    def __init__(self, link: Link) -> None:
        self.link, self.size = link, dist.get_world_size()
        self.waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._finish, daemon=True).start()

    def start(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer().div_(self.size)
        deadline = self.link.reserve(2 * (self.size - 1), 2 * (self.size - 1) / self.size * buffer.nbytes)
        work = dist.all_reduce(buffer, async_op=True)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        self.waiting.put((work, deadline, buffer, done))
        return done

    def _finish(self) -> None:
        while True:
            work, deadline, buffer, done = self.waiting.get()
            work.wait()
            sleep_until(deadline)
            done.set_result(buffer)


def _linked_sum(state: _LinkedSum, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Communication hook for DDP."""
    return state.start(bucket)


_linked_sum.__annotations__.clear()  # DDP expects types, and the annotations are strings here


# ------------------------------------------------------------------------------------------------------------- tables

TIMES = ("compute", "comm", "ours", "ddp")
HEAD = [
    *("case", "ranks", "width x layers", "MB", "bucket MB", "compute", "comm", "ours", "DDP", "DDP / ours"),
    *("hidden, ours", "hidden, DDP", "difference"),
]


def _spread(found: Sequence[float], form: str) -> str:
    """Format the median and the quartiles."""
    low, median, high = statistics.quantiles(found, n=4, method="inclusive") if len(found) > 1 else [found[0]] * 3
    return f"{median:{form}} ({low:{form}} to {high:{form}})"


def main() -> None:
    options = _arguments()
    lines = [HEAD, *run_ranks(options.ranks, run, options)]
    print(f"{surroundings()}; milliseconds per step\n\n{columns(lines, options.markdown)}")


def _arguments() -> argparse.Namespace:
    parser = command.Parser(__doc__, failed="a rank failed, or the gradients differ")
    positive, milliseconds = command.integer(1), command.number(0, "milliseconds")
    parser.add_argument("--ranks", type=command.integer(2, 64), default=2, help="number of processes (%(default)s)")
    parser.add_argument("--width", type=positive, default=512, help="width of the residual stream (%(default)s)")
    parser.add_argument("--layers", type=positive, default=6, help="residual MLPs (%(default)s)")
    parser.add_argument("--rows", type=positive, default=64, help="batch size per rank (%(default)s)")
    mb = command.number(0.001, "MiB")
    parser.add_argument("--bucket-mb", type=mb, nargs="+", default=[25.0], help="bucket size in MiB (25)")
    parser.add_argument("--rounds", type=positive, default=15, help="repetitions (%(default)s)")
    sleep = "sleep MS per layer instead of computing"
    parser.add_argument("--asleep", type=milliseconds, default=0.0, metavar="MS", help=sleep)
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table for docs/")
    return parser.parse_args()


if __name__ == "__main__":
    command.run(main)
