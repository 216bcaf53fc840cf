"""Verdicts on inits, posted calls, shrinks, and errors that the program caught."""

from __future__ import annotations

from dataclasses import replace

import pytest
from watched import NOW, Case, behind, call, comm, dp, ended, failed, process, waiting

from pynccl.bindings.errors import NcclInvalidArgument, NcclRemoteError, NcclTimeout
from pynccl.watch.layout import CommEnd, ProcessEnd
from pynccl.watch.records import COMPLETED, INSIDE, ISSUED, CallRecord, CommRecord, ProcessRecord
from pynccl.watch.verdict import judge, render


def init(rank: int, ranks: list[int], name: str = "pair") -> CommRecord:
    site = call(1, "init", INSIDE, site="/m/train.py:3")
    return comm(rank, len(ranks), [site], uid="u-p", name=name, ranks=ranks)


def elsewhere(rank: int) -> ProcessRecord:
    return process(rank, comm(rank, 6, [call(4)], uid="u-w", name="world"), where="/m/data.py:9, in queue.get")


def message(rank: int, operation: str, **more: object) -> CommRecord:
    values = {"peer": 1 - rank, "site": "/m/train.py:5", "posted": True, "entry": 2}
    return comm(rank, 2, [call(1, age=60), call(0, operation, ISSUED, **values)], **more)


def shrinking(rank: int) -> ProcessRecord:
    record = comm(rank, 4, [call(1, age=60), call(0, "shrink", INSIDE, entry=2, site="/m/train.py:5")], excluded=[0])
    return process(rank, record)


def shrunk(rank: int, *calls: CallRecord) -> ProcessRecord:
    old = comm(rank, 3, [failed(LOST, 90, 2), call(0, "shrink", age=85, entry=3)], excluded=[1], ended=CommEnd.ABORTED)
    new = comm(rank // 2, 2, [call(1), *calls], uid="u-new", name="new", ranks=[0, 2], made=NOW - 84)
    return process(rank, old, new)


def killed_later(*calls: CallRecord, **more: object) -> list[ProcessRecord]:
    """Rank 0 has made these calls on 'tp', where rank 1 was killed, and waits for rank 2 in 'dp' now."""
    in_dp = dp(0, call(6, age=30), call(7, state=INSIDE))
    first = process(0, comm(0, 3, [call(2, age=90), *calls], **more), in_dp)
    second = process(1, comm(1, 3, [call(2, age=90)]), **ended(ProcessEnd.KILLED), heartbeat=NOW - 9)
    return [first, second, process(2, comm(2, 3, ended=CommEnd.ABORTED), dp(1, call(6, age=30)))]


def next_generation(rank: int, *calls: CallRecord, by: ProcessEnd = ProcessEnd.RUNNING) -> ProcessRecord:
    """A rank that was killed, or that revoked 'tp' 85 s ago and has made 'new' with another one since."""
    if by != ProcessEnd.RUNNING:
        return process(rank, comm(rank, 3, [call(40)]), **ended(by), heartbeat=NOW - 95)
    issued = call(41, state=ISSUED, age=90)
    old = comm(rank, 3, [call(40, age=99), issued], ended=CommEnd.REVOKED, ended_at=NOW - 85)
    return process(rank, old, comm(min(rank, 1), 2, [call(1, age=30), *calls], uid="u-new", name="new", made=NOW - 80))


LOST = NcclRemoteError("lost rank 1")
TIMED_OUT = NcclTimeout("rank 1 waited 3 s")
BAD = NcclInvalidArgument("no memory")
POSTED = [process(0, comm(0, 2, [call(1, age=60)]), where="/m/data.py:9 load"), process(1, message(1, "recv"))]
AWAITED = [POSTED[0], process(1, message(1, "recv", awaited_at=NOW - 3.5))]
CASES = {
    "a pair of ranks 3 and 5": Case(
        [elsewhere(0), elsewhere(1), process(3, init(1, [5, 3])), elsewhere(5)],
        "missing p0: rank 5 never entered init (comm 'pair', 2 ranks, train.py:3); rank 3 has waited 12.3 s there.\n"
        "rank 5: process alive, has not entered the communicator's init; its main thread is in data.py:9, in queue.get",
        lines=["/m/data.py:9"],
    ),
    "a group whose first rank is rank 0 is not that of all ranks": Case(
        [process(0, comm(0, 2, [call(1, "init", INSIDE)], uid="u-p", name="pair")), elsewhere(1), elsewhere(3)],
        "missing p1: no record of rank 1 of comm 'pair'",
    ),
    "posted": Case(POSTED, "running: no rank is stuck"),
    "posted, then waited for": Case(
        AWAITED,
        "unmatched tp0: rank 0 never called send to rank 1; rank 1 has waited 3.5 s in recv from rank 0 (comm 'tp', "
        "2 ranks, BFLOAT16 x 33,554,432, train.py:5).",
    ),
    "a posted call is not the wait in another one": Case(
        [
            process(0, *POSTED[0].comms, dp(0, call(6)), where="/m/data.py:9 load"),
            process(1, message(1, "recv"), dp(1, call(7, state=INSIDE, age=4))),
        ],
        "missing dp0: rank 0 never entered all_reduce #7",
    ),
    "the ranks that a shrink excludes": Case(
        [behind(0, 4), shrinking(1), shrinking(2), process(3, comm(3, 4, [call(1, age=60)]))],
        "missing tp3: rank 3 never entered shrink (comm 'tp', 4 ranks, train.py:5); 2 ranks have waited",
    ),
    "a signal of one of several ranks": Case(
        [process(0, comm(0, 3, [call(0, "wait_signal", INSIDE, entry=1)])), behind(1, 3, 0), behind(2, 3, 0)],
        "stalled tp0: rank 0 in wait_signal (comm 'tp', 3 ranks), not done after 12.3 s, which waits for several "
        "ranks: one of them has not called signal or put_signal.",
    ),
    "a call that the last rank has just entered": Case(
        [process(rank, comm(rank, 2, [call(1, state=INSIDE, age=age)])) for rank, age in ((0, 60), (1, 0.5))],
        "running: no rank is stuck",
        uid="u-tp",
    ),
    "the root of a call in a group of ranks 3 and 5": Case(
        [
            process(3, comm(0, 2, [call(1, "broadcast", INSIDE, root=1)], ranks=[3, 5])),
            process(5, comm(1, 2, ranks=[3, 5])),
        ],
        "missing tp1: rank 5 never entered broadcast #1 (comm 'tp', 2 ranks, BFLOAT16 x 33,554,432, root 5); "
        "rank 3 has waited",
    ),
    "a rank that was killed, and that a shrink has excluded": Case(
        [shrunk(0, call(2, state=INSIDE)), process(1, comm(1, 3), **ended(ProcessEnd.KILLED)), shrunk(2)],
        "missing new1: rank 2 never entered all_reduce #2 (comm 'new', 2 ranks",
    ),
    "a rank that was killed after another had caught a time-out there": Case(
        killed_later(failed(TIMED_OUT, 60, 3)), "dead tp1: rank 1's process 1001 was killed"
    ),
    "a rank that was killed while another, which had excluded a third one, waits there": Case(
        killed_later(call(0, "shrink", age=60, entry=3), call(3, state=INSIDE), excluded=[2]),
        "dead tp1: rank 1's process 1001 was killed",
    ),
    "a rank that was killed just before others gave up, long after a shrink of all of them": Case(
        [
            process(
                0,
                comm(0, 3, [call(0, "shrink", age=60, entry=1)], excluded=[2], ended=CommEnd.AT_EXIT),
                comm(0, 2, [failed(LOST, 2)], uid="u-s", name="s", ended=CommEnd.AT_EXIT),
                dp(0, call(6, age=30)),
                **ended(LOST),
            ),
            process(
                1,
                comm(1, 3, [call(0, "shrink", age=60, entry=1)], excluded=[2]),
                comm(1, 2, [call(41, state=INSIDE)], uid="u-s", name="s"),
                **ended(ProcessEnd.KILLED),
                heartbeat=NOW - 3,
            ),
        ],
        "dead tp1: all 2 processes have ended: rank 1's process 1001 was killed",
    ),
    "an exception long after such a shrink": Case(
        [
            replace(shrunk(0, failed(LOST, 2, 2)), **ended(LOST), end_at=NOW - 2),
            process(1, comm(1, 3), **ended(ProcessEnd.KILLED), heartbeat=NOW - 95),
            replace(shrunk(2), **ended(KeyError("x")), end_at=NOW - 3),
        ],
        "dead new1: all 3 processes have ended: rank 2 exited with KeyError 3.0 s ago",
    ),
    "killed while they waited for a rank that had exited": Case(
        [
            process(0, comm(0, 2, [call(40), call(41, state=INSIDE)]), **ended(ProcessEnd.KILLED)),
            process(1, comm(1, 2, [call(40, age=25)]), **ended(ProcessEnd.CLEAN), end_at=NOW - 22),
        ],
        "dead tp1: all 2 processes have ended: rank 1 exited by itself 22.0 s ago (the end of its program, or "
        "sys.exit); rank 0 has waited 11.8 s for it in all_reduce #41",
    ),
    "a rank that was killed, and the others are in the next generation": Case(
        [next_generation(0, call(2, state=INSIDE)), next_generation(1), next_generation(2, by=ProcessEnd.KILLED)],
        "missing new1: rank 1 never entered all_reduce #2 (comm 'new', 2 ranks",
    ),
    "a rank without which the others are in the next generation": Case(
        [next_generation(0, call(2, state=INSIDE)), behind(1, 3), next_generation(2)],
        "missing new1: rank 2 never entered all_reduce #2 (comm 'new'",
    ),
    "a rank that was killed, and one of the others is not in the next generation": Case(
        [next_generation(0), waiting(1, 3), next_generation(2, by=ProcessEnd.KILLED)],
        "dead tp2: rank 2's process 1002 was killed",
    ),
    "a rank that has caught a time-out and is in the next call of the communicator": Case(
        [
            process(
                0,
                comm(0, 3, [call(40, age=20), call(0, "send", ISSUED, peer=1, entry=2, age=8, stream=1)]),
                dp(0, call(7, state=ISSUED, age=9, stream=1)),
            ),
            process(
                1,
                comm(1, 3, [failed(TIMED_OUT, 5, 0, "recv", peer=0), call(0, "recv", INSIDE, peer=2, entry=2, age=4)]),
                dp(1, call(6, age=20)),
            ),
            behind(2, 3),
        ],
        "unmatched tp2: rank 2 never called send to rank 1",
    ),
    "a time-out that ended a rank, which called another communicator on the way": Case(
        [
            process(
                0,
                comm(0, 2, [call(40, age=30), failed(TIMED_OUT, 9, age=20)]),
                dp(0, failed(TIMED_OUT, 2, 7, age=8)),
                **ended(TIMED_OUT),
            ),
            behind(1, 2),
            process(2, dp(1, call(6, age=30))),
        ],
        "missing tp1: rank 1 never entered all_reduce #41",
    ),
    "an error that only one rank has had and caught": Case(
        [
            process(0, comm(0, 2, [call(2), failed(BAD, 15, 3), call(4, state=INSIDE)], completed=2)),
            process(1, comm(1, 2, [call(2), call(3, state=INSIDE)])),
        ],
        "failed tp0: rank 0's all_reduce #3 (comm 'tp', 2 ranks, BFLOAT16 x 33,554,432) raised NcclInvalidArgument: "
        "no memory 15.0 s ago; rank 1 has waited 12.3 s there.",
    ),
    "grow": Case(
        [process(rank, comm(rank, 2, [call(0, "grow", INSIDE, entry=1)])) for rank in range(2)],
        "stalled: ranks 0 and 1 in grow (comm 'tp', 2 ranks), not done after 12.3 s, and no rank is missing: the new "
        "ranks have not all called join_grown, or cannot be reached.",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_verdict(name: str) -> None:
    CASES[name].check()


def caught(age: float, uid: str = "", posted: bool = False, awaited_at: float = 0.0) -> str:
    """Return the verdict if rank 1 gave up in a recv of 'dp' 5 s ago, and waits in an all_reduce since `age`. Rank 0 is
    elsewhere."""
    recv = failed(TIMED_OUT, 5, 0, "recv", peer=0, entry=2, posted=posted)
    in_call = comm(1, 2, [call(40, age=20), call(41, state=INSIDE, age=age)])
    first = process(0, *behind(0, 2).comms, dp(0, call(1, age=60)))
    return render(judge([first, process(1, in_call, dp(1, call(1, age=60), recv, awaited_at=awaited_at))], uid=uid))


def test_an_error_that_the_program_caught_is_not_quoted_in_later_ones() -> None:
    text = caught(4)
    assert text.startswith("rank 0 never entered all_reduce #41") and "gave up" not in text, text
    assert "gave up" in caught(4, uid="u-dp")  # in the error of that recv itself
    assert "gave up" in caught(9)  # the all_reduce began before, in another thread
    assert "gave up" not in caught(9, posted=True)  # the program did not wait for the recv
    assert "gave up" in caught(9, posted=True, awaited_at=NOW - 8)


def test_a_damaged_record_of_a_signal_without_peer() -> None:
    calls = [call(0, "signal", INSIDE, entry=1, age=60)]
    assert "rank 0 in signal" in render(judge([process(0, comm(0, 2, calls)), process(1, comm(1, 2))]))


def test_a_completed_posted_call_is_no_wait() -> None:
    record = message(1, "recv", awaited_at=NOW - 3)
    record.calls[-1].state = COMPLETED
    assert judge([POSTED[0], process(1, record)]).kind == "running"
