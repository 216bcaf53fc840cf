"""The trace of `hang --timeline`: valid for ui.perfetto.dev, with every call on its track at its time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pynccl.tools.hang import timeline
from pynccl.watch.records import COMPLETED, DEAD, INSIDE, ISSUED, CallRecord, CommRecord, ProcessRecord

NOW = 1_760_000_000.0


def call(number: int, issued: float, completed: float = 0.0, state: str = COMPLETED, **more: Any) -> CallRecord:
    """Return all_reduce #number; times are in seconds before now, 0 means none."""
    times = {"issued": NOW - issued, "completed": NOW - completed if completed else 0.0}
    arguments: dict[str, Any] = {"count": 8, "dtype": "FLOAT32", "op": "SUM", **times, **more}
    return CallRecord(number, number, "all_reduce", state=state, **arguments)


def write_trace(tmp_path: Path, *calls: CallRecord) -> list[dict[str, Any]]:
    """Write the trace of an ended rank with these calls in comm 'tp' and one in 'dp'; return its events."""
    tp = CommRecord("uid1", "tp", 0, 2, made=NOW - 100, calls=[*calls])
    dp = CommRecord("uid2", "dp", 0, 2, calls=[call(9, 5.0, 4.0)])
    record = ProcessRecord(4000, "node0", machine="node0", rank=0, now=NOW, comms=[tp, dp])
    record.state, record.end, record.end_site, record.end_at = DEAD, "ValueError: no file", "/a/train.py:31", NOW - 3
    timeline.write(str(tmp_path / "trace.json"), [record])
    trace = json.loads((tmp_path / "trace.json").read_text(), parse_constant=pytest.fail)
    events: list[dict[str, Any]] = trace["traceEvents"]
    assert all({"ph", "name", "pid", "tid"} <= event.keys() for event in events)
    return events


def test_a_call_is_a_slice_from_issue_to_completion_with_its_arguments(tmp_path: Path) -> None:
    """Open calls extend to the time of reading; each communicator has a track; the end is marked."""
    arguments = {"site": "/a/model.py:88", "function": "AllReduce.backward", "root": 3}
    calls = [call(1, 10.0, 9.5, **arguments), call(2, 8.0, state=INSIDE), call(3, 7.0, state=ISSUED)]
    events = write_trace(tmp_path, *calls)
    found = {event["name"]: event for event in events if event["ph"] == "X"}
    spans = {name: (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for name, event in found.items()}
    assert spans["all_reduce #1"] == pytest.approx((0.0, 0.5))
    assert spans["all_reduce #2 (inside)"] == pytest.approx((2.0, 10.0))
    assert spans["all_reduce #3 (issued)"] == pytest.approx((3.0, 10.0))
    assert {"number": 1, "count": 8, "dtype": "FLOAT32", "op": "SUM", **arguments}.items() <= found["all_reduce #1"][
        "args"
    ].items()
    threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert [threads[event["tid"]] for event in found.values()] == ["tp"] * 3 + ["dp"]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["rank 0"]
    (mark,) = [event for event in events if event["ph"] == "i"]
    assert (mark["name"], mark["ts"]) == ("ended: ValueError: no file", pytest.approx(7e6))


def test_slices_of_a_track_are_disjoint_or_nested(tmp_path: Path) -> None:
    """Calls are issued before earlier ones have completed, but the viewer needs slices that do not overlap."""
    calls = [call(number, 10 - number / 10, 9 - number / 2) for number in range(1, 8)]
    calls += [call(number, 8 - number / 10, state=ISSUED) for number in range(8, 12)]
    found = [(e["ts"], e["ts"] + e["dur"]) for e in write_trace(tmp_path, *calls) if e["ph"] == "X"][:11]
    for number, (begin, end) in enumerate(found):
        for other_begin, other_end in found[number + 1 :]:
            assert other_begin >= end - 0.01 or (other_begin >= begin and other_end <= end + 0.01)
