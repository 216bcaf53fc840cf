"""Models of Hugging Face's library made parallel: 20 steps beside the unsharded ones, every gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd.layers.shards import shard_of

pytest.importorskip("transformers")

WORDS, BATCH, SEQUENCE = 61, 2, 8


def llama(kv_heads: int = 4, tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
        attention_bias=True,
    )
    return LlamaForCausalLM(config)


def gpt2(tied: bool = True) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=32, n_layer=2, n_head=4, tie_word_embeddings=tied, **drops
    )
    return GPT2LMHeadModel(config)


def bert(tied: bool = True) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        tie_word_embeddings=tied,
    )
    return BertForMaskedLM(config)


def relative(kind: str) -> Any:
    """Of models whose modules have the names of Llama's."""

    def make(kv_heads: int = 2) -> nn.Module:
        import transformers

        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=WORDS, num_key_value_heads=kv_heads, head_dim=8, tie_word_embeddings=False, **sizes
        )
        model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
        return model

    return make


MAKE: dict[str, Any] = {"llama": llama, "gpt2": gpt2, "bert": bert}
MAKE |= {kind: relative(kind) for kind in ("Mistral", "Qwen2", "Qwen3")}


def batch(step: int) -> dict[str, Tensor]:
    torch.manual_seed(100 + step)
    ids = torch.randint(0, WORDS, (BATCH, SEQUENCE))
    labels = ids.clone()
    labels[0, -2:] = -100
    return {"input_ids": ids, "labels": labels}


def own_of(parameter: Tensor, whole: Tensor) -> Tensor:
    """What a rank has of a parameter, or of its gradient."""
    shard = shard_of(parameter)
    return whole if shard is None else shard.own(whole)


def compare(model: nn.Module, whole: nn.Module, tolerance: dict[str, float]) -> None:
    """Parameters and gradients, by name."""
    expected = dict(whole.named_parameters())
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for path, parameter in found.items():
        other = expected[path]
        assert (parameter.grad is None) == (other.grad is None), path
        pairs = [(parameter.detach(), other.detach())]
        if parameter.grad is not None:
            pairs.append((parameter.grad, other.grad))
        for part, right in pairs:

            def told(text: str, path: str = path) -> str:
                return f"{path}: {text}"

            torch.testing.assert_close(part, own_of(parameter, right), **tolerance, msg=told)


TOLERANCE = {
    torch.float64: {"rtol": 1e-10, "atol": 1e-11},
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 0.05, "atol": 0.02},
}


def trains_alike(
    comm: Communicator, name: str, steps: int, dtype: torch.dtype, options: dict[str, Any], kind: dict[str, Any]
) -> None:
    torch.manual_seed(3)
    whole: Any = MAKE[name](**kind).to(dtype)
    model: Any = ad.parallelize(copy.deepcopy(whole), comm, getattr(ad.plans, name.lower(), ad.plans.llama), **options)
    tolerance = TOLERANCE[dtype]
    optimizers = [torch.optim.SGD(one.parameters(), 0.5) for one in (whole, model)]
    for step in range(steps):
        losses = []
        for one, optimizer in zip((whole, model), optimizers, strict=True):
            optimizer.zero_grad()
            loss = one(**batch(step)).loss
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0], **tolerance)
        ad.finish_gradients(model)
        compare(model, whole, tolerance)
        norms = nn.utils.clip_grad_norm_(whole.parameters(), 0.5), ad.clip_grad_norm_(model.parameters(), 0.5)
        torch.testing.assert_close(norms[1], norms[0], **tolerance, check_dtype=False)
        for optimizer in optimizers:
            optimizer.step()
    state, expected = ad.full_state_dict(model), whole.state_dict()
    if comm.rank == 0:
        assert state.keys() == expected.keys()
        torch.testing.assert_close(state, expected, **tolerance)


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", {"kv_heads": 4}),
        ("llama", {"kv_heads": 2, "tied": True}),
        ("llama", {"kv_heads": 1}),
        ("gpt2", {}),
        ("gpt2", {"tied": False}),
        ("bert", {}),
        ("bert", {"tied": False}),
    ],
    ids=str,
)
def test_a_model_trains_as_the_unsharded_one(
    ranks: RankPool, name: str, kind: dict[str, Any], size: int, sequence_parallel: bool
) -> None:
    options = {"sequence_parallel": sequence_parallel}
    ranks.run(size, trains_alike, name, 20, torch.float64, options, kind)


@pytest.mark.parametrize("name", ["Mistral", "Qwen2", "Qwen3"])
def test_relatives_of_llama_train_alike(ranks: RankPool, name: str) -> None:
    ranks.run(2, trains_alike, name, 2, torch.float64, {}, {})
    ranks.run(2, trains_alike, name, 2, torch.float64, {"sequence_parallel": False}, {})
    # Qwen3's norms of keys are computed in float32: their gradients are rounded before the ranks' are summed.
    ranks.run(4, trains_alike, name, 2, torch.float32 if name == "Qwen3" else torch.float64, {}, {})


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_twenty_steps_in_single_precision(ranks: RankPool, name: str, size: int) -> None:
    ranks.run(size, trains_alike, name, 20, torch.float32, {}, {})


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_bfloat16_within_its_rounding(ranks: RankPool, name: str, size: int) -> None:
    ranks.run(size, trains_alike, name, 2, torch.bfloat16, {}, {})


@pytest.mark.parametrize("tied", [True, False])
def test_logits_may_stay_cut(ranks: RankPool, tied: bool) -> None:
    for name in ("llama", "gpt2"):
        ranks.run(4, trains_alike, name, 2, torch.float32, {"gather_logits": False}, {"tied": tied})


def drawn_alike(comm: Communicator, name: str) -> None:
    torch.manual_seed(7)
    whole: Any = MAKE[name]()
    with torch.device("meta"):
        model: Any = MAKE[name]()
    before = list(model.modules())
    torch.manual_seed(7)
    model = ad.parallelize(model, comm, getattr(ad.plans, name), init=model._init_weights)
    replaced = set(before) - set(model.modules())
    assert replaced and all(one.is_meta for module in replaced for one in module.parameters())  # no whole one is left
    assert not any(one.device.type == "meta" for one in [*model.parameters(), *model.buffers()])
    torch.manual_seed(7)
    for one in whole.parameters():
        one._is_hf_initialized = False
    torch.manual_seed(7)
    whole.apply(whole._init_weights)
    compare(model, whole, {"rtol": 0.0, "atol": 0.0})
    assert model(**batch(0)).loss.isfinite()


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_a_model_of_the_meta_device_is_drawn_as_the_unsharded_one(ranks: RankPool, name: str) -> None:
    ranks.run(2, drawn_alike, name)


def loaded_alike(comm: Communicator, name: str) -> None:
    torch.manual_seed(7)
    whole: Any = MAKE[name]()
    with torch.device("meta"):
        model: Any = MAKE[name]()
    ad.parallelize(model, comm, getattr(ad.plans, name))
    assert all(one.is_meta for one in model.parameters())
    ad.load_full_state_dict(model, whole.state_dict())
    compare(model, whole, {"rtol": 0.0, "atol": 0.0})
    torch.testing.assert_close(model(**batch(0)).loss, whole(**batch(0)).loss)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_a_model_of_the_meta_device_loads_its_parts(ranks: RankPool, name: str) -> None:
    ranks.run(2, loaded_alike, name)


class Net(nn.Module):
    """What a user wrote."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 12), nn.Linear(12, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x + self.down(self.up(x).relu()))
        return y


def refuses(comm: Communicator) -> None:
    def said(plan: Any, *parts: str, model: Any = None, error: type[Exception] = ValueError) -> None:
        model = model or Net()
        before = {name: id(one) for name, one in model.named_modules()}
        with pytest.raises(error) as caught:
            ad.parallelize(model, comm, plan, sequence_parallel=False)
        for part in parts:
            assert part in str(caught.value), str(caught.value)
        assert before == {name: id(one) for name, one in model.named_modules()}  # nothing has changed

    said({"up": "column", "dwn": "row"}, "no module fits the pattern 'dwn'")
    said({"mlp.up": "column"}, "there are up")
    said({"up": "columns"}, "'columns' of 'up'", "vocab_head")
    said({"up": ("column", 3)}, "a pair of one and a dict")
    said({"norm": "column"}, "norm is LayerNorm", "expected a torch.nn.Linear", error=TypeError)
    said({"up": ["column", "row"]}, "up: the plan says column and row")
    said({"up": "row"}, "up, weight [12, 7]", "in_features is 7, not divisible by 2 ranks", model=Net(7))
    said({"up": ("column", {"heads": "num_heads"})}, "model.config.num_heads")
    said({"up": ("column", {"overlaps": 1})}, "up, weight [12, 8]", "overlaps", error=TypeError)
    said(ad.plans.llama, "no module of Net is cut")
    said(["up"], "expected a dict of patterns", error=TypeError)
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"):
        ad.parallelize("model", comm, {})  # type: ignore[arg-type]
    wrong: dict[str, Any] = {
        "seq_dim": "1",
        "init": 3,
        "reduce_dtype": "f",
        "sequence_parallel": "no",
        "gather_logits": 0,
    }
    for name, value in wrong.items():
        with pytest.raises(TypeError, match=f"parallelize: {name} is {value!r}, expected"):
            ad.parallelize(Net(), comm, {"up": "column", "down": "row", "norm": "replicated"}, **{name: value})
    with pytest.raises(ValueError, match="told that dimension 5 is the sequence"):
        ad.parallelize(llama(), comm, ad.plans.llama, seq_dim=5)(torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(TypeError, match="up is ColumnParallelLinear already; make a model parallel once"):
        plan = {"up": "column", "down": "row", "norm": "replicated"}
        once = ad.parallelize(Net(), comm, plan, sequence_parallel=False)
        ad.parallelize(once, comm, plan, sequence_parallel=False)
    with pytest.raises(ValueError, match="pad it to a multiple of 2"):
        model = ad.parallelize(llama(), comm, ad.plans.llama)
        model(torch.zeros(1, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match="num_attention_heads is 3, on 2 ranks; expected a multiple"):
        odd: Any = gpt2()
        odd.config.num_attention_heads = 3
        ad.parallelize(odd, comm, ad.plans.gpt2)


def test_what_cannot_be_is_said_before_anything_changes(ranks: RankPool) -> None:
    ranks.run(2, refuses)


def own_plan(comm: Communicator) -> str:
    torch.manual_seed(1)
    whole = Net().double()
    plan = {"up": "column", "down": ad.RowParallelLinear.from_linear}
    with pytest.warns(UserWarning, match="the plan says nothing of norm"):
        model = ad.parallelize(copy.deepcopy(whole), comm, plan, sequence_parallel=False)
    x = torch.randn(4, 3, 8, dtype=torch.float64)
    torch.testing.assert_close(model(x), whole(x))
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(x), whole(x))
    assert shard_of(twin.up.weight).comm is comm  # type: ignore[union-attr, arg-type]
    with torch.device("meta"):
        drawn: Any = Net()
    kept = {"up": lambda module, comm: module, "down": "replicated", "norm": "replicated"}
    ad.parallelize(drawn, comm, kept, False, init=lambda one: getattr(one, "reset_parameters", int)())
    assert not any(one.is_meta for one in drawn.parameters())  # what a function of the plan has left is as it was drawn
    return ad.describe(model)


def test_a_plan_of_ones_own_and_what_became_of_the_model(ranks: RankPool) -> None:
    first, second = ranks.run(2, own_plan)
    assert first == second
    lines = [line.split("  ") for line in first.splitlines()]
    assert [line[0] for line in lines[1:-1]] == [
        "up.weight",
        "up.bias",
        "down.weight",
        "down.bias",
        "norm.weight",
        "norm.bias",
    ]
    assert "up.weight    ColumnParallelLinear  [12, 8]  [6, 8]  0 of 2  384" in first
    assert first.endswith("1,008 bytes on this rank, 1,824 in the whole model")


def generates(comm: Communicator, name: str) -> None:
    torch.manual_seed(3)
    whole: Any = MAKE[name]().double().eval()
    model: Any = ad.parallelize(copy.deepcopy(whole), comm, getattr(ad.plans, name.lower()))
    ids = torch.randint(0, WORDS, (2, 5))
    how: dict[str, Any] = {"max_new_tokens": 6, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    for one in (model, copy.deepcopy(model)):
        found = one.generate(ids, do_sample=False, **how)
        assert torch.equal(found, whole.generate(ids, do_sample=False, **how))
    beams = model.generate(ids, num_beams=3, do_sample=False, **how)
    assert torch.equal(beams, whole.generate(ids, num_beams=3, do_sample=False, **how))
    assert all(layer.sequence_parallel for layer in model.modules() if isinstance(layer, ad.RowParallelLinear))
    # Then it trains on as before.
    example = batch(1)
    for one in (model, whole):
        one.train()(**example).loss.backward()
    ad.finish_gradients(model)
    compare(model, whole, TOLERANCE[torch.float64])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, whole(ids).logits, **TOLERANCE[torch.float64])
        torch.testing.assert_close(model(ids[:, :4]).logits, whole(ids[:, :4]).logits, **TOLERANCE[torch.float64])
        inner = model.model.layers[1] if name == "llama" else model.transformer.h[1]
        failing = inner.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids)
        failing.remove()
    with pytest.raises(ValueError, match=r"under torch\.no_grad\(\), any length will do"):
        model(ids)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(ValueError, match="cannot be cut along the sequence"):  # whose forward pass has no gradients
        model.train()(ids)
    model.gradient_checkpointing_disable()
    torch.testing.assert_close(model.eval()(**example).loss, whole(**example).loss, **TOLERANCE[torch.float64])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_text_of_any_length_is_generated_with_sequence_parallelism(ranks: RankPool, name: str, size: int) -> None:
    ranks.run(size, generates, name)
