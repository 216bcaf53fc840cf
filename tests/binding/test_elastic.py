"""Communicators that shrink, grow, stop and give their memory back: what the library is asked for."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from libraries import Stub

import pynccl
from pynccl import CommConfig, Communicator, UniqueId
from pynccl.bindings import abi

POLL = "ncclCommGetAsyncError"


def test_a_shrink_names_the_ranks_that_go() -> None:
    stub = Stub()
    comm = stub.comm(nranks=6, rank=3, cpu=True)
    smaller = comm.shrink([0, 5])
    (call,) = stub.calls()
    assert (call.name, call.args) == ("ncclCommShrink", {"count": 2, "first": 0, "last": 5, "flags": 0})
    assert (smaller.rank, smaller.size, smaller.timeout) == (2, 4, comm.timeout)
    assert comm.alive
    stub.clear()
    comm.shrink((4,), abort=True, config=CommConfig(shrink_share=False))
    struct, call = stub.calls()
    assert call.args == {"count": 1, "first": 4, "last": 4, "flags": 1}  # NCCL_SHRINK_ABORT
    assert abi.Config.from_buffer_copy(bytes.fromhex(struct.hex)).shrinkShare == 0


@pytest.mark.parametrize(
    ("exclude", "message"),
    [
        ([], r"shrink: exclude is \[\] on rank 1, expected other ranks, each once"),
        ([1], r"shrink: exclude is \[1\] on rank 1, expected other ranks"),
        ([0, 0], r"shrink: exclude is \[0, 0\] on rank 1"),
        ([4], r"shrink: exclude is 4, expected a rank in 0\.\.3"),
        ([-1], r"shrink: exclude is -1, expected a rank in 0\.\.3"),
        (["0"], r"shrink: exclude is '0', expected a rank"),
    ],
    ids=str,
)
def test_ranks_that_cannot_be_excluded_are_refused(exclude: list[Any], message: str) -> None:
    stub = Stub()
    with pytest.raises(ValueError, match=message):
        stub.comm(cpu=True).shrink(exclude)
    assert stub.names() == []


@pytest.mark.parametrize("version", [(2, 31, 1), (2, 31, 2), (2, 32, 3)])
@pytest.mark.parametrize("aborts", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_the_parent_of_an_aborting_shrink_is_aborted_where_its_destroy_would_block(
    version: tuple[int, ...], aborts: bool, fails: bool
) -> None:
    stub = Stub(version)
    comm = stub.comm(cpu=True)
    stub.fail("ncclCommShrink", 3 if fails else 0)
    with pytest.raises(pynccl.NcclInternalError) if fails else contextlib.nullcontext():
        comm.shrink([0], abort=aborts)
    stub.clear()
    comm.destroy()
    blocks = aborts and version >= (2, 31, 2)
    called = [name for name in stub.names() if name != POLL]
    assert called == (["ncclCommAbort"] if blocks else ["ncclCommFinalize", "ncclCommDestroy"])
    with pytest.raises(pynccl.NcclInvalidUsage, match="was destroyed"):
        comm.barrier()


def test_a_failed_shrink_names_the_ranks() -> None:
    stub = Stub()
    stub.fail("ncclCommShrink", 6)
    with pytest.raises(pynccl.NcclRemoteError, match=r"^ncclCommShrink\(exclude=\[0\]\) on rank 1 of 4 failed"):
        stub.comm(cpu=True).shrink([0])


def test_members_grow_with_an_id_from_one_of_them() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    identity = comm.grow_id()
    assert bytes(identity) == bytes([9] * 128)
    assert [(call.name, call.args) for call in stub.calls()] == [("ncclCommGetUniqueId", {"rank": 1})]
    for given, seen in ((identity, 9), (bytes(identity), 9), (None, -1)):
        stub.clear()
        grown = comm.grow(6, given)
        assert (grown.rank, grown.size, grown.timeout) == (1, 6, comm.timeout)
        (call,) = stub.calls()
        assert (call.name, call.args) == ("ncclCommGrow", {"member": 1, "nranks": 6, "id": seen, "rank": -1})
    stub.clear()
    comm.grow(6, config=CommConfig(max_ctas=2))
    assert stub.names() == ["config", "ncclCommGrow"]


def test_a_new_rank_joins_what_the_members_grow() -> None:
    stub = Stub()
    for given in (UniqueId.from_buffer_copy(bytes([9] * 128)), bytes([9] * 128)):
        stub.clear()
        comm = Communicator.join_grown(6, given, 5, library=stub.cpu_library)
        assert (comm.rank, comm.size) == (5, 6)
        (call,) = stub.calls()
        assert (call.name, call.args) == ("ncclCommGrow", {"member": 0, "nranks": 6, "id": 9, "rank": 5})


def test_what_cannot_grow_is_refused() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    for nranks in (4, 3, 0, "6"):
        with pytest.raises(ValueError, match=r"grow: nranks is .*, expected more than the 4 ranks that there are"):
            comm.grow(nranks)
    with pytest.raises(ValueError, match="unique_id is bytes of 5 bytes"):
        comm.grow(6, b"short")
    with pytest.raises(ValueError, match=r"rank is 6, expected 0\.\.5 for 6 ranks"):
        Communicator.join_grown(6, bytes(128), 6, library=stub.cpu_library)
    with pytest.raises(ValueError, match="unique_id is NoneType, expected what get_unique_id"):
        Communicator.join_grown(6, None, 5, library=stub.cpu_library)
    assert stub.names() == []


def test_a_new_rank_that_the_members_do_not_wait_for_is_a_timeout() -> None:
    stub = Stub()
    stub.linger("ncclCommGrow", 0.5)
    with pytest.raises(pynccl.NcclTimeout, match=r"ncclCommGrow\(nranks=6, rank=5\) did not return within"):
        Communicator.join_grown(6, bytes(128), 5, library=stub.cpu_library, timeout=0.05)


def test_an_init_with_several_ids_hands_on_all_of_them() -> None:
    stub = Stub()
    ids = [bytes([1] * 128), bytes([2] * 128), UniqueId.from_buffer_copy(bytes([3] * 128))]
    comm = Communicator.init(8, ids, 2, library=stub.cpu_library)
    (call,) = stub.calls()
    scalable = {"nranks": 8, "rank": 2, "nids": 3, "first": 1, "last": 3}
    assert (call.name, call.args) == ("ncclCommInitRankScalable", scalable)
    assert (comm.rank, comm.size) == (2, 8)
    stub.clear()
    Communicator.init(8, ids, 2, library=stub.cpu_library, config=CommConfig(max_ctas=3))
    assert stub.names() == ["config", "ncclCommInitRankScalable"]
    stub.clear()
    Communicator.init(8, ids[:1], 2, library=stub.cpu_library)  # one is no more than one
    assert stub.names() == ["ncclCommInitRank"]
    for wrong in ([], ids * 3):
        with pytest.raises(ValueError, match=f"unique_id is a list of {len(wrong)} ids, expected 1 to 8 for 8 ranks"):
            Communicator.init(8, wrong, 2, library=stub.cpu_library)


def test_a_revoked_communicator_comes_to_rest_and_is_not_finalized() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    stub.progress("ncclCommRevoke", polls=3)
    comm.revoke()
    assert stub.calls()[0].args == {"rank": 1, "flags": 0}
    assert stub.names() == ["ncclCommRevoke", *[POLL] * 3]
    assert comm.shrink([0]).size == 3
    stub.clear()
    comm.destroy()
    assert stub.names() == [POLL, "ncclCommDestroy"]  # nccl.h: a finalize after it is invalid


def test_a_revoke_that_does_not_come_to_rest_is_a_timeout() -> None:
    stub = Stub()
    comm = stub.comm()
    comm.timeout = 0.05
    stub.progress("ncclCommRevoke", polls=1 << 30)
    with pytest.raises(pynccl.NcclTimeout, match="ncclCommRevoke is still in progress"):
        comm.revoke()
    comm.abort()


def test_a_revoke_is_not_the_failure_of_what_it_stopped() -> None:
    stub = Stub()
    comm = stub.comm()
    stub.progress("ncclCommRevoke", polls=2, final=6)
    comm.revoke()
    assert comm.alive


def test_memory_is_given_back_and_taken_again() -> None:
    stub = Stub()
    comm = stub.comm()
    comm.suspend()
    comm.resume()
    assert [(call.name, call.args) for call in stub.calls()] == [
        ("ncclCommSuspend", {"rank": 1, "flags": 1}),  # NCCL_SUSPEND_MEM
        ("ncclCommResume", {"rank": 1}),
    ]
    stub.clear()
    large = 1 << 40  # what does not fit an int arrives whole
    assert comm.mem_stats() == {"suspend": large, "suspended": large + 1, "persist": large + 2, "total": large + 3}
    assert [call.args["stat"] for call in stub.calls()] == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["revoke", "suspend", "resume", "mem_stats", "grow_id"])
def test_an_ended_communicator_refuses(name: str) -> None:
    stub = Stub()
    comm = stub.comm()
    comm.abort()
    stub.clear()
    with pytest.raises(pynccl.NcclInvalidUsage, match="was aborted; make a new one"):
        getattr(comm, name)()
    assert stub.names() == []


OLD: list[tuple[str, abi.Version, str, Any]] = [
    ("ncclCommShrink", (2, 26, 5), "2.27", lambda comm: comm.shrink([0])),
    ("ncclCommRevoke", (2, 27, 7), "2.28", lambda comm: comm.revoke()),
    ("ncclCommGrow", (2, 28, 9), "2.29", lambda comm: comm.grow(6)),
    ("ncclCommGetUniqueId", (2, 28, 9), "2.29", lambda comm: comm.grow_id()),
    ("ncclCommSuspend", (2, 28, 9), "2.29", lambda comm: comm.suspend()),
    ("ncclCommResume", (2, 28, 9), "2.29", lambda comm: comm.resume()),
    ("ncclCommMemStats", (2, 28, 9), "2.29", lambda comm: comm.mem_stats()),
]


@pytest.mark.parametrize(("function", "version", "needed", "use"), OLD, ids=[row[0] for row in OLD])
def test_an_old_library_says_which_version_it_takes(function: str, version: abi.Version, needed: str, use: Any) -> None:
    stub = Stub(version)
    comm = stub.comm(cpu=True)
    loaded = ".".join(map(str, version))
    with pytest.raises(pynccl.NcclVersionError) as caught:
        use(comm)
    assert str(caught.value) == f"{function} needs NCCL >= {needed}; loaded {loaded} from {stub.path}"
    assert stub.names() == []


def test_a_library_without_several_ids_says_so() -> None:
    stub = Stub((2, 22, 3))
    with pytest.raises(pynccl.NcclVersionError, match=r"ncclCommInitRankScalable"):
        Communicator.init(8, [bytes(128)] * 2, 2, library=stub.cpu_library)
    assert stub.names() == []
