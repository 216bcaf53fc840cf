"""Ranks on several machines say where they are, through the store that bootstrap used, and how they ended.

watch/asked           how many questions there are: the one key that every process reads once a second
watch/asks/NUMBER     how many ask that question: those that are stuck at the same time ask one
watch/where/NUMBER    the records of all processes, a line each
watch/verdict/NUMBER  of who asked first: of 1,024 ranks, not all read the records of all
watch/ends            the records of those that have ended, a line each; watch/ends/told: how many
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .records import COMPLETED, DEAD, FAILED, CallRecord, CommRecord, ProcessRecord, from_json, to_json
from .store import Reach, append, lines, read

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
    """One process's part in what the ranks that share a store tell each other.

    uid, size  of the first communicator that met at this store: its ranks are asked
    serves     whether the store goes with this process"""

    def __init__(self, store: Any, uid: str, size: int) -> None:
        self.store, self.uid, self.size, self.serves = store, uid, size, False
        self._reach = Reach(store)
        self._polled_at = 0.0
        self._seen = 0  # the newest question that was answered, and when
        self._answered_at = 0.0
        self._told: set[tuple[str, ...]] = set()  # whose ends were told by this process
        self._ends: list[str] = []  # that were told, when last read

    @property
    def out_of_reach(self) -> str:
        """Why the store cannot be asked; "" if it can."""
        return self._reach.reason

    @property
    def due(self) -> bool:
        """Whether it is time to look for questions. The watchdog looks more often, which costs the store nothing."""
        return time.monotonic() - self._polled_at >= QUIET_SECONDS

    def answer(self, records: Callable[[], list[ProcessRecord]]) -> None:
        """If there is a new question, put the records of this process there, and of those on its machine that cannot
        answer. One operation of the store if there is none."""
        self._polled_at = time.monotonic()
        asked = self._reach.do(lambda store: int(store.add("watch/asked", 0)), 0)
        if asked <= self._seen:
            return
        text = "\n".join(map(_line, records()))

        def put(store: Any) -> None:
            for number in range(self._seen + 1, asked + 1):  # each has its own judge
                append(store, f"watch/where/{number}", text)

        self._reach.do(put, None)
        self._seen, self._answered_at = asked, time.monotonic()

    def ask(self, since: float = math.inf) -> tuple[int, bool]:
        """Ask all where they are: number of the question, and whether this process is the first to ask it. (0, False)
        if the store is out of reach.

        since  time.monotonic() at which the call began that does not return: a question answered since then is about
               that call, too"""
        if since < self._answered_at and time.monotonic() - self._answered_at < VERDICT_SECONDS:
            return self._seen, False
        number = self._seen + 1

        def ask(store: Any) -> tuple[int, bool]:
            first = int(store.add(f"watch/asks/{number}", 1)) == 1
            if first:
                store.add("watch/asked", 1)
            return number, first

        return self._reach.do(ask, (0, False))

    def answers(self, question: int) -> list[ProcessRecord]:
        """Those so far."""
        return _records(self._reach.do(lambda store: lines(store, f"watch/where/{question}"), []))

    def verdict(
        self,
        since: float,
        records: Callable[[], list[ProcessRecord]],
        judge: Callable[[list[ProcessRecord]], str],
    ) -> str:
        """Ask all where they are, and answer meanwhile. Returns the verdict of who asked first, else `judge(answers)`:
        once all have answered, or time is up."""
        question, first = self.ask(since)
        key = f"watch/verdict/{question}"
        end = time.monotonic() + (ANSWER_SECONDS if first else VERDICT_SECONDS)
        while not self.out_of_reach and time.monotonic() < end:
            self.answer(records)
            if first and len(self._ranks(self.answers(question))) >= self.size:
                break
            if not first and (text := self._reach.do(lambda store: read(store, key) if store.check([key]) else "", "")):
                return text
            time.sleep(WAITING_SECONDS)
        text = judge(self.answers(question))
        if first:
            self._reach.do(lambda store: store.set(key, text), None)
        return text

    def tell_end(self, record: ProcessRecord) -> None:
        """This process ends, as `record.end` and `record.end_site` say, with communicators that others may wait at; or
        another one of its machine, which cannot say so. What was told is not told again."""
        known = (*map(str, identity(record)), record.state, record.end)
        if known in self._told:
            return
        self._told.add(known)
        line = _line(replace(record, stack="", command=""))

        def tell(store: Any) -> None:
            if store.add("watch/ends/told", 1) <= _MOST_ENDS:
                append(store, "watch/ends", line)

        self._reach.do(tell, None)

    def ends(self) -> list[ProcessRecord]:
        """Processes of which it was told how they ended, the first ones, each once; [] if the store is out of reach."""

        def read_new(store: Any) -> list[str]:
            told = min(store.add("watch/ends/told", 0), _MOST_ENDS)
            return self._ends if told == len(self._ends) else lines(store, "watch/ends")

        self._ends = self._reach.do(read_new, [])
        told = sorted(_records(self._ends), key=lambda one: one.state == DEAD)  # of each process the last word
        return list({identity(one): one for one in told}.values())

    def linger(self, seconds: float) -> None:
        """Before the store goes with this process, which has told its end: let the others read there what was told,
        until they have ended, too. At most so long."""
        end = time.monotonic() + seconds
        while not self.out_of_reach and time.monotonic() < end:
            if len(self._ranks([one for one in self.ends() if one.state == DEAD])) >= self.size:
                return
            time.sleep(_LINGER_POLL_SECONDS)

    def _ranks(self, records: list[ProcessRecord]) -> set[int]:
        """Which ranks of the first communicator these are."""
        return {comm.rank for one in records for comm in one.of(self.uid)}

    def close(self) -> None:
        """Ask and tell no more. To be called before the interpreter ends."""
        self._reach.close()


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
        except (ValueError, RecursionError):
            continue
    return records
