"""Train a small byte-level transformer with tensor and sequence parallelism over all ranks of a torchrun launch.

Writes OUT/loss.png and OUT/checkpoint.pt, the state dict of the unsharded model. --device cuda:0 lets all ranks share
one GPU. --model llama trains a small Llama from Hugging Face transformers, parallelized by `ad.parallelize`; it needs
the extra hf and downloads nothing. The model and the training text are in train_model.py.

examples:
  torchrun --standalone --nproc-per-node=2 scripts/train.py --check --steps 10  # compare with the unsharded model
  torchrun --standalone --nproc-per-node=2 scripts/train.py --model llama --check --steps 10
  torchrun --standalone --nproc-per-node=2 scripts/train.py --device cpu --steps 10 --out out/cpu
  torchrun --standalone --nproc-per-node=2 scripts/train.py --overlap off --steps 10  # expose communication
  torchrun --standalone --nproc-per-node=2 scripts/train.py --steps 5 --trace out/trace.json.gz  # record a trace
  torchrun --standalone --nproc-per-node=2 scripts/train.py                     # long: one GPU per rank, else the CPU
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

sys.path.insert(0, str(Path(__file__).resolve().parent))  # Python omits it with PYTHONSAFEPATH
from train_model import Batch, ModelConfig, Transformer, Windows, llama, read_text

import pynccl
import pynccl_autograd as ad
from pynccl.bindings.library import gpu_count, gpu_problem
from pynccl.bindings.values import counted
from pynccl.progress import Bar
from pynccl.tools import command

VALIDATION_BATCHES, TRACED_STEPS = 8, 3
COMPARED_STEPS = 50
# Largest allowed relative difference of the two losses within COMPARED_STEPS. Only the order of summation differs, but
# training amplifies rounding errors at every step, so later steps are printed and not checked.
TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 1e-2}


def read_options(doc: str | None = None) -> argparse.Namespace:
    """Parse the command line, check the model's sizes and read the text. Invalid options exit with code 2 and the same
    message on every rank."""
    parser = command.Parser(doc, failed="a rank failed, or --check found a difference")
    positive, sizes = command.integer(1), ModelConfig()
    add = parser.add_argument
    add("--model", choices=("transformer", "llama"), default="transformer", help="model to train (%(default)s)")
    add("--steps", type=positive, default=100, help="optimizer steps (%(default)s)")
    add("--device", help="cpu, cuda (a GPU per rank) or cuda:0 (shared by all ranks); default: GPUs if there are any")
    add("--dtype", choices=list(TOLERANCE), default="float32", help="data type of the weights (%(default)s)")
    add("--layers", type=positive, default=sizes.layers, help="transformer blocks (%(default)s)")
    add("--width", type=positive, default=sizes.width, help="width of the residual stream (%(default)s)")
    add("--heads", type=positive, default=sizes.heads, help="attention heads (%(default)s)")
    add("--seq", type=positive, default=sizes.seq, help="sequence length in bytes (%(default)s)")
    add("--batch", type=positive, default=8, help="sequences per step (%(default)s)")
    add("--lr", type=command.number(1e-9), default=1e-3, help="learning rate of AdamW (%(default)s)")
    add("--out", default="out", help="output folder (%(default)s)")
    overlap = "auto: hide communication behind matmuls where that is faster; off: never (%(default)s)"
    add("--overlap", choices=("auto", "off"), default="auto", help=overlap)
    add("--check", action="store_true", help="also train the unsharded model and compare the losses")
    trace = "trace computation and communication of steps 2 to 4 to FILE (.json, .json.gz); see docs/trace.md"
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
        options.out = command.output_file(f"{options.out}/checkpoint.pt").parent  # last, since it creates the folder
    except (ValueError, argparse.ArgumentTypeError) as error:
        parser.error(str(error))
    return options


def device_problem(device: str | None) -> str:
    """Return why --device cannot be used here, or ""."""
    kind, _, index = (device or "cpu").partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()) or (kind == "cpu" and index):
        return f"--device is {device!r}, expected cpu, cuda, or cuda:0"
    if kind == "cuda" and gpu_problem():
        return f"--device is {device}, but: {gpu_problem()}; use --device cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        return f"--device is {device}, but torch {torch.__version__} finds no GPU; use --device cpu"
    if index and int(index) >= gpu_count():
        return f"--device is {device}, but this machine has {counted(gpu_count(), 'GPU')}, numbered from 0"
    return ""


def main() -> int:
    options = read_options(__doc__)
    with join_ranks(options.device) as comm:  # an exception aborts the communicator, so that no rank hangs
        return train(options, comm)


def train(options: argparse.Namespace, comm: pynccl.Communicator) -> int:
    set_up_device(comm.device)
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
                comm.barrier()  # wait for rank 0 here rather than in the next step, which is timed
            bar.step(note=f"loss {losses.sharded[-1]:.3f}, {batch.tokens.numel() / seconds[-1]:,.0f} tokens/s")

    held_out = evaluate(model, options, comm.device)
    state = ad.full_state_dict(model, comm)  # every rank must call it; only rank 0 gets the result
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
    """Return (this rank's shard of the model, the unsharded model) with equal weights.

    Every rank initializes the unsharded model from the same seed and keeps its shard.
    """
    torch.manual_seed(0)
    unsharded = llama(options.config) if options.model == "llama" else Transformer(options.config)
    unsharded = unsharded.to(comm.device, getattr(torch, options.dtype))
    model: Any = copy.deepcopy(unsharded)
    if options.model == "llama":
        return ad.parallelize(model, comm, ad.plans.llama, gather_logits=False, overlap=options.overlap), unsharded
    return model.shard(comm, options.overlap), unsharded


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """Run an optimizer step of the sharded or the unsharded model. Return the loss over the full batch."""
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    ad.finish_gradients(model)  # sums the gradients of parameters that each rank applies to its own positions only
    ad.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.item())  # also waits for the GPU, so that the step's time is complete


def loss_of(model: Any, batch: Batch) -> Tensor:
    """Return the mean loss over the full batch, the same on every rank."""
    if isinstance(model, Transformer):
        return model(*batch)
    ids = batch.tokens.t().contiguous()  # transformers expects the batch first and shifts the labels itself
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


@torch.no_grad()
def evaluate(model: torch.nn.Module, options: argparse.Namespace, device: str) -> float:
    """Return the mean loss over a few windows of held-out text."""
    windows = Windows(options.validate_on, options.seq, options.batch, device)
    return sum(loss_of(model, windows.next()).item() for _ in range(VALIDATION_BATCHES)) / VALIDATION_BATCHES


# --------------------------------------------------------------------------------------------------- output


class Losses:
    """Losses per step of the sharded model and, with --check, of the unsharded model."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.sharded: list[float] = []
        self.unsharded: list[float] = []
        self.every, self.tolerance = max(1, options.steps // 10), TOLERANCE[options.dtype]

    def differences(self) -> list[float]:
        """Return |sharded - unsharded| / |unsharded| of each step; NaN counts as infinite."""
        values = [abs(a - b) / abs(b) for a, b in zip(self.sharded, self.unsharded, strict=True)]
        return [value if value == value else float("inf") for value in values]

    def row(self) -> str:
        """Return the last step as a line of the table, or "" for steps that are not printed."""
        step = len(self.sharded)
        if step % self.every and step != 1:
            return ""
        row = f"{step:8d} {self.sharded[-1]:12.6f} {self.unsharded[-1]:12.6f} {self.differences()[-1]:12.1e}"
        return f"    step      sharded    unsharded   difference\n{row}" if step == 1 else row

    def agree(self) -> bool:
        return max(self.differences()[:COMPARED_STEPS]) < self.tolerance

    def verdict(self) -> str:
        checked, rest = self.differences()[:COMPARED_STEPS], self.differences()[COMPARED_STEPS:]
        found = f"largest relative difference in {len(checked)} steps {max(checked):.1e}, limit {self.tolerance:.0e}"
        later = f" (later steps: {max(rest):.1e})" if rest else ""
        result = ": the sharded and the unsharded model agree" if self.agree() else " FAILED: the two models differ"
        return f"check{result}: {found}{later}"

    def plot(self, path: Path, ranks: int) -> str:
        """Plot the loss curves. Return a message for the user."""
        try:
            from matplotlib.figure import Figure  # works without a display
        except ImportError:
            return "no loss curve: matplotlib is not installed (pip install matplotlib)"
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes, steps = figure.subplots(), range(1, len(self.sharded) + 1)
        if self.unsharded:  # thick and pale in the background, since the two curves should coincide
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
    counted = seconds[1:] or seconds  # the first step warms up
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
    """Write the unsharded model and its sizes. An interrupted write leaves the old file intact."""
    temporary = path.with_name(path.name + ".part")
    torch.save({"model": state, "config": dataclasses.asdict(config), "validation_loss": held_out}, temporary)
    os.replace(temporary, path)
    return f"wrote {path}"


# ------------------------------------------------------------------------------------------------------- launch


def set_up_device(device: str) -> None:
    """Divide the CPU cores among the ranks of this node, or select this rank's GPU."""
    if device == "cpu":
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_ranks))
    else:
        torch.cuda.set_device(device)


def join_ranks(device: str | None) -> pynccl.Communicator:
    """Create the launch's communicator on the device of --device."""
    if device == "cpu":
        return pynccl.init(library=pynccl.load("host"))
    if device is None or device == "cuda":
        return pynccl.init()
    os.environ.setdefault("PYNCCL_SHARE_GPU", "1")  # all ranks share a GPU given by number
    return pynccl.init(device=device)


if __name__ == "__main__":
    command.run(main)
