"""Dropout of parallelized models: the unsharded model with the assembled masks of all ranks has equal gradients."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from ranks import RankPool
from small_transformers import MAKE, TOLERANCE, batch, compare
from torch import Tensor, nn

import pynccl_autograd as ad
from pynccl import Communicator

pytest.importorskip("transformers")


def patched(dropout: Any) -> Any:
    return mock.patch.object(F, "dropout", dropout)


def with_dropout(name: str) -> nn.Module:
    model = MAKE[name]()
    model.config._attn_implementation = "eager"  # its attention dropout calls torch.nn.functional.dropout
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.3
    return model.double().train()


PLACES = {  # how each dropout of a two-layer model is sharded, in forward order
    "llama": ["heads"] * 2,
    "gpt2": ["whole", *["heads", "sequence", "sequence"] * 2],
    "bert": ["whole", *["heads", "sequence", "sequence"] * 2],
}


def compare_masks_and_gradients(comm: Communicator, name: str, sequence_parallel: bool, reentrant: bool | None) -> None:
    torch.manual_seed(3)
    unsharded: Any = with_dropout(name)
    model: Any = ad.parallelize(copy.deepcopy(unsharded), comm, getattr(ad.plans, name), sequence_parallel)
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    ad.rng.seed(11, comm)
    real, masks = F.dropout, []

    def record_mask(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        y = real(x, p, training, inplace)
        if training and p > 0:
            masks.append(real(torch.ones_like(x), 0.0) * (y != 0) / (1 - p))
        return y

    with patched(record_mask):
        loss = model(**batch(0)).loss
        forward_masks = masks[:]
        loss.backward()
    ad.finish_gradients(model)
    assembled = []
    for mask, place in zip(forward_masks, PLACES[name], strict=True):
        sharded = place == "heads" or (place == "sequence" and sequence_parallel)  # both are dimension 1
        per_rank = ad.all_gather(mask, comm, 1, grad="sum").chunk(comm.size, 1)
        for other in per_rank[1:]:
            assert torch.equal(other, per_rank[0]) != sharded, place
        assembled.append(torch.cat(per_rank, 1) if sharded else mask)

    def replay_mask(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return x * assembled.pop(0) if training and p > 0 else x

    with patched(replay_mask):
        expected = unsharded(**batch(0)).loss
    expected.backward()
    torch.testing.assert_close(loss, expected, **TOLERANCE[torch.float64])
    compare(model, unsharded, TOLERANCE[torch.float64])
    outside = torch.rand(3)  # the default generators are equal after it
    assert torch.equal(ad.all_gather(outside, comm, 0, grad="sum"), outside.repeat(comm.size))
    state = torch.get_rng_state()
    torch.testing.assert_close(model.eval()(**batch(0)).loss, unsharded.eval()(**batch(0)).loss)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("name", "sequence_parallel", "reentrant"),
    [
        ("llama", True, True),
        ("llama", False, False),
        ("gpt2", True, False),
        ("bert", True, None),
    ],
)
def test_masks_differ_between_ranks_where_activations_are_sharded(
    ranks: RankPool, name: str, sequence_parallel: bool, reentrant: bool | None
) -> None:
    """Both kinds of activation checkpointing recompute the same masks."""
    ranks.run(2, compare_masks_and_gradients, name, sequence_parallel, reentrant)


def check_errors(comm: Communicator) -> None:
    other = comm.split(0, comm.rank)
    assert other is not None
    model: Any = ad.parallelize(with_dropout("gpt2"), other, ad.plans.gpt2)
    torch.manual_seed(comm.rank)
    with pytest.raises(RuntimeError, match=r"call ad\.rng\.seed\(seed, comm\)"):
        model(**batch(0))
    other.destroy()
    ad.rng.seed(4, comm)
    model = ad.parallelize(with_dropout("llama"), comm, ad.plans.llama)
    model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**batch(0))
    ad.rng.get_state()  # raises within an RNG block: the error has left the block


def test_unseeded_dropout_raises_and_an_error_leaves_the_rng_block(ranks: RankPool) -> None:
    ranks.run(2, check_errors)


class OwnDropout(nn.Dropout):
    """A subclass of torch's."""


CHANNELS: list[type[Any]] = [nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout]
KINDS: list[type[Any]] = [nn.Dropout, nn.AlphaDropout, *CHANNELS, OwnDropout]
SHAPES = {nn.Dropout2d: (2, 40, 3, 3), nn.Dropout3d: (2, 40, 3, 3, 3)}


def with_layer(comm: Communicator, layer: nn.Module, role: Any, sequence_parallel: bool = False) -> Any:
    """Return a parallelized model with a dropout layer between sharded ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), layer, nn.Linear(8, 4))
    plan = {"0": "column", "2": "row"} | ({} if role is None else {"1": role})
    return ad.parallelize(model, comm, plan, sequence_parallel)


def compare_kinds(comm: Communicator) -> None:
    for kind in KINDS:
        x, sharded = torch.ones(SHAPES.get(kind, (2, 40, 9))), kind in (nn.Dropout, nn.AlphaDropout)
        for role, sequence_parallel in (("partial", False), ("sequence", True)) if sharded else ():
            layer = with_layer(comm, kind(0.5), role, sequence_parallel)[1]
            ad.rng.seed(5, comm)
            with ad.rng.sharded(comm):
                own = kind(0.5)(x)
            ad.rng.seed(5, comm)
            y = layer(x)
            torch.testing.assert_close(y, own)
            first, second = ad.all_gather(y, comm, 0, grad="sum").chunk(2)
            assert not torch.equal(first, second)
        for role, sequence_parallel in (("replicated", False), ("sequence", False)):
            layer = with_layer(comm, kind(0.5), role, sequence_parallel)[1]
            ad.rng.seed(5, comm)
            y = layer(x)
            torch.manual_seed(5)
            torch.testing.assert_close(y, kind(0.5)(x))
            assert torch.equal(layer.eval()(x), x) and not torch.equal(y, x)
            if kind is not OwnDropout:
                with ad.rng.sharded(comm):
                    y = layer.train()(x)
                assert torch.equal(*ad.all_gather(y, comm, 0, grad="sum").chunk(2))


def reject_kinds(comm: Communicator) -> None:
    for kind in (*CHANNELS, OwnDropout):
        for role, sequence_parallel in (("partial", False), ("sequence", True)):
            model = nn.Sequential(nn.Linear(4, 8), kind(0.5), nn.Linear(8, 4))
            with pytest.raises(ValueError, match=rf"^parallelize: 1 \({kind.__name__}\) .*, but is '{role}': .*use "):
                ad.parallelize(model, comm, {"0": "column", "1": role, "2": "row"}, sequence_parallel)
            assert type(model[0]) is nn.Linear
            with_layer(comm, kind(0.0), role, sequence_parallel)
        own = kind(0.5)
        assert with_layer(comm, own, ["partial", lambda module, comm: module])[1] is own
    for kind in KINDS:
        with pytest.warns(UserWarning, match="does not mention 1: they are replicated"):
            with_layer(comm, kind(0.5), None)


@pytest.mark.parametrize("function", [compare_kinds, reject_kinds])
def test_all_dropout_modules_of_torch_are_replaced_or_rejected(ranks: RankPool, function: Any) -> None:
    ranks.run(2, function)
