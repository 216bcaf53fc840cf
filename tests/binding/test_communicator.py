"""Init, split, properties and end of communicators, one or several per process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from libraries import Stub
from ranks import RankPool, each_size

import pynccl
import pynccl_autograd
from pynccl import Communicator, Result


def total(comm: Communicator) -> float:
    return comm.all_reduce(torch.tensor(float(comm.rank + 1))).item()


def split_communicators(comm: Communicator, folder: str) -> dict[str, Any]:
    assert comm.alive and comm.handle and not comm.checking and comm.async_error() is Result.SUCCESS
    assert (comm.device, comm.library.is_host) == ("cpu", True)
    assert repr(comm) == f"<pynccl.Communicator rank {comm.rank} of {comm.size} on cpu>"
    for turn in range(3):
        (Path(folder) / f"{turn}-{comm.rank}").touch()
        comm.barrier()
        assert len(list(Path(folder).glob(f"{turn}-*"))) == comm.size

    results: dict[str, Any] = {}
    requests: dict[str, tuple[int | None, int]] = {
        "halves": (comm.rank % 2, 0),
        "reversed": (0, -comm.rank),
        "without rank 1": (None if comm.rank == 1 else 5, 0),
        "alone": (comm.rank, 0),
    }
    for name, (color, key) in requests.items():
        child = comm.split(color, key)
        results[name] = None
        if child is not None:
            with child:
                results[name] = child.rank, child.size, child.all_gather(torch.tensor([comm.rank])).tolist()
    assert total(comm) == comm.size * (comm.size + 1) / 2  # the parent stays usable

    # A second communicator of the same ranks in the same processes; its id travels as bytes over the first.
    identity = torch.zeros(128, dtype=torch.uint8)
    if comm.rank == 0:
        identity = torch.tensor(list(bytes(pynccl.get_unique_id())), dtype=torch.uint8)
    comm.broadcast(identity, identity)
    with Communicator.init(comm.size, bytes(identity.tolist()), comm.size - 1 - comm.rank, timeout=30) as other:
        assert other.handle != comm.handle
        results["second"] = other.broadcast(torch.tensor(float(comm.rank))).item()
    return results


@each_size
def test_rank_size_and_split_by_color_and_key(ranks: RankPool, n: int, tmp_path: Path) -> None:
    for rank, result in enumerate(ranks.run(n, split_communicators, str(tmp_path))):
        half = list(range(rank % 2, n, 2))
        rest = [r for r in range(n) if r != 1]
        assert result == {
            "halves": (half.index(rank), len(half), half),
            "reversed": (n - 1 - rank, n, list(range(n))[::-1]),
            "without rank 1": None if rank == 1 else (rest.index(rank), n - 1, rest),
            "alone": (0, 1, [rank]),
            "second": n - 1.0,  # rank 0 of the second is the last of the first
        }


def test_both_packages_have_the_same_version() -> None:
    assert pynccl.__version__ == pynccl_autograd.__version__ == version("pynccl-autograd")


def test_init_all_in_one_process() -> None:
    comms = pynccl.init_all(4, library=pynccl.load("host"))
    assert [(comm.rank, comm.size) for comm in comms] == [(rank, 4) for rank in range(4)]
    xs = [torch.full((3,), float(comm.rank + 1)) for comm in comms]
    with pynccl.group():  # from one thread: one launch for all
        results = [comm.all_reduce(x) for comm, x in zip(comms, xs, strict=True)]
    assert [result.tolist() for result in results] == [[10.0] * 3] * 4
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(total, comms, timeout=50)) == [10.0] * 4
    pynccl.abort(comms)
    stub = Stub()
    numbered = Communicator.init_all([2, 0], library=stub.cpu_library)
    assert [(comm.rank, comm._device_index) for comm in numbered] == [(0, 2), (1, 0)]


def test_destroy_abort_and_finalize_call_nccl_once() -> None:
    destroyed = ["ncclCommGetAsyncError", "ncclCommFinalize", "ncclCommDestroy"]
    finalized = ["ncclCommFinalize", "ncclCommGetAsyncError", "ncclCommDestroy"]
    for end, functions in (
        (Communicator.destroy, destroyed),
        (Communicator.abort, ["ncclCommAbort"]),
        (Communicator.finalize, finalized),
    ):
        stub = Stub()
        comm = stub.comm(rank=3)
        end(comm)
        comm.destroy()
        comm.abort()
        assert stub.names() == functions
        assert stub.calls()[-1].args == {"rank": 3}
        assert not comm.alive
    stub.clear()
    with stub.comm() as comm:
        assert comm.alive
    assert stub.names() == destroyed
    stub.clear()
    with pytest.raises(KeyError), stub.comm() as comm:
        raise KeyError
    assert stub.names() == ["ncclCommAbort"]
    assert repr(comm) == "<pynccl.Communicator rank 1 of 4 on cuda:0, aborted>"


def test_nccl_error_names_the_call() -> None:
    stub = Stub()
    comm = stub.comm()
    comm.check_async_error()
    stub.fail("ncclCommGetAsyncError", 6)
    assert comm.async_error() is Result.REMOTE_ERROR
    with pytest.raises(pynccl.NcclRemoteError, match="an operation in flight"):
        comm.check_async_error()
    stub.fail("ncclCommGetAsyncError", 7)
    assert comm.async_error() is Result.IN_PROGRESS
    comm.check_async_error()
    stub.fail("ncclCommInitRank", 5)
    with pytest.raises(pynccl.NcclInvalidUsage, match=r"^ncclCommInitRank\(rank=1, nranks=2\) failed: invalid usage"):
        Communicator.init(2, bytes(128), 1, library=stub.cpu_library)
    stub = Stub()
    stub.fail("ncclCommSplit", 5)
    with pytest.raises(pynccl.NcclInvalidUsage, match=r"^ncclCommSplit\(color=3, key=-2\) on rank 1 of 4 failed"):
        stub.comm(cpu=True).split(3, -2)


def test_failed_init_names_the_call() -> None:
    stub = Stub()
    stub.fail("ncclCommInitRank", 5)
    with pytest.raises(pynccl.NcclInvalidUsage, match=r"^ncclCommInitRank\(rank=1, nranks=2\) failed: invalid usage"):
        Communicator.init(2, bytes(128), 1, library=stub.cpu_library)
    stub.fail("ncclCommSplit", 5)
    with pytest.raises(pynccl.NcclInvalidUsage, match=r"^ncclCommSplit\(color=3, key=-2\) on rank 1 of 4 failed"):
        stub.comm(cpu=True).split(3, -2)
