"""Compare training steps of a Hugging Face Llama: pynccl_autograd.parallelize and torch's parallelize_module.

Both run on the CPU in the same processes, ours over the host library and torch over gloo. Steps alternate, and the
slowest rank counts. Each step is forward, backward, the remaining gradient sums, the gradient norm, and SGD. The first
steps compare the losses.

examples:
  torchrun --standalone --nproc-per-node=2 scripts/bench/parallelize.py --width 64 --layers 1 --seq 32 --rounds 3
  torchrun --standalone --nproc-per-node=2 scripts/bench/parallelize.py --width 256 512  # long
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from bench.ranks import rounds_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import pynccl
import pynccl_autograd as ad
from pynccl import progress
from pynccl.tools import command

HEADS, KV_HEADS, WORDS, BATCH, WARM = 8, 4, 1024, 2, 2


def main() -> None:
    parser = command.Parser(__doc__, failed="a rank failed, or the losses differ")
    positive = command.integer(1)
    parser.add_argument("--width", type=positive, nargs="+", default=[256], help="width of the residual stream (256)")
    parser.add_argument("--layers", type=positive, default=2, help="transformer blocks (%(default)s)")
    parser.add_argument("--seq", type=positive, default=128, help="tokens per sequence (%(default)s)")
    parser.add_argument("--rounds", type=positive, default=15, help="timed steps (%(default)s)")
    gather = "ours: gather all logits on every rank, as torch's plan does"
    parser.add_argument("--gather-logits", action="store_true", help=gather)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("not launched by torchrun: torchrun --standalone --nproc-per-node=2 scripts/bench/parallelize.py")
    if problem := _problem(options, int(os.environ["WORLD_SIZE"])):
        parser.error(problem)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with pynccl.init(library=pynccl.load("host")) as comm:
        for width in progress.over(options.width, "measuring", "width"):
            measure(options, width, comm)
    dist.destroy_process_group()


def _problem(options: argparse.Namespace, ranks: int) -> str:
    """Return the error of invalid options, or ""."""
    if importlib.util.find_spec("transformers") is None:
        return 'transformers is not installed: pip install -e ".[hf]"'
    if KV_HEADS % ranks:
        return f"{ranks} ranks: expected 1, 2 or {KV_HEADS}, which divide the {KV_HEADS} key-value heads"
    sizes = [*(("width", width, 2 * HEADS) for width in options.width), ("seq", options.seq, ranks)]
    errors = (f"--{name} is {size}, expected a multiple of {base}" for name, size, base in sizes if size % base)
    return next(errors, "")


def measure(options: argparse.Namespace, width: int, comm: pynccl.Communicator) -> None:
    torch.manual_seed(0)
    model = build(options, width)
    ids = torch.randint(WORDS, (BATCH, options.seq))
    ours = ad.parallelize(copy.deepcopy(model), comm, ad.plans.llama, gather_logits=options.gather_logits)
    theirs = parallelize_with_dtensor(copy.deepcopy(model), comm.size)
    steps = {
        "parallelize": make_step(ours, ids, lambda: ad.finish_gradients(ours), ad.clip_grad_norm_),
        "parallelize_module": make_step(theirs, ids, lambda: None, torch.nn.utils.clip_grad_norm_),
    }
    for _ in range(WARM):
        our_loss, their_loss = (step() for step in steps.values())
        if abs(our_loss - their_loss) > 1e-3 * abs(their_loss):
            raise command.FailedError(f"the losses differ: {our_loss} and {their_loss}")
    times = rounds_of(steps, options.rounds)
    if comm.rank == 0:
        medians = {name: statistics.median(found) for name, found in times.items()}
        row = ", ".join(f"{name} {1000 * seconds:.1f} ms" for name, seconds in medians.items())
        ratio = medians["parallelize_module"] / medians["parallelize"]
        print(f"width {width}, {comm.size} ranks, load {os.getloadavg()[0]:.1f}: {row}, ratio {ratio:.2f}", flush=True)


def make_step(model: Any, ids: torch.Tensor, finish: Callable[[], None], clip: Any) -> Callable[[], float]:
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    positions = torch.arange(ids.shape[1]).unsqueeze(0)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids, position_ids=positions, use_cache=False).loss
        loss.backward()
        finish()
        clip(model.parameters(), 1.0)
        optimizer.step()
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        return float(loss.item())

    return step


def build(options: argparse.Namespace, width: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=options.layers,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            max_position_embeddings=options.seq,
            tie_word_embeddings=False,
        )
    )


def parallelize_with_dtensor(model: Any, ranks: int) -> Any:
    """Apply torchtitan's plan to the module names of transformers."""
    mesh = init_device_mesh("cpu", (ranks,))
    parallelize_module(
        model,
        mesh,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    layouts: dict[str, Any] = {"input_kwarg_layouts": {"hidden_states": Shard(1)}}
    for layer in model.model.layers:
        parallelize_module(
            layer,
            mesh,
            {
                "input_layernorm": SequenceParallel(),
                "self_attn": PrepareModuleInput(**layouts, desired_input_kwarg_layouts={"hidden_states": Replicate()}),
                "self_attn.q_proj": ColwiseParallel(),
                "self_attn.k_proj": ColwiseParallel(),
                "self_attn.v_proj": ColwiseParallel(),
                "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
                "post_attention_layernorm": SequenceParallel(),
                "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "mlp.gate_proj": ColwiseParallel(),
                "mlp.up_proj": ColwiseParallel(),
                "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    return model


if __name__ == "__main__":
    command.run(main)
