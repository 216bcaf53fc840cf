"""An argument of another type than the function takes is named, with what was expected, before anything happens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from bad_calls import Bad, Hostile, refuse

import pynccl
from pynccl import Communicator

HOST = "host"
abort: Any = pynccl.abort
NO_LIBRARY = ("library is 'host', expected a pynccl.Library, such as pynccl.load('host') returns, or None",)
# Functions of the package; `c` is a communicator of one rank of the host library, so that they may begin.
BAD_KINDS: dict[str, Bad] = {
    "id": Bad(lambda c: pynccl.get_unique_id(HOST), TypeError, NO_LIBRARY),
    "init": Bad(lambda c: Communicator.init(1, bytes(128), 0, library=HOST), TypeError, NO_LIBRARY),
    "init_all": Bad(lambda c: Communicator.init_all(1, library=HOST), TypeError, NO_LIBRARY),
    "falsy": Bad(lambda c: Communicator.init_all(1, library={}), TypeError, ("library is {}, expected",)),
    "memory": Bad(lambda c: pynccl.mem_alloc(4, library=HOST), TypeError, NO_LIBRARY),
    "pool": Bad(lambda c: pynccl.mem_pool(HOST), TypeError, NO_LIBRARY),
    "stream": Bad(lambda c: pynccl.create_stream(library=HOST), TypeError, NO_LIBRARY),
    "event": Bad(lambda c: pynccl.create_event(library=HOST), TypeError, NO_LIBRARY),
    "current": Bad(lambda c: pynccl.current_stream(library=HOST), TypeError, NO_LIBRARY),
    "parameter": Bad(lambda c: pynccl.param("NCCL_DEBUG", HOST), TypeError, NO_LIBRARY),
    "key": Bad(lambda c: pynccl.param(5), ValueError, ("param: key is 5, expected the name of a parameter",)),
    "spec": Bad(lambda c: pynccl.load(1.5), TypeError, ("spec is 1.5, expected 'host', 'nccl', or the path",)),
    "path": Bad(lambda c: pynccl.from_file(3, 0, 1), TypeError, ("from_file: path is 3, expected the path of a file",)),
    "store that is none": Bad(
        lambda c: pynccl.from_store(3, 0, 1), TypeError, ("store is 3, which has no add, get, set, check",)
    ),
    "spec with NUL": Bad(lambda c: pynccl.load("a\0b"), pynccl.NcclLibraryNotFound, ("give the path of a libnccl",)),
    "config": Bad(
        lambda c: Communicator.init(1, bytes(128), 0, config=0, library=c.library),
        TypeError,
        ("config is 0, expected a pynccl.CommConfig, or None",),
    ),
    "config, grown": Bad(
        lambda c: Communicator.join_grown(2, bytes(128), 1, config="x", library=c.library),
        TypeError,
        ("config is 'x', expected a pynccl.CommConfig, or None",),
    ),
    "name": Bad(
        lambda c: pynccl.CommConfig(comm_name="\ud800").to_struct(c.library),
        ValueError,
        ("CommConfig.comm_name is '\\ud800', expected a string without NUL",),
    ),
    "timeout": Bad(
        lambda c: Communicator.init(1, bytes(128), 0, timeout="1", library=c.library),
        ValueError,
        ("timeout is '1', expected a number of seconds > 0, or None",),
    ),
    "store": Bad(
        lambda c: pynccl.from_store({}, 0, 1),
        TypeError,
        ("store is {}, which has no add, set, check; expected a torch.distributed store",),
    ),
    "place": Bad(
        lambda c: pynccl.from_store(torch.distributed.HashStore(), 0, 1, library=c.library, local_rank="0"),
        ValueError,
        ("local_rank is '0', expected the number of this rank on its node",),
    ),
    "group": Bad(
        lambda c: Communicator.from_process_group("x"),
        TypeError,
        ("group is 'x', expected a torch.distributed process group, a DeviceMesh",),
    ),
    "no group": Bad(
        lambda c: Communicator.from_process_group(), ValueError, ("call torch.distributed.init_process_group first",)
    ),
    "priority": Bad(
        lambda c: pynccl.create_stream(priority="high", library=c.library),
        ValueError,
        ("priority is 'high', expected an",),
    ),
    "abort one": Bad(pynccl.abort, TypeError, ("abort: comms is <pynccl.Communicator", "pass [comm]")),
    "abort": Bad(lambda c: abort([c, None]), TypeError, ("abort: comms holds None, expected a list of communic",)),
    "record": Bad(
        lambda c: pynccl.create_stream(library=c.library).record(5),
        TypeError,
        ("record: event is a int, expected one of",),
    ),
    "wait": Bad(
        lambda c: pynccl.create_stream(library=c.library).wait(5),
        TypeError,
        ("wait: event is a int, expected an event or",),
    ),
    "event's wait": Bad(
        lambda c: pynccl.create_event(library=c.library).wait("x"), TypeError, ("stream is a str, expected one of",)
    ),
    "elapsed": Bad(
        lambda c: pynccl.create_event(library=c.library).elapsed_time(5),
        TypeError,
        ("end is a int, expected another event",),
    ),
    "pool of the host": Bad(lambda c: pynccl.mem_pool(c.library), RuntimeError, ("or pass another library=",)),
    "dtype": Bad(
        lambda c: pynccl.mem_alloc(4, Hostile(), library=c.library), TypeError, ("Hostile", "has no NCCL data type")
    ),
}


@pytest.mark.parametrize("name", BAD_KINDS)
def test_an_argument_of_another_kind_is_named_with_what_was_expected(name: str) -> None:
    with Communicator.init_all(1, library=pynccl.load("host"))[0] as comm:
        refuse(comm, BAD_KINDS[name])
        assert comm.all_reduce(torch.ones(2)).tolist() == [1.0, 1.0]  # neither aborted nor in a group


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
