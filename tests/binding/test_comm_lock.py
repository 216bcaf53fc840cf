"""The lock of a communicator under Ctrl-C and handlers of signals: one call at a time, and nobody is left waiting."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from typing import Any

import torch
from libraries import Stub
from ranks import Place, RankPool

SECONDS = 40.0  # of patience


def test_a_forked_child_does_not_wait_for_a_thread_that_did_not_come_along() -> None:
    comm, held, leave = Stub().comm(2, 0, cpu=True), threading.Event(), threading.Event()

    def hold() -> None:
        with comm.lock:
            held.set()
            leave.wait(20)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(20)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if comm.lock.acquire(timeout=1) else 1)
    leave.set()
    holder.join(10)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    comm.destroy()


def ring_again() -> None:
    signal.setitimer(signal.ITIMER_REAL, random.random() * 2e-3 + 1e-5)


def storm(place: Place) -> tuple[int, int, bool, int]:
    """(interrupts, calls from handlers, whether a thread was left waiting, calls that overlapped)."""
    stub = Stub()
    comm = stub.comm(2, 0, cpu=True)
    t = torch.ones(8)
    plan = comm.plan.all_reduce(t, t)
    seen: Counter[str] = Counter()
    end = time.monotonic() + SECONDS

    def calls(times: int = 1) -> None:
        for _ in range(times):
            plan()
            comm.all_reduce(t, t)
            comm.all_reduce(t)
        stub.clear()

    def interrupt(*_: Any) -> None:
        ring_again()
        if seen.pop("inside", 0):
            raise KeyboardInterrupt

    def call_too(*_: Any) -> None:
        seen["nested"] += 1
        calls()
        ring_again()

    signal.signal(signal.SIGALRM, interrupt)
    ring_again()
    while seen["interrupts"] < 400 and time.monotonic() < end:
        try:
            seen["inside"] = 1
            while True:
                calls(20)
        except KeyboardInterrupt:
            seen["interrupts"] += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    beside = threading.Thread(target=calls, args=(1000,), daemon=True)
    beside.start()
    signal.signal(signal.SIGALRM, call_too)
    ring_again()
    while seen["nested"] < 200 and time.monotonic() < end:
        calls(20)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    beside.join(SECONDS)
    return seen["interrupts"], seen["nested"], beside.is_alive(), int(stub.cdll.stub_overlaps())


def test_a_storm_of_ctrl_c_leaves_a_communicator_that_all_threads_can_use() -> None:
    pool = RankPool(communicators=False)  # a process whose signals are of no other test
    try:
        [(interrupts, nested, stuck, overlaps)] = pool.run(1, storm, timeout=3 * SECONDS)
    finally:
        pool.close()
    assert interrupts > 0 and nested > 0
    assert not stuck and overlaps == 0
