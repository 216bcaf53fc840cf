"""The verdict names the rank, the call and the line that keep a job from going on, in its first sentence."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from watched import COMPLETED, DEAD, INSIDE, ISSUED, NOW, STOPPED, behind, call, comm, dp, process, ring, waiting

from pynccl.watch.records import FAILED, UNKNOWN, CallRecord, ProcessRecord
from pynccl.watch.verdict import Verdict, about, judge, render

WHERE = "all_reduce #41 (comm 'tp', 4 ranks, BFLOAT16 x 33,554,432, model.py:88)"


def three_wait() -> list[ProcessRecord]:
    return [waiting(rank, 4) for rank in range(3)]


def test_a_rank_that_never_came_is_named_with_where_it_is() -> None:
    verdict = judge([*three_wait(), behind(3, 4)])
    assert render(verdict) == (
        f"rank 3 never entered {WHERE}; 3 ranks have waited 12.3 s there.\n"
        "rank 3: process alive, last completed #40; its main thread is in data.py:41 next_batch"
    )
    assert (verdict.kind, verdict.culprits, verdict.lines) == ("missing", [("u-tp", 3)], ["/home/me/data.py:41"])


def test_several_missing_ranks_are_ranges() -> None:
    absent = (3, 5, *range(7, 13))
    verdict = judge([behind(rank, 13) if rank in absent else waiting(rank, 13) for rank in range(13)])
    assert verdict.sentence.startswith("ranks 3, 5 and 7-12 never entered all_reduce #41 (comm 'tp', 13 ranks")
    assert [rank for _, rank in verdict.culprits] == list(absent)


def test_a_call_on_a_stream_waits_as_one_inside_does() -> None:
    records = [*three_wait(), behind(3, 4)]
    for one in records[:3]:
        one.comms[0].calls[-1].state = ISSUED
    assert judge(records).culprits == [("u-tp", 3)]


def test_ranks_far_ahead_on_their_stream_wait_for_the_first_missing_call() -> None:
    ahead = [call(40, age=20), *(call(number, state=ISSUED, age=60 - number) for number in range(41, 50))]
    verdict = judge([process(0, comm(0, 3, ahead)), process(1, comm(1, 3, ahead[:5])), behind(2, 3)])
    assert verdict.sentence.startswith("rank 2 never entered all_reduce #41")
    assert verdict.culprits == [("u-tp", 2)]


def test_a_rank_without_a_record_is_said_to_be_unknown() -> None:
    verdict = judge(three_wait())
    assert verdict.sentence.startswith(
        "nothing is known of rank 3 of comm 'tp': no record here (another machine, another PYNCCL_WATCH_DIR"
    )
    assert (verdict.kind, verdict.culprits) == ("missing", [("u-tp", 3)])


def test_a_known_absentee_comes_before_an_unknown_one() -> None:
    verdict = judge([waiting(0, 1024), waiting(1, 1024), behind(7, 1024)])
    assert verdict.culprits == [("u-tp", 7)]
    assert "nothing is known of ranks 2-6 and 8-1023" in render(verdict)


def test_a_rank_that_waits_elsewhere_is_not_to_blame() -> None:
    third = process(3, comm(3, 4, [call(40)]), dp(0, call(7, state=INSIDE, site="/m/opt.py:5")))
    ninth = process(9, dp(1, call(6)), where="/m/data.py:41 next_batch")
    verdict = judge([*three_wait(), third, ninth])
    assert verdict.culprits == [("u-dp", 1)]
    assert verdict.sentence.startswith("rank 1 (rank 9 of the launch) never entered all_reduce #7 (comm 'dp'")
    assert verdict.comms == ["u-dp", "u-tp"]
    assert about(verdict, "u-tp", 0).startswith("rank 1 (rank 9 of the launch) never entered")


def test_a_rank_held_by_its_own_stream_is_not_to_blame() -> None:
    third = process(3, comm(3, 4, [call(40)]), dp(0, call(7, state=ISSUED)), where="/m/loss.py:3 item")
    assert judge([*three_wait(), third, process(9, dp(1, call(6)))]).culprits == [("u-dp", 1)]


def test_two_communicators_in_two_orders_are_named_with_both_lines() -> None:
    first = process(0, comm(0, 2, [call(5, state=INSIDE, site="/m/a.py:1")]), dp(0, call(6)))
    second = process(1, comm(1, 2, [call(4)]), dp(1, call(7, state=INSIDE, site="/m/b.py:2")))
    verdict = judge([first, second])
    assert verdict.kind == "crossed"
    assert sorted(verdict.culprits) == [("u-dp", 1), ("u-tp", 0)]
    assert sorted(verdict.lines) == ["/m/a.py:1", "/m/b.py:2"]
    assert verdict.sentence == (
        "ranks wait for each other: "
        "rank 0 in all_reduce #5 of comm 'tp' at a.py:1, rank 1 in all_reduce #7 of comm 'dp' at b.py:2."
    )


def both_issued(rank: int, tp_age: float, dp_age: float, **more: Any) -> ProcessRecord:
    tp_call = call(5, state=ISSUED, age=tp_age, site=f"/m/{rank}.py:5", **more)
    return process(
        rank, comm(rank, 2, [tp_call]), dp(rank, call(7, state=ISSUED, age=dp_age, site=f"/m/{rank}.py:7", **more))
    )


def test_two_orders_on_streams_are_seen_by_the_times_of_issue() -> None:
    verdict = judge([both_issued(0, 9, 8), both_issued(1, 7, 8)])
    assert verdict.kind == "crossed"
    assert (
        "rank 0 in all_reduce #5 of comm 'tp' at 0.py:5 before all_reduce #7 of comm 'dp' at 0.py:7" in verdict.sentence
    )
    assert (
        "rank 1 in all_reduce #7 of comm 'dp' at 1.py:7 before all_reduce #5 of comm 'tp' at 1.py:5" in verdict.sentence
    )


def test_calls_of_one_group_have_no_order() -> None:
    records = [both_issued(0, 3, 2, group=4), both_issued(1, 1, 2, group=9)]
    assert judge(records).kind == "running"


def test_one_order_on_all_ranks_is_not_crossed() -> None:
    assert judge([both_issued(0, 3, 2), both_issued(1, 2, 1)]).kind == "running"


@pytest.mark.parametrize("size", [2, 3, 64])
def test_ranks_that_all_receive_first_wait_for_each_other(size: int) -> None:
    verdict = judge(ring(size))
    assert verdict.kind == "crossed"
    assert {rank for _, rank in verdict.culprits} == set(range(size))
    assert verdict.lines == ["/m/ring.py:3"]
    assert len(verdict.sentence) < 600


def odd_call(*odd: tuple[int, CallRecord], size: int = 4) -> Verdict:
    calls = dict(odd)
    usual = [waiting(rank, size) for rank in range(size) if rank not in calls]
    return judge([*usual, *(process(rank, comm(rank, size, [call(40), one])) for rank, one in calls.items())])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"operation": "all_gather"}, "all_gather(count=33,554,432, BFLOAT16)"),
        ({"count": 7}, "all_reduce(count=7, BFLOAT16, SUM)"),
        ({"dtype": "FLOAT32"}, "all_reduce(count=33,554,432, FLOAT32, SUM)"),
        ({"op": "MAX"}, "all_reduce(count=33,554,432, BFLOAT16, MAX)"),
        ({"root": 1}, "root=1)"),
    ],
)
@pytest.mark.parametrize("state", [INSIDE, ISSUED, COMPLETED, FAILED])
def test_the_odd_call_out_is_named_beside_the_others(change: dict[str, Any], words: str, state: str) -> None:
    values = {"operation": "all_reduce", "state": state, "site": "/home/me/moe.py:95", **change}
    verdict = odd_call((2, call(41, **values)))
    assert (verdict.kind, verdict.culprits, verdict.lines) == ("mismatch", [("u-tp", 2)], ["/home/me/moe.py:95"])
    assert words in verdict.sentence and "at moe.py:95" in verdict.sentence
    assert "the others call all_reduce(count=33,554,432, BFLOAT16, SUM) at model.py:88" in verdict.sentence
    assert "stalled" not in {one.kind for one in verdict.findings}


def test_of_two_ranks_that_differ_both_are_named() -> None:
    verdict = odd_call((1, call(41, state=INSIDE, count=5, site="/home/me/b.py:9")), size=2)
    assert verdict.culprits == [("u-tp", 0), ("u-tp", 1)]
    assert verdict.lines == ["/home/me/model.py:88", "/home/me/b.py:9"]


def test_the_first_of_several_differences_is_named() -> None:
    usual = [process(r, comm(r, 3, [call(number) for number in range(38, 42)])) for r in range(2)]
    odd = process(2, comm(2, 3, [call(38), call(39, count=1), call(40, count=2), call(41, count=3)]))
    assert "as #39" in judge([*usual, odd]).sentence


@pytest.mark.parametrize("operation", ["all_gather_v", "all_to_all_v", "split", "group plan", "barrier"])
def test_calls_that_may_differ_are_no_mismatch(operation: str) -> None:
    records = [
        process(r, comm(r, 3, [call(41, operation, count=r + 1, detail=f"color={r}")]), state=DEAD, end="exit")
        for r in range(3)
    ]
    assert judge(records).kind == "finished"


def lines_of_code(rank: int, *steps: tuple[int, str, int], state: str = INSIDE) -> ProcessRecord:
    calls = [call(number, operation, site=f"/m/model.py:{line}") for number, operation, line in steps]
    calls[-1].state = state
    return process(rank, comm(rank, 3, calls))


def test_who_left_out_a_call_is_named_with_its_next_one() -> None:
    usual = ((40, "broadcast", 80), (41, "all_reduce", 88), (42, "all_gather", 95))
    odd = lines_of_code(2, (40, "broadcast", 80), (41, "all_gather", 95), state=COMPLETED)
    verdict = judge([lines_of_code(0, *usual), lines_of_code(1, *usual), odd])
    assert verdict.sentence.startswith("rank 2 calls all_gather(count=33,554,432, BFLOAT16) at model.py:95 as #41")
    assert "where the others call all_reduce(count=33,554,432, BFLOAT16, SUM) at model.py:88" in verdict.sentence
    assert verdict.culprits == [("u-tp", 2)]


def test_who_left_out_a_call_that_the_others_are_inside_of_is_named() -> None:
    step = ((37, "broadcast", 80), (38, "all_reduce", 88), (39, "all_gather", 95), (40, "broadcast", 80))
    usual = (*step, (41, "all_reduce", 88))
    verdict = judge(
        [lines_of_code(0, *usual), lines_of_code(1, *usual), lines_of_code(2, *step, (41, "all_gather", 95))]
    )
    assert (verdict.kind, verdict.culprits) == ("mismatch", [("u-tp", 2)])


def test_who_made_one_call_too_many_is_named_with_it() -> None:
    usual = ((40, "broadcast", 80), (41, "all_reduce", 88))
    odd = lines_of_code(2, (40, "broadcast", 80), (41, "all_gather", 9), (42, "all_reduce", 88))
    verdict = judge([*(lines_of_code(rank, *usual, state=COMPLETED) for rank in (0, 1)), odd])
    assert verdict.sentence.startswith("rank 2 calls all_gather(count=33,554,432, BFLOAT16) at model.py:9 as #41")
    assert verdict.culprits == [("u-tp", 2)]


def test_who_left_out_a_call_like_all_others_is_missing_in_the_last_one() -> None:
    usual = [(number, "all_reduce", number) for number in range(30, 42)]
    odd = [(number, "all_reduce", number + (number >= 38)) for number in range(30, 41)]
    others = [lines_of_code(rank, *usual) for rank in (0, 1)]
    verdict = judge([*others, lines_of_code(2, *odd, state=COMPLETED)])
    assert (verdict.kind, verdict.culprits) == ("missing", [("u-tp", 2)])


def test_a_branch_on_the_rank_is_not_a_call_left_out() -> None:
    usual = [(number, "all_reduce", 88) for number in range(30, 42)]
    other = [(number, "all_reduce", 90) for number in range(30, 41)]
    verdict = judge([lines_of_code(0, *usual), lines_of_code(1, *usual), lines_of_code(2, *other, state=COMPLETED)])
    assert (verdict.kind, verdict.culprits) == ("missing", [("u-tp", 2)])


def pair(*calls: CallRecord, **more: Any) -> list[ProcessRecord]:
    """Rank 1 waits for a message of rank 2, which has made `calls`."""
    recv = call(0, "recv", INSIDE, peer=2, site="/m/pp.py:3", count=4)
    return [process(1, comm(1, 3, [recv])), process(2, comm(2, 3, calls), **{"where": "/m/x.py:4 f", **more})]


def test_a_recv_without_its_send_names_the_sender() -> None:
    verdict = judge(pair(call(1, "barrier")))
    assert (verdict.kind, verdict.culprits, verdict.lines) == ("unmatched", [("u-tp", 2)], ["/m/x.py:4"])
    assert verdict.sentence.startswith(
        "rank 2 never called send to rank 1; rank 1 has waited 12.3 s in recv from rank 2"
    )


def test_of_a_rank_of_whom_few_calls_are_known_no_message_is_missed() -> None:
    """Rank 0 has sent, which was not passed on from its machine; rank 1 waits for what rank 2 has to receive."""
    group = [
        call(0, "send", INSIDE, peer=2, site="/m/pp.py:3", group=1),
        call(0, "recv", INSIDE, peer=0, site="/m/pp.py:4", group=1),
    ]
    ranks = [process(0, comm(0, 3, [call(2, "barrier", INSIDE, age=8.0)])), process(1, comm(1, 3, group))]
    assert "rank 0: never called send" in render(judge(ranks))
    ranks[0].comms[0].cut = True
    verdict = judge(ranks)
    assert verdict.sentence.startswith("nothing is known of rank 2")
    assert "never called" not in render(verdict)


def test_a_send_without_its_recv_names_the_receiver() -> None:
    send = call(0, "send", INSIDE, peer=1, site="/m/pp.py:9")
    verdict = judge([process(1, comm(1, 2)), process(0, comm(0, 2, [send]))])
    assert (verdict.kind, verdict.culprits) == ("unmatched", [("u-tp", 1)])
    assert verdict.sentence.startswith("rank 1 never called recv from rank 0")


def test_a_recv_from_the_dead_names_the_dead() -> None:
    verdict = judge(pair(call(1, "barrier"), state=DEAD, end="killed or crashed", end_at=NOW - 2))
    assert (verdict.kind, verdict.culprits) == ("dead", [("u-tp", 2)])
    assert "rank 1 has waited 12.3 s for it in recv from rank 2" in verdict.sentence


def test_a_send_and_a_recv_of_other_sizes() -> None:
    verdict = judge(pair(call(0, "send", INSIDE, peer=1, count=8, site="/m/pp.py:9")))
    assert verdict.sentence.startswith(
        "rank 2 sends BFLOAT16 x 8 at pp.py:9 to rank 1, which expects BFLOAT16 x 4 at pp.py:3"
    )
    assert (verdict.kind, verdict.lines) == ("mismatch", ["/m/pp.py:9", "/m/pp.py:3"])


def test_as_many_bytes_of_another_type_fit() -> None:
    assert judge(pair(call(0, "send", INSIDE, peer=1, count=2, dtype="FLOAT32")), patience=60).kind == "running"


def test_an_earlier_message_whose_end_was_noticed_late_is_no_answer() -> None:
    early = [call(0, "send", entry=1, age=9, peer=1, returned=NOW - 9, completed=NOW - 1, stream=5)]
    asked = [call(0, "recv", entry=1, age=9, peer=0, completed=NOW - 1), call(0, "recv", INSIDE, 3, entry=2, peer=0)]
    for first in (1, 700):  # of the calls that are still recorded
        for one in early + asked:
            one.entry += first - 1
        gone = process(0, comm(0, 2, early), state=DEAD, end="exit", end_at=NOW - 4)
        verdict = judge([gone, process(1, comm(1, 2, asked))])
        assert (verdict.kind, verdict.culprits) == ("dead", [("u-tp", 0)])


def test_a_send_that_was_received_is_not_unmatched() -> None:
    done = call(0, "recv", COMPLETED, peer=0, completed=NOW - 1)
    pending = call(0, "send", ISSUED, age=2, peer=1)
    assert judge([process(0, comm(0, 2, [pending])), process(1, comm(1, 2, [done]))]).kind == "running"


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (
            {"end": "ValueError: no such file", "end_site": "/x/train.py:31"},
            "by ValueError at train.py:31 3.1 s ago: no such file",
        ),
        (
            {"end": "KeyboardInterrupt", "end_site": "/x/train.py:31"},
            "left by KeyboardInterrupt at train.py:31 3.1 s ago",
        ),
        ({"end": "killed or crashed"}, "was killed or crashed (no last word) 3.1 s ago at data.py:41 next_batch"),
        ({}, "rank 2's process 1002 was killed or crashed (no last word) 3.1 s ago at data.py:41 next_batch"),
        ({"end": "SIGTERM"}, "process 1002 ended 3.1 s ago at data.py:41 next_batch: SIGTERM"),
        (
            {"end": "exit"},
            "3.1 s ago (the end of its program, or sys.exit); 3 ranks have waited 12.3 s for it in all_reduce #41",
        ),
    ],
)
def test_how_a_process_ended_is_said_first(end: dict[str, str], said: str) -> None:
    verdict = judge([waiting(0, 4), waiting(1, 4), waiting(3, 4), behind(2, 4, state=DEAD, end_at=NOW - 3.1, **end)])
    assert verdict.sentence.startswith("rank 2") and said in verdict.sentence
    assert "3 ranks have waited 12.3 s" in verdict.sentence
    assert (verdict.kind, verdict.culprits) == ("dead", [("u-tp", 2)])


def test_a_rank_killed_inside_a_call() -> None:
    records = [waiting(0, 4), waiting(1, 4), waiting(3, 4), waiting(2, 4, 40, state=DEAD, heartbeat=NOW - 3.1)]
    sentence = judge(records).sentence
    assert "was killed or crashed (no last word) within the last 3.1 s inside all_reduce #40 of comm 'tp'" in sentence


def test_the_first_to_end_is_to_blame_and_errors_about_others_are_not() -> None:
    records = [
        behind(0, 4, state=DEAD, end="NcclRemoteError: lost rank 3", end_at=NOW - 9),
        behind(1, 4, state=DEAD, end="RuntimeError: later", end_at=NOW - 3),
        behind(2, 4, state=DEAD, end="ValueError: first", end_at=NOW - 5),
        waiting(3, 4),
    ]
    verdict = judge(records)
    assert verdict.culprits == [("u-tp", 2)]
    assert "also: rank 1 left by RuntimeError 3.0 s ago: later" in verdict.details


@pytest.mark.parametrize("state", [DEAD, STOPPED])
def test_whoever_waits_for_the_dead_or_stopped_elsewhere_is_not_to_blame(state: str) -> None:
    third = process(3, comm(3, 4, [call(40)]), dp(0, call(7, state=INSIDE)))
    verdict = judge([*three_wait(), third, process(9, dp(1, call(6)), state=state)])
    assert (verdict.kind, verdict.culprits, verdict.comms) == (state, [("u-dp", 1)], ["u-dp", "u-tp"])


def test_clocks_of_two_machines_are_not_compared() -> None:
    early = behind(0, 3, 30, state=DEAD, end="ValueError: a", end_at=NOW - 3)
    fast = behind(1, 3, 40, state=DEAD, end="ValueError: b", end_at=NOW - 4000, machine="n")
    verdict = judge([early, fast, waiting(2, 3)])
    assert verdict.culprits == [("u-tp", 0)]
    assert "rank 1 left by ValueError" in "".join(verdict.details)


def test_a_dead_rank_comes_before_those_that_are_late() -> None:
    dead = behind(2, 4, state=DEAD, end="ValueError: x", end_at=NOW - 1)
    verdict = judge([waiting(0, 4), waiting(1, 4), dead, behind(3, 4)])
    assert [one.kind for one in verdict.findings] == ["dead", "missing"]


def test_calls_that_differ_come_before_the_errors_that_they_cause() -> None:
    odd = process(1, comm(1, 2, [call(40), call(41, state=FAILED, count=3)]), state=DEAD)
    odd.end, odd.end_at = "NcclInvalidUsage: the ranks disagree", NOW - 1
    assert judge([waiting(0, 2), odd]).kind == "mismatch"


def test_a_communicator_that_has_ended_on_one_rank() -> None:
    ended = comm(3, 4, [call(40)], ended="destroyed", ended_site="/home/me/t.py:9", ended_at=NOW - 4.2)
    verdict = judge([*three_wait(), process(3, ended)])
    assert verdict.sentence == (
        "rank 3's comm 'tp' was destroyed at t.py:9 4.2 s ago; "
        f"3 ranks have waited 12.3 s in {WHERE}, which it never entered."
    )
    assert (verdict.kind, verdict.lines) == ("left", ["/home/me/t.py:9"])


def test_a_stopped_process_and_how_to_continue_it() -> None:
    for state in (behind(3, 4, state=STOPPED), waiting(3, 4, state=STOPPED)):
        verdict = judge([*three_wait(), state])
        assert verdict.sentence.startswith("rank 3's process 1003 is stopped (SIGSTOP, or a debugger): kill -CONT 1003")
        assert (verdict.kind, verdict.culprits) == ("stopped", [("u-tp", 3)])


def test_a_rank_on_another_machine_that_does_not_answer() -> None:
    verdict = judge([*three_wait(), behind(3, 4, state=UNKNOWN, host="node7", machine="n7")])
    assert verdict.details[0].startswith("rank 3: process 1003 on host node7 cannot be asked")
    assert (verdict.kind, verdict.culprits) == ("missing", [("u-tp", 3)])


def in_init(rank: int, uid: str = "u-w", **more: Any) -> ProcessRecord:
    init = call(1, "init", INSIDE, site="/m/train.py:3")
    return process(rank, comm(rank, 4, [init], uid=uid, name="world"), **more)


def test_who_has_not_come_to_init() -> None:
    verdict = judge([in_init(0), in_init(1), in_init(2), process(3, where="/m/data.py:3 load")])
    assert (
        verdict.sentence
        == "rank 3 never entered init (comm 'world', 4 ranks, train.py:3); 3 ranks have waited 12.3 s there."
    )
    assert verdict.details == [
        "rank 3: process alive, has not come to the communicator's init; its main thread is in data.py:3 load"
    ]
    unknown = judge([in_init(0), in_init(2)])
    assert unknown.sentence.startswith("nothing is known of ranks 1 and 3")


def test_a_rank_that_died_before_init() -> None:
    verdict = judge(
        [in_init(0), in_init(1), in_init(2), process(3, state=DEAD, end="ImportError: torch", end_at=NOW - 1)]
    )
    assert verdict.sentence.startswith(
        "rank 3 left by ImportError 1.0 s ago: torch; 3 ranks have waited 12.3 s for it in init"
    )


def test_ranks_with_other_unique_ids() -> None:
    verdict = judge([in_init(0), in_init(1), in_init(2), in_init(3, "u-x")])
    assert "ranks 0-2 in init of comm 'world' at train.py:3, rank 3 in init of comm 'world'" in verdict.sentence
    assert verdict.comms == ["u-w", "u-x"]


def test_a_call_that_is_being_compared_counts_as_the_call() -> None:
    def check(rank: int, text: str = "all_reduce(count=4, FLOAT32, SUM)") -> ProcessRecord:
        return process(rank, comm(rank, 3, [call(40), call(41, "check", INSIDE, detail=text, site="/m/t.py:3")]))

    verdict = judge([check(0), check(1), behind(2, 3)])
    assert verdict.sentence.startswith("rank 2 never entered all_reduce #41 (comm 'tp', 3 ranks, t.py:3)")


def test_a_call_that_failed_keeps_the_others_waiting() -> None:
    failed = call(41, state=FAILED, error="NcclSystemError: the link broke", returned=NOW - 2, site="/m/t.py:3")
    verdict = judge([process(0, comm(0, 3, [call(40), failed])), waiting(1, 3), waiting(2, 3)])
    assert (verdict.kind, verdict.culprits, verdict.lines) == ("failed", [("u-tp", 0)], ["/m/t.py:3"])
    assert "raised NcclSystemError: the link broke 2.0 s ago; 2 ranks have waited 12.3 s there" in verdict.sentence


@pytest.mark.parametrize("gone", [False, True], ids=["alive", "ended"])
def test_ranks_that_gave_up_waiting_are_not_to_blame(gone: bool) -> None:
    error = "NcclTimeout: no answer"
    ends = {"state": DEAD, "end": error, "end_at": NOW - 2} if gone else {}
    failed = call(41, state=FAILED, error=error, returned=NOW - 2.3)
    verdict = judge([*(process(r, comm(r, 3, [call(40), failed]), **ends) for r in (0, 1)), behind(2, 3)])
    assert verdict.sentence.startswith("rank 2 never entered all_reduce #41")
    assert "2 ranks gave up after 10.0 s" in verdict.sentence
    assert (verdict.kind, verdict.culprits) == ("missing", [("u-tp", 2)])


def test_a_job_killed_in_a_hang_names_who_was_missing() -> None:
    killed = {"state": DEAD, "end": "killed or crashed", "heartbeat": NOW - 1}
    verdict = judge([*(waiting(rank, 4, **killed) for rank in range(3)), behind(3, 4, **killed)])
    assert (verdict.kind, verdict.culprits) == ("missing", [("u-tp", 3)])
    assert "3 ranks have waited 11.3 s" in verdict.sentence
    assert "process 1001 was killed or crashed (no last word) within the last 1.0 s inside all_reduce" in render(
        verdict
    )


def test_a_job_that_ended_by_an_error_names_the_error() -> None:
    killed = {"state": DEAD, "end": "SIGTERM", "end_at": NOW - 1}
    error = behind(3, 4, state=DEAD, end="ValueError: x", end_at=NOW - 2, end_site="/m/t.py:3")
    verdict = judge([*(waiting(rank, 4, **killed) for rank in range(3)), error])
    assert verdict.sentence.startswith("all 4 processes have ended: rank 3 left by ValueError at t.py:3 2.0 s ago: x")
    assert verdict.lines == ["/m/t.py:3"]


def test_nothing_is_wrong() -> None:
    assert judge([behind(rank, 4) for rank in range(4)]).kind == "running"
    finished = judge([behind(rank, 4, state=DEAD, end="exit", end_at=NOW - 1) for rank in range(4)])
    assert (finished.kind, finished.sentence) == ("finished", "all 4 ranks have finished.")
    assert judge([]).kind == "empty"
    assert about(finished, "u-tp", 0) == ""


def test_all_are_there_and_nothing_moves() -> None:
    verdict = judge([waiting(rank, 4) for rank in range(4)])
    assert verdict.kind == "stalled" and verdict.sentence.startswith(
        f"ranks 0-3 in {WHERE}, not done after 12.3 s, and nobody is missing"
    )
    assert judge([waiting(rank, 4) for rank in range(4)], patience=60).kind == "running"


def test_a_call_of_autograd_is_named_by_its_function_and_forward_line() -> None:
    records = [*three_wait(), behind(3, 4)]
    for one in records[:3]:
        one.comms[0].calls[-1].function = "AllReduce.backward"
        one.comms[0].calls[-1].forward_site = "/home/me/model.py:70"
    assert "all_reduce #41 (AllReduce.backward of the forward call at model.py:70, comm 'tp'" in judge(records).sentence


def test_the_newest_of_two_runs_counts() -> None:
    old = waiting(3, 4, state=DEAD, end="killed or crashed", started=NOW - 5000, pid=9)
    verdict = judge([old, *three_wait(), behind(3, 4)])
    assert (verdict.kind, verdict.culprits) == ("missing", [("u-tp", 3)])


def test_a_rank_missing_in_two_communicators_is_one_finding() -> None:
    records = [
        waiting(0, 2),
        process(1, comm(1, 2, [call(40)]), dp(1, call(6))),
        process(2, dp(0, call(7, state=INSIDE))),
    ]
    verdict = judge(records)
    assert len(verdict.findings) == 1 and set(verdict.comms) == {"u-tp", "u-dp"}
    assert "nor entered: all_reduce #" in "\n".join(verdict.details)


def test_ranks_of_one_process_are_told_to_call_as_a_group() -> None:
    one = process(-1, comm(0, 2, [call(41, state=INSIDE)]), comm(1, 2, [call(40)]))
    verdict = judge([one])
    assert verdict.culprits == [("u-tp", 1)]
    assert "pynccl.group()" in render(verdict)


def test_who_has_not_come_to_finalize() -> None:
    inside = [process(rank, comm(rank, 3, [call(40), call(41, "finalize", INSIDE)])) for rank in range(2)]
    verdict = judge([*inside, behind(2, 3)])
    assert verdict.sentence == "rank 2 never entered finalize (comm 'tp', 3 ranks); 2 ranks have waited 12.3 s there."
    gone = behind(2, 3, state=DEAD, end="exit")
    assert judge([*inside, gone]).kind == "dead"


def test_a_collective_and_a_recv_in_two_orders() -> None:
    first = process(0, comm(0, 2, [call(5, "barrier", INSIDE)]))
    second = process(1, comm(1, 2, [call(4, "barrier"), call(0, "recv", INSIDE, peer=0)]))
    verdict = judge([first, second])
    assert verdict.kind == "crossed"
    said = "ranks wait for each other: rank 0 in barrier #5 of comm 'tp', rank 1 in recv from rank 0 of comm 'tp'."
    assert (verdict.sentence, verdict.details[0]) == (said, "rank 0: never called send to rank 1")


def test_the_text_for_an_exception_is_short_and_does_not_repeat_it() -> None:
    failed = call(41, state=FAILED, error="NcclTimeout: x", returned=NOW - 2)
    verdict = judge([process(0, comm(0, 2, [call(40), failed])), behind(1, 2)])
    assert about(verdict, "u-tp", 0).startswith("rank 1 never entered")
    own = call(41, state=FAILED, error="NcclInternalError: x", returned=NOW - 2)
    alone = judge([process(0, comm(0, 2, [own])), process(1, comm(1, 2, [call(41)]))])
    assert (alone.kind, about(alone, "u-tp", 0)) == ("failed", "")


def test_whose_own_error_is_the_cause_hears_of_the_others_errors_and_no_guesses() -> None:
    wrong = "NcclInvalidUsage: send and recv disagree"
    send = call(0, "send", FAILED, error=wrong, peer=1, returned=NOW - 1)
    recv = call(0, "recv", FAILED, error=wrong, peer=0, returned=NOW - 0.9, site="/m/a.py:54")
    gave_up = call(7, "barrier", FAILED, error="NcclRemoteError: lost rank 1", returned=NOW - 0.5)
    first = process(0, comm(0, 2, [send]))
    second = process(1, comm(1, 2, [recv]), dp(1, call(6)))
    third = process(2, dp(0, call(6), gave_up))
    verdict = judge([first, second, third])
    assert about(verdict, "u-tp", 0) == f"rank 1: recv from rank 0 at a.py:54 raised {wrong}"
    assert about(verdict, "u-tp", 1).startswith("rank 0's send to rank 1 (comm 'tp'")


def test_an_error_because_of_others_is_no_cause_and_those_of_others_like_it_say_nothing() -> None:
    lost = "NcclRemoteError: lost rank 1"
    calls = [call(0, kind, FAILED, error=lost, peer=1, returned=NOW - 1) for kind in ("send", "recv")]
    records = [process(rank, comm(rank, 3, [one])) for rank, one in zip((0, 2), calls, strict=True)]
    verdict = judge(records, uid="u-tp")
    assert "rank 1" in about(verdict, "u-tp", 0).partition(";")[0]
    assert "rank 1" in about(verdict, "u-tp", 2).partition(";")[0]


def test_it_can_be_written_as_json() -> None:
    values = json.loads(json.dumps(judge([*three_wait(), behind(3, 4)]).to_json()))
    assert (values["kind"], values["culprits"]) == ("missing", [["u-tp", 3]])
    assert values["findings"][0]["sentence"] == values["sentence"]


def test_a_rank_that_stays_in_what_the_others_have_completed() -> None:
    verdict = judge([waiting(0, 3), *(process(rank, comm(rank, 3, [call(41)])) for rank in (1, 2))])
    there = f"all_reduce #41 (comm 'tp', 3 ranks, {WHERE.partition('4 ranks, ')[2]}"
    assert verdict.sentence.startswith(
        f"rank 0 in {there}, not done after 12.3 s, which ranks 1 and 2 completed: the network between them"
    )
    assert verdict.culprits == [("u-tp", 0)]


LOST = "NcclRemoteError: no answer within the time-out"


@pytest.mark.parametrize("end", [{}, {"state": DEAD, "end": LOST, "end_site": "/m/a.py:30"}])
def test_who_gave_up_in_what_the_others_have_completed_is_not_merely_missing(end: dict[str, str]) -> None:
    gave_up = call(41, state=FAILED, error=LOST, age=5.5, returned=NOW - 0.5, site="/m/a.py:30")
    verdict = judge([waiting(0, 2, 42), process(1, comm(1, 2, [call(40), gave_up]), **end)], uid="u-tp")
    assert verdict.kind == "stalled"
    assert verdict.sentence.startswith("rank 1 in all_reduce #41")
    assert ", gave up after 5.0 s, which rank 0 completed: the network between them" in verdict.sentence
    assert about(verdict, "u-tp", 1) == about(verdict, "u-tp", 0) == render(verdict).partition("\nalso")[0]


def test_a_send_that_the_other_side_has_received_keeps_its_rank_from_the_next_call() -> None:
    send = call(0, "send", INSIDE, peer=0, entry=3, age=4, site="/m/a.py:47")
    recv = call(0, "recv", peer=1, entry=3, age=4, completed=NOW - 3)
    before = [call(1, entry=1), call(2, entry=2)]
    first = process(0, comm(0, 2, [*before, recv, call(3, state=INSIDE, entry=4, age=3)]))
    verdict = judge([first, process(1, comm(1, 2, [*before, send]))], uid="u-tp")
    assert verdict.sentence.startswith("rank 1 in send to rank 0")
    assert ", not done after 4.0 s, which rank 0 completed: " in verdict.sentence


def test_a_message_between_two_machines_is_named_before_one_within_a_machine() -> None:
    records = []
    for rank in range(3):
        kinds = (("send", (rank + 1) % 3), ("recv", (rank + 2) % 3))
        calls = [call(0, kind, INSIDE, 3.0, peer=peer, group=1) for kind, peer in kinds]
        records.append(process(rank, comm(rank, 3, calls), machine="m" if rank < 2 else "n"))
    verdict = judge(records, uid="u-tp")
    assert verdict.kind == "stalled"
    assert re.match("ranks (0|1) and 2 in (send to|recv from) rank [012] .* and nobody is miss", verdict.sentence)


def test_all_that_gave_up_though_nobody_was_missing() -> None:
    gave_up = call(41, state=FAILED, error=LOST, age=5.5, returned=NOW - 0.5)
    verdict = judge([process(rank, comm(rank, 2, [call(40), gave_up])) for rank in range(2)], uid="u-tp")
    assert verdict.sentence.startswith("ranks 0 and 1 in all_reduce #41 (comm 'tp', 2 ranks")
    assert "gave up after 5.0 s, and nobody is missing: the network between them" in verdict.sentence


def test_what_a_rank_gave_up_in_before_its_newest_call_explains_nothing_any_more() -> None:
    old = call(9, state=FAILED, error=LOST, age=400, returned=NOW - 390)
    verdict = judge([*three_wait(), process(3, dp(0, old), comm(3, 4, [call(40, age=20)])), process(9, dp(1, call(8)))])
    assert (verdict.kind, verdict.culprits) == ("missing", [("u-tp", 3)])


def test_calls_that_were_on_streams_of_an_ended_communicator_wait_for_nothing() -> None:
    left = dp(0, call(0, "recv", ISSUED, peer=1), ended="aborted", ended_at=NOW - 100)
    other = dp(1, call(6), ended="aborted", ended_at=NOW - 100)
    assert judge([process(0, left, comm(0, 2, [call(1)])), process(1, other, comm(1, 2, [call(1)]))]).kind == "running"
