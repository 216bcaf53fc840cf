"""Processes that are stuck ask all others where they are, and read their answers, whatever ends meanwhile."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from gate import Gate
from stores import Counted

from pynccl.watch import across, recorder
from pynccl.watch.across import Exchange, trimmed
from pynccl.watch.diagnosis import meet
from pynccl.watch.records import DEAD, INSIDE, CallRecord, CommRecord, ProcessRecord, from_json, to_json
from pynccl.watch.store import Reach, append, lines
from pynccl.watch.track import Identity, Track

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 0.8  # seconds for an operation in these tests
ANSWER_SECONDS, WAITING_SECONDS = across.ANSWER_SECONDS, across.WAITING_SECONDS  # before they are made shorter below
WITHIN = LIMIT + 0.7  # seconds that a call may take, however the store is
ANSWERED = 1.5  # seconds after which who has not answered is judged without
WORLD = "world"


class Process:
    """What the watchdog of one process does, by hand."""

    def __init__(self, store: Any, rank: int, entered: int, size: int = 1) -> None:
        self.store = Counted(store)
        self.rank, self.entered = rank, entered
        self.exchange = Exchange(self.store, WORLD, size)
        self.asked = 0
        self.said = ""

    def record(self) -> ProcessRecord:
        call = CallRecord(self.entered, self.entered, "all_reduce", state=INSIDE)
        comm = CommRecord(WORLD, WORLD, self.rank, 64, entered=self.entered, calls=[call] if self.entered else [])
        return ProcessRecord(1000 + self.rank, f"node{self.rank}", f"machine{self.rank}", comms=[comm])

    def poll(self, *others: ProcessRecord) -> None:
        def records() -> list[ProcessRecord]:
            self.asked += 1
            return [self.record(), *others]

        self.exchange.answer(records)

    def stuck(self, *others: ProcessRecord, since: float = math.inf) -> threading.Thread:
        """Its watchdog finds a call that does not return, and says why."""

        def records() -> list[ProcessRecord]:
            self.asked += 1
            return [self.record(), *others]

        def judge(answers: list[ProcessRecord]) -> str:
            return self.exchange.out_of_reach or verdict(answers, self.exchange.ends())

        def report() -> None:
            self.said = self.exchange.verdict(since, records, judge)

        thread = threading.Thread(target=report)
        thread.start()
        return thread


def report(stuck: list[Process], others: Sequence[Process] = (), since: float = math.inf) -> None:
    """These find that they are stuck, while the watchdogs of the others look; until they have said why."""
    threads = [one.stuck(since=since) for one in stuck]
    while any(thread.is_alive() for thread in threads):
        poll(list(others))
        time.sleep(0.02)


def verdict(answers: list[ProcessRecord], ends: list[ProcessRecord]) -> str:
    """Who is behind the furthest rank, and who has answered."""
    entered = {comm.rank: comm.entered for record in answers for comm in record.comms}
    behind = [str(rank) for rank, n in sorted(entered.items()) if n < max(entered.values())]
    said = [f"missing {' '.join(behind)}", f"heard {' '.join(map(str, sorted(entered)))}"]
    return "; ".join([*said, *(f"ended {one.pid}: {one.end}" for one in ends)])


def job(store: Any, entered: list[int]) -> list[Process]:
    """A process for each number: how many calls it has entered."""
    processes = [Process(store, rank, n, len(entered)) for rank, n in enumerate(entered)]
    poll(processes)
    return processes


def poll(processes: list[Process], times: int = 1) -> None:
    for _ in range(times):
        for one in processes:
            one.poll()


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pynccl.watch.store.OPERATION_SECONDS", LIMIT)
    monkeypatch.setattr("pynccl.watch.across.ANSWER_SECONDS", ANSWERED)
    monkeypatch.setattr("pynccl.watch.across.VERDICT_SECONDS", ANSWERED + 0.5)
    monkeypatch.setattr("pynccl.watch.across.WAITING_SECONDS", 0.02)


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client(port: int, seconds: float = 300.0) -> Any:
    limit = timedelta(seconds=seconds)
    return dist.PrefixStore("job", dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit))


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    started = time.monotonic()
    return call(), time.monotonic() - started


# All is well


def test_all_that_are_stuck_hear_who_is_missing(server: dist.TCPStore) -> None:
    processes = job(server, [41, 41, 41, 40])
    report(processes[:3], processes[3:])
    assert [one.said for one in processes] == ["missing 3; heard 0 1 2 3"] * 3 + [""]
    assert [one.asked for one in processes] == [1] * 4


def test_an_answer_counts_as_soon_as_all_have_answered_and_another_question_is_answered_anew(
    server: dist.TCPStore,
) -> None:
    processes = job(server, [2, 1])
    _, seconds = timed(lambda: report(processes[:1], processes[1:]))
    assert processes[0].said == "missing 1; heard 0 1" and seconds < ANSWERED
    processes[1].entered = 3
    report(processes[:1], processes[1:])
    assert processes[0].said == "missing 0; heard 0 1"
    assert [one.asked for one in processes] == [2, 2]


def test_who_waits_for_a_verdict_that_does_not_come_judges_by_itself(server: dist.TCPStore) -> None:
    processes = job(server, [5, 5, 4])
    assert processes[0].exchange.ask() == (1, True)  # and is gone
    report(processes[1:2], processes[2:])
    assert processes[1].said == "missing 2; heard 1 2"


def test_a_quiet_poll_is_one_operation_in_a_job_of_any_size() -> None:
    for n in (4, 64):
        processes = job(dist.HashStore(), [7] * (n - 1) + [6])
        before = [one.store.total() for one in processes]
        poll(processes)
        assert {one.store.total() - b for one, b in zip(processes, before, strict=True)} == {1}


@pytest.mark.parametrize("kind", ["torch's file", "python"])
def test_a_store_without_append_will_do(tmp_path: Path, kind: str) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 3) if kind == "torch's file" else Python()
    processes = job(store, [3, 3, 2])
    processes[1].exchange.tell_end(ProcessRecord(7, "h", end="exit"))
    report(processes[:1], processes[1:])
    assert processes[0].said == "missing 2; heard 0 1 2; ended 7: exit"


class Python:
    """A store of somebody's own: what from_store asks for, and no more."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        total = int(self.values.get(key, b"0")) + amount
        self.set(key, str(total))
        return total

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


# Somebody is gone


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


def test_who_does_not_answer_is_judged_without(server: dist.TCPStore) -> None:
    processes = job(server, [5, 5, 5])
    _, seconds = timed(lambda: report(processes[:1], processes[1:2]))
    assert processes[0].said == "missing ; heard 0 1" and seconds >= ANSWERED


def test_a_process_answers_for_a_dead_one_of_its_machine(server: dist.TCPStore) -> None:
    processes = job(server, [5, 5, 4])
    thread = processes[0].stuck()
    while not processes[1].asked:
        processes[1].poll(processes[2].record())
    thread.join()
    assert processes[0].said == "missing 2; heard 0 1 2"


# The store


def test_a_store_that_ends_is_noticed_and_the_alarm_given_up(server: dist.TCPStore) -> None:
    gate = Gate(server.port)
    one = Process(client(gate.port), 0, 5, size=2)
    one.poll()
    thread = one.stuck()
    while not one.asked:
        time.sleep(0.01)
    gate.close()
    _, seconds = timed(thread.join)
    assert one.said.startswith(f"the store at which the ranks met (127.0.0.1:{gate.port}) is lost: ")
    assert one.exchange.out_of_reach == one.said
    assert seconds < WITHIN + ANSWERED
    assert one.exchange.ask() == (0, False) and one.exchange.ends() == []


def test_a_silent_store_holds_nobody_up(server: dist.TCPStore) -> None:
    gate = Gate(server.port)
    one = Process(client(gate.port), 0, 5, size=2)
    one.poll()
    gate.shut()
    _, first = timed(one.poll)
    _, more = timed(lambda: report([one]))
    _, end = timed(lambda: one.exchange.tell_end(one.record()))
    _, close = timed(one.exchange.close)
    gate.close()
    assert one.exchange._reach._helper._asked.done.wait(20)  # what torch writes to stderr is this test's
    assert one.said == f"the store at which the ranks met (127.0.0.1:{gate.port}) did not answer within 0.8 s"
    assert first < WITHIN and more < WITHIN and end + close < 0.5


def test_a_listener_that_was_never_a_store_holds_nobody_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        gate = Gate(listener.getsockname()[1])
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        passing = Gate(server.port)
        store = client(passing.port, 2.0)
        passing._server = listener.getsockname()[1]  # the clone meets silence
        one = Process(store, 0, 5)
        one.store.clone = store.clone  # type: ignore[method-assign]
        assert timed(one.poll)[1] < WITHIN
        assert "did not answer" in one.exchange.out_of_reach
        gate.close()
        passing.close()
    assert one.exchange._reach._helper._asked.done.wait(20)


class Stopping(Python):
    """Its next operation goes on when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.go.set()
        self.waiting = 0

    def add(self, key: str, amount: int) -> int:
        self.waiting += 1
        self.go.wait(20)
        self.waiting -= 1
        return super().add(key, amount)


def test_a_store_that_answers_again_is_in_reach_again_and_was_not_pestered() -> None:
    store = Stopping()
    processes = job(store, [5, 4])
    store.go.clear()
    poll(processes[:1], 5)
    assert store.waiting == 1
    assert processes[0].exchange.out_of_reach
    store.go.set()
    while processes[0].exchange.out_of_reach:
        poll(processes[:1])
    report(processes[:1], processes[1:])
    assert processes[0].said == "missing 1; heard 0 1"


def test_a_user_who_waits_at_the_store_is_in_nobodys_way(server: dist.TCPStore) -> None:
    theirs = client(server.port)
    waiting = threading.Thread(target=lambda: theirs.get("never before this"))
    waiting.start()
    one, other = Process(theirs, 0, 5), Process(server, 1, 4)
    one.store.clone = theirs.clone  # type: ignore[method-assign]
    assert timed(one.poll)[1] < WITHIN
    assert one.exchange.out_of_reach == ""
    dist.PrefixStore("job", server).set("never before this", "")
    waiting.join()
    other.exchange.close()


EXIT = """
import atexit, sys, threading, time
import torch.distributed as dist
from gate import Gate
from stores import Counted
from pynccl.watch import store
from pynccl.watch.across import Exchange
store.OPERATION_SECONDS = 0.8
server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
gate = Gate(server.port)
exchange = Exchange(dist.TCPStore("127.0.0.1", gate.port, is_master=False), "world", 2)
exchange.answer(list)
gate.shut()
threading.Thread(target=exchange.answer, args=(list,), daemon=True).start()

class Last:  # goes when the interpreter is past all exit handlers, and wakes up who waits for the store
    def __init__(self, sockets, sleep=time.sleep):
        self.sockets, self.sleep = sockets, sleep

    def __del__(self):
        for one in self.sockets:
            one.shutdown(2)
        self.sleep(0.3)

sys.last = Last(gate._sockets)
atexit.register(exchange.close)
"""


def test_a_process_ends_in_peace_while_the_store_is_silent() -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}"}
    command = [sys.executable, "-c", EXIT]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    for trouble in ("terminate", "Traceback"):  # torch itself says that the connection was closed
        assert trouble not in done.stderr


# Ends


def test_an_end_is_told_to_those_who_read_meanwhile(server: dist.TCPStore) -> None:
    one, others = Process(server, 0, 5), [Process(server, rank, 5) for rank in range(1, 6)]
    threads = [threading.Thread(target=other.exchange.tell_end, args=(ended(other),)) for other in others]
    for thread in threads:
        thread.start()
    seen = [len(one.exchange.ends()) for _ in range(50)]
    for thread in threads:
        thread.join()
    assert seen == sorted(seen)
    told = {record.pid: (record.end, record.end_site) for record in one.exchange.ends()}
    assert told == {1000 + rank: (f"ValueError: {rank}", "train.py:31") for rank in range(1, 6)}
    assert all(other.store.total() == 2 for other in others)


def ended(process: Process) -> ProcessRecord:
    record = process.record()
    record.end, record.end_site, record.stack = f"ValueError: {record.pid - 1000}", "train.py:31", "line\n" * 10000
    return record


def test_a_job_that_ends_as_a_whole_does_not_flood_its_last_reader() -> None:
    store = dist.HashStore()
    for rank in range(200):
        Process(store, rank, 5).exchange.tell_end(ended(Process(store, rank, 5)))
    found = Process(store, 200, 5).exchange.ends()
    assert 10 < len(found) < 100
    assert len(store.get("watch/ends")) < 200_000


def test_of_each_process_the_end_counts_that_was_told_last_and_none_from_before_it(server: dist.TCPStore) -> None:
    one, other, third = (Process(server, rank, 5) for rank in range(3))
    failed, gone = other.record(), dead(other)
    third.exchange.tell_end(gone)  # by one of its machine
    other.exchange.tell_end(failed)  # late
    other.exchange.tell_end(failed)  # again
    assert [(record.pid, record.end) for record in one.exchange.ends()] == [(1001, "ValueError: 1")]
    assert (third.store.total(), other.store.total()) == (2, 2)
    before = one.store.total()
    for _ in range(20):
        one.exchange.ends()
    assert one.store.total() == before + 20


def test_the_store_stays_until_the_others_have_ended(server: dist.TCPStore) -> None:
    one, *others = (Process(server, rank, 5, size=3) for rank in range(3))
    one.exchange.tell_end(dead(one))
    assert 0.3 <= timed(lambda: one.exchange.linger(0.3))[1] < 1
    timers = [threading.Timer(0.2, other.exchange.tell_end, [dead(other)]) for other in others]
    for timer in timers:
        timer.start()
    assert 0.1 < timed(lambda: one.exchange.linger(20))[1] < 5
    assert timed(lambda: one.exchange.linger(20))[1] < 0.5


def test_nobody_lingers_at_a_silent_store(server: dist.TCPStore) -> None:
    gate = Gate(server.port)
    one = Process(client(gate.port), 0, 5, size=3)
    one.poll()
    gate.shut()
    _, seconds = timed(lambda: one.exchange.linger(60))
    gate.close()
    assert one.exchange._reach._helper._asked.done.wait(20)
    assert seconds < WITHIN


def dead(process: Process) -> ProcessRecord:
    record = ended(process)
    record.state = DEAD
    return record


# What is at the store may be anything

HOSTILE = ["", "[", "{}", "null", "[1, 2]", '{"pid": "x", "host": 1}', "[" * 100000, '"\ud800"', "\x00\xff", "9" * 5000]
HOSTILE += ['{"pid": 1, "host": "h", "now": ' + "9" * 400 + "}"]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_store_with_anything_in_it_does_no_harm(text: str) -> None:
    store: Any = dist.HashStore()
    raw = text.encode(errors="surrogatepass")
    processes = job(store, [5, 5, 4])
    store.append("watch/ends", raw + b"\n")
    store.add("watch/ends/told", 1)
    store.append("watch/where/1", raw + b"\n")
    report(processes[:1], processes[1:])
    assert processes[0].said == "missing 2; heard 0 1 2"


def test_a_large_record_is_trimmed_to_what_matters() -> None:
    calls = [CallRecord(n, n, "all_reduce", site="a.py:1" * 20) for n in range(1, 2001)]
    calls[1000] = CallRecord(1001, 1001, "all_gather", state=INSIDE)
    comms = [CommRecord(f"c{i}", "x", 0, 2, calls=list(calls), ended="destroyed" if i % 2 else "") for i in range(100)]
    record = ProcessRecord(1, "h", stack="line\n" * 10000 + "inner", comms=comms)
    short = trimmed(record)
    assert len(json.dumps(to_json(short))) < 128 * 1024
    assert not short.comms[0].ended and short.comms[0].calls[0].operation == "all_gather"
    assert short.comms[0].calls[-1].number == 2000
    assert short.stack.endswith("inner")
    assert len(record.comms) == 100 and len(calls) == 2000


def test_a_group_of_messages_is_passed_on_whole() -> None:
    calls = [CallRecord(n, n, "all_reduce") for n in range(1, 9)]
    calls += [CallRecord(9, 0, "send", group=4), CallRecord(10, 0, "recv", group=4), CallRecord(11, 9, "barrier")]
    others = [CommRecord(f"c{i}", "x", 0, 2) for i in range(4)]
    record = ProcessRecord(1, "h", comms=[CommRecord("other", "y", 0, 2, calls=calls), *others])
    other = trimmed(record).comms[0]
    assert [call.operation for call in other.calls] == ["send", "recv", "barrier"]
    assert other.cut
    assert from_json(json.loads(json.dumps(to_json(record)))).comms[0].cut is False


# The lists below it


@pytest.fixture(params=["tcp", "hash", "prefix", "file", "python"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    makers: dict[str, Callable[[], Any]] = {
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
        "hash": dist.HashStore,
        "prefix": lambda: dist.PrefixStore("a", dist.HashStore()),
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 1),
        "python": Python,
    }
    yield makers[request.param]()


def test_a_list_at_any_store_has_all_that_was_appended(store: Any) -> None:
    assert lines(store, "list") == []
    threads = [threading.Thread(target=append, args=(store, "list", f"{i}\n-{i}")) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    append(store, "other", "x")
    assert sorted(lines(store, "list")) == sorted(str(i) for n in range(4) for i in (n, f"-{n}"))
    assert lines(store, "other") == ["x"]


def test_what_fails_at_the_store_is_out_of_reach_for_good() -> None:
    reach = Reach(Python())
    assert reach.do(lambda store: store.get("nothing"), "otherwise") == "otherwise"
    assert reach.reason == "the store at which the ranks met is lost: 'nothing'"
    assert reach.do(lambda store: store.add("a", 1), 0) == 0 and "is lost" in reach.reason


def test_a_process_asks_once_for_all_its_threads_that_are_ranks_at_one_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYNCCL_WATCH_DIR", str(tmp_path))
    own = recorder.Recorder()
    store = dist.HashStore()
    gate, tracks = threading.Barrier(8), [Track(own, Identity(WORLD, WORLD, ""), rank, 9) for rank in range(9)]

    def join(track: Track) -> None:
        gate.wait()
        meet(track, store, track.rank == 3)

    threads = [threading.Thread(target=join, args=(track,)) for track in tracks[:8]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [exchange] = {track.exchange for track in tracks[:8]}
    assert exchange.serves
    meet(tracks[8], dist.HashStore(), False)
    assert tracks[8].exchange is not exchange
    child = Track(own, Identity("child", "child", WORLD), 0, 2)
    assert child.exchange is exchange


def test_a_quiet_process_asks_the_store_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(across, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    exchange = Exchange(dist.HashStore(), WORLD, 2)
    count = 0
    for _ in range(200):
        if exchange.due:
            exchange.answer(list)
            count += 1
        clock[0] += 0.05  # the watchdog looks
    assert count in (10, 9)


def test_who_waits_for_answers_waits_longer_than_a_quiet_process_takes_to_answer() -> None:
    assert ANSWER_SECONDS >= 1.5 * across.QUIET_SECONDS + WAITING_SECONDS


def test_what_is_told_of_an_end_goes_back_to_the_call_that_explains_it() -> None:
    def calls(name: str) -> list[CallRecord]:
        long = {"count": 17_622, "dtype": "UINT8", "root": 1, "group": 3, "site": "program.py:111", "function": name}
        numbers = range(1, 21)
        return [CallRecord(n, n, "broadcast", issued=1.7e9, returned=1.7e9, completed=1.7e9, **long) for n in numbers]

    names = ["world", "world.split1-1", "world.split1-1.split1-0"]
    comms = [
        CommRecord("0" * 32, name, 0, 3, made_at="program.py:31", calls=calls("AllGather.forward")) for name in names
    ]
    record = ProcessRecord(1, "h", end="NcclInvalidUsage: the calls of the ranks disagree " * 9, comms=comms)
    server = dist.HashStore()
    exchange = Process(server, 0, 5).exchange
    exchange.tell_end(record)
    (told,) = exchange.ends()
    assert [[call.number for call in comm.calls] for comm in told.comms] == [list(range(13, 21))] * 3
