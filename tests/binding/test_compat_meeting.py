"""How the ranks of a PyNcclCommunicator meet, and what they say where they cannot."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meetings import free_port
from ranks import RankPool
from torch.distributed import ReduceOp

import pynccl
from pynccl import Communicator
from pynccl.compat import stateless
from pynccl.compat.vllm import NCCLLibrary, PyNcclCommunicator, StatelessProcessGroup

CPU = torch.device("cpu")


def meet(count: int, body: Callable[[StatelessProcessGroup], Any]) -> list[Any]:
    """body(group) of `count` ranks that are threads of this process, over one store."""
    store = dist.HashStore()
    found: list[Any] = [None] * count

    def one(rank: int) -> None:
        try:
            found[rank] = body(StatelessProcessGroup(rank, count, store))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def objects(group: StatelessProcessGroup) -> tuple[Any, ...]:
    n, right, left = group.world_size, (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
    group.send_obj(("from", group.rank), right)
    got = group.recv_obj(left)
    everything = group.all_gather_obj(group.rank**2)
    word = group.broadcast_obj("last" if group.rank == n - 1 else None, n - 1)
    tensor = group.all_reduce(torch.tensor([group.rank, 1]), ReduceOp.MAX).tolist()
    group.send(torch.tensor([float(group.rank)]), right)
    received = group.recv(torch.zeros(1), left).item()
    return got, everything, word, tensor, received, group.broadcast(torch.tensor(group.rank), 1).item()


def test_stateless_group_exchanges_objects() -> None:
    expected = [(("from", (r - 1) % 3), [0, 1, 4], "last", [2, 1], float((r - 1) % 3), 1) for r in range(3)]
    assert meet(3, objects) == expected


class Bad:
    """What a pickle would run where it is read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_a_stranger_who_writes_into_the_store_first_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """He knows the names of the keys, and another group's objects, but not the key of the job."""
    monkeypatch.setenv("PYNCCL_JOB_KEY", "0123456789abcdef")
    path, store, other = str(tmp_path / "made"), dist.HashStore(), dist.HashStore()
    group = StatelessProcessGroup(0, 2, store)
    monkeypatch.setenv("PYNCCL_JOB_KEY", "another key of a job")
    StatelessProcessGroup(1, 2, other).send_obj(Bad(path), 0)
    monkeypatch.setenv("PYNCCL_JOB_KEY", "0123456789abcdef")
    for data in (pickle.dumps(Bad(path)), bytes(32) + pickle.dumps(Bad(path)), other.get("send/1/0/0"), b"", b"x"):
        store.set("send/1/0/0", data)
        with pytest.raises(pynccl.NcclRemoteError, match="PYNCCL_JOB_KEY is another one; it was not unpickled"):
            group.recv_obj(1)
        store.set("broadcast/1/0", data)
        with pytest.raises(pynccl.NcclRemoteError, match="somebody else"):
            group.broadcast_obj(None, 1)
    StatelessProcessGroup(1, 2, store).send_obj({"a": (1,)}, 0)
    store.set("send/1/0/1", store.get("send/1/0/0"))
    assert group.recv_obj(1) == {"a": (1,)}
    with pytest.raises(pynccl.NcclRemoteError, match="send/1/0/1"):  # the same again is in the wrong place
        group.recv_obj(1)
    assert not os.path.exists(path)


def test_a_stateless_group_names_who_is_missing_and_listens_at_no_other_address() -> None:
    store = dist.HashStore()
    with pytest.raises(pynccl.NcclTimeout, match=r"no sign of rank\(s\) \[1\] of 2 in 0.2 s"):
        StatelessProcessGroup(0, 2, store).barrier(timeout=0.2)
    with pytest.raises(ValueError, match=r"rank is 2, expected 0\.\.1"):
        StatelessProcessGroup(2, 2, store)
    with pytest.raises(RuntimeError, match=r"cannot listen at 192\.0\.2\.1:2: .*an address of its machine"):
        StatelessProcessGroup.create("192.0.2.1", 2, 0, 2)
    with stateless._listen("localhost", 0) as named:  # at that address alone
        assert named.getsockname()[0] in ("127.0.0.1", "::1")


def meets(comm: Communicator, port: int, identity: bytes, other: bytes) -> None:
    """As a trainer and an inference worker do; by an id; and where the other end is a program of pynccl alone."""
    group = StatelessProcessGroup.create("127.0.0.1", port, comm.rank, comm.size, store_timeout=50)
    c = PyNcclCommunicator(group, device=0)  # an index is the CPU on the host library
    x = torch.full((3,), float(comm.rank))
    c.broadcast(x, src=1)
    assert x.tolist() == [1.0] * 3
    group.barrier()
    c.destroy()

    c = PyNcclCommunicator.from_unique_id_bytes(identity, comm.rank, comm.size, "cpu")
    assert c.group is None and c.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]
    c.destroy()

    if comm.rank == 0:
        c = PyNcclCommunicator.from_unique_id_bytes(other, 0, 2, "cpu")
        assert c.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]
        c.destroy()
    else:
        with Communicator.init(2, other, 1) as plain:
            plain.all_reduce(torch.zeros(1))  # the one-float sum after the init of theirs
            assert plain.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]


def test_processes_meet_at_an_address_or_by_an_id(ranks: RankPool) -> None:
    identity = bytes(NCCLLibrary().ncclGetUniqueId())
    ranks.run(2, meets, free_port(), identity, bytes(pynccl.get_unique_id()))
    with pytest.raises(ValueError, match="128 bytes, got 3"):
        PyNcclCommunicator.from_unique_id_bytes(b"abc", 0, 2, "cpu")
    with pytest.raises(ValueError, match="rank"):
        PyNcclCommunicator.from_unique_id_bytes(identity, 2, 2, "cpu")


def test_one_rank_is_disabled_and_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    group = StatelessProcessGroup(0, 1, dist.HashStore())
    c = PyNcclCommunicator(group, CPU)
    assert (c.available, c.disabled, c.world_size) == (False, True, 1) and c.all_reduce(torch.ones(1)) is None
    with pytest.raises(RuntimeError, match=r"no group_start\(\)"):
        c.group_end()
    c.group_start()
    c.group_end()
    c.destroy()
    c.disabled = False
    with pytest.raises(RuntimeError, match="there is no communicator"):
        c.all_reduce(torch.ones(1))
    monkeypatch.setenv("VLLM_DISABLE_PYNCCL", "1")
    two = PyNcclCommunicator(StatelessProcessGroup(0, 2, dist.HashStore()), CPU)
    assert not two.available and two.all_reduce(torch.ones(1)) is None


def without_library(group: StatelessProcessGroup, absent: tuple[int, ...]) -> Any:
    c = PyNcclCommunicator(group, CPU, library_path="/nowhere/libnccl.so" if group.rank in absent else None)
    return c.available, c.disabled, c.all_reduce(torch.ones(1))


def test_without_a_library_on_rank_0_all_are_disabled() -> None:
    with pytest.warns(UserWarning, match="disabled on rank .: no NCCL") as said:
        assert meet(2, lambda group: without_library(group, (0,))) == [(False, True, None)] * 2
    texts = sorted(str(one.message) for one in said)
    assert "/nowhere/libnccl.so" in texts[0] and "rank 0 could not load it" in texts[1]


def test_without_a_library_on_another_rank_that_one_raises() -> None:
    """And rank 0, which waits in NCCL's init, is told by its end, as of any process that dies there."""
    store = dist.HashStore()
    StatelessProcessGroup(0, 2, store).broadcast_obj(NCCLLibrary().ncclGetUniqueId(), src=0)
    with pytest.raises(pynccl.NcclLibraryNotFound, match="/nowhere"):
        PyNcclCommunicator(StatelessProcessGroup(1, 2, store), CPU, library_path="/nowhere/libnccl.so")


def test_a_wrong_group_or_device_is_said() -> None:
    with pytest.raises(RuntimeError, match="call init_process_group first"):
        PyNcclCommunicator(None, CPU)
    found = meet(2, lambda group: PyNcclCommunicator(group, "cuda:0"))
    assert [type(one) for one in found] == [ValueError, ValueError]
    assert all("the host library works on the CPU" in str(one) for one in found)
