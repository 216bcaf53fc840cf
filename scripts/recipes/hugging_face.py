"""Fine-tune a Hugging Face model with tensor and sequence parallelism over all ranks.

examples:
  torchrun --nproc-per-node=2 scripts/recipes/hugging_face.py
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import pynccl
import pynccl_autograd as ad
from pynccl.tools import command

WORDS, STEPS = 64, 3


def tune(model: Any, batches: list[Tensor], comm: pynccl.Communicator | None) -> list[float]:
    if comm is not None:
        ad.parallelize(model, comm, ad.plans.llama)
    optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-2), []
    for ids in batches:
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        ad.finish_gradients(model)
        ad.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def small_llama() -> nn.Module:
    """Return a Llama with random weights. To use yours: LlamaForCausalLM.from_pretrained(folder)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_attention_heads=8, num_key_value_heads=2, **sizes))


def main(comm: pynccl.Communicator) -> str:
    torch.manual_seed(0)
    model = small_llama().to(comm.device)
    batches = [torch.randint(WORDS, (2, 4 * comm.size)).to(comm.device) for _ in range(STEPS)]
    expected = tune(copy.deepcopy(model), batches, None)
    losses = tune(model, batches, comm)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)
    return f"hugging_face: the losses of {STEPS} steps on {comm.size} ranks equal those of one process"


if __name__ == "__main__":
    command.on_ranks(main, __doc__)
