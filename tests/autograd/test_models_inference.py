"""Parallelized models of transformers under inference mode and in training, in turn, with every overlap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import RankPool

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd import OverlapConfig

WORDS = 24
OVERLAPS = {"off": OverlapConfig("off"), "slices": OverlapConfig("slices", chunks=2), "ring": OverlapConfig("ring")}
OVERLAPS["exchange"] = OverlapConfig("exchange", chunks=2)


def model_of(name: str) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    if name == "gpt2":
        drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config: Any = transformers.GPT2Config(
            vocab_size=WORDS, n_positions=8, n_embd=16, n_layer=1, n_head=4, bos_token_id=0, eos_token_id=0, **drops
        )
        return transformers.GPT2LMHeadModel(config).double()
    if name == "bert":
        drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = transformers.BertConfig(intermediate_size=32, max_position_embeddings=8, **sizes, **drops)
        return transformers.BertForMaskedLM(config).double()
    config = transformers.LlamaConfig(intermediate_size=32, num_key_value_heads=4, attention_bias=True, **sizes)
    return transformers.LlamaForCausalLM(config).double()


def in_turn(comm: Communicator, name: str, training_first: bool) -> None:
    ids = torch.arange(16).view(2, 8) % WORDS
    plain = model_of(name)
    expected = plain(input_ids=ids, labels=ids)
    expected.loss.backward()
    for way, overlap in OVERLAPS.items():
        for sequence_parallel in (False, True):
            model = model_of(name)
            ad.parallelize(model, comm, getattr(ad.plans, name), sequence_parallel=sequence_parallel, overlap=overlap)
            for training in (training_first, not training_first, training_first):
                if training:
                    model.zero_grad()
                    loss = model(input_ids=ids, labels=ids).loss
                    loss.backward()
                    ad.finish_gradients(model)
                    norm = ad.clip_grad_norm_(model, 1e9)
                    whole = torch.nn.utils.get_total_norm(
                        [one.grad for one in plain.parameters() if one.grad is not None]
                    )
                    torch.testing.assert_close(norm, whole, msg=lambda text, way=way: f"{way}: {text}")  # type: ignore[misc]
                else:
                    with torch.inference_mode():
                        loss = model(input_ids=ids, labels=ids).loss
                torch.testing.assert_close(loss, expected.loss, msg=lambda text, way=way: f"{way}: {text}")  # type: ignore[misc]


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize(("n", "training_first"), [(2, False), (2, True), (4, False)])
def test_inference_and_training_of_a_model(ranks: RankPool, n: int, name: str, training_first: bool) -> None:
    ranks.run(n, in_turn, name, training_first)
