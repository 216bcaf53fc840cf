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
STREAMS = """
import gc
from pynccl.watch import progress
from cuda.bindings import driver as api
make_current(1)
comm = stub.comm()
comm._track.library, comm._track.ordinal = library, 1

def call(stream):
    comm.all_reduce((4096, 8, "float32"), (8192, 8, "float32"), stream=stream)

def complete(after):
    "Whether all calls so far have completed, as the watchdog asks for it."
    found = progress.mark(library, 1, comm._track.head, comm._track.streams(after))
    return found is not None and found.passed()

for end in ("close", "drop"):                    # nothing is asked of such a stream
    stream, other = pynccl.create_stream(1, library=library), pynccl.create_stream(1, library=library)
    handle = int(stream.handle)
    call(stream)
    call(other)
    after = comm._track.head - 2
    assert comm._track.streams(after) == {handle, int(other.handle)}
    stream.close() if end == "close" else None
    stream = None
    gc.collect()
    assert comm._track.streams(after) == {int(other.handle)} and complete(after)
    call(handle)                                 # CUDA may give its address to another one
    assert handle in comm._track.streams(after)
assert driver.stub_after_end() == 0
for error, gone in ((400, True), (709, True), (719, False)):   # another library has destroyed it; an earlier error
    _, stream = api.cuStreamCreate(0)
    call(int(stream))
    driver.stub_gone(error)
    api.cuStreamDestroy(stream)
    assert bool(complete(comm._track.head - 1)) == gone, error
"""


def test_a_mark_is_an_event_behind_what_was_issued_on_the_streams_that_are_there() -> None:
    for code in (MARKS, STREAMS):
        assert over_driver(code + "print('looked')").strip() == "looked"


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
