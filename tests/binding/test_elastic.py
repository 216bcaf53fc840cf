"""Communicators that shrink, grow, stop and give their memory back: what the library is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from libraries import Stub

import pynccl
from pynccl import CommConfig, Communicator, UniqueId
from pynccl.bindings import abi

IDS = [bytes([1] * 128), bytes([2] * 128), UniqueId.from_buffer_copy(bytes([3] * 128))]


def test_a_shrink_names_the_ranks_that_go() -> None:
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


def test_members_grow_with_an_id_from_one_of_them_which_new_ranks_join() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    identity = comm.grow_id()
    assert bytes(identity) == bytes([9] * 128)
    assert [(call.name, call.args) for call in stub.calls()] == [("ncclCommGetUniqueId", {"rank": 1})]
    for given, seen in ((identity, 9), (None, -1)):
        stub.clear()
        grown = comm.grow(6, given)
        assert (grown.rank, grown.size, grown.timeout) == (1, 6, comm.timeout)
        (call,) = stub.calls()
        assert (call.name, call.args) == ("ncclCommGrow", {"member": 1, "nranks": 6, "id": seen, "rank": -1})
    stub.clear()
    joined = Communicator.join_grown(6, bytes(identity), 5, library=stub.cpu_library)
    assert (joined.rank, joined.size) == (5, 6)
    assert stub.calls()[0].args == {"member": 0, "nranks": 6, "id": 9, "rank": 5}


REFUSED: list[tuple[Callable[[Communicator], Any], str]] = [
    (lambda comm: comm.shrink([]), r"shrink: exclude is \[\] on rank 1, expected other ranks, each once"),
    (lambda comm: comm.shrink([1]), r"shrink: exclude is \[1\] on rank 1, expected other ranks"),
    (lambda comm: comm.shrink([0, 0]), r"shrink: exclude is \[0, 0\] on rank 1"),
    (lambda comm: comm.shrink([4]), r"shrink: exclude is 4, expected a rank in 0\.\.3"),
    (lambda comm: comm.grow(4), r"grow: nranks is 4, expected more than the 4 ranks that there are"),
    (lambda comm: comm.grow(6, b"short"), "unique_id is bytes of 5 bytes"),
    (lambda comm: Communicator.join_grown(6, bytes(128), 6, library=comm.library), r"rank is 6, expected 0\.\.5"),
    (lambda comm: Communicator.init(8, [], 2, library=comm.library), "unique_id is a list of 0 ids, expected 1 to 8"),
    (lambda comm: Communicator.init(8, IDS * 3, 2, library=comm.library), "is a list of 9 ids, expected 1 to 8"),
]


def test_what_cannot_shrink_or_grow_is_refused() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    for call, says in REFUSED:
        with pytest.raises(ValueError, match=says):
            call(comm)
    assert stub.names() == []


# function, the last version without it, the version that has it, a use
SINCE: list[tuple[str, abi.Version, str, Callable[[Communicator], Any]]] = [
    ("ncclCommShrink", (2, 26, 5), "2.27", lambda comm: comm.shrink([0])),
    ("ncclCommRevoke", (2, 27, 7), "2.28", lambda comm: comm.revoke()),
    ("ncclCommGrow", (2, 28, 9), "2.29", lambda comm: comm.grow(6)),
    ("ncclCommSuspend", (2, 28, 9), "2.29", lambda comm: comm.suspend()),
    ("ncclCommMemStats", (2, 28, 9), "2.29", lambda comm: comm.mem_stats()),
    ("ncclCommInitRankScalable", (2, 22, 3), "2.23", lambda comm: Communicator.init(8, IDS, 2, library=comm.library)),
]


@pytest.mark.parametrize(("function", "version", "needed", "use"), SINCE, ids=[row[0] for row in SINCE])
def test_old_libraries_failures_and_ended_communicators(
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
