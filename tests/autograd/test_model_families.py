"""Families of transformers under the plans of the library: equal to the unsharded model in all that they give and in
every gradient, or refused on every rank before anything is changed, with a sentence that says what is right."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import test_other_models as others
import torch
from fuzz import model_fuzzing, model_ranks
from fuzz.model_families import ADDED, Trial
from ranks import RankPool
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator

pytest.importorskip("transformers")

LIKE_LLAMA = (
    *("Llama", "Mistral", "Qwen2", "Qwen3", "Cohere", "Cohere2", "Granite", "Olmo", "Helium", "Nemotron", "SmolLM3"),
    *("Ministral", "Arcee", "SeedOss", "Ernie4_5"),
)


def trial(family: str, plan: dict[str, Any], ranks: int = 2, around: str = "", **changes: Any) -> Trial:
    heads = 2 * ranks
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
    none = {"attention_dropout": 0.0, "residual_dropout": 0.0}
    sizes: dict[str, Any] = {
        "vocab_size": 29,
        "hidden_size": 8 * heads,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
    }
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 8, **ends, **none}
    if family == "T5":
        sizes = {"vocab_size": 29, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": heads}
        sizes |= {"dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0}
    if family == "GPT2":
        sizes = {"vocab_size": 29, "n_embd": 24, "n_layer": 2, "n_head": ranks, "n_positions": 24}
        sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes |= changes.pop("sizes", {})
    call = {"return_dict": True, "labels": True, "output_hidden_states": True, "output_attentions": True}
    call |= changes.pop("call", {})
    made = Trial(7, ranks, family, sizes, dict(plan), {}, True, True, around, (1, ranks), 0.0, call, False)
    return made._replace(**changes)


def outcome(pool: RankPool, one: Trial) -> tuple[str, str]:
    found = pool.run(one.ranks, model_ranks.run, one)
    assert len({(each.what, each.text) for each in found}) == 1, found
    return found[0].what, found[0].text


def expect_equal(pool: RankPool, one: Trial) -> None:
    assert outcome(pool, one) == ("equal", "")


@pytest.mark.parametrize("family", LIKE_LLAMA)
def test_models_that_are_built_as_llama_is_are_right_with_its_plan(ranks: RankPool, family: str) -> None:
    """Each on 2 to 4 ranks, with and without sequence parallelism, tied or not: as its place in the list has it."""
    place = LIKE_LLAMA.index(family)
    tied = {"tie_word_embeddings": place % 2 == 0}
    for sequence_parallel in (True, False):
        n = 2 + (place + sequence_parallel) % 3
        expect_equal(ranks, trial(family, ad.plans.llama, n, sequence_parallel=sequence_parallel, sizes=tied))


PARTIAL, REPLICATED = {"**.self_attn.*_layernorm": "partial"}, {"**.self_attn.*_layernorm": "replicated"}
WHOLE_KEYS = {"**.[kv]_proj": "partial"}
OTHER_BUILDS: list[tuple[str, tuple[str, ...], dict[str, Any], dict[str, Any]]] = [
    # family, words, what is added to the plan of Llama, sizes
    ("StableLm", ("StableLmAttention counts heads by num_heads and num_key_value_heads", "'divide'"), {}, {}),
    ("StableLm", ("norms.0 is within model.layers.0.self_attn",), ADDED["StableLm"], {"qk_layernorm": True}),
    ("StableLm", ("is made for all 4 of",), {**ADDED["StableLm"], **PARTIAL}, {"qk_layernorm": True}),
    ("BitNet", ("attn_sub_norm is within model.layers.0.self_attn", "say 'partial'"), {}, {}),
    ("BitNet", ("attn_sub_norm is made for all",), {"**.*_sub_norm": "partial"}, {}),
    ("Granite", ("k_proj makes", "they would meet the wrong ones"), WHOLE_KEYS, {}),
    ("Llama", ("k_proj makes", "they would meet the wrong ones"), WHOLE_KEYS, {"num_key_value_heads": 2}),
    ("DiffLlama", ("model.layers.0.self_attn is within model.layers.0.self_attn",), {}, {}),
    ("Olmo2", ("model.layers.0.self_attn.q_norm is made for all", "give a function"), {}, {}),
    ("Olmo3", ("model.layers.0.self_attn.q_norm is made for all", "give a function"), {}, {}),
    ("Cohere", ("q_norm is made for all 4 of",), {}, {"use_qk_norm": True}),
    ("HunYuanDenseV1", ("layernorm is within model.layers.0.self_attn", "say 'partial'"), {}, {}),
    ("HunYuanDenseV1", ("the plan says 'replicated' of it; say 'partial'",), REPLICATED, {}),
    ("Apertus", ("act_fn is within model.layers.0.mlp", "says nothing of it; say 'partial'"), {}, {}),
    ("Llama", ("mlp.act_fn is within",), {}, {"hidden_act": "xielu"}),
    ("Llama", ("the plan says 'partial' of it; say 'sequence'",), {"**.input_layernorm": "partial"}, {}),
    ("Gemma", ("say 'replicated' of it, and of what has the same parameter",), {}, {"tie_word_embeddings": True}),
    ("Llama", ("the plan says vocab_head of it",), {"**.self_attn.q_proj": "vocab_head"}, {}),
]
OF_SEQUENCES: list[tuple[str, tuple[str, ...], dict[str, Any], dict[str, Any]]] = [
    ("Llama", ("'sequence_end' of no module after it",), {"**.norm": "replicated"}, {}),
    ("Llama", ("says 'replicated' of it; say 'sequence'",), {"**.norm": ["replicated", "sequence_end"]}, {}),
    ("Llama", ("lm_head is not between", "say 'replicated'"), {"**.lm_head": "sequence"}, {}),
]


def refused_alike(comm: Communicator, sequence_parallel: bool) -> None:
    for family, parts, plan, sizes in OTHER_BUILDS + (OF_SEQUENCES if sequence_parallel else []):
        for frozen in (0.0, 1.0) if family == "BitNet" and not plan else (0.0,):
            given = {**ad.plans.llama, **plan}
            one = trial(family, given, sequence_parallel=sequence_parallel, frozen=frozen, sizes=sizes)
            found = model_ranks.run(comm, one)
            assert found.what == "refused", (family, found)
            assert all(part in found.text for part in parts), (family, found)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_model_of_another_build_is_refused_before_anything_changes(ranks: RankPool, sequence_parallel: bool) -> None:
    ranks.run(2, refused_alike, sequence_parallel)


@pytest.mark.parametrize(("n", "sequence_parallel"), [(2, True), (3, False)])
def test_what_the_errors_advise_is_right(ranks: RankPool, n: int, sequence_parallel: bool) -> None:
    for family in ("StableLm", "HunYuanDenseV1", "Apertus", "Gemma"):
        sizes: dict[str, Any] = {"tie_word_embeddings": family == "Gemma"}
        plan = {**ad.plans.llama, **ADDED[family]}
        expect_equal(ranks, trial(family, plan, n, sequence_parallel=sequence_parallel, sizes=sizes))
    act = {**ad.plans.gpt2, "**.mlp.act": "partial"}
    options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "sizes": {"activation_function": "xielu"}}
    expect_equal(ranks, trial("GPT2", act, n, **copy.deepcopy(options)))
    what, text = outcome(ranks, trial("GPT2", ad.plans.gpt2, n, **options))
    assert what == "refused" and "transformer.h.0.mlp.act is beside 'column' layers" in text, text


@pytest.mark.parametrize("role", ["column", "key_value"])
def test_several_things_in_one_matrix_are_not_cut_as_one(ranks: RankPool, role: str) -> None:
    what, text = outcome(ranks, trial("GPT2", {**ad.plans.gpt2, "**.c_attn": role}, 3))
    assert what == "refused" and "c_attn has 72 outputs, and transformer.h.0.attn.c_proj" in text, text
    expect_equal(ranks, trial("GPT2", {**ad.plans.gpt2, "**.c_attn": ("column", {"blocks": 3})}, 3))


class ByHand(nn.Module):
    """An embedding and a layer that have one weight, under names of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(13, 12), nn.Linear(12, 13, bias=False)
        self.out.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.out(self.words(ids).tanh())
        return y


class Holds(ByHand):
    """It has the weight under another name, and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = self.words.weight
        self.out = nn.Linear(12, 13, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.words(ids).tanh()) + self.words(ids).tanh() @ self.table.T


def by_hand(comm: Communicator) -> None:
    for kind, plan, parts in (
        (ByHand, {"words": "vocab_embedding"}, ("words.weight ('vocab_embedding')", "out.weight (of which it says")),
        (ByHand, {"words": "vocab_embedding", "out": "replicated"}, ("out.weight ('replicated')",)),
        (ByHand, {"words": "replicated", "out": "vocab_head"}, ("expected 'vocab_embedding' and 'vocab_head'",)),
        (ByHand, {"words": "vocab_embedding", "out": "row"}, ("out.weight ('row')",)),
        (Holds, {"words": "vocab_embedding", "out": "vocab_head"}, ("table (of which it says nothing)",)),
    ):
        model: Any = kind()
        before = model_ranks.state(model)
        with pytest.raises(ValueError, match="are one parameter") as caught:
            ad.parallelize(model, comm, plan, False)
        assert all(part in str(caught.value) for part in parts), str(caught.value)
        assert model_ranks.state(model) == before
    for plan in (
        {"words": "vocab_embedding", "out": "vocab_head"},
        {"words": "replicated", "out": "replicated", "up": "column"},
    ):
        torch.manual_seed(1)
        whole: Any = ByHand().double()
        whole.up = nn.Linear(12, 12)
        model = copy.deepcopy(whole)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ad.parallelize(model, comm, plan, False)
        assert model.out.weight is model.words.weight
        ids = torch.arange(12).reshape(2, 6)
        for one in (whole, model):
            one(ids).square().sum().backward()
        torch.testing.assert_close(model(ids), whole(ids))
        shard = getattr(model.words.weight, "shard", None)
        grad = whole.words.weight.grad
        torch.testing.assert_close(model.words.weight.grad, grad if shard is None else shard.own(grad))


def test_a_parameter_of_several_modules_is_cut_in_one_way(ranks: RankPool) -> None:
    ranks.run(3, by_hand)
    for family, tied, plan in (
        ("Qwen2", "lm_head", {"**.lm_head": "replicated"}),
        ("Gemma", "embed_tokens", {"**.embed_tokens": "replicated"}),
    ):
        one = trial(family, {**ad.plans.llama, **plan}, 2, sizes={"tie_word_embeddings": True})
        what, text = outcome(ranks, one)
        assert what == "refused" and "are one parameter" in text and f"{tied}.weight ('replicated')" in text, text


@pytest.mark.parametrize(
    ("n", "sequence_parallel", "return_dict"), [(2, True, True), (3, False, False), (4, True, False), (2, False, True)]
)
def test_what_layers_give_is_whole_wherever_the_model_is_called_from(
    ranks: RankPool, n: int, sequence_parallel: bool, return_dict: bool
) -> None:
    options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "call": {"return_dict": return_dict}}
    for around in ("", "reward", "two"):
        expect_equal(ranks, trial("Llama", ad.plans.llama, n, around, **copy.deepcopy(options)))
    expect_equal(ranks, trial("T5", others.t5, n, **copy.deepcopy(options)))
    options["call"]["output_router_logits"] = True
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    expect_equal(ranks, trial("Mixtral", others.mixtral, n, sizes=experts, **options))


def test_logits_that_stay_cut_have_their_loss_within_a_larger_model_too(ranks: RankPool) -> None:
    for around in ("", "outer"):
        expect_equal(ranks, trial("Llama", ad.plans.llama, 2, around, gather_logits=False))
        what, text = outcome(ranks, trial("T5", others.t5, 2, around, gather_logits=False))
        assert what == "failed" and "labels: each rank has the logits of its own words" in text, text


def test_random_models_are_equal_or_refused(ranks: RankPool) -> None:
    found = model_fuzzing.fuzz(ranks, range(12), [2, 3])
    assert not found.failures, "\n".join(map(str, found.failures))
    assert found.ways["equal"] >= 2 and found.ways["refused"] >= 2
