"""Stuck processes query all others through a store, even if processes or the store exit or stop answering."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from gate import Gate
from stores import CountingStore

from pynccl.bindings import workers
from pynccl.watch import cross_node, exit_hooks, recorder
from pynccl.watch.cross_node import Exchange, trimmed
from pynccl.watch.layout import CommEnd
from pynccl.watch.records import DEAD, INSIDE, CallRecord, CommRecord, ProcessRecord, from_json, to_json

SOON = 20.0  # seconds within which everything completes, even on a busy machine
WORLD = "world"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set long timeouts, as the machine may be busy, and check for answers often."""
    monkeypatch.setattr("pynccl.watch.store.OPERATION_SECONDS", SOON)
    for name, seconds in (("ANSWER_SECONDS", SOON), ("VERDICT_SECONDS", SOON), ("WAITING_SECONDS", 0.02)):
        monkeypatch.setattr(cross_node, name, seconds)


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Process:
    """A process whose watchdog is driven by hand. entered: number of calls it has made."""

    def __init__(self, store: Any, rank: int, entered: int, size: int = 1) -> None:
        self.store = CountingStore(store)
        self.rank, self.entered = rank, entered
        self.exchange = Exchange(self.store, WORLD, size)
        self.queries = 0
        self.report = ""

    def record(self, end: str = "", state: str = "running") -> ProcessRecord:
        call = CallRecord(self.entered, self.entered, "all_reduce", state=INSIDE)
        comm = CommRecord(WORLD, WORLD, self.rank, 256, entered=self.entered, calls=[call])
        return ProcessRecord(1000 + self.rank, "node", state=state, comms=[comm], end=end, stack="line\n" * 10000)

    def records(self, *others: ProcessRecord) -> list[ProcessRecord]:
        self.queries += 1
        return [self.record(), *others]

    def poll(self, *others: ProcessRecord) -> None:
        self.exchange.answer(lambda: self.records(*others))

    def stuck(self, since: float = math.inf) -> threading.Thread:
        """Let its watchdog find a call that does not return, and report why, in a thread."""

        def find_reason() -> None:
            self.report = self.exchange.verdict(
                since, self.records, lambda answers: self.exchange.unreachable or verdict(answers)
            )

        thread = threading.Thread(target=find_reason)
        thread.start()
        return thread


def verdict(answers: list[ProcessRecord]) -> str:
    """Return which ranks are behind the furthest rank, and which have answered."""
    entered = {comm.rank: comm.entered for record in answers for comm in record.comms}
    behind = [str(rank) for rank, n in sorted(entered.items()) if n < max(entered.values())]
    return f"missing {' '.join(behind)}; answers from {' '.join(map(str, sorted(entered)))}"


def job(store: Any, entered: list[int]) -> list[Process]:
    processes = [Process(store, rank, n, len(entered)) for rank, n in enumerate(entered)]
    for process in processes:
        process.poll()
    return processes


def report(stuck: list[Process], others: Sequence[Process] = (), since: float = math.inf) -> None:
    """Let the `stuck` processes report why, while the watchdogs of the others poll."""
    threads = [process.stuck(since) for process in stuck]
    while any(thread.is_alive() for thread in threads):
        for process in others:
            process.poll()
        time.sleep(0.02)


def test_all_stuck_ranks_report_the_missing_rank(server: dist.TCPStore) -> None:
    processes = job(server, [41, 41, 41, 40])
    report(processes[:3], processes[3:])
    assert [process.report for process in processes] == ["missing 3; answers from 0 1 2 3"] * 3 + [""]
    assert [process.queries for process in processes] == [1] * 4
    # A second query gets new answers.
    processes[3].entered = 42
    report(processes[:1], processes[1:])
    assert processes[0].report == "missing 0 1 2; answers from 0 1 2 3"
    assert [process.queries for process in processes] == [2] * 4


def test_an_idle_poll_is_one_store_operation_at_any_world_size() -> None:
    for n in (4, 64):
        processes = job(dist.HashStore(), [7] * n)
        assert {process.store.total() for process in processes} == {1}


def test_a_rank_stuck_after_answering_waits_for_the_same_verdict(server: dist.TCPStore) -> None:
    """It starts no query of its own, whose answers the first querying rank would never see."""
    first, second, late = job(server, [2, 2, 1])
    began = time.monotonic()
    thread = first.stuck()
    while not second.queries:
        second.poll()
    report([second], [late], began)
    thread.join()
    assert [process.report for process in (first, second)] == ["missing 2; answers from 0 1 2"] * 2
    assert (second.queries, late.queries) == (1, 1)
    # A call that began after the answer is a different one, and gets its own query.
    report([second], [first, late], time.monotonic())
    assert late.queries == 2


def test_a_rank_without_an_answer_is_judged_by_records_from_its_node_alone(
    server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = job(server, [5, 5, 4])
    thread = processes[0].stuck()
    while not processes[1].queries:
        processes[1].poll(processes[2].record())
    thread.join()
    assert processes[0].report == "missing 2; answers from 0 1 2"
    monkeypatch.setattr(cross_node, "ANSWER_SECONDS", 1.0)
    report(processes[:1])
    assert processes[0].report == "missing ; answers from 0"
    # A rank does not wait for the verdict of a process that has exited.
    monkeypatch.setattr(cross_node, "VERDICT_SECONDS", 1.0)
    gone, waits = job(dist.HashStore(), [5, 5])
    assert gone.exchange.ask() == (1, True)
    report([waits])
    assert waits.report == "missing ; answers from 1"


def test_each_exit_is_reported_once_and_the_number_of_reports_is_bounded(server: dist.TCPStore) -> None:
    process, other, third = (Process(server, rank, 5) for rank in range(3))
    third.exchange.report_end(other.record("killed", DEAD))  # reported by a process of its node
    for _ in range(2):
        other.exchange.report_end(other.record("ValueError: 1"))  # late
    assert [(record.pid, record.end) for record in process.exchange.reported_ends()] == [(1001, "killed")]
    assert other.store.total() == 2  # a repeated report needs no store operation
    before = process.store.total()
    process.exchange.reported_ends()
    assert process.store.total() == before + 1
    for rank in range(10, 200):
        sender = Process(server, rank, 5)
        sender.exchange.report_end(sender.record("ValueError: 2"))
    assert 60 < len(process.exchange.reported_ends()) <= cross_node._MAX_ENDS
    assert len(server.get("watch/ends")) < 200_000


def test_a_large_record_is_trimmed_to_the_relevant_calls() -> None:
    calls = [CallRecord(n, n, "all_reduce", site="a.py:1" * 20) for n in range(1, 2001)]
    calls[1000].state = INSIDE
    comms = [CommRecord(f"c{i}", "x", 0, 2, calls=list(calls), ended=CommEnd(i % 2)) for i in range(100)]
    record = ProcessRecord(1, "h", stack="line\n" * 10000 + "inner", comms=comms)
    short = trimmed(record)
    assert len(json.dumps(to_json(short))) < 128 * 1024
    assert not short.comms[0].ended and [call.number for call in short.comms[0].calls] == [1001, 2000]
    assert short.stack.endswith("inner") and len(record.comms) == 100 and len(calls) == 2000
    # With few communicators, more calls are kept, and all calls of a group of messages.
    group = [CallRecord(1990 + n, 0, "send", group=4) for n in range(11)]
    few = trimmed(ProcessRecord(1, "h", comms=[CommRecord("a", "x", 0, 2, calls=part) for part in (calls, group)]))
    assert [len(comm.calls) for comm in few.comms] == [8, 11]
    assert from_json(json.loads(json.dumps(to_json(few)))) == few


# Failures of the store


class HangingStore:
    """A store that does not answer until `go` is set."""

    def __init__(self) -> None:
        self.store, self.go = dist.HashStore(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def add(self, key: str, amount: int) -> int:
        self.go.wait(SOON)
        return self.store.add(key, amount)


def test_lingering_is_part_of_the_end_of_the_process(monkeypatch: pytest.MonkeyPatch, own: recorder.Recorder) -> None:
    monkeypatch.setattr(workers, "_exit", workers.Clock(0.1))
    monkeypatch.setattr(exit_hooks, "_LINGER_SECONDS", 2 * SOON)
    own.exchange, started = Exchange(dist.HashStore(), WORLD, 2), time.monotonic()
    own.exchange.serves = True
    exit_hooks._linger(own)  # nobody else ends
    assert time.monotonic() - started < SOON


def test_a_hanging_store_delays_no_rank_and_is_used_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pynccl.watch.store.OPERATION_SECONDS", 0.2)
    store = HangingStore()
    process, other = job(store, [5, 4])
    report([process])
    process.exchange.report_end(process.record("exit"))
    process.exchange.linger(60)
    assert process.report == process.exchange.unreachable == "the rendezvous store did not answer within 0.2 s"
    store.go.set()
    monkeypatch.setattr("pynccl.watch.store.OPERATION_SECONDS", SOON)
    while process.exchange.unreachable:
        process.poll()
    report([process], [other])
    assert process.report == "missing 1; answers from 0 1"


def test_the_report_says_that_the_store_is_unreachable(server: dist.TCPStore) -> None:
    gate = Gate(server.port)
    theirs = dist.TCPStore("127.0.0.1", gate.port, is_master=False, timeout=timedelta(seconds=300))
    process = Process(dist.PrefixStore("job", theirs), 0, 5, size=2)
    process.poll()
    thread = process.stuck()
    while not process.queries:
        time.sleep(0.01)
    gate.close()
    thread.join(SOON)
    assert process.report.startswith(f"the rendezvous store (127.0.0.1:{gate.port}) is unreachable: ")
    assert process.exchange.ask() == (0, False) and process.exchange.reported_ends() == []


HOSTILE = ["", "[", "{}", "null", '{"pid": "x", "host": 1}', "[" * 100000, '"\ud800"', "\x00\xff", "9" * 5000]
HOSTILE += ['{"pid": 1, "host": "h", "now": ' + "9" * 400 + "}"]


def test_invalid_data_in_the_store_is_ignored() -> None:
    store: Any = dist.HashStore()
    processes = job(store, [5, 5, 4])
    for text in HOSTILE:
        for key in ("watch/ends", "watch/where/1"):
            store.append(key, text.encode(errors="surrogatepass") + b"\n")
        store.add("watch/ends/reported", 1)
    report(processes[:1], processes[1:])
    assert processes[0].report == "missing 2; answers from 0 1 2" and processes[0].exchange.reported_ends() == []
