"""Ranks on several machines say where they are, through the store that bootstrap used, and how they ended.

A rank that has waited too long raises `watch/asked`, the one key that every process reads once a second; those that
are stuck at the same time ask one question. Each process appends the record of its calls to `watch/where/NUMBER`. Who
asked first judges and puts its verdict there for the others, who judge by themselves if it does not come: of a job of
1,024 ranks, not all read the records of all. `watch/ends` has those that have ended.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from typing import Any

from .records import COMPLETED, DEAD, FAILED, CallRecord, CommRecord, ProcessRecord, from_json, to_json
from .store import OutOfReach, Reach, append, lines, read

QUIET_SECONDS = 1.0  # between two polls of a process that waits for nothing
WAITING_SECONDS = 0.5  # of one that waits for answers
ANSWER_SECONDS = 2.5  # after which who has not answered is judged without
VERDICT_SECONDS = 4.0  # after which who waits for another's verdict judges by itself

_MOST_ENDS = 64  # of a job that ends as a whole, the others would read megabytes
_CALLS, _FEW = 8, 2  # of a communicator, where there are up to `_FEW_COMMS` of them, and where there are more
_FEW_COMMS, _MOST_COMMS = 3, 512
_MOST_TOGETHER = 32  # calls of a group that is kept whole
_LINGER_POLL_SECONDS = 0.05


class Exchange:
    """One process's part. `poll` and `answers` are called by the watchdog when it is `due`; no method takes longer than
    about two seconds, however the store is. A forked child cannot use it.

    serves  whether the store goes with this process"""

    def __init__(self, store: Any) -> None:
        self.store, self.serves = store, False
        self.job, self.size = "", 0  # the first communicator of this process at this store: its ranks are asked
        self._reach = Reach(store)
        self._polled_at = 0.0
        self._seen = 0  # the last question that was read
        self._new: range = range(0)  # questions that this process has not answered
        self._answered_at = 0.0
        self._question, self._asked_at = 0, 0.0  # this process's own, while it waits for answers
        self._judges = 0  # the question that this process was the first to ask
        self._told: set[tuple[str, str, int, str, str]] = set()  # whose ends it has told
        self._ends: list[str] = []  # that were told, when last read

    @property
    def out_of_reach(self) -> str:
        """Why the store cannot be asked; "" if it can."""
        return self._reach.reason

    def enrol(self, uid: str, rank: int, size: int) -> None:
        """This process has a rank of a communicator."""
        if not self.job:
            self.job, self.size = uid, size

    @property
    def due(self) -> bool:
        """Whether it is time to poll again. The watchdog looks more often, which costs the store nothing."""
        return time.monotonic() - self._polled_at >= (WAITING_SECONDS if self._question else QUIET_SECONDS)

    def poll(self) -> bool:
        """Whether there is a question that this process has not answered. One operation of the store."""
        self._polled_at = time.monotonic()
        number = self._do(lambda store: int(store.add("watch/asked", 0)), self._seen)
        self._new, self._seen = range(self._seen + 1, number + 1), number
        return bool(self._new)

    def answer(self, records: list[ProcessRecord]) -> None:
        """Say where this process is, and those on its machine that cannot say so themselves: `records`, of them all."""
        text = "\n".join(_line(record) for record in records)
        for number in self._new:  # of several that were asked since the last poll each has its own judge
            self._do(lambda store, key=f"watch/where/{number}": append(store, key, text), None)
        self._answered_at = time.monotonic()

    def question(self) -> tuple[int, int]:
        """Ask all where they are: number of the question, and again if this process is the first to ask it, else 0.
        (0, 0) if the store is out of reach. From any thread."""
        number = self._seen + 1

        def ask(store: Any) -> bool:
            first = int(store.add(f"watch/asks/{number}", 1)) == 1
            if first:
                store.add("watch/asked", 1)
            return first

        first = self._do(ask, None)
        return (0, 0) if first is None else (number, number if first else 0)

    def heard(self, question: int) -> list[ProcessRecord]:
        """What has been answered so far."""
        return _records(self._do(lambda store: lines(store, f"watch/where/{question}"), []))

    def ask(self, since: float = math.inf) -> bool:
        """Ask all where they are. False if the store is out of reach: nobody was asked.

        since  time.monotonic() at which the call began that does not return. A question that this process has answered
               since then is about that call, too: its verdict is waited for"""
        if not self._question:
            self._asked_at = now = time.monotonic()
            if since < self._answered_at and now - self._answered_at < VERDICT_SECONDS:
                self._question, self._judges = self._seen, 0
            else:
                self._question, self._judges = self.question()
        return bool(self._question)

    def answers(self) -> list[ProcessRecord] | str | None:
        """What the ranks have answered, once all have, or time is up; or the verdict of who asked first. None before,
        and if nothing was asked."""
        if not self._question:
            return None
        key, waited = f"watch/verdict/{self._question}", time.monotonic() - self._asked_at
        if not self._judges and waited < VERDICT_SECONDS:
            text = self._do(lambda store: read(store, key) if store.check([key]) else "", "")
            self._question = 0 if text else self._question
            return text or None
        found = self.heard(self._question)
        heard = {comm.rank for one in found for comm in one.comms if comm.uid == self.job}
        if len(heard) < self.size and waited < ANSWER_SECONDS:
            return None
        self._question = 0
        return found

    def share(self, verdict: str) -> None:
        """The verdict on the answers, for the others that have asked; of who asked first."""
        if self._judges:
            self._do(lambda store: store.set(f"watch/verdict/{self._judges}", verdict), None)

    def tell_end(self, record: ProcessRecord) -> None:
        """This process ends, as `record.end` and `record.end_site` say, with communicators that others may wait at; or
        another one of its machine, which cannot say so. What was told is not told again."""
        known = (*identity(record), record.state, record.end)
        if known in self._told:
            return
        self._told.add(known)
        line = _line(replace(record, stack="", command=""))

        def tell(store: Any) -> None:
            if store.add("watch/ends/told", 1) <= _MOST_ENDS:
                append(store, "watch/ends", line)

        self._do(tell, None)

    def ends(self) -> list[ProcessRecord]:
        """Processes of which it was told how they ended, the first ones, each once; [] if the store is out of reach."""

        def read_new(store: Any) -> list[str]:
            told = min(store.add("watch/ends/told", 0), _MOST_ENDS)
            return self._ends if told == len(self._ends) else lines(store, "watch/ends")

        self._ends = self._do(read_new, [])
        newest: dict[tuple[str, str, int], ProcessRecord] = {}
        for one in _records(self._ends):
            before = newest.get(identity(one))
            if before is None or one.state == DEAD or before.state != DEAD:
                newest[identity(one)] = one
        return list(newest.values())

    def linger(self, uid: str, others: set[int], seconds: float) -> None:
        """Before the store goes with this process: let these ranks of a communicator read what was told, until they
        have ended, too. At most so long."""
        end = time.monotonic() + seconds
        while others and not self._reach.reason and time.monotonic() < end:
            ended = [comm for one in self.ends() if one.state == DEAD for comm in one.comms]
            others = others - {comm.rank for comm in ended if uid in (comm.uid, *comm.aliases)}
            time.sleep(_LINGER_POLL_SECONDS if others else 0)

    def close(self) -> None:
        """Ask and tell no more. To be called before the interpreter ends."""
        self._reach.close()

    def _do(self, calls: Any, otherwise: Any) -> Any:
        """What `calls(store)` returns; `otherwise` if the store is out of reach."""
        try:
            return self._reach.do(calls)
        except OutOfReach:
            return otherwise


def identity(record: ProcessRecord) -> tuple[str, str, int]:
    """The same in all records of one process."""
    return record.machine, record.host, record.pid


def trimmed(record: ProcessRecord) -> ProcessRecord:
    """What others need of a record: the last calls of each communicator and the oldest that is under way, the inner end
    of the stack; of very many communicators those that live."""
    comms = sorted(record.comms, key=lambda comm: bool(comm.ended))[:_MOST_COMMS]
    most = _CALLS if len(comms) <= _FEW_COMMS else _FEW
    kept = [_shortened(comm, most) for comm in comms]
    return replace(record, comms=kept, stack=record.stack[-2048:], command=record.command[:200])


def _shortened(comm: CommRecord, most: int) -> CommRecord:
    first = max(len(comm.calls) - most, 0)
    while first and len(comm.calls) - first < _MOST_TOGETHER and _together(*comm.calls[first - 1 : first + 1]):
        first -= 1  # messages of a group are judged as one
    last: list[CallRecord] = comm.calls[first:]
    under_way = next((call for call in comm.calls if call.state not in (COMPLETED, FAILED)), None)
    if under_way is not None and under_way not in last:
        last = [under_way, *last[1:]]
    return replace(comm, calls=last, cut=first > 0 and most <= _FEW)


def _together(one: CallRecord, other: CallRecord) -> bool:
    return bool(one.group) and one.group == other.group and not one.number and not other.number


def _line(record: ProcessRecord) -> str:
    return json.dumps(to_json(trimmed(record)))


def _records(found: list[str]) -> list[ProcessRecord]:
    """Those lines that are records: another version may have written them."""
    records = []
    for line in found:
        try:
            records.append(from_json(json.loads(line)))
        except (ValueError, OverflowError, RecursionError):
            continue
    return records
