"""Exchange records between ranks on several nodes, through the rendezvous store: where they are and how they ended.

watch/asked           number of queries so far: the only key that every process polls once a second
watch/asks/NUMBER     number of processes that sent this query: those that are stuck at the same time share one
watch/where/NUMBER    the records of all processes, one per line
watch/verdict/NUMBER  the verdict of the first process that asked: with 1,024 ranks, not all read all records
watch/ends            the records of processes that have ended, one per line; watch/ends/reported: their number
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .records import COMPLETED, DEAD, FAILED, CallRecord, CommRecord, ProcessRecord, from_json, to_json
from .store import StoreClient, append, lines, read

QUIET_SECONDS = 1.0  # polling interval of a process that waits for nothing
WAITING_SECONDS = 0.5  # polling interval of a process that waits for answers
ANSWER_SECONDS = 2.5  # time limit for answers: ranks that have not answered by then are left out
VERDICT_SECONDS = 4.0  # time limit for another rank's verdict: then this rank judges by itself

_MAX_ENDS = 64  # reported: if all ranks of a large job end, the rest would be megabytes to read
_MAX_CALLS = 8  # sent per communicator, if the process has up to `_FEW_COMMS` of them
_MAX_CALLS_OF_MANY = 2  # sent per communicator, if it has more
_FEW_COMMS, _MAX_COMMS = 3, 512
_MAX_GROUP_CALLS = 32  # a group of up to so many calls is not truncated
_LINGER_POLL_SECONDS = 0.05


class Exchange:
    """The exchange of records between this process and the other ranks that share a store.

    uid, size  of the first communicator created through this store: its ranks are queried
    serves     whether this process serves the store, so that the store ends with it"""

    def __init__(self, store: Any, uid: str, size: int) -> None:
        self.store, self.uid, self.size, self.serves = store, uid, size, False
        self._client = StoreClient(store)
        self._polled_at = 0.0
        self._seen = 0  # the newest query answered by this process, and when
        self._answered_at = 0.0
        self._reported: set[tuple[str, ...]] = set()  # ends reported by this process
        self._end_lines: list[str] = []  # ends reported by all processes, when last read

    @property
    def unreachable(self) -> str:
        """Why the store is unreachable; "" if it is not."""
        return self._client.reason

    @property
    def due(self) -> bool:
        """Whether it is time to poll for queries."""
        return time.monotonic() - self._polled_at >= QUIET_SECONDS

    def answer(self, records: Callable[[], list[ProcessRecord]]) -> None:
        """Answer new queries with the records of this process and of those on its node that cannot answer. Without
        new queries this is one store operation."""
        self._polled_at = time.monotonic()
        asked = self._client.run(lambda store: int(store.add("watch/asked", 0)), 0)
        if asked <= self._seen:
            return
        text = "\n".join(map(_line, records()))

        def put(store: Any) -> None:
            for number in range(self._seen + 1, asked + 1):  # each is judged by a different process
                append(store, f"watch/where/{number}", text)

        self._client.run(put, None)
        self._seen, self._answered_at = asked, time.monotonic()

    def ask(self, since: float = math.inf) -> tuple[int, bool]:
        """Query the records of all ranks. Return the number of the query, and whether this process is the first to send
        it; (0, False) if the store is unreachable.

        since  time.monotonic() at which the hanging call began: a query answered since then covers that call too"""
        if since < self._answered_at and time.monotonic() - self._answered_at < VERDICT_SECONDS:
            return self._seen, False
        number = self._seen + 1

        def ask(store: Any) -> tuple[int, bool]:
            first = int(store.add(f"watch/asks/{number}", 1)) == 1
            if first:
                store.add("watch/asked", 1)
            return number, first

        return self._client.run(ask, (0, False))

    def answers(self, question: int) -> list[ProcessRecord]:
        """Return the answers so far."""
        return _records(self._client.run(lambda store: lines(store, f"watch/where/{question}"), []))

    def verdict(
        self,
        since: float,
        records: Callable[[], list[ProcessRecord]],
        judge: Callable[[list[ProcessRecord]], str],
    ) -> str:
        """Query all ranks, and answer queries meanwhile. Return the verdict of the rank that asked first; else
        `judge(answers)`, once all have answered or the time limit has passed."""
        question, first = self.ask(since)
        key = f"watch/verdict/{question}"
        end = time.monotonic() + (ANSWER_SECONDS if first else VERDICT_SECONDS)
        while not self.unreachable and time.monotonic() < end:
            self.answer(records)
            if first and len(self._ranks(self.answers(question))) >= self.size:
                break
            if not first and (
                text := self._client.run(lambda store: read(store, key) if store.check([key]) else "", "")
            ):
                return text
            time.sleep(WAITING_SECONDS)
        text = judge(self.answers(question))
        if first:
            self._client.run(lambda store: store.set(key, text), None)
        return text

    def report_end(self, record: ProcessRecord) -> None:
        """Report the end of this process, or of one on this node that cannot report it, since others may wait in its
        communicators. `record.end` and `record.end_site` describe it. Each end is reported once."""
        key = (*map(str, identity(record)), record.state, record.end)
        if key in self._reported:
            return
        self._reported.add(key)
        line = _line(replace(record, stack="", command=""))

        def send(store: Any) -> None:
            if store.add("watch/ends/reported", 1) <= _MAX_ENDS:
                append(store, "watch/ends", line)

        self._client.run(send, None)

    def reported_ends(self) -> list[ProcessRecord]:
        """Return the records of the first processes that ended; [] if the store is unreachable."""

        def read_new(store: Any) -> list[str]:
            count = min(store.add("watch/ends/reported", 0), _MAX_ENDS)
            return self._end_lines if count == len(self._end_lines) else lines(store, "watch/ends")

        self._end_lines = self._client.run(read_new, [])
        records = sorted(
            _records(self._end_lines), key=lambda record: record.state == DEAD
        )  # the last report of each process wins
        return list({identity(record): record for record in records}.values())

    def linger(self, seconds: float) -> None:
        """Wait up to `seconds` for the other ranks to end, so that they can read the reported ends. Called after this
        process, which serves the store, has reported its own end."""
        end = time.monotonic() + seconds
        while not self.unreachable and time.monotonic() < end:
            if len(self._ranks([record for record in self.reported_ends() if record.state == DEAD])) >= self.size:
                return
            time.sleep(_LINGER_POLL_SECONDS)

    def _ranks(self, records: list[ProcessRecord]) -> set[int]:
        """Return the ranks of these processes in the first communicator."""
        return {comm.rank for record in records for comm in record.of(self.uid)}

    def close(self) -> None:
        """Stop using the store. Call this before the interpreter exits."""
        self._client.close()


def identity(record: ProcessRecord) -> tuple[str, str, int]:
    """Return a key that is the same in all records of one process."""
    return record.machine, record.host, record.pid


def trimmed(record: ProcessRecord) -> ProcessRecord:
    """Return a record reduced to what other ranks need: of each communicator the last calls and the oldest unfinished
    one, and the innermost part of the stack. With very many communicators, live ones come first."""
    comms = sorted(record.comms, key=lambda comm: bool(comm.ended))[:_MAX_COMMS]
    max_calls = _MAX_CALLS if len(comms) <= _FEW_COMMS else _MAX_CALLS_OF_MANY
    kept = [_shortened(comm, max_calls) for comm in comms]
    return replace(record, comms=kept, stack=record.stack[-2048:], command=record.command[:200])


def _shortened(comm: CommRecord, max_calls: int) -> CommRecord:
    first = max(len(comm.calls) - max_calls, 0)
    while first and len(comm.calls) - first < _MAX_GROUP_CALLS and _same_group(*comm.calls[first - 1 : first + 1]):
        first -= 1  # the calls of a group are judged together
    last: list[CallRecord] = comm.calls[first:]
    unfinished = next((call for call in comm.calls if call.state not in (COMPLETED, FAILED)), None)
    if unfinished is not None and unfinished not in last:
        last = [unfinished, *last[1:]]
    messages = {(call.operation, call.peer): call for call in comm.calls if call.message}  # the newest of each peer
    newest = sorted((call for call in messages.values() if call not in last), key=lambda call: call.entry)
    last = [*newest[-_MAX_GROUP_CALLS:], *last]
    return replace(comm, calls=last, cut=len(newest) > _MAX_GROUP_CALLS)


def _same_group(one: CallRecord, other: CallRecord) -> bool:
    return bool(one.group) and one.group == other.group and not one.number and not other.number


def _line(record: ProcessRecord) -> str:
    return json.dumps(to_json(trimmed(record)))


def _records(found: list[str]) -> list[ProcessRecord]:
    """Parse the lines, and skip those that are not records of this version."""
    records = []
    for line in found:
        try:
            records.append(from_json(json.loads(line)))
        except (ValueError, RecursionError):
            continue
    return records
