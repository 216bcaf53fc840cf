"""Families of transformers under the plans of the library: equal to the unsharded model in all that they give and in
every gradient, or refused on every rank before anything is changed, with a sentence that says what is right."""

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
def test_models_that_are_built_as_llama_is_are_right_with_its_plan(ranks: RankPool, family: str) -> None:
    """Each on 2 to 4 ranks, with and without sequence parallelism, tied or not: as its place in the list has it."""
    place = LIKE_LLAMA.index(family)
    tied = {"tie_word_embeddings": place % 2 == 0}
    for sequence_parallel in (True, False):
        n = 2 + (place + sequence_parallel) % 3
        expect(ranks, trial(family, ad.plans.llama, n, sequence_parallel=sequence_parallel, sizes=tied))


REFUSED: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    # family, words, what is added to the plan of Llama, sizes
    ("StableLm", "StableLmAttention counts heads by num_heads and num_key_value_heads", {}, {}),
    ("BitNet", "attn_sub_norm is within model.layers.0.self_attn", {}, {}),
    ("BitNet", "attn_sub_norm is made for all", {"**.*_sub_norm": "partial"}, {}),
    ("Llama", "they would meet the wrong ones", {"**.[kv]_proj": "partial"}, {"num_key_value_heads": 2}),
    ("DiffLlama", "model.layers.0.self_attn is within model.layers.0.self_attn", {}, {}),
    ("Olmo2", "model.layers.0.self_attn.q_norm is made for all", {}, {}),
    ("Olmo3", "model.layers.0.self_attn.q_norm is made for all", {}, {}),
    ("Cohere", "q_norm is made for all 4 of", {}, {"use_qk_norm": True}),
    ("HunYuanDenseV1", "layernorm is within model.layers.0.self_attn", {}, {}),
    ("Apertus", "says nothing of it; say 'partial'", {}, {}),
    ("Llama", "the plan says 'partial' of it; say 'sequence'", {"**.input_layernorm": "partial"}, {}),
    ("Gemma", "say 'replicated' of it, and of what has the same parameter", {}, {"tie_word_embeddings": True}),
    ("Llama", "the plan says vocab_head of it", {"**.self_attn.q_proj": "vocab_head"}, {}),
    ("Llama", "'sequence_end' of no module after it", {"**.norm": "replicated"}, {}),
    ("Llama", "lm_head is not between", {"**.lm_head": "sequence"}, {}),
    ("Qwen2", "lm_head.weight ('replicated')", {"**.lm_head": "replicated"}, {"tie_word_embeddings": True}),
]


def refused_alike(comm: Communicator) -> None:
    """Nothing has changed then: model_ranks looks."""
    for family, words, plan, sizes in REFUSED:
        found = model_ranks.run(comm, trial(family, {**ad.plans.llama, **plan}, sizes=sizes))
        assert found.what == "refused" and words in found.text, (family, found)


def test_a_model_of_another_build_is_refused_before_anything_changes(ranks: RankPool) -> None:
    ranks.run(2, refused_alike)


@pytest.mark.parametrize(("n", "sequence_parallel"), [(2, True), (3, False)])
def test_what_the_errors_advise_is_right(ranks: RankPool, n: int, sequence_parallel: bool) -> None:
    for family in ("StableLm", "HunYuanDenseV1", "Apertus", "Gemma"):
        sizes = {"tie_word_embeddings": family == "Gemma"}
        plan = {**ad.plans.llama, **ADDED[family]}
        expect(ranks, trial(family, plan, n, sequence_parallel=sequence_parallel, sizes=sizes))
    # Queries, keys and values in one matrix are not cut as one thing.
    expect(ranks, trial("GPT2", {**ad.plans.gpt2, "**.c_attn": "column"}, 3), "refused", "c_attn has 72 outputs, and")
    expect(ranks, trial("GPT2", {**ad.plans.gpt2, "**.c_attn": ("column", {"blocks": 3})}, 3))


@pytest.mark.parametrize(
    ("n", "sequence_parallel", "return_dict"), [(2, True, True), (3, False, False), (4, True, False)]
)
def test_what_layers_give_is_whole_wherever_the_model_is_called_from(
    ranks: RankPool, n: int, sequence_parallel: bool, return_dict: bool
) -> None:
    call = {"return_dict": return_dict}
    for around in ("", "reward", "two"):
        one = trial("Llama", ad.plans.llama, n, around, sequence_parallel=sequence_parallel, call=call)
        expect(ranks, one)
    expect(ranks, trial("T5", t5, n, sequence_parallel=sequence_parallel, call=call))
    call["output_router_logits"] = True
    expect(ranks, trial("Mixtral", mixtral, n, sequence_parallel=sequence_parallel, call=call, sizes=EXPERTS))


def test_logits_that_stay_cut_have_their_loss_within_a_larger_model_too(ranks: RankPool) -> None:
    for around in ("", "outer"):
        expect(ranks, trial("Llama", ad.plans.llama, 2, around, gather_logits=False))
    told = "labels: each rank has the logits of its own words"
    expect(ranks, trial("T5", t5, 2, gather_logits=False), "failed", told)


def test_random_models_are_equal_or_refused(ranks: RankPool) -> None:
    found = model_fuzzing.fuzz(ranks, range(12), [2, 3])
    assert not found.failures, "\n".join(map(str, found.failures))
    assert found.ways["equal"] >= 2 and found.ways["refused"] >= 2
