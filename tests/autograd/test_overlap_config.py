"""OverlapConfig and TransformerEngine's keys: what each layer makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from ranks import RankPool

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd import OverlapConfig
from pynccl_autograd.overlap.config import as_config

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
        ("row", {"method": "ring_exchange"}, replace(RING, dgrad=RING)),
        ("row", {"method": "ring_exchange", "comm_priority": -5}, replace(RING, priority=-5, dgrad=RING)),
        ("column", {"method": "pipeline"}, replace(PIPELINE, dgrad=BULK)),
        (
            "column",
            {"method": "bulk", "num_sm": 4, "set_sm_margin": True},  # accepted, since its configurations have it
            OverlapConfig("bulk", num_comm_ctas=4, dgrad=BULK),
        ),
        ("column", {"method": "none"}, OverlapConfig("off", dgrad=BULK)),
        ("column", {"dgrad": {"method": "ring_exchange"}}, replace(RING, dgrad=RING)),
        ("row", {"fprop": {"num_splits": 3}, "wgrad": {"method": "bulk"}}, replace(ROW, chunks=3)),
        # Of a whole model: each layer takes its own, and ignores what belongs to TransformerEngine's kernels.
        (
            "column",
            {"qkv_fprop": {"method": "pipeline", "num_splits": 6}, "proj_fprop": {"num_splits": 9}},
            replace(PIPELINE, chunks=6, dgrad=BULK),
        ),
        (
            "row",
            {"qkv_fprop": {"method": "pipeline"}, "fc2_fprop": {"num_splits": 9, "cga_size": 2, "atomic_gemm": False}},
            replace(ROW, chunks=9),
        ),
    ],
)
def test_keys_of_transformer_engine(kind: str, keys: Mapping[str, Any], expected: OverlapConfig) -> None:
    assert as_config("layer", keys, kind) == expected


@pytest.mark.parametrize(
    ("keys", "error", "text"),
    [
        ({"methods": "bulk"}, ValueError, "overlap has no key 'methods', expected some of method, num_splits"),
        ({"method": "slices"}, ValueError, "method is 'slices', expected one of ring_exchange, pipeline, bulk, none"),
        ({"fprop": {}, "num_sm": 3}, ValueError, "keys of passes and of one pass"),
        ({"fprop": 3}, TypeError, r"overlap\['fprop'\] is 3, expected a dict"),
        ({"wgrad": {"method": "pipeline"}}, ValueError, "method of wgrad is 'pipeline', expected 'bulk'"),
        ({"num_sm": -1}, ValueError, "num_comm_ctas is -1, expected an integer >= 1"),
    ],
)
def test_keys_that_have_no_meaning(keys: Mapping[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"layer: .*{text}"):
        as_config("layer", keys, "row")


def test_the_backward_pass_has_a_configuration_of_its_own_if_it_is_given() -> None:
    alike = OverlapConfig("ring", save_gathered=False)
    assert alike.backward is alike
    apart = replace(alike, dgrad=OverlapConfig("slices", chunks=2))
    assert apart.backward == OverlapConfig("slices", chunks=2, save_gathered=False)
    assert len({OverlapConfig(), OverlapConfig("auto"), OverlapConfig("off")}) == 2  # equal ones are one key


def layers(comm: Communicator) -> list[str]:
    column = ad.ColumnParallelLinear(8, 8, comm, overlap={"method": "pipeline", "num_splits": 2})
    row = ad.RowParallelLinear(8, 8, comm, overlap="off")
    sequential = ad.nn.Sequential(ad.nn.AllGather(comm, grad="sum"), overlap=OverlapConfig("ring"))
    with pytest.raises(ValueError, match="ColumnParallelLinear: overlap is 'on', expected"):
        ad.ColumnParallelLinear(8, 8, comm, overlap="on")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"nn\.Sequential: overlap is 1, expected"):
        ad.nn.Sequential(overlap=1)  # type: ignore[arg-type]
    return [column.extra_repr(), row.extra_repr(), sequential.overlap.method]  # type: ignore[union-attr]


def test_layers_take_and_show_it(ranks: RankPool) -> None:
    (column, row, method), _ = ranks.run(2, layers)
    assert column.endswith("overlap=slices") and row.endswith("overlap=off") and method == "ring"
