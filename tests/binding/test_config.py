"""Config structs have the size and version of the loaded library; fields that it lacks raise an error."""

from __future__ import annotations

from typing import Any

import pytest
from libraries import Stub

import pynccl
from pynccl import CollConfig, CommConfig
from pynccl.bindings import abi

# Version -> struct size and version code. A library newer than the header gets the header's struct.
EXPECTED = {(2, 18, 3): (48, 21803), (2, 27, 7): (72, 22707), (2, 32, 3): (120, 23203), (2, 40, 1): (120, 23203)}


def test_config_has_struct_size_and_version_of_library() -> None:
    for version, (size, code) in EXPECTED.items():
        stub = Stub(version)
        pynccl.Communicator.init(3, bytes(128), 2, config=CommConfig(max_ctas=4), library=stub.cpu_library)
        struct, init = stub.calls()[-2:]
        assert (init.name, init.args["nranks"], init.args["rank"]) == ("ncclCommInitRankConfig", 3, 2)
        assert struct.args == {"size": size, "version": code, "magic": 0xCAFEBEEF}


SEND, RECV, SMALL = (1 << 20, 8, "float32"), (1 << 30, 8, "float32"), (1 << 30, 2, "float32")
PART = (1 << 20, 2, "float32")


def test_config_field_unknown_to_library_raises() -> None:
    stub = Stub((2, 21, 5))
    with pytest.raises(pynccl.NcclVersionError) as caught:
        pynccl.Communicator.init(2, bytes(128), 0, config=CommConfig(comm_name="tp"), library=stub.cpu_library)
    message = "CommConfig.comm_name needs NCCL >= 2.27; loaded 2.21.5 from {}; leave it None"
    assert str(caught.value) == message.format(stub.path) and "ncclCommInitRankConfig" not in stub.names()
    stub = Stub((2, 31, 2))
    with pytest.raises(pynccl.NcclVersionError) as caught:
        stub.comm().all_reduce(SEND, RECV, stream=0, config=CollConfig(launch_completion_event=64))
    message = "CollConfig.launch_completion_event needs NCCL >= 2.32; loaded 2.31.2 from {}; leave it None"
    assert str(caught.value) == message.format(stub.path) and stub.names() == []


COLLECTIVES: dict[str, tuple[str, tuple[object, ...], int]] = {  # C function, arguments, expected count
    "all_reduce": ("ncclAllReduceConfig", (SEND, RECV), 8),
    "broadcast": ("ncclBroadcastConfig", (SEND, RECV), 8),
    "reduce": ("ncclReduceConfig", (SEND, RECV), 8),
    "all_gather": ("ncclAllGatherConfig", (PART, RECV), 2),
    "reduce_scatter": ("ncclReduceScatterConfig", (SEND, SMALL), 2),
    "all_to_all": ("ncclAlltoAllConfig", (SEND, RECV), 2),
    "gather": ("ncclGatherConfig", (PART, RECV), 2),
    "scatter": ("ncclScatterConfig", (SEND, SMALL), 2),
}


@pytest.mark.parametrize("operation", COLLECTIVES)
def test_coll_config_reaches_every_collective(operation: str) -> None:
    function, args, count = COLLECTIVES[operation]
    config = CollConfig(max_ctas=2, alg_selection="NVLS", user_profiler_tag=7)
    old = Stub((2, 28, 9))
    with pytest.raises(pynccl.NcclVersionError, match=r"needs NCCL >= 2\.31; loaded 2\.28\.9"):
        getattr(old.comm(), operation)(*args, stream=0, config=config)
    assert old.names() == []

    stub = Stub((2, 31, 2))
    comm = stub.comm(rank=0)
    getattr(comm, operation)(*args, stream=5, config=config)
    plan = getattr(comm.plan, operation)(*args, stream=5, config=config)
    with pynccl.group():
        getattr(comm, operation)(*args, stream=5, config=config)
    plan()
    names = ["config", function]
    assert stub.names() == [*names, "ncclGroupStart", *names, "ncclGroupEnd", *names]
    for struct, call in ((stub.calls()[i], stub.calls()[i + 1]) for i in (0, 3, 6)):
        assert (call.args["count"], call.args["stream"]) == (count, 5)
        assert struct.args == {"size": 64, "version": 23102, "magic": abi.CONFIG_MAGIC}
        filled = abi.CollConfig.from_buffer_copy(bytes.fromhex(struct.hex).ljust(72, b"\0"))
        assert (filled.maxCTAs, filled.minCTAs, filled.userProfilerTag) == (2, abi.UNDEF_INT, 7)


@pytest.mark.parametrize(
    ("kind", "since"), [(CommConfig, abi.CONFIG_SINCE), (CollConfig, abi.COLL_CONFIG_SINCE)], ids=["comm", "coll"]
)
def test_docstring_lists_every_field_with_its_release(kind: Any, since: dict[str, abi.Version]) -> None:
    lines = [line.split() for line in kind.__doc__.splitlines()]
    rows = [line[:3] for line in lines if len(line) > 3 and line[1] in since]
    assert [name for name, _, _ in rows] == list(kind._fields)
    assert all(row[2] == ".".join(map(str, since[row[1]])) for row in rows)
