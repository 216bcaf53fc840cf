"""Processes that ask each other through a store where they are, by hand."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from stores import Counted

from pynccl.watch.across import Exchange
from pynccl.watch.records import DEAD, INSIDE, CallRecord, CommRecord, ProcessRecord

LIMIT = 0.5  # seconds of an operation that is not answered
SOON = 20.0  # seconds in which all of it is over, however busy the machine
WORLD = "world"


def patient(monkeypatch: Any) -> None:
    """Nothing is given up because the machine is busy, and answers are looked for often."""
    monkeypatch.setattr("pynccl.watch.store.OPERATION_SECONDS", SOON)
    monkeypatch.setattr("pynccl.watch.across.ANSWER_SECONDS", SOON)
    monkeypatch.setattr("pynccl.watch.across.VERDICT_SECONDS", SOON)
    monkeypatch.setattr("pynccl.watch.across.WAITING_SECONDS", 0.02)


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


def client(port: int, seconds: float = 300.0) -> Any:
    limit = timedelta(seconds=seconds)
    return dist.PrefixStore("job", dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit))


def ended(process: Process) -> ProcessRecord:
    record = process.record()
    record.end, record.end_site, record.stack = f"ValueError: {record.pid - 1000}", "train.py:31", "line\n" * 10000
    return record


def dead(process: Process) -> ProcessRecord:
    record = ended(process)
    record.state = DEAD
    return record


def timed(call: Callable[[], Any]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started
