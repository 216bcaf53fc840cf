"""The smallest simulated jobs in which it is easy to name the wrong rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from simulated_records import hand_made
from simulator import Comm, Job, Op, Step
from watched import NOW

from pynccl.watch.verdict import judge, render

SLEEP = Step(act="sleep")
SPIN = Step(act="wait")  # some work
SIGNATURE = {"all_reduce": (1024, "FLOAT32", "SUM"), "send": (8, "FLOAT32", ""), "recv": (8, "FLOAT32", "")}
COMMS = {
    comm.name: comm
    for comm in (
        Comm("world", (0, 1, 2)),
        Comm("01", (0, 1)),
        Comm("23", (2, 3)),
        Comm("all", (0, 1, 2, 3)),
        Comm("some", (0, 1, 2)),
        Comm("2 to 1", (2, 1), route=True),
        Comm("pair", (0, 1)),
        Comm("dp", (0, 1)),
        Comm("side", (0, 1, 2), side=True),
        Comm("1 to 0", (1, 0), route=True),
        Comm("1 to 2", (1, 2), route=True),
        Comm("02", (0, 2)),
        Comm("10", (1, 0)),
        Comm("new", (0, 1), made=False),
        Comm("late", (0, 1, 2), made=False),
    )
}


def do(comm: str, operation: str, peer: int = -1, stream: int = 0, act: str = "") -> Step:
    """Return a step that makes a call.   stream: 0: the thread blocks"""
    count, dtype, op = SIGNATURE.get(operation, (-1, "", ""))
    return Step((Op(comm, operation, 5, count, dtype, op, peer=peer),), stream, act)


def group(*comms: str, stream: int) -> Step:
    """Return a step that issues an all_reduce of each communicator in one group."""
    return Step(tuple(do(comm, "all_reduce").ops[0] for comm in comms), stream)


def shrink(excluded: int) -> Step:
    return Step((Op("world", "shrink", 5, excluded=(excluded,)),))


def wait(*streams: int) -> Step:
    return Step(act="wait", streams=streams)


def gives_up(
    rank: int, *comms: str, by: str = "TIMED_OUT", code: int = -1, after: float = -30.0, ends: bool = True
) -> Callable[[Job], None]:
    """Return a function by which the open calls of a rank on these communicators fail, and its process ends."""

    def apply(job: Job) -> None:
        process, now = job.ranks[rank], NOW + after
        for (name, owner), own in job.members.items():
            if owner == rank and name in comms:
                for call in own.calls:
                    if not call.done:
                        job.fail(call, by, "NcclTimeout: no answer", code)
                        call.returned = now
            if owner == rank and not own.ended and ends:
                own.ended, own.ended_at = "AT_EXIT", now + 0.2
        if ends:
            process.state, process.ending, process.outcome, process.code = "dead", "CALL_FAILED", by, code
            process.end, process.end_at, process.heartbeat = "NcclTimeout: no answer", now + 0.1, now

    return apply


def launcher_kills(*ranks: int) -> Callable[[Job], None]:
    def apply(job: Job) -> None:
        for rank in ranks:
            process = job.ranks[rank]
            process.state, process.ending, process.heartbeat = "dead", "KILLED", NOW - 10

    return apply


def revokes(*ranks: int, after: float = -30.0) -> Callable[[Job], None]:
    """Return a function by which these ranks revoke all their communicators, as a peer has died."""

    def apply(job: Job) -> None:
        for rank in ranks:
            job.revoke(rank, NOW + after)

    return apply


def exits(rank: int) -> Callable[[Job], None]:
    return lambda job: job.end_process(rank, "CLEAN", "exit", NOW - 20)


def no_record(rank: int) -> Callable[[Job], None]:
    def apply(job: Job) -> None:
        job.ranks[rank].recorded = False

    return apply


def unobserved(rank: int, comm: str) -> Callable[[Job], None]:
    """The watchdog of a rank has not observed yet that any call on a stream has completed."""

    def apply(job: Job) -> None:
        job.members[comm, rank].completed = 0

    return apply


@dataclass
class Small:
    """A job and the ranks to be named.   side: the steps of second threads; then: what happens in the end"""

    culprits: set[int]
    programs: Sequence[Sequence[Step]]
    side: dict[int, Sequence[Step]] = field(default_factory=dict)
    cuda: bool = False
    then: Sequence[Callable[[Job], None]] = ()


JOBS = {
    "a posted call ahead of a blocking one": Small(
        {0, 1}, [[do("pair", "recv", 1, 1), do("pair", "send", 1)], [do("pair", "recv", 0), do("pair", "send", 0)]]
    ),
    "a posted call ahead of one that a peer waits for": Small(
        {0, 1}, [[do("pair", "recv", 1, 1), do("pair", "send", 1, 1)], [do("pair", "recv", 0), do("pair", "send", 0)]]
    ),
    "a posted call for which only others wait": Small(
        {1, 2},
        [
            [do("some", "all_reduce"), do("all", "all_reduce")],
            [do("all", "send", 2, 1), do("all", "all_reduce", stream=2), do("2 to 1", "recv", 0, 8), wait(8)],
            [do("some", "all_reduce"), do("2 to 1", "send", 1, 8), do("all", "recv", 1), do("all", "all_reduce")],
            [do("all", "all_reduce")],
        ],
    ),
    "a posted half of a message of another size": Small(
        {0, 1},
        [
            [replace(do("pair", "send", 1, 1), ops=(Op("pair", "send", 5, 9, "FLOAT32", peer=1),)), SLEEP],
            [do("pair", "recv", 0)],
        ],
    ),
    "a signal never comes to a stream": Small({0}, [[], [do("pair", "wait_signal", 0, 1), wait(1)]], cuda=True),
    "a signal that has come, unobserved": Small(
        {2},
        [[do("world", "signal", 1)], [do("world", "wait_signal", 0, 1), do("world", "recv", 2, 1), wait(1)], []],
        cuda=True,
        then=[unobserved(1, "world")],
    ),
    "a signal never came, and a later call completed": Small(
        {0},
        [
            [do("pair", "all_reduce")],
            [do("pair", "wait_signal", 0, 1), do("pair", "all_reduce"), wait(1)],
        ],
        then=[gives_up(1, "pair", by="ABORTED_BY_WATCHDOG")],
    ),
    "crossed on streams, aborted by the watchdog": Small(
        {0, 1},
        [[do("pair", "recv", 1 - rank, 1), do("pair", "send", 1 - rank, 1), wait(1)] for rank in range(2)],
        cuda=True,
        then=[gives_up(rank, "pair", by="ABORTED_BY_WATCHDOG", after=rank - 30) for rank in range(2)],
    ),
    "crossed, and one rank has given up on another communicator": Small(
        {0, 1},
        [
            [do("pair", "send", 1, 1), do("pair", "recv", 1, 1), wait(1)],
            [do("pair", "send", 0, 1), do("pair", "recv", 0, 1), do("dp", "all_reduce")],
        ],
        cuda=True,
        then=[gives_up(1, "dp")],
    ),
    "an early irecv makes a shorter cycle": Small(
        {0, 1},
        [
            [
                do("pair", "recv", 1, 1),
                do("pair", "all_reduce", stream=1),
                do("world", "all_reduce", stream=2),
                wait(1),
            ],
            [do("pair", "recv", 0, 1), do("pair", "all_reduce", stream=2), wait(1)],
            [do("02", "recv", 0, 9), do("world", "all_reduce", stream=1), wait(1)],
        ],
        cuda=True,
    ),
    "an early irecv of a waiting rank": Small(
        {1},
        [
            [do("world", "all_reduce", stream=1), wait(1)],
            [SLEEP],
            [do("02", "recv", 0, 9), do("world", "all_reduce", stream=1), wait(1)],
        ],
        cuda=True,
    ),
    "a killed rank had posted an irecv": Small(
        {0},
        [
            [do("10", "recv", 0, 9), Step(act="kill")],
            [do("pair", "all_reduce", stream=1), wait(1)],
        ],
        cuda=True,
        then=[gives_up(1, "pair", by="ABORTED_BY_WATCHDOG")],
    ),
    "it aborted a communicator, and timed out on another": Small(
        {0},
        [[do("pair", "all_reduce", act="abort"), do("dp", "all_reduce")], [do("pair", "all_reduce")]],
        then=[gives_up(0, "dp")],
    ),
    "a call raised, and a peer is in the next one": Small(
        {0},
        [
            [do("pair", "all_reduce", act="fail"), do("dp", "all_reduce")],
            [do("pair", "all_reduce", stream=1), do("pair", "barrier")],
        ],
    ),
    "a call raised, and its rank timed out elsewhere": Small(
        {0},
        [[do("pair", "all_reduce", act="fail"), do("dp", "all_reduce")], [do("pair", "all_reduce")]],
        then=[gives_up(1, "pair"), gives_up(0, "dp", after=-29)],
    ),
    "a call raised, and the launcher killed its rank": Small(
        {1},
        [[do("pair", "all_reduce")], [do("pair", "all_reduce", act="fail"), SLEEP], []],
        then=[gives_up(0, "pair"), launcher_kills(1, 2)],
    ),
    "destroy raised": Small({0}, [[do("pair", "destroy", act="fail"), SLEEP], [do("pair", "destroy")]]),
    "two threads, in any order": Small(
        {0},
        [[Step(act="freeze")], [do("world", "all_reduce")], [SPIN, do("world", "all_reduce")]],
        {1: [SPIN, do("side", "all_reduce")], 2: [do("side", "all_reduce")]},
    ),
    "a group of calls, in any order": Small(
        {2},
        [[group("world", "some", stream=1), wait(1)], [group("some", "world", stream=1), wait(1)], [SLEEP]],
        cuda=True,
    ),
    "a closed communicator does not wait in destroy": Small(
        {2}, [[do("world", "destroy", act="abort")], [do("world", "destroy")], [SLEEP]]
    ),
    "a rank that a shrink excludes": Small({2}, [[], [shrink(0)], [SLEEP]]),
    "two threads, of which one has given up": Small(
        {0},
        [[Step(act="stop")], [do("world", "all_reduce")], [do("world", "all_reduce")]],
        {1: [do("side", "all_reduce")], 2: [do("side", "all_reduce")]},
        then=[gives_up(1, "side"), gives_up(2, "world", after=-29)],
    ),
    "a rank that gave up has not destroyed": Small(
        {1, 2},
        [
            [do("world", "destroy")],
            [do("world", "destroy")],
            [do("1 to 2", "recv", 0, 8), wait(8), do("world", "destroy")],
        ],
        then=[gives_up(2, "1 to 2"), gives_up(1, "world", after=-29), gives_up(0, "world", after=-28)],
    ),
    "no record, and the launcher killed the others": Small(
        {2},
        [[do("02", "all_reduce")], [], [SLEEP]],
        then=[gives_up(0, "02"), launcher_kills(1), no_record(2)],
    ),
    "revoked where a rank was killed": Small(
        {3}, [*[[do("all", "all_reduce")]] * 3, [Step(act="kill")]], then=[revokes(0, 1)]
    ),
    "revoked by a rank that had not entered, where another is stopped": Small(
        {3}, [[SLEEP], *[[do("all", "all_reduce")]] * 2, [Step(act="stop")]], then=[revokes(0, 1)]
    ),
    "the same, and it has exited since": Small(
        {3}, [[SLEEP], *[[do("all", "all_reduce")]] * 2, [Step(act="stop")]], then=[revokes(0, 1), exits(0)]
    ),
    "revoked by all but the rank whose call raised": Small(
        {2}, [*[[do("world", "all_reduce")]] * 2, [do("world", "all_reduce", act="fail"), SLEEP]], then=[revokes(0, 1)]
    ),
    "its call raised, and it has gone on, and the others have revoked": Small(
        {2},
        [*[[do("world", "all_reduce")]] * 2, [do("world", "all_reduce", act="fail"), do("02", "all_reduce")]],
        then=[revokes(0, 1)],
    ),
    "revoked where a rank never entered": Small(
        {2}, [*[[do("world", "all_reduce")]] * 2, [SLEEP]], then=[revokes(0, 1)]
    ),
    "revoked where a rank never entered, with calls on streams": Small(
        {2},
        [[do("world", "all_reduce", stream=1), do("world", "barrier")], [do("world", "all_reduce", stream=1)], [SLEEP]],
        cuda=True,
        then=[revokes(0, 1)],
    ),
    "revoked where a rank never sent, ahead of another message": Small(
        {2},
        [[do("world", "recv", 2, 1), do("world", "recv", 1, 2), wait(1, 2)], [SLEEP], [SLEEP]],
        cuda=True,
        then=[revokes(0, 1)],
    ),
    "revoked, also by the rank whose call had raised": Small(
        {2}, [*[[do("world", "all_reduce")]] * 2, [do("world", "all_reduce", act="fail"), SLEEP]], then=[revokes(0, 2)]
    ),
    "revoked where a rank has no record": Small(
        {2}, [*[[do("world", "all_reduce")]] * 2, [SLEEP]], then=[revokes(0, 1), no_record(2)]
    ),
    "revoked by all that had not entered": Small(
        set(), [[SLEEP], [SLEEP], [do("world", "all_reduce")]], then=[revokes(0, 1)]
    ),
    "revoked by all": Small(set(), [[SLEEP], *[[do("world", "all_reduce")]] * 2], then=[revokes(0, 1, 2)]),
    "NCCL fails in the init that a dead rank has not joined": Small(
        {0},
        [[Step(act="kill")], [do("late", "init")], [do("late", "init")]],
        then=[gives_up(1, "late", by="NCCL_FAILED", code=2)],
    ),
    "NCCL fails where a peer had ended because of a dead one": Small(
        {0},
        [[Step(act="kill")], [do("pair", "all_reduce")], [do("1 to 2", "recv", 0, 8), wait(8)]],
        then=[
            gives_up(1, "pair", by="NCCL_FAILED", code=2),
            gives_up(2, "1 to 2", by="NCCL_FAILED", code=3, after=-29),
        ],
    ),
}


def played(
    programs: Sequence[Sequence[Step]], side: dict[int, Sequence[Step]] | None = None, cuda: bool = False, **more: Any
) -> Job:
    threads = [(rank, False, steps) for rank, steps in enumerate(programs)]
    threads += [(rank, True, steps) for rank, steps in (side or {}).items()]
    job = Job([comm for comm in COMMS.values() if max(comm.ranks) < len(programs)], threads, 0, cuda)
    job.broken = more.get("broken", job.broken)
    job.play()
    return job


def named_by(job: Job) -> tuple[set[int], str]:
    """Return the ranks that the verdict names, and its text."""
    verdict = judge(hand_made(job))
    ranks = {job.comms[uid[2:]].ranks[rank] if uid else rank for uid, rank in verdict.culprits}
    return ranks, f"{verdict.kind}: {render(verdict)}"


@pytest.mark.parametrize("name", JOBS)
def test_the_verdict(name: str) -> None:
    small = JOBS[name]
    job = played(small.programs, small.side, small.cuda)
    for event in small.then:
        event(job)
    named, text = named_by(job)
    assert named == small.culprits, text


def test_either_thread_may_be_the_first() -> None:
    small = JOBS["two threads, in any order"]
    job = played(small.programs, small.side)
    first = [job.members["world", rank].calls[0].issued < job.members["side", rank].calls[0].issued for rank in (1, 2)]
    assert first == [True, False]


def test_what_is_said_where_ranks_have_revoked() -> None:
    texts = {}
    raised = "revoked, also by the rank whose call had raised"
    for name in ("revoked by all", "revoked by all that had not entered", raised):
        job = played(JOBS[name].programs)
        JOBS[name].then[0](job)
        texts[name] = named_by(job)[1].partition("\n")[0]
    assert texts["revoked by all"] == "running: no rank is stuck: 3 running, 0 finished."
    assert texts["revoked by all that had not entered"] == (
        "stalled: rank 2 in all_reduce #1 (comm 'world', 3 ranks, FLOAT32 x 1,024, train.py:5), not done after "
        "8 min 20 s, and ranks 0 and 1 left, as the communicator was revoked: it was not revoked here."
    )
    assert "; rank 1 has waited 8 min 20 s there and rank 0 gave up" in texts[raised]


# In order of priority: what the two ranks of a communicator do, and which of them is to be named
IN_CALL = [do("{}", "all_reduce")]
ORDER: dict[str, tuple[Sequence[Step], Sequence[Step], set[int]]] = {
    "ended by its own error": ([Step(act="raise")], IN_CALL, {0}),
    "mismatch": ([do("{}", "barrier")], IN_CALL, {0, 1}),
    "ended by NCCL": ([do("{}", "all_reduce", act="fail in NCCL"), Step(act="end")], IN_CALL, {0}),
    "cycle": ([do("{}", "send", 1)], [do("{}", "send", 0)], {0, 1}),
    "stopped": ([Step(act="stop")], IN_CALL, {0}),
    "raised": ([do("{}", "all_reduce", act="fail"), SLEEP], IN_CALL, {0}),
    "communicator ended": ([do("{}", "all_reduce", act="abort"), SLEEP], IN_CALL, {0}),
    "not entered": ([SLEEP], IN_CALL, {0}),
    "no record": ([Step(act="wait"), SLEEP], IN_CALL, {0}),
    "stalled": (IN_CALL, IN_CALL, set()),
}


def _on(comm: str, steps: Sequence[Step]) -> list[Step]:
    return [replace(step, ops=tuple(replace(op, comm=comm) for op in step.ops)) for step in steps]


@pytest.mark.parametrize("first, second", list(itertools.combinations(ORDER, 2)))
@pytest.mark.parametrize("swapped", [False, True])
def test_of_two_faults_the_verdict_names_the_first_in_order(first: str, second: str, swapped: bool) -> None:
    programs: list[list[Step]] = []
    for comm, fault in zip(("01", "23"), (second, first) if swapped else (first, second), strict=True):
        programs += [_on(comm, steps) for steps in ORDER[fault][:2]]
    where = {first: "23" if swapped else "01", second: "01" if swapped else "23"}
    job = played(programs, broken=(where.get("stalled", ""), 1))
    if "no record" in where:
        job.ranks[job.comms[where["no record"]].ranks[0]].recorded = False
    named, text = named_by(job)
    assert named == {job.comms[where[first]].ranks[rank] for rank in ORDER[first][2]}, text
