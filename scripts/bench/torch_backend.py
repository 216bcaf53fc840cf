"""Compare torch.distributed over "pynccl" with what it replaces: gloo on the CPU, torch's NCCL backend on a GPU.

Each round measures a row with both backends in the same processes, starting with a different one; the slowest rank
counts. Times are medians over the rounds. "ratio" is the median of each round's time of pynccl over the other's, so
above 1 pynccl is slower. Its 95% interval, two of these ratios in order, holds for any distribution and needs 6 rounds.
A row whose whole interval is above 1 is marked; of rows that are equally fast about one in 40 is. Sections:

  collectives  each call, with async_op and wait(), and with get_future().wait()
  messages     send and recv in several patterns, back to back, and one at a time from an agreed start
  small        barrier, objects
  steps        training steps: DDP with small buckets and with an MLP, FSDP2 with a Llama if transformers is installed
  groups       making, using first and destroying process groups
  start        init over TCP, new groups, destroy, in fresh processes, after their imports
  binding      methods of pynccl.Communicator, compared with torch.distributed over the other backend
  memory       peak resident size of rank 0 after these calls, in a separate process for each backend

On a GPU the times are the host's: it does not wait for the GPU. Ranks share it if there are fewer GPUs than ranks.

examples:
  python scripts/bench/torch_backend.py --rounds 1 --sizes 16 --only collectives steps memory
  python scripts/bench/torch_backend.py --only messages --busy 2  # long
  python scripts/bench/torch_backend.py --device cuda --ranks 1  # long; needs a GPU
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from bench.ranks import busy, columns, fork_ranks, interval, prepare, rounds_of, run_ranks, surroundings
from bench.rows import GROUPS, OURS, SECTIONS, Call, Side

from pynccl import progress
from pynccl.tools import command

THEIRS = {"cpu": "gloo", "cuda": "nccl"}
BATCH_BYTES = 1 << 22  # bytes of the calls that are timed together, so that small calls are measurable
WARM = 2  # rounds
REFUSALS = ("not support", "not implemented")  # in the error of a call that the other backend does not have


class Row(NamedTuple):
    """Both sides' seconds or MiB, one for each round; none if the other backend does not have the call."""

    name: str
    nbytes: int
    theirs: Sequence[float] = ()
    ours: Sequence[float] = ()

    @property
    def ratio(self) -> tuple[float, float, float]:
        """Our time over theirs: the median, and the bounds of its interval."""
        ratios = [our / their for our, their in zip(self.ours, self.theirs, strict=True)]
        return (statistics.median(ratios), *interval(ratios)) if ratios else (0.0, 0.0, math.inf)

    @property
    def is_slower(self) -> bool:
        return self.ratio[1] > 1

    def cells(self, scale: float = 1e6) -> list[str]:
        names = [self.name, f"{self.nbytes:,}" if self.nbytes else ""]
        if not self.ours:
            return [*names, "none", *[""] * 4]
        times = [f"{scale * statistics.median(values):,.1f}" for values in (self.theirs, self.ours)]
        ratio, low, high = self.ratio
        return [*names, *times, f"{ratio:.2f}", f"{low:.2f} to {high:.2f}", "slower" if self.is_slower else ""]


def summary(rows: Sequence[Row]) -> str:
    """Return the last line."""
    worst = max(rows, key=lambda row: row.ratio)
    size = f", {worst.nbytes:,} bytes" if worst.nbytes else ""
    count = f"{sum(row.is_slower for row in rows)} of {len(rows)} rows are slower"
    return f"slowest: {worst.name}{size} {worst.ratio[0]:.2f}; {count}"


# ------------------------------------------------------------------------------------------------------- on each rank


def measured(rank: int, name: str, options: argparse.Namespace) -> list[Row]:
    """Return the rows of a section."""
    section, rows = SECTIONS[name], []
    sides = [side_of(backend, options) for backend in (THEIRS[options.device], OURS)]
    for nbytes in progress.over([0] if section.batch else options.sizes, "measuring", "size", own=rank == 0):
        batch = section.batch or min(max(BATCH_BYTES // nbytes, 3), 100)
        theirs, ours = (section.build(side, nbytes) for side in sides)
        for call in ours:
            calls, is_offered = {"theirs": theirs[call], "ours": ours[call]}, offers(theirs[call])
            for words, timer in section.timers:
                times: dict[str, list[float]] = {}
                if is_offered:
                    rounds_of(calls, min(WARM, batch), batch, timer)
                    times = rounds_of(calls, options.rounds, batch, timer)
                rows.append(Row(call + words, nbytes, **times))
    return rows


def side_of(backend: str, options: argparse.Namespace) -> Side:
    return Side(backend, dist.new_group(backend=backend), torch.empty(0, device=options.device).device)


def offers(call: Call) -> bool:
    """Return whether the backend has this call, by making it."""
    try:
        call()
    except RuntimeError as error:
        if any(words in str(error) for words in REFUSALS):
            return False
        raise
    return True


def memory(rank: int, backend: str, options: argparse.Namespace) -> float:
    """Return the peak resident size of this rank in MiB, after all calls of one backend."""
    side = side_of(backend, options)
    for name in ("collectives", "messages", "small", "steps"):
        for nbytes in [0] if SECTIONS[name].batch else options.sizes:
            for call in SECTIONS[name].build(side, nbytes).values():
                for _ in range(5 if offers(call) else 0):
                    call()
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def started(backend: str, groups: int, splits: bool, options: argparse.Namespace) -> float:
    """Return the seconds of init, making groups and destroy in fresh processes; called outside of them."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    barrier, begins, ends = context.Barrier(options.ranks), *(context.RawArray("d", options.ranks) for _ in range(2))

    def on_rank(rank: int) -> None:
        device = prepare(rank, options.ranks, options.device)
        torch.zeros(1, device=device)
        own: dict[str, Any] = {"rank": rank, "world_size": options.ranks, "device_id": device if splits else None}
        barrier.wait()
        begins[rank] = time.perf_counter()
        dist.init_process_group(backend, init_method=address, **own)
        for _ in range(groups):
            _ = dist.split_group(split_ranks=[[*range(options.ranks)]]) if splits else dist.new_group()
        dist.destroy_process_group()
        ends[rank] = time.perf_counter()

    fork_ranks(options.ranks, on_rank)
    return max(ends) - max(begins)


# --------------------------------------------------------------------------------------------------------- the command


def rows_of(section: str, options: argparse.Namespace) -> list[Row]:
    sides, rows = {"theirs": THEIRS[options.device], "ours": OURS}, []
    if section == "memory":
        peaks = [[run_ranks(options.ranks, memory, name, options, device=options.device)] for name in sides.values()]
        rows = [Row("memory, MiB", 0, *peaks)]
    elif section == "start":  # torch splits groups on a GPU only
        for splits in [False, True] if options.device == "cuda" else [False]:
            for count in GROUPS:
                calls = {side: partial(started, name, count, splits, options) for side, name in sides.items()}
                times = rounds_of(calls, options.rounds, timer=lambda call, _: call())
                rows.append(Row(f"init, {count} {'split' if splits else 'new'}_group, destroy", 0, **times))
    else:
        rows = run_ranks(options.ranks, measured, section, options, device=options.device)
    return rows


def options_of() -> argparse.Namespace:
    names, sizes = [*SECTIONS, "start", "memory"], [16, 1 << 12, 1 << 16, 1 << 20, 1 << 24]
    parser = command.Parser(__doc__, failed="a rank failed")
    parser.add_argument("--device", choices=THEIRS, default="cpu", help="cpu: beside gloo; cuda: beside nccl")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="SECTION", help="some sections")
    parser.add_argument("--ranks", type=command.integer(1, 64), default=2, help="number of processes (%(default)s)")
    parser.add_argument("--sizes", type=command.integer(1), nargs="+", default=sizes, help="bytes")
    parser.add_argument("--rounds", type=command.integer(1), default=15, help="repetitions (%(default)s)")
    parser.add_argument("--busy", type=command.integer(0), default=0, metavar="N", help="N busy processes run, too")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables for docs/")
    options = parser.parse_args()
    if options.device == "cpu" and options.ranks == 1:
        parser.error("--ranks 1: gloo and pynccl have nothing to do; use 2 or more, or --device cuda")
    if options.device == "cuda" and not (torch.cuda.device_count() and dist.is_nccl_available()):
        parser.error(f"--device cuda: torch {torch.__version__} finds no GPU or has no NCCL; use --device cpu")
    return options


def main() -> None:
    options = options_of()
    head, rows = ["bytes", THEIRS[options.device], OURS, "ratio", "95% interval", ""], []
    print(f"{surroundings(options.device, options.ranks)}; {options.ranks} ranks, microseconds")
    with busy(options.busy):
        for section in options.only:
            found = rows_of(section, options)
            lines = [[section, *head], *(row.cells(1.0 if section == "memory" else 1e6) for row in found)]
            print(f"\n{columns(lines, options.markdown)}", flush=True)
            rows += found
    if rows:  # one rank has no messages
        print(f"\n{summary(rows)}")


if __name__ == "__main__":
    command.run(main)
