"""Steps with DataParallelGradients beside steps with torch's DistributedDataParallel: times, and what each hides.

Every rank is a process with one torch thread. A step is forward and backward of the same model, a stack of residual
MLPs, on the same data, in three ways: without any communication ("compute"), with DataParallelGradients ("ours"), with
DistributedDataParallel ("DDP"), both with buckets of --bucket-mb. In every round all of them make a step, one after the
other, beginning with another one each time, from a moment at which all ranks begin; the slowest rank counts. Before
that the gradients of both are compared. Figures are medians over rounds; "DDP / ours" is the median of the ratios of
each round, with their quartiles.

plain   ours over the host library (shared memory, or as PYNCCL_HOST_TRANSPORT says), DDP over gloo, both as they are.
link    both over the same modelled link, whose bandwidth makes communication 40% of a step that hides nothing: T_comm,
        the averages of all buckets alone, is 2/3 of the time of "compute". Hidden is 1 - (T - T_compute) / T_comm.

The link is that of PYNCCL_HOST_LINK: an operation is given its time on a FIFO queue when it is launched, and is done no
sooner. The host library has it built in. DDP gets it by a communication hook: it starts gloo's all_reduce of the bucket
and reserves 2(p-1) latencies and 2(p-1)/p of its bytes of a link of its own (pynccl.host.link), as the host library
does for an all_reduce; a thread waits for gloo and for that moment, then tells DDP. So torch, too, computes while its
buckets travel, and hides what its order of buckets allows. T_comm is that of ours, for both: the same bytes.

--asleep: each layer sleeps instead of multiplying, as where a GPU computes and the cores are free. What is hidden then
depends on the order and the size of buckets and on what their launches cost, little on other load of the machine.

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

WARM = 3  # rounds that are not counted: DDP cuts its buckets anew after the first step
LINK_SHARE = 0.4  # of a step that hides nothing is communication


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


class AsleepBlock(nn.Module):
    """With about as many parameters."""

    def __init__(self, width: int, milliseconds: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(4 * width, width)) for _ in range(2))
        self.seconds = milliseconds / 1e3

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = _Asleep.apply(x, weight, self.seconds / len(self.weights))
        return x


class _Asleep(torch.autograd.Function):
    """A third of the time forward, the rest backward."""

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
    """Rows of the table: of each size of buckets, plain and over the link."""
    both = [(bucket_mb, way) for bucket_mb in options.bucket_mb for way in (_plain, _linked)]
    cases = progress.over(both, "measuring", "case", own=rank == 0)
    return [way(options, bucket_mb) for bucket_mb, way in cases]


def _plain(options: argparse.Namespace, bucket_mb: float) -> list[str]:
    with linked("") as comm:
        return _Ways(options, comm, bucket_mb, "").row()


def _linked(options: argparse.Namespace, bucket_mb: float) -> list[str]:
    """Of a bandwidth at which communication takes its part. What the ranks themselves do for it comes on top."""
    with linked("") as comm:
        ways = _Ways(options, comm, bucket_mb, "")
        compute = undisturbed(ways.compute)
        nbytes = ways.nbytes * 2 * (comm.size - 1) / comm.size
    text = link_text(nbytes / (compute * LINK_SHARE / (1 - LINK_SHARE)))
    with linked(text) as comm:
        return _Ways(options, comm, bucket_mb, text).row()


class _Ways:
    """The steps of a model, and what they take. link: "" or as PYNCCL_HOST_LINK has it."""

    def __init__(self, options: argparse.Namespace, comm: Communicator, bucket_mb: float, link: str) -> None:
        self.options, self.ranks, self.bucket_mb, self.link = options, comm.size, bucket_mb, link
        torch.manual_seed(0)
        self.whole = stack(options)
        self.nbytes = sum(one.nbytes for one in self.whole.parameters())
        torch.manual_seed(1 + comm.rank)
        self.x = torch.randn(options.rows, options.width, requires_grad=options.asleep > 0)
        self.model = copy.deepcopy(self.whole)
        self.ours = ad.DataParallelGradients(self.model, comm, bucket_mb * 2**20)
        self.ddp = DistributedDataParallel(copy.deepcopy(self.whole), bucket_cap_mb=bucket_mb)
        if (parsed := parse(link)) is not None:
            self.ddp.register_comm_hook(_LinkedSum(parsed), _linked_sum)

    def compute(self) -> None:
        self._step(self.whole, self.whole.zero_grad)

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
            calls["comm"] = self.ours.finish  # the buckets alone
        rounds_of(calls, WARM)
        seconds = rounds_of(calls, self.options.rounds)
        times = [f"{1e3 * statistics.median(seconds[n]):.1f}" if n in seconds else "" for n in TIMES]
        faster = [b / a for a, b in zip(seconds["ours"], seconds["ddp"], strict=True)]
        sizes = [f"{self.options.width} x {self.options.layers}", f"{self.nbytes / 1e6:.1f}", f"{self.bucket_mb:g}"]
        cells = ["link" if self.link else "plain", str(self.ranks), *sizes, *times, _spread(faster, ".2f")]
        return [*cells, self._hidden("ours", seconds), self._hidden("ddp", seconds), f"{self._difference():.0e}"]

    def _hidden(self, name: str, seconds: dict[str, list[float]]) -> str:
        """Of the time of communication."""
        if not self.link:
            return ""
        rounds = zip(seconds[name], seconds["compute"], seconds["comm"], strict=True)
        return _spread([1 - (step - compute) / comm for step, compute, comm in rounds], ".0%")

    def _difference(self) -> float:
        """The largest of gradients of the two, relative to the largest entry of each. FailedError if it is no zero."""
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
    """The average of a bucket over gloo, done no sooner than the modelled link allows."""

    def __init__(self, link: Link) -> None:
        self.link, self.size = link, dist.get_world_size()
        self.waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._finish, daemon=True).start()

    def start(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer().div_(self.size)
        moment = self.link.reserve(2 * (self.size - 1), 2 * (self.size - 1) / self.size * buffer.nbytes)
        work = dist.all_reduce(buffer, async_op=True)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        self.waiting.put((work, moment, buffer, done))
        return done

    def _finish(self) -> None:
        while True:
            work, moment, buffer, done = self.waiting.get()
            work.wait()
            sleep_until(moment)
            done.set_result(buffer)


def _linked_sum(state: _LinkedSum, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook of DDP."""
    return state.start(bucket)


_linked_sum.__annotations__.clear()  # DDP wants types there, not their names


# ------------------------------------------------------------------------------------------------------------- tables

TIMES = ("compute", "comm", "ours", "ddp")
HEAD = [
    *("way", "ranks", "width x layers", "MB", "bucket MB", "compute", "comm", "ours", "DDP", "DDP / ours"),
    *("hidden, ours", "hidden, DDP", "difference"),
]


def _spread(found: Sequence[float], form: str) -> str:
    """Median, and the quartiles."""
    low, median, high = statistics.quantiles(found, n=4, method="inclusive") if len(found) > 1 else [found[0]] * 3
    return f"{median:{form}} ({low:{form}} to {high:{form}})"


def main() -> None:
    asked = _arguments()
    lines = [HEAD, *run_ranks(asked.ranks, run, asked)]
    print(f"{surroundings()}; milliseconds a step\n\n{columns(lines, asked.markdown)}")


def _arguments() -> argparse.Namespace:
    parser = command.Parser(__doc__, failed="a rank failed, or the gradients differ")
    whole, milliseconds = command.whole(1), command.number(0, "milliseconds")
    parser.add_argument("--ranks", type=command.whole(2, 64), default=2, help="number of processes (%(default)s)")
    parser.add_argument("--width", type=whole, default=512, help="columns of the residual stream (%(default)s)")
    parser.add_argument("--layers", type=whole, default=6, help="residual MLPs (%(default)s)")
    parser.add_argument("--rows", type=whole, default=64, help="of a rank's batch (%(default)s)")
    mb = command.number(0.001, "MiB")
    parser.add_argument("--bucket-mb", type=mb, nargs="+", default=[25.0], help="MiB of gradients at once (25)")
    parser.add_argument("--rounds", type=whole, default=15, help="repetitions (%(default)s)")
    parser.add_argument("--asleep", type=milliseconds, default=0.0, metavar="MS", help="sleep so long a layer instead")
    parser.add_argument("--markdown", action="store_true", help="print a table for docs/")
    return parser.parse_args()


if __name__ == "__main__":
    command.run(main)
