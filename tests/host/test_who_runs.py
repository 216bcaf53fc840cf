"""Who runs the work of a host stream: a worker, or a thread that waits for it."""

from __future__ import annotations

import math
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from functools import partial

import pytest
from processes import wait_for

from pynccl.bindings.errors import NcclError
from pynccl.host import HostStream, alarm, jobs
from pynccl.host.alarm import Alarm

SECONDS = 30.0


def noted(seen: list[int]) -> None:
    seen.append(threading.get_ident())


def helped(stream: HostStream) -> list[int]:
    """Run a job in this thread, so that a patient stream leaves the next one alone. Return the threads that ran it."""
    seen: list[int] = []
    stream.submit(partial(noted, seen))
    stream.run_here(lambda: bool(seen))
    wait_for(stream.query)
    return seen


def left_alone(stream: HostStream) -> None:
    """Have this thread run jobs until the stream's, which may be faster, is not woken any more."""
    mine = [threading.get_ident()]
    wait_for(lambda: helped(stream) == mine and helped(stream) == mine)
    time.sleep(0.01)


@pytest.fixture
def stream() -> HostStream:
    stream = HostStream(patient=True)
    left_alone(stream)
    return stream


def test_a_waiting_thread_runs_the_work_in_order(stream: HostStream) -> None:
    by_thread: list[int] = []
    order: list[int] = []
    for i in range(20):
        stream.submit(partial(order.append, i))
    stream.submit(partial(noted, by_thread))
    stream.run_here(lambda: bool(by_thread))
    assert by_thread == [threading.get_ident()] and order == list(range(20))
    stream.close()


def test_what_nobody_waits_for_runs_a_little_later(stream: HostStream) -> None:
    done = threading.Event()
    stream.submit(done.set)
    assert done.wait(SECONDS)
    stream.close()


def test_work_that_is_hurried_does_not_wait_for_the_alarm(stream: HostStream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Alarm, "set", lambda self: None)
    done = threading.Event()
    stream.submit(done.set)
    assert not done.wait(0.05)
    stream.hurry()
    assert done.wait(SECONDS)
    stream.close()


def test_who_has_waited_leaves_the_rest_to_the_thread(stream: HostStream) -> None:
    first: list[int] = []
    second = threading.Event()
    stream.submit(partial(noted, first))
    stream.submit(second.set)
    stream.run_here(lambda: bool(first))
    assert second.wait(SECONDS)
    stream.close()


@pytest.mark.parametrize("helps", (False, True))
def test_what_a_job_returns_may_wait_for_later_work(helps: bool) -> None:
    """Also if several of them wait at the same time."""
    stream, later, ended = HostStream(patient=True), threading.Event(), []
    depth = 5
    for i in range(depth):
        stream.then(lambda error, i=i: lambda: ended.append((i, later.wait(SECONDS))))  # type: ignore[misc]
    stream.submit(later.set)
    if helps:
        stream.run_here(later.is_set)
    assert later.wait(SECONDS)
    stream.close()
    wait_for(lambda: len(ended) == depth)
    assert sorted(ended) == [(i, True) for i in range(depth)]


def test_what_a_function_of_the_program_returns_is_ignored(stream: HostStream) -> None:
    called: list[int] = []
    stream.submit(lambda: partial(called.append, 1))
    stream.close()
    assert not called


def test_close_runs_what_is_left_while_somebody_else_runs_work(stream: HostStream) -> None:
    seen: list[int] = []
    started, go = threading.Event(), threading.Event()

    def first() -> None:
        started.set()
        go.wait(SECONDS)

    stream.submit(first)
    helper = threading.Thread(target=stream.run_here, args=(started.is_set,))
    helper.start()
    assert started.wait(SECONDS)
    for i in range(10):
        stream.submit(partial(seen.append, i))
    threading.Timer(0.05, go.set).start()
    stream.close()
    helper.join(SECONDS)
    assert seen == list(range(10)) and not helper.is_alive()


def test_a_dropped_stream_runs_its_work() -> None:
    seen: list[int] = []
    stream = HostStream(patient=True)
    left_alone(stream)
    stream.submit(partial(noted, seen))
    del stream
    wait_for(lambda: len(seen) == 1)
    assert seen != [threading.get_ident()]


@pytest.mark.parametrize("patient", (False, True))
def test_order_is_kept_whoever_runs(patient: bool) -> None:
    """Several threads submit, wait in any way, or do not wait; each stream's jobs run in the order of submission."""
    draw, streams = random.Random(7), [HostStream(patient=patient) for _ in range(3)]
    begun: list[list[int]] = [[] for _ in streams]
    ended: list[list[int]] = [[] for _ in streams]
    submitted, locks, failed = [0] * 3, [threading.Lock() for _ in streams], []

    def job(at: int, number: int) -> None:
        begun[at].append(number)
        if number % 7 == 0:
            time.sleep(0.0002)
        ended[at].append(number)

    def program(seed: int) -> None:
        own = random.Random(seed)
        for _ in range(400):
            at, done = own.randrange(3), threading.Event()
            with locks[at]:
                for _ in range(own.randrange(1, 4)):
                    streams[at].submit(partial(job, at, submitted[at]))
                    submitted[at] += 1
                streams[at].then(lambda error, done=done: done.set)  # type: ignore[misc]
            way = own.randrange(4)
            if way == 0:
                continue
            if way == 1:
                streams[at].hurry()
            elif way == 2:
                streams[at].run_here(done.is_set)
            if not done.wait(SECONDS):
                failed.append(way)

    threads = [threading.Thread(target=program, args=(draw.randrange(1 << 30),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
    for stream in streams:
        stream.close()
    assert not failed
    assert begun == ended == [list(range(count)) for count in submitted]


class Alert(Exception):
    """Of a signal handler."""


def alert(*_: object) -> None:
    raise Alert


@pytest.mark.parametrize("kind", (KeyboardInterrupt, Alert))
@pytest.mark.parametrize("where", ("job", "then"))
def test_a_signal_handler_raises_in_the_thread_that_waits(
    stream: HostStream, kind: type[BaseException], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ran has failed. What was to be told of it is told all the same, once, and later work runs."""
    errors: list[BaseException | None] = []
    interrupts = [partial(signal.raise_signal, signal.SIGINT)]
    before = signal.signal(signal.SIGINT, alert if kind is Alert else signal.default_int_handler)

    def tell(error: BaseException | None) -> None:
        if where == "then" and interrupts:
            interrupts.pop()()
        errors.append(error)

    try:
        stream.submit(interrupts.pop() if where == "job" else int)
        stream.then(tell)
        with pytest.raises(kind):
            stream.run_here(lambda: bool(errors))
    finally:
        signal.signal(signal.SIGINT, before)
    seen: list[int] = []
    stream.submit(partial(seen.append, 1))
    stream.close()
    [error] = errors
    assert seen == [1] and (where == "then" or isinstance(error, NcclError)), error
    expected = {KeyboardInterrupt: "was interrupted (Ctrl-C)", Alert: "raised Alert"}[kind]
    assert error is None if where == "then" else expected in str(error)


def test_an_error_whose_explanation_a_signal_handler_ends_is_told(
    stream: HostStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    interrupts = [partial(signal.raise_signal, signal.SIGINT)]

    def explain(error: BaseException) -> BaseException:
        if interrupts:
            interrupts.pop()()
        return error

    monkeypatch.setattr(jobs, "explain", explain)
    stream.submit(partial(fail, NcclError("lost")))
    stream.then(told.append)  # type: ignore[func-returns-value]
    with pytest.raises(KeyboardInterrupt):
        stream.run_here(lambda: bool(told))
    stream.run_here(lambda: bool(told))
    stream.close()
    assert [str(error) for error in told] == ["lost"]


def fail(error: Exception) -> None:
    raise error


def test_the_error_of_another_job_is_not_raised_in_the_thread_that_waits(stream: HostStream) -> None:
    told: list[object] = []
    helper = threading.Thread(target=stream.run_here, args=(lambda: len(told) == 1,))
    stream.submit(partial(fail, ValueError("of the job")))
    stream.then(told.append)  # type: ignore[func-returns-value]
    helper.start()
    helper.join(SECONDS)
    wait_for(lambda: len(told) == 1)
    stream.close()
    assert isinstance(told[0], ValueError)


def test_a_signal_handler_cannot_wait_for_what_it_interrupts(stream: HostStream) -> None:
    raised: list[BaseException] = []

    def handler(*_: object) -> None:
        try:
            stream.run_here(lambda: False)
        except NcclError as error:
            raised.append(error)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        seen: list[int] = []
        stream.submit(partial(signal.raise_signal, signal.SIGUSR1))
        stream.submit(partial(seen.append, 1))
        stream.run_here(lambda: bool(seen))
    finally:
        signal.signal(signal.SIGUSR1, before)
    stream.close()
    assert seen == [1] and "called by a signal handler" in str(raised[0])


def test_a_thread_that_was_kept_from_ending_its_turn_ends_it_the_next_time(stream: HostStream) -> None:
    stream._queue._turn.acquire()  # then a signal handler has raised
    seen: list[int] = []
    stream.submit(partial(noted, seen))
    stream.run_here(lambda: bool(seen))
    assert seen == [threading.get_ident()]
    stream.close()


def test_a_thread_keeps_nothing_of_the_last_work() -> None:
    class Kept:
        pass

    stream, kept = HostStream(patient=True), Kept()
    seen, found = weakref.ref(kept), threading.Event()
    stream.then(lambda error, kept=kept: lambda: (kept, found.set()))  # type: ignore[misc]
    del kept
    assert found.wait(SECONDS)
    wait_for(lambda: seen() is None)
    stream.close()


@pytest.mark.parametrize("lacking", ("descriptors", "threads"))
def test_without_a_timer_an_alarm_rings_at_once(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rung: list[int] = []
    one = Alarm(partial(rung.append, 1))
    with monkeypatch.context() as patch:
        patch.setattr(alarm, "_timer", -1)
        patch.setattr(alarm, "_next", math.inf)
        if lacking == "threads":
            patch.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("no thread")))
        else:
            patch.setattr(alarm._libc, "timerfd_create", lambda *_: -1, raising=False)
        one.set()
        assert rung == [1] and alarm._timer == -1
    one.set()
    wait_for(lambda: len(rung) == 2)


def test_alarms_ring_once_in_their_order_unless_cleared() -> None:
    rung: list[int] = []
    alarms = [Alarm(partial(rung.append, i), 0.01 * (5 - i)) for i in range(5)]
    for _ in range(2):  # the second time does nothing
        for each in alarms:
            each.set()
    alarms[1].clear()
    wait_for(lambda: len(rung) == 4)
    time.sleep(0.05)
    assert rung == [4, 3, 2, 0]


FORK = """
import os, threading, time
from pynccl.host import HostStream
stream, done = HostStream(patient=True), threading.Event()
stream.submit(done.set)
stream.run_here(done.is_set)
stream.submit(lambda: None)  # the alarm is set
if (child := os.fork()) == 0:
    own, seen = HostStream(patient=True), threading.Event()
    own.submit(lambda: None)
    own.run_here(own.query)
    own.submit(seen.set)
    os._exit(0 if seen.wait(20) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
stream.close()
"""

EXIT = """
import threading, time, torch
from pynccl.host import HostStream
stream, done, future = HostStream(patient=True), threading.Event(), torch.futures.Future()
stream.submit(done.set)
stream.run_here(done.is_set)
future.then(lambda _: time.sleep(0.3))
stream.then(lambda error: lambda: future.set_result(1))
stream.hurry()
time.sleep(0.1)
stream.submit(lambda: None)
"""


@pytest.mark.parametrize("program", (FORK, EXIT), ids=("fork", "exit"))
def test_forks_and_exits_while_the_alarm_is_set(program: str) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done
