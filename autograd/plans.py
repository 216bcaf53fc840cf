"""Plans of common models for `parallelize`. A plan is a dict that you can copy and change.

A plan maps a pattern of module paths to what `parallelize` does with these modules. In a pattern, * matches one
component of a path or a substring of it, and ** any number of components. A number is the index in a list of layers; -1
is the last one.
"""

from __future__ import annotations

from typing import Any

from pynccl.bindings.listing import public_dir

__all__ = ["Plan", "bert", "gpt2", "llama"]
__dir__ = public_dir(globals())

Plan = dict[str, Any]

# LlamaModel, LlamaForCausalLM, ...; Mistral, Qwen2 and Qwen3, whose modules have the same names
llama: Plan = {
    "**.embed_tokens": "vocab_embedding",
    "**.layers.0": "sequence_begin",
    "**.layers.*.input_layernorm": "sequence",
    "**.layers.*.self_attn": ["shared_input", ("attention_dropout", {"p": "attention_dropout"})],
    "**.layers.*.self_attn.q_proj": ("column", {"heads": "num_attention_heads"}),
    "**.layers.*.self_attn.[kv]_proj": ("key_value", {"heads": "num_key_value_heads"}),
    "**.layers.*.self_attn.[qk]_norm": "partial",
    "**.layers.*.self_attn.o_proj": "row",
    "**.layers.*.post_attention_layernorm": "sequence",
    "**.layers.*.mlp": "shared_input",
    "**.layers.*.mlp.gate_proj": "column",
    "**.layers.*.mlp.up_proj": "column",
    "**.layers.*.mlp.down_proj": "row",
    "**.norm": ["sequence", "sequence_end"],
    "**.lm_head": "vocab_head",
}

# GPT2Model, GPT2LMHeadModel, ...
gpt2: Plan = {
    "**.wte": "vocab_embedding",
    "**.wpe": "replicated",
    "**.drop": "replicated",
    "**.h.0": "sequence_begin",
    "**.h.*.ln_1": "sequence",
    "**.h.*.attn": [
        ("divide", {"attributes": ["split_size", "num_heads"]}),
        ("attention_dropout", {"p": "attn_dropout"}),
    ],
    "**.h.*.attn.attn_dropout": "partial",
    "**.h.*.attn.resid_dropout": "sequence",
    "**.h.*.attn.c_attn": ("column", {"heads": "num_attention_heads", "blocks": 3}),
    "**.h.*.attn.c_proj": "row",
    "**.h.*.ln_2": "sequence",
    "**.h.*.mlp.c_fc": "column",
    "**.h.*.mlp.c_proj": "row",
    "**.h.*.mlp.dropout": "sequence",
    "**.ln_f": ["sequence", "sequence_end"],
    "**.lm_head": "vocab_head",
}

# BertModel, BertForMaskedLM, ...
bert: Plan = {
    "**.embeddings.word_embeddings": "vocab_embedding",
    "**.embeddings.position_embeddings": "replicated",
    "**.embeddings.token_type_embeddings": "replicated",
    "**.embeddings.LayerNorm": "replicated",
    "**.embeddings.dropout": "replicated",
    "**.encoder.layer.0": "sequence_begin",
    "**.encoder.layer.*.attention.self": ["shared_input", ("attention_dropout", {"p": "dropout"})],
    "**.encoder.layer.*.attention.self.dropout": "partial",
    "**.encoder.layer.*.attention.self.query": ("column", {"heads": "num_attention_heads"}),
    "**.encoder.layer.*.attention.self.key": "column",
    "**.encoder.layer.*.attention.self.value": "column",
    "**.encoder.layer.*.attention.output.dense": "row",
    "**.encoder.layer.*.attention.output.dropout": "sequence",
    "**.encoder.layer.*.attention.output.LayerNorm": "sequence",
    "**.encoder.layer.*.intermediate.dense": "column",
    "**.encoder.layer.*.output.dense": "row",
    "**.encoder.layer.*.output.dropout": "sequence",
    "**.encoder.layer.*.output.LayerNorm": "sequence",
    "**.encoder.layer.-1": "sequence_end",
    "**.pooler.dense": "replicated",
    "**.cls.predictions": "replicated",  # shares its bias with the decoder
    "**.cls.predictions.transform.*": "replicated",
    "**.cls.predictions.decoder": "vocab_head",
}
