"""Steps of a Llama of Hugging Face's library: pynccl_autograd.parallelize beside torch's parallelize_module.

On the CPU, over gloo on both sides (ours: the host library), in the same processes; steps alternate, and the slowest
rank counts. Each step is forward, backward, what has to be summed besides, the norm of the gradients, and SGD. The
first steps compare losses.

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
    whole = command.whole(1)
    parser.add_argument("--width", type=whole, nargs="+", default=[256], help="columns of the residual stream (256)")
    parser.add_argument("--layers", type=whole, default=2, help="blocks (%(default)s)")
    parser.add_argument("--seq", type=whole, default=128, help="words in a sequence (%(default)s)")
    parser.add_argument("--rounds", type=whole, default=15, help="steps that are timed (%(default)s)")
    parser.add_argument("--gather-logits", action="store_true", help="ours: all logits on every rank, as torch has")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("run it by torchrun: torchrun --standalone --nproc-per-node=2 scripts/bench/parallelize.py")
    if problem := _problem(options, int(os.environ["WORLD_SIZE"])):
        parser.error(problem)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with pynccl.init(library=pynccl.load("host")) as comm:
        for width in progress.over(options.width, "measuring", "width"):
            measure(options, width, comm)
    dist.destroy_process_group()


def _problem(options: argparse.Namespace, ranks: int) -> str:
    """What does not fit together; "" if all does."""
    if importlib.util.find_spec("transformers") is None:
        return 'transformers is not installed: pip install -e ".[hf]"'
    if KV_HEADS % ranks:
        return f"{ranks} ranks: expected 1, 2 or {KV_HEADS}, among which {KV_HEADS} heads of keys and values are cut"
    sizes = [*(("width", one, 2 * HEADS) for one in options.width), ("seq", options.seq, ranks)]
    wrong = (f"--{name} is {size}, expected a multiple of {by}" for name, size, by in sizes if size % by)
    return next(wrong, "")


def measure(options: argparse.Namespace, width: int, comm: pynccl.Communicator) -> None:
    torch.manual_seed(0)
    whole = build(options, width)
    ids = torch.randint(WORDS, (BATCH, options.seq))
    ours = ad.parallelize(copy.deepcopy(whole), comm, ad.plans.llama, gather_logits=options.gather_logits)
    theirs = with_dtensor(copy.deepcopy(whole), comm.size)
    ways = {
        "parallelize": stepper(ours, ids, lambda: ad.finish_gradients(ours), ad.clip_grad_norm_),
        "parallelize_module": stepper(theirs, ids, lambda: None, torch.nn.utils.clip_grad_norm_),
    }
    for _ in range(WARM):
        ours_loss, their_loss = (way() for way in ways.values())
        if abs(ours_loss - their_loss) > 1e-3 * abs(their_loss):
            raise command.FailedError(f"the losses differ: {ours_loss} and {their_loss}")
    times = rounds_of(ways, options.rounds)
    if comm.rank == 0:
        medians = {name: statistics.median(found) for name, found in times.items()}
        row = ", ".join(f"{name} {1000 * seconds:.1f} ms" for name, seconds in medians.items())
        ratio = medians["parallelize_module"] / medians["parallelize"]
        print(f"width {width}, {comm.size} ranks, load {os.getloadavg()[0]:.1f}: {row}, ratio {ratio:.2f}", flush=True)


def stepper(model: Any, ids: torch.Tensor, finish: Callable[[], None], clip: Any) -> Callable[[], float]:
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    places = torch.arange(ids.shape[1]).unsqueeze(0)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids, position_ids=places, use_cache=False).loss
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


def with_dtensor(model: Any, ranks: int) -> Any:
    """What torchtitan's plan does, for the module names of transformers."""
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
    wants: dict[str, Any] = {"input_kwarg_layouts": {"hidden_states": Shard(1)}}
    for layer in model.model.layers:
        parallelize_module(
            layer,
            mesh,
            {
                "input_layernorm": SequenceParallel(),
                "self_attn": PrepareModuleInput(**wants, desired_input_kwarg_layouts={"hidden_states": Replicate()}),
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
