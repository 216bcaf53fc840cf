"""Config structs carry the size and version of the loaded library, and a field that it lacks is refused."""

from __future__ import annotations

import ctypes

import pytest
from libraries import Stub

import pynccl
from pynccl import CollConfig, CommConfig, UniqueId
from pynccl.bindings import abi
from pynccl.comm.init import comm_init_rank

# A library newer than the header is given the header's struct.
GIVEN = {(2, 18, 3): (48, 21803), (2, 27, 7): (72, 22707), (2, 32, 3): (120, 23203), (2, 40, 1): (120, 23203)}


@pytest.mark.parametrize("version", GIVEN)
def test_a_library_is_given_its_own_size_and_version(version: abi.Version) -> None:
    stub = Stub(version)
    pynccl.Communicator.init(3, bytes(128), 2, config=CommConfig(max_ctas=4), library=stub.cpu_library)
    struct, init = stub.calls()[-2:]
    assert (init.name, init.args["nranks"], init.args["rank"]) == ("ncclCommInitRankConfig", 3, 2)
    size, code = GIVEN[version]
    assert struct.args == {"size": size, "version": code, "magic": 0xCAFEBEEF}


def launch_orders(stub: Stub) -> list[int]:
    """The field of each struct that C was given; -1: it does not have it, or it is not set."""
    found = []
    for struct in (bytes.fromhex(call.hex) for call in stub.calls() if call.name == "config"):
        value = abi.Config.from_buffer_copy(struct.ljust(ctypes.sizeof(abi.Config), b"\xff")).launchOrderImplicit
        found.append(-1 if value == abi.UNDEF_INT else value)
    stub.clear()
    return found


def test_kernels_of_two_communicators_begin_in_the_order_of_the_calls_where_nccl_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pynccl.Communicator, "_own_ordinal", lambda comm: None)  # there is no driver
    plain, named, off = None, CommConfig(comm_name="tp"), CommConfig(launch_order_implicit=0)
    for version, expected in (((2, 32, 3), [1, 1, 0]), ((2, 31, 2), [1, 1, 0]), ((2, 30, 3), [-1])):
        stub = Stub(version)
        configs = [plain, named, off] if version >= (2, 31) else [plain, named]
        found = []
        for config in configs:
            handle = comm_init_rank(stub.library, 2, [UniqueId()], 1, None, config, None)
            found += launch_orders(stub)
        assert handle and found == expected
        comm = stub.comm()
        for config in configs:
            comm.split(0, config=config)
        assert launch_orders(stub) == expected[-len(configs) + 1 :]  # without a config it is its parent's
    assert comm_init_rank(stub.cpu_library, 2, [UniqueId()], 1, None, None, None)
    assert launch_orders(stub) == []


def test_a_field_that_the_library_lacks_is_refused() -> None:
    for version, call, said in (
        (
            (2, 21, 5),
            lambda stub: pynccl.Communicator.init(
                2, bytes(128), 0, config=CommConfig(comm_name="tp"), library=stub.cpu_library
            ),
            "CommConfig.comm_name needs NCCL >= 2.27; loaded 2.21.5 from {}; leave it None",
        ),
        (
            (2, 31, 2),
            lambda stub: stub.comm().all_reduce(SEND, RECV, stream=0, config=CollConfig(launch_completion_event=64)),
            "CollConfig.launch_completion_event needs NCCL >= 2.32; loaded 2.31.2 from {}; leave it None",
        ),
    ):
        stub = Stub(version)
        with pytest.raises(pynccl.NcclVersionError) as caught:
            call(stub)
        assert str(caught.value) == said.format(stub.path)
        assert not {"ncclCommInitRankConfig", "ncclAllReduceConfig"} & set(stub.names())


SEND, RECV, SMALL = (1 << 20, 8, "float32"), (1 << 30, 8, "float32"), (1 << 30, 2, "float32")
COLLECTIVES: dict[str, tuple[str, tuple[object, ...], int]] = {  # C function, arguments, count that arrives
    "all_reduce": ("ncclAllReduceConfig", (SEND, RECV), 8),
    "broadcast": ("ncclBroadcastConfig", (SEND, RECV), 8),
    "reduce": ("ncclReduceConfig", (SEND, RECV), 8),
    "all_gather": ("ncclAllGatherConfig", ((1 << 20, 2, "float32"), RECV), 2),
    "reduce_scatter": ("ncclReduceScatterConfig", (SEND, SMALL), 2),
    "all_to_all": ("ncclAlltoAllConfig", (SEND, RECV), 2),
    "gather": ("ncclGatherConfig", ((1 << 20, 2, "float32"), RECV), 2),
    "scatter": ("ncclScatterConfig", (SEND, SMALL), 2),
}


@pytest.mark.parametrize("operation", COLLECTIVES)
def test_a_collective_config_reaches_every_collective_of_a_library_that_has_it(operation: str) -> None:
    function, args, count = COLLECTIVES[operation]
    config = CollConfig(max_ctas=2, alg_selection="NVLS", user_profiler_tag=7)
    old = Stub((2, 28, 9))
    with pytest.raises(pynccl.NcclVersionError) as caught:
        getattr(old.comm(), operation)(*args, stream=0, config=config)
    assert "needs NCCL >= 2.31; loaded 2.28.9" in str(caught.value)
    assert old.names() == []

    for version, size in (((2, 31, 2), 64), ((2, 32, 3), 72)):
        stub = Stub(version)
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
            assert struct.args == {"size": size, "version": abi.version_code(version), "magic": abi.CONFIG_MAGIC}
            filled = abi.CollConfig.from_buffer_copy(bytes.fromhex(struct.hex).ljust(72, b"\0"))
            assert (filled.maxCTAs, filled.minCTAs, filled.userProfilerTag) == (2, abi.UNDEF_INT, 7)


def test_every_field_has_its_place_in_the_struct() -> None:
    class Event:
        handle = 0x1234

    library = Stub().library
    for config, since in ((CommConfig, abi.CONFIG_SINCE), (CollConfig, abi.COLL_CONFIG_SINCE)):
        ours = {name.replace("_", "") for name in config._fields}
        assert ours == {name.lower() for name in since} - {"ext"}
    struct = CommConfig(blocking=False, max_ctas=16, net_name="Socket", comm_name="tp").to_struct(library)
    assert (struct.blocking, struct.maxCTAs, struct.netName, struct.commName) == (0, 16, b"Socket", b"tp")
    assert (struct.minCTAs, struct.shrinkShare, struct.nvlsHostMode) == (abi.UNDEF_INT,) * 3
    struct = CollConfig(launch_completion_event=Event()).to_struct(library)
    assert (struct.launchCompletionEvent, struct.forceAlgSelection, struct.userProfilerTag) == (0x1234, 1, 0)
