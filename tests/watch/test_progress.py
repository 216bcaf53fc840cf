"""The watchdog learns how far CUDA streams have come by events of its own, disturbs no capture of a graph, and is not
silenced by a driver that does not answer; over the stub driver."""

from __future__ import annotations

from stub_driver import over_driver

MARKS = """
from pynccl.watch import progress
stream = pynccl.create_stream(1, library=library)

def mark():
    return progress.mark(library, 1, 7, {stream.handle})

def look():
    driver.stub_query(600)                       # the work is under way
    found = mark()
    assert found.entry == 7 and len(found.events) == 1
    driver.stub_capture_elsewhere(1)             # in the default mode, in which a question would break it
    assert not found.passed() and driver.stub_spoilt() == 0
    driver.stub_capture_elsewhere(0)
    driver.stub_query(0)
    assert found.passed()
    driver.stub_query(719)                       # an error of an earlier launch, which others report
    assert found.passed() is None
    driver.stub_query(0)
    driver.stub_capture(1)
    assert mark() is None                        # an event would become a part of the graph
    driver.stub_capture(0)
    assert mark() is not None
    assert progress.mark(library, 1, 7, set()).passed()   # nothing was issued on any stream

make_current(0)
look()
assert current() == 0
in_a_thread(look)                                # as the watchdog's, which has no context
"""


def test_a_mark_is_an_event_behind_what_was_issued() -> None:
    over_driver(MARKS)


GONE = """
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

for error, gone in ((400, True), (709, True), (719, False)):   # an error of an earlier launch says nothing of it
    stream = issued()
    driver.stub_gone(error)
    api.cuStreamDestroy(stream)
    assert complete() == gone, error
"""


def test_the_calls_of_a_stream_that_somebody_has_ended_count_as_complete() -> None:
    over_driver(GONE)


SILENT = """
import contextlib, io, time
from pynccl.watch import recorder, watchdog
make_current(0)
comms = [stub.comm() for _ in range(2)]
stream = pynccl.create_stream(0, library=library)

def call():
    for comm in comms:
        comm.all_reduce((4096, 8, "float32"), (8192, 8, "float32"), stream=stream)

def helpers():
    return sum(thread.name == "pynccl question" for thread in threading.enumerate())

watchdog.stop()                                  # looks are taken by hand
own = watchdog.Watchdog(recorder.started())
own.stop()
watchdog.ANSWER_SECONDS = 0.05
said = io.StringIO()

def look():
    with contextlib.redirect_stderr(said):
        own.look()
    time.sleep(0.05)

call()
look()
driver.stub_block(1)
"""
FINDING = "the CUDA driver does not answer: the launch queue is full or the device hangs"


def test_a_driver_that_does_not_answer_is_the_finding() -> None:
    code = f"""
while said.getvalue().count({FINDING!r}) < 2:
    look()
    assert helpers() <= 1                        # never more than one that is stuck
driver.stub_block(0)
while [comm._track.comm_head.completed for comm in comms] != [1, 1] or helpers():
    look()
"""
    over_driver(SILENT + code, PYNCCL_WATCH_TIMEOUT="0.3")
