"""Verdicts on mismatched calls, calls in different orders, and unmatched messages."""

from __future__ import annotations

from typing import Any

import pytest
from watched import Case, call, comm, dp, failed, in_init, process, waiting

from pynccl.bindings.errors import NcclInvalidUsage, NcclRemoteError
from pynccl.watch.layout import CommEnd
from pynccl.watch.records import COMPLETED, FAILED, INSIDE, ISSUED, CallRecord, ProcessRecord
from pynccl.watch.verdict import judge

USUAL = "all_reduce(count=33,554,432, BFLOAT16, SUM)"
LOST = NcclRemoteError("no answer within the time-out")
EACH_OTHER = "ranks wait for each other: "


def issued(rank: int, tp_age: float, dp_age: float, **more: Any) -> ProcessRecord:
    tp_call = call(5, state=ISSUED, age=tp_age, site=f"/m/{rank}.py:5", **more)
    dp_call = call(7, state=ISSUED, age=dp_age, site=f"/m/{rank}.py:7", **more)
    return process(rank, comm(rank, 2, [tp_call]), dp(rank, dp_call))


def mismatched(last_call: CallRecord, size: int = 4) -> list[ProcessRecord]:
    """All ranks except the last are in all_reduce #41. The last made `last_call`."""
    return [
        *(waiting(rank, size) for rank in range(size - 1)),
        process(size - 1, comm(size - 1, size, [call(40), last_call])),
    ]


def message(operation: str, peer: int, state: str = INSIDE, **more: Any) -> CallRecord:
    return call(0, operation, state, peer=peer, **more)


def pair(*calls: CallRecord) -> list[ProcessRecord]:
    """Rank 1 waits for a message of rank 2, which has made `calls`."""
    recv = message("recv", 2, site="/m/pp.py:3", count=4)
    return [process(1, comm(1, 3, [recv])), process(2, comm(2, 3, calls), where="/m/x.py:4 f")]


def handled(then: CallRecord | None, error: BaseException | None = None, **ended: Any) -> list[ProcessRecord]:
    """Two ranks whose calls on 'tp' disagreed 9 s ago. Now rank 0 waits in 'dp', and rank 1 has called `then`."""
    error = error or NcclInvalidUsage()
    calls = [failed(error, 9, 5, count=count, site="/m/old.py:1") for count in (4, 5)]
    inside = call(7, state=INSIDE, age=3, site="/m/new.py:2")
    return [
        process(0, comm(0, 2, [calls[0]], **ended), dp(0, call(6, age=5), inside)),
        process(1, comm(1, 2, [calls[1]], **ended), dp(1, *([then] if then else [])), where="/m/data.py:3 load"),
    ]


CHANGES: list[tuple[dict[str, Any], str, str]] = [
    ({"operation": "all_gather"}, INSIDE, "all_gather(count=33,554,432, BFLOAT16)"),
    ({"count": 7}, ISSUED, "all_reduce(count=7, BFLOAT16, SUM)"),
    ({"dtype": "FLOAT32"}, COMPLETED, "all_reduce(count=33,554,432, FLOAT32, SUM)"),
    ({"op": "MAX"}, FAILED, "all_reduce(count=33,554,432, BFLOAT16, MAX)"),
    ({"root": 1}, COMPLETED, "all_reduce(count=33,554,432, BFLOAT16, SUM, root=1)"),
]
CALLS = {
    "a mismatch on a communicator that all have ended": Case(
        handled(None, ended=CommEnd.DESTROYED), "missing dp1: rank 1 never entered all_reduce #7 (comm 'dp'"
    ),
    "a mismatch that the program has handled": Case(
        handled(call(6, age=5)), "missing dp1: rank 1 never entered all_reduce #7 (comm 'dp'", uid="u-dp"
    ),
    "the same, if the ranks blamed each other": Case(
        handled(None, LOST, ended=CommEnd.DESTROYED), "missing dp1: rank 1 never entered all_reduce #7 (comm 'dp'"
    ),
    "a mismatch after which one rank has called nothing": Case(
        handled(None), "mismatch tp0 tp1: the ranks disagree about call #5 (comm 'tp', 2 ranks)", uid="u-dp"
    ),
    "the same, from the command line": Case(
        handled(call(6, age=5)), "missing dp1: rank 1 never entered all_reduce #7 (comm 'dp'"
    ),
    "a mismatch after which one rank has called nothing, from the command line": Case(
        handled(None), "mismatch tp0 tp1: the ranks disagree"
    ),
    "a missing rank in the comparison of PYNCCL_CHECK=1": Case(
        [
            process(
                0,
                comm(
                    0,
                    2,
                    [
                        call(4, age=20),
                        failed(NcclRemoteError(), 1, 1, "check", detail="all_reduce(count=4)"),
                    ],
                ),
            ),
            process(1, comm(1, 2, [call(4, age=20)]), where="/m/data.py:3 load"),
        ],
        "missing tp1: rank 1 never entered all_reduce #5 (comm 'tp', 2 ranks); rank 0 gave up after 11.3 s.",
    ),
    "two communicators in two orders": Case(
        [
            process(0, comm(0, 2, [call(5, state=INSIDE, site="/m/a.py:1")]), dp(0, call(6))),
            process(1, comm(1, 2, [call(4)]), dp(1, call(7, state=INSIDE, site="/m/b.py:2"))),
        ],
        f"crossed dp1 tp0: {EACH_OTHER}rank 0 in all_reduce #5 of comm 'tp' at a.py:1, rank 1 in all_reduce #7 of "
        "comm 'dp' at b.py:2.",
        lines=["/m/b.py:2", "/m/a.py:1"],
    ),
    "on streams, ordered by time of issue": Case(
        [issued(0, 9, 8), issued(1, 7, 8)],
        f"crossed dp1 tp0: {EACH_OTHER}rank 0 in all_reduce #5 of comm 'tp' at 0.py:5 before all_reduce #7 of "
        "comm 'dp' at 0.py:7, "
        "rank 1 in all_reduce #7 of comm 'dp' at 1.py:7 before all_reduce #5 of comm 'tp' at 1.py:5.",
    ),
    "calls of one group are unordered": Case(
        [issued(0, 3, 2, group=4), issued(1, 1, 2, group=9)], "running: no rank is stuck: 2 running, 0 finished."
    ),
    "different unique ids": Case(
        [in_init(0), in_init(1), in_init(2), in_init(3, "u-x")],
        f"crossed w0 w1 w2 x3: {EACH_OTHER}ranks 0-2 in init of comm 'world' at train.py:3, rank 3 in init of ",
    ),
    "a collective and a recv": Case(
        [
            process(0, comm(0, 2, [call(5, "barrier", INSIDE)])),
            process(1, comm(1, 2, [call(4, "barrier"), message("recv", 0)])),
        ],
        f"crossed tp0 tp1: {EACH_OTHER}rank 0 in barrier #5 of comm 'tp', rank 1 in recv from rank 0 of comm 'tp'.\n"
        "rank 0: never called send to rank 1",
    ),
    **{
        words: Case(
            mismatched(call(41, **{"operation": "all_reduce", "state": state, "site": "/home/me/moe.py:95", **change})),
            f"mismatch tp3: rank 3 calls {words} at moe.py:95 as #41 (comm 'tp', 4 ranks), where the others call "
            f"{USUAL} at ",
            lines=["/home/me/moe.py:95"],
        )
        for change, state, words in CHANGES
    },
    "both of two ranks are named": Case(
        mismatched(call(41, state=INSIDE, count=5, site="/home/me/b.py:9"), size=2),
        "mismatch tp0 tp1: the ranks disagree about call #41 (comm 'tp', 2 ranks): "
        f"rank 1 calls all_reduce(count=5, BFLOAT16, SUM) at b.py:9, rank 0 calls {USUAL} at model.py:88",
        lines=["/home/me/model.py:88", "/home/me/b.py:9"],
    ),
    "a recv without its send": Case(
        pair(call(1, "barrier")),
        "unmatched tp2: rank 2 never called send to rank 1; rank 1 has waited 12.3 s in recv from rank 2",
        lines=["/m/x.py:4"],
    ),
    "messages of different sizes": Case(
        pair(message("send", 1, count=8, site="/m/pp.py:9")),
        "mismatch tp1 tp2: rank 2 sends BFLOAT16 x 8 at pp.py:9 to rank 1, which expects BFLOAT16 x 4 at pp.py:3 "
        "(comm 'tp').",
        lines=["/m/pp.py:9", "/m/pp.py:3"],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_verdict(name: str) -> None:
    CALLS[name].check()


def test_ranks_of_a_split_are_named_by_their_global_ranks() -> None:
    calls = [call(1, "reduce", INSIDE, op=op, count=4, dtype="FLOAT32") for op in ("MAX", "SUM", "SUM")]
    child = [comm(rank, 3, [record], uid="u-s", name="s") for rank, record in enumerate(calls)]
    verdict = judge([process(global_rank, record) for global_rank, record in zip((2, 0, 3), child, strict=True)])
    assert verdict.sentence.startswith("rank 2 calls reduce(count=4, FLOAT32, MAX) as #1")
    assert "ranks 0 and 3 call reduce(count=4, FLOAT32, SUM)" in verdict.details
