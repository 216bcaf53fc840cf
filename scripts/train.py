"""Train a small byte-level transformer, tensor and sequence parallel over all ranks of a torchrun launch.

It writes OUT/loss.png and OUT/checkpoint.pt, which `train_model.load_checkpoint` opens as an ordinary model. --device
cuda:0 lets all ranks share one GPU. --model llama trains a small Llama of Hugging Face's library, made parallel by
`ad.parallelize`; it needs the extra hf, downloads nothing and writes no checkpoint. The model and the text are in
train_model.py.

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
import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which Python leaves out with PYTHONSAFEPATH
from train_model import (
    SHIPPED,
    TOLERANCE,
    Batch,
    Comparison,
    ModelConfig,
    Transformer,
    Windows,
    llama,
    llama_kv_heads,
    llama_problem,
    plot,
    read_text,
    save_checkpoint,
    split_text,
)

import pynccl
import pynccl_autograd as ad
from pynccl.bindings.library import gpu_count, gpu_problem
from pynccl.progress import Bar
from pynccl.tools import command

VALIDATION_BATCHES = 8


def read_options(doc: str | None = None) -> argparse.Namespace:
    """The command line, with the text read; ends the process (2) if it cannot work, in the same words on every rank.

    doc       what the script does, and examples
    """
    parser = command.Parser(doc, failed="a rank failed, or --check found a difference")
    parser.add_argument("--model", choices=("transformer", "llama"), default="transformer", help="(%(default)s)")
    parser.add_argument("--steps", type=command.whole(1), default=100, help="steps of the optimizer (%(default)s)")
    parser.add_argument(
        "--device", help="cpu, cuda (a GPU per rank), cuda:0 (shared by all ranks); default: what is there"
    )
    parser.add_argument("--dtype", choices=list(TOLERANCE), default="float32", help="of the weights (%(default)s)")
    parser.add_argument("--seed", type=command.whole(0), default=0, help="of weights and batches (%(default)s)")
    parser.add_argument("--layers", type=command.whole(1), default=ModelConfig.layers, help="blocks (%(default)s)")
    parser.add_argument(
        "--width", type=command.whole(1), default=ModelConfig.width, help="columns of the residual stream (%(default)s)"
    )
    parser.add_argument("--heads", type=command.whole(1), default=ModelConfig.heads, help="of attention (%(default)s)")
    parser.add_argument(
        "--kv-heads",
        type=command.whole(1),
        help="of llama: heads of keys and values (half of --heads, or 1 where that does not fit)",
    )
    parser.add_argument("--seq", type=command.whole(1), default=ModelConfig.seq, help="bytes in a window (%(default)s)")
    parser.add_argument("--batch", type=command.whole(1), default=8, help="windows in a step (%(default)s)")
    parser.add_argument("--lr", type=command.number(0), default=1e-3, help="learning rate of AdamW (%(default)s)")
    parser.add_argument("--data", metavar="FILE", help=f"text to learn; default: {SHIPPED}, which comes with Python")
    parser.add_argument("--out", default="out", help="folder for loss.png and checkpoint.pt (%(default)s)")
    parser.add_argument(
        "--overlap",
        choices=("auto", "off"),
        default="auto",
        help="hide communication behind matmuls: auto, where it pays, or off (%(default)s)",
    )
    parser.add_argument("--describe", action="store_true", help="of llama: print what became of each parameter")
    parser.add_argument("--check", action="store_true", help="train the unsharded model, too, and compare the losses")
    parser.add_argument(
        "--trace",
        type=command.output_file,
        metavar="FILE",
        help="write what all ranks compute and communicate in a few steps to FILE (.json, .json.gz); docs/trace.md",
    )
    parser.add_argument("--trace-steps", type=command.whole(1), default=3, metavar="N", help="so many (%(default)s)")
    options = parser.parse_args()
    if problem := model_problem(options) or device_problem(options.device):
        parser.error(problem)
    if options.model == "llama" and importlib.util.find_spec("transformers") is None:
        parser.error('transformers is not installed: pip install -e ".[hf]"')
    if not options.lr:
        parser.error(f"--lr is {options.lr}, expected a number above 0")
    try:
        options.text = read_text(options.data, options.seq)
        command.output_folder(options.out)
    except ValueError as error:
        parser.error(str(error))
    except argparse.ArgumentTypeError as error:
        parser.error(f"--out {error}")
    return options


def model_problem(options: argparse.Namespace) -> str:
    """Why the model cannot be made or cut over the ranks of the launch; "" if it can. Sets --kv-heads of a Llama."""
    size = os.environ.get("WORLD_SIZE", "1")
    ranks = int(size) if size.isdigit() and int(size) else 1
    config = ModelConfig(options.layers, options.width, options.heads, options.seq)
    if options.model == "llama":
        options.kv_heads = options.kv_heads or llama_kv_heads(options.heads, ranks)
        return llama_problem(config, options.kv_heads, ranks)
    if options.kv_heads:
        return f"argument --kv-heads: {options.kv_heads} needs --model llama; the transformer has as many as heads"
    return config.problem(ranks)


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
    config = ModelConfig(options.layers, options.width, options.heads, options.seq)
    with join_ranks(options.device) as comm:  # destroyed at the end; aborted on an exception, so that no rank hangs
        return train(options, config, comm)


def train(options: argparse.Namespace, config: ModelConfig, comm: pynccl.Communicator) -> int:
    synchronize(comm.device)
    learn_from, validate_on = split_text(options.text)
    windows = Windows(learn_from, options.seq, options.batch, options.seed, comm.device)
    model, unsharded = build(options, config, comm)
    step = llama_step if options.model == "llama" else train_step
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    unsharded_optimizer = torch.optim.AdamW(unsharded.parameters(), lr=options.lr)
    compare = options.check and comm.rank == 0

    if comm.rank == 0:
        print(describe(model, comm, options), flush=True)
    losses = Comparison(options.steps, options.dtype)
    seconds: list[float] = []
    traced = StepTrace(options, comm, model)
    with Bar(options.steps, "training", "step", own=comm.rank == 0) as bar, traced:
        for number in range(options.steps):
            batch = windows.next()
            started = time.perf_counter()
            with traced.step(number):
                loss = step(model, optimizer, batch, comm)
            seconds.append(time.perf_counter() - started)
            losses.sharded.append(loss)
            if compare:
                losses.unsharded.append(step(unsharded, unsharded_optimizer, batch, None))
                bar.line(losses.row())
            if options.check:
                comm.barrier()  # the others wait for rank 0 here and not in the next step, whose time is measured
            bar.step(note=f"loss {loss:.3f}, {batch.tokens.numel() / seconds[-1]:,.0f} tokens/s")

    validation = None
    if isinstance(model, Transformer):
        held_out = Windows(validate_on, options.seq, options.batch, options.seed, comm.device)
        validation = evaluate(model, held_out, comm)
        state = model.unsharded_state()
        if comm.rank == 0:
            write_checkpoint(options, config, losses, validation, state, comm.size)
    if comm.rank == 0:
        print(summary(options, losses, validation, seconds))
        title = f"sharded over {comm.size} rank{'s' if comm.size > 1 else ''} (tensor + sequence parallel)"
        print(plot(os.path.join(options.out, "loss.png"), losses, title))
    if not compare:
        return 0
    print(losses.verdict(), flush=True)
    return 0 if losses.agrees() else 1


def build(options: argparse.Namespace, config: ModelConfig, comm: pynccl.Communicator) -> tuple[Any, Any]:
    """(this rank's part of the model, the unsharded model) with equal weights.

    Every rank draws the unsharded model from the seed and keeps its part, so the start does not depend on their number.
    """
    torch.manual_seed(options.seed)
    dtype = getattr(torch, options.dtype)
    if options.model == "llama":
        whole = llama(config, options.kv_heads).to(comm.device, dtype)
        plan = ad.plans.llama
        parallel = ad.parallelize(copy.deepcopy(whole), comm, plan, gather_logits=False, overlap=options.overlap)
        if options.describe and comm.rank == 0:
            print(ad.describe(parallel))
        return parallel, whole
    unsharded = Transformer(config)
    model = Transformer(config, comm, options.overlap)
    model.load_unsharded(unsharded.state_dict())
    return model.to(comm.device, dtype), unsharded.to(comm.device, dtype)


def llama_step(model: Any, optimizer: torch.optim.Optimizer, batch: Batch, comm: pynccl.Communicator | None) -> float:
    """As train_step, of a model that ad.parallelize has cut, or of the unsharded one."""
    optimizer.zero_grad()
    ids = batch.tokens.t().contiguous()  # the batch first
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    ad.finish_gradients(model)  # of what is whole on every rank there is nothing to finish
    ad.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.item())


def train_step(
    model: Transformer, optimizer: torch.optim.Optimizer, batch: Batch, comm: pynccl.Communicator | None
) -> float:
    """One step of the optimizer; returns the loss over the whole batch."""
    optimizer.zero_grad()
    loss = model(*batch)
    loss.backward()
    if comm is not None:
        loss = sum_over_ranks(model.replicated_parameters(), loss, comm)
    optimizer.step()
    return loss.item()  # also waits for the GPU, so that the time of a step is its own


@torch.no_grad()
def sum_over_ranks(parameters: list[torch.nn.Parameter], loss: Tensor, comm: pynccl.Communicator) -> Tensor:
    """Sum the gradients of replicated parameters, and the loss, over the ranks; returns the loss.

    Each rank has seen its own positions of the sequence only. One all-reduce for all of them: its latency is paid once.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([part.flatten().to(loss.dtype) for part in (*grads, loss)])
    comm.all_reduce(flat, flat)
    for grad, total in zip(grads, flat[:-1].split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))
    return flat[-1]


@torch.no_grad()
def evaluate(model: Transformer, windows: Windows, comm: pynccl.Communicator | None) -> float:
    """The mean loss over a few windows."""
    total = sum(model(*windows.next()) for _ in range(VALIDATION_BATCHES)) / VALIDATION_BATCHES
    if comm is not None:
        comm.all_reduce(total, total)
    return total.item()


class StepTrace:
    """ad.trace around some of the steps: not the first one, which warms up, where there are more."""

    def __init__(self, options: argparse.Namespace, comm: pynccl.Communicator, model: torch.nn.Module) -> None:
        self.first = min(1, options.steps - 1)
        self.end = min(self.first + options.trace_steps, options.steps) if options.trace else self.first
        self.trace = ad.trace(options.trace, comm, model=model) if options.trace else None
        self._open = contextlib.ExitStack()

    def __enter__(self) -> StepTrace:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._open.__exit__(*raised)
        if self.trace is not None and self.trace.path is not None:
            print(self.describe(), flush=True)

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        if self.trace is None or not self.first <= number < self.end:
            yield
            return
        if number == self.first:
            try:
                self._open.enter_context(self.trace)
            except (OSError, RuntimeError) as error:
                raise command.FailedError(str(error)) from None
        with self.trace.span(f"step {number + 1}"):
            yield
        if number + 1 == self.end:
            self._open.close()

    def describe(self) -> str:
        """What to tell the user, of the rank that has written the file."""
        assert self.trace is not None
        rows = self.trace.summary.values()
        block, communication, exposed = (
            sum(row[name] for row in rows) / len(rows) for name in ("block_ms", "communication_ms", "exposed_ms")
        )
        return (
            f"wrote {self.trace.path}: {len(rows)} rank{'s' if len(rows) > 1 else ''}, {block:.1f} ms, of which "
            f"{communication:.1f} ms with communication, {exposed:.1f} ms of it exposed (means over ranks); "
            "open it at ui.perfetto.dev"
        )


def summary(options: argparse.Namespace, losses: Comparison, validation: float | None, seconds: list[float]) -> str:
    counted = seconds[1:] or seconds  # the first one warms up
    tokens_per_second = options.seq * options.batch * len(counted) / sum(counted)
    held_out = "" if validation is None else f", {validation:.4f} on held-out text"
    return f"loss {losses.sharded[-1]:.4f} after {options.steps} steps{held_out}; {tokens_per_second:,.0f} tokens/s"


def write_checkpoint(
    options: argparse.Namespace,
    config: ModelConfig,
    losses: Comparison,
    validation: float,
    state: dict[str, Tensor],
    ranks: int,
) -> None:
    path = os.path.join(options.out, "checkpoint.pt")
    run = {name: getattr(options, name) for name in ("steps", "dtype", "seed", "batch", "lr", "data")}
    save_checkpoint(path, state, config, run=run, ranks=ranks, losses=losses.sharded, validation_loss=validation)
    print(f"wrote {path}")


def synchronize(device: str) -> None:
    """Give this rank its part of the machine."""
    if device == "cpu":
        neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // neighbours))
    else:
        torch.cuda.set_device(device)


def describe(model: torch.nn.Module, comm: pynccl.Communicator, options: argparse.Namespace) -> str:
    count = sum(parameter.numel() for parameter in model.parameters())
    version = ".".join(map(str, comm.library.version))
    name = "host library" if comm.library.is_host else f"NCCL {version} from {comm.library.path}"
    return (
        f"{comm.size} rank{'s' if comm.size > 1 else ''} on {comm.device} over the {name}; {count:,} parameters on "
        f"rank 0, {options.dtype}; {len(options.text):,} bytes of {options.data or SHIPPED}"
    )


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
