"""The GPU that a call needs is current for its time only, in any thread; "cuda" is the one that is current already.

The real cuda.core runs here over a stub driver, which is as strict about contexts as NVIDIA's."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from stub_driver import broken_pair, over_driver

from pynccl.bindings.library import gpu_count
from pynccl.interop import devices

pytestmark = pytest.mark.skipif(
    not find_spec("cuda") or not find_spec("cuda.core"), reason="cuda-core is not installed"
)

CALLS = """
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
"""


def test_the_callers_gpu_is_current_again_after_every_call() -> None:
    over_driver(f"""
start = 1
{CALLS}
for start in (1, 0):
    for name, call in CALLS.items():
        make_current(start)
        comm._scratch = None
        call()
        assert current() == start, f"{{name}} leaves {{current()}} current, not {{start}}"
start = 0
for name, call in CALLS.items():  # a thread without any
    comm._scratch = None
    in_a_thread(call)
""")


def test_the_callers_gpu_is_current_again_after_an_error() -> None:
    over_driver("""
make_current(0)
for name, call in (
    ("", lambda: pynccl.create_stream(1, priority=99, library=library)),
    ("", lambda: pynccl.create_stream(7, library=library)),
    ("ncclMemAlloc", lambda: pynccl.mem_alloc(4, device=1, library=library)),
    ("ncclCommInitRankConfig", lambda: pynccl.Communicator.init(1, bytes(128), 0, 1, timeout=None, library=library)),
    ("", lambda: pynccl.create_stream(1, library=library).record("no event")),
):
    stub.fail(name, 1)
    try:
        call()
    except (ValueError, TypeError, pynccl.NcclError) as error:
        assert current() == 0, f"{current()} after {error}"
    else:
        raise AssertionError("no error")
""")


def test_registrations_are_made_and_ended_on_the_communicators_gpu() -> None:
    over_driver("""
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
""")


def test_the_memory_of_a_communicator_is_freed_in_a_thread_without_a_context() -> None:
    over_driver("""
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
""")


def test_streams_and_events_work_with_another_gpu_current_and_in_a_thread_without_a_context() -> None:
    over_driver("""
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
""")


def test_what_a_stream_holds_is_asked_for_on_its_own_gpu() -> None:
    over_driver("""
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
""")


def test_a_stream_asks_the_driver_whether_it_is_idle() -> None:
    over_driver("""
make_current(0)
stream = pynccl.create_stream(1, library=library)
made = driver.stub_events()
assert stream.query() is True
driver.stub_query(600)
assert stream.query() is False
assert (driver.stub_queries(), driver.stub_events()) == (2, made)
driver.stub_query(719)
try:
    stream.query()
    raise AssertionError("no error")
except pynccl.NcclError as error:
    assert "CUDA_ERROR_LAUNCH_FAILED (719)" in str(error) and "cuda:1" in str(error), error
driver.stub_query(0)
driver.stub_capture(1)
try:
    stream.query()
    raise AssertionError("no error")
except pynccl.NcclError as error:
    assert "captured into a CUDA graph" in str(error), error
assert driver.stub_queries() == 3  # a question would have broken the capture
""")


def test_a_closed_stream_is_not_the_default_stream() -> None:
    """Which has the handle 0, as cuda.core says of a stream that was closed."""
    over_driver("""
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
    try:
        call()
        raise AssertionError("no error")
    except pynccl.NcclInvalidUsage as error:
        assert "this stream is closed" in str(error)
assert not stub.calls()
""")


def test_cuda_is_the_current_gpu_and_in_a_launch_the_local_ranks() -> None:
    over_driver("""
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
for call in (
    lambda: pynccl.create_stream("cpu", library=library),
    lambda: join.default_device(library, "cuda", 2),
):
    try:
        call()
        raise AssertionError("no error")
    except ValueError as error:
        assert "'cpu', expected a GPU" in str(error) or "sees 2 GPUs" in str(error), error
""")


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
    try:
        call()
        raise AssertionError("no error")
    except ImportError as error:
        first, second = str(error).splitlines()
        assert first.startswith("cuda-core 1.0.0 with cuda-bindings 13.0.3 cannot be imported: cuda.bindings."), error
        assert second.startswith("  pip install 'cuda-core>=1.0.1'"), error
""",
        str(broken_pair(tmp_path)),
    )


def test_what_streams_keep_breaks_no_capture_of_another_stream() -> None:
    """cuEventQuery is illegal while any stream is captured in CUDA's default mode, unless the thread has relaxed it."""
    over_driver("""
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
""")
