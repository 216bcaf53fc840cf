"""Bad input is an error that says what was passed, what was expected and what to do, and nothing is launched.

The stub library records what reaches C; a communicator of rank 1 of 4 on GPU 0, or one on CPU memory.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bad_calls import BAD, F4, Bad, CudaArray, Hostile, refuse
from libraries import Stub
from ranks import RankPool

import pynccl
from pynccl import Communicator


def test_a_bad_call_is_refused_before_anything_is_launched() -> None:
    for bad in BAD:
        stub = Stub()
        comm = stub.comm(nranks=4, rank=1, cpu=True)
        refuse(comm, bad)
        assert stub.names() == [], bad
        comm.all_reduce(torch.zeros(4))  # and the communicator is none the worse for it
        assert stub.names() == ["ncclAllReduce"], bad


def test_memory_of_another_device_is_refused() -> None:
    stub = Stub()
    comm = stub.comm()
    for name, call in {
        "all_reduce: send": lambda: comm.all_reduce(torch.zeros(4)),
        "all_gather: send": lambda: comm.all_gather(np.zeros(4)),
        "recv: buf": lambda: comm.recv(torch.zeros(4), 0),
    }.items():
        with pytest.raises(ValueError) as caught:
            call()
        assert f"{name} is on cpu, the communicator on cuda:0; move it there" in str(caught.value)
    on_gpu_1 = CudaArray(stream=1)
    on_gpu_1.device = SimpleNamespace(id=1)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="send is on cuda:1, the communicator on cuda:0; move it there"):
        comm.all_reduce(on_gpu_1, on_gpu_1)
    assert stub.names() == []


ID, GOT = bytes(128), "expected what get_unique_id() returned"
BAD_INITS: list[tuple[tuple[Any, ...], str]] = [
    ((2, ID, 2), "rank is 2, expected 0..1 for 2 ranks"),
    ((2, ID, -1), "rank is -1, expected 0..1 for 2 ranks"),
    ((0, ID, 0), "nranks is 0, expected a number of ranks >= 1"),
    (("2", ID, 0), "nranks is '2', expected a number of ranks"),
    ((2, bytes(127), 0), f"unique_id is bytes of 127 bytes, {GOT}"),
    ((2, None, 0), f"unique_id is NoneType, {GOT}, or its 128 bytes"),
    ((1, ID, 0, "cuda:0"), "device is 'cuda:0', but the host library works on the CPU"),
]


def test_a_bad_init_is_refused_before_it_reaches_the_library() -> None:
    stub = Stub()
    for args, says in BAD_INITS:
        with pytest.raises(ValueError) as caught:
            Communicator.init(*args, library=stub.cpu_library)
        assert says in str(caught.value)
    with pytest.raises(ValueError, match=r"device is 'cpu', but .* works on GPUs; set PYNCCL_LIBRARY=host for the CPU"):
        Communicator.init(1, ID, 0, "cpu", library=stub.library)
    with pytest.raises(ValueError, match="devices is 0, expected at least one"):
        Communicator.init_all(0, library=stub.library)
    assert stub.names() == []


def test_an_operation_after_the_end_says_how_it_ended() -> None:
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
            lambda comm: comm.async_error(),
            lambda comm: comm.finalize(),
            lambda comm: comm.pre_mul_sum(1.0, F4),
            lambda comm: comm.handle,
        ):
            with pytest.raises(pynccl.NcclInvalidUsage) as caught:
                call(comm)
            assert f"this communicator (rank {comm.rank} of 4 on cpu) was {end}" in str(caught.value)
            assert "make a new one with Communicator.init" in str(caught.value)
    assert stub.names() == []


def test_a_communicator_that_ends_inside_a_group_launches_nothing() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    with pytest.raises(pynccl.NcclInvalidUsage, match="was destroyed"), pynccl.group():
        comm.all_reduce(torch.zeros(4))
        comm.destroy()
    assert stub.names() == ["ncclCommGetAsyncError", "ncclCommFinalize", "ncclCommDestroy"]


def refused_on_rank_1(comm: Communicator) -> float:
    """Rank 1 makes all the bad calls; rank 0 would hang or fail if any of them had been sent out."""
    if comm.rank == 1:
        for bad in BAD:
            refuse(comm, bad)
        with pytest.raises(ValueError, match="not divisible"), pynccl.group():
            comm.all_reduce(torch.ones(4))
            comm.reduce_scatter(torch.zeros(10))
    return comm.all_reduce(torch.tensor(comm.rank + 1.0)).item()


def test_other_ranks_see_nothing_of_a_bad_call(ranks: RankPool) -> None:
    assert ranks.run(4, refused_on_rank_1) == [10.0] * 4


# An argument of another type than the function takes is named, with what was expected, before anything happens.

HOST = "host"
abort: Any = pynccl.abort
NO_LIBRARY = "TypeError: library is 'host', expected a pynccl.Library, such as pynccl.load('host') returns, or None"
# Functions of the package; `c` is a communicator of one rank of the host library, so that they may begin.
BAD_KINDS: list[Bad] = [
    (lambda c: pynccl.get_unique_id(HOST), NO_LIBRARY),
    (lambda c: Communicator.init(1, bytes(128), 0, library=HOST), NO_LIBRARY),
    (lambda c: Communicator.init_all(1, library=HOST), NO_LIBRARY),
    (lambda c: Communicator.init_all(1, library={}), "TypeError: library is {}, expected"),
    (lambda c: pynccl.mem_alloc(4, library=HOST), NO_LIBRARY),
    (lambda c: pynccl.mem_pool(HOST), NO_LIBRARY),
    (lambda c: pynccl.create_stream(library=HOST), NO_LIBRARY),
    (lambda c: pynccl.create_event(library=HOST), NO_LIBRARY),
    (lambda c: pynccl.current_stream(library=HOST), NO_LIBRARY),
    (lambda c: pynccl.param("NCCL_DEBUG", HOST), NO_LIBRARY),
    (lambda c: pynccl.param(5), "ValueError: param: key is 5, expected the name of a parameter"),
    (lambda c: pynccl.load(1.5), "TypeError: spec is 1.5, expected 'host', 'nccl', or the path"),
    (lambda c: pynccl.from_file(3, 0, 1), "TypeError: from_file: path is 3, expected the path of a file"),
    (lambda c: pynccl.from_store(3, 0, 1), "TypeError: store is 3, which has no add, get, set, check"),
    (lambda c: pynccl.load("a\0b"), "NcclLibraryNotFound: give the path of a libnccl"),
    (
        lambda c: Communicator.init(1, bytes(128), 0, config=1, library=c.library),
        "TypeError: config is 1, expected a pynccl.CommConfig, or None",
    ),
    (
        lambda c: Communicator.join_grown(2, bytes(128), 1, config="x", library=c.library),
        "TypeError: config is 'x', expected a pynccl.CommConfig, or None",
    ),
    (
        lambda c: pynccl.CommConfig(comm_name="\ud800").to_struct(c.library),
        "ValueError: CommConfig.comm_name is '\\ud800', expected a string without NUL",
    ),
    (
        lambda c: Communicator.init(1, bytes(128), 0, timeout="1", library=c.library),
        "ValueError: timeout is '1', expected a number of seconds > 0, or None",
    ),
    (
        lambda c: pynccl.from_store({}, 0, 1),
        "TypeError: store is {}, which has no add, set, check; expected a torch.distributed store",
    ),
    (
        lambda c: pynccl.from_store(torch.distributed.HashStore(), 0, 1, library=c.library, local_rank="0"),
        "ValueError: local_rank is '0', expected the number of this rank on its node",
    ),
    (
        lambda c: Communicator.from_process_group("x"),
        "TypeError: group is 'x', expected a torch.distributed process group, a DeviceMesh",
    ),
    (lambda c: Communicator.from_process_group(), "ValueError: call torch.distributed.init_process_group first"),
    (lambda c: pynccl.create_stream(priority="high", library=c.library), "ValueError: priority is 'high', expected an"),
    (pynccl.abort, "TypeError: abort: comms is <pynccl.Communicator … pass [comm]"),
    (lambda c: abort([c, None]), "TypeError: abort: comms holds None, expected a list of communic"),
    (lambda c: pynccl.create_stream(library=c.library).record(5), "TypeError: record: event is a int, expected one of"),
    (
        lambda c: pynccl.create_stream(library=c.library).wait(5),
        "TypeError: wait: event is a int, expected an event or",
    ),
    (lambda c: pynccl.create_event(library=c.library).wait("x"), "TypeError: stream is a str, expected one of"),
    (
        lambda c: pynccl.create_event(library=c.library).elapsed_time(5),
        "TypeError: end is a int, expected another event",
    ),
    (lambda c: pynccl.mem_pool(c.library), "RuntimeError: or pass another library="),
    (lambda c: pynccl.mem_alloc(4, Hostile(), library=c.library), "TypeError: Hostile … has no NCCL data type"),
]


def test_an_argument_of_another_kind_is_named_with_what_was_expected() -> None:
    for bad in BAD_KINDS:
        with Communicator.init_all(1, library=pynccl.load("host"))[0] as comm:
            refuse(comm, bad)
            assert comm.all_reduce(torch.ones(2)).tolist() == [1.0, 1.0], bad  # neither aborted nor in a group


def test_what_was_freed_or_closed_says_what_to_make() -> None:
    memory = pynccl.mem_alloc(4, "float32", library=pynccl.load("host"))
    memory.free()
    with pytest.raises(ValueError, match=r"was freed; make another with pynccl\.mem_alloc"):
        memory.describe()
    stream: Any = pynccl.create_stream(library=pynccl.load("host"))
    stream.close()
    with pytest.raises(pynccl.NcclInvalidUsage, match=r"is closed; make another with pynccl\.create_stream"):
        stream.record()


def test_a_timeout_may_be_longer_than_any_clock_takes() -> None:
    library = pynccl.load("host")
    for timeout in (float("inf"), 1e30, np.float32(60), None):
        with Communicator.init(1, pynccl.get_unique_id(library), 0, timeout=timeout, library=library) as comm:
            assert comm.timeout in (None, 60.0)
