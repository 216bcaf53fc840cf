"""OverlapConfig and TransformerEngine's keys: what each layer makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import RankPool
from torch import nn
from tried import BACKWARD, FUNCTIONS, IN, OUT, PATTERNS, ROWS, Ways, calling, tried_small

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl.comm.observing import observing
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


def handed_off(comm: Communicator) -> list[str]:
    """Slices that are handed out are of a fixed number, and deterministic where that is asked for."""
    x, w = torch.randn(ROWS, IN // comm.size), torch.randn(OUT, IN // comm.size)
    found = []
    for config in ("auto", *(OverlapConfig(method, deterministic=True) for method in ("auto", "exchange"))):
        with tried_small(), ad.overlap.report() as report:
            ad.matmul_all_reduce(x, w, comm, overlap=config, hand_off=True).whole()
        found += [row.decision.way for row in report.rows() if row.decision.settled]
    return found


def test_slices_that_are_handed_out_are_not_tried(ranks: RankPool) -> None:
    assert ranks.run(2, handed_off) == [["slices 4", "exchange 4", "exchange 4"]] * 2


def ways_of(comm: Communicator, config: OverlapConfig) -> dict[str, list[str]]:
    """Of each pattern, in the order in which they were first taken; what stays is last."""
    ways, layer = Ways(), nn.Identity()
    with tried_small(), observing(ways):
        for name in FUNCTIONS:
            call = calling(comm, name, layer, overlap=config)
            for _ in range(25):
                call()
    assert all(one.settled for one in ad.overlap.decisions(layer))
    return {pattern: list(dict.fromkeys(ways.of(pattern))) for pattern in PATTERNS}


def test_chunks_that_are_not_said_are_tried(ranks: RankPool) -> None:
    slices, exchanges = ([f"{method} {chunks}" for chunks in (2, 4, 8)] for method in ("slices", "exchange"))
    found = ranks.run(2, ways_of, OverlapConfig("slices"))[0]
    assert found == dict.fromkeys(PATTERNS, slices)
    found = ranks.run(2, ways_of, OverlapConfig("exchange"))[0]
    gathers = ("all_gather_matmul", "row_backward")
    assert found == {pattern: slices if pattern in gathers else exchanges for pattern in PATTERNS}
    found = ranks.run(2, ways_of, OverlapConfig("slices", chunks=3))[0]
    assert found == {pattern: ["slices 3"] for pattern in PATTERNS}
    found = ranks.run(2, ways_of, OverlapConfig("off", dgrad=OverlapConfig("slices")))[0]
    assert found == {pattern: slices if pattern in BACKWARD else ["off"] for pattern in PATTERNS}
