"""Shrink, grow, revoke, suspend and mem_stats of communicators: the calls that reach the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from libraries import Stub

import pynccl
from pynccl import CommConfig, Communicator, UniqueId
from pynccl.bindings import abi

IDS = [bytes([1] * 128), bytes([2] * 128), UniqueId.from_buffer_copy(bytes([3] * 128))]


def test_shrink_passes_excluded_ranks() -> None:
    stub = Stub()
    comm = stub.comm(nranks=6, rank=3, cpu=True)
    smaller = comm.shrink([0, 5])
    (call,) = stub.calls()
    assert (call.name, call.args) == ("ncclCommShrink", {"count": 2, "first": 0, "last": 5, "flags": 0})
    assert (smaller.rank, smaller.size, smaller.timeout) == (2, 4, comm.timeout)
    stub.clear()
    comm.shrink((4,), abort=True, config=CommConfig(shrink_share=False))
    struct, call = stub.calls()
    assert call.args == {"count": 1, "first": 4, "last": 4, "flags": 1}  # NCCL_SHRINK_ABORT
    assert abi.Config.from_buffer_copy(bytes.fromhex(struct.hex)).shrinkShare == 0
    assert comm._track is not None
    assert [rank for rank in range(6) if comm._track.comm_head.excluded[rank]] == [4]  # those of the last shrink


def test_a_shrink_that_nccl_cannot_do_says_what_to_call_instead() -> None:
    stub = Stub()
    comm = stub.comm(nranks=3, rank=1, cpu=True)
    stub.fail("ncclCommShrink", abi.Result.REMOTE_ERROR)
    for abort, remedy in ((False, "use survivors()"), (True, "call survivors() in place of shrink()")):
        with pytest.raises(pynccl.NcclRemoteError) as caught:
            comm.shrink([2], abort=abort)
        assert str(caught.value).splitlines()[-1].endswith(remedy)
        assert caught.value.code == abi.Result.REMOTE_ERROR


def test_grow_and_join_with_grow_id() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    identity = comm.grow_id()
    assert bytes(identity) == bytes([9] * 128)
    assert [(call.name, call.args) for call in stub.calls()] == [("ncclCommGetUniqueId", {"rank": 1})]
    for unique_id, passed_id in ((identity, 9), (None, -1)):
        stub.clear()
        grown = comm.grow(6, unique_id)
        assert (grown.rank, grown.size, grown.timeout) == (1, 6, comm.timeout)
        (call,) = stub.calls()
        assert (call.name, call.args) == ("ncclCommGrow", {"member": 1, "nranks": 6, "id": passed_id, "rank": -1})
    stub.clear()
    joined = Communicator.join_grown(6, bytes(identity), 5, library=stub.cpu_library)
    assert (joined.rank, joined.size) == (5, 6)
    assert stub.calls()[0].args == {"member": 0, "nranks": 6, "id": 9, "rank": 5}


INVALID: list[tuple[Callable[[Communicator], Any], str]] = [
    (lambda comm: comm.shrink([]), r"shrink: exclude is \[\] on rank 1, expected other ranks, each once"),
    (lambda comm: comm.shrink([1]), r"shrink: exclude is \[1\] on rank 1, expected other ranks"),
    (lambda comm: comm.shrink([0, 0]), r"shrink: exclude is \[0, 0\] on rank 1"),
    (lambda comm: comm.shrink([4]), r"shrink: exclude is 4, expected a rank in 0\.\.3"),
    (lambda comm: comm.grow(4), r"grow: nranks is 4, expected more than the 4 existing ranks"),
    (lambda comm: comm.grow(6, b"short"), "grow: unique_id has 5 bytes, expected 128"),
    (lambda comm: Communicator.join_grown(6, bytes(128), 6, library=comm.library), r"rank is 6, expected 0\.\.5"),
    (lambda comm: Communicator.init(8, [], 2, library=comm.library), "unique_id is a list of 0 ids, expected 1 to 8"),
    (lambda comm: Communicator.init(8, IDS * 3, 2, library=comm.library), "is a list of 9 ids, expected 1 to 8"),
]


def test_invalid_shrink_and_grow_raise() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    for call, message in INVALID:
        with pytest.raises(ValueError, match=message):
            call(comm)
    assert stub.names() == []


# function, the last version without it, the first version with it, a use
SINCE: list[tuple[str, abi.Version, str, Callable[[Communicator], Any]]] = [
    ("ncclCommShrink", (2, 26, 5), "2.27", lambda comm: comm.shrink([0])),
    ("ncclCommRevoke", (2, 27, 7), "2.28", lambda comm: comm.revoke()),
    ("ncclCommGrow", (2, 28, 9), "2.29", lambda comm: comm.grow(6)),
    ("ncclCommSuspend", (2, 28, 9), "2.29", lambda comm: comm.suspend()),
    ("ncclCommMemStats", (2, 28, 9), "2.29", lambda comm: comm.mem_stats()),
    ("ncclCommInitRankScalable", (2, 22, 3), "2.23", lambda comm: Communicator.init(8, IDS, 2, library=comm.library)),
]


@pytest.mark.parametrize(("function", "version", "needed", "use"), SINCE, ids=[row[0] for row in SINCE])
def test_elastic_errors_of_old_libraries_and_ended_communicators(
    function: str, version: abi.Version, needed: str, use: Callable[[Communicator], Any]
) -> None:
    old = Stub(version)
    with pytest.raises(pynccl.NcclVersionError, match=rf"^{function} needs NCCL >= {needed}; loaded "):
        use(old.comm(cpu=True))
    assert old.names() == []
    stub = Stub()
    stub.fail(function, 6)
    with pytest.raises(pynccl.NcclRemoteError, match=rf"^{function.removesuffix('Scalable')}.* failed"):
        use(stub.comm(cpu=True))
    if function != "ncclCommInitRankScalable":
        comm = stub.comm(cpu=True)
        comm.abort()
        with pytest.raises(pynccl.NcclInvalidUsage, match="was aborted; make a new one"):
            use(comm)
