"""The trace that `hang --timeline` writes: what ui.perfetto.dev needs, with every call where it belongs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pynccl.tools.hang import timeline
from pynccl.watch.records import COMPLETED, DEAD, INSIDE, ISSUED, CallRecord, CommRecord, ProcessRecord

NOW = 1_760_000_000.0


def call(number: int, issued: float, completed: float = 0.0, state: str = COMPLETED, **more: Any) -> CallRecord:
    """all_reduce #number; times in seconds before now, 0 where there is none."""
    times = {"issued": NOW - issued, "completed": NOW - completed if completed else 0.0}
    given: dict[str, Any] = {"count": 8, "dtype": "FLOAT32", "op": "SUM", **times, **more}
    return CallRecord(number, number, "all_reduce", state=state, **given)


def written(tmp_path: Path, *calls: CallRecord) -> list[dict[str, Any]]:
    """The events of a rank that made these calls in comm 'tp', one in 'dp', and has ended."""
    tp = CommRecord("uid1", "tp", 0, 2, made=NOW - 100, calls=[*calls])
    dp = CommRecord("uid2", "dp", 0, 2, calls=[call(9, 5.0, 4.0)])
    one = ProcessRecord(4000, "node0", machine="node0", rank=0, now=NOW, comms=[tp, dp])
    one.state, one.end, one.end_site, one.end_at = DEAD, "ValueError: no file", "/a/train.py:31", NOW - 3
    timeline.write(str(tmp_path / "trace.json"), [one])
    trace = json.loads((tmp_path / "trace.json").read_text(), parse_constant=pytest.fail)
    events: list[dict[str, Any]] = trace["traceEvents"]
    assert all({"ph", "name", "pid", "tid"} <= event.keys() for event in events)
    return events


def test_a_call_is_a_slice_from_issued_to_completed_with_what_it_was_given(tmp_path: Path) -> None:
    """What is open reaches until the record was read; each communicator has a track; the end is marked."""
    given = {"site": "/a/model.py:88", "function": "AllReduce.backward", "root": 3}
    calls = [call(1, 10.0, 9.5, **given), call(2, 8.0, state=INSIDE), call(3, 7.0, state=ISSUED)]
    events = written(tmp_path, *calls)
    found = {one["name"]: one for one in events if one["ph"] == "X"}
    spans = {name: (one["ts"] / 1e6, (one["ts"] + one["dur"]) / 1e6) for name, one in found.items()}
    assert spans["all_reduce #1"] == pytest.approx((0.0, 0.5))
    assert spans["all_reduce #2 (inside)"] == pytest.approx((2.0, 10.0))
    assert spans["all_reduce #3 (issued)"] == pytest.approx((3.0, 10.0))
    assert {"number": 1, "count": 8, "dtype": "FLOAT32", "op": "SUM", **given}.items() <= found["all_reduce #1"][
        "args"
    ].items()
    threads = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    assert [threads[one["tid"]] for one in found.values()] == ["tp"] * 3 + ["dp"]
    assert [one["args"]["name"] for one in events if one["name"] == "process_name"] == ["rank 0"]
    (mark,) = [one for one in events if one["ph"] == "i"]
    assert (mark["name"], mark["ts"]) == ("ended: ValueError: no file", pytest.approx(7e6))


def test_slices_of_a_track_lie_after_or_within_each_other(tmp_path: Path) -> None:
    """Calls are issued before the ones ahead of them have completed; the viewer takes no slices that overlap."""
    calls = [call(number, 10 - number / 10, 9 - number / 2) for number in range(1, 8)]
    calls += [call(number, 8 - number / 10, state=ISSUED) for number in range(8, 12)]
    found = [(one["ts"], one["ts"] + one["dur"]) for one in written(tmp_path, *calls) if one["ph"] == "X"][:11]
    for number, (begin, end) in enumerate(found):
        for other_begin, other_end in found[number + 1 :]:
            assert other_begin >= end - 0.01 or (other_begin >= begin and other_end <= end + 0.01)
