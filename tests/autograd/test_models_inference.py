"""Parallelized models of transformers under inference mode and in training, in turn, with every overlap."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from ranks import RankPool
from small_transformers import MAKE, batch

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd import OverlapConfig

pytest.importorskip("transformers")

OVERLAPS = {way: OverlapConfig(way, chunks=2) for way in ("off", "slices", "exchange")}
OVERLAPS["ring"] = OverlapConfig("ring")


def in_turn(comm: Communicator, name: str, sequence_parallel: bool, training_first: bool) -> None:
    torch.manual_seed(0)
    whole: Any = MAKE[name]().double()
    expected = whole(**batch(0)).loss
    expected.backward()
    norm = torch.nn.utils.get_total_norm([one.grad for one in whole.parameters() if one.grad is not None])
    whole.zero_grad()
    for way, overlap in OVERLAPS.items():
        told = partial("{}: {}".format, way)
        plan = getattr(ad.plans, name)
        model: Any = ad.parallelize(copy.deepcopy(whole), comm, plan, sequence_parallel, overlap=overlap)
        for training in (training_first, not training_first, training_first):
            if training:
                model.zero_grad()
                loss = model(**batch(0)).loss
                loss.backward()
                ad.finish_gradients(model)
                torch.testing.assert_close(ad.clip_grad_norm_(model, 1e9), norm, msg=told)
            else:
                with torch.inference_mode():
                    loss = model(**batch(0)).loss
            torch.testing.assert_close(loss, expected, msg=told)


@pytest.mark.parametrize(
    ("name", "n", "sequence_parallel", "training_first"),
    [("llama", 2, True, False), ("llama", 2, False, True), ("gpt2", 4, True, False), ("bert", 2, True, True)],
)
def test_inference_and_training_of_a_model(
    ranks: RankPool, name: str, n: int, sequence_parallel: bool, training_first: bool
) -> None:
    ranks.run(n, in_turn, name, sequence_parallel, training_first)
