"""Ranks that make other calls than the others, or in another order, or messages that nobody takes: all are named."""

from __future__ import annotations

from typing import Any

import pytest
from watched import NOW, Case, call, comm, dp, process, ring, waiting

from pynccl.watch.records import COMPLETED, DEAD, FAILED, INSIDE, ISSUED, CallRecord, ProcessRecord

USUAL = "all_reduce(count=33,554,432, BFLOAT16, SUM)"


def in_init(rank: int, uid: str = "u-w") -> ProcessRecord:
    init = call(1, "init", INSIDE, site="/m/train.py:3")
    return process(rank, comm(rank, 4, [init], uid=uid, name="world"))


def issued(rank: int, tp_age: float, dp_age: float, **more: Any) -> ProcessRecord:
    tp_call = call(5, state=ISSUED, age=tp_age, site=f"/m/{rank}.py:5", **more)
    dp_call = call(7, state=ISSUED, age=dp_age, site=f"/m/{rank}.py:7", **more)
    return process(rank, comm(rank, 2, [tp_call]), dp(rank, dp_call))


def and_waits(operation: str) -> list[ProcessRecord]:
    second = comm(1, 2, [call(4, "barrier"), call(0, operation, INSIDE, peer=0)])
    return [process(0, comm(0, 2, [call(5, "barrier", INSIDE)])), process(1, second)]


EACH_OTHER = "ranks wait for each other: "
CROSSED = {
    "two communicators in two orders": Case(
        [
            process(0, comm(0, 2, [call(5, state=INSIDE, site="/m/a.py:1")]), dp(0, call(6))),
            process(1, comm(1, 2, [call(4)]), dp(1, call(7, state=INSIDE, site="/m/b.py:2"))),
        ],
        f"crossed dp1 tp0: {EACH_OTHER}rank 0 in all_reduce #5 of comm 'tp' at a.py:1, rank 1 in all_reduce #7 of "
        "comm 'dp' at b.py:2.",
        lines=["/m/b.py:2", "/m/a.py:1"],
    ),
    "on streams, by the times of issue": Case(
        [issued(0, 9, 8), issued(1, 7, 8)],
        f"crossed dp1 tp0: {EACH_OTHER}rank 0 in all_reduce #5 of comm 'tp' at 0.py:5 before all_reduce #7 of "
        "comm 'dp' at 0.py:7, "
        "rank 1 in all_reduce #7 of comm 'dp' at 1.py:7 before all_reduce #5 of comm 'tp' at 1.py:5.",
    ),
    "calls of one group have no order": Case(
        [issued(0, 3, 2, group=4), issued(1, 1, 2, group=9)], "running: no rank is stuck: 2 running, 0 finished."
    ),
    "a ring of many": Case(
        ring(64), f"crossed {' '.join(f'tp{n}' for n in range(64))}: {EACH_OTHER}", "and 61 more in this circle."
    ),
    "other unique ids": Case(
        [in_init(0), in_init(1), in_init(2), in_init(3, "u-x")],
        f"crossed w0 w1 w2 x3: {EACH_OTHER}ranks 0-2 in init of comm 'world' at train.py:3, rank 3 in init of "
        "comm 'world'",
    ),
    **{
        f"a collective and a {operation}": Case(
            and_waits(operation),
            f"crossed tp0 tp1: {EACH_OTHER}rank 0 in barrier #5 of comm 'tp', rank 1 in {operation} {way} rank 0 "
            "of comm 'tp'.\n"
            f"rank 0: never called {answer} rank 1",
        )
        for operation, way, answer in (
            ("recv", "from", "send to"),
            ("send", "to", "recv from"),
            ("wait_signal", "from", "signal to"),
        )
    },
}


def odd(*calls: tuple[int, CallRecord], size: int = 4) -> list[ProcessRecord]:
    """All are in all_reduce #41 but these."""
    given = dict(calls)
    usual = [waiting(rank, size) for rank in range(size) if rank not in given]
    return [*usual, *(process(rank, comm(rank, size, [call(40), one])) for rank, one in given.items())]


def coded(rank: int, *steps: tuple[int, str, int], state: str = INSIDE) -> ProcessRecord:
    """A rank that has made these calls: (number, operation, line), and is inside the last one."""
    calls = [call(number, operation, site=f"/m/model.py:{line}") for number, operation, line in steps]
    calls[-1].state = state
    return process(rank, comm(rank, 3, calls))


def both(*steps: tuple[int, str, int], state: str = INSIDE) -> list[ProcessRecord]:
    return [coded(rank, *steps, state=state) for rank in (0, 1)]


CHANGES = [
    ({"operation": "all_gather"}, INSIDE, "all_gather(count=33,554,432, BFLOAT16)"),
    ({"count": 7}, ISSUED, "all_reduce(count=7, BFLOAT16, SUM)"),
    ({"dtype": "FLOAT32"}, COMPLETED, "all_reduce(count=33,554,432, FLOAT32, SUM)"),
    ({"op": "MAX"}, FAILED, "all_reduce(count=33,554,432, BFLOAT16, MAX)"),
    ({"root": 1}, COMPLETED, "all_reduce(count=33,554,432, BFLOAT16, SUM, root=1)"),
]
REPEATED = [(number, "all_reduce", number) for number in range(30, 42)]
SHORTER = [(number, "all_reduce", number + (number >= 38)) for number in range(30, 41)]
MISMATCHES = {
    **{
        words: Case(
            odd((2, call(41, **{"operation": "all_reduce", "state": state, "site": "/home/me/moe.py:95", **change}))),
            f"mismatch tp2: rank 2 calls {words} at moe.py:95 as #41 (comm 'tp', 4 ranks), where the others call "
            f"{USUAL} at ",
            lines=["/home/me/moe.py:95"],
        )
        for change, state, words in CHANGES
    },
    "of two both are named": Case(
        odd((1, call(41, state=INSIDE, count=5, site="/home/me/b.py:9")), size=2),
        "mismatch tp0 tp1: the ranks disagree about call #41 (comm 'tp', 2 ranks): "
        f"rank 1 calls all_reduce(count=5, BFLOAT16, SUM) at b.py:9, rank 0 calls {USUAL} at model.py:88",
        lines=["/home/me/model.py:88", "/home/me/b.py:9"],
    ),
    "a call left out": Case(
        [
            *both((40, "broadcast", 80), (41, "all_reduce", 88), (42, "all_gather", 95)),
            coded(2, (40, "broadcast", 80), (41, "all_gather", 95), state=COMPLETED),
        ],
        "mismatch tp2: rank 2 calls all_gather(count=33,554,432, BFLOAT16) at model.py:95 as #41 (comm 'tp', 3 ranks), "
        f"where the others call {USUAL} at model.py:88",
    ),
    "a call left out among equal ones": Case(
        [*both(*REPEATED), coded(2, *SHORTER, state=COMPLETED)], "missing tp2: rank 2 never entered all_reduce #41"
    ),
    **{
        f"{operation} may differ": Case(
            [
                process(r, comm(r, 3, [call(41, operation, count=r + 1, detail=f"color={r}")]), state=DEAD, end="exit")
                for r in range(3)
            ],
            "finished: all 3 ranks have finished.",
        )
        for operation in ("all_gather_v", "all_to_all_v", "split", "group plan", "barrier")
    },
}


def message(operation: str, peer: int, state: str = INSIDE, **more: Any) -> CallRecord:
    return call(0, operation, state, peer=peer, **more)


def pair(*calls: CallRecord, **more: Any) -> list[ProcessRecord]:
    """Rank 1 waits for a message of rank 2, which has made `calls`."""
    recv = message("recv", 2, site="/m/pp.py:3", count=4)
    return [process(1, comm(1, 3, [recv])), process(2, comm(2, 3, calls), **{"where": "/m/x.py:4 f", **more})]


def exchanges(*firsts: int, group: int = 1, completed: float = 0.0) -> list[ProcessRecord]:
    """Rank 0 is in an exchange with ranks 1 and 2, rank 1 in another one with it; entries from these numbers on."""
    first, second = firsts
    two = [message("send", 1, entry=first, group=group), message("recv", 2, entry=first + 1, group=group)]
    other = [message("recv", 0, age=3, entry=second + 1, count=3, group=group and 2)]
    if completed:
        other.insert(0, message("recv", 0, COMPLETED, entry=second, completed=completed))
    return [process(0, comm(0, 3, two)), process(1, comm(1, 3, other)), process(2, comm(2, 3, []))]


def late_notice(first: int) -> list[ProcessRecord]:
    """Rank 0 has sent one message and ended; rank 1 waits for a second one. Of calls from entry `first` on."""
    early = message("send", 1, COMPLETED, entry=first, age=9, returned=NOW - 9, completed=NOW - 1, stream=5)
    asked = message("recv", 0, COMPLETED, entry=first, age=9, completed=NOW - 1)
    again = message("recv", 0, age=3, entry=first + 1)
    gone = process(0, comm(0, 2, [early]), state=DEAD, end="exit", end_at=NOW - 4)
    return [gone, process(1, comm(1, 2, [asked, again]))]


MESSAGES = {
    "a recv without its send": Case(
        pair(call(1, "barrier")),
        "unmatched tp2: rank 2 never called send to rank 1; rank 1 has waited 12.3 s in recv from rank 2",
        lines=["/m/x.py:4"],
    ),
    "a send without its recv": Case(
        [process(1, comm(1, 2)), process(0, comm(0, 2, [message("send", 1)]))],
        "unmatched tp1: rank 1 never called recv from rank 0",
    ),
    "of other sizes": Case(
        pair(message("send", 1, count=8, site="/m/pp.py:9")),
        "mismatch tp1 tp2: rank 2 sends BFLOAT16 x 8 at pp.py:9 to rank 1, which expects BFLOAT16 x 4 at pp.py:3 "
        "(comm 'tp').",
        lines=["/m/pp.py:9", "/m/pp.py:3"],
    ),
    "as many bytes of another type": Case(
        pair(message("send", 1, count=2, dtype="FLOAT32")), "running: no rank is stuck", patience=60
    ),
    "an earlier one whose end was noticed late": Case(late_notice(1), "dead tp0: rank 0 exited by itself"),
    "one that was received": Case(
        [
            process(0, comm(0, 2, [message("send", 1, ISSUED, age=2)])),
            process(1, comm(1, 2, [message("recv", 0, COMPLETED, completed=NOW - 1)])),
        ],
        "running: no rank is stuck",
    ),
    "one that has arrived is not the next one": Case(
        exchanges(1, 1, completed=NOW - 9), "unmatched tp2: rank 2 never called send to rank 0"
    ),
}

ALL = {
    f"{kind}: {name}": case
    for kind, cases in (("crossed", CROSSED), ("other calls", MISMATCHES), ("messages", MESSAGES))
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", ALL)
def test_what_is_said(name: str) -> None:
    ALL[name].check()
