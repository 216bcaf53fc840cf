"""The watchdog tracks the progress of CUDA streams with its own events, leaves graph captures intact, and reports a
driver that does not answer. Uses the stub driver."""

from __future__ import annotations

from stub_driver import over_driver

MARKS = """
from pynccl.watch import watchdog
stream = pynccl.create_stream(1, library=library)

def mark():
    return watchdog.mark(library, 1, 7, {stream.handle})

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
    assert watchdog.mark(library, 1, 7, set()).passed()   # nothing was issued on any stream

make_current(0)
check()
assert current() == 0
in_a_thread(check)                                # like the watchdog's thread, which has no context
"""


def test_a_mark_is_an_event_after_the_issued_work() -> None:
    over_driver(MARKS)


DESTROYED = """
from pynccl.watch import watchdog
from pynccl.interop.handles import vouched
from cuda.bindings import driver as api
make_current(1)
comm = stub.comm()
comm._track.library, comm._track.ordinal = library, 1

def issued():
    _, stream = api.cuStreamCreate(0)
    comm.all_reduce((4096, 8, "float32"), (8192, 8, "float32"), stream=vouched(int(stream)))
    return stream

def complete():
    after = comm._track.head - 1
    found = watchdog.mark(library, 1, comm._track.head, comm._track.streams(after, after + 1))
    return found is not None and found.passed()

for error, gone in ((400, True), (709, True), (719, False)):   # an error of an earlier launch does not count
    stream = issued()
    driver.stub_gone(error)
    api.cuStreamDestroy(stream)
    assert complete() == gone, error
"""


def test_calls_on_a_destroyed_stream_count_as_complete() -> None:
    over_driver(DESTROYED)


SOURCES = """
import dataclasses, os
from types import SimpleNamespace
from cuda.bindings import driver as api
from cuda.core import Device, Stream
from pynccl.tools.hang import table
from pynccl.watch import recorder, verdict, watchdog
from pynccl.watch.reader import read_file
watchdog.stop()                                  # polls are made by hand
own = watchdog.Watchdog(recorder.started() or recorder.recorder())
own.stop()
device = Device(0)
device.set_current()
X = (4096, 8, "float32")

class ByProtocol:
    def __init__(self, stream):
        self.handle = int(stream.handle)
    def __cuda_stream__(self):
        return 0, self.handle

class Array:
    __cuda_array_interface__ = dict(shape=(8,), typestr="<f4", data=(4096, False), version=3, stream=1234)

class TorchStream:
    __module__ = "torch.cuda.streams"
    def __init__(self):
        self.cuda_stream = int(api.cuStreamCreate(0)[1])

class OwnStream(TorchStream):
    __module__ = "model"

class ExternalStream:
    __module__ = "torch.cuda.streams"
    def __init__(self, handle):
        self.cuda_stream = handle

made, core, closed = pynccl.create_stream(0, library=library), device.create_stream(), device.create_stream()
dropped = [device.create_stream()]
KNOWN = {
    "the default stream": lambda comm: comm.all_reduce(X, X, stream=0),
    "CUDA's stream of a thread": lambda comm: comm.all_reduce(X, X, stream=2),
    "create_stream": lambda comm: comm.all_reduce(X, X, stream=made),
    "its number": lambda comm: comm.all_reduce(X, X, stream=made.handle),
    "a plan on it": lambda comm: comm.plan.all_reduce(X, X, stream=0)(made),
    "current_stream": lambda comm: comm.all_reduce(X, X, stream=pynccl.current_stream(0, library=library)),
    "cuda.core": lambda comm: comm.all_reduce(X, X, stream=core),
    "torch": lambda comm: comm.all_reduce(X, X, stream=TorchStream()),
    "torch's name of ours": lambda comm: comm.all_reduce(X, X, stream=ExternalStream(made.handle)),
    "ours after another with its handle": lambda comm: (
        comm.all_reduce(X, X, stream=Stream.from_handle(made.handle)), comm.all_reduce(X, X, stream=made)),
    "a class made of torch's": lambda comm: comm.all_reduce(X, X, stream=OwnStream()),
}
UNKNOWN = {
    "a number": lambda comm: comm.all_reduce(X, X, stream=1234),
    "a number of a group": lambda comm: group(comm, 1234),
    "a number of a plan": lambda comm: comm.plan.all_reduce(X, X, stream=1234)(),
    "another library": lambda comm: comm.all_reduce(X, X, stream=SimpleNamespace(cuda_stream=1234)),
    "the protocol only": lambda comm: comm.all_reduce(X, X, stream=ByProtocol(core)),
    "torch's name of another": lambda comm: comm.all_reduce(X, X, stream=ExternalStream(1234)),
    "an array's stream": lambda comm: comm.all_reduce(Array(), Array()),
    "closed meanwhile": lambda comm: (comm.all_reduce(X, X, stream=closed), closed.close()),
    "dropped meanwhile": lambda comm: comm.all_reduce(X, X, stream=dropped.pop()),
}

def group(comm, stream):
    with pynccl.group():
        comm.all_reduce(X, X, stream=stream)
        comm.broadcast(X, X, stream=stream)

def after(call):
    "Return the record of this process, and that of a communicator, once the watchdog has seen a call."
    comm = stub.comm()
    call(comm)
    for _ in range(4):
        own.poll()
    found = read_file(recorder.started().path)
    return found, next(record for record in found.comms if record.uid == comm._track.uid), comm

for name, call in (KNOWN | UNKNOWN).items():
    process, record, comm = after(call)
    unknown = name in UNKNOWN
    assert {one.state for one in record.calls} == {"launched" if unknown else "completed"}, name
    assert comm._track.comm_head.completed == len(record.calls), name     # it is asked no more
    process.comms = [record]
    (row,) = table.rows([process])
    operation = "broadcast #2" if "group" in name else "all_reduce #2" if "after" in name else "all_reduce #1"
    doing = f"launched {operation} (not known whether it has run)" if unknown else f"done {operation}"
    assert row.doing == doing, name
    record.size, record.calls[:] = 2, record.calls[:1]
    absent = dataclasses.replace(record, rank=0, calls=[], entered=0, completed=0)
    judged = verdict.judge([process, dataclasses.replace(process, pid=1, rank=0, comms=[absent])]).sentence
    told = "; rank 1 has perhaps waited 0." in judged and " s there (not known whether it has run)" in judged
    assert told == unknown, judged
"""


def test_only_streams_known_to_be_of_cuda_get_events_and_reports_tell_the_others() -> None:
    """The stub driver ends the process at a handle that it did not make."""
    over_driver(SOURCES, PYNCCL_WATCH_TIMEOUT="0")


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
