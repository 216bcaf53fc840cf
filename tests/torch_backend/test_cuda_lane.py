"""What a call of the backend costs on a GPU, and who may use an event again: over a stub driver and a stub libnccl.

The stub driver counts its calls and is as strict about contexts as NVIDIA's. torch has no CUDA here: CPU tensors stand
in for CUDA tensors, and functions of this test for torch's current stream. tests/gpu has the same on a GPU."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from stub_driver import failures_over_driver

pytestmark = pytest.mark.skipif(
    not find_spec("cuda") or not find_spec("cuda.core"), reason="cuda-core is not installed"
)

IMPORTS = "import torch, torch.distributed, pynccl.torch_backend, cuda.core"  # once, before the forks
SETUP = """
import contextlib, gc, os, sys, time, tracemalloc, weakref
from types import SimpleNamespace
import torch, torch.distributed as dist
from cuda.bindings import driver as api
import pynccl.torch_backend
from pynccl.interop import events
from pynccl.torch_backend.work import Lane
from pynccl.watch import watchdog

driver.stub_called.restype = ctypes.c_char_p
torch_state = SimpleNamespace(stream=0, device=0, capturing=False, set=[])

class ExternalStream:
    def __init__(self, handle, device):
        self.stream_id, self.device_index, self.device_type = handle, device.index, 1

def set_stream(handle, device, kind):
    torch_state.set.append(handle)

torch._C._cuda_getCurrentRawStream = lambda device: torch_state.stream
torch._C._cuda_getCurrentStream = lambda device: (torch_state.stream, device, 1)
torch._C._cuda_setStream = set_stream
torch._C._cuda_getDevice = lambda: torch_state.device
torch.cuda.is_current_stream_capturing = lambda: torch_state.capturing
torch.cuda.ExternalStream = ExternalStream
torch.cuda.stream = lambda stream: contextlib.nullcontext()

make_current(0)
dist.init_process_group("pynccl", store=dist.HashStore(), rank=0, world_size=1)
watchdog.stop()  # tests ask its functions
comm = stub.comm(1, 0)
lane = Lane(comm)
comm._ordinal = -1  # it takes tensors in CPU memory
backend = dist.group.WORLD._get_backend(torch.device("cpu"))
backend._lanes["cpu"] = lane
lane.side
x, y, many = torch.ones(64), torch.ones(64), torch.ones(64, 2)

def issue():
    "The Work itself: from torch 2.14 on, dist.all_reduce returns its C++ half."
    return backend.allreduce([x])

def driver_calls():
    found = driver.stub_called().decode().split()
    driver.stub_forget_calls()
    return found

def free():
    return [pointer.value for pointer in events._pools[0]]

driver.stub_forget_calls()
"""

# Name -> the call; calls of the driver; calls of NCCL; the most frames of this package, and bytes at a time: those of
# this version, which no change should exceed unnoticed. Beside each, the host time for which they stand, as a ratio to
# torch's NCCL backend on an H200, and that backend's microseconds.
COSTS = """
ORDER = ["cuEventRecord", "cuStreamWaitEvent", "cuEventRecord"]
WAIT = ["cuStreamWaitEvent"]
A = "ncclAllReduce"

def begin(tensor):
    return dist.all_reduce(tensor, async_op=True)

def batched():
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(x)
        dist.all_reduce(y)
    manager.wait()

gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
CALLS = {
    "all_reduce": (lambda: dist.all_reduce(x), [], [A], 23, 3500),  # 1.0 of 16.6
    "broadcast": (lambda: dist.broadcast(x, 0), [], ["ncclBroadcast"], 26, 3500),  # 1.0 of 15.6
    "all_gather": (lambda: gather(y, x), [], ["ncclAllGather"], 29, 4000),  # 1.0 of 19.8
    "reduce_scatter": (lambda: scatter(y, x), [], ["ncclReduceScatter"], 30, 4000),
    "async + wait": (lambda: begin(x).wait(), ORDER + WAIT, [A], 41, 4700),  # 1.15 of 21.1
    "async + future": (lambda: begin(x).get_future().wait(), ORDER, [A], 48, 4900),  # 1.3 of 23 to 46
    "batch of 2": (batched, ORDER + WAIT, ["ncclGroupStart", A, A, "ncclGroupEnd"], 104, 9000),
    "async copy": (lambda: begin(many[:, 0]).wait(), ORDER + WAIT, [A], 44, 5400),
}
gc.disable()
for name, (call, in_driver, in_nccl, frames, nbytes) in CALLS.items():
    for _ in range(100):
        call()
        stub.clear()
    call()
    assert stub.names() == in_nccl, (name, stub.names())
    driver.stub_forget_calls()
    for _ in range(50):
        call()
    found = driver_calls()
    assert [one for one in found if one in ORDER] == 50 * in_driver, (name, found)
    # Nobody tells the lane that a future was waited for: it asks the events, one query for each, a few at a time.
    others = len(found) - 50 * len(in_driver)
    assert others <= (2 * 50 if "future" in name else 0), (name, others, found)
    seen = []
    def profile(frame, event, argument):
        if event == "call" and os.sep + "pynccl" + os.sep in frame.f_code.co_filename:
            seen.append(frame.f_code.co_name)
    def profiled():
        seen.clear()
        sys.setprofile(profile)
        call()
        sys.setprofile(None)
        return list(seen)
    found = min((profiled() for _ in range(5)), key=len)
    assert frames / 2 < len(found) <= frames, (name, len(found), found)
    def blocks():
        before = sys.getallocatedblocks()
        for _ in range(20):
            call()
        if name == "batch of 2":          # torch's coalescing manager makes reference cycles
            gc.collect()
        return sys.getallocatedblocks() - before
    assert min(blocks() for _ in range(5)) < 20, (name, "keeps memory of every call")
    tracemalloc.start()
    call()
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    call()
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert peak <= nbytes, (name, peak)
    assert peak > nbytes / 2 or sys.version_info < (3, 11), (name, peak)  # Python 3.10 takes less
    stub.clear()
"""

CASES = {
    "an event is used again once its work and all others are gone": """
first = issue()
handle = first.event.handle
driver.stub_query(0)
assert first.is_completed()
later = [issue() for _ in range(6)]
assert len({work.event.handle for work in [first, *later]}) == 7
driver.stub_query(600)
assert not first.is_completed() and first.event.handle == handle
for work in [first, *later]:
    work.wait()
used = {work.event.handle for work in later}
del first, later, work
issue().wait()                            # takes what was waited for from the shelf
assert handle in free()
issue().wait()
assert len(free()) > 4 and used & set(free()) and not events._spent
comm._track.recorded = (0, 0, None)
""",
    "while the lane and the watchdog use an event it is not recorded again": """
work = issue()
entry, stream, event = comm._track.recorded
assert (entry, stream, event) == (comm._track.head, lane.side.handle, work.event)
driver_calls()
found = watchdog.mark(library, 0, entry, [stream], comm._track.recorded)
assert driver_calls() == [] and found.events == [event]       # no event of its own
driver.stub_query(600)
assert found.passed() is False
driver.stub_query(0)
assert found.passed() is True
work.wait()
del work, event
issue().wait()
assert found.events[0].handle not in free()
comm.all_reduce(x, x, stream=lane.side)   # another call behind it: the event stands for the calls before
other = watchdog.mark(library, 0, comm._track.head, [stream], comm._track.recorded)
assert other.events[0] is not comm._track.recorded[2]
""",
    "an event recorded in a capture is not used again and not queried": """
make_current(0)
torch_state.stream = int(api.cuStreamCreate(0)[1])
torch_state.capturing = True
driver.stub_query(907)
work = issue()
captured = work.event.handle
assert comm._track.recorded[2] is not work.event
reference = weakref.ref(work._kept[0][0].keywords["send"])
assert reference() is not None
work.wait()
assert reference() is None
for _ in range(30):
    issue().wait()
del work
assert "cuEventQuery" not in driver_calls() and captured not in free() and free() == []
torch_state.capturing = False
issue()
assert len(events._spent) == 0            # destroyed when the next event was made
torch_state.stream, torch_state.capturing = 0, True           # the default stream is never captured
assert not issue().event.captured
""",
    "buffers live until wait and without it until the call has run": """
def buffer(asynchronous=True):
    work = issue()
    return work, weakref.ref(work._kept[0][0].keywords["send"]) if work._kept else lambda: None

driver.stub_query(600)
work, reference = buffer()
work.wait()
assert reference() is None
work, reference = buffer()
torch_state.stream = int(api.cuStreamCreate(0)[1])            # whoever waits there says nothing about the other stream
work.wait()
torch_state.stream = 0
del work
gc.collect()
assert reference() is not None
for _ in range(40):
    issue().wait()
assert reference() is not None
driver.stub_query(0)
for _ in range(100):
    issue().wait()
assert reference() is None
driver_calls()
dropped = [buffer()[1] for _ in range(100)]
found = driver_calls()
assert found.count("cuEventQuery") < 120 and len(found) < 600, (found.count("cuEventQuery"), len(found))
assert sum(reference() is not None for reference in dropped) < 8
driver.stub_query(600)
works = [issue() for _ in range(300)]
assert driver_calls().count("cuEventQuery") < 10              # works that are waited for later, all of them
for work in works:
    work.wait()
del works, work
issue().wait()
assert len(lane._shelf) < 12              # those that were dropped before, which have not run now
""",
    "whichever gpu is current and in any thread": """
made = int(api.cuStreamCreate(0)[1])
def work():
    driver_calls()
    issue().wait()
    assert driver.stub_waiting() == 0
for device in (1, 0, None):
    for stream in (0, made):
        torch_state.stream, torch_state.device = stream, device or 0
        make_current(device)
        work()
        assert current() == device
make_current(1)
torch_state.device = 0                    # as in a thread that has no context yet
in_a_thread(work)
""",
    "errors of the driver raise": """
work = issue()
driver.stub_record_code(719)
error = raised_by(issue, pynccl.NcclUnhandledCudaError)
assert "cuEventRecord on cuda:0 failed: CUDA_ERROR_LAUNCH_FAILED (719)" in str(error), error
driver.stub_record_code(0)
driver.stub_query(719)
raised_by(work.is_completed, pynccl.NcclUnhandledCudaError)
driver.stub_query(0)
stub.fail("ncclAllReduce", 1)
raised_by(issue, pynccl.NcclError)
stub.fail("ncclAllReduce", 0)
issue().wait()
""",
    "the future is completed in the order of the side stream": """
torch_state.stream = made = int(api.cuStreamCreate(0)[1])
work = issue()
future = work.get_future()
assert torch_state.set == [lane.side.handle, made] and future.done()
assert work.get_future() is future and len(torch_state.set) == 2
[result] = future.wait()
assert result is x
def failing(*_):
    raise RuntimeError("no")
torch.futures.Future = lambda devices=None: SimpleNamespace(set_result=failing, then=lambda f: None)
raised_by(issue().get_future, RuntimeError)
assert torch_state.set == [lane.side.handle, made] * 2
""",
    "threads": """
def run():
    for _ in range(100):
        work = issue()
        work.wait()
        issue()
        stub.clear()
threads = [threading.Thread(target=run) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(60)
assert not any(thread.is_alive() for thread in threads)
assert len(set(free())) == len(free()) and len(lane._shelf) < 40
""",
    "current_stream keeps one object for each stream of torch": """
own = int(api.cuStreamCreate(0)[1])
def now():
    return pynccl.current_stream(0, library=library)
default = now()
assert now() is default and pynccl.current_stream(1, library=library) is not default
torch._C._cuda_getCurrentStream = lambda device: (3, device, 1)          # torch's own stream
torch_state.stream = own
assert now() is now() and now() is not default and now().handle == own
other = int(api.cuStreamCreate(0)[1])
torch_state.stream = other
torch._C._cuda_getCurrentStream = lambda device: (other, device, 1)      # an ExternalStream, which may be destroyed
assert now() is not now()
torch_state.stream = 0
default.close()
assert now() is not default and now().record() is not None
side = pynccl.create_stream(0, library=library)
side.wait(now())
driver_calls()
side.wait(now())
assert driver_calls() == ["cuEventRecord", "cuStreamWaitEvent"], driver_calls()
""",
}


def test_calls_make_no_more_calls_of_cuda_and_python_than_needed() -> None:
    failed = failures_over_driver({"costs": SETUP + COSTS}, IMPORTS)
    assert not failed, failed


def test_events_and_buffers() -> None:
    failed = failures_over_driver({name: SETUP + code for name, code in CASES.items()}, IMPORTS)
    assert not failed, failed
