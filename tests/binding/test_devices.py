"""A call makes its GPU current only while it runs, in any thread; "cuda" means the current GPU.

The real cuda.core runs over a stub driver that is as strict about contexts as NVIDIA's."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from stub_driver import broken_pair, failures_over_driver, over_driver

pytestmark = pytest.mark.skipif(
    not find_spec("cuda") or not find_spec("cuda.core"), reason="cuda-core is not installed"
)

# Each runs in its own process, after stub_driver's PRELUDE.
CASES = {
    "the callers gpu is current again after every call, and after an error": """
start = 1
comm = stub.comm()
CALLS = {
    "create_stream": lambda: pynccl.create_stream(1 - start, library=library),
    "create_event": lambda: pynccl.create_event(1 - start, library=library),
    "mem_alloc": lambda: pynccl.mem_alloc(4, device=1 - start, library=library),
    "barrier": comm.barrier,
    "init": lambda: pynccl.Communicator.init(
        1, bytes(128), 0, device=1 - start, timeout=None, library=library).destroy(),
    "init_all": lambda: [comm.destroy() for comm in pynccl.Communicator.init_all([1 - start], library=library)],
}
for start in (1, 0):
    for name, call in CALLS.items():
        make_current(start)
        comm._scratch_memory = None
        call()
        assert current() == start, f"{name} leaves {current()} current, not {start}"
for name, call in CALLS.items():  # in a thread without a context
    comm._scratch_memory = None
    in_a_thread(call)
stub.fail("ncclMemAlloc", 1)
for call in (
    lambda: pynccl.create_stream(1, priority=99, library=library),
    lambda: pynccl.create_stream(7, library=library),
    lambda: pynccl.mem_alloc(4, device=1, library=library),
):
    error = raised_by(call, ValueError, pynccl.NcclError)
    assert current() == 0, f"{current()} after {error}"
""",
    "streams and events work with another gpu current and in a thread without a context": """
make_current(0)
here, there = (pynccl.create_stream(i, library=library) for i in (0, 1))
timed = [pynccl.create_event(1, timing=True, library=library) for _ in range(2)]
class TorchStream:  # like torch's: has the index of its GPU, which matters for the default stream
    cuda_stream, device_index = 0, 1
def work():
    there.record(timed[0])
    there.record(timed[1])
    assert timed[0].elapsed_time(timed[1]) == 1 and timed[1].query() and there.query()
    here.wait(there)
    here.wait(there.record())
    here.wait(TorchStream())
    pynccl.current_stream(1, library=library).wait(pynccl.current_stream(0, library=library))
    there.synchronize()
    pynccl.create_stream(1, library=library).close()
for ordinal in (0, 1):
    make_current(ordinal)
    work()
    assert current() == ordinal
in_a_thread(work)
""",
    "capture is asked of known streams only": """
from pynccl.comm.consistency import captured
from pynccl.interop.handles import vouched
make_current(0)
made = pynccl.create_stream(0, library=library)
for capturing in (True, False):
    driver.stub_capture(capturing)
    assert [captured(stream) for stream in (0, made.handle, vouched(made.handle), 1234)] == [capturing] * 3 + [False]
""",
    "ranks that share GPUs take turns": """
import os
from pynccl.bootstrap import join
os.environ["PYNCCL_SHARE_GPU"] = "1"
assert [join.default_device(library, device, 3) for device in (None, "cuda", "cuda:0")] == [1, 1, "cuda:0"]
""",
    # cuda.core reports handle 0 for a closed stream, which is also the handle of the default stream.
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
    assert "this stream is closed" in str(raised_by(call, pynccl.NcclInvalidUsage))
assert not stub.calls()
""",
    "cuda is the current gpu and in a launch the local ranks": """
from pynccl.bootstrap import join
from pynccl.comm import init
make_current(1)
for name in ("cuda", None):
    assert pynccl.create_stream(name, library=library).device == 1
    assert pynccl.mem_alloc(4, device=name, library=library).device == "cuda:1"
    assert init.choose_device(library, name) == 1
    assert join.default_device(library, name, 0) == 0
    assert join.default_device(library, name, None) == name
make_current(None)
assert devices.device_ordinal("cuda") == 0
assert join.default_device(library, "cuda:0", 1) == "cuda:0" and join.default_device(library, 0, 1) == 0
for call, message in (
    (lambda: pynccl.create_stream("cpu", library=library), "'cpu', expected a GPU"),
    (lambda: join.default_device(library, "cuda", 2), "sees only 2 GPUs; use --nproc-per-node=2; pass device=0"),
):
    assert message in str(raised_by(call, ValueError))
join.gpu_count = lambda: 1
quoted = "this rank takes GPU 1 (LOCAL_RANK, or RANK if that is not set), but this process sees only 1 GPU; use"
assert quoted in str(raised_by(lambda: join.default_device(library, None, 1), ValueError))
""",
}


def test_calls_use_their_gpu_and_restore_the_current_one() -> None:
    failed = failures_over_driver(CASES)
    assert not failed, failed


def test_broken_cuda_core_error_names_versions_and_remedy(tmp_path: Path) -> None:
    over_driver(
        """
comm = stub.comm()
for call in (lambda: pynccl.create_stream(0, library=library), comm.barrier):
    first, second = str(raised_by(call, ImportError)).splitlines()
    assert first.startswith("cuda-core 1.0.0 with cuda-bindings 13.0.3 cannot be imported: cuda.bindings."), first
    assert second.startswith("  pip install 'cuda-core>=1.0.1'"), second
""",
        str(broken_pair(tmp_path)),
    )
