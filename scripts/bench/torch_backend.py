"""Compare torch.distributed over "pynccl" and over gloo on the CPU: collectives, send/recv, and training steps.

Every rank is a process with one torch thread and a process group of each backend. Each round runs a batch of calls, or
a step, of both backends, starting with a different one; the slowest rank counts. Figures are medians over rounds;
"gloo / pynccl" is the median of the ratios of each round. A step is forward, backward and SGD: DDP with an MLP, and
FSDP2 (fully_shard) with a small Llama, if transformers is installed. "memory" is the peak resident size of rank 0, in
a separate process for each backend, after all of these calls.

examples:
  python scripts/bench/torch_backend.py --rounds 3 --sizes 16
  python scripts/bench/torch_backend.py  # long
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from bench.ranks import columns, rounds_of, run_ranks, surroundings
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pynccl.torch_backend  # noqa: F401
from pynccl import progress
from pynccl.tools import command

BACKENDS = ("gloo", "pynccl")
HEAD = ["call", "bytes", *BACKENDS, "gloo / pynccl"]
BATCH_BYTES = 1 << 22  # bytes of the calls that are timed together, so that small calls are measurable
Call = Callable[[], Any]


def calls_of(group: Any, nbytes: int) -> dict[str, Call]:
    """Return the group's collectives on buffers of `nbytes`, and a send to the next rank."""
    rank, ranks = group.rank(), group.size()
    shard = torch.ones(max(nbytes // 4, 1))
    full = torch.ones(ranks * shard.numel())

    def ring() -> None:
        works = [
            dist.isend(shard, (rank + 1) % ranks, group),
            dist.irecv(full[: shard.numel()], (rank - 1) % ranks, group),
        ]
        for work in works:
            assert work is not None
            work.wait()

    return {
        "all_reduce": lambda: dist.all_reduce(shard, group=group),
        "all_reduce, async": lambda: dist.all_reduce(shard, group=group, async_op=True).wait(),
        "all_gather": lambda: dist.all_gather_into_tensor(full, shard, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(shard, full, group=group),
        "broadcast": lambda: dist.broadcast(shard, 0, group=group),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(full), full, group=group),
        "isend, irecv": ring,
    }


def steps_of(group: Any) -> dict[str, Call]:
    torch.manual_seed(0)
    mlp = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.ReLU())))
    found = {"DDP, MLP": _step(DistributedDataParallel(mlp, process_group=group), torch.randn(32, 256))}
    if importlib.util.find_spec("transformers"):
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes: dict[str, Any] = {
            "hidden_size": 128,
            "intermediate_size": 352,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
        llama = LlamaForCausalLM(LlamaConfig(vocab_size=512, num_hidden_layers=2, **sizes))
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in llama.model.layers:
            fully_shard(layer, mesh=mesh)
        words = torch.randint(512, (2, 64))
        fully_shard(llama, mesh=mesh)
        found["FSDP2, Llama"] = _step(llama, words, lambda out: out.logits)
    return found


def _step(model: nn.Module, x: torch.Tensor, result: Callable[[Any], torch.Tensor] = lambda out: out) -> Call:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step() -> None:
        optimizer.zero_grad()
        result(model(x)).square().mean().backward()
        optimizer.step()

    return step


# ------------------------------------------------------------------------------------------------------- on each rank


def run(rank: int, options: argparse.Namespace) -> list[list[str]]:
    """Return the rows of the table."""
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    rows = []
    for nbytes in progress.over(options.sizes, "measuring", "size", own=rank == 0):
        calls = {name: calls_of(group, nbytes) for name, group in groups.items()}
        batch = max(1, min(100, BATCH_BYTES // nbytes))
        for call in calls["gloo"]:
            rows.append([call, f"{nbytes:,}", *_row({name: calls[name][call] for name in BACKENDS}, options, batch)])
    steps = {name: steps_of(group) for name, group in groups.items()}
    for call in steps["gloo"]:
        rows.append([call, "", *_row({name: steps[name][call] for name in BACKENDS}, options, 3)])
    return rows


def _row(calls: dict[str, Call], options: argparse.Namespace, batch: int) -> list[str]:
    rounds_of(calls, 2, batch)
    seconds = rounds_of(calls, options.rounds, batch)
    ratios = [one / other for one, other in zip(seconds["gloo"], seconds["pynccl"], strict=True)]
    return [
        *(f"{1e6 * statistics.median(seconds[name]):,.1f}" for name in BACKENDS),
        f"{statistics.median(ratios):.2f}",
    ]


def memory(rank: int, options: argparse.Namespace, backend: str) -> int:
    """Return the peak resident size of this rank in KiB, after all calls of one backend."""
    group = dist.new_group(backend=backend)
    for nbytes in options.sizes:
        for call in calls_of(group, nbytes).values():
            for _ in range(5):
                call()
    for call in steps_of(group).values():
        for _ in range(5):
            call()
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def main() -> None:
    parser = command.Parser(__doc__, failed="a rank failed")
    parser.add_argument("--ranks", type=command.integer(2, 64), default=2, help="number of processes (%(default)s)")
    parser.add_argument("--sizes", type=command.integer(1), nargs="+", default=[16, 1 << 20, 1 << 24], help="bytes")
    parser.add_argument("--rounds", type=command.integer(1), default=15, help="repetitions (%(default)s)")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table for docs/")
    options = parser.parse_args()
    rows = run_ranks(options.ranks, run, copy.copy(options))
    peaks = [run_ranks(options.ranks, memory, options, name) / 1024 for name in BACKENDS]
    rows.append(["memory, MiB", "", *(f"{peak:,.0f}" for peak in peaks), f"{peaks[0] / peaks[1]:.2f}"])
    print(f"{surroundings()}; {options.ranks} ranks, microseconds\n\n{columns([HEAD, *rows], options.markdown)}")


if __name__ == "__main__":
    command.run(main)
