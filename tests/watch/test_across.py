"""Processes that are stuck ask all others where they are, and read their answers, whatever ends meanwhile."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from asking import SOON, WORLD, Process, dead, ended, job, patient, poll, report, timed

from pynccl.watch import across, recorder
from pynccl.watch.across import Exchange, trimmed
from pynccl.watch.diagnosis import meet
from pynccl.watch.records import INSIDE, CallRecord, CommRecord, ProcessRecord, from_json, to_json
from pynccl.watch.track import Identity, Track

ANSWER_SECONDS, WAITING_SECONDS = across.ANSWER_SECONDS, across.WAITING_SECONDS  # before they are made shorter below
ANSWERED = 1.0  # seconds after which who does not answer is judged without


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    patient(monkeypatch)


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


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


def test_who_waits_for_a_verdict_that_does_not_come_judges_by_itself(
    server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pynccl.watch.across.VERDICT_SECONDS", ANSWERED)
    processes = job(server, [5, 5, 4])
    assert processes[0].exchange.ask() == (1, True)  # and is gone
    report(processes[1:2], processes[2:])
    assert processes[1].said == "missing 2; heard 1 2"


def test_a_quiet_poll_is_one_operation_in_a_job_of_any_size_and_comes_once_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for n in (4, 64):
        processes = job(dist.HashStore(), [7] * (n - 1) + [6])
        before = [one.store.total() for one in processes]
        poll(processes)
        assert {one.store.total() - b for one, b in zip(processes, before, strict=True)} == {1}
    clock = [1000.0]
    monkeypatch.setattr(across, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    exchange, count = Exchange(dist.HashStore(), WORLD, 2), 0
    for _ in range(200):
        if exchange.due:
            exchange.answer(list)
            count += 1
        clock[0] += 0.05  # the watchdog looks
    assert count in (10, 9)
    # Who waits for answers waits longer than a quiet process takes to answer.
    assert ANSWER_SECONDS >= 1.5 * across.QUIET_SECONDS + WAITING_SECONDS


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
    monkeypatch.setattr("pynccl.watch.across.ANSWER_SECONDS", ANSWERED)
    report(processes[:1], processes[1:2])
    assert processes[0].said == "missing ; heard 0 1"


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


def test_a_job_that_ends_as_a_whole_does_not_flood_its_last_reader() -> None:
    store = dist.HashStore()
    for rank in range(200):
        one = Process(store, rank, 5)
        one.exchange.tell_end(ended(one))
    assert len(Process(store, 200, 5).exchange.ends()) == across._MOST_ENDS
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
    assert timed(lambda: one.exchange.linger(0.3)) >= 0.3
    timers = [threading.Timer(0.2, other.exchange.tell_end, [dead(other)]) for other in others]
    for timer in timers:
        timer.start()
    assert 0.1 < timed(lambda: one.exchange.linger(60)) < SOON


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
