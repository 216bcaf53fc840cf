"""report(): what is said of layers that overlapped, and of those that did not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import tried
from ranks import RankPool
from torch import nn
from tried import IN, OUT, calling, timed_by, tried_small

import pynccl_autograd as ad
from pynccl import Communicator
from pynccl_autograd import OverlapConfig
from pynccl_autograd.overlap.reporting import Report, Row

WIDTH, HIDDEN, ROWS = 16, 32, 64


class Model(nn.Module):
    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        options = {"sequence_parallel": True}
        self.up = ad.ColumnParallelLinear(WIDTH, HIDDEN, comm, overlap=OverlapConfig("slices", chunks=2), **options)
        self.down = ad.RowParallelLinear(HIDDEN, WIDTH, comm, overlap="auto", **options)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(self.up(x).relu())


def steps(comm: Communicator) -> tuple[list[Row], str, list[str]]:
    model = Model(comm)
    x = torch.randn(ROWS // comm.size, WIDTH)
    model(x).sum().backward()  # before the block: not in the report
    with ad.overlap.report(model) as report, ad.overlap.report() as without_names:
        for _ in range(3):
            model(x).sum().backward()
    model(x).sum().backward()  # behind it: neither
    assert str(Report()) == "overlap: no layer with overlap ran"
    return report.rows(), str(report), list(dict.fromkeys(row.layer for row in without_names.rows()))


def test_each_layer_has_its_passes_in_order(ranks: RankPool) -> None:
    rows, text, numbered = ranks.run(2, steps)[0]
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
    assert lines[7].startswith("  down, forward: ") and "too few rows, or features" in lines[7]
    assert numbered == ["ColumnParallelLinear(16, 32) #1", "RowParallelLinear(32, 16) #2"]


def compiled(comm: Communicator) -> str:
    model, x = Model(comm), torch.randn(ROWS // comm.size, WIDTH)
    model.add_module("never", ad.RowParallelLinear(WIDTH, WIDTH, comm, overlap="off"))
    model.up.compile(backend="eager")
    with ad.overlap.report(model) as report:
        model(x).sum().backward()
    return str(report)


def test_layers_that_were_compiled_or_not_called_are_named(ranks: RankPool) -> None:
    text = ranks.run(2, compiled)[0]
    assert text.splitlines()[1].split()[:3] == ["down", "forward", "off"]
    why = "nothing that could overlap was seen: not called, no backward pass, or compiled (torch.compile drops overlap)"
    assert text.splitlines()[-1] == f"  up: {why}"


def described(comm: Communicator) -> str:
    """A layer between its first forward and backward passes; what no layer is, is refused."""
    layer = ad.ColumnParallelLinear(IN, OUT, comm, sequence_parallel=True, dtype=torch.float64)
    with tried_small():
        y = layer(torch.randn(tried.ROWS // comm.size, IN, dtype=torch.float64))
        text = ad.describe(layer)
        y.sum().backward()
        with pytest.raises(TypeError, match=r"owner is 'fc1', expected the module"):
            calling(comm, "matmul_reduce_scatter", "fc1")()
    for function in (ad.overlap.decisions, ad.overlap.retry):
        with pytest.raises(TypeError, match=r"model is 5, expected a torch.nn.Module, or a communicator"):
            function(5)
    return text


def test_what_is_on_trial_can_be_read_at_any_time(ranks: RankPool) -> None:
    text = ranks.run(2, described)[0]
    assert f"model, all_gather_matmul of {tried.ROWS} rows: undecided, on trial, call 1 of 24" in text
    assert f"model, column_backward of {tried.ROWS} rows: undecided, on trial, call 0 of 24" in text


def decided(comm: Communicator) -> tuple[str, str, int, bool]:
    """A report that goes on while a trial ends: of the calls since then."""
    layer = ad.RowParallelLinear(OUT, IN, comm, sequence_parallel=True, dtype=torch.float64)
    x = torch.randn(tried.ROWS, OUT // comm.size, dtype=torch.float64)
    with timed_by(lambda decision, number: 1.0 if decision.way == "ring" else 2.0), torch.no_grad():
        with ad.overlap.report() as report:
            for _ in range(24):
                layer(x)
        (row,) = report.rows()
    return row.decision.way, row.decision.reason[:5], row.calls, math.isnan(row.wall)


def test_a_report_tells_of_what_was_decided_in_it(ranks: RankPool) -> None:
    assert ranks.run(2, decided) == [("ring", "tried", 4, False)] * 2
