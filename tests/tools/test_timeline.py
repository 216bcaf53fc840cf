"""Traces of overlap: recorded operations, totals of their intervals, and atomic writing of the file."""

from __future__ import annotations

import gc
import math
import pickle
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch
from ranks import RankPool

import pynccl_autograd as ad
from pynccl import Communicator, chrome_trace as chrome
from pynccl_autograd import ColumnParallelLinear, OverlapConfig
from pynccl_autograd.overlap.lanes import observers
from pynccl_autograd.overlap.report import Interval, Operation, recording


def interval(lane: str, begin: float, end: float, number: int = 0) -> Interval:
    return Interval(lane, "all_gather" if lane == "comm" else "linear_rows", number, begin, end)


def test_totals_of_an_operation() -> None:
    """comm is busy for 4 + 3 seconds; compute, on two streams, from 0 to 6, and idle from 6 to 9."""
    intervals = (
        *(interval("comm", 1, 5), interval("comm", 6, 9, 1)),
        *(interval("main", 0, 1, 2), interval("main", 1, 4), interval("second", 3, 6, 1)),
    )
    operation = Operation("ColumnParallelLinear", None, 9.0, intervals)
    assert (operation.comm, operation.compute, operation.exposed) == (7, 6, 3)
    assert operation.efficiency == pytest.approx((7 + 6 - 9) / 6)
    serial = (interval("comm", 0, 2), interval("main", 2, 5))  # sequential: nothing is hidden
    assert Operation("", None, 5.0, serial).efficiency == 0
    assert math.isnan(Operation("", None, 5.0, serial[1:]).efficiency)


def record_layer(comm: Communicator) -> tuple[list[Operation], bool]:
    """Return the operations of a layer, and whether its trace keeps a tensor alive."""
    layer = ColumnParallelLinear(8, 12, comm, bias=False, sequence_parallel=True, overlap=OverlapConfig("slices", 3))
    x = torch.randn(12, 8, requires_grad=True)
    with recording() as trace:
        layer(x).sum().backward()
    layer(x)
    assert trace not in observers
    with recording() as other:
        y = ad.all_gather_matmul(x, torch.randn(3, 8), comm, overlap=OverlapConfig("slices", 2))
    dropped = [weakref.ref(x), weakref.ref(y)]
    del x, y, layer
    gc.collect()
    return trace.operations(), len(other.operations()) != 1 or any(each() is not None for each in dropped)


def test_the_operations_of_a_layer_are_recorded_in_order(ranks: RankPool) -> None:
    for (forward, backward), kept in ranks.run(2, record_layer):
        assert not kept
        assert (forward.owner, forward.decision.schedule) == ("ColumnParallelLinear", "slices 3")
        counts = Counter((each.lane, each.what) for each in forward.intervals)
        assert counts["comm", "all_gather"] == 3 and counts["main", "linear_rows"] == 4
        counts = Counter((each.lane, each.what) for each in backward.intervals)
        assert counts["comm", "reduce_scatter"] == 3 and counts["main", "outer_rows"] == 1
        assert (forward.decision.pattern, backward.decision.pattern) == ("all_gather_matmul", "column_backward")
        for operation in (forward, backward):
            assert all(0 <= each.begin <= each.end <= operation.wall for each in operation.intervals)
            assert [each.number for each in operation.intervals if each.lane == "comm"] == [0, 1, 2]
            assert repr(pickle.loads(pickle.dumps(operation))) == repr(operation)
        arrived = {each.number: each.end for each in forward.intervals if each.what == "all_gather"}
        matmuls = {each.number: each.begin for each in forward.intervals if each.what == "linear_rows"}
        assert all(arrived[number] <= matmuls[number + 1] for number in range(3))  # number 0 is this rank's own rows


def test_times_are_exact_to_the_nanosecond_and_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    first = chrome.piece("a", "comm", 0, 1, 3600.0000001, 3600.0000002)
    assert (first["ts"], first["dur"]) == (3600000000.1, 0.1)
    path = tmp_path / "trace.json"
    path.write_text("old")

    def broken() -> object:
        yield first
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        chrome.write(path, broken())  # type: ignore[arg-type]
    assert path.read_text() == "old" and [each.name for each in tmp_path.iterdir()] == ["trace.json"]
