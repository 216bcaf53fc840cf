"""The lock of a communicator: one holder at a time, whatever interrupts him; and its number is never lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pynccl.comm.turn import Turn, quick

ROOT = Path(__file__).resolve().parents[2]


class Counter:
    """What only the holder of the lock may touch: `inside` shows two holders, `count` lost or doubled numbers."""

    def __init__(self) -> None:
        self.turn, self.inside, self.most, self.calls = Turn(), 0, 0, 0

    def touch(self) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.calls += 1
        if self.calls % 7 == 0:
            time.sleep(0)  # another thread runs now
        self.inside -= 1

    def quickly(self, within: Callable[[], Any] | None = None) -> None:
        call_quickly(
            self.turn.take, self.turn.give, self.turn.waiting, self.turn.wake, within or self.touch, self.slowly
        )

    def slowly(self) -> None:
        with self.turn:
            self.touch()
            self.turn.slot += 1


@quick
def call_quickly(
    take: Any, give: Any, waiting: Any, wake: Any, within: Callable[[], Any], otherwise: Callable[[], None]
) -> None:
    slot: Any = None
    try:
        slot = take()
    except IndexError:
        otherwise()
        return
    try:
        within()
    finally:
        give(slot + 1)
        slot = None
    if waiting:
        wake()


@pytest.fixture
def often() -> Iterator[None]:
    """Threads take turns a thousand times as often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(functions: list[Callable[[], None]]) -> None:
    failures: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread waits for ever"
    assert not failures


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("kinds", ["quick", "slow", "both"])
def test_one_thread_at_a_time_and_every_number_once(kinds: str) -> None:
    one, calls = Counter(), 3000

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(calls):
            quickly = kinds == "quick" or (kinds == "both" and rng.random() < 0.7)
            one.quickly() if quickly else one.slowly()

    in_threads([lambda seed=seed: work(seed) for seed in range(6)])  # type: ignore[misc]
    assert (one.most, one.calls) == (1, 6 * calls)
    assert one.turn.take() == 6 * calls


def test_it_is_reentrant_and_only_its_holder_can_give_it_back() -> None:
    turn = Turn(5)
    with turn, turn:
        assert turn.slot == 5
        turn.slot = 6
        refused: list[str] = []

        def other() -> None:
            assert not turn.acquire(blocking=False)
            start = time.monotonic()
            assert not turn.acquire(timeout=0.2)
            assert 0.2 <= time.monotonic() - start < 2
            try:
                turn.release()
            except RuntimeError as error:
                refused.append(str(error))

        in_threads([other])
        assert refused == ["cannot release a lock that this thread does not have"]
    with pytest.raises(RuntimeError, match="does not have"):
        turn.release()
    assert turn.acquire(timeout=0.5) and turn.slot == 6
    turn.release()


def test_those_who_wait_have_it_in_the_order_in_which_they_came() -> None:
    turn, came = Turn(), []

    def wait(number: int) -> None:
        with turn:
            came.append(number)

    with turn:
        threads = [threading.Thread(target=wait, args=(number,)) for number in range(5)]
        for number, thread in enumerate(threads):
            thread.start()
            while len(turn.waiting) <= number:
                time.sleep(0.001)
    for thread in threads:
        thread.join(10)
    assert came == list(range(5))


@pytest.mark.usefixtures("often")
def test_who_is_in_a_hurry_does_not_keep_the_others_waiting() -> None:
    one, stop = Counter(), threading.Event()

    def hammer() -> None:
        while not stop.is_set():
            one.quickly()

    thread = threading.Thread(target=hammer)
    thread.start()
    slowest = 0.0
    for _ in range(50):
        start = time.monotonic()
        one.slowly()
        slowest = max(slowest, time.monotonic() - start)
    stop.set()
    thread.join(10)
    assert slowest < 1


def test_what_interrupts_a_quick_call_can_take_the_lock_and_has_no_number() -> None:
    one, seen = Counter(), []

    def handler(*_: object) -> None:
        with one.turn:
            seen.append(one.turn.slot)
            with one.turn:
                pass
        assert not one.turn._numbers  # it is still the interrupted one's

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        one.quickly(lambda: os.kill(os.getpid(), signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [-1]
    assert one.turn.take() == 1


def test_what_interrupts_a_wait_can_take_the_lock_that_the_wait_gets_meanwhile() -> None:
    turn, seen, released = Turn(7), [], threading.Event()

    def handler(*_: object) -> None:
        released.set()
        with turn:
            seen.append(turn.slot)

    def hold() -> None:
        with turn:
            os.kill(os.getpid(), signal.SIGUSR1)
            released.wait(10)
            time.sleep(0.1)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        holder = threading.Thread(target=hold)
        holder.start()
        start = time.monotonic()
        with turn:
            assert turn.slot == 7
        assert time.monotonic() - start < 2
        holder.join(10)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen in ([-1], [7])
    assert turn.take() == 7


def test_a_number_that_nobody_has_is_found_again_and_not_before() -> None:
    one = Counter()
    one.turn._lost = lambda: 41
    entered, leave = threading.Event(), threading.Event()

    def stay() -> None:
        entered.set()
        leave.wait(20)

    holder = threading.Thread(target=one.quickly, args=(stay,))
    holder.start()
    entered.wait(10)
    assert not one.turn.acquire(timeout=0.5)  # it has a holder, for long
    leave.set()
    holder.join(10)
    assert one.turn.take() == 1  # and now it has none, as after a Ctrl-C in between
    start = time.monotonic()
    with one.turn:
        assert one.turn.slot == 41
    assert time.monotonic() - start < 2
    assert one.turn.take() == 41


def test_a_lock_that_its_thread_has_left_goes_to_others_and_not_before() -> None:
    turn, entered, done, leave = Turn(3), threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        turn.acquire()
        entered.set()
        done.wait(20)

    def stay() -> None:
        hold()
        leave.wait(20)

    holder = threading.Thread(target=stay)
    holder.start()
    entered.wait(10)
    assert not turn.acquire(timeout=0.5)
    done.set()
    assert turn.acquire(timeout=2) and turn.slot == 3
    turn.release()
    assert turn.take() == 3
    leave.set()
    holder.join(10)
    turn.give(3)
    ended = threading.Thread(target=turn.acquire)
    ended.start()
    ended.join(10)
    assert turn.acquire(timeout=2) and turn.slot == 3
    turn.release()


def test_ctrl_c_while_waiting_leaves_the_lock_to_the_others() -> None:
    turn, held = Turn(), threading.Event()

    def hold() -> None:
        with turn:
            held.set()
            time.sleep(0.6)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(5)
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        turn.acquire()
    assert not turn.waiting
    thread.join(10)
    assert turn.acquire(timeout=1)
    turn.release()


def test_a_forked_child_has_a_lock_that_is_free() -> None:
    one, leave = Counter(), threading.Event()
    holder = threading.Thread(target=one.quickly, args=(lambda: leave.wait(20),))
    holder.start()
    while one.turn._numbers:
        time.sleep(0.001)
    pid = os.fork()
    if pid == 0:
        one.turn.at_fork()
        os._exit(0 if one.turn.acquire(timeout=1) else 1)
    leave.set()
    holder.join(10)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


INTERRUPTED = """
import random, signal, sys, threading, time
sys.path.insert(0, sys.argv[1])
import torch
from libraries import Stub

inside = False
def ring(*_):
    global inside
    signal.setitimer(signal.ITIMER_REAL, random.random() * 2e-3 + 1e-5)
    if inside:
        inside = False
        raise KeyboardInterrupt

stub = Stub()
comm = stub.comm(2, 0, cpu=True)
t = torch.ones(8)
calls = [comm.plan.all_reduce(t, t), lambda: comm.all_reduce(t, t), lambda: comm.all_reduce(t)]
if sys.argv[2] == "buffers":  # which go the general way
    b = (t.data_ptr(), 8, "float32")
    calls = [comm.plan.all_reduce(b, b, stream=0), lambda: comm.all_reduce(b, b, stream=0)]
for call in calls * 3:
    call()
signal.signal(signal.SIGALRM, ring)
signal.setitimer(signal.ITIMER_REAL, 1e-3)
interrupts, end = 0, time.monotonic() + 2.5
while time.monotonic() < end:
    try:
        inside = True
        while time.monotonic() < end:
            for call in calls * 50:
                call()
            stub.clear()
        inside = False
    except KeyboardInterrupt:
        interrupts += 1
signal.setitimer(signal.ITIMER_REAL, 0)
nested = 0
def once_more():
    with comm.lock:
        pass
def call_too(*_):
    global nested
    nested += 1
    for call in calls:
        call()
    once_more()
    stub.clear()
    signal.setitimer(signal.ITIMER_REAL, random.random() * 2e-3 + 1e-5)
signal.signal(signal.SIGALRM, call_too)
def work():
    for _ in range(3000):
        for call in calls:
            call()
        stub.clear()
other = threading.Thread(target=work)
other.start()
signal.setitimer(signal.ITIMER_REAL, 1e-3)
end = time.monotonic() + 2
while time.monotonic() < end:
    for call in calls * 50:
        call()
    stub.clear()
signal.signal(signal.SIGALRM, signal.SIG_IGN)
other.join(20)
slowest = 0.0
def elsewhere():
    global slowest
    start = time.monotonic()
    for call in calls:
        call()
    slowest = time.monotonic() - start
thread = threading.Thread(target=elsewhere)
thread.start()
thread.join(20)
print(interrupts, nested > 100, thread.is_alive(), other.is_alive(), slowest < 2, len(comm.lock._numbers))
print(stub.cdll.stub_overlaps(), flush=True)
comm.destroy()
"""


@pytest.mark.parametrize("what", ["tensors", "buffers"])
def test_a_storm_of_ctrl_c_leaves_a_communicator_that_all_threads_can_use(what: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", INTERRUPTED, str(ROOT / "tests" / "support"), what]
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    interrupts, *rest = done.stdout.split()
    assert int(interrupts) > 200 and rest == ["True", "False", "False", "True", "1", "0"]
