"""Processes that are stuck ask all others where they are, through a store, whatever ends or falls silent meanwhile."""

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
from stores import Counted

from pynccl.watch import cross_node
from pynccl.watch.cross_node import Exchange, trimmed
from pynccl.watch.records import DEAD, INSIDE, CallRecord, CommRecord, ProcessRecord, from_json, to_json

SOON = 20.0  # seconds in which all of it is over, however busy the machine
WORLD = "world"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is given up because the machine is busy, and answers are looked for often."""
    monkeypatch.setattr("pynccl.watch.store.OPERATION_SECONDS", SOON)
    for name, seconds in (("ANSWER_SECONDS", SOON), ("VERDICT_SECONDS", SOON), ("WAITING_SECONDS", 0.02)):
        monkeypatch.setattr(cross_node, name, seconds)


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Process:
    """What the watchdog of one process does, by hand. `entered`: how many calls it has made."""

    def __init__(self, store: Any, rank: int, entered: int, size: int = 1) -> None:
        self.store = Counted(store)
        self.rank, self.entered = rank, entered
        self.exchange = Exchange(self.store, WORLD, size)
        self.asked = 0
        self.said = ""

    def record(self, end: str = "", state: str = "running") -> ProcessRecord:
        call = CallRecord(self.entered, self.entered, "all_reduce", state=INSIDE)
        comm = CommRecord(WORLD, WORLD, self.rank, 64, entered=self.entered, calls=[call])
        return ProcessRecord(1000 + self.rank, "node", state=state, comms=[comm], end=end, stack="line\n" * 10000)

    def records(self, *others: ProcessRecord) -> list[ProcessRecord]:
        self.asked += 1
        return [self.record(), *others]

    def poll(self, *others: ProcessRecord) -> None:
        self.exchange.answer(lambda: self.records(*others))

    def stuck(self, since: float = math.inf) -> threading.Thread:
        """Its watchdog finds a call that does not return, and says why."""

        def report() -> None:
            self.said = self.exchange.verdict(
                since, self.records, lambda answers: self.exchange.out_of_reach or verdict(answers)
            )

        thread = threading.Thread(target=report)
        thread.start()
        return thread


def verdict(answers: list[ProcessRecord]) -> str:
    """Who is behind the furthest rank, and who has answered."""
    entered = {comm.rank: comm.entered for record in answers for comm in record.comms}
    behind = [str(rank) for rank, n in sorted(entered.items()) if n < max(entered.values())]
    return f"missing {' '.join(behind)}; heard {' '.join(map(str, sorted(entered)))}"


def job(store: Any, entered: list[int]) -> list[Process]:
    processes = [Process(store, rank, n, len(entered)) for rank, n in enumerate(entered)]
    for one in processes:
        one.poll()
    return processes


def report(stuck: list[Process], others: Sequence[Process] = (), since: float = math.inf) -> None:
    """These find that they are stuck, while the watchdogs of the others look; until they have said why."""
    threads = [one.stuck(since) for one in stuck]
    while any(thread.is_alive() for thread in threads):
        for one in others:
            one.poll()
        time.sleep(0.02)


def test_all_that_are_stuck_hear_who_is_missing(server: dist.TCPStore) -> None:
    processes = job(server, [41, 41, 41, 40])
    report(processes[:3], processes[3:])
    assert [one.said for one in processes] == ["missing 3; heard 0 1 2 3"] * 3 + [""]
    assert [one.asked for one in processes] == [1] * 4
    # Another question is answered anew.
    processes[3].entered = 42
    report(processes[:1], processes[1:])
    assert processes[0].said == "missing 0 1 2; heard 0 1 2 3"
    assert [one.asked for one in processes] == [2] * 4


def test_a_quiet_poll_is_one_operation_in_a_job_of_any_size() -> None:
    for n in (4, 64):
        processes = job(dist.HashStore(), [7] * n)
        assert {one.store.total() for one in processes} == {1}


def test_a_rank_that_gets_stuck_after_it_has_answered_waits_for_that_verdict(server: dist.TCPStore) -> None:
    """And asks no question of its own, whose answers the first one who asked would never see."""
    first, second, late = job(server, [2, 2, 1])
    began = time.monotonic()
    thread = first.stuck()
    while not second.asked:
        second.poll()
    report([second], [late], began)
    thread.join()
    assert [one.said for one in (first, second)] == ["missing 2; heard 0 1 2"] * 2
    assert (second.asked, late.asked) == (1, 1)
    # A call that began after the answer is another one: of that a question of its own.
    report([second], [first, late], time.monotonic())
    assert late.asked == 2


def test_who_does_not_answer_is_judged_without_but_for_what_another_of_its_machine_says(
    server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = job(server, [5, 5, 4])
    thread = processes[0].stuck()
    while not processes[1].asked:
        processes[1].poll(processes[2].record())
    thread.join()
    assert processes[0].said == "missing 2; heard 0 1 2"
    monkeypatch.setattr(cross_node, "ANSWER_SECONDS", 1.0)
    report(processes[:1])
    assert processes[0].said == "missing ; heard 0"
    # Nor is a verdict waited for whose judge has gone.
    monkeypatch.setattr(cross_node, "VERDICT_SECONDS", 1.0)
    gone, waits = job(dist.HashStore(), [5, 5])
    assert gone.exchange.ask() == (1, True)
    report([waits])
    assert waits.said == "missing ; heard 1"


def test_of_each_process_the_last_word_about_its_end_is_told_once_and_of_many_the_first(server: dist.TCPStore) -> None:
    one, other, third = (Process(server, rank, 5) for rank in range(3))
    third.exchange.tell_end(other.record("killed", DEAD))  # by one of its machine
    for _ in range(2):
        other.exchange.tell_end(other.record("ValueError: 1"))  # late
    assert [(record.pid, record.end) for record in one.exchange.ends()] == [(1001, "killed")]
    assert other.store.total() == 2  # again is no operation
    before = one.store.total()
    one.exchange.ends()
    assert one.store.total() == before + 1
    for rank in range(10, 200):
        many = Process(server, rank, 5)
        many.exchange.tell_end(many.record("ValueError: 2"))
    assert 60 < len(one.exchange.ends()) <= cross_node._MOST_ENDS
    assert len(server.get("watch/ends")) < 200_000


def test_a_large_record_is_trimmed_to_what_matters() -> None:
    calls = [CallRecord(n, n, "all_reduce", site="a.py:1" * 20) for n in range(1, 2001)]
    calls[1000].state = INSIDE
    comms = [CommRecord(f"c{i}", "x", 0, 2, calls=list(calls), ended="destroyed" if i % 2 else "") for i in range(100)]
    record = ProcessRecord(1, "h", stack="line\n" * 10000 + "inner", comms=comms)
    short = trimmed(record)
    assert len(json.dumps(to_json(short))) < 128 * 1024
    assert not short.comms[0].ended and [call.number for call in short.comms[0].calls] == [1001, 2000]
    assert short.stack.endswith("inner") and len(record.comms) == 100 and len(calls) == 2000
    # Of few communicators more, and a group of messages whole.
    group = [CallRecord(1990 + n, 0, "send", group=4) for n in range(11)]
    few = trimmed(ProcessRecord(1, "h", comms=[CommRecord("a", "x", 0, 2, calls=one) for one in (calls, group)]))
    assert [len(comm.calls) for comm in few.comms] == [8, 11]
    assert from_json(json.loads(json.dumps(to_json(few)))) == few


# What is wrong with the store


class Silent:
    """A store that is silent while `go` is not set."""

    def __init__(self) -> None:
        self.store, self.go = dist.HashStore(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def add(self, key: str, amount: int) -> int:
        self.go.wait(SOON)
        return self.store.add(key, amount)


def test_a_silent_store_holds_nobody_up_and_is_in_reach_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pynccl.watch.store.OPERATION_SECONDS", 0.2)
    store = Silent()
    one, other = job(store, [5, 4])
    report([one])
    one.exchange.tell_end(one.record("exit"))
    one.exchange.linger(60)
    assert one.said == one.exchange.out_of_reach == "the store at which the ranks met did not answer within 0.2 s"
    store.go.set()
    monkeypatch.setattr("pynccl.watch.store.OPERATION_SECONDS", SOON)
    while one.exchange.out_of_reach:
        one.poll()
    report([one], [other])
    assert one.said == "missing 1; heard 0 1"


def test_a_store_that_ends_is_noticed_and_the_alarm_given_up(server: dist.TCPStore) -> None:
    gate = Gate(server.port)
    theirs = dist.TCPStore("127.0.0.1", gate.port, is_master=False, timeout=timedelta(seconds=300))
    one = Process(dist.PrefixStore("job", theirs), 0, 5, size=2)
    one.poll()
    thread = one.stuck()
    while not one.asked:
        time.sleep(0.01)
    gate.close()
    thread.join(SOON)
    assert one.said.startswith(f"the store at which the ranks met (127.0.0.1:{gate.port}) is lost: ")
    assert one.exchange.ask() == (0, False) and one.exchange.ends() == []


HOSTILE = ["", "[", "{}", "null", '{"pid": "x", "host": 1}', "[" * 100000, '"\ud800"', "\x00\xff", "9" * 5000]
HOSTILE += ['{"pid": 1, "host": "h", "now": ' + "9" * 400 + "}"]


def test_a_store_with_anything_in_it_does_no_harm() -> None:
    store: Any = dist.HashStore()
    processes = job(store, [5, 5, 4])
    for text in HOSTILE:
        for key in ("watch/ends", "watch/where/1"):
            store.append(key, text.encode(errors="surrogatepass") + b"\n")
        store.add("watch/ends/told", 1)
    report(processes[:1], processes[1:])
    assert processes[0].said == "missing 2; heard 0 1 2" and processes[0].exchange.ends() == []
