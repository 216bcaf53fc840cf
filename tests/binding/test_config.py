"""Config structs carry the size and version of the loaded library, and a field that it lacks is refused."""

from __future__ import annotations

import ctypes
import subprocess

import pytest
from libraries import Stub, compile_c
from test_abi import CONFIG_BYTES, compiler_options, header, header_version

import pynccl
from pynccl import CollConfig, CommConfig, UniqueId
from pynccl.bindings import abi
from pynccl.comm.init import comm_init_rank


def given_to_c(stub: Stub, config: CommConfig) -> dict[str, int]:
    """Header fields of the struct that an init with `config` hands to the library."""
    pynccl.Communicator.init(3, bytes(128), 2, config=config, library=stub.cpu_library)
    struct, init = stub.calls()[-2:]
    assert (init.name, init.args["nranks"], init.args["rank"]) == ("ncclCommInitRankConfig", 3, 2)
    return struct.args


@pytest.mark.parametrize("version", CONFIG_BYTES)
def test_a_library_is_given_its_own_size_and_version(version: abi.Version) -> None:
    assert given_to_c(Stub(version), CommConfig(max_ctas=4)) == {
        "size": CONFIG_BYTES[version],
        "version": abi.version_code(version),
        "magic": 0xCAFEBEEF,
    }


def test_a_library_newer_than_the_header_is_given_the_headers() -> None:
    given = given_to_c(Stub((2, 40, 1)), CommConfig(max_ctas=4))
    assert (given["size"], given["version"]) == (CONFIG_BYTES[2, 32, 3], 23203)


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
    stub = Stub((2, 21, 5))
    with pytest.raises(pynccl.NcclVersionError) as caught:
        pynccl.Communicator.init(2, bytes(128), 0, config=CommConfig(comm_name="tp"), library=stub.cpu_library)
    assert str(caught.value) == (
        f"CommConfig.comm_name needs NCCL >= 2.27; loaded 2.21.5 from {stub.path}; leave it None"
    )
    assert "ncclCommInitRankConfig" not in stub.names()


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
def test_a_collective_config_needs_a_library_that_has_it(operation: str) -> None:
    stub = Stub((2, 28, 9))
    with pytest.raises(pynccl.NcclVersionError) as caught:
        call = getattr(stub.comm(), operation)
        call(*COLLECTIVES[operation][1], stream=0, config=CollConfig(max_ctas=2))
    message = f"CollConfig.max_ctas needs NCCL >= 2.31; loaded 2.28.9 from {stub.path}; leave it None"
    assert str(caught.value) == message
    assert stub.names() == []


@pytest.mark.parametrize("version", [(2, 31, 2), (2, 32, 3)])
@pytest.mark.parametrize("operation", COLLECTIVES)
def test_a_collective_config_reaches_every_collective(operation: str, version: abi.Version) -> None:
    function, args, count = COLLECTIVES[operation]
    stub = Stub(version)
    comm = stub.comm(rank=0)
    config = CollConfig(max_ctas=2, alg_selection="NVLS", user_profiler_tag=7)
    getattr(comm, operation)(*args, stream=5, config=config)
    plan = getattr(comm.plan, operation)(*args, stream=5, config=config)
    with pynccl.group():
        getattr(comm, operation)(*args, stream=5, config=config)
    plan()
    names = ["config", function]
    assert stub.names() == [*names, "ncclGroupStart", *names, "ncclGroupEnd", *names]
    for struct, call in ((stub.calls()[i], stub.calls()[i + 1]) for i in (0, 3, 6)):
        assert (call.args["count"], call.args["stream"]) == (count, 5)
        assert (struct.args["size"], struct.args["version"], struct.args["magic"]) == (
            64 if version < (2, 32) else 72,
            abi.version_code(version),
            abi.CONFIG_MAGIC,
        )
        filled = abi.CollConfig.from_buffer_copy(bytes.fromhex(struct.hex).ljust(72, b"\0"))
        assert (filled.maxCTAs, filled.minCTAs, filled.userProfilerTag) == (2, abi.UNDEF_INT, 7)


def test_a_field_of_a_collective_that_the_library_lacks_is_refused() -> None:
    stub = Stub((2, 31, 2))
    with pytest.raises(pynccl.NcclVersionError, match=r"CollConfig\.launch_completion_event needs NCCL >= 2\.32"):
        stub.comm().all_reduce(SEND, RECV, stream=0, config=CollConfig(launch_completion_event=64))
    assert stub.names() == []


def test_every_field_has_its_place_in_the_struct() -> None:
    library = Stub().library
    for config, since in ((CommConfig, abi.CONFIG_SINCE), (CollConfig, abi.COLL_CONFIG_SINCE)):
        ours = {name.replace("_", "") for name in config._fields}
        assert ours == {name.lower() for name in since} - {"ext"}
    struct = CommConfig(blocking=False, max_ctas=16, net_name="Socket", comm_name="tp").to_struct(library)
    assert (struct.blocking, struct.maxCTAs, struct.netName, struct.commName) == (0, 16, b"Socket", b"tp")
    assert (struct.minCTAs, struct.shrinkShare, struct.nvlsHostMode) == (abi.UNDEF_INT,) * 3


def test_an_event_is_given_by_its_handle() -> None:
    class Event:
        handle = 0x1234

    struct = CollConfig(launch_completion_event=Event()).to_struct(Stub().library)
    assert struct.launchCompletionEvent == 0x1234
    assert (struct.forceAlgSelection, struct.userProfilerTag) == (1, 0)


def from_c(name: str, initializer: str) -> bytes:
    """The bytes of nccl.h's own initializer macro."""
    source = f"""
#include "{header()}"
#include <stdio.h>
#include <string.h>
int main(void) {{
  {name} filled = {initializer}, copied;
  memset(&copied, 0, sizeof copied); /* a copy, field by field of equal layout, leaves the padding alone */
  memcpy(&copied, &filled, sizeof copied);
  fwrite(&copied, sizeof copied, 1, stdout);
  return 0;
}}
"""
    program = compile_c(source, f"init_{name}", ["-O0", *compiler_options()])
    return subprocess.run([program], capture_output=True, check=True, timeout=30).stdout


def fields(struct: ctypes.Structure) -> dict[str, object]:
    return {name: getattr(struct, name) for name, _ in struct._fields_}  # type: ignore[misc]


def test_an_empty_config_is_the_headers_initializer() -> None:
    library = Stub(header_version()).library
    theirs = from_c("ncclConfig_t", "NCCL_CONFIG_INITIALIZER")
    ours = CommConfig().to_struct(library)
    assert ours.size == len(theirs)
    whole = theirs + bytes(ours)[len(theirs) :]
    assert fields(ours) == fields(abi.Config.from_buffer_copy(whole))
    if header_version() >= (2, 31):
        theirs = from_c("ncclCollConfig_t", "NCCL_COLLCONFIG_INITIALIZER")
        ours_too = CollConfig().to_struct(library)
        whole = theirs + bytes(ours_too)[len(theirs) :]
        assert fields(ours_too) == fields(abi.CollConfig.from_buffer_copy(whole))
