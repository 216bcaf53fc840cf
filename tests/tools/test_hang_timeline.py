"""The trace that `hang --timeline` writes: what ui.perfetto.dev needs, with every call where it belongs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pynccl.tools.hang import clocks, timeline
from pynccl.watch.records import COMPLETED, DEAD, FAILED, INSIDE, ISSUED, CallRecord, CommRecord, ProcessRecord

NOW = 1_760_000_000.0


def call(number: int, issued: float, completed: float = 0.0, state: str = COMPLETED, **more: Any) -> CallRecord:
    """all_reduce #number; times in seconds before now, 0 where there is none."""
    times = {"issued": NOW - issued if issued else 0.0, "completed": NOW - completed if completed else 0.0}
    given: dict[str, Any] = {"operation": "all_reduce", "count": 8, "dtype": "FLOAT32", "op": "SUM", **times, **more}
    return CallRecord(number, number, state=state, **given)


def process(rank: int, calls: list[CallRecord], host: str = "node0", skew: float = 0.0) -> ProcessRecord:
    """A rank of comm 'tp'; its machine's clock is `skew` seconds late."""
    for one in calls:
        one.issued, one.completed = (moment and moment - skew for moment in (one.issued, one.completed))
    comm = CommRecord("uid1", "tp", rank, 2, made=NOW - 100 - skew, calls=calls)
    return ProcessRecord(4000 + rank, host, machine=host, rank=rank, now=NOW - skew, comms=[comm])


def written(tmp_path: Path, *processes: ProcessRecord) -> dict[str, Any]:
    path = tmp_path / "trace.json"
    timeline.write(path, list(processes))
    trace: dict[str, Any] = json.loads(path.read_text(), parse_constant=pytest.fail)
    for event in trace["traceEvents"]:
        assert {"ph", "name", "pid", "tid"} <= event.keys()
        if event["ph"] != "M":
            assert event["ts"] >= 0 and event.get("dur", 0) >= 0
    return trace


def slices(trace: dict[str, Any], pid: int | None = None) -> list[dict[str, Any]]:
    return [one for one in trace["traceEvents"] if one["ph"] == "X" and pid in (None, one["pid"])]


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


def test_what_is_open_reaches_until_the_record_was_read(tmp_path: Path) -> None:
    calls = [call(1, 10.0, 9.0), call(2, 8.0, state=INSIDE), call(3, 7.0, state=ISSUED), call(4, 6.0, 5.0, FAILED)]
    found = slices(written(tmp_path, process(0, calls)))
    by_name = {one["name"]: (one["ts"] / 1e6, (one["ts"] + one["dur"]) / 1e6) for one in found}
    assert by_name["all_reduce #2 (inside)"] == pytest.approx((2.0, 10.0))
    assert by_name["all_reduce #3 (issued)"] == pytest.approx((3.0, 10.0))
    assert "all_reduce #4 (failed)" in by_name


def test_each_communicator_has_a_track_and_each_of_its_streams(tmp_path: Path) -> None:
    one = process(0, [call(1, 10.0, 9.0, stream=1), call(2, 9.5, 8.0, stream=2)])
    one.comms.append(CommRecord("uid2", "dp", 0, 2, calls=[call(1, 5.0, 4.0)]))
    trace = written(tmp_path, one)
    threads = names(trace, "thread_name")
    assert [threads[0, found["tid"]] for found in slices(trace)] == ["tp, stream 0x1", "tp, stream 0x2", "dp"]


def test_slices_of_a_track_lie_after_or_within_each_other(tmp_path: Path) -> None:
    """Calls are issued before the ones ahead of them have completed; the viewer takes no slices that overlap."""
    calls = [call(number, 10 - number / 10, 9 - number / 2) for number in range(1, 8)]
    calls += [call(number, 8 - number / 10, state=ISSUED) for number in range(8, 12)]
    found = [(one["ts"], one["ts"] + one["dur"]) for one in slices(written(tmp_path, process(0, calls)))]
    assert len(found) == 11
    for number, (begin, end) in enumerate(found):
        for other_begin, other_end in found[number + 1 :]:
            assert other_begin >= end - 0.01 or (other_begin >= begin and other_end <= end + 0.01)


def test_the_same_collective_is_linked_across_ranks_from_the_first_to_the_last(tmp_path: Path) -> None:
    ranks = [process(rank, [call(1, 10 - rank, 2.0), call(2, 1.9 - rank / 10, 1.0)]) for rank in (0, 1, 2)]
    ranks[1].comms[0].calls.append(CallRecord(3, 0, "send", peer=0, issued=NOW - 0.5, completed=NOW - 0.4))
    trace = written(tmp_path, *ranks)
    arrows = [one for one in trace["traceEvents"] if one["ph"] in "stf"]
    assert Counter(one["id"] for one in arrows) == {0: 3, 1: 3}
    first = [one for one in arrows if one["id"] == 0]
    assert [(one["ph"], one["pid"]) for one in first] == [("s", 0), ("t", 1), ("f", 2)]
    places = {(one["pid"], one["tid"], one["ts"]) for one in slices(trace)}
    assert all((one["pid"], one["tid"], one["ts"]) in places for one in arrows)


def test_a_call_of_one_rank_alone_has_no_arrow(tmp_path: Path) -> None:
    trace = written(tmp_path, process(0, [call(1, 10.0, 9.0)]))
    assert not [one for one in trace["traceEvents"] if one["ph"] in "stf"]


def test_the_end_of_a_process_is_marked(tmp_path: Path) -> None:
    one = process(0, [call(1, 10.0, 9.0)])
    one.state, one.end, one.end_site, one.end_at = DEAD, "ValueError: no file", "/a/train.py:31", NOW - 3
    (mark,) = [event for event in written(tmp_path, one)["traceEvents"] if event["ph"] == "i"]
    assert (mark["name"], mark["ts"]) == ("ended: ValueError: no file", pytest.approx(7e6))
    assert mark["args"] == {"site": "/a/train.py:31"}


def test_a_job_without_calls_or_times_gives_a_trace(tmp_path: Path) -> None:
    bare = ProcessRecord(1, "node0")
    timeless = process(1, [call(1, 0)])
    timeless.now = timeless.comms[0].made = 0.0
    hostile = process(2, [call(1, 5.0, 4.0)])
    hostile.comms[0].calls[0].issued = hostile.now = float("nan")
    hostile.end, hostile.end_at = "exit", float("inf")
    assert written(tmp_path, bare, timeless, hostile)["traceEvents"]


# ------------------------------------------------------------------------------------------------------- clocks


def two_machines(skew: float) -> list[ProcessRecord]:
    """Rank 0 enters each collective 0.1 s after rank 1, and both complete 0.01 s after that."""
    times = [10.0 - number for number in range(5)]
    calls = {
        0: [call(number, begin - 0.1, begin - 0.11) for number, begin in enumerate(times, 1)],
        1: [call(number, begin, begin - 0.11) for number, begin in enumerate(times, 1)],
    }
    return [process(0, calls[0]), process(1, calls[1], "node1", skew)]


@pytest.mark.parametrize("skew", [30.0, -30.0, 0.5, -0.5])
def test_clocks_of_two_machines_are_aligned_by_what_they_did_together(skew: float, tmp_path: Path) -> None:
    processes = two_machines(skew)
    found = clocks.offsets(processes)
    assert found["node0"] == 0.0
    assert found["node1"] == pytest.approx(skew, abs=0.06)
    trace = written(tmp_path, *processes)
    assert "aligned" in trace["otherData"]["clocks"] and list(trace["otherData"]["moved"]) == ["node1"]
    entered = [sorted(one["ts"] for one in slices(trace, pid)) for pid in (0, 1)]
    for ours, theirs in zip(*entered, strict=True):
        assert ours - theirs == pytest.approx(0.1e6, abs=0.06e6)


def test_clocks_that_can_be_right_are_left_alone(tmp_path: Path) -> None:
    trace = written(tmp_path, *two_machines(0.0))
    assert trace["otherData"]["moved"] == {} and "not moved" in trace["otherData"]["clocks"]


def test_machines_that_did_nothing_together_are_left_alone() -> None:
    processes = two_machines(30.0)
    processes[1].comms[0].uid = "another"
    assert clocks.offsets(processes) == {"node0": 0.0, "node1": 0.0}
    rooted = two_machines(30.0)
    for one in (one for process in rooted for one in process.comms[0].calls):
        one.operation = "broadcast"  # its root may be done before the others have come
    assert clocks.offsets(rooted) == {"node0": 0.0, "node1": 0.0}


def test_a_rank_that_hangs_on_another_machine_aligns_by_what_came_before() -> None:
    processes = two_machines(30.0)
    for one in processes:
        one.comms[0].calls.append(call(6, 5.0, state=INSIDE))
    processes[1].comms[0].calls[-1].issued -= 30.0
    assert clocks.offsets(processes)["node1"] == pytest.approx(30.0, abs=0.06)
