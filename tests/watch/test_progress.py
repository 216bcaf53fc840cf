"""The watchdog tracks the progress of CUDA streams with its own events, leaves graph captures intact, and reports a
driver that does not answer. Uses the stub driver."""

from __future__ import annotations

from stub_driver import over_driver

MARKS = """
from pynccl.watch import progress
stream = pynccl.create_stream(1, library=library)

def mark():
    return progress.mark(library, 1, 7, {stream.handle})

def check():
    driver.stub_query(600)                       # the work is in progress
    found = mark()
    assert found.entry == 7 and len(found.events) == 1
    driver.stub_capture_elsewhere(1)             # in the default mode, in which a query would break it
    assert not found.passed() and driver.stub_spoilt() == 0
    driver.stub_capture_elsewhere(0)
    driver.stub_query(0)
    assert found.passed()
    driver.stub_query(719)                       # an error of an earlier launch, which others report
    assert found.passed() is None
    driver.stub_query(0)
    driver.stub_capture(1)
    assert mark() is None                        # an event would become part of the graph
    driver.stub_capture(0)
    assert mark() is not None
    assert progress.mark(library, 1, 7, set()).passed()   # nothing was issued on any stream

make_current(0)
check()
assert current() == 0
in_a_thread(check)                                # like the watchdog's thread, which has no context
"""


def test_a_mark_is_an_event_after_the_issued_work() -> None:
    over_driver(MARKS)


DESTROYED = """
from pynccl.watch import progress
from cuda.bindings import driver as api
make_current(1)
comm = stub.comm()
comm._track.library, comm._track.ordinal = library, 1

def issued():
    _, stream = api.cuStreamCreate(0)
    comm.all_reduce((4096, 8, "float32"), (8192, 8, "float32"), stream=int(stream))
    return stream

def complete():
    after = comm._track.head - 1
    found = progress.mark(library, 1, comm._track.head, comm._track.streams(after))
    return found is not None and found.passed()

for error, gone in ((400, True), (709, True), (719, False)):   # an error of an earlier launch does not count
    stream = issued()
    driver.stub_gone(error)
    api.cuStreamDestroy(stream)
    assert complete() == gone, error
"""


def test_calls_on_a_destroyed_stream_count_as_complete() -> None:
    over_driver(DESTROYED)


BLOCKED = """
import contextlib, io, time
from pynccl.watch import recorder, watchdog
make_current(0)
comms = [stub.comm() for _ in range(2)]
stream = pynccl.create_stream(0, library=library)

def call():
    for comm in comms:
        comm.all_reduce((4096, 8, "float32"), (8192, 8, "float32"), stream=stream)

def helpers():
    return sum(thread.name == "pynccl query" for thread in threading.enumerate())

watchdog.stop()                                  # polls are made by hand
own = watchdog.Watchdog(recorder.started())
own.stop()
watchdog.ANSWER_SECONDS = 0.05
printed = io.StringIO()

def check():
    with contextlib.redirect_stderr(printed):
        own.poll()
    time.sleep(0.05)

call()
check()
driver.stub_block(1)
"""
FINDING = "the CUDA driver does not answer: the launch queue is full or the device hangs"


def test_a_driver_that_does_not_answer_is_reported() -> None:
    code = f"""
while printed.getvalue().count({FINDING!r}) < 2:
    check()
    assert helpers() <= 1                        # at most one thread is stuck
driver.stub_block(0)
while [comm._track.comm_head.completed for comm in comms] != [1, 1] or helpers():
    check()
"""
    over_driver(BLOCKED + code, PYNCCL_WATCH_TIMEOUT="0.3")
