"""User-written plans for models without a built-in plan give the loss and gradients of the unsharded model.

Each plan is data as in a user's program, with a custom module where no role fits.
"""

from __future__ import annotations

from typing import Any

import pytest
from fuzz import model_ranks
from fuzz.model_families import Trial
from ranks import RankPool
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd.layers.shard import Shard
from pynccl_autograd.layers.shards import Sharded

pytest.importorskip("transformers")

WORDS, BATCH, SEQUENCE = 61, 2, 8
Plan = dict[str, Any]

by_heads = ("column", {"heads": "num_attention_heads"})

# Queries, keys and values of a head are adjacent in the outputs of one layer: plain sharding is by heads.
gpt_neox: Plan = {
    "**.embed_in": "vocab_embedding",
    "**.layers.0": "sequence_begin",
    "**.layers.*.input_layernorm": "sequence",
    "**.layers.*.attention": "shared_input",  # it reads the sequence length from its input
    "**.layers.*.attention.query_key_value": by_heads,
    "**.layers.*.attention.dense": "row",
    "**.layers.*.post_attention_layernorm": "sequence",
    "**.layers.*.mlp.dense_h_to_4h": "column",
    "**.layers.*.mlp.dense_4h_to_h": "row",
    "**.final_layer_norm": ["sequence", "sequence_end"],
    "**.lm_head": "vocab_head",
}

roberta: Plan = {
    **{pattern: role for pattern, role in ad.plans.bert.items() if "cls" not in pattern},
    "**.lm_head": "replicated",  # its bias is the decoder's bias
    "**.lm_head.dense": "replicated",
    "**.lm_head.layer_norm": "replicated",
    "**.lm_head.decoder": "vocab_head",
}

# Attention is sharded; every rank has all experts and passes them its shard of the sequence.
mixtral: Plan = {
    **{pattern: role for pattern, role in ad.plans.llama.items() if ".mlp" not in pattern},
    "**.mlp.gate": "sequence",
    "**.mlp.experts": "sequence",
}


# Keys and values of the encoder's output, which is unsharded since its last norm is a "sequence_end".
encoder_kv = ("column", {"gather_input": True, "sequence_parallel": False})


class PositionBias(Sharded):
    """An embedding whose columns are sharded by heads."""

    def __init__(self, embedding: nn.Embedding, comm: Communicator) -> None:
        super().__init__()
        self.comm, self.shape = comm, tuple(embedding.weight.shape)
        shard = self.shards()["weight"].local(embedding.weight.detach()).clone()
        self.weight = nn.Parameter(shard, requires_grad=embedding.weight.requires_grad)
        self._mark()

    def shards(self) -> dict[str, Shard]:
        return {"weight": Shard(self.comm, 1, self.shape)}

    def forward(self, buckets: Tensor) -> Tensor:
        return nn.functional.embedding(buckets, self.weight)


t5: Plan = {
    "**.shared": "vocab_embedding",
    "**.embed_tokens": "vocab_embedding",
    "**.block.0": "sequence_begin",
    "**.SelfAttention": ["shared_input", ("divide", {"attributes": ["n_heads"]})],
    "**.SelfAttention.[qkv]": ("column", {"heads": "num_heads"}),
    "**.relative_attention_bias": PositionBias,
    "**.EncDecAttention": ["shared_input", ("divide", {"attributes": ["n_heads"]})],
    "**.EncDecAttention.q": ("column", {"heads": "num_heads"}),
    "**.EncDecAttention.[kv]": encoder_kv,
    "**.o": "row",
    "**.layer_norm": "sequence",
    "**.DenseReluDense.wi*": "column",
    "**.DenseReluDense.wo": "row",
    "**.final_layer_norm": ["sequence", "sequence_end"],
    "**.lm_head": "vocab_head",
}


# All queries come first, then all keys, then all values; the number of heads is also read from the configuration.
phi3: Plan = {
    "**.embed_tokens": "vocab_embedding",
    "**.layers.0": "sequence_begin",
    "**.layers.*.input_layernorm": "sequence",
    "**.layers.*.self_attn": [
        "shared_input",
        ("divide", {"attributes": ["config.num_attention_heads", "num_key_value_heads"]}),
    ],
    "**.layers.*.self_attn.qkv_proj": ("column", {"blocks": (32, 16, 16)}),
    "**.layers.*.self_attn.o_proj": "row",
    "**.layers.*.post_attention_layernorm": "sequence",
    "**.layers.*.mlp.gate_up_proj": ("column", {"blocks": 2}),
    "**.layers.*.mlp.down_proj": "row",
    "**.norm": ["sequence", "sequence_end"],
    "**.lm_head": "vocab_head",
}


def trial(family: str, plan: Plan, ranks: int = 2, around: str = "", **changes: Any) -> Trial:
    """Return a trial: a small model without dropout, its plan and a call."""
    heads = 2 * ranks
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
    sizes: dict[str, Any] = {"vocab_size": 29, "hidden_size": 8 * heads, "intermediate_size": 24, **ends}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 8, "num_hidden_layers": 2}
    sizes |= {"attention_dropout": 0.0, "residual_dropout": 0.0}
    if family == "T5":
        sizes = {"vocab_size": 29, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": heads}
        sizes |= {"dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0}
    if family == "GPT2":
        sizes = {"vocab_size": 29, "n_embd": 24, "n_layer": 2, "n_head": ranks, "n_positions": 24}
        sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes |= changes.pop("sizes", {})
    call = {"return_dict": True, "labels": True, "output_hidden_states": True, "output_attentions": True}
    call |= changes.pop("call", {})
    result = Trial(7, ranks, family, sizes, dict(plan), {}, True, True, around, (1, ranks), 0.0, call, False)
    return result._replace(**changes)


def expect(pool: RankPool, case: Trial, what: str = "equal", text: str = "") -> None:
    """Check the outcome: equal to the unsharded model, or an error on every rank that left the model unchanged."""
    found = pool.run(case.ranks, model_ranks.run, case)
    assert {outcome.what for outcome in found} == {what}, found
    assert all(text in outcome.text for outcome in found), found


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 24}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
CASES: list[tuple[str, Plan, int, dict[str, Any]]] = [  # family, plan, ranks, sizes
    ("GPTNeoX", gpt_neox, 2, {"use_parallel_residual": False, "tie_word_embeddings": True}),
    ("Roberta", roberta, 2, NO_DROPOUT),
    ("Phi3", phi3, 2, {"num_key_value_heads": 2}),
    ("Mixtral", mixtral, 2, {"num_key_value_heads": 2, **EXPERTS}),
    ("T5", t5, 4, {}),
]


@pytest.mark.parametrize(("family", "plan", "n", "sizes"), CASES, ids=[case[0] for case in CASES])
def test_a_user_written_plan_gives_the_unsharded_gradients(
    ranks: RankPool, family: str, plan: Plan, n: int, sizes: dict[str, Any]
) -> None:
    for sequence_parallel in (True, False):
        expect(ranks, trial(family, plan, n, sequence_parallel=sequence_parallel, sizes=sizes))
