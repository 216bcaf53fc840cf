"""Invalid input raises an error that says what was passed, what was expected and what to do. Nothing is launched.

The stub library records the C calls of a communicator of rank 1 of 4, on GPU 0 or on CPU memory.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bad_calls import BAD, Bad, CudaArray, Hostile, check_raises
from libraries import Stub

import pynccl
from pynccl import Communicator


def test_invalid_call_raises_before_launch() -> None:
    for bad in BAD:
        stub = Stub()
        comm = stub.comm(nranks=4, rank=1, cpu=True)
        check_raises(comm, bad)
        assert stub.names() == [], bad
        comm.all_reduce(torch.zeros(4))  # the communicator stays usable
        assert stub.names() == ["ncclAllReduce"], bad


def test_buffer_on_another_device_raises() -> None:
    stub = Stub()
    comm = stub.comm()
    with pytest.raises(ValueError, match="recv: buf is on cpu, the communicator is on cuda:0; move the buffer"):
        comm.recv(torch.zeros(4), 0)
    on_gpu_1 = CudaArray(stream=1)
    on_gpu_1.device = SimpleNamespace(id=1)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="send is on cuda:1, the communicator is on cuda:0; move the buffer"):
        comm.all_reduce(on_gpu_1, on_gpu_1)
    assert stub.names() == []


def test_call_after_destroy_or_abort_says_which() -> None:
    stub = Stub()
    destroyed, aborted = stub.comm(cpu=True), stub.comm(rank=2, cpu=True)
    destroyed.destroy()
    aborted.abort()
    stub.clear()
    for comm, end in ((destroyed, "destroyed"), (aborted, "aborted")):
        for call in (
            lambda comm: comm.all_reduce(torch.zeros(4)),
            lambda comm: comm.send(torch.zeros(4), 0),
            lambda comm: comm.split(0),
            lambda comm: comm.barrier(),
            lambda comm: comm.handle,
        ):
            with pytest.raises(pynccl.NcclInvalidUsage) as caught:
                call(comm)
            assert f"this communicator (rank {comm.rank} of 4 on cpu) was {end}" in str(caught.value)
            assert "make a new one with pynccl.init or pynccl.init_all" in str(caught.value)
    assert stub.names() == []
    comm = stub.comm(cpu=True)
    with pytest.raises(pynccl.NcclInvalidUsage, match="was destroyed"), pynccl.group():
        comm.all_reduce(torch.zeros(4))
        comm.destroy()
    assert stub.names() == ["ncclCommGetAsyncError", "ncclCommFinalize", "ncclCommDestroy"]


HOST, ID = "host", bytes(128)
GOT = "expected an id from get_unique_id()"
NO_LIBRARY = "TypeError: library is 'host', expected a pynccl.Library (see pynccl.load), or None"


def init(*args: Any, **options: Any) -> Any:
    return lambda c: Communicator.init(*args, **{"library": c.library, **options})


# Calls of functions of the package; `c` is a communicator of one rank of the host library.
BAD_KINDS: list[Bad] = [
    (init(2, ID, -1), "ValueError: Communicator.init: rank is -1, expected 0..1 for 2 ranks"),
    (init(1, ID, 1), "ValueError: Communicator.init: rank is 1, expected 0, the only rank"),
    (init(1, ID, 0, timeout=-1), "ValueError: Communicator.init: timeout is -1, expected a number of seconds"),
    (init(2, bytes(127), 0), "ValueError: Communicator.init: unique_id has 127 bytes, expected 128"),
    (init(2, 7, 0), f"ValueError: Communicator.init: unique_id is an int, {GOT}"),
    (
        init(1, ID, 0, "cuda:0"),
        "ValueError: Communicator.init: device is 'cuda:0', but the host library works on the CPU",
    ),
    (init(1, ID, 0, config=1), "TypeError: config is 1, expected a pynccl.CommConfig, or None"),
    (lambda c: Communicator.init_all(0, library=c.library), "ValueError: init_all: devices is 0, expected one or more"),
    (
        lambda c: Communicator.init_all(12345, library=c.library),
        "ValueError: init_all: devices is 12345, expected a number of devices up to 1024, or a list",
    ),
    (
        lambda c: Communicator.init_all(["cuda:0"], library=c.library),
        "ValueError: init_all: device is 'cuda:0', but the host library works on the CPU",
    ),
    (
        lambda c: Communicator.init_all(["cpu", "cpu"], library=c.library),
        "ValueError: init_all: devices is ['cpu', 'cpu'], expected one or more, each once",
    ),
    (lambda c: pynccl.get_unique_id(HOST), NO_LIBRARY),
    (lambda c: pynccl.load(1.5), "TypeError: load: spec is 1.5, expected 'host', 'nccl', the path"),
    (lambda c: pynccl.from_file(3, 0, 1), "TypeError: from_file: path is 3, expected the path of a file"),
    (
        lambda c: pynccl.from_store({}, 0, 1),
        "TypeError: from_store: store is {}, which has no add, set, check; expec",
    ),
    (lambda c: Communicator.from_process_group("x"), "TypeError: group is 'x', expected a torch.distributed process"),
    (lambda c: pynccl.create_stream(priority="high", library=c.library), "ValueError: priority is 'high', expected an"),
    (
        lambda c: pynccl.create_stream(library=c.library).record(5),
        "TypeError: record: event is of type int, expected a host event",
    ),
    (
        lambda c: pynccl.create_stream(library=c.library).wait(5),
        "TypeError: wait: event is of type int, expected a host event",
    ),
    (lambda c: pynccl.mem_alloc(4, Hostile(), library=c.library), "TypeError: Hostile … has no NCCL data type"),
    (
        lambda c: pynccl.mem_alloc(4, "f4", library=c.library),
        "TypeError: mem_alloc: dtype is 'f4', expected one of bfloat16",
    ),
    (lambda c: c.all_gather_v(torch.ones(2), counts=[1, 1]), "ValueError: expected 1 count per rank (1 in all), got 2"),
    (lambda c: c.all_gather_v(torch.ones(2), counts={2}), "TypeError: all_gather_v: counts is {2}, expected a list of"),
    (lambda c: c.plan.group({1}), "TypeError: plan.group: plans is {1}, expected a list of plans"),
    (lambda c: c.broadcast(torch.ones(2), root=3), "ValueError: broadcast: root is 3, expected 0, the only rank"),
    (lambda c: pynccl.load("/no/lib.so"), "NcclLibraryNotFound: load: spec is '/no/lib.so': cannot open shared object"),
]


def test_wrong_argument_type_error_names_argument() -> None:
    for bad in BAD_KINDS:
        with Communicator.init_all(1, library=pynccl.load("host"))[0] as comm:
            check_raises(comm, bad)
            assert comm.all_reduce(torch.ones(2)).tolist() == [1.0, 1.0], bad  # neither aborted nor in a group
    with pytest.raises(ValueError, match=r"device is 'cpu', but .* works on GPUs; set PYNCCL_LIBRARY=host for the CPU"):
        Communicator.init(1, ID, 0, "cpu", library=Stub().library)
