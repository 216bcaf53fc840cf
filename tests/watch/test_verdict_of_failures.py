"""The verdict where calls have failed, processes have ended, and lines are old, whoever spoke first."""

from __future__ import annotations

from typing import Any

import pytest
from watched import DEAD, INSIDE, ISSUED, NOW, behind, call, comm, process, waiting

from pynccl.watch.records import FAILED, ProcessRecord
from pynccl.watch.verdict import about, judge, render


def three_wait() -> list[ProcessRecord]:
    return [waiting(rank, 4) for rank in range(3)]


DISAGREE = (
    "NcclInvalidUsage: recv failed: invalid usage: the calls of the ranks disagree: rank 1 calls a, rank 2 calls b"
)


def left_out_a_send(how: str, **end: Any) -> list[ProcessRecord]:
    """Ranks 0 and 1 in barrier #6, rank 2 in a recv from rank 1."""
    more = {"state": how, "age": 3, "returned": NOW - 1 if how == FAILED else 0.0}
    more["error"] = DISAGREE if how == FAILED else ""
    barriers = [comm(rank, 3, [call(5, "barrier"), call(6, "barrier", site="/m/a.py:9", **more)]) for rank in range(2)]
    recv = call(0, "recv", peer=1, entry=6, site="/m/a.py:5", **more)
    return [process(rank, one, **end) for rank, one in enumerate([*barriers, comm(2, 3, [call(5, "barrier"), recv])])]


@pytest.mark.parametrize(
    ("how", "end"),
    [
        (INSIDE, {}),
        (FAILED, {}),
        (FAILED, {"state": DEAD, "end": "NcclInvalidUsage: rank 1 was killed or crashed", "end_at": NOW - 0.5}),
    ],
)
def test_a_call_that_others_made_fail_is_a_wait_until_its_process_has_ended_and_after(
    how: str, end: dict[str, Any]
) -> None:
    verdict = judge(left_out_a_send(how, **end))
    said = "rank 1 in barrier #6 of comm 'tp' at a.py:9, rank 2 in recv from rank 1 of comm 'tp' at a.py:5."
    said = f"ranks wait for each other: {said}"
    assert verdict.sentence == about(verdict, "u-tp", 0).partition("\n")[0] == said
    assert set(verdict.culprits) == {("u-tp", 1), ("u-tp", 2)}
    assert "rank 1: never called send to rank 2" in verdict.details


def test_who_left_early_is_named_after_all_have_ended() -> None:
    error = "NcclRemoteError: lost rank 1"
    lost = [call(41, state=FAILED, error=error, age=3, returned=NOW - 2.9, site="/m/c.py:8")]
    gone = {"state": DEAD, "end": error, "end_at": NOW - 2}
    others = [process(rank, comm(rank, 3, [call(40), *lost]), **gone) for rank in (0, 2)]
    verdict = judge([*others, behind(1, 3, state=DEAD, end="exit", end_at=NOW - 2.5)])
    assert (verdict.kind, verdict.culprits) == ("dead", [("u-tp", 1)])
    assert verdict.sentence.startswith("all 3 processes have ended: rank 1 exited by itself")


def test_ranks_of_a_split_are_named_by_the_launch_too() -> None:
    calls = [call(1, "reduce", INSIDE, op=op, count=4, dtype="FLOAT32") for op in ("MAX", "SUM", "SUM")]
    child = [comm(rank, 3, [one], uid="u-s", name="s") for rank, one in enumerate(calls)]
    verdict = judge([process(launched, one) for launched, one in zip((2, 0, 3), child, strict=True)])
    assert verdict.sentence.startswith("rank 0 (rank 2 of the launch) calls reduce(count=4, FLOAT32, MAX) as #1")
    assert "ranks 1 and 2 (ranks 0 and 3 of the launch) call reduce(count=4, FLOAT32, SUM)" in verdict.details


def test_who_is_not_in_a_split_is_not_taken_for_its_rank() -> None:
    world = [comm(rank, 3, [call(9), call(10, "barrier", INSIDE)] if rank == 0 else [call(9)]) for rank in range(3)]
    child = comm(1, 2, [call(2, "barrier", INSIDE)], uid="u-s", name="s", parent="u-tp")
    verdict = judge([process(0, world[0]), process(1, world[1], child)])
    assert verdict.kind == "missing" and "nothing is known of rank 0" in render(verdict)


def test_what_an_old_line_says_is_told_with_its_age() -> None:
    seen = behind(3, 4, where_at=NOW - 12)
    assert "its main thread was in data.py:41 next_batch, seen 12.0 s ago" in judge([*three_wait(), seen]).details[0]
    fresh = behind(3, 4, where_at=NOW - 1)
    assert "its main thread is in data.py:41 next_batch" in judge([*three_wait(), fresh]).details[0]


@pytest.mark.parametrize("line", [{"where": ""}, {"where_at": NOW - 30}])
def test_a_line_from_before_the_newest_call_is_not_told(line: dict[str, Any]) -> None:
    late = process(3, comm(3, 4, [call(40, age=20, site="/m/train.py:7")]), **{"where": "/m/old.py:1 f", **line})
    verdict = judge([*three_wait(), late])
    assert verdict.details[0].endswith("its last call was all_reduce #40 at train.py:7 20.0 s ago")
    assert verdict.lines == ["/m/train.py:7"]


def test_a_rank_that_its_stream_is_seen_to_hold_is_not_to_blame() -> None:
    """All have entered call 40, which rank 3 waits for; rank 0 has passed it and waits for rank 3 in the next one."""
    held = comm(3, 4, [call(40, state=ISSUED, age=9)], waits_at=NOW - 1)
    seen = judge([*three_wait(), process(3, held, where="/m/x.py:1 f")], uid="u-tp")
    assert seen.kind == "stalled" and seen.sentence.startswith("rank 3 in all_reduce #40")
    held.waits_at = NOW - 10
    assert judge([*three_wait(), process(3, held, where="/m/x.py:1 f")]).culprits == [("u-tp", 3)]


def test_a_message_that_has_arrived_is_not_taken_for_the_next_one() -> None:
    """Rank 1 is in its second exchange; rank 0 still in its first one, whose other message does not come."""
    both = [call(0, "send", INSIDE, peer=1, entry=1, group=1), call(0, "recv", INSIDE, peer=2, entry=2, group=1)]
    second = call(0, "recv", INSIDE, 3, peer=0, entry=2, count=3)
    peer = [call(0, "recv", peer=0, entry=1, completed=NOW - 9), second]
    verdict = judge([process(0, comm(0, 3, both)), process(1, comm(1, 3, peer)), process(2, comm(2, 3, []))])
    assert (verdict.kind, verdict.culprits) == ("unmatched", [("u-tp", 2)])


def test_calls_that_differ_in_another_communicator_come_before_errors_in_this_one() -> None:
    """All but rank 2 have completed their part of the reduce, and gave up in a call of all ranks, where it was lost."""
    lost = call(41, state=FAILED, error="NcclRemoteError: lost rank 2", age=1, returned=NOW - 0.2)
    records = []
    for rank in range(3):
        reduce = call(3, "reduce", root=0 if rank == 2 else 2, count=6, dtype="FLOAT32", site=f"/m/a.py:{rank}")
        child = comm(rank, 3, [reduce], uid="u-s", name="s", parent="u-tp")
        records.append(process(rank, comm(rank, 3, [call(40), lost] if rank < 2 else [call(40)]), child))
    verdict = judge(records, uid="u-tp")
    assert about(verdict, "u-tp", 1).startswith("rank 2 calls reduce(count=6, FLOAT32, SUM, root=0) at a.py:2 as #3")


def test_messages_of_groups_are_not_compared_where_they_cannot_be_counted() -> None:
    both = [call(0, "send", INSIDE, peer=1, entry=91, group=1), call(0, "recv", INSIDE, peer=2, entry=92, group=1)]
    second = [call(0, "recv", INSIDE, 3, peer=0, entry=52, count=3, group=2)]
    records = [process(0, comm(0, 3, both)), process(1, comm(1, 3, second)), process(2, comm(2, 3, []))]
    assert judge(records).culprits == [("u-tp", 2)]
    for one in (*both, *second):
        one.group = 0
    assert judge(records).kind == "mismatch"


def test_what_another_rank_said_at_its_end_is_told_where_nothing_is_known() -> None:
    gave_up = call(41, state=FAILED, error=DISAGREE, age=3, returned=NOW - 2)
    end = "NcclInvalidUsage: rank 0 calls all_reduce(count=4) at a.py:9 as #41"
    gone = process(2, comm(2, 3, [call(40), gave_up]), state=DEAD, end=end, end_at=NOW - 1, end_site="/m/a.py:7")
    verdict = judge([waiting(1, 3), gone])
    assert verdict.sentence.startswith("rank 2 left by NcclInvalidUsage at a.py:7 1.0 s ago: rank 0 calls all_reduce")
    assert verdict.details[0].startswith("nothing is known of rank 0")
