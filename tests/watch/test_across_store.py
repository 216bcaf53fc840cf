"""A store that is silent, lost, or full of nonsense holds up no process that asks there, and ends none."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from asking import LIMIT, SOON, Process, Python, client, job, patient, poll, report
from gate import Gate

from pynccl.watch.store import Reach, append, lines

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    patient(monkeypatch)


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pynccl.watch.store.OPERATION_SECONDS", LIMIT)


def test_a_store_that_ends_is_noticed_and_the_alarm_given_up(server: dist.TCPStore) -> None:
    gate = Gate(server.port)
    one = Process(client(gate.port), 0, 5, size=2)
    one.poll()
    thread = one.stuck()
    while not one.asked:
        time.sleep(0.01)
    gate.close()
    thread.join(SOON)
    assert one.said.startswith(f"the store at which the ranks met (127.0.0.1:{gate.port}) is lost: ")
    assert one.exchange.out_of_reach == one.said
    assert one.exchange.ask() == (0, False) and one.exchange.ends() == []


@pytest.mark.parametrize("met", [True, False])
def test_a_silent_store_holds_nobody_up(server: dist.TCPStore, short: None, met: bool) -> None:
    """Whether it has been asked before, or is silent from the first connection on."""
    gate = Gate(server.port)
    theirs = client(gate.port, 2.0)
    one = Process(theirs, 0, 5, size=2)
    if met:
        one.poll()
    else:
        one.store.clone = theirs.clone  # type: ignore[method-assign]
    gate.shut()
    began = time.monotonic()
    one.poll()
    report([one])
    one.exchange.tell_end(one.record())
    one.exchange.linger(60)
    one.exchange.close()
    assert time.monotonic() - began < SOON
    gate.close()
    assert one.exchange._reach._helper._asked.done.wait(20)  # what torch writes to stderr is this test's
    assert one.said == f"the store at which the ranks met (127.0.0.1:{gate.port}) did not answer within {LIMIT} s"


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


def test_a_store_that_answers_again_is_in_reach_again_and_was_not_pestered(short: None) -> None:
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
    one = Process(theirs, 0, 5)
    one.store.clone = theirs.clone  # type: ignore[method-assign]
    one.poll()
    assert one.exchange.out_of_reach == ""
    dist.PrefixStore("job", server).set("never before this", "")
    waiting.join()


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


HOSTILE = ["", "[", "{}", "null", "[1, 2]", '{"pid": "x", "host": 1}', "[" * 100000, '"\ud800"', "\x00\xff", "9" * 5000]
HOSTILE += ['{"pid": 1, "host": "h", "now": ' + "9" * 400 + "}"]


def test_a_store_with_anything_in_it_does_no_harm() -> None:
    store: Any = dist.HashStore()
    processes = job(store, [5, 5, 4])
    for text in HOSTILE:
        raw = text.encode(errors="surrogatepass")
        store.append("watch/ends", raw + b"\n")
        store.add("watch/ends/told", 1)
        store.append("watch/where/1", raw + b"\n")
    report(processes[:1], processes[1:])
    assert processes[0].said == "missing 2; heard 0 1 2"


def test_a_list_at_any_store_has_all_that_was_appended(server: dist.TCPStore, tmp_path: Path) -> None:
    prefix = dist.PrefixStore("a", dist.HashStore())
    for store in (server, dist.HashStore(), prefix, dist.FileStore(str(tmp_path / "store"), 1), Python()):
        assert lines(store, "list") == []
        threads = [threading.Thread(target=append, args=(store, "list", f"{i}\n-{i}")) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        append(store, "other", "x")
        assert sorted(lines(store, "list")) == sorted(str(i) for n in range(4) for i in (n, f"-{n}")), store
        assert lines(store, "other") == ["x"]


def test_what_fails_at_the_store_is_out_of_reach_for_good() -> None:
    reach = Reach(Python())
    assert reach.do(lambda store: store.get("nothing"), "otherwise") == "otherwise"
    assert reach.reason == "the store at which the ranks met is lost: 'nothing'"
    assert reach.do(lambda store: store.add("a", 1), 0) == 0 and "is lost" in reach.reason
