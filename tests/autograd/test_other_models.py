"""Plans that a user writes for models whose plans are not in the library: loss and gradients of the unsharded ones.

Each plan is written as one would be in a program: data, and a function where a model needs what the roles do not say.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple

import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd.layers.shards import Shard, Sharded, shard_of

pytest.importorskip("transformers")

WORDS, BATCH, SEQUENCE = 61, 2, 8
Plan = dict[str, Any]

by_heads = ("column", {"heads": "num_attention_heads"})

# Queries, keys and values of a head lie together in the outputs of one layer: a plain cut is one by heads.
gpt_neox: Plan = {
    "**.embed_in": "vocab_embedding",
    "**.layers.0": "sequence_begin",
    "**.layers.*.input_layernorm": "sequence",
    "**.layers.*.attention": "shared_input",  # it takes the length of the sequence from its input
    "**.layers.*.attention.query_key_value": by_heads,
    "**.layers.*.attention.dense": "row",
    "**.layers.*.post_attention_layernorm": "sequence",
    "**.layers.*.mlp.dense_h_to_4h": "column",
    "**.layers.*.mlp.dense_4h_to_h": "row",
    "**.final_layer_norm": ["sequence", "sequence_end"],
    "**.lm_head": "vocab_head",
}

# OPT's MLP is called with batch and sequence in one dimension, the first.
opt: Plan = {
    "**.decoder.embed_tokens": "vocab_embedding",
    "**.decoder.embed_positions": "replicated",
    "**.decoder.project_*": "replicated",
    "**.decoder.layers.0": "sequence_begin",
    "**.layers.*.self_attn_layer_norm": "sequence",
    "**.layers.*.self_attn": ["shared_input", ("divide", {"attributes": ["num_heads"]})],
    "**.layers.*.self_attn.[qkv]_proj": by_heads,
    "**.layers.*.self_attn.out_proj": "row",
    "**.layers.*.final_layer_norm": "sequence",
    "**.layers.*.fc1": ("column", {"seq_dim": 0}),
    "**.layers.*.fc2": ("row", {"seq_dim": 0}),
    "**.decoder.layers.-1": "sequence_end",
    "**.decoder.final_layer_norm": "replicated",
    "**.lm_head": "vocab_head",
}

roberta: Plan = {
    **{pattern: role for pattern, role in ad.plans.bert.items() if "cls" not in pattern},
    "**.lm_head": "replicated",  # whose bias is that of its decoder
    "**.lm_head.dense": "replicated",
    "**.lm_head.layer_norm": "replicated",
    "**.lm_head.decoder": "vocab_head",
}

# The embedding scales what it finds, so it stays as it is, and with it the head that shares its weight.
gemma2: Plan = {
    **ad.plans.llama,
    "**.embed_tokens": "replicated",
    "**.layers.*.pre_feedforward_layernorm": "sequence",
    "**.layers.*.post_feedforward_layernorm": "sequence",
    "**.lm_head": "replicated",
}

# Attention is cut; every rank has all experts, and sends them its part of the sequence.
mixtral: Plan = {
    **{pattern: role for pattern, role in ad.plans.llama.items() if ".mlp" not in pattern},
    "**.mlp.gate": "sequence",
    "**.mlp.experts": "sequence",
}


# Keys and values of what the encoder has made: whole, since its last norm is a "sequence_end".
of_encoder = ("column", {"gather_input": True, "sequence_parallel": False})


class PositionBias(Sharded):
    """An embedding of which each rank has the columns of its heads."""

    def __init__(self, embedding: nn.Embedding, comm: Communicator) -> None:
        super().__init__()
        self.comm, self.shape = comm, tuple(embedding.weight.shape)
        own = self.shards()["weight"].own(embedding.weight.detach()).clone()
        self.weight = nn.Parameter(own, requires_grad=embedding.weight.requires_grad)
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
    "**.EncDecAttention.[kv]": of_encoder,
    "**.o": "row",
    "**.layer_norm": "sequence",
    "**.DenseReluDense.wi*": "column",
    "**.DenseReluDense.wo": "row",
    "**.final_layer_norm": ["sequence", "sequence_end"],
    "**.lm_head": "vocab_head",
}


def alibi_of_own_heads(attention: nn.Module, comm: Communicator) -> nn.Module:
    """Bloom makes the bias of all heads in one place, [batch * heads, 1, length], and passes it to every layer."""

    def own(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        alibi = kwargs["alibi"].unflatten(0, (args[0].shape[0], -1)).chunk(comm.size, 1)[comm.rank]
        return args, {**kwargs, "alibi": alibi.flatten(0, 1)}

    attention.register_forward_pre_hook(own, with_kwargs=True)
    return attention


bloom: Plan = {
    "**.word_embeddings": "vocab_embedding",
    "**.word_embeddings_layernorm": "replicated",
    "**.h.0": "sequence_begin",
    "**.h.*.input_layernorm": "sequence",
    "**.h.*.self_attention": ["shared_input", ("divide", {"attributes": ["num_heads"]}), alibi_of_own_heads],
    "**.h.*.self_attention.query_key_value": ("column", {"heads": "n_head"}),
    "**.h.*.self_attention.dense": "row",
    "**.h.*.post_attention_layernorm": "sequence",
    "**.h.*.mlp.dense_h_to_4h": "column",
    "**.h.*.mlp.dense_4h_to_h": "row",
    "**.ln_f": ["sequence", "sequence_end"],
    "**.lm_head": "vocab_head",
}


# Queries, keys and values of all heads follow one another; the number of heads is that of the configuration, too.
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


bert_like = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
llama_like = {**bert_like, "num_key_value_heads": 2, "pad_token_id": 0}


class Case(NamedTuple):
    plan: Plan
    config: str
    kind: str
    sizes: dict[str, Any]
    exact: bool = True  # False: norms or logits are computed in float32, whatever the model's type

    def make(self) -> Any:
        import transformers

        settings = getattr(transformers, f"{self.config}Config")(**{"vocab_size": WORDS, **self.sizes})
        return getattr(transformers, self.kind)(settings)


few = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 16}
coded = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
experts = {"num_local_experts": 4, "experts_implementation": "eager"}
CASES = {
    "GPT-NeoX": Case(
        gpt_neox,
        "GPTNeoX",
        "GPTNeoXForCausalLM",
        {**bert_like, "use_parallel_residual": False, "tie_word_embeddings": True},
    ),
    "OPT": Case(opt, "OPT", "OPTForCausalLM", {**few, "do_layer_norm_before": False, "dropout": 0.0}),
    "Bloom": Case(bloom, "Bloom", "BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "RoBERTa": Case(roberta, "Roberta", "RobertaForMaskedLM", {**bert_like, **no_dropout}),
    "Gemma 2": Case(gemma2, "Gemma2", "Gemma2ForCausalLM", {**llama_like, "head_dim": 16, "sliding_window": 4}, False),
    "Phi3": Case(phi3, "Phi3", "Phi3ForCausalLM", llama_like),
    "Mixtral": Case(mixtral, "Mixtral", "MixtralForCausalLM", {**llama_like, **experts}),
    "T5": Case(t5, "T5", "T5ForConditionalGeneration", {**coded, "decoder_start_token_id": 0}),
    "BERT, classes": Case(
        {**ad.plans.bert, "**.classifier": "replicated"},
        "Bert",
        "BertForSequenceClassification",
        {**bert_like, **no_dropout},
    ),
}


def batch(name: str) -> dict[str, Tensor]:
    """Padded at the end."""
    torch.manual_seed(100)
    ids = torch.randint(3, WORDS, (BATCH, SEQUENCE))
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    labels = torch.tensor([1, 0]) if "classes" in name else ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "labels": labels}


def agrees(comm: Communicator, name: str, sequence_parallel: bool) -> None:
    case = CASES[name]
    torch.manual_seed(3)
    whole: Any = case.make().double()
    for parameter in whole.parameters():  # biases begin as zeros, norms as ones
        parameter.data += 0.1 * torch.randn_like(parameter)
    model: Any = ad.parallelize(copy.deepcopy(whole), comm, case.plan, sequence_parallel)
    tolerance = {"rtol": 1e-9, "atol": 1e-11} if case.exact else {"rtol": 1e-4, "atol": 1e-6}
    losses = []
    for one in (whole, model):
        losses.append(one(**batch(name)).loss)
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0)  # some are summed in single precision
    ad.finish_gradients(model)
    expected, cut = dict(whole.named_parameters()), 0
    assert dict(model.named_parameters()).keys() == expected.keys()
    for path, parameter in model.named_parameters():
        shard, right = shard_of(parameter), expected[path].grad
        cut += shard is not None and shard.dim is not None
        assert (parameter.grad is None) == (right is None), path
        if right is not None:
            grad = parameter.grad if shard is None else shard.gather(parameter.grad)
            torch.testing.assert_close(grad, right, **tolerance, msg=functools.partial(_told, path))  # type: ignore[arg-type]
    assert cut >= 10  # that it has been made parallel at all


def _told(path: str, text: str) -> str:
    return f"{path}: {text}"


def both_ways(comm: Communicator, name: str) -> None:
    for sequence_parallel in (True, False):
        agrees(comm, name, sequence_parallel)


@pytest.mark.parametrize(
    ("name", "n"),
    [
        *((name, 4 if name in ("OPT", "Bloom", "T5") else 2) for name in CASES),
        *(pytest.param(name, 2, marks=pytest.mark.slow) for name in ("OPT", "Bloom", "T5")),
    ],
)
def test_a_plan_of_ones_own_gives_the_unsharded_gradients(ranks: RankPool, name: str, n: int) -> None:
    ranks.run(n, both_ways, name)
