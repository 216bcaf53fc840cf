"""The trace that `hang --timeline` writes: what ui.perfetto.dev needs, with every call where it belongs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pynccl.tools.hang import timeline
from pynccl.watch.records import COMPLETED, DEAD, FAILED, INSIDE, ISSUED, CallRecord, CommRecord, ProcessRecord

NOW = 1_760_000_000.0


def call(number: int, issued: float, completed: float = 0.0, state: str = COMPLETED, **more: Any) -> CallRecord:
    """all_reduce #number; times in seconds before now, 0 where there is none."""
    times = {"issued": NOW - issued if issued else 0.0, "completed": NOW - completed if completed else 0.0}
    given: dict[str, Any] = {"operation": "all_reduce", "count": 8, "dtype": "FLOAT32", "op": "SUM", **times, **more}
    return CallRecord(number, number, state=state, **given)


def process(rank: int, calls: list[CallRecord]) -> ProcessRecord:
    """A rank of comm 'tp'."""
    comm = CommRecord("uid1", "tp", rank, 2, made=NOW - 100, calls=calls)
    return ProcessRecord(4000 + rank, "node0", machine="node0", rank=rank, now=NOW, comms=[comm])


def written(tmp_path: Path, *processes: ProcessRecord) -> dict[str, Any]:
    path = tmp_path / "trace.json"
    timeline.write(str(path), list(processes))
    trace: dict[str, Any] = json.loads(path.read_text(), parse_constant=pytest.fail)
    for event in trace["traceEvents"]:
        assert {"ph", "name", "pid", "tid"} <= event.keys()
        if event["ph"] != "M":
            assert event["ts"] >= 0 and event.get("dur", 0) >= 0
    return trace


def slices(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in trace["traceEvents"] if one["ph"] == "X"]


def names(trace: dict[str, Any], what: str) -> dict[tuple[int, int], str]:
    found = [one for one in trace["traceEvents"] if one["ph"] == "M" and one["name"] == what]
    return {(one["pid"], one["tid"]): next(iter(one["args"].values())) for one in found}


def test_a_call_is_a_slice_from_issued_to_completed_with_what_it_was_given(tmp_path: Path) -> None:
    one = call(7, 10.0, 9.5, site="/a/model.py:88", function="AllReduce.backward", root=3, stream=5)
    trace = written(tmp_path, process(0, [one]))
    (found,) = slices(trace)
    assert (found["name"], found["ts"], found["dur"]) == ("all_reduce #7", 0.0, pytest.approx(0.5e6))
    expected = {"number": 7, "count": 8, "dtype": "FLOAT32", "op": "SUM", "root": 3, "site": "/a/model.py:88"}
    assert expected.items() <= found["args"].items()
    assert found["args"]["function"] == "AllReduce.backward" and "peer" not in found["args"]
    assert names(trace, "process_name") == {(0, 0): "rank 0"}
    assert names(trace, "thread_name")[0, found["tid"]] == "tp"


def test_what_is_open_reaches_until_the_record_was_read_and_each_communicator_has_a_track(tmp_path: Path) -> None:
    calls = [call(1, 10.0, 9.0), call(2, 8.0, state=INSIDE), call(3, 7.0, state=ISSUED), call(4, 6.0, 5.0, FAILED)]
    one = process(0, calls)
    one.comms.append(CommRecord("uid2", "dp", 0, 2, calls=[call(9, 5.0, 4.0)]))
    trace = written(tmp_path, one)
    by_name = {one["name"]: (one["ts"] / 1e6, (one["ts"] + one["dur"]) / 1e6) for one in slices(trace)}
    assert by_name["all_reduce #2 (inside)"] == pytest.approx((2.0, 10.0))
    assert by_name["all_reduce #3 (issued)"] == pytest.approx((3.0, 10.0))
    assert "all_reduce #4" in by_name
    threads = names(trace, "thread_name")
    assert [threads[0, found["tid"]] for found in slices(trace)] == ["tp"] * 4 + ["dp"]


def test_slices_of_a_track_lie_after_or_within_each_other(tmp_path: Path) -> None:
    """Calls are issued before the ones ahead of them have completed; the viewer takes no slices that overlap."""
    calls = [call(number, 10 - number / 10, 9 - number / 2) for number in range(1, 8)]
    calls += [call(number, 8 - number / 10, state=ISSUED) for number in range(8, 12)]
    found = [(one["ts"], one["ts"] + one["dur"]) for one in slices(written(tmp_path, process(0, calls)))]
    assert len(found) == 11
    for number, (begin, end) in enumerate(found):
        for other_begin, other_end in found[number + 1 :]:
            assert other_begin >= end - 0.01 or (other_begin >= begin and other_end <= end + 0.01)


def test_the_end_of_a_process_is_marked(tmp_path: Path) -> None:
    one = process(0, [call(1, 10.0, 9.0)])
    one.state, one.end, one.end_site, one.end_at = DEAD, "ValueError: no file", "/a/train.py:31", NOW - 3
    (mark,) = [event for event in written(tmp_path, one)["traceEvents"] if event["ph"] == "i"]
    assert (mark["name"], mark["ts"]) == ("ended: ValueError: no file", pytest.approx(7e6))
