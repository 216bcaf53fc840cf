"""Models of Hugging Face's library made parallel: steps beside the unsharded ones, every gradient."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from ranks import RankPool
from small_transformers import MAKE, TOLERANCE, WORDS, batch, compare
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator

pytest.importorskip("transformers")


def trains_alike(
    comm: Communicator, name: str, sizes: dict[str, Any], steps: int = 2, dtype: Any = torch.float64, **options: Any
) -> None:
    torch.manual_seed(3)
    whole: Any = MAKE[name](**sizes).to(dtype)
    model: Any = ad.parallelize(copy.deepcopy(whole), comm, getattr(ad.plans, name), **options)
    tolerance = {**TOLERANCE[dtype], "msg": partial("{} {} {}: {}".format, dtype, steps, options)}
    optimizers = [torch.optim.SGD(one.parameters(), 0.5) for one in (whole, model)]
    for step in range(steps):
        losses = []
        for one, optimizer in zip((whole, model), optimizers, strict=True):
            optimizer.zero_grad()
            loss = one(**batch(step)).loss
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0], **tolerance)
        with torch.inference_mode():
            torch.testing.assert_close(model(**batch(step)).loss, losses[0], **tolerance)
        ad.finish_gradients(model)
        compare(model, whole, TOLERANCE[dtype])
        kind = (2.0, 1.0, math.inf)[step % 3]
        expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.5, kind)
        norm = ad.clip_grad_norm_(model.parameters(), 0.5, kind)
        torch.testing.assert_close(norm, expected, **tolerance, check_dtype=False)
        for optimizer in optimizers:
            optimizer.step()
    state = ad.full_state_dict(model, rank0_only=False)
    torch.testing.assert_close(state, {**whole.state_dict()}, **tolerance)


def each_way(comm: Communicator, name: str, sizes: dict[str, Any], steps: int) -> None:
    """With sequence parallelism and without, with each overlap, in less precision, with logits that stay cut."""
    trains_alike(comm, name, sizes, steps)
    trains_alike(comm, name, sizes, steps, sequence_parallel=False)
    trains_alike(comm, name, sizes, 1, sequence_parallel=False, overlap=ad.OverlapConfig("slices", chunks=2))
    for overlap in (ad.OverlapConfig("exchange", chunks=2), ad.OverlapConfig("ring")):
        trains_alike(comm, name, sizes, 1, overlap=overlap)
    for dtype in (torch.float32, torch.bfloat16):
        trains_alike(comm, name, sizes, 2, dtype)
    if name != "bert":
        trains_alike(comm, name, sizes, 2, torch.float32, gather_logits=False)


TRAINED: list[tuple[str, dict[str, Any], int]] = [
    ("llama", {"kv_heads": 4}, 2),
    ("llama", {"kv_heads": 2, "tied": True}, 4),
    ("gpt2", {}, 4),
    ("gpt2", {"tied": False}, 2),
    ("bert", {}, 2),
    ("bert", {"tied": False}, 4),
]


@pytest.mark.parametrize(("name", "kind", "size"), TRAINED, ids=str)
def test_a_model_trains_as_the_unsharded_one(ranks: RankPool, name: str, kind: dict[str, Any], size: int) -> None:
    ranks.run(size, each_way, name, kind, 3)


def of_meta_device(comm: Communicator, name: str) -> None:
    """Drawn as the unsharded model is, and loaded from it."""
    torch.manual_seed(7)
    whole: Any = MAKE[name]()
    with torch.device("meta"):
        models = [MAKE[name]() for _ in range(2)]
    for one in whole.parameters():
        one._is_hf_initialized = False
    torch.manual_seed(7)
    whole.apply(whole._init_weights)
    torch.manual_seed(7)
    ad.parallelize(models[0], comm, getattr(ad.plans, name), init=models[0]._init_weights)
    ad.parallelize(models[1], comm, getattr(ad.plans, name))
    assert all(one.is_meta for one in models[1].parameters())
    ad.load_full_state_dict(models[1], whole.state_dict())
    for model in models:
        compare(model, whole, {"rtol": 0.0, "atol": 0.0})
        torch.testing.assert_close(model(**batch(0)).loss, whole(**batch(0)).loss)


@pytest.mark.parametrize("name", MAKE)
def test_a_model_of_the_meta_device_is_the_unsharded_one(ranks: RankPool, name: str) -> None:
    ranks.run(2, of_meta_device, name)


class Net(nn.Module):
    """What a user wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 12), nn.Linear(12, 8), nn.LayerNorm(8)

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
    return ad.describe(model)


def test_a_plan_of_ones_own_and_what_became_of_the_model(ranks: RankPool) -> None:
    first, second = ranks.run(2, own_plan)
    assert first == second
    names = [f"{module}.{parameter}" for module in ("up", "down", "norm") for parameter in ("weight", "bias")]
    assert [line.split("  ")[0] for line in first.splitlines()[1:-1]] == names
    assert "up.weight    ColumnParallelLinear  [12, 8]  [6, 8]  0 of 2  384" in first
    assert first.endswith("1,008 bytes on this rank, 1,824 in the whole model")


def generates(comm: Communicator, name: str) -> None:
    torch.manual_seed(3)
    whole: Any = MAKE[name]().double().eval()
    model: Any = ad.parallelize(copy.deepcopy(whole), comm, getattr(ad.plans, name))
    ids = torch.randint(0, WORDS, (2, 5))
    for beams in (1, 3):
        how = {"max_new_tokens": 6, "pad_token_id": 0, "num_beams": beams, "do_sample": False}
        found, expected = (one.generate(ids, attention_mask=torch.ones_like(ids), **how) for one in (model, whole))
        assert torch.equal(found, expected)
    example = batch(1)
    for one in (model, whole):  # then it trains on as before
        one.train()(**example).loss.backward()
    ad.finish_gradients(model)
    compare(model, whole, TOLERANCE[torch.float64])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, whole(ids).logits, **TOLERANCE[torch.float64])
    with pytest.raises(ValueError, match=r"under torch\.no_grad\(\), any length will do"):
        model(ids)
    torch.testing.assert_close(model.eval()(**example).loss, whole(**example).loss, **TOLERANCE[torch.float64])


@pytest.mark.parametrize(("name", "size"), [("llama", 4), ("gpt2", 2)])
def test_text_of_any_length_is_generated_with_sequence_parallelism(ranks: RankPool, name: str, size: int) -> None:
    ranks.run(size, generates, name)
