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
    assert driver.stub_capture_mode() == 2       # relaxed: a question breaks no capture of another thread
    assert not found.passed()
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
