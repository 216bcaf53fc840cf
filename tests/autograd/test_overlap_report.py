"""ad.overlap.report(): rows of layers that overlapped and of layers that did not."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from ranks import RankPool
from torch import nn

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd import OverlapConfig
from pynccl_autograd.overlap.report import Report, Row

WIDTH, HIDDEN, ROWS = 16, 32, 64


class Model(nn.Module):
    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        options = {"sequence_parallel": True}
        self.up = ad.ColumnParallelLinear(WIDTH, HIDDEN, comm, overlap=OverlapConfig("slices", chunks=2), **options)
        self.down = ad.RowParallelLinear(HIDDEN, WIDTH, comm, overlap="auto", **options)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(self.up(x).relu())


def report_of_a_pass_that_runs(comm: Communicator) -> str:
    layer = ad.RowParallelLinear(HIDDEN, WIDTH, comm, overlap=OverlapConfig("slices", chunks=2))
    x = torch.randn(ROWS, HIDDEN // comm.size)
    with ad.overlap.report(nn.Sequential(layer)) as report:
        slices = ad.matmul_all_reduce(x, layer.weight, comm, overlap=layer.overlap, hand_off=True, owner=layer)
        text = str(report)
        slices.whole()
    assert "forward" in str(report)
    return text


def test_a_layer_whose_pass_still_runs_is_not_listed_as_not_called(ranks: RankPool) -> None:
    assert ranks.run(2, report_of_a_pass_that_runs) == ["overlap: no layer with overlap ran"] * 2


def step_with_a_report_on_rank_0(comm: Communicator) -> tuple[str, bool]:
    layer = ad.RowParallelLinear(64, 64, comm, sequence_parallel=True)
    x = torch.ones(64, 64 // comm.size, requires_grad=True)
    report = ad.overlap.report() if comm.rank == 0 else contextlib.nullcontext()
    with torch.autocast("cpu", torch.bfloat16), report:
        y = layer(x)
    y.float().sum().backward()
    return type(y.grad_fn).__name__, x.grad is not None


def test_a_report_on_one_rank_changes_no_pass(ranks: RankPool) -> None:
    first, second = ranks.run(2, step_with_a_report_on_rank_0)
    assert first == second == ("AddBackward0", True)


def report_of_steps(comm: Communicator) -> tuple[list[Row], str, list[str]]:
    model = Model(comm)
    x = torch.randn(ROWS // comm.size, WIDTH, requires_grad=True)
    model(x).sum().backward()  # before the block: not in the report
    with ad.overlap.report(model) as report, ad.overlap.report() as without_names:
        for _ in range(3):
            model(x).sum().backward()
    model(x).sum().backward()  # after the block: not in the report either
    assert str(Report()) == "overlap: no layer with overlap ran"
    return report.rows(), str(report), list(dict.fromkeys(row.layer for row in without_names.rows()))


def test_the_report_lists_the_passes_of_each_layer_in_order(ranks: RankPool) -> None:
    rows, text, default_names = ranks.run(2, report_of_steps)[0]
    assert [(row.layer, row.what, row.decision.method) for row in rows] == [
        ("up", "forward", "slices"),
        ("up", "backward", "slices"),
        ("down", "forward", "off"),
        ("down", "backward", "off"),
    ]
    up, back, *off = rows
    for row in (up, back):
        assert row.calls == 3
        assert 0 < row.mm < row.wall and row.comm > 0 and math.isclose(row.exposed, row.wall - row.mm, rel_tol=0.9)
        assert row.efficiency <= 1.0
    assert all(math.isnan(row.wall) and row.calls == 3 for row in off)
    lines = text.splitlines()
    assert " ".join(lines[0].split()) == "layer pass chosen calls comm us mm us wall us exposed us efficiency"
    assert lines[1].split()[:5] == ["up", "forward", "slices", "2", "3"]
    assert lines[3].split() == ["down", "forward", "off", "3", "-", "-", "-", "-", "-"]
    assert lines[7].startswith("  down, forward: ") and "too few rows or features" in lines[7]
    assert default_names == ["ColumnParallelLinear(16, 32) #1", "RowParallelLinear(32, 16) #2"]


def report_of_single_calls(comm: Communicator) -> tuple[list[tuple[str, int]], bool]:
    model = Model(comm)
    with ad.CommOverlap(ad.CommOverlapHelper(comm), (4, 4)) as buffers, ad.overlap.report(model) as report:
        for _ in range(2):
            model.down(torch.randn(ROWS, HIDDEN // comm.size))  # without overlap
        with buffers.bulk("all_gather", torch.ones(4), torch.empty(4 * comm.size)):
            pass
        model.up(torch.randn(ROWS // comm.size, WIDTH))
    again = all(one is other for one, other in zip(report.operations(), report.operations(), strict=True))
    return [(row.layer, row.calls) for row in report.rows()], again and str(report) == str(report)


def test_layers_are_listed_in_the_order_of_their_first_calls_and_a_bulk_collective_is_no_layer(ranks: RankPool) -> None:
    assert ranks.run(2, report_of_single_calls) == [([("down", 2), ("up", 1)], True)] * 2
