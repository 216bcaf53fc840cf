"""Train a small byte-level transformer, tensor and sequence parallel over all ranks of a torchrun launch.

It writes OUT/loss.png and OUT/checkpoint.pt, the state dict of the unsharded model. --device cuda:0 lets all ranks
share one GPU. --model llama trains a small Llama of Hugging Face's library, made parallel by `ad.parallelize`; it needs
the extra hf and downloads nothing. The model and the text are in train_model.py.

examples:
  torchrun --standalone --nproc-per-node=2 scripts/train.py --check --steps 10  # beside the unsharded model
  torchrun --standalone --nproc-per-node=2 scripts/train.py --model llama --check --steps 10
  torchrun --standalone --nproc-per-node=2 scripts/train.py --device cpu --steps 10 --out out/cpu
  torchrun --standalone --nproc-per-node=2 scripts/train.py --overlap off --steps 10  # nothing hides communication
  torchrun --standalone --nproc-per-node=2 scripts/train.py --steps 5 --trace out/trace.json.gz  # what ran when
  torchrun --standalone --nproc-per-node=2 scripts/train.py                     # long: a GPU per rank, else the CPU
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which Python leaves out with PYTHONSAFEPATH
from train_model import Batch, ModelConfig, Transformer, Windows, llama, read_text

import pynccl
import pynccl_autograd as ad
from pynccl.bindings.library import gpu_count, gpu_problem
from pynccl.progress import Bar
from pynccl.tools import command

VALIDATION_BATCHES, TRACED_STEPS = 8, 3
COMPARED_STEPS = 50
# Largest relative difference of the two losses within COMPARED_STEPS. Only the order of summation differs, but training
# amplifies rounding errors from step to step, which is also why later steps are shown and not judged.
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 1e-2}


def read_options(doc: str | None = None) -> argparse.Namespace:
    """The command line, with the model's sizes and the text read; ends the process (2) if it cannot work, in the same
    words on every rank."""
    parser = command.Parser(doc, failed="a rank failed, or --check found a difference")
    whole, sizes = command.whole(1), ModelConfig()
    add = parser.add_argument
    add("--model", choices=("transformer", "llama"), default="transformer", help="(%(default)s)")
    add("--steps", type=whole, default=100, help="steps of the optimizer (%(default)s)")
    add("--device", help="cpu, cuda (a GPU per rank), cuda:0 (shared by all ranks); default: what is there")
    add("--dtype", choices=list(TOLERANCE), default="float32", help="of the weights (%(default)s)")
    add("--layers", type=whole, default=sizes.layers, help="blocks (%(default)s)")
    add("--width", type=whole, default=sizes.width, help="columns of the residual stream (%(default)s)")
    add("--heads", type=whole, default=sizes.heads, help="of attention (%(default)s)")
    add("--seq", type=whole, default=sizes.seq, help="bytes in a window (%(default)s)")
    add("--batch", type=whole, default=8, help="windows in a step (%(default)s)")
    add("--lr", type=command.number(1e-9), default=1e-3, help="learning rate of AdamW (%(default)s)")
    add("--out", default="out", help="folder for what it writes (%(default)s)")
    overlap = "hide communication behind matmuls: auto, where it pays, or off (%(default)s)"
    add("--overlap", choices=("auto", "off"), default="auto", help=overlap)
    add("--check", action="store_true", help="train the unsharded model, too, and compare the losses")
    trace = "write what all ranks compute and communicate in steps 2 to 4 to FILE (.json, .json.gz); docs/trace.md"
    add("--trace", type=command.output_file, metavar="FILE", help=trace)
    options = parser.parse_args()
    options.config = ModelConfig(options.layers, options.width, options.heads, options.seq)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if problem := options.config.problem(ranks) or device_problem(options.device):
        parser.error(problem)
    if options.model == "llama" and importlib.util.find_spec("transformers") is None:
        parser.error('transformers is not installed: pip install -e ".[hf]"')
    try:
        options.learn_from, options.validate_on = read_text(options.seq)
        options.out = command.output_file(f"{options.out}/checkpoint.pt").parent  # made once nothing else is wrong
    except (ValueError, argparse.ArgumentTypeError) as error:
        parser.error(str(error))
    return options


def device_problem(device: str | None) -> str:
    """Why --device cannot be used here; "" if it can."""
    kind, _, index = (device or "cpu").partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()) or (kind == "cpu" and index):
        return f"--device is {device!r}, expected cpu, cuda, or cuda:0"
    if kind == "cuda" and gpu_problem():
        return f"--device is {device}, but: {gpu_problem()}; use --device cpu"
    if index and int(index) >= gpu_count():
        return f"--device is {device}, but this machine has {gpu_count()} GPUs, numbered from 0"
    return ""


def main() -> int:
    options = read_options(__doc__)
    with join_ranks(options.device) as comm:  # destroyed at the end; aborted on an exception, so that no rank hangs
        return train(options, comm)


def train(options: argparse.Namespace, comm: pynccl.Communicator) -> int:
    synchronize(comm.device)
    windows = Windows(options.learn_from, options.seq, options.batch, comm.device)
    model, unsharded = build(options, comm)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    unsharded_optimizer = torch.optim.AdamW(unsharded.parameters(), lr=options.lr)
    first, compare = comm.rank == 0, options.check and comm.rank == 0
    if first:
        print(describe(model, comm, options), flush=True)
    losses, seconds = Losses(options), list[float]()
    trace = ad.trace(options.trace, comm, model=model) if options.trace else None
    traced = range(min(1, options.steps - 1), options.steps)[:TRACED_STEPS]  # the first step warms up
    with Bar(options.steps, "training", "step", own=first) as bar, contextlib.ExitStack() as tracing:
        for number in range(options.steps):
            batch = windows.next()
            if trace and number == traced[0]:
                tracing.enter_context(trace)
            started = time.perf_counter()
            with trace.span(f"step {number + 1}") if trace and number in traced else contextlib.nullcontext():
                losses.sharded.append(train_step(model, optimizer, batch))
            seconds.append(time.perf_counter() - started)
            if number == traced[-1]:
                tracing.close()  # writes the trace
            if compare:
                losses.unsharded.append(train_step(unsharded, unsharded_optimizer, batch))
                bar.line(losses.row())
            if options.check:
                comm.barrier()  # the others wait for rank 0 here and not in the next step, whose time is measured
            bar.step(note=f"loss {losses.sharded[-1]:.3f}, {batch.tokens.numel() / seconds[-1]:,.0f} tokens/s")

    held_out = evaluate(model, options, comm.device)
    state = ad.full_state_dict(model, comm)  # every rank must call it; rank 0 gets it
    if not first:
        return 0
    print(summary(options, losses, held_out, seconds))
    if trace:
        print(trace_summary(trace))
    print(save_checkpoint(options.out / "checkpoint.pt", state, options.config, held_out))
    print(losses.plot(options.out / "loss.png", comm.size))
    if options.check:
        print(losses.verdict(), flush=True)
    return 0 if not options.check or losses.agree() else 1


def build(options: argparse.Namespace, comm: pynccl.Communicator) -> tuple[Any, Any]:
    """(this rank's part of the model, the unsharded model) with equal weights.

    Every rank draws the unsharded model from the same seed and keeps its part.
    """
    torch.manual_seed(0)
    whole = llama(options.config) if options.model == "llama" else Transformer(options.config)
    whole = whole.to(comm.device, getattr(torch, options.dtype))
    own: Any = copy.deepcopy(whole)
    if options.model == "llama":
        return ad.parallelize(own, comm, ad.plans.llama, gather_logits=False, overlap=options.overlap), whole
    return own.shard(comm, options.overlap), whole


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """One step of the optimizer, of the sharded or of the unsharded model; returns the loss over the whole batch."""
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    ad.finish_gradients(model)  # sums those to which each rank adds the part of its positions
    ad.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.item())  # also waits for the GPU, so that the time of a step is its own


def loss_of(model: Any, batch: Batch) -> Tensor:
    """The mean over the whole batch, the same on every rank."""
    if isinstance(model, Transformer):
        return model(*batch)
    ids = batch.tokens.t().contiguous()  # transformers has the batch first, and shifts the labels itself
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


@torch.no_grad()
def evaluate(model: torch.nn.Module, options: argparse.Namespace, device: str) -> float:
    """The mean loss over a few windows of text that was held out."""
    windows = Windows(options.validate_on, options.seq, options.batch, device)
    return sum(loss_of(model, windows.next()).item() for _ in range(VALIDATION_BATCHES)) / VALIDATION_BATCHES


# --------------------------------------------------------------------------------------------------- what it prints


class Losses:
    """The losses of the sharded model, and of the unsharded one if it is trained beside it, step by step."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.sharded: list[float] = []
        self.unsharded: list[float] = []
        self.every, self.tolerance = max(1, options.steps // 10), TOLERANCE[options.dtype]

    def differences(self) -> list[float]:
        """|sharded - unsharded| / |unsharded| of each step; NaN counts as infinite."""
        values = [abs(a - b) / abs(b) for a, b in zip(self.sharded, self.unsharded, strict=True)]
        return [value if value == value else float("inf") for value in values]

    def row(self) -> str:
        """The last step as a line of the table; "" where none is due."""
        step = len(self.sharded)
        if step % self.every and step != 1:
            return ""
        row = f"{step:8d} {self.sharded[-1]:12.6f} {self.unsharded[-1]:12.6f} {self.differences()[-1]:12.1e}"
        return f"    step      sharded    unsharded   difference\n{row}" if step == 1 else row

    def agree(self) -> bool:
        return max(self.differences()[:COMPARED_STEPS]) < self.tolerance

    def verdict(self) -> str:
        judged, rest = self.differences()[:COMPARED_STEPS], self.differences()[COMPARED_STEPS:]
        found = f"largest relative difference in {len(judged)} steps {max(judged):.1e}, limit {self.tolerance:.0e}"
        later = f" (later steps: {max(rest):.1e})" if rest else ""
        says = ": the sharded and the unsharded model agree" if self.agree() else " FAILED: the two models differ"
        return f"check{says}: {found}{later}"

    def plot(self, path: Path, ranks: int) -> str:
        """Draw the loss curves; returns what was done, in words."""
        try:
            from matplotlib.figure import Figure  # no display is needed
        except ImportError:
            return "no loss curve: matplotlib is not installed (pip install matplotlib)"
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes, steps = figure.subplots(), range(1, len(self.sharded) + 1)
        if self.unsharded:  # thick and pale below, since the two curves are meant to lie on each other
            axes.plot(steps, self.unsharded, color="#f2b134", linewidth=6, label="unsharded model")
        label, marker = f"sharded over {ranks} rank{'s' if ranks > 1 else ''}", "o" if len(steps) == 1 else ""
        axes.plot(steps, self.sharded, color="#1b4f8f", linewidth=1.8, marker=marker, label=label)
        axes.set(xlabel="step", ylabel="loss (nats per byte)")
        axes.legend()
        axes.grid(alpha=0.3)
        figure.savefig(path, dpi=120)
        return f"wrote {path}"


def describe(model: torch.nn.Module, comm: pynccl.Communicator, options: argparse.Namespace) -> str:
    count = sum(parameter.numel() for parameter in model.parameters())
    version = ".".join(map(str, comm.library.version))
    name = "host library" if comm.library.is_host else f"NCCL {version} from {comm.library.path}"
    ranks = f"{comm.size} rank{'s' if comm.size > 1 else ''}"
    return f"{ranks} on {comm.device} over the {name}; {count:,} parameters on rank 0, {options.dtype}"


def summary(options: argparse.Namespace, losses: Losses, held_out: float, seconds: list[float]) -> str:
    counted = seconds[1:] or seconds  # the first one warms up
    tokens_per_second = options.seq * options.batch * len(counted) / sum(counted)
    found = f"loss {losses.sharded[-1]:.4f} after {options.steps} steps, {held_out:.4f} on held-out text"
    return f"{found}; {tokens_per_second:,.0f} tokens/s"


def trace_summary(trace: Any) -> str:
    rows = list(trace.summary.values())
    columns = ("block_ms", "communication_ms", "exposed_ms")
    block, communication, exposed = (sum(row[name] for row in rows) / len(rows) for name in columns)
    return (
        f"wrote {trace.path}: {len(rows)} rank{'s' if len(rows) > 1 else ''}, {block:.1f} ms, of which "
        f"{communication:.1f} ms with communication, {exposed:.1f} ms of it exposed (means over ranks); "
        "open it at ui.perfetto.dev"
    )


def save_checkpoint(path: Path, state: dict[str, Any], config: ModelConfig, held_out: float) -> str:
    """Write an unsharded model and its sizes. A broken-off write leaves the old file."""
    part = path.with_name(path.name + ".part")
    torch.save({"model": state, "config": dataclasses.asdict(config), "validation_loss": held_out}, part)
    os.replace(part, path)
    return f"wrote {path}"


# ------------------------------------------------------------------------------------------------------- the launch


def synchronize(device: str) -> None:
    """Give this rank its part of the machine."""
    if device == "cpu":
        neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // neighbours))
    else:
        torch.cuda.set_device(device)


def join_ranks(device: str | None) -> pynccl.Communicator:
    """The communicator of the launch, on what --device says."""
    if device == "cpu":
        return pynccl.init(library=pynccl.load("host"))
    if device is None or device == "cuda":
        return pynccl.init()
    # A GPU named by its number is every rank's. NCCL refuses two ranks of one host on one GPU unless it is told so
    # (2.30 and later) or takes them for ranks of different hosts.
    os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    os.environ.setdefault("NCCL_HOSTID", f"rank{os.environ.get('RANK', '0')}")
    return pynccl.init(device=device)


if __name__ == "__main__":
    command.run(main)
