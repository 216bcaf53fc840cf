"""Small transformers models without dropout, a batch, and a comparison of parallelized and unsharded models."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pynccl_autograd.layers.shards import shard_of

WORDS, BATCH, SEQUENCE = 61, 2, 8


def llama(kv_heads: int = 4, tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 8}
    ends = {"tie_word_embeddings": tied, "attention_bias": True}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_key_value_heads=kv_heads, **sizes, **ends))


def gpt2(tied: bool = True) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, tie_word_embeddings=tied, **sizes, **drops))


def bert(tied: bool = True) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = BertConfig(vocab_size=WORDS, max_position_embeddings=16, tie_word_embeddings=tied, **sizes, **drops)
    return BertForMaskedLM(config)


MAKE: dict[str, Any] = {"llama": llama, "gpt2": gpt2, "bert": bert}


def batch(step: int) -> dict[str, Tensor]:
    ids = torch.randint(0, WORDS, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(100 + step))
    labels = ids.clone()
    labels[0, -2:] = -100
    return {"input_ids": ids, "labels": labels}


def compare(model: nn.Module, unsharded: nn.Module, tolerance: dict[str, float]) -> None:
    """Compare parameters and gradients by name with those of the unsharded model."""
    expected = dict(unsharded.named_parameters())
    assert dict(model.named_parameters()).keys() == expected.keys()
    for path, parameter in model.named_parameters():
        shard, reference = shard_of(parameter), expected[path]
        assert (parameter.grad is None) == (reference.grad is None), path
        for part, right in ((parameter.detach(), reference.detach()), (parameter.grad, reference.grad)):
            if right is not None:
                expected_shard = right if shard is None else shard.local(right)
                torch.testing.assert_close(part, expected_shard, **tolerance, msg=partial("{}: {}".format, path))


TOLERANCE = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-11},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 0.05, "atol": 0.02},
}
