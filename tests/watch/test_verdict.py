"""The verdict names the rank, the call and the line that keep a job from going on, in its first sentence."""

from __future__ import annotations

import json

import pytest
from watched import NOW, Case, behind, call, comm, dp, failed, process, three_wait, waiting

from pynccl.watch.records import DEAD, INSIDE, UNKNOWN, ProcessRecord
from pynccl.watch.verdict import about, judge, render

WHERE = "all_reduce #41 (comm 'tp', 4 ranks, BFLOAT16 x 33,554,432, model.py:88)"
ABSENT = (3, 5, *range(7, 13))


def elsewhere(state: str = INSIDE) -> ProcessRecord:
    """Rank 3, which the others wait for, and which waits in 'dp' itself."""
    return process(3, comm(3, 4, [call(40)]), dp(0, call(7, state=state, site="/m/opt.py:5")), where="/m/l.py:3 item")


def in_init(rank: int, uid: str = "u-w") -> ProcessRecord:
    init = call(1, "init", INSIDE, site="/m/train.py:3")
    return process(rank, comm(rank, 4, [init], uid=uid, name="world"))


def of_autograd() -> list[ProcessRecord]:
    records = three_wait()
    for one in records:
        one.comms[0].calls[-1].function = "AllReduce.backward"
        one.comms[0].calls[-1].forward_site = "/home/me/model.py:70"
    return records


NINTH = process(9, dp(1, call(6)), where="/m/data.py:41 next_batch")
AWAY = {
    "a rank never came": Case(
        [*three_wait(), behind(3, 4)],
        f"missing tp3: rank 3 never entered {WHERE}; 3 ranks have waited 12.3 s there.\n"
        "rank 3: process alive, last completed #40; its main thread is in data.py:41 next_batch",
        lines=["/home/me/data.py:41"],
    ),
    "several are ranges": Case(
        [behind(rank, 13) if rank in ABSENT else waiting(rank, 13) for rank in range(13)],
        "missing tp3 tp5 tp7 tp8 tp9 tp10 tp11 tp12: ranks 3, 5 and 7-12 never entered all_reduce #41 (comm "
        "'tp', 13 ranks",
    ),
    "no record": Case(
        three_wait(),
        "missing tp3: nothing is known of rank 3 of comm 'tp': no record here (another machine, another "
        "PYNCCL_WATCH_DIR, or it "
        f"has not come to init); 3 ranks have waited 12.3 s in {WHERE}.",
    ),
    "who is known comes before who is not": Case(
        [waiting(0, 1024), waiting(1, 1024), behind(7, 1024)],
        "missing tp7: rank 7 never entered all_reduce #41",
        "nothing is known of ranks 2-6 and 8-1023",
    ),
    "who waits elsewhere is not to blame": Case(
        [*three_wait(), elsewhere(), NINTH],
        "missing dp1: rank 1 (rank 9 of the launch) never entered all_reduce #7 (comm 'dp'",
    ),
    "missing in two communicators": Case(
        [waiting(0, 2), process(1, comm(1, 2, [call(40)]), dp(1, call(6))), process(2, dp(0, call(7, state=INSIDE)))],
        "missing tp1: rank 1 never entered all_reduce #41",
        "nor entered: all_reduce #7 of comm 'dp'",
    ),
    "on a machine that does not answer": Case(
        [*three_wait(), behind(3, 4, state=UNKNOWN, host="node7", machine="n7")],
        f"missing tp3: rank 3 never entered {WHERE}; 3 ranks have waited 12.3 s there.\nrank 3: process 1003 on "
        "host node7 cannot",
    ),
    "not come to init": Case(
        [in_init(0), in_init(1), in_init(2), process(3, where="/m/data.py:3 load")],
        "missing w3: rank 3 never entered init (comm 'world', 4 ranks, train.py:3); 3 ranks have waited 12.3 s there.\n"
        "rank 3: process alive, has not come to the communicator's init; its main thread is in data.py:3 load",
    ),
    "not come to finalize": Case(
        [*(process(rank, comm(rank, 3, [call(40), call(41, "finalize", INSIDE)])) for rank in (0, 1)), behind(2, 3)],
        "missing tp2: rank 2 never entered finalize (comm 'tp', 3 ranks); 2 ranks have waited 12.3 s there.",
    ),
    "autograd": Case(
        [*of_autograd(), behind(3, 4)],
        "missing tp3: rank 3 never entered all_reduce #41 (AllReduce.backward of the forward call at "
        "model.py:70, comm 'tp'",
    ),
    "the newest of two runs": Case(
        [waiting(3, 4, state=DEAD, end="killed or crashed", started=NOW - 5000, pid=9), *three_wait(), behind(3, 4)],
        "missing tp3: rank 3 never entered",
    ),
    "ranks of one process": Case(
        [process(-1, comm(0, 2, [call(41, state=INSIDE)]), comm(1, 2, [call(40)]))],
        "missing tp1: rank 1 never entered all_reduce #41",
        "its process is inside as rank 0: calls of several ranks of one process go into a pynccl.group()",
    ),
}


def stays(*others: ProcessRecord, size: int = 3) -> list[ProcessRecord]:
    return [waiting(0, size), *others]


STALLED = {
    "all are there": Case(
        [waiting(rank, 4) for rank in range(4)],
        f"stalled: ranks 0-3 in {WHERE}, not done after 12.3 s, and nobody is missing: the network between them, "
        "a GPU, or the "
        "work before it on its stream.",
    ),
    "for a short time": Case([waiting(rank, 4) for rank in range(4)], "running: no rank is stuck", patience=60),
    "in what the others have completed": Case(
        stays(*(process(rank, comm(rank, 3, [call(41)])) for rank in (1, 2))),
        f"stalled tp0: rank 0 in {WHERE.replace('4 ranks', '3 ranks')}, not done after 12.3 s, which ranks 1 and "
        "2 completed: the n",
    ),
    "calm": Case([behind(rank, 4) for rank in range(4)], "running: no rank is stuck: 4 running, 0 finished."),
    "no records": Case([], "empty: there are no records: no process has written any here"),
}
ALL = {**AWAY, **STALLED}


@pytest.mark.parametrize("name", ALL)
def test_what_is_said(name: str) -> None:
    ALL[name].check()


def test_who_waits_for_who_waits_elsewhere_hears_of_that() -> None:
    verdict = judge([*three_wait(), elsewhere(), NINTH])
    assert verdict.comms == ["u-dp", "u-tp"]
    assert about(verdict, "u-tp", 0).startswith("rank 1 (rank 9 of the launch) never entered")
    assert about(judge([behind(rank, 4) for rank in range(4)]), "u-tp", 0) == ""


def test_it_can_be_written_as_json_and_is_short() -> None:
    values = json.loads(json.dumps(judge([*three_wait(), behind(3, 4)]).to_json()))
    assert (values["kind"], values["culprits"]) == ("missing", [["u-tp", 3]])
    assert values["findings"][0]["sentence"] == values["sentence"]
    two = judge(AWAY["missing in two communicators"].records)
    assert len(two.findings) == 1 and set(two.comms) == {"u-tp", "u-dp"}


# What an exception of one rank says of it


def test_the_text_for_an_exception_is_short_and_does_not_repeat_it() -> None:
    verdict = judge([process(0, comm(0, 2, [call(40), failed("NcclTimeout: x", 2)])), behind(1, 2)])
    assert about(verdict, "u-tp", 0).startswith("rank 1 never entered")
    own = failed("NcclInternalError: x", 2)
    alone = judge([process(0, comm(0, 2, [own])), process(1, comm(1, 2, [call(41)]))])
    assert (alone.kind, about(alone, "u-tp", 0)) == ("failed", "")
    gave_up = process(1, comm(1, 2, [call(40), failed("NcclRemoteError: no answer", 0.5, age=5.5)]))
    verdict = judge([waiting(0, 2, 42), gave_up], uid="u-tp")
    assert about(verdict, "u-tp", 1) == about(verdict, "u-tp", 0) == render(verdict).partition("\nalso")[0]


def test_whose_own_error_is_the_cause_hears_of_the_others_errors_and_no_guesses() -> None:
    wrong = "NcclInvalidUsage: send and recv disagree"
    send = failed(wrong, 1, 0, "send", peer=1)
    recv = failed(wrong, 0.9, 0, "recv", peer=0, site="/m/a.py:54")
    second = process(1, comm(1, 2, [recv]), dp(1, call(6)))
    third = process(2, dp(0, call(6), failed("NcclRemoteError: lost rank 1", 0.5, 7, "barrier")))
    verdict = judge([process(0, comm(0, 2, [send])), second, third])
    assert about(verdict, "u-tp", 0) == f"rank 1: recv from rank 0 at a.py:54 raised {wrong}"
    assert about(verdict, "u-tp", 1).startswith("rank 0's send to rank 1 (comm 'tp'")
