"""Train a small Llama of Hugging Face's library with random weights, bytes as words, tensor and sequence parallel.

Needs the extra hf (`pip install -e ".[hf,plot]"`); downloads nothing. It writes OUT/llama_loss.png.

examples:
  torchrun --standalone --nproc-per-node=2 scripts/train_llama.py --check --steps 10  # beside the unsharded model
  torchrun --standalone --nproc-per-node=2 scripts/train_llama.py  # long: a GPU per rank, else the CPU
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which Python leaves out with PYTHONSAFEPATH
from train_data import SHIPPED, Windows, read_text, split_text
from train_report import Comparison, plot
from train_trace import StepTrace, add_options

import pynccl
import pynccl_autograd as ad
from pynccl.progress import Bar
from pynccl.tools import command


def main() -> int:
    options = read_options()
    with pynccl.init() as comm:
        return train(options, comm)


def train(options: argparse.Namespace, comm: pynccl.Communicator) -> int:
    if comm.device == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    torch.manual_seed(options.seed)
    unsharded: Any = build(options).to(comm.device)
    model = ad.parallelize(copy.deepcopy(unsharded), comm, ad.plans.llama, gather_logits=False)
    learn_from, _ = split_text(options.text)
    windows = Windows(learn_from, options.seq, options.batch, options.seed, comm.device)
    optimizers = [torch.optim.AdamW(one.parameters(), options.lr) for one in (model, unsharded)]
    losses = Comparison(options.steps, "float32")
    if comm.rank == 0 and options.describe:
        print(ad.describe(model))
    if comm.rank == 0:
        print(
            f"{comm.size} ranks on {comm.device}; {len(options.text):,} bytes of {options.data or SHIPPED}", flush=True
        )
    compared = options.check and comm.rank == 0
    with Bar(options.steps, "training", "step", own=comm.rank == 0) as bar, StepTrace(options, comm, model) as traced:
        for number in range(options.steps):
            ids = windows.next().tokens.t().contiguous()  # the batch first
            with traced.step(number):
                started = time.perf_counter()
                losses.sharded.append(step(model, optimizers[0], ids))
                seconds = time.perf_counter() - started
            if compared:
                losses.unsharded.append(step(unsharded, optimizers[1], ids))
                bar.line(losses.row())
            if options.check:
                comm.barrier()  # the others wait for rank 0 here and not in the next step
            bar.step(note=f"loss {losses.sharded[-1]:.3f}, {ids.numel() / seconds:,.0f} tokens/s")
    if comm.rank == 0 and traced.said:
        print(traced.said, flush=True)
    if comm.rank == 0:
        title = f"sharded over {comm.size} ranks (tensor + sequence parallel)"
        print(plot(os.path.join(options.out, "llama_loss.png"), losses, title))
    if not compared:
        return 0
    print(losses.verdict(), flush=True)
    return 0 if losses.agrees() else 1


def step(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    ad.finish_gradients(model)  # of what is whole on every rank there is nothing to finish
    ad.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.item())


def build(options: argparse.Namespace) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=options.width,
            intermediate_size=2 * options.width,
            num_hidden_layers=options.layers,
            num_attention_heads=options.heads,
            num_key_value_heads=options.kv_heads,
            max_position_embeddings=options.seq,
            tie_word_embeddings=True,
        )
    )


def read_options() -> argparse.Namespace:
    """The command line, with the text read; ends the process (2) if it cannot work."""
    parser = command.Parser(__doc__, failed="a rank failed, or --check found a difference")
    parser.add_argument("--steps", type=command.whole(1), default=100, help="steps of the optimizer (%(default)s)")
    parser.add_argument("--seed", type=command.whole(0), default=0, help="of weights and batches (%(default)s)")
    parser.add_argument("--layers", type=command.whole(1), default=2, help="blocks (%(default)s)")
    parser.add_argument(
        "--width", type=command.whole(1), default=128, help="columns of the residual stream (%(default)s)"
    )
    parser.add_argument("--heads", type=command.whole(1), default=8, help="of attention (%(default)s)")
    parser.add_argument("--kv-heads", type=command.whole(1), default=2, help="of keys and values (%(default)s)")
    parser.add_argument(
        "--seq", type=command.whole(1), default=128, help="bytes in a window, a multiple of the ranks (%(default)s)"
    )
    parser.add_argument("--batch", type=command.whole(1), default=8, help="windows in a step (%(default)s)")
    parser.add_argument("--lr", type=command.number(0), default=1e-3, help="learning rate of AdamW (%(default)s)")
    parser.add_argument("--data", metavar="FILE", help=f"text to learn; default: {SHIPPED}, which comes with Python")
    parser.add_argument("--out", default="out", help="folder for llama_loss.png (%(default)s)")
    parser.add_argument("--describe", action="store_true", help="print what became of each parameter")
    parser.add_argument("--check", action="store_true", help="train the unsharded model, too, and compare the losses")
    add_options(parser)
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    sizes = {name: getattr(options, name) for name in ("steps", "layers", "width", "heads", "kv_heads", "seq", "batch")}
    for name, by in (("seq", ranks), ("heads", ranks), ("width", 2 * options.heads), ("heads", options.kv_heads)):
        if sizes[name] % by:
            parser.error(f"--{name} is {sizes[name]}, expected a multiple of {by}")
    if options.kv_heads % ranks and ranks % options.kv_heads:
        parser.error(f"--kv-heads is {options.kv_heads} on {ranks} ranks: expected one to be a multiple of the other")
    if importlib.util.find_spec("transformers") is None:
        parser.error('transformers is not installed: pip install -e ".[hf]"')
    try:
        options.text = read_text(options.data, options.seq)
        command.output_folder(options.out)
    except ValueError as error:
        parser.error(str(error))
    except argparse.ArgumentTypeError as error:
        parser.error(f"--out {error}")
    return options


if __name__ == "__main__":
    command.run(main)
