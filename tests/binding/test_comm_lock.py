"""The lock of a communicator under Ctrl-C and handlers of signals: one call at a time, and nobody is left waiting."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from libraries import Stub

ROOT = Path(__file__).resolve().parents[2]


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
        stub.clear()
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
print(interrupts, nested > 100, thread.is_alive(), other.is_alive(), slowest < 2)
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
    assert int(interrupts) > 200 and rest == ["True", "False", "False", "True", "0"]
