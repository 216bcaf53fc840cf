"""Families of transformers with the built-in plans.

Outputs and gradients equal those of the unsharded model, or every rank raises before the model changes and the error
says how to fix the plan."""

from __future__ import annotations

from typing import Any

import pytest
from fuzz import model_fuzzing, model_ranks
from fuzz.model_families import ADDED
from ranks import RankPool
from test_other_models import EXPERTS, expect, mixtral, t5, trial

import pynccl_autograd as ad
from pynccl import Communicator

pytest.importorskip("transformers")

LIKE_LLAMA = (
    *("Llama", "Mistral", "Qwen2", "Qwen3", "Cohere", "Cohere2", "Granite", "Olmo", "Helium", "Nemotron", "SmolLM3"),
    *("Ministral", "Arcee", "SeedOss", "Ernie4_5"),
)


@pytest.mark.parametrize("family", LIKE_LLAMA)
def test_models_with_llamas_structure_work_with_its_plan(ranks: RankPool, family: str) -> None:
    """The position in the list determines the number of ranks (2 to 4) and whether embeddings are tied."""
    index = LIKE_LLAMA.index(family)
    tied = {"tie_word_embeddings": index % 2 == 0}
    for sequence_parallel in (True, False):
        n = 2 + (index + sequence_parallel) % 3
        expect(ranks, trial(family, ad.plans.llama, n, sequence_parallel=sequence_parallel, sizes=tied))


REFUSED: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    # family, words of the error, additions to Llama's plan, sizes
    ("StableLm", "StableLmAttention reads num_heads and num_key_value_heads", {}, {}),
    ("BitNet", "attn_sub_norm comes after the 'row' layers of a 'shared_input' module", {}, {}),
    ("BitNet", "attn_sub_norm is sized for all", {"**.*_sub_norm": "partial"}, {}),
    ("Llama", "the heads would not match", {"**.[kv]_proj": "partial"}, {"num_key_value_heads": 2}),
    ("DiffLlama", "model.layers.0.self_attn is 'shared_input' and has parameters of its own", {}, {}),
    ("Olmo2", "model.layers.0.self_attn.q_norm is sized for all", {}, {}),
    ("Olmo3", "model.layers.0.self_attn.q_norm is sized for all", {}, {}),
    ("Cohere", "q_norm is sized for all 4 of", {}, {"use_qk_norm": True}),
    ("HunYuanDenseV1", "_layernorm comes after the 'row' layers", {}, {}),
    ("Apertus", "mlp.act_fn comes after the 'row' layers", {}, {}),
    ("Llama", "is 'partial' in the plan; use 'sequence'", {"**.input_layernorm": "partial"}, {}),
    ("Gemma", "use 'replicated' for it and for modules tied to it", {}, {"tie_word_embeddings": True}),
    ("Llama", "q_proj is 'vocab_head', but it is within", {"**.self_attn.q_proj": "vocab_head"}, {}),
    ("Llama", "no module after it is 'sequence_end'", {"**.norm": "replicated"}, {}),
    ("Llama", "lm_head is neither between", {"**.lm_head": "sequence"}, {}),
    ("Qwen2", "lm_head.weight ('replicated')", {"**.lm_head": "replicated"}, {"tie_word_embeddings": True}),
]


def check_rejected_models(comm: Communicator) -> None:
    """Check the errors; model_ranks checks that the model has not changed."""
    for family, words, plan, sizes in REFUSED:
        found = model_ranks.run(comm, trial(family, {**ad.plans.llama, **plan}, sizes=sizes))
        assert found.what == "rejected" and words in found.text, (family, found)


def test_a_model_with_another_structure_raises_before_it_changes(ranks: RankPool) -> None:
    ranks.run(2, check_rejected_models)


@pytest.mark.parametrize(("n", "sequence_parallel"), [(2, True), (3, False)])
def test_the_fixes_that_errors_suggest_work(ranks: RankPool, n: int, sequence_parallel: bool) -> None:
    for family in ("StableLm", "HunYuanDenseV1", "Apertus", "Gemma"):
        sizes = {"tie_word_embeddings": family == "Gemma"}
        plan = {**ad.plans.llama, **ADDED[family]}
        expect(ranks, trial(family, plan, n, sequence_parallel=sequence_parallel, sizes=sizes))
    # Queries, keys and values in one matrix must be sharded separately.
    expect(ranks, trial("GPT2", {**ad.plans.gpt2, "**.c_attn": "column"}, 3), "rejected", "c_attn has 72 outputs, but")
    expect(ranks, trial("GPT2", {**ad.plans.gpt2, "**.c_attn": ("column", {"blocks": 3})}, 3))


@pytest.mark.parametrize(
    ("n", "sequence_parallel", "return_dict"), [(2, True, True), (3, False, False), (4, True, False)]
)
def test_outputs_are_full_within_any_outer_model(
    ranks: RankPool, n: int, sequence_parallel: bool, return_dict: bool
) -> None:
    call = {"return_dict": return_dict}
    for around in ("", "reward", "two"):
        each_trial = trial("Llama", ad.plans.llama, n, around, sequence_parallel=sequence_parallel, call=call)
        expect(ranks, each_trial)
    expect(ranks, trial("T5", t5, n, sequence_parallel=sequence_parallel, call=call))
    call["output_router_logits"] = True
    expect(ranks, trial("Mixtral", mixtral, n, sequence_parallel=sequence_parallel, call=call, sizes=EXPERTS))


def test_sharded_logits_give_the_loss_within_an_outer_model_too(ranks: RankPool) -> None:
    for around in ("", "outer"):
        expect(ranks, trial("Llama", ad.plans.llama, 2, around, gather_logits=False))
    words = "labels: each rank has only the logits of its vocabulary shard"
    expect(ranks, trial("T5", t5, 2, gather_logits=False), "failed", words)


def test_random_models_equal_the_unsharded_model_or_raise(ranks: RankPool) -> None:
    found = model_fuzzing.fuzz(ranks, range(12), [2, 3])
    assert not found.failures, "\n".join(map(str, found.failures))
    assert found.outcomes["equal"] >= 2 and found.outcomes["rejected"] >= 2
