"""Steps with DataParallelGradients beside steps with torch's DistributedDataParallel: times, and what each hides.

Every rank is a process with one torch thread. A step is forward and backward of the same model, a stack of residual
MLPs, on the same data, in three ways: without any communication ("compute"), with DataParallelGradients ("ours"), with
DistributedDataParallel ("DDP"), both with buckets of --bucket-mb. In every round all of them make a step, one after the
other, beginning with another one each time, from a moment at which all ranks begin; the slowest rank counts. Before
that the gradients of both are compared. Figures are medians over rounds; "DDP / ours" is the median of the ratios of
each round, with their quartiles.

plain   ours over the host library (shared memory, or as PYNCCL_HOST_TRANSPORT says), DDP over gloo, both as they are.
link    both over the same modelled link, whose bandwidth makes communication --balance of a step that hides nothing:
        T_comm, the averages of all buckets alone, is --balance / (1 - --balance) of the time of "compute".
        Hidden is 1 - (T - T_compute) / T_comm.

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
  python scripts/bench/data_parallel.py --views --rounds 31 --json ddp.json --markdown  # long
  python scripts/bench/data_parallel.py --asleep 4 --width 256 --layers 12  # long
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from bench.ranks import columns, link_text, linked, measure, rounds_of, run_ranks, surroundings
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pynccl_autograd as ad
from pynccl import Communicator, progress
from pynccl.host.link import Link, parse, sleep_until
from pynccl.tools import command

WARM = 3  # rounds that are not counted: DDP cuts its buckets anew after the first step
Row = dict[str, Any]


class Options(NamedTuple):
    width: int
    layers: int
    rows: int
    bucket_mb: float
    rounds: int
    balance: float
    views: bool
    asleep: float = 0.0  # milliseconds


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


class AsleepBlock(nn.Module):
    """With as many parameters."""

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


def stack(options: Options) -> nn.Sequential:
    sleeps = options.asleep > 0
    width = options.width
    return nn.Sequential(
        *(AsleepBlock(width, options.asleep) if sleeps else Block(width) for _ in range(options.layers))
    )


# ------------------------------------------------------------------------------------------------------- on each rank


def run(rank: int, cases: Sequence[Options]) -> list[Row]:
    """What was measured of each case, equal on all ranks."""
    both = [(way, options) for options in cases for way in (_plain, _linked)]
    return [way(options) for way, options in progress.over(both, "measuring", "case", own=rank == 0)]


def _plain(options: Options) -> Row:
    with linked("cpu", "") as comm:
        ways = _Ways(options, comm, None)
        return {**_row(options, comm, "plain", ways), **ways.compared()}


def _linked(options: Options) -> Row:
    """Of a bandwidth at which communication takes its part. What the ranks themselves do for it comes on top."""
    with linked("cpu", "") as comm:
        ways = _Ways(options, comm, None)
        compute = statistics.median(measure("cpu", ways.compute) for _ in range(7))
        nbytes = sum(one.nbytes for one in ways.whole.parameters()) * 2 * (comm.size - 1) / comm.size
    wanted = compute * options.balance / (1 - options.balance)
    text = link_text(nbytes / wanted)
    with linked("cpu", text) as comm:
        ways = _Ways(options, comm, parse(text))
        return {**_row(options, comm, "link", ways), **ways.compared(), "link": text}


class _Ways:
    """The steps."""

    def __init__(self, options: Options, comm: Communicator, link: Link | None) -> None:
        torch.manual_seed(0)
        self.whole = stack(options)
        torch.manual_seed(1 + comm.rank)
        self.x = torch.randn(options.rows, options.width, requires_grad=options.asleep > 0)
        self.model = copy.deepcopy(self.whole)
        self.ours = ad.DataParallelGradients(
            self.model, comm, options.bucket_mb * 2**20, gradient_as_bucket_view=options.views
        )
        self.ddp = DistributedDataParallel(
            copy.deepcopy(self.whole), bucket_cap_mb=options.bucket_mb, gradient_as_bucket_view=options.views
        )
        if link is not None:
            self.ddp.register_comm_hook(_LinkedSum(link), _linked_sum)

    def steps(self) -> dict[str, Callable[[], None]]:
        return {
            "compute": self.compute,
            "ours": lambda: self._step(self.model, self.ours.zero_grad),
            "ddp": lambda: self._step(self.ddp, self.ddp.zero_grad),
        }

    def compute(self) -> None:
        self._step(self.whole, self.whole.zero_grad)

    def average(self) -> None:
        """The buckets alone."""
        self.ours.finish()

    def _step(self, model: nn.Module, zero_grad: Callable[[], None]) -> None:
        zero_grad()
        model(self.x).square().mean().backward()

    def compared(self) -> Row:
        """The largest difference of gradients of the two, relative to the largest entry of each."""
        for step in self.steps().values():
            step()
        differences = []
        for one, other in zip(self.model.parameters(), self.ddp.module.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            differences.append(((one.grad - other.grad).abs().max() / other.grad.abs().max()).item())
        return {"difference": max(differences)}


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


def _row(options: Options, comm: Communicator, kind: str, ways: _Ways) -> Row:
    calls = ways.steps()
    if kind == "link":
        calls["comm"] = ways.average
    rounds_of("cpu", calls, WARM)
    seconds = rounds_of("cpu", calls, options.rounds)
    row: Row = {
        "kind": kind,
        "ranks": comm.size,
        **options._asdict(),
        "bytes": sum(one.nbytes for one in ways.whole.parameters()),
        "seconds": {name: statistics.median(found) for name, found in seconds.items()},
        "ddp / ours": _spread([b / a for a, b in zip(seconds["ours"], seconds["ddp"], strict=True)]),
    }
    if kind == "link":
        for name in ("ours", "ddp"):
            rounds = zip(seconds[name], seconds["compute"], seconds["comm"], strict=True)
            row[f"hidden, {name}"] = _spread([1 - (step - compute) / sum_ for step, compute, sum_ in rounds])
    return row


def _spread(found: Sequence[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    if len(found) < 2:
        return [found[0]] * 3
    return statistics.quantiles(found, n=4, method="inclusive")


# ------------------------------------------------------------------------------------------------------------- tables


def table(found: Row, markdown: bool) -> str:
    head = [
        "way", "ranks", "width x layers", "MB", "bucket MB", "compute", "comm", "ours", "DDP", "DDP / ours",
        "hidden, ours", "hidden, DDP", "difference",
    ]  # fmt: skip
    lines = [head, *(_cells(row) for row in found["rows"])]
    machine, versions = found["machine"], found["versions"]
    where = f"{machine['cores']} cores, {machine['cpu']}, load {machine['load']}, torch {versions['torch']}"
    return f"{where}, {found['date']}; milliseconds a step\n\n{columns(lines, markdown)}"


def _cells(row: Row) -> list[str]:
    def share(name: str) -> str:
        return "" if name not in row else "{1:.0%} ({0:.0%} to {2:.0%})".format(*row[name])

    seconds = row["seconds"]
    times = [f"{1e3 * seconds[name]:.1f}" if name in seconds else "" for name in ("compute", "comm", "ours", "ddp")]
    return [
        row["kind"],
        str(row["ranks"]),
        f"{row['width']} x {row['layers']}",
        f"{row['bytes'] / 1e6:.1f}",
        f"{row['bucket_mb']:g}",
        *times,
        "{1:.2f} ({0:.2f} to {2:.2f})".format(*row["ddp / ours"]),
        share("hidden, ours"),
        share("hidden, ddp"),
        f"{row['difference']:.0e}",
    ]


def main() -> None:
    asked = _arguments()
    rest = (asked.rounds, asked.balance, asked.views, asked.asleep)
    sizes = itertools.product(asked.width, asked.bucket_mb)
    cases = [Options(width, asked.layers, asked.rows, bucket_mb, *rest) for width, bucket_mb in sizes]
    found: Row = {**surroundings(), "rows": run_ranks(asked.ranks, "cpu", run, cases)[0]}
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found, asked.markdown))


def _arguments() -> argparse.Namespace:
    parser = command.Parser(__doc__, failed="a rank failed, or the gradients differ")
    parser.add_argument("--ranks", type=command.whole(2, 64), default=2, help="number of processes (default 2)")
    parser.add_argument(
        "--width", type=command.whole(1), nargs="+", default=[512], help="columns of the residual stream"
    )
    parser.add_argument("--layers", type=command.whole(1), default=6, help="residual MLPs (default 6)")
    parser.add_argument("--rows", type=command.whole(1), default=64, help="of a rank's batch")
    parser.add_argument(
        "--bucket-mb", type=float, nargs="+", default=[25.0], help="MiB of gradients that travel at once"
    )
    parser.add_argument("--rounds", type=command.whole(1), default=15, help="repetitions (default 15)")
    parser.add_argument("--balance", type=float, default=0.4, help="part of an unhidden step that is communication")
    parser.add_argument("--views", action="store_true", help="gradient_as_bucket_view=True, of both")
    parser.add_argument(
        "--asleep",
        type=command.number(0, "milliseconds"),
        default=0.0,
        metavar="MS",
        help="sleep so long a layer, for its matmuls",
    )
    parser.add_argument("--json", type=command.output_file, metavar="FILE", help="write all that was measured")
    parser.add_argument("--markdown", action="store_true", help="print a table for docs/")
    asked = parser.parse_args()
    if not 0 < asked.balance < 1:
        parser.error(f"--balance is {asked.balance:g}, expected a number between 0 and 1")
    if not 0 < min(asked.bucket_mb) <= max(asked.bucket_mb) < float("inf"):
        parser.error(f"--bucket-mb is {min(asked.bucket_mb):g}, expected MiB above 0")
    return asked


if __name__ == "__main__":
    command.run(main)
