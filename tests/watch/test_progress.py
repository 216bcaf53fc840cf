"""The watchdog learns how far CUDA streams have come by events of its own, and disturbs no capture of a graph."""

from __future__ import annotations

from stub_driver import over_driver

CODE = """
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
    made = driver.stub_events()
    assert progress.mark(library, 1, 7, set()).passed()   # nothing was issued on any stream
    assert driver.stub_events() == made

make_current(0)
look()
assert current() == 0
in_a_thread(look)                                # as the watchdog's, which has no context
print("looked")
"""


def test_a_mark_is_an_event_behind_what_was_issued() -> None:
    assert over_driver(CODE).strip() == "looked"


CLOSED = """
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
"""


def test_of_a_stream_that_was_closed_or_dropped_nothing_is_asked() -> None:
    code = """
for end in ("close", "drop"):
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
print(driver.stub_after_end())
"""
    assert over_driver(CLOSED + code).strip() == "0"


def test_the_calls_of_a_stream_that_another_library_has_destroyed_count_as_complete() -> None:
    code = """
for error in (400, 709):
    _, stream = api.cuStreamCreate(0)
    call(int(stream))
    assert complete(comm._track.head - 1)
    driver.stub_gone(error)
    api.cuStreamDestroy(stream)
    assert complete(comm._track.head - 1), error
_, stream = api.cuStreamCreate(0)
call(int(stream))
driver.stub_gone(719)
api.cuStreamDestroy(stream)
print(complete(comm._track.head - 1))          # an error of an earlier launch does not say that it is gone
"""
    assert over_driver(CLOSED + code).strip() == "False"
