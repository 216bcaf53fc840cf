"""Train a small byte-level transformer, tensor and sequence parallel over all ranks of a torchrun launch.

Beside it lie train_options.py, train_model.py, train_data.py (the text), train_report.py (what is shown) and
train_trace.py. It writes OUT/loss.png and OUT/checkpoint.pt, which `train_model.load_checkpoint` opens as an ordinary
model. --device cuda:0 lets all ranks share one GPU.

examples:
  torchrun --standalone --nproc-per-node=2 scripts/train.py --check --steps 10  # beside the unsharded model
  torchrun --standalone --nproc-per-node=2 scripts/train.py --device cpu --steps 10 --out out/cpu
  torchrun --standalone --nproc-per-node=2 scripts/train.py --overlap off --steps 10  # nothing hides communication
  torchrun --standalone --nproc-per-node=2 scripts/train.py --steps 5 --trace out/trace.json.gz  # what ran when
  torchrun --standalone --nproc-per-node=2 scripts/train.py                     # long: a GPU per rank, else the CPU
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which Python leaves out with PYTHONSAFEPATH
from train_data import SHIPPED, Batch, Windows, split_text
from train_model import ModelConfig, Transformer, save_checkpoint
from train_options import read_options
from train_report import CommMeter, Comparison, plot
from train_trace import StepTrace

import pynccl
from pynccl.progress import Bar
from pynccl.tools import command

VALIDATION_BATCHES = 8


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
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    unsharded_optimizer = torch.optim.AdamW(unsharded.parameters(), lr=options.lr)
    compare = options.check and comm.rank == 0

    if comm.rank == 0:
        print(describe(model, comm, options), flush=True)
    losses = Comparison(options.steps, options.dtype)
    clock = Clock(CommMeter(comm))
    with Bar(options.steps, "training", "step", own=comm.rank == 0) as bar, StepTrace(options, comm, model) as traced:
        for number in range(options.steps):
            batch = windows.next()
            with traced.step(number), clock:
                loss = train_step(model, optimizer, batch, comm)
            losses.sharded.append(loss)
            if compare:
                losses.unsharded.append(train_step(unsharded, unsharded_optimizer, batch, None))
                bar.line(losses.row())
            if options.check:
                comm.barrier()  # the others wait for rank 0 here and not in the next step, whose time is measured
            bar.step(note=f"loss {loss:.3f}, {batch.tokens.numel() / clock.steps[-1]:,.0f} tokens/s")
    if comm.rank == 0 and traced.said:
        print(traced.said, flush=True)

    held_out = Windows(validate_on, options.seq, options.batch, options.seed, comm.device)
    validation = evaluate(model, held_out, comm)
    share = clock.communication_share(comm)
    state = model.unsharded_state()
    if comm.rank == 0:
        print(summary(options, losses, validation, clock, share))
        write_results(options, config, losses, validation, state, comm.size)
    if not compare:
        return 0
    print(losses.verdict(), flush=True)
    return 0 if losses.agrees() else 1


def build(
    options: argparse.Namespace, config: ModelConfig, comm: pynccl.Communicator
) -> tuple[Transformer, Transformer]:
    """(this rank's part of the model, the unsharded model) with equal weights.

    Every rank draws the unsharded model from the seed and keeps its part, so the start does not depend on their number.
    """
    torch.manual_seed(options.seed)
    unsharded = Transformer(config)
    model = Transformer(config, comm, options.overlap)
    model.load_unsharded(unsharded.state_dict())
    dtype = getattr(torch, options.dtype)
    return model.to(comm.device, dtype), unsharded.to(comm.device, dtype)


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


class Clock:
    """Seconds of the training steps, and of the communication within them. The first step warms up and is left out."""

    def __init__(self, meter: CommMeter) -> None:
        self.meter = meter
        self.steps: list[float] = []
        self.communication: list[float] = []

    def __enter__(self) -> None:
        self._before, self._started = self.meter.seconds(), time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self.steps.append(time.perf_counter() - self._started)
        self.communication.append(self.meter.seconds() - self._before)

    def mean_step(self) -> float:
        return mean_of_warm(self.steps)

    def communication_share(self, comm: pynccl.Communicator) -> float:
        """Of the time of the steps, mean over the ranks."""
        share = torch.tensor([mean_of_warm(self.communication) / self.mean_step()], device=comm.device)
        return float(comm.all_reduce(share, share)) / comm.size


def mean_of_warm(seconds: list[float]) -> float:
    counted = seconds[1:] or seconds
    return sum(counted) / len(counted)


def summary(options: argparse.Namespace, losses: Comparison, validation: float, clock: Clock, share: float) -> str:
    tokens_per_second = options.seq * options.batch / clock.mean_step()
    return (
        f"loss {losses.sharded[-1]:.4f} after {options.steps} steps, {validation:.4f} on held-out text; "
        f"{tokens_per_second:,.0f} tokens/s; {share:.0%} of the time in communication\n"
        f"  ({clock.meter.how}, waiting for other ranks included, mean over ranks and all steps but the first; "
        f"{clock.meter.calls} calls on rank 0)"
    )


def write_results(
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
    title = f"sharded over {ranks} rank{'s' if ranks > 1 else ''} (tensor + sequence parallel)"
    print(plot(os.path.join(options.out, "loss.png"), losses, title))


def synchronize(device: str) -> None:
    """Give this rank its part of the machine."""
    if device == "cpu":
        neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // neighbours))
    else:
        torch.cuda.set_device(device)


def describe(model: Transformer, comm: pynccl.Communicator, options: argparse.Namespace) -> str:
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
