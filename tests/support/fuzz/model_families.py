"""Random small transformers models and plans, drawn from a seed, for scripts/faults/fuzzer.py."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pynccl_autograd as ad

WORDS = 29

# Families whose modules are named like Llama's. For some of them, Llama's plan must raise.
LLAMAS = (
    *("Llama", "Mistral", "Qwen2", "Qwen3", "Cohere", "Cohere2", "Granite", "Olmo", "Helium", "Nemotron", "SmolLM3"),
    *("Ministral", "Arcee", "SeedOss", "Ernie4_5", "Gemma", "Gemma2", "HunYuanDenseV1", "Apertus", "StableLm"),
    *("BitNet", "DiffLlama", "Olmo2", "Olmo3", "Starcoder2", "Glm", "Exaone4", "Mixtral", "GptOss", "Phi3"),
    "Qwen3Moe",
)
FAMILIES = (*LLAMAS, "GPT2", "GPT2", "Bert", "Bert", "T5", "T5", "GPTNeoX", "Roberta")

# Additions that the plan of a family needs to be accepted.
ADDED: dict[str, dict[str, Any]] = {
    "HunYuanDenseV1": {"**.self_attn.*_layernorm": "partial"},
    "Apertus": {
        "**.mlp.act_fn": "partial",
        "**.attention_layernorm": "sequence",
        "**.feedforward_layernorm": "sequence",
        "**.mlp.up_proj": "column",
    },
    "Gemma": {"**.embed_tokens": "replicated", "**.lm_head": "replicated"},
    "Gemma2": {
        "**.embed_tokens": "replicated",
        "**.lm_head": "replicated",
        "**.*_feedforward_layernorm": "sequence",
    },
    "StableLm": {"**.self_attn": ("divide", {"attributes": ["num_heads", "num_key_value_heads"]})},
    "Starcoder2": {"**.mlp.c_fc": "column", "**.mlp.c_proj": "row"},
}

ROLES = ("column", "row", "vocab_embedding", "vocab_head", "shared_input", "key_value", "sequence_end")
PLACES = ("replicated", "replicated", "sequence", "partial")
NAMES = (
    *("embed_tokens", "lm_head", "norm", "input_layernorm", "post_attention_layernorm", "self_attn", "mlp", "q_proj"),
    *("k_proj", "[kv]_proj", "o_proj", "gate_proj", "down_proj", "act_fn", "wte", "wpe", "ln_1", "ln_f", "c_attn"),
    *("attn", "c_proj", "c_fc", "shared", "layer_norm", "final_layer_norm", "DenseReluDense", "SelfAttention"),
    *("decoder", "LayerNorm", "word_embeddings", "dense", "predictions", "query", "self", "head", "inner", "q_norm"),
    *("gate", "score"),
)


class Trial(NamedTuple):
    """A model, its plan, and how to call it."""

    seed: int
    ranks: int
    family: str
    sizes: dict[str, Any]
    plan: dict[str, Any]
    changes: dict[str, Any]
    sequence_parallel: bool
    gather_logits: bool
    around: str  # module that contains the model: "", "reward", "two", "tied" or "outer"
    mesh: tuple[int, int]
    frozen: float
    call: dict[str, Any]
    in_backward: bool

    def text(self) -> str:
        shown = {name: value for name, value in self._asdict().items() if name != "plan"}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


def draw(seed: int, ranks: int) -> Trial:
    rng = random.Random(f"{seed} {ranks}")
    family = rng.choice(FAMILIES)
    sizes = _sizes(rng, family, ranks)
    plan = _plan(rng, family)
    names = list(NAMES) + [pattern.rpartition(".")[2] for pattern in plan] * 2
    around = rng.choice(("", "", "reward", "two", "tied"))
    if around == "tied" and rng.random() < 0.7:
        plan["**.head"] = plan.get("**.lm_head", "vocab_head")
    changes = {}
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
        changes[f"**.{rng.choice(names)}"] = rng.choice(PLACES if rng.random() < 0.7 else ROLES)
    call: dict[str, Any] = {"return_dict": rng.random() < 0.6, "labels": rng.random() < 0.7}
    for name in ("output_hidden_states", "output_attentions", "output_router_logits"):
        call[name] = rng.random() < 0.5
    if family not in ("Mixtral", "GptOss", "Qwen3Moe"):
        del call["output_router_logits"]
    return Trial(
        seed,
        ranks,
        family,
        sizes,
        {**plan, **changes},
        changes,
        rng.random() < 0.6,
        rng.random() < 0.8 or bool(around) or family == "T5",  # the outer module needs the full logits
        around,
        rng.choice(((1, ranks), (1, ranks), (2, ranks // 2))) if ranks % 2 == 0 and ranks > 2 else (1, ranks),
        rng.choice((0.0, 0.0, 0.3)),
        call,
        rng.random() < 0.3,
    )


def _sizes(rng: random.Random, family: str, ranks: int) -> dict[str, Any]:
    heads = ranks * rng.choice((1, 2)) if rng.random() < 0.9 else rng.choice((2, 3, 4, 6))
    dim = rng.choice((4, 8))
    kv = rng.choice([divisor for divisor in range(1, heads + 1) if heads % divisor == 0])
    hidden = heads * dim
    inner = 12 * rng.choice((1, 2)) if rng.random() < 0.9 else hidden
    layers, tied = rng.choice((1, 2, 3)), rng.random() < 0.5
    act = rng.choice(("gelu", "silu", "xielu")) if rng.random() < 0.3 else None
    common = {"vocab_size": WORDS, "tie_word_embeddings": tied, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if family == "GPT2":
        drops = {
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            **({"activation_function": act} if act else {}),
        }
        return {**common, **drops, "n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": 24}
    if family == "T5":
        gated = rng.choice(("relu", "gated-gelu"))
        t5 = {"d_model": 8 * rng.choice((2, 3)), "d_kv": dim, "d_ff": inner, "num_layers": layers, "num_heads": heads}
        return {**common, **t5, "dropout_rate": 0.0, "decoder_start_token_id": 0, "feed_forward_proj": gated}
    sizes: dict[str, Any] = {**common, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    sizes |= {"intermediate_size": inner, **({"hidden_act": act} if act else {})}
    if family in ("Bert", "Roberta"):
        drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return {**sizes, **drops, "max_position_embeddings": 24, "type_vocab_size": 2}
    if family == "GPTNeoX":
        return {**sizes, "use_parallel_residual": rng.random() < 0.5, "max_position_embeddings": 24}
    sizes |= {"num_key_value_heads": kv, "head_dim": dim, "attention_bias": rng.random() < 0.3}
    sizes |= {"attention_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0, "hidden_dropout": 0.0}
    if family in ("StableLm", "Cohere"):
        sizes["use_qk_norm" if family == "Cohere" else "qk_layernorm"] = rng.random() < 0.4
    if family in ("Mixtral", "GptOss", "Qwen3Moe"):
        sizes |= {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
        sizes |= {"experts_implementation": "eager"}
    if family in ("Gemma2", "Cohere2", "Mistral"):
        sizes["sliding_window"] = 4
    return sizes


def _plan(rng: random.Random, family: str) -> dict[str, Any]:
    import test_other_models as others  # type: ignore[import-not-found]

    if family == "Bert":
        return dict(ad.plans.bert)
    if family == "GPT2":
        return dict(ad.plans.gpt2)
    plans = {"T5": others.t5, "GPTNeoX": others.gpt_neox, "Roberta": others.roberta, "Mixtral": others.mixtral}
    plans["Qwen3Moe"] = others.mixtral
    plan: dict[str, Any] = dict(plans.get(family, ad.plans.llama))
    return {**plan, **ADDED.get(family, {})} if rng.random() < 0.85 else plan
