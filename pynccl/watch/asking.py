"""Ranks on several machines ask each other where they are, through the store that bootstrap used, and tell their ends.

A question goes to all: "where is everybody?". All that are stuck ask at about the same time, so `raise/K` lets one of
them through, the reporter of round K. It sets `question/K` and raises `rounds`, the one key that a quiet process reads,
once a poll. Every process appends its record to `answers/K`. The reporter reads them, judges, and sets `verdict/K`, for
which the others that are stuck wait; should it not come, `report/K/A` lets another one through. `roster/UID` says who
has which rank of a communicator, `ends` who has ended.

How often a process asks the store does not depend on how many there are: once a second, and every half while it waits
for a verdict. So the answers of all are there before the reporter judges, whatever the timeout of each. What a process
answers is somebody's text: JSON of bounded size, or it is left out.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from .layout import printable
from .records import COMPLETED, DEAD, FAILED, CallRecord, CommRecord, ProcessRecord, checked, from_json, to_json
from .store import OutOfReach, Reach, append, lines, read

ANSWER_POLLS = 4  # polls after which the reporter judges without those who have not answered
PATIENCE_POLLS = 6  # polls after which one who waits for a verdict becomes the reporter; again after as many
ATTEMPTS = 3  # reporters of one round, before it is given up
QUIET_SECONDS = 1.0  # between two polls of a process that waits for nothing
WAITING_SECONDS = 0.5  # of one that waits for a verdict; the reporter so gives the quiet ones time to answer
FRESH_SECONDS = 30.0  # a verdict so old says nothing of a call that is still under way

_MOST_ENDS = 64  # of a job that ends as a whole, the others would read megabytes
_END_BYTES = 12288  # the last eight calls of three communicators: the one that explains an error may be some calls back
_ANSWER_BYTES = 4096, 512  # of a process, and for each of its communicators
_LINE_BYTES = 1 << 18
_TEXT_BYTES = 1 << 16
_MOST_LINES = 1 << 16
_CALLS = 8  # of a communicator, in an answer
_FEW = 2  # of those that were not asked for
_MOST_TOGETHER = 32  # calls of a group that is kept whole
_LINGER_POLL_SECONDS = 0.05


class Member(NamedTuple):
    """Who has a rank of a communicator."""

    rank: int
    host: str
    pid: int
    machine: str
    uid: str

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


class Question(NamedTuple):
    """Who wants to know: rank `rank` of communicator `uid`, in its call `entry`."""

    round: int
    uid: str
    rank: int
    entry: int
    host: str
    pid: int


class Answers(NamedTuple):
    """What the reporter judges.

    records  of all processes that answered, and of those that others answered for; of each one the last
    silent   members of the question's communicator and of the job that nobody answered for
    ends     of processes that told it, the first ones
    job      the uid of the job: of the first communicator of the process that judges
    """

    question: Question
    records: list[ProcessRecord]
    silent: list[Member]
    ends: list[ProcessRecord]
    job: str = ""


class News(NamedTuple):
    """What a poll brought.

    question  to be answered, by `Exchange.answer`
    verdict   on what this process raised an alarm about; "" while there is none
    given_up  why there will be none; "" otherwise. What is known on this machine is then all there is to judge.
    """

    question: Question | None = None
    verdict: str = ""
    given_up: str = ""


class _Alarm:
    """What this process has raised, and waits for."""

    def __init__(self, question: Question, reporter: bool) -> None:
        self.question = question
        self.reporter = reporter
        self.since = time.monotonic()
        self.polls = 0  # since it was raised, or since this process is the reporter
        self.attempt = 0
        self.members: list[Member] | None = None
        self.seen = 0  # lines of answers
        self.records: dict[tuple[str, str, int], ProcessRecord] = {}


class Exchange:
    """One process's part. `poll` is called by the watchdog when it is `due`; no method takes longer than about two
    seconds, however the store is. A forked child cannot use it."""

    def __init__(self, store: Any, host: str, pid: int, machine: str, judge: Callable[[Answers], str]) -> None:
        self.host, self.pid, self.machine = host, pid, machine
        self.judge, self.store = judge, store
        self.serves = False  # whether the store goes with this process
        self._told: set[tuple[str, str, int, str, str]] = set()  # whose ends it has told
        self._ends: list[str] = []  # that were told, when last read
        self._reach = Reach(store)
        self._roster: list[tuple[str, str]] = []  # (uid, line), not yet told
        self._enrols = not getattr(store, "quiet", False)
        self._job = ""  # the first communicator of this process at this store
        self._rounds = 0  # how many questions there have been
        self._alarm: _Alarm | None = None
        self._polled_at = 0.0
        self._answered = 0  # the last round answered, when, and with which call of each (communicator, rank)
        self._answered_at = 0.0
        self._covered: dict[tuple[str, int], int] = {}
        self._lock = threading.Lock()  # of the roster, to which threads of the program add

    @property
    def out_of_reach(self) -> str:
        """Why the store cannot be asked; "" if it can."""
        return self._reach.reason

    def enrol(self, uid: str, rank: int) -> None:
        """This process has rank `rank` of a communicator. Told with the next poll, so this takes no time."""
        with self._lock:
            self._job = self._job or uid
            if self._enrols:
                self._roster.append((uid, json.dumps([rank, self.host, self.pid, self.machine])))

    @property
    def due(self) -> bool:
        """Whether it is time to poll again. The watchdog looks more often, which costs the store nothing."""
        return time.monotonic() - self._polled_at >= (WAITING_SECONDS if self._alarm else QUIET_SECONDS)

    def poll(self) -> News:
        """What is new. One operation if nothing is."""
        self._polled_at = time.monotonic()
        with self._lock:
            roster, self._roster = self._roster, []
        alarm = self._alarm
        try:
            rounds, question, verdict = self._reach.do(lambda store: self._look(store, roster, alarm))
        except OutOfReach as error:
            with self._lock:
                self._roster = roster + self._roster  # told twice if it was only late
            return News(given_up=self._wait_in_vain(str(error)))
        self._rounds = rounds
        news = News(_question(question, rounds), verdict[:_TEXT_BYTES])
        if alarm is None:
            return news
        if news.verdict:
            self._alarm = None
            return news
        return self._report(alarm, news) if alarm.reporter else self._listen(alarm, news)

    def answer(self, question: Question, records: list[ProcessRecord]) -> None:
        """Say where this process is, and those on its machine that cannot say so themselves: `records`, of them all."""
        answers = [_line(trimmed(record, question.uid), _LINE_BYTES) for record in records]
        text = "\n".join(answer for answer in answers if answer)
        own = [comm for record in records if record.pid == self.pid for comm in record.comms if comm.calls]
        try:
            self._reach.do(lambda store: append(store, f"watch/answers/{question.round}", text))
        except OutOfReach:
            return
        self._answered, self._answered_at = question.round, time.monotonic()
        self._covered = {(comm.uid, comm.rank): comm.calls[-1].entry for comm in own}

    def raise_alarm(self, uid: str, rank: int, entry: int) -> bool:
        """This process is stuck, with rank `rank` of communicator `uid` in call `entry`: ask all where they are.

        Once for a call. While a verdict is awaited it does nothing, and a question of another process that was answered
        from within this call will do. False if the store is out of reach: nobody was asked."""
        if self._alarm is not None:
            return True
        if time.monotonic() - self._answered_at < FRESH_SECONDS and entry <= self._covered.pop((uid, rank), -1):
            self._alarm = _Alarm(self._ask(self._answered, uid, rank, entry), reporter=False)
            return True
        question = self._ask(self._rounds + 1, uid, rank, entry)
        try:
            reporter = self._reach.do(lambda store: _raise(store, question))
        except OutOfReach:
            return False
        self._alarm = _Alarm(question, reporter)
        return True

    def tell_end(self, record: ProcessRecord) -> None:
        """This process ends, as `record.end` and `record.end_site` say, with communicators that others may wait at; or
        another one of its machine, which cannot say so. What was told is not told again."""
        known = (*_who(record), record.state, record.end)
        if known in self._told:
            return
        self._told.add(known)
        line = _line(trimmed(replace(record, stack="", command=""), "", limit=_END_BYTES), _LINE_BYTES)

        def tell(store: Any) -> None:
            if line and store.add("watch/ends/told", 1) <= _MOST_ENDS:
                append(store, "watch/ends", line)

        try:
            self._reach.do(tell)
        except OutOfReach:
            return

    def ends(self) -> list[ProcessRecord]:
        """Processes of which it was told how they ended, the first ones, each once; [] if the store is out of reach."""
        try:
            self._ends = self._reach.do(self._read_ends)
        except OutOfReach:
            return []
        return _newest(_records(self._ends))

    def _read_ends(self, store: Any) -> list[str]:
        """One operation if none is new."""
        told = min(store.add("watch/ends/told", 0), _MOST_ENDS)
        return self._ends if told == len(self._ends) else lines(store, "watch/ends")

    def linger(self, uid: str, others: set[int], seconds: float) -> None:
        """Before the store goes with this process: let these ranks of a communicator, on other machines, read what was
        told, until they have ended, too. At most so long."""
        end = time.monotonic() + seconds
        while others and not self._reach.reason and time.monotonic() < end:
            ended = [comm for one in self.ends() if one.state == DEAD for comm in one.comms]
            others = others - {comm.rank for comm in ended if uid in (comm.uid, *comm.aliases)}
            time.sleep(_LINGER_POLL_SECONDS if others else 0)

    def close(self) -> None:
        """Ask and tell no more. To be called before the interpreter ends."""
        self._reach.close()

    # Polls

    def _look(self, store: Any, roster: list[tuple[str, str]], alarm: _Alarm | None) -> tuple[int, str, str]:
        """(number of questions so far, the text of the last one if it is new, the verdict if there is one)."""
        for uid in dict.fromkeys(uid for uid, _ in roster):
            append(store, f"watch/roster/{uid}", "\n".join(line for other, line in roster if other == uid))
        rounds = store.add("watch/rounds", 0)
        # Only the last one: whoever asked before has long stopped waiting for an answer.
        question = _read_if_there(store, f"watch/question/{rounds}") if rounds > self._rounds else ""
        verdict = _read_if_there(store, f"watch/verdict/{alarm.question.round}") if alarm else ""
        return rounds, question, verdict

    def _listen(self, alarm: _Alarm, news: News) -> News:
        """Wait for the verdict; if it does not come, try to become the reporter."""
        alarm.polls += 1
        if alarm.polls < PATIENCE_POLLS * (alarm.attempt + 1):
            return news
        alarm.attempt += 1
        if alarm.attempt > ATTEMPTS:
            self._alarm = None
            return news._replace(given_up="the processes that were to judge the answers have not done so")
        asked = self._rounds >= alarm.question.round  # else the first reporter ended before it had asked
        try:
            alarm.reporter = self._reach.do(lambda store: _take_over(store, alarm, asked))
        except OutOfReach:
            return news
        if not alarm.reporter:
            return news
        alarm.polls = ANSWER_POLLS if asked else 0
        return self._report(alarm, news)

    def _report(self, alarm: _Alarm, news: News) -> News:
        """Read the answers; judge once all are there, or time is up."""
        alarm.polls += 1
        try:
            members, answers, ends = self._reach.do(lambda store: self._collect(store, alarm))
        except OutOfReach as error:
            return news._replace(given_up=self._wait_in_vain(str(error)))
        alarm.members = members
        for record in _records(answers[alarm.seen :]):
            alarm.records[_who(record)] = record
        alarm.seen = len(answers)
        ended = _newest(_records(ends))
        answered = alarm.records.keys() | {_who(record) for record in ended}
        silent = [one for one in members if (one.machine, one.host, one.pid) not in answered]
        if (silent or not members) and alarm.polls < ANSWER_POLLS:
            return news
        self._alarm = None
        text = self._judge(Answers(alarm.question, list(alarm.records.values()), silent, ended, self._job))
        return news._replace(verdict=text)

    def _judge(self, answers: Answers) -> str:
        try:
            text = self.judge(answers) or "no process has a record of this communicator"
        except Exception as error:  # the others wait for it
            text = f"the answers could not be judged: {type(error).__name__}: {error}"
        text = printable(text[:_TEXT_BYTES], lines=True)
        with contextlib.suppress(OutOfReach):  # this process has it
            self._reach.do(lambda store: store.set(f"watch/verdict/{answers.question.round}", text))
        return text

    def _collect(self, store: Any, alarm: _Alarm) -> tuple[list[Member], list[str], list[str]]:
        members = alarm.members
        if members is None:
            uids = dict.fromkeys([alarm.question.uid, self._job])
            members = [one for uid in uids for one in _members(uid, lines(store, f"watch/roster/{uid}"))]
        return members, lines(store, f"watch/answers/{alarm.question.round}")[:_MOST_LINES], lines(store, "watch/ends")

    def _wait_in_vain(self, reason: str) -> str:
        """`reason` once, when an alarm has waited long enough for a store that is out of reach."""
        alarm = self._alarm
        if alarm is None:
            return ""
        alarm.polls += 1
        if alarm.polls < ANSWER_POLLS:
            return ""
        self._alarm = None
        return reason

    def _ask(self, number: int, uid: str, rank: int, entry: int) -> Question:
        return Question(number, uid, rank, entry, self.host, self.pid)


def trimmed(record: ProcessRecord, uid: str, limit: int = 0) -> ProcessRecord:
    """What matters of a record, as JSON in at most so many bytes: communicator `uid` ("": each) and those that live,
    their oldest calls under way and their last ones, the inner end of the stack."""
    comms = sorted(record.comms, key=lambda comm: (comm.uid != uid, bool(comm.ended)))
    limit = limit or min(_ANSWER_BYTES[0] + _ANSWER_BYTES[1] * len(comms), _LINE_BYTES)
    stack = record.stack[-2048:]
    calls, short = _CALLS, record
    while calls:
        kept = [_shortened(comm, calls if uid in ("", comm.uid) else min(calls, _FEW)) for comm in comms]
        short = replace(record, comms=kept, stack=stack[-256 * calls :], command=record.command[:200])
        if len(json.dumps(to_json(short))) <= limit:
            return short
        calls //= 2
    while short.comms and len(json.dumps(to_json(short))) > limit:
        short = replace(short, comms=short.comms[: len(short.comms) // 2], stack="")
    return short


def _shortened(comm: CommRecord, most: int) -> CommRecord:
    """With the oldest call that is under way, and the last ones, groups of messages whole."""
    first = max(len(comm.calls) - most, 0)
    while first and len(comm.calls) - first < _MOST_TOGETHER and _together(*comm.calls[first - 1 : first + 1]):
        first -= 1
    last: list[CallRecord] = comm.calls[first:]
    under_way = next((call for call in comm.calls if call.state not in (COMPLETED, FAILED)), None)
    if under_way is not None and under_way not in last:
        last = [under_way, *last[1:]]
    return replace(comm, calls=last, cut=first > 0 and most <= _FEW)


def _together(one: CallRecord, other: CallRecord) -> bool:
    return bool(one.group) and one.group == other.group and not one.number and not other.number


# What is at the store


def _raise(store: Any, question: Question) -> bool:
    """Whether this process is the one that asks."""
    if store.add(f"watch/raise/{question.round}", 1) > 1:
        return False
    _put(store, question)
    return True


def _take_over(store: Any, alarm: _Alarm, asked: bool) -> bool:
    if store.add(f"watch/report/{alarm.question.round}/{alarm.attempt}", 1) > 1:
        return False
    if not asked:
        _put(store, alarm.question)
    return True


def _put(store: Any, question: Question) -> None:
    store.set(f"watch/question/{question.round}", json.dumps(question[1:]))
    store.add("watch/rounds", 1)  # after it, so that who sees the number finds the question


def _read_if_there(store: Any, key: str) -> str:
    return read(store, key) if store.check([key]) else ""


def _line(record: ProcessRecord, limit: int) -> str:
    text = json.dumps(to_json(record))
    return text if len(text) <= limit else ""


def _who(record: ProcessRecord) -> tuple[str, str, int]:
    return record.machine, record.host, record.pid


# What may be anything


def _values(text: str, *kinds: type) -> list[Any] | None:
    """A JSON list of values of these types; None for anything else."""
    try:
        values = json.loads(text) if len(text) <= _LINE_BYTES else None
        if isinstance(values, list) and len(values) == len(kinds):
            return [checked("a value", kind.__name__, value) for kind, value in zip(kinds, values, strict=True)]
    except (ValueError, RecursionError):
        pass
    return None


def _question(text: str, number: int) -> Question | None:
    values = _values(text, str, int, int, str, int)
    return Question(number, *values) if values else None


def _members(uid: str, found: Iterable[str]) -> list[Member]:
    members = (_values(line, int, str, int, str) for line in found)
    return list(
        dict.fromkeys(Member(rank, host, pid, machine, uid) for rank, host, pid, machine in filter(None, members))
    )


def _newest(found: list[ProcessRecord]) -> list[ProcessRecord]:
    """Of each process the last record, but none from before its end."""
    newest: dict[tuple[str, str, int], ProcessRecord] = {}
    for one in found:
        before = newest.get(_who(one))
        if before is None or one.state == DEAD or before.state != DEAD:
            newest[_who(one)] = one
    return list(newest.values())


def _records(found: list[str]) -> list[ProcessRecord]:
    records = []
    for line in found[:_MOST_LINES]:
        try:
            if len(line) <= _LINE_BYTES:
                records.append(from_json(json.loads(line)))
        except (ValueError, RecursionError):
            continue
    return records
