"""OverlapConfig from TransformerEngine's keys, and errors for bad values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from ranks import RankPool

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd import OverlapConfig
from pynccl_autograd.overlap.keys import as_config

RING = OverlapConfig("ring", num_comm_ctas=1)
PIPELINE = OverlapConfig("slices", chunks=4, num_comm_ctas=16)
BULK = OverlapConfig("bulk", num_comm_ctas=16)
# TransformerEngine's defaults: qkv and fc1 are column-parallel, proj and fc2 row-parallel.
COLUMN, ROW = replace(RING, dgrad=BULK), replace(PIPELINE, dgrad=RING)


@pytest.mark.parametrize(
    ("kind", "keys", "expected"),
    [
        ("column", {}, COLUMN),
        ("row", {}, ROW),
        ("column", {"aggregate": True}, replace(COLUMN, aggregate=True)),
        ("row", {"num_splits": 2, "num_sm": 8}, replace(ROW, chunks=2, num_comm_ctas=8)),
        ("row", {"method": "ring_exchange", "comm_priority": -5}, replace(RING, priority=-5, dgrad=RING)),
        ("column", {"method": "pipeline"}, replace(PIPELINE, dgrad=BULK)),
        ("column", {"method": "none"}, OverlapConfig("off", dgrad=BULK)),
        ("row", {"fprop": {"num_splits": 3}, "wgrad": {"method": "bulk"}}, replace(ROW, chunks=3)),
        # Keys for a whole model: each layer takes its own, and ignores those of TransformerEngine's kernels.
        (
            "row",
            {"qkv_fprop": {"method": "pipeline"}, "fc2_fprop": {"num_splits": 9, "cga_size": 2, "atomic_gemm": False}},
            replace(ROW, chunks=9),
        ),
    ],
)
def test_keys_of_transformer_engine_are_converted(kind: str, keys: Mapping[str, Any], expected: OverlapConfig) -> None:
    assert as_config("layer", keys, kind) == expected


@pytest.mark.parametrize("kind", [np.int64, np.array, torch.tensor])
def test_integers_of_numpy_and_torch_equal_ints(kind: Any) -> None:
    config = OverlapConfig("slices", chunks=kind(4), compute_streams=kind(2), num_comm_ctas=kind(16), priority=kind(-1))
    assert repr(config) == repr(replace(PIPELINE, compute_streams=2))


@pytest.mark.parametrize(
    ("keys", "error", "text"),
    [
        ({"methods": "bulk"}, ValueError, "overlap has unknown key 'methods', expected some of method, num_splits"),
        ({"method": "slices"}, ValueError, "method is 'slices', expected one of ring_exchange, pipeline, bulk, none"),
        ({"fprop": {}, "num_sm": 3}, ValueError, "mixes names of passes with keys of one pass"),
        ({"fprop": 3}, TypeError, r"overlap\['fprop'\] is 3, expected a dict"),
        ({"wgrad": {"method": "pipeline"}}, ValueError, "method of wgrad is 'pipeline', expected 'bulk'"),
        ({"num_sm": -1}, ValueError, "num_comm_ctas is -1, expected an integer >= 1"),
    ],
)
def test_unknown_keys_raise(keys: Mapping[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"layer: .*{text}"):
        as_config("layer", keys, "row")


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"method": "tree"}, "method is 'tree', expected one of auto, slices"),
    ({"chunks": 1.5}, "chunks is 1.5, expected"),
    ({"chunks": True}, "chunks is True, expected an integer >= 1, or None"),
    ({"priority": 1 << 31}, "priority is 2147483648, expected an integer"),
    ({"compute_streams": 3}, "compute_streams is 3, expected an integer >= 1 and <= 2"),
    ({"method": "ring", "deterministic": True}, "deterministic=True requires method"),
]
OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"overlap": "on"}, ValueError, r"overlap is 'on', expected \"auto\", \"off\", an OverlapConfig"),
    ({"overlap": 3}, ValueError, "overlap is 3, expected"),
    ({"reduce_dtype": torch.int32}, TypeError, "reduce_dtype is torch.int32"),
    ({"reduce_dtype": "float32"}, TypeError, "reduce_dtype is 'float32'"),
    ({"grad_accumulation_fusion": True}, ValueError, "weight.main_grad, which is None; expected a tensor"),
]


def check_bad_options(comm: Communicator) -> None:
    for options, text in CONFIGS:
        with pytest.raises(ValueError, match=text):
            OverlapConfig(**options)
    w, x, ring = torch.ones(4, 8), torch.ones(12, 8), OverlapConfig("ring")
    calls: list[Any] = [ad.all_gather_matmul, ad.matmul_reduce_scatter, ad.matmul_all_reduce, ad.copy_matmul]
    for call in calls:
        for options, kind, text in OPTIONS:
            with pytest.raises(kind, match=text):
                call(x, w, comm, **options)
        with pytest.raises(ValueError, match=rf"{call.__name__}: x has shape \(12, 3\), expected \[\.\., 8\]"):
            call(x[:, :3], w, comm, overlap=ring)
        with pytest.raises(TypeError, match=r"x is torch\.float64, the weight torch\.float32"):
            call(x.double(), w, comm, overlap=ring)
    with pytest.raises(ValueError, match=r"dimension 0 of x \(11, 8\) has size 11, not divisible by 2 ranks"):
        ad.matmul_reduce_scatter(x[:11], w, comm, overlap=ring)
    with pytest.raises(ValueError, match="hand_off=True expects x of shape"):
        ad.matmul_all_reduce(x[None], w, comm, hand_off=True)
    with pytest.raises(ValueError, match="ColumnParallelLinear: overlap is 'on', expected"):
        ad.ColumnParallelLinear(8, 8, comm, overlap="on")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"nn\.Sequential: overlap is 1, expected"):
        ad.nn.Sequential(overlap=1)  # type: ignore[arg-type]


def test_bad_options_raise_before_any_launch(ranks: RankPool) -> None:
    ranks.run(2, check_bad_options)
