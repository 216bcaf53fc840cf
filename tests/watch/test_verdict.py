"""The first sentence of the verdict names the rank, the call and the line that block a job."""

from __future__ import annotations

import json
from typing import Any

import pytest
from watched import NOW, Case, behind, call, comm, dp, ended, failed, in_init, process, three_wait, waiting

from pynccl.bindings.errors import (
    NcclInternalError,
    NcclInvalidUsage,
    NcclRemoteError,
    NcclSystemError,
    Outcome,
    with_outcome,
)
from pynccl.watch.formatting import seconds
from pynccl.watch.layout import CommEnd, ProcessEnd
from pynccl.watch.records import INSIDE, ISSUED, LAUNCHED, STOPPED, ProcessRecord
from pynccl.watch.verdict import about, judge, render

CALL = "all_reduce #41 (comm 'tp', {} ranks, BFLOAT16 x 33,554,432"
WHERE = CALL.format(4) + ", model.py:88)"
ABSENT = (3, 5, *range(7, 13))


def elsewhere() -> list[ProcessRecord]:
    """Three ranks wait for rank 3, which waits in 'dp' for a late rank."""
    third = process(3, comm(3, 4, [call(40)]), dp(0, call(7, state=INSIDE)), where="/m/l.py:3 item")
    return [*three_wait(), third, process(9, dp(1, call(6)))]


def of_autograd() -> list[ProcessRecord]:
    records = three_wait()
    for record in records:
        record.comms[0].calls[-1].function = "AllReduce.backward"
        record.comms[0].calls[-1].forward_site = "/home/me/model.py:70"
    return records


MISSING = {
    "a rank never entered the call": Case(
        [*three_wait(), behind(3, 4)],
        f"missing tp3: rank 3 never entered {WHERE}; 3 ranks have waited 12.3 s there.\n"
        "rank 3: process alive, last completed #40; its main thread is in data.py:41 next_batch",
        lines=["/home/me/data.py:41"],
    ),
    "several ranks are printed as ranges": Case(
        [behind(rank, 13) if rank in ABSENT else waiting(rank, 13) for rank in range(13)],
        "missing tp3 tp5 tp7 tp8 tp9 tp10 tp11 tp12: ranks 3, 5 and 7-12 never entered " + CALL.format(13),
    ),
    "no record": Case(
        three_wait(),
        "missing tp3: no record of rank 3 of comm 'tp' (it has not entered init, runs on another node, or uses another "
        f"PYNCCL_WATCH_DIR); 3 ranks have waited 12.3 s in {WHERE}.",
    ),
    "no records, and one of the ranks was lost": Case(
        [process(0, comm(0, 4, [call(40), failed(with_outcome(NcclRemoteError("x"), Outcome.PEER_LOST, 2), 1)]))],
        "missing tp2: no record of rank 2 of comm 'tp' (it has",
    ),
    "a rank that waits elsewhere is not a culprit": Case(
        elsewhere(), "missing dp1: rank 9 never entered all_reduce #7 (comm 'dp'"
    ),
    "missing in two communicators": Case(
        [waiting(0, 2), process(1, comm(1, 2, [call(40)]), dp(1, call(6))), process(2, dp(0, call(7, state=INSIDE)))],
        "missing tp1: rank 1 never entered all_reduce #41",
        "also not entered: all_reduce #7 of comm 'dp'",
    ),
    "a rank not in init": Case(
        [in_init(0), in_init(1), in_init(2), process(3, where="/m/data.py:3 load")],
        "missing w3: rank 3 never entered init (comm 'world', 4 ranks, train.py:3); 3 ranks have waited 12.3 s there.\n"
        "rank 3: process alive, has not entered the communicator's init; its main thread is in data.py:3 load",
    ),
    "autograd": Case(
        [*of_autograd(), behind(3, 4)],
        "missing tp3: rank 3 never entered all_reduce #41 (AllReduce.backward of the forward call at "
        "model.py:70, comm 'tp'",
    ),
    "ranks of one process": Case(
        [process(-1, comm(0, 2, [call(41, state=INSIDE)]), comm(1, 2, [call(40, age=20, site="/b.py:2")]))],
        "missing tp1: rank 1 never entered all_reduce #41",
        "rank 1: process alive, last completed #40; its last call was all_reduce #40 at b.py:2 20.0 s ago",
        "rank 0 waits there in the same process: if one thread makes the calls of both ranks, put them into a pynccl."
        "group()",
    ),
    "an old line is printed with its age": Case(
        [*three_wait(), behind(3, 4, where_at=NOW - 12)],
        "missing tp3: rank 3 never entered",
        "last completed #40; its main thread was in data.py:41 next_batch, seen 12.0 s ago",
    ),
    "a line from before the newest call is not printed": Case(
        [
            *three_wait(),
            process(3, comm(3, 4, [call(40, age=20, site="/m/a.py:7")]), where="/m/o.py:1 f", where_at=NOW - 30),
        ],
        "missing tp3: rank 3 never entered",
        "its last call was all_reduce #40 at a.py:7 20.0 s ago",
        lines=["/m/a.py:7"],
    ),
    "all ranks are in the call": Case(
        [waiting(rank, 4) for rank in range(4)],
        f"stalled: ranks 0-3 in {WHERE}, not done after 12.3 s, and no rank is missing: check the network between "
        "them, the GPUs, and the work before it on its stream.",
    ),
    "a call that the others have completed": Case(
        [waiting(0, 3), *(process(rank, comm(rank, 3, [call(41)])) for rank in (1, 2))],
        f"stalled tp0: rank 0 in {CALL.format(3)}, model.py:88), not done after 12.3 s, which ranks 1 and 2 completed",
    ),
    "calm": Case([behind(rank, 4) for rank in range(4)], "running: no rank is stuck: 4 running, 0 finished."),
    "no records": Case([], "empty: no records found here"),
}


# Exits and failures

LOST = NcclRemoteError("no answer within the time-out")
KILLED = {**ended(ProcessEnd.KILLED), "heartbeat": NOW - 1}
NO_EXIT_RECORDED = "rank 2's process 1002 was killed or crashed (no exit recorded) 3.1 s ago at data.py:41 next_batch"


def dead(rank: int, by: BaseException | ProcessEnd, ago: float, **more: Any) -> ProcessRecord:
    return behind(rank, 4, 40, **ended(by), end_at=NOW - ago, **more)


def gave_up(rank: int, **more: Any) -> ProcessRecord:
    return process(rank, comm(rank, 2, [call(40), failed(LOST, 0.5, age=5.5, site="/m/a.py:30")]), **more)


ENDED = {
    **{
        repr(by): Case(
            [waiting(0, 4), waiting(1, 4), waiting(3, 4), dead(2, by, 3.1, end_site=site)],
            f"dead tp2: {message}; 3 ranks have waited 12.3 s for it in {WHERE}.",
        )
        for by, site, message in (
            (
                ValueError("no such file"),
                "/x/t.py:31",
                "rank 2 exited with ValueError at t.py:31 3.1 s ago: no such file",
            ),
            # A user's own exception is a cause, whatever it is called.
            (
                type("RemoteTimeoutError", (ValueError,), {})("ranks disagree"),
                "/x/t.py:31",
                "rank 2 exited with RemoteTimeoutError at t.py:31 3.1 s ago: ranks disagree",
            ),
            (KeyboardInterrupt(), "/x/t.py:31", "rank 2 exited with KeyboardInterrupt at t.py:31 3.1 s ago"),
            (ProcessEnd.KILLED, "", NO_EXIT_RECORDED),
            (ProcessEnd.RUNNING, "", NO_EXIT_RECORDED),
            (ProcessEnd.CLEAN, "", "rank 2 exited by itself 3.1 s ago (the end of its program, or sys.exit)"),
        )
    },
    "the first exit is the culprit, errors about other ranks are not": Case(
        [dead(0, LOST, 9), dead(1, RuntimeError("later"), 3), dead(2, ValueError("first"), 5), waiting(3, 4)],
        "dead tp2: rank 2 exited with ValueError 5.0 s ago: first; rank 3 has waited",
        "\nalso: rank 1 exited with RuntimeError 3.0 s ago: later",
    ),
    "a job killed in a hang": Case(
        [*three_wait(**KILLED), behind(3, 4, **KILLED)],
        f"missing tp3: rank 3 never entered {WHERE}; 3 ranks have waited 11.3 s there.",
        "process 1001 was killed or crashed (no exit recorded) within the last 1.0 s inside all_reduce",
        "last completed #40; its main thread was last in data.py:41 next_batch",
    ),
    "a job interrupted in a hang": Case(
        [
            *(
                process(
                    rank,
                    comm(rank, 4, [call(40, age=30), failed(KeyboardInterrupt(), 1, age=13.3, site="/m/a.py:3")]),
                    **ended(KeyboardInterrupt()),
                )
                for rank in range(3)
            ),
            behind(3, 4, **ended(KeyboardInterrupt())),
        ],
        f"missing tp3: rank 3 never entered {CALL.format(4)}, a.py:3); 3 ranks gave up after 12.3 s.",
    ),
    "all exited cleanly": Case(
        [dead(rank, ProcessEnd.CLEAN, 1) for rank in range(4)], "finished: all 4 ranks have finished."
    ),
    "stopped": Case(
        [*three_wait(), behind(3, 4, state=STOPPED)],
        "stopped tp3: rank 3's process 1003 is stopped (SIGSTOP, or a debugger): kill -CONT 1003 on host a; 3 ranks",
    ),
    "a communicator destroyed on one rank": Case(
        [
            *three_wait(),
            process(
                3, comm(3, 4, [call(40)], ended=CommEnd.DESTROYED, ended_site="/home/me/t.py:9", ended_at=NOW - 4.2)
            ),
        ],
        "destroyed tp3: rank 3's comm 'tp' was destroyed at t.py:9 4.2 s ago; "
        f"3 ranks have waited 12.3 s in {WHERE}, which it never entered.",
        lines=["/home/me/t.py:9"],
    ),
    "a failed call keeps the others waiting": Case(
        [
            process(0, comm(0, 3, [call(40), failed(NcclSystemError("the link broke"), 2, site="/m/t.py:3")])),
            waiting(1, 3),
            waiting(2, 3),
        ],
        f"failed tp0: rank 0's {CALL.format(3)}, t.py:3) raised NcclSystemError: the link broke 2.0 s ago; "
        "2 ranks have waited 12.3 s there",
    ),
    "ranks that gave up": Case(
        [gave_up(0), behind(1, 2)],
        f"missing tp1: rank 1 never entered {CALL.format(2)}, a.py:30); rank 0 gave up after 5.0 s.",
    ),
    "a rank gave up in a call that the others have completed": Case(
        [waiting(0, 2, 42), gave_up(1, **ended(LOST), end_site="/m/a.py:30")],
        f"stalled tp1: rank 1 in {CALL.format(2)}, a.py:30), gave up after 5.0 s, which rank 0 completed: check",
        uid="u-tp",
    ),
}


ALL = {**MISSING, **ENDED}


@pytest.mark.parametrize("name", ALL)
def test_the_verdict(name: str) -> None:
    ALL[name].check()


def test_the_verdict_in_an_exception_is_short_and_does_not_repeat_it() -> None:
    verdict = judge(elsewhere())
    assert about(verdict, "u-tp", 0).startswith("rank 9 never entered")
    assert json.loads(json.dumps(verdict.to_json()))["culprits"] == [["u-dp", 1]]
    own = failed(NcclInternalError("x"), 2)
    alone = judge([process(0, comm(0, 2, [own])), process(1, comm(1, 2, [call(41)]))])
    assert (alone.kind, about(alone, "u-tp", 0)) == ("failed", "")
    wrong = with_outcome(NcclInvalidUsage("send and recv disagree"), Outcome.MISMATCH)
    send, recv = (failed(wrong, 1, 0, kind, peer=peer, site="/m/a.py:54") for kind, peer in (("send", 1), ("recv", 0)))
    verdict = judge([process(0, comm(0, 2, [send])), process(1, comm(1, 2, [recv]))])
    assert about(verdict, "u-tp", 0) == f"rank 1: recv from rank 0 at a.py:54 raised NcclInvalidUsage: {wrong}"


def launched(rank: int, *numbers: int, state: str = LAUNCHED, **more: Any) -> ProcessRecord:
    """Return a rank of two with these calls, 50 s ago, and nothing tells whether their stream has passed them."""
    calls = [call(number, state=state, age=50, site="/m/a.py:3") for number in numbers]
    return process(rank, comm(rank, 2, calls, **more))


LAUNCHES = {
    "a rank is missing": (
        [launched(0, 1, 2), launched(1, 1)],
        "missing",
        "rank 0 has perhaps waited 50.0 s there (not",
    ),
    "all have entered": ([launched(0, 1, 2), launched(1, 1, 2)], "running", "no rank is stuck"),
    "one is known to wait": ([launched(0, 1, state=ISSUED), launched(1, 1)], "stalled", "no rank is missing"),
    "a rank is done": ([launched(0, 1, 2), launched(1, 1, 2, ended=CommEnd.DESTROYED)], "running", "no rank is stuck"),
    "its communicator ended before": (
        [launched(0, 1, 2), launched(1, 1, ended=CommEnd.DESTROYED)],
        "destroyed",
        "in all_reduce #2 (comm 'tp', 2 ranks, BFLOAT16 x 33,554,432, a.py:3), which it never entered",
    ),
    "a rank's record is gone": ([launched(0, 1, 2)], "running", "no rank is stuck"),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_calls_that_may_have_run_are_waits_only_where_a_rank_is_missing(name: str) -> None:
    records, kind, text = LAUNCHES[name]
    verdict = judge(records)
    assert verdict.kind == kind and text in render(verdict), render(verdict)
    if name == "a rank is missing":
        assert "rank 1: process alive, last entered #1, not known which have run" in render(verdict)


def test_times_are_printed_in_two_units() -> None:
    expected = {
        0.04: "0.0 s",
        99.9: "99.9 s",
        100: "1 min 40 s",
        3599: "59 min 59 s",
        3600: "1 h 0 min",
        11_100: "3 h 5 min",
    }
    expected |= {86_399: "23 h 59 min", 86_400: "1 day", 172_800: "2 days"}
    assert {value: seconds(value) for value in expected} == expected
