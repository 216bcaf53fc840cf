"""Parallelized Hugging Face models: training steps and every gradient compared with the unsharded models."""

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


def train_and_compare(
    comm: Communicator, name: str, sizes: dict[str, Any], steps: int = 2, dtype: Any = torch.float64, **options: Any
) -> None:
    torch.manual_seed(3)
    unsharded: Any = MAKE[name](**sizes).to(dtype)
    model: Any = ad.parallelize(copy.deepcopy(unsharded), comm, getattr(ad.plans, name), **options)
    tolerance = {**TOLERANCE[dtype], "msg": partial("{} {} {}: {}".format, dtype, steps, options)}
    optimizers = [torch.optim.SGD(module.parameters(), 0.5) for module in (unsharded, model)]
    for step in range(steps):
        losses = []
        for module, optimizer in zip((unsharded, model), optimizers, strict=True):
            optimizer.zero_grad()
            loss = module(**batch(step)).loss
            loss.backward()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0], **tolerance)
        with torch.inference_mode():
            torch.testing.assert_close(model(**batch(step)).loss, losses[0], **tolerance)
        ad.finish_gradients(model)
        compare(model, unsharded, TOLERANCE[dtype])
        kind = (2.0, 1.0, math.inf)[step % 3]
        expected = nn.utils.clip_grad_norm_(unsharded.parameters(), 0.5, kind)
        norm = ad.clip_grad_norm_(model.parameters(), 0.5, kind)
        torch.testing.assert_close(norm, expected, **tolerance, check_dtype=False)
        for optimizer in optimizers:
            optimizer.step()
    state = ad.full_state_dict(model, rank0_only=False)
    torch.testing.assert_close(state, {**unsharded.state_dict()}, **tolerance)


def train_all_options(comm: Communicator, name: str, sizes: dict[str, Any], steps: int) -> None:
    """With and without sequence parallelism, with several overlaps, in lower precision, with sharded logits."""
    train_and_compare(comm, name, sizes, steps)
    train_and_compare(comm, name, sizes, steps, sequence_parallel=False)
    train_and_compare(comm, name, sizes, 1, sequence_parallel=False, overlap=ad.OverlapConfig("slices", chunks=2))
    for overlap in (ad.OverlapConfig("exchange", chunks=2), ad.OverlapConfig("ring")):
        train_and_compare(comm, name, sizes, 1, overlap=overlap)
    for dtype in (torch.float32, torch.bfloat16):
        train_and_compare(comm, name, sizes, 2, dtype)
    if name != "bert":
        train_and_compare(comm, name, sizes, 2, torch.float32, gather_logits=False)


TRAINED: list[tuple[str, dict[str, Any], int]] = [
    ("llama", {"kv_heads": 4}, 2),
    ("llama", {"kv_heads": 2, "tied": True}, 4),
    ("gpt2", {}, 4),
    ("gpt2", {"tied": False}, 2),
    ("bert", {}, 2),
    ("bert", {"tied": False}, 4),
]


@pytest.mark.parametrize(("name", "kind", "size"), TRAINED, ids=str)
def test_a_model_trains_like_the_unsharded_one(ranks: RankPool, name: str, kind: dict[str, Any], size: int) -> None:
    ranks.run(size, train_all_options, name, kind, 3)


def init_and_load_meta_models(comm: Communicator, name: str) -> None:
    """Initialize a meta-device model like the unsharded one, and load another one from its state dict."""
    torch.manual_seed(7)
    unsharded: Any = MAKE[name]()
    with torch.device("meta"):
        models = [MAKE[name]() for _ in range(2)]
    for parameter in unsharded.parameters():
        parameter._is_hf_initialized = False
    torch.manual_seed(7)
    unsharded.apply(unsharded._init_weights)
    torch.manual_seed(7)
    ad.parallelize(models[0], comm, getattr(ad.plans, name), init=models[0]._init_weights)
    ad.parallelize(models[1], comm, getattr(ad.plans, name))
    assert all(parameter.is_meta for parameter in models[1].parameters())
    ad.load_full_state_dict(models[1], unsharded.state_dict())
    for model in models:
        compare(model, unsharded, {"rtol": 0.0, "atol": 0.0})
        torch.testing.assert_close(model(**batch(0)).loss, unsharded(**batch(0)).loss)


@pytest.mark.parametrize("name", MAKE)
def test_a_meta_device_model_equals_the_unsharded_one(ranks: RankPool, name: str) -> None:
    ranks.run(2, init_and_load_meta_models, name)


class Net(nn.Module):
    """A user-written model."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 12), nn.Linear(12, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x + self.down(self.up(x).relu()))
        return y


def apply_user_plan(comm: Communicator) -> str:
    torch.manual_seed(1)
    unsharded = Net().double()
    plan = {"up": "column", "down": ad.RowParallelLinear.from_linear}
    with pytest.warns(UserWarning, match="the plan does not mention norm"):
        model = ad.parallelize(copy.deepcopy(unsharded), comm, plan, sequence_parallel=False)
    x = torch.randn(4, 3, 8, dtype=torch.float64)
    torch.testing.assert_close(model(x), unsharded(x))
    return ad.describe(model)


def test_a_user_written_plan_and_its_description(ranks: RankPool) -> None:
    first, second = ranks.run(2, apply_user_plan)
    assert first == second
    names = [f"{module}.{parameter}" for module in ("up", "down", "norm") for parameter in ("weight", "bias")]
    assert [line.split("  ")[0] for line in first.splitlines()[1:-1]] == names
    assert "up.weight    ColumnParallelLinear  [12, 8]  [6, 8]  0 of 2  384" in first
    assert first.endswith("1,008 bytes on this rank, 1,824 in the full model")


def generate_and_train(comm: Communicator, name: str) -> None:
    torch.manual_seed(3)
    unsharded: Any = MAKE[name]().double().eval()
    model: Any = ad.parallelize(copy.deepcopy(unsharded), comm, getattr(ad.plans, name))
    ids = torch.randint(0, WORDS, (2, 5))
    for beams in (1, 3):
        how = {"max_new_tokens": 6, "pad_token_id": 0, "num_beams": beams, "do_sample": False}
        found, expected = (m.generate(ids, attention_mask=torch.ones_like(ids), **how) for m in (model, unsharded))
        assert torch.equal(found, expected)
    example = batch(1)
    for each in (model, unsharded):  # training works afterwards
        each.train()(**example).loss.backward()
    ad.finish_gradients(model)
    compare(model, unsharded, TOLERANCE[torch.float64])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, unsharded(ids).logits, **TOLERANCE[torch.float64])
    with pytest.raises(ValueError, match=r"under torch\.no_grad\(\) any length works"):
        model(ids)
    torch.testing.assert_close(model.eval()(**example).loss, unsharded(**example).loss, **TOLERANCE[torch.float64])


@pytest.mark.parametrize(("name", "size"), [("llama", 4), ("gpt2", 2)])
def test_text_of_any_length_is_generated_with_sequence_parallelism(ranks: RankPool, name: str, size: int) -> None:
    ranks.run(size, generate_and_train, name)
