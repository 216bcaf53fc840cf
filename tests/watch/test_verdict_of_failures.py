"""The verdict where calls have failed, processes have ended, and lines are old, whoever spoke first."""

from __future__ import annotations

from typing import Any

import pytest
from watched import NOW, Case, behind, call, comm, dp, failed, process, three_wait, waiting

from pynccl.watch.records import DEAD, FAILED, INSIDE, STOPPED, ProcessRecord
from pynccl.watch.verdict import about, judge

WHERE = "all_reduce #41 (comm 'tp', 4 ranks, BFLOAT16 x 33,554,432, model.py:88)"
FOR_IT = f"; 3 ranks have waited 12.3 s for it in {WHERE}."
LOST = "NcclRemoteError: no answer within the time-out"
DISAGREE = "NcclInvalidUsage: recv failed: the calls of the ranks disagree: rank 1 calls a, rank 2 calls b"


def dead(rank: int, end: str, ago: float, size: int = 4, number: int = 40, **more: Any) -> ProcessRecord:
    return behind(rank, size, number, state=DEAD, end=end, end_at=NOW - ago, **more)


def waits_for(state: str) -> list[ProcessRecord]:
    """Three wait for rank 3, which waits for one in 'dp' that is dead or stopped."""
    third = process(3, comm(3, 4, [call(40)]), dp(0, call(7, state=INSIDE)))
    return [*three_wait(), third, process(9, dp(1, call(6)), state=state)]


ENDS = {
    end.get("end", "no word"): Case(
        [waiting(0, 4), waiting(1, 4), waiting(3, 4), behind(2, 4, state=DEAD, end_at=NOW - 3.1, **end)],
        "dead tp2: " + says + FOR_IT,
    )
    for end, says in (
        (
            {"end": "ValueError: no such file", "end_site": "/x/train.py:31"},
            "rank 2 left by ValueError at train.py:31 3.1 s ago: no such file",
        ),
        (
            {"end": "KeyboardInterrupt", "end_site": "/x/train.py:31"},
            "rank 2 left by KeyboardInterrupt at train.py:31 3.1 s ago",
        ),
        (
            {"end": "killed or crashed"},
            "rank 2's process 1002 was killed or crashed (no last word) 3.1 s ago at data.py:41 next_batch",
        ),
        ({}, "rank 2's process 1002 was killed or crashed (no last word) 3.1 s ago at data.py:41 next_batch"),
        ({"end": "SIGTERM"}, "rank 2's process 1002 ended 3.1 s ago at data.py:41 next_batch: SIGTERM"),
        ({"end": "exit"}, "rank 2 exited by itself 3.1 s ago (the end of its program, or sys.exit)"),
    )
}
KILLED = {"state": DEAD, "end": "killed or crashed", "heartbeat": NOW - 1}
TERMINATED = {"state": DEAD, "end": "SIGTERM", "end_at": NOW - 1}
DEAD_RANKS = {
    **ENDS,
    "the first is to blame and errors about others are not": Case(
        [
            dead(0, "NcclRemoteError: lost rank 3", 9),
            dead(1, "RuntimeError: later", 3),
            dead(2, "ValueError: first", 5),
            waiting(3, 4),
        ],
        "dead tp2: rank 2 left by ValueError 5.0 s ago: first; rank 3 has waited",
        "\nalso: rank 1 left by RuntimeError 3.0 s ago: later",
    ),
    "calls that differ come before the errors that they cause": Case(
        [
            waiting(0, 2),
            process(
                1,
                comm(1, 2, [call(40), call(41, state=FAILED, count=3)]),
                state=DEAD,
                end="NcclInvalidUsage: the ranks disagree",
                end_at=NOW - 1,
            ),
        ],
        "mismatch tp0 tp1: the ranks disagree about call #41",
    ),
    "a job killed in a hang": Case(
        [*three_wait(**KILLED), behind(3, 4, **KILLED)],
        f"missing tp3: rank 3 never entered {WHERE}; 3 ranks have waited 11.3 s there.",
        "process 1001 was killed or crashed (no last word) within the last 1.0 s inside all_reduce",
        "last completed #40; its main thread was last in data.py:41 next_batch",
    ),
    "a job that ended by an error": Case(
        [*three_wait(**TERMINATED), dead(3, "ValueError: x", 2, end_site="/m/t.py:3")],
        "dead tp3: all 4 processes have ended: rank 3 left by ValueError at t.py:3 2.0 s ago: x",
        lines=["/m/t.py:3"],
    ),
    "all as they should": Case([dead(rank, "exit", 1) for rank in range(4)], "finished: all 4 ranks have finished."),
}


def gave_up(**more: Any) -> ProcessRecord:
    """Rank 1 has given up in what rank 0 has completed."""
    return process(1, comm(1, 2, [call(40), failed(LOST, 0.5, age=5.5, site="/m/a.py:30")]), **more)


STOP = "rank 3's process 1003 is stopped (SIGSTOP, or a debugger): kill -CONT 1003 on host a" + FOR_IT
STAYS = "rank 1 in all_reduce #41 (comm 'tp', 2 ranks, BFLOAT16 x 33,554,432, a.py:30), gave up after 5.0 s, which "
LIVING = {
    "stopped": Case([*three_wait(), behind(3, 4, state=STOPPED)], "stopped tp3: " + STOP),
    "who waits for the stopped": Case(waits_for(STOPPED), "stopped dp1: rank 1 (rank 9 of the launch)'s process"),
    "a communicator that has ended on one rank": Case(
        [
            *three_wait(),
            process(3, comm(3, 4, [call(40)], ended="destroyed", ended_site="/home/me/t.py:9", ended_at=NOW - 4.2)),
        ],
        "left tp3: rank 3's comm 'tp' was destroyed at t.py:9 4.2 s ago; "
        f"3 ranks have waited 12.3 s in {WHERE}, which it never entered.",
        lines=["/home/me/t.py:9"],
    ),
    "a call that failed keeps the others waiting": Case(
        [
            process(0, comm(0, 3, [call(40), failed("NcclSystemError: the link broke", 2, site="/m/t.py:3")])),
            waiting(1, 3),
            waiting(2, 3),
        ],
        "failed tp0: rank 0's all_reduce #41 (comm 'tp', 3 ranks, BFLOAT16 x 33,554,432, t.py:3) raised "
        "NcclSystemError: the link "
        "broke 2.0 s ago; 2 ranks have waited 12.3 s there",
        lines=["/m/t.py:3"],
    ),
    **{
        f"ranks that gave up, {name}": Case(
            [
                *(process(r, comm(r, 3, [call(40), failed("NcclTimeout: no answer", 2.3)]), **end) for r in (0, 1)),
                behind(2, 3),
            ],
            "missing tp2: rank 2 never entered all_reduce #41 (comm 'tp', 3 ranks, BFLOAT16 x 33,554,432); 2 "
            "ranks gave up after "
            "10.0 s.",
        )
        for name, end in (
            ("alive", {}),
            ("ended", {"state": DEAD, "end": "NcclTimeout: no answer", "end_at": NOW - 2}),
        )
    },
    "who gave up in what the others have completed": Case(
        [waiting(0, 2, 42), gave_up()], "stalled tp1: " + STAYS + "rank 0 completed: the network between", uid="u-tp"
    ),
    "all gave up though nobody was missing": Case(
        [process(rank, comm(rank, 2, [call(40), failed(LOST, 0.5, age=5.5)])) for rank in range(2)],
        "stalled: ranks 0 and 1 in all_reduce #41 (comm 'tp', 2 ranks, BFLOAT16 x 33,554,432), gave up after 5.0 "
        "s, and nobody "
        "is missing: the network between them",
        uid="u-tp",
    ),
    "an old line has its age": Case(
        [*three_wait(), behind(3, 4, where_at=NOW - 12)],
        "missing tp3: rank 3 never entered",
        "last completed #40; its main thread was in data.py:41 next_batch, seen 12.0 s ago",
    ),
    **{
        f"not a line from before the newest call, {name}": Case(
            [
                *three_wait(),
                process(3, comm(3, 4, [call(40, age=20, site="/m/train.py:7")]), **{"where": "/m/old.py:1 f", **line}),
            ],
            "missing tp3: rank 3 never entered",
            "its last call was all_reduce #40 at train.py:7 20.0 s ago",
            lines=["/m/train.py:7"],
        )
        for name, line in (("none", {"where": ""}), ("old", {"where_at": NOW - 30}))
    },
}


@pytest.mark.parametrize("name", {**DEAD_RANKS, **LIVING})
def test_what_is_said(name: str) -> None:
    {**DEAD_RANKS, **LIVING}[name].check()


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


def test_ranks_of_a_split_are_named_by_the_launch_too() -> None:
    calls = [call(1, "reduce", INSIDE, op=op, count=4, dtype="FLOAT32") for op in ("MAX", "SUM", "SUM")]
    child = [comm(rank, 3, [one], uid="u-s", name="s") for rank, one in enumerate(calls)]
    verdict = judge([process(launched, one) for launched, one in zip((2, 0, 3), child, strict=True)])
    assert verdict.sentence.startswith("rank 0 (rank 2 of the launch) calls reduce(count=4, FLOAT32, MAX) as #1")
    assert "ranks 1 and 2 (ranks 0 and 3 of the launch) call reduce(count=4, FLOAT32, SUM)" in verdict.details
