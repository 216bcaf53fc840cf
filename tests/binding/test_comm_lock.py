"""The lock of a communicator under Ctrl-C and handlers of signals: one call at a time, and nobody is left waiting."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
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


class Storm:
    """Handlers of a signal that comes every millisecond in the midst of calls."""

    def __init__(self) -> None:
        self.stub = Stub()
        self.comm = self.stub.comm(2, 0, cpu=True)
        t = torch.ones(8)
        b = (t.data_ptr(), 8, "float32")  # which goes the general way
        self.calls: list[Callable[[], Any]] = [
            self.comm.plan.all_reduce(t, t),
            lambda: self.comm.all_reduce(t, t),
            lambda: self.comm.all_reduce(t),
            self.comm.plan.all_reduce(b, b, stream=0),
            lambda: self.comm.all_reduce(b, b, stream=0),
        ]
        self.inside = False
        self.interrupts = self.nested = 0
        self.end = time.monotonic() + SECONDS

    def all(self, times: int = 1) -> None:
        for call in self.calls * times:
            call()
        self.stub.clear()

    def interrupt(self, *_: Any) -> None:
        ring_again()
        if self.inside:
            self.inside = False
            raise KeyboardInterrupt

    def call_too(self, *_: Any) -> None:
        self.nested += 1
        self.all()
        with self.comm.lock:
            pass
        ring_again()

    def of_interrupts(self) -> None:
        signal.signal(signal.SIGALRM, self.interrupt)
        ring_again()
        while self.interrupts < 400 and time.monotonic() < self.end:
            try:
                self.inside = True
                while True:
                    self.all(20)
            except KeyboardInterrupt:
                self.interrupts += 1
                self.stub.clear()
        signal.setitimer(signal.ITIMER_REAL, 0)

    def of_handlers_that_call(self) -> None:
        signal.signal(signal.SIGALRM, self.call_too)
        ring_again()
        while self.nested < 200 and time.monotonic() < self.end:
            self.all(20)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)

    def in_a_thread(self, times: int) -> threading.Thread:
        thread = threading.Thread(target=self.all, args=(times,), daemon=True)
        thread.start()
        return thread


def storm(place: Place) -> tuple[int, int, bool, int]:
    """(interrupts, calls from handlers, whether threads were left waiting, calls that overlapped)."""
    one = Storm()
    one.all(3)
    one.of_interrupts()
    beside = one.in_a_thread(1000)
    one.of_handlers_that_call()
    beside.join(SECONDS)
    after = one.in_a_thread(1)
    after.join(SECONDS)
    overlaps = int(one.stub.cdll.stub_overlaps())
    stuck = beside.is_alive() or after.is_alive()
    if not stuck:
        one.comm.destroy()
    return one.interrupts, one.nested, stuck, overlaps


def test_a_storm_of_ctrl_c_leaves_a_communicator_that_all_threads_can_use() -> None:
    pool = RankPool(communicators=False)  # a process whose signals are of no other test
    try:
        [(interrupts, nested, stuck, overlaps)] = pool.run(1, storm, timeout=4 * SECONDS)
    finally:
        pool.close()
    assert interrupts >= 400 and nested >= 200
    assert not stuck and overlaps == 0
