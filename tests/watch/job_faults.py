"""One fault in a random job, what others do because of it, and the ranks that the verdict may name."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from random_jobs import Draft, add_exchange, add_signal, draw
from simulator import BY_ALL, BY_NAME, MESSAGES, Comm, Job, Op, Step
from truth import Truth
from watched import NOW


@dataclass
class Faulty:
    """A job with one fault.   rank: the faulty one, -1: none; exact: only it may be named"""

    draft: Draft
    rank: int
    exact: bool


def _pick(draft: Draft, rng: random.Random, fits: Callable[[Step], bool]) -> tuple[int, list[Step], int] | None:
    """Return a rank, the steps of one of its threads and the index of one that fits."""
    rank = rng.randrange(draft.size)
    steps = draft.side[rank] if rank in draft.side and rng.random() < 0.3 else draft.main[rank]
    places = [at for at, step in enumerate(steps) if fits(step)]
    return (rank, steps, rng.choice(places)) if places else None


def _calls(step: Step) -> bool:
    return bool(step.ops)


def _argument(step: Step) -> bool:
    return len(step.ops) > 0 and step.ops[0].numbered and step.ops[0].operation not in BY_NAME


def _messages(step: Step) -> bool:
    return any(op.operation in MESSAGES for op in step.ops)


def _drop(draft: Draft, steps: list[Step], after: int, name: str) -> None:
    """The thread uses this communicator, and those made of it, no more."""
    gone = {name}
    for step in steps[after:]:
        gone |= {made for op in step.ops if op.comm in gone for made in op.makes}
        if any(op.operation == "init" and op.comm in gone for op in step.ops):
            gone |= {comm.name for comm in draft.comms.values() if comm.parent == name and not comm.made}
    kept = []
    for step in steps[after:]:
        ops = tuple(op for op in step.ops if op.comm not in gone)
        if ops or not step.ops:
            kept.append(dataclasses.replace(step, ops=ops))
    steps[after:] = kept


def _insert(*acts: str) -> Callable[[Draft, random.Random], Faulty | None]:
    def fault(draft: Draft, rng: random.Random) -> Faulty | None:
        if (found := _pick(draft, rng, lambda step: True)) is None:
            return None
        rank, steps, at = found
        steps.insert(at, Step(act=rng.choice(acts)))
        return Faulty(draft, rank, True)

    return fault


def _no_record(draft: Draft, rng: random.Random) -> Faulty | None:
    found = _insert("freeze")(draft, rng)
    draft.hidden = found.rank if found is not None else -1
    return found


def _kill_inside(draft: Draft, rng: random.Random) -> Faulty | None:
    if (found := _pick(draft, rng, _calls)) is None:
        return None
    rank, steps, at = found
    steps[at] = dataclasses.replace(steps[at], act="kill inside")
    return Faulty(draft, rank, True)


def _absent(draft: Draft, rng: random.Random) -> Faulty | None:
    """A rank does not join an init or a split."""
    if (found := _pick(draft, rng, lambda s: _calls(s) and s.ops[0].operation in ("init", "split"))) is None:
        return None
    rank, steps, at = found
    if rng.random() < 0.5:
        steps.insert(at, Step(act="sleep"))
        return Faulty(draft, rank, True)
    op = steps[at].ops[0]
    for name in op.makes or (op.comm,):
        _drop(draft, steps, at + 1, name)
    del steps[at]
    return Faulty(draft, rank, False)


def _goes_on(draft: Draft, rng: random.Random) -> Faulty | None:
    if (found := _pick(draft, rng, _calls)) is None:
        return None
    rank, steps, at = found
    _drop(draft, steps, at, steps[at].ops[0].comm)
    return Faulty(draft, rank, False)


def _call_fails(draft: Draft, rng: random.Random) -> Faulty | None:
    """A call raises. The rank sleeps, ends, or goes on with other communicators."""
    if (found := _pick(draft, rng, lambda s: _calls(s) and s.ops[0].operation not in ("signal", "init"))) is None:
        return None
    rank, steps, at = found
    names = dict.fromkeys(name for op in steps[at].ops for name in (op.comm, *op.makes))
    steps[at] = dataclasses.replace(steps[at], act="fail")
    for name in names:
        _drop(draft, steps, at + 1, name)
    then = rng.choice(("sleep", "raise", "end", ""))
    if then:
        steps.insert(at + 1, Step(act=then))
    return Faulty(draft, rank, True)


def _nccl_fails(draft: Draft, rng: random.Random) -> Faulty | None:
    """A call fails in NCCL, and its process ends."""
    if (found := _pick(draft, rng, lambda s: _calls(s) and s.ops[0].operation not in ("signal", "init"))) is None:
        return None
    rank, steps, at = found
    steps[at:] = [dataclasses.replace(steps[at], act="fail in NCCL"), Step(act="end")]
    return Faulty(draft, rank, True)


def _omitted(draft: Draft, rng: random.Random) -> Faulty | None:
    if (found := _pick(draft, rng, lambda s: _calls(s) and s.ops[0].operation not in MESSAGES)) is None:
        return None
    rank, steps, at = found
    op = steps[at].ops[0]
    if op.operation in ("init", "split"):
        return None
    del steps[at]
    return Faulty(draft, rank, False)


def _extra(draft: Draft, rng: random.Random) -> Faulty | None:
    if (found := _pick(draft, rng, _argument)) is None:
        return None
    rank, steps, at = found
    op = steps[at].ops[0]
    if rng.random() < 0.5:
        op = dataclasses.replace(draft.collective(op.comm), line=77)
    steps.insert(at, Step((op,), 0 if op.operation == "barrier" else steps[at].stream, line=77))
    return Faulty(draft, rank, False)


def _swapped(draft: Draft, rng: random.Random) -> Faulty | None:
    if (found := _pick(draft, rng, _calls)) is None:
        return None
    rank, steps, at = found
    later = []
    for other in range(at, min(at + 6, len(steps))):
        if any(op.operation in ("init", "split", *BY_ALL) for op in steps[other].ops):
            break
        later += [other] if steps[other].ops and other > at else []
    if not later:
        return None
    other = rng.choice(later)
    steps[at], steps[other] = steps[other], steps[at]
    return Faulty(draft, rank, False)


def _another_argument(draft: Draft, rng: random.Random) -> Faulty | None:
    if (found := _pick(draft, rng, _argument)) is None:
        return None
    rank, steps, at = found
    op, *rest = steps[at].ops
    size = len(draft.comms[op.comm].ranks)
    changes: list[dict[str, str | int]] = [{"count": op.count + 7}, {"dtype": "INT8"}]
    changes += [{"op": "PROD"}] if op.op else []
    changes += [{"root": (op.root + 1) % size}] if op.root >= 0 else []
    changes += [{"operation": "all_to_all", "op": "", "root": -1}]
    steps[at] = dataclasses.replace(
        steps[at],
        ops=(dataclasses.replace(op, line=77, **rng.choice(changes)), *rest),  # type: ignore[arg-type]
    )
    return Faulty(draft, rank, False)


def _change_message(draft: Draft, rng: random.Random, change: Callable[[Op], Op | None]) -> Faulty | None:
    if (found := _pick(draft, rng, _messages)) is None:
        return None
    rank, steps, at = found
    ops = list(steps[at].ops)
    which = rng.choice([i for i, op in enumerate(ops) if op.operation in MESSAGES])
    changed = change(ops[which])
    if changed is ops[which]:
        return None
    ops[which : which + 1] = [changed] if changed is not None else []
    if ops:
        steps[at] = dataclasses.replace(steps[at], ops=tuple(ops))
    else:
        del steps[at]
    return Faulty(draft, rank, False)


def _wrong_peer(draft: Draft, rng: random.Random) -> Faulty | None:
    def change(op: Op) -> Op:
        ranks = draft.comms[op.comm].ranks
        others = [peer for peer in range(len(ranks)) if peer != op.peer]
        return dataclasses.replace(op, peer=rng.choice(others), line=77) if len(ranks) > 2 else op

    found = _change_message(draft, rng, change)
    if found is None:
        return None
    own = [op for step in draft.main[found.rank] for op in step.ops if op.line == 77]
    return found if all(draft.comms[op.comm].ranks[op.peer] != found.rank for op in own) else None


def _wrong_size(draft: Draft, rng: random.Random) -> Faulty | None:
    return _change_message(draft, rng, lambda op: dataclasses.replace(op, count=op.count + 5, line=77))


def _send_omitted(draft: Draft, rng: random.Random) -> Faulty | None:
    return _change_message(draft, rng, lambda op: None)


def _crossed_messages(draft: Draft, rng: random.Random) -> Faulty | None:
    def fits(at: int) -> bool:
        if at + 1 >= len(steps) or len(steps[at].ops) != 1 or len(steps[at + 1].ops) != 1:
            return False
        first, second = steps[at].ops[0], steps[at + 1].ops[0]
        return (
            {first.operation, second.operation} == set(MESSAGES)
            and (first.comm, first.peer) == (second.comm, second.peer)
            and not draft.comms[first.comm].route
        )

    rank = rng.randrange(draft.size)
    steps = draft.main[rank]
    places = [at for at in range(len(steps)) if fits(at)]
    if not places:
        add_exchange(draft)
        return None
    at = rng.choice(places)
    steps[at], steps[at + 1] = steps[at + 1], steps[at]
    return Faulty(draft, rank, False)


def _ended_early(draft: Draft, rng: random.Random) -> Faulty | None:
    """A rank destroys a communicator, which waits for the others, or aborts it, which does not."""
    if (found := _pick(draft, rng, _calls)) is None:
        return None
    rank, steps, at = found
    op = steps[at].ops[0]
    if op.operation == "init" or draft.comms[op.comm].route:
        return None
    _drop(draft, steps, at, op.comm)
    if rng.random() < 0.5:
        steps.insert(at, Step((Op(op.comm, "destroy", 77),), line=77))
        return Faulty(draft, rank, False)
    steps.insert(at, Step((Op(op.comm, "destroy", 77),), act="abort", line=77))
    return Faulty(draft, rank, True)


def _never_sent(draft: Draft, rng: random.Random) -> Faulty | None:
    """An early irecv is never matched, and nobody waits for it: no fault."""
    target, source = rng.sample(range(draft.size), 2)
    name = f"route{len(draft.comms)}"
    draft.comms = {**draft.comms, name: Comm(name, (source, target), parent="world", route=True)}
    step = Step((draft.message(name, "recv", 0, 8),), 50 + len(draft.comms), line=77)
    draft.main[target].insert(rng.randrange(len(draft.main[target])), step)
    return Faulty(draft, -1, True)


def _no_signal(draft: Draft, rng: random.Random) -> Faulty | None:
    if (found := _pick(draft, rng, lambda s: _calls(s) and s.ops[0].operation == "signal")) is None:
        add_signal(draft)
        return None
    rank, steps, at = found
    del steps[at]
    return Faulty(draft, rank, False)


def _stalled(draft: Draft, rng: random.Random) -> Faulty | None:
    """A collective that all ranks have entered never completes."""
    if (found := _pick(draft, rng, lambda s: len(s.ops) == 1 and _argument(s))) is None:
        return None
    _, steps, at = found
    name = steps[at].ops[0].comm
    draft.broken = name, 1 + sum(op.comm == name and op.numbered for step in steps[:at] for op in step.ops)
    return Faulty(draft, -1, True)


FAULTS: dict[str, Callable[[Draft, random.Random], Faulty | None]] = {
    "asleep": _insert("sleep", "freeze"),
    "asleep without a record": _no_record,
    "killed": _insert("kill"),
    "killed inside a call": _kill_inside,
    "killed, a peer's NCCL fails": _insert("kill"),
    "stopped": _insert("stop"),
    "own exception": _insert("raise", "exit"),
    "exception caught, goes on": _goes_on,
    "its call raises": _call_fails,
    "its call fails in NCCL": _nccl_fails,
    "call omitted": _omitted,
    "extra call": _extra,
    "calls swapped": _swapped,
    "another argument": _another_argument,
    "message to another peer": _wrong_peer,
    "message of another size": _wrong_size,
    "message omitted": _send_omitted,
    "crossed messages": _crossed_messages,
    "communicator ended early": _ended_early,
    "not in init or split": _absent,
    "irecv never matched": _never_sent,
    "no signal": _no_signal,
    "network stalls": _stalled,
}


def _lost(draft: Draft, rng: random.Random) -> Faulty | None:
    return rng.choice((_insert("kill"), _kill_inside, _insert("stop"), _insert("raise"), _call_fails))(draft, rng)


ELASTIC = {"a rank is lost, and others revoke": _lost}


@dataclass
class Case:
    """A played job with a fault.   clean: the same without it; truth: before others gave up; exact: only `rank` may be
    named"""

    seed: int
    fault: str
    clean: Job
    job: Job
    rank: int
    exact: bool
    truth: Truth
    gave_up: bool = False

    def survivors(self) -> set[int]:
        """Return the ranks that have caught the error of their call and live on: others may wait for them now."""
        return {rank for rank, process in enumerate(self.job.ranks) if process.where.endswith("handle")}


def make(seed: int, only: str = "") -> Case:
    """Return the job of a seed, with the fault `only` or the seed's own. The same job without it finishes."""
    name = only or list(FAULTS)[seed % len(FAULTS)]
    rng = random.Random(f"{seed} {name}")
    harmless = rng.random() < 0.05
    while True:
        draft = draw(rng)
        for _ in range(12):
            found = (FAULTS | ELASTIC)[name](draft.copy(), rng)
            if found is None:
                continue
            clean = draft.job()
            assert clean.play(), f"seed {seed}: the job does not finish without its fault"
            job = found.draft.job()
            job.play()
            truth = Truth(job)
            ends = any(process.state != "running" and process.ending != "CLEAN" for process in job.ranks)
            if truth.waiting or ends or harmless or name == "irecv never matched":
                case = Case(seed, name, clean, job, found.rank, found.exact, truth)
                _consequences(case, rng)
                return case


def _consequences(case: Case, rng: random.Random) -> None:
    """In a part of the jobs, ranks that wait give up, and their processes end. Or some revoke instead."""
    if case.fault in ELASTIC:
        others = sorted(
            {rank for rank, process in enumerate(case.job.ranks) if process.state == "running"} - {case.rank}
        )
        for rank in rng.sample(others, rng.randint(min(1, len(others)), len(others))):
            case.job.revoke(rank, NOW - rng.uniform(1.0, 30.0))
        return
    nccl = case.fault == "killed, a peer's NCCL fails"
    if not case.truth.waiting or (not nccl and rng.random() < 0.5):
        return
    case.gave_up = True
    waiting = sorted(case.truth.waiting)
    chosen = waiting if rng.random() < 0.6 else rng.sample(waiting, rng.randint(1, len(waiting)))
    died = case.rank >= 0 and case.job.ranks[case.rank].state == "dead"
    begin = case.job.clock + 0.1 if died and rng.random() < 0.5 else NOW - 30.0
    for order, rank in enumerate(rng.sample(chosen, len(chosen))):
        _give_up(case, rank, begin + order * 0.5, rng, nccl)
    culprit = case.job.ranks[case.rank] if case.rank >= 0 else None
    if culprit is not None and len(chosen) == len(waiting) and culprit.state != "dead" and rng.random() < 0.5:
        for process in case.job.ranks:  # the launcher kills the others
            if process.state != "dead":
                process.state, process.ending, process.heartbeat = "dead", "KILLED", NOW - 10


def _give_up(case: Case, rank: int, now: float, rng: random.Random, nccl: bool) -> None:
    """A rank's wait fails because of the others.   nccl: with an error by which NCCL also reports the end of a peer"""
    job, process = case.job, case.job.ranks[rank]
    threads = [thread for thread in job.threads if thread.rank == rank and thread.waits and not thread.asleep]
    thread = threads[0]
    first = next(call for call in thread.blocked if not call.done)
    outcomes: list[tuple[str, str, int]] = [("TIMED_OUT", "NcclTimeout: timed out after 60 s", -1)]
    lost = [number for number in job.comms[first.op.comm].ranks if job.ranks[number].state == "dead"]
    nccl = nccl and bool(lost)
    if lost:
        outcomes.append(("PEER_LOST", f"NcclRemoteError: lost rank {lost[0]}", rng.choice((lost[0], lost[0], -1))))
    if case.truth.sides and rank in case.truth.sides:
        outcomes += [("MISMATCH", "NcclInvalidUsage: the ranks disagree", -1)] * 2
    if nccl:
        outcomes = [
            ("NCCL_FAILED", "NcclSystemError: connection reset", 2),
            ("NCCL_FAILED", "NcclInternalError: no text", 3),
        ]
    outcome, error, code = rng.choice(outcomes)
    own = job.members[first.op.comm, rank]
    if not thread.in_wait and rng.random() < 0.7:  # the call itself raises, with its group
        calls = job.unit_of(first).calls
    elif not job.cuda and rng.random() < 0.3:  # the stream raises: the newest call of the communicator
        calls = own.calls[-1:]
    elif nccl:
        calls = [first]
    else:
        outcome, error, code = "ABORTED_BY_WATCHDOG", "NcclTimeout: aborted by the watchdog", -1
        calls = [call for call in own.calls if call.entry > own.completed and not job.returned_to_caller(call)]
        own.ended, own.ended_at = "ABORTED_BY_WATCHDOG", now
    for call in calls:
        job.fail(call, outcome, error, code)
        call.returned = now
        if not call.done:
            call.active = False
    if rng.random() < 0.9:
        process.state, process.ending, process.end, process.end_at = "dead", "CALL_FAILED", error, now + 0.1
        process.outcome, process.code, process.heartbeat = outcome, code, now
        for (_, owner), member in job.members.items():
            if owner == rank and not member.ended:
                member.ended, member.ended_at = "AT_EXIT", now + 0.2
    else:
        process.where = "/job/train.py:60 handle"


def allowed(case: Case) -> tuple[set[int], set[int]]:
    """Return the ranks that the verdict may name, and those of them that it must name."""
    truth, rank = case.truth, {case.rank} - {-1}
    if case.fault == "network stalls":  # a rank may seem to be behind, as a mark on its streams passes only as a whole
        return truth.waiting, set()
    ended = case.rank >= 0 and case.job.ranks[case.rank].state != "running"
    if case.fault == "irecv never matched" or not (truth.waiting or ended):
        return set(), set()
    survivors = case.survivors()
    if case.exact or not truth.waiting:
        # With CUDA, a rank that is asleep might as well wait for what it has on a stream.
        may_wait = case.job.cuda and case.fault == "asleep"
        may = rank | survivors | (truth.cycle_of(case.rank) if may_wait else set())
        return may, set() if survivors else rank
    if truth.sides:
        return truth.sides, rank & truth.sides
    known = truth.cycle | truth.idle
    return known | survivors | truth.cycle_of(case.rank), set() if survivors else rank & known


def judged_as(case: Case, named: set[int]) -> str:
    """ "exact": the faulty rank and no other; "contained": with others of its cycle or mismatch; "other": the records
    cannot tell, and another rank of those possible is named; "wrong"."""
    may, must = allowed(case)
    stalls = case.fault == "network stalls"
    if not named <= may or not must <= named or (may and not named and not stalls):
        return "wrong"
    if named == {case.rank} - {-1} or not may:
        return "exact"
    return "contained" if case.rank in named else "other"


def ranks_of(case: Case, culprits: Sequence[tuple[str, int]]) -> set[int]:
    """Return the global ranks of the culprits."""
    return {case.job.comms[uid[2:]].ranks[rank] if uid else rank for uid, rank in culprits}
