"""How much of its communication a tensor-parallel layer hides behind its matmuls, pass by pass, and beside DTensor.

Every rank is a process with one torch thread. For each pass of a layer, all of these are measured in every round, one
after the other, beginning with another one each time, from a moment at which all ranks begin; the slowest rank counts:

    T_comm, T_mm   its collectives and its matmuls, each alone and uncut, by the layer's own code
    T_seq          both on one stream, uncut, by the layer's own code
    off            both by overlap="off", which is a matmul and a collective without any of that code
    T              overlapped: as the planner decides ("auto"), and in the ways that --methods and --chunks name
    one stream     the schedule of "auto" (if that is none of slices, of the first of --chunks) on one stream
    apart          the same with its streams and events, but sums wait for the last matmul, matmuls for all gathers
    torch          the same layer of torch.distributed's functional collectives, one after the other, over gloo

efficiency is (T_seq - T) / min(T_comm, T_mm), the median of that of each round; times are medians over rounds. exposed
is T - T_mm; tax what cutting costs the matmuls, T_mm(k) - T_mm; "model" the efficiency that the planner's simulation
of the schedule comes to with T_comm and T_mm as measured and slices that cost nothing: what the schedule allows. Of
both controls the efficiency has to be about 0. All ways are compared with each other before they are timed.
column_backward_regather gathers x once more for the weight's gradient, which the rows "off" and "torch" do not: they
have kept it, and move half as much.

On a CPU communication takes the time of a modelled link (PYNCCL_HOST_LINK), whose bandwidth is chosen for each pass
such that T_comm is --balance times T_mm. torch's collectives run over gloo; "torch, link" and "DTensor, link" give each
the same modelled time: it is reserved on a FIFO link when the collective is launched, and whoever waits for it sleeps
until that is over, if gloo was faster. The rows without "link" are plain gloo. On GPUs nothing is modelled, torch's
collectives are NCCL's, and times are those of CUDA events on the caller's stream.

The MLP is two linear layers without biases and a ReLU, forward and backward, with its input and output cut by rows;
DTensor's has the same weights (ColwiseParallel, RowwiseParallel with Shard(0)). Small shapes are those of which nothing
can be hidden: "auto" has to decline, and to cost nothing; on a CPU without a modelled link, where that shows most.

examples:
  python scripts/bench_overlap.py --pattern small --tokens 64 --width 64 --hidden 128 --rounds 3
  python scripts/bench_overlap.py --json out/overlap.json --markdown  # long
  python scripts/bench_overlap.py --ranks 4 --chunks 2 4 8 --methods slices exchange --check  # long
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench_overlap_cases import BY_NAME
from bench_overlap_ranks import run_ranks
from bench_overlap_report import bounds, markdown, surroundings, table
from bench_overlap_run import MLP, SMALL, Options, run

from pynccl.bindings.library import gpu_count
from pynccl.host.link import parse
from pynccl.tools import command

METHODS = ("slices", "exchange", "ring", "bulk")
SECTIONS = (*BY_NAME, MLP, SMALL)
_SECTIONS = f"all of {', '.join(SECTIONS)} unless named"


def main() -> int:
    asked = _arguments()
    options = Options(
        ranks=asked.ranks,
        device=asked.device,
        sections=tuple(asked.pattern),
        chunks=tuple(asked.chunks),
        methods=tuple(asked.methods),
        rounds=asked.rounds,
        tokens=asked.tokens,
        width=asked.width,
        hidden=asked.hidden,
        milliseconds=asked.milliseconds,
        balance=asked.balance,
        link=asked.link,
    )
    found = run_ranks(options.ranks, options.device, run, options)[0]
    found = {"ranks": options.ranks, "device": options.device, **surroundings(), **found}
    found["bounds"] = bounds(found)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    print(markdown(found) if asked.markdown else table(found))
    return 1 if asked.check and not all(bound["pass"] for bound in found["bounds"]) else 0


def _arguments() -> argparse.Namespace:
    parser = command.Parser(__doc__, failed="a rank failed, or with --check a bound is not met")
    parser.add_argument("--ranks", type=command.whole(2, 64), default=2, help="number of processes (default 2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default cpu")
    parser.add_argument(
        "--pattern", nargs="+", choices=SECTIONS, default=SECTIONS, metavar="NAME", help=", ".join(SECTIONS)
    )
    parser.add_argument(
        "--chunks", type=command.whole(1), nargs="+", default=[4, 8], help="of slices and exchange (default 4 8)"
    )
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=["slices"], help="beside auto (default slices)"
    )
    parser.add_argument("--rounds", type=command.whole(1), default=9, help="repetitions of everything (default 9)")
    parser.add_argument(
        "--milliseconds",
        type=command.number(0.1, "milliseconds"),
        default=40.0,
        help="of one forward matmul (default 40)",
    )
    parser.add_argument("--tokens", type=command.whole(1), help="rows of all ranks, in place of --milliseconds")
    parser.add_argument("--width", type=command.whole(1), default=512, help="features of what travels (default 512)")
    parser.add_argument(
        "--hidden", type=command.whole(1), default=2048, help="features between the layers (default 2048)"
    )
    parser.add_argument(
        "--balance", type=command.number(0.01), default=1.0, help="T_comm / T_mm of the modelled link (default 1)"
    )
    parser.add_argument("--link", help="a modelled link for all, as PYNCCL_HOST_LINK, in place of --balance")
    parser.add_argument("--json", type=command.output_file, metavar="FILE", help="write all that was measured")
    parser.add_argument("--markdown", action="store_true", help="print tables for docs/")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a bound is not met")
    asked = parser.parse_args()
    if problem := _problem(asked):
        parser.error(problem)
    return asked


def _problem(asked: argparse.Namespace) -> str:
    """What is wrong with the options; "" if nothing is."""
    if asked.device == "cuda" and gpu_count() < asked.ranks:
        return f"--device is cuda, but there are {gpu_count()} GPUs for {asked.ranks} ranks; use --device cpu"
    if asked.hidden % asked.ranks:
        return f"--hidden is {asked.hidden}, not divisible by {asked.ranks} ranks"
    if asked.tokens is not None and (asked.tokens < asked.ranks or asked.tokens % asked.ranks):
        return f"--tokens is {asked.tokens}, expected a multiple of {asked.ranks} ranks"
    if asked.link is not None and asked.device == "cuda":
        return "--link is modelled on the CPU alone; leave it out with --device cuda"
    if asked.link is not None:
        try:
            if parse(asked.link) is None:
                return "--link is empty; leave it out to have one chosen"
        except Exception as error:  # of the C library's kind, whose text says what is wrong
            return f"--link: {error}"
    return ""


if __name__ == "__main__":
    command.run(main)
