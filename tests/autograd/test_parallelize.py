"""Models of Hugging Face's library made parallel: steps beside the unsharded ones, every gradient."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from ranks import RankPool
from small_transformers import MAKE, TOLERANCE, WORDS, batch, compare
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd.layers.shards import shard_of

pytest.importorskip("transformers")

NONE: Mapping[str, Any] = {}


def trains_alike(
    comm: Communicator,
    name: str,
    kind: Mapping[str, Any] = NONE,
    steps: int = 3,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> None:
    torch.manual_seed(3)
    whole: Any = MAKE[name](**kind).to(dtype)
    model: Any = ad.parallelize(copy.deepcopy(whole), comm, getattr(ad.plans, name), **options)
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


def both_ways(comm: Communicator, name: str, kind: dict[str, Any], steps: int) -> None:
    for sequence_parallel in (True, False):
        trains_alike(comm, name, kind, steps, sequence_parallel=sequence_parallel)


TRAINED: list[tuple[str, dict[str, Any], int]] = [
    ("llama", {"kv_heads": 4}, 2),
    ("llama", {"kv_heads": 2, "tied": True}, 4),
    ("llama", {"kv_heads": 1}, 4),
    ("gpt2", {}, 4),
    ("gpt2", {"tied": False}, 2),
    ("bert", {}, 2),
    ("bert", {"tied": False}, 4),
]


@pytest.mark.parametrize(("name", "kind", "size"), TRAINED, ids=str)
def test_a_model_trains_as_the_unsharded_one(ranks: RankPool, name: str, kind: dict[str, Any], size: int) -> None:
    ranks.run(size, both_ways, name, kind, 3)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "size"), [TRAINED[1], TRAINED[3]], ids=str)
def test_and_for_twenty_steps(ranks: RankPool, name: str, kind: dict[str, Any], size: int) -> None:
    ranks.run(size, both_ways, name, kind, 20)


def in_less(comm: Communicator, name: str) -> None:
    trains_alike(comm, name, dtype=torch.float32)
    trains_alike(comm, name, steps=2, dtype=torch.bfloat16)
    for tied in (True, False) if name != "bert" else ():  # logits may stay cut
        trains_alike(comm, name, {"tied": tied}, 2, torch.float32, gather_logits=False)


@pytest.mark.parametrize(("name", "size"), [("llama", 4), ("gpt2", 4), ("bert", 2)])
def test_in_single_and_half_precision_within_their_rounding(ranks: RankPool, name: str, size: int) -> None:
    ranks.run(size, in_less, name)


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
@pytest.mark.parametrize("alike", [drawn_alike, loaded_alike])
def test_a_model_of_the_meta_device_is_the_unsharded_one(ranks: RankPool, name: str, alike: Any) -> None:
    ranks.run(2, alike, name)


class Net(nn.Module):
    """What a user wrote."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 12), nn.Linear(12, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x + self.down(self.up(x).relu()))
        return y


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
    names = [f"{module}.{parameter}" for module in ("up", "down", "norm") for parameter in ("weight", "bias")]
    assert [line[0] for line in lines[1:-1]] == names
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


@pytest.mark.parametrize(("name", "size"), [("llama", 4), ("gpt2", 2)])
def test_text_of_any_length_is_generated_with_sequence_parallelism(ranks: RankPool, name: str, size: int) -> None:
    ranks.run(size, generates, name)
