"""The GPU that a call needs is current for its time only, in any thread; "cuda" is the one that is current already.

The real cuda.core runs here over a stub driver, which is as strict about contexts as NVIDIA's."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from stub_driver import broken_pair, failures_over_driver, over_driver

from pynccl.bindings.library import gpu_count
from pynccl.interop import devices

pytestmark = pytest.mark.skipif(
    not find_spec("cuda") or not find_spec("cuda.core"), reason="cuda-core is not installed"
)

# Each runs in a process of its own, behind stub_driver's PRELUDE.
CASES = {
    "the callers gpu is current again after every call": """
start = 1
comm = stub.comm()
CALLS = {
    "create_stream": lambda: pynccl.create_stream(1 - start, library=library),
    "create_event": lambda: pynccl.create_event(1 - start, library=library),
    "current_stream": lambda: pynccl.current_stream(1 - start, library=library),
    "mem_alloc": lambda: pynccl.mem_alloc(4, device=1 - start, library=library),
    "barrier": comm.barrier,
    "init": lambda: pynccl.Communicator.init(
        1, bytes(128), 0, device=1 - start, timeout=None, library=library).destroy(),
    "init_all": lambda: [comm.destroy() for comm in pynccl.Communicator.init_all([1 - start], library=library)],
}
for start in (1, 0):
    for name, call in CALLS.items():
        make_current(start)
        comm._scratch = None
        call()
        assert current() == start, f"{name} leaves {current()} current, not {start}"
start = 0
for name, call in CALLS.items():  # a thread without any
    comm._scratch = None
    in_a_thread(call)
""",
    "the callers gpu is current again after an error": """
make_current(0)
for name, call in (
    ("", lambda: pynccl.create_stream(1, priority=99, library=library)),
    ("", lambda: pynccl.create_stream(7, library=library)),
    ("ncclMemAlloc", lambda: pynccl.mem_alloc(4, device=1, library=library)),
    ("ncclCommInitRankConfig", lambda: pynccl.Communicator.init(1, bytes(128), 0, 1, timeout=None, library=library)),
    ("", lambda: pynccl.create_stream(1, library=library).record("no event")),
):
    stub.fail(name, 1)
    error = refused(call, ValueError, TypeError, pynccl.NcclError)
    assert current() == 0, f"{current()} after {error}"
""",
    "registrations are made and ended on the communicators gpu": """
from types import SimpleNamespace
comm = stub.comm()  # of GPU 0
seen = []
class Watched:
    "The library, with a look at the current GPU; it leaves GPU 0 current, as NCCL does at times."
    is_host = False
    def __getattr__(self, name):
        function = getattr(library, name)
        def call(*args):
            if name != "check":
                seen.append((name, current()))
                make_current(0)
            return function(*args)
        return call
comm.library = Watched()
for start in (1, None):
    make_current(start)
    for make in (comm.register, comm.window):
        with make((4096, 1024, "float32")):
            assert current() == start
        assert current() == start
assert {device for _, device in seen} == {0} and len(seen) == 8, seen
comm.library = library
""",
    "the memory of a communicator is freed in a thread without a context": """
make_current(1)
for end in ("abort", "destroy"):
    comm = stub.comm()
    comm.barrier()
    assert driver.stub_pinned() == 1
    getattr(comm, end)()  # in a thread that waits with a deadline
    assert driver.stub_pinned() == 0, end
    assert current() == 1
comm = stub.comm()
comm.barrier()
in_a_thread(lambda: comm.scratch(1 << 16))  # another one instead
assert driver.stub_pinned() == 1
in_a_thread(comm.abort)
assert driver.stub_pinned() == 0
""",
    "streams and events work with another gpu current and in a thread without a context": """
make_current(0)
here, there = (pynccl.create_stream(i, library=library) for i in (0, 1))
timed = [pynccl.create_event(1, timing=True, library=library) for _ in range(2)]
class Torchs:  # its stream says which GPU it is of, which matters for the default stream
    cuda_stream, device_index = 0, 1
class ByProtocol:
    def __cuda_stream__(self):
        return 0, there.handle
def work():
    there.record().synchronize()
    there.record(timed[0])
    there.record(timed[1])
    assert timed[0].elapsed_time(timed[1]) == 1 and timed[1].query() and there.query()
    here.wait(there)
    there.wait(here)
    here.wait(there.record())
    here.wait(Torchs())
    here.wait(ByProtocol())
    pynccl.current_stream(1, library=library).wait(pynccl.current_stream(0, library=library))
    pynccl.current_stream(1, library=library).record()
    there.synchronize()
    pynccl.create_stream(1, library=library).close()
for ordinal in (0, 1):
    make_current(ordinal)
    work()
    assert current() == ordinal
in_a_thread(work)
""",
    "what a stream holds is asked for on its own gpu": """
comm = stub.comm()
raw = (4096, 2, "float32")
made = [pynccl.create_stream(0, library=library) for _ in range(2)]
def work():
    stream = made.pop()
    for _ in range(3):
        comm.all_reduce(raw, raw, stream=stream)
    assert len(stream._kept) == 1, len(stream._kept)  # the last call's, behind which its event was recorded
    driver.stub_query(600)
    comm.all_reduce(raw, raw, stream=stream)
    stream.close()
    driver.stub_query(0)
    comm.all_reduce(raw, raw, stream=other)  # asks about what the stream that was closed has held
other = pynccl.create_stream(1, library=library)
make_current(1)
work()
assert current() == 1
in_a_thread(work)
""",
    "a stream asks the driver whether it is idle": """
make_current(0)
stream = pynccl.create_stream(1, library=library)
made = driver.stub_events()
assert stream.query() is True
driver.stub_query(600)
assert stream.query() is False
assert (driver.stub_queries(), driver.stub_events()) == (2, made)
driver.stub_query(719)
error = str(refused(stream.query, pynccl.NcclError))
assert "CUDA_ERROR_LAUNCH_FAILED (719)" in error and "cuda:1" in error, error
driver.stub_query(0)
driver.stub_capture(1)
assert "captured into a CUDA graph" in str(refused(stream.query, pynccl.NcclError))
assert driver.stub_queries() == 3  # a question would have broken the capture
""",
    # Which has the handle 0, as cuda.core says of a stream that was closed.
    "a closed stream is not the default stream": """
comm = stub.comm()
raw = (4096, 2, "float32")
stream, other = (pynccl.create_stream(0, library=library) for _ in range(2))
stream.close()
stream.close()
stub.clear()
for call in (
    lambda: comm.all_reduce(raw, raw, stream=stream), lambda: other.wait(stream), lambda: stream.wait(other),
    stream.record, stream.query, stream.synchronize, lambda: stream.handle,
):
    assert "this stream is closed" in str(refused(call, pynccl.NcclInvalidUsage))
assert not stub.calls()
""",
    "cuda is the current gpu and in a launch the local ranks": """
from pynccl.bootstrap import join
from pynccl.comm import init
make_current(1)
for name in ("cuda", None):
    assert pynccl.create_stream(name, library=library).device == 1
    assert pynccl.current_stream(name, library=library).device == 1
    assert pynccl.create_event(name, library=library).device == 1
    assert pynccl.mem_alloc(4, device=name, library=library).device == "cuda:1"
    assert init.choose_device(library, name) == 1
    assert join.default_device(library, name, 0) == 0
    assert join.prepare(library, name, 0, 1, None).device == 0
    assert join.default_device(library, name, None) == name
assert devices.device_ordinal("cuda") == 1
stub.clear()
pynccl.Communicator.init_all(["cuda"], library=library)
make_current(None)
assert devices.device_ordinal("cuda") == 0
assert join.default_device(library, "cuda:0", 1) == "cuda:0" and join.default_device(library, 0, 1) == 0
for call, said in (
    (lambda: pynccl.create_stream("cpu", library=library), "'cpu', expected a GPU"),
    (lambda: join.default_device(library, "cuda", 2), "sees 2 GPUs"),
):
    assert said in str(refused(call, ValueError))
""",
    # cuEventQuery is illegal while any stream is captured in CUDA's default mode, unless the thread has relaxed it.
    "what streams keep breaks no capture of another stream": """
make_current(0)
stream, other = pynccl.create_stream(0, library=library), pynccl.create_stream(0, library=library)
driver.stub_query(600)
for one in (stream, other):
    one.hold(object())
one = stream = None                              # dropped, with work under way
driver.stub_capture_elsewhere(1)
for _ in range(3):
    other.hold(object())
assert driver.stub_spoilt() == 0
assert driver.stub_capture_mode() == 0           # the mode of the thread is what it was
driver.stub_query(0)
other.hold(object())
other.close()
assert driver.stub_spoilt() == 0
""",
}


def test_calls_keep_to_the_gpus_that_they_are_for() -> None:
    failed = failures_over_driver(CASES)
    assert not failed, failed


def test_torch_says_which_gpu_is_current_once_it_uses_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch may have chosen one without telling the driver so far, as behind `with torch.cuda.device(1):`."""
    device = SimpleNamespace(Device=lambda ordinal: SimpleNamespace(device_id=1))
    monkeypatch.setattr(devices, "gpu_problem", lambda: "")
    monkeypatch.setattr(devices, "cuda_core", lambda: device)
    assert devices.current_device() == 1
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert devices.current_device() == devices.device_ordinal(torch.device("cuda")) == 3


@pytest.mark.skipif(gpu_count() > 0, reason="this machine has a GPU")
def test_without_a_gpu_cuda_is_number_0() -> None:
    assert devices.device_ordinal("cuda") == 0 and devices.current_device() == 0
    assert devices.names_no_ordinal(torch.device("cuda")) and not devices.names_no_ordinal("cuda:0")


def test_a_cuda_core_that_cannot_be_imported_is_named_with_the_bindings_and_the_remedy(tmp_path: Path) -> None:
    over_driver(
        """
comm = stub.comm()
for call in (lambda: pynccl.create_stream(0, library=library), lambda: pynccl.mem_alloc(4, library=library),
             comm.barrier, lambda: pynccl.Communicator.init(1, bytes(128), 0, library=library)):
    first, second = str(refused(call, ImportError)).splitlines()
    assert first.startswith("cuda-core 1.0.0 with cuda-bindings 13.0.3 cannot be imported: cuda.bindings."), first
    assert second.startswith("  pip install 'cuda-core>=1.0.1'"), second
""",
        str(broken_pair(tmp_path)),
    )
