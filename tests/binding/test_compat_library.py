"""The names of vLLM's and SGLang's wrappers: signatures, numbers, the C functions, and how their ranks meet."""

from __future__ import annotations

import ctypes
import inspect
import os
import pickle
import re
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
from pynccl.compat import sglang, vllm
from pynccl.compat.vllm import (
    NCCLLibrary,
    PyNcclCommunicator,
    StatelessProcessGroup,
    buffer_type,
    cudaStream_t,
    ncclDataTypeEnum,
    ncclRedOpTypeEnum,
)

CPU = torch.device("cpu")
WRAPPERS = Path(__file__).parents[1] / "support" / "data" / "wrappers.txt"


def takes_the_same(method: Any, parameters: str) -> bool:
    """The same parameters in the same order, with defaults where theirs have them; ours may have more of both."""
    found = inspect.signature(getattr(method, "__func__", method)).parameters.values()
    ours = [one for one in found if one.name not in ("self", "cls")]
    theirs = parameters.split(", ") if parameters else []
    known = [one.name + ("=" if one.default is not one.empty else "") for one in ours]
    same = all(mine in (other, f"{other}=") for mine, other in zip(known, theirs, strict=False))
    return same and len(known) >= len(theirs) and all(one.endswith("=") for one in known[len(theirs) :])


def test_methods_take_what_theirs_take() -> None:
    lines = [line for line in WRAPPERS.read_text().splitlines() if not line.startswith("#")]
    assert len(lines) > 60
    for line in lines:
        found = re.fullmatch(r"(\w+) (\w+)\.(\w+)\((.*)\)", line)
        assert found, line
        module = {"vllm": vllm, "sglang": sglang}[found[1]]
        assert takes_the_same(getattr(getattr(module, found[2]), found[3]), found[4]), line


def test_raw_calls_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a script around vLLM's NCCLLibrary alone: pointers in, no torch.distributed."""
    nccl = NCCLLibrary()
    major, minor, patch = map(int, nccl.ncclGetVersion().split("."))
    assert nccl.ncclGetRawVersion() == major * 10000 + minor * 100 + patch
    assert nccl.has_symbol("ncclAllReduce") and not nccl.has_symbol("ncclNoSuchThing")
    with pytest.raises(RuntimeError, match="NCCL error") as raised:
        nccl.NCCL_CHECK(4)
    assert nccl.ncclGetErrorString(4) in str(raised.value)
    with pytest.raises(ValueError, match="128 bytes for ncclUniqueId, got 5"):
        nccl.unique_id_from_bytes(b"short")
    identity = nccl.unique_id_from_bytes(bytes(nccl.ncclGetUniqueId().internal))

    comm = nccl.ncclCommInitRank(1, identity, 0)
    x, y = torch.arange(6.0), torch.empty(6)
    float32, stream = ncclDataTypeEnum.from_torch(x.dtype), cudaStream_t(0)
    args = (buffer_type(x.data_ptr()), buffer_type(y.data_ptr()), 6, float32)
    for call in (
        lambda: nccl.ncclAllReduce(*args, ncclRedOpTypeEnum.ncclSum, comm, stream),
        lambda: nccl.ncclReduce(*args, ncclRedOpTypeEnum.ncclMax, 0, comm, stream),
        lambda: nccl.ncclAllGather(*args, comm, stream),
        lambda: nccl.ncclReduceScatter(*args, 0, comm, stream),
        lambda: nccl.ncclBroadcast(*args, 0, comm, stream),
    ):
        y.zero_()
        call()
        assert torch.equal(x, y)
    with pytest.raises(RuntimeError, match="NCCL error"):
        nccl.ncclSend(x.data_ptr(), 6, float32, 7, comm, None)
    nccl.ncclCommDestroy(comm)
    with pytest.raises(RuntimeError, match="NCCL error"):
        nccl.ncclAllReduce(*args, 0, ctypes.c_void_p(), stream)
    for module, variable in ((vllm, "VLLM_NCCL_SO_PATH"), (sglang, "SGLANG_NCCL_SO_PATH")):
        monkeypatch.setenv(variable, "/nowhere/libnccl.so.2")
        with pytest.raises(pynccl.NcclLibraryNotFound, match=r"/nowhere/libnccl\.so\.2"):
            module.NCCLLibrary()
        assert module.NCCLLibrary("host").lib is pynccl.load("host")


# How their ranks meet


def meet(count: int, body: Callable[[StatelessProcessGroup], Any]) -> list[Any]:
    """body(group) of `count` ranks that are threads of this process, over one store."""
    store = dist.HashStore()
    found: list[Any] = [None] * count

    def one(rank: int) -> None:
        found[rank] = body(StatelessProcessGroup(rank, count, store))

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


def test_stateless_group_exchanges_objects_and_names_who_is_missing() -> None:
    expected = [(("from", (r - 1) % 3), [0, 1, 4], "last", [2, 1], float((r - 1) % 3), 1) for r in range(3)]
    assert meet(3, objects) == expected
    store = dist.HashStore()
    with pytest.raises(pynccl.NcclTimeout, match=r"no sign of rank\(s\) \[1\] of 2 in 0.2 s"):
        StatelessProcessGroup(0, 2, store).barrier(timeout=0.2)
    with pytest.raises(ValueError, match=r"rank is 2, expected 0\.\.1"):
        StatelessProcessGroup(2, 2, store)
    with pytest.raises(RuntimeError, match=r"cannot listen at 192\.0\.2\.1:2: .*an address of its machine"):
        StatelessProcessGroup.create("192.0.2.1", 2, 0, 2)


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
    path, store, other = str(tmp_path / "made"), dist.HashStore(), dist.HashStore()
    monkeypatch.setenv("PYNCCL_JOB_KEY", "another key of a job")
    StatelessProcessGroup(1, 2, other).send_obj(Bad(path), 0)
    monkeypatch.setenv("PYNCCL_JOB_KEY", "0123456789abcdef")
    group = StatelessProcessGroup(0, 2, store)
    for data in (pickle.dumps(Bad(path)), bytes(32) + pickle.dumps(Bad(path)), other.get("send/1/0/0"), b""):
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


def meets(comm: Communicator, port: int, identity: bytes) -> None:
    """As a trainer and an inference worker do; and by an id where the other end is a program of pynccl alone."""
    group = StatelessProcessGroup.create("127.0.0.1", port, comm.rank, comm.size, store_timeout=50)
    c = PyNcclCommunicator(group, device=0)  # an index is the CPU on the host library
    x = torch.full((3,), float(comm.rank))
    c.broadcast(x, src=1)
    assert x.tolist() == [1.0] * 3
    group.barrier()
    c.destroy()
    if comm.rank == 0:
        c = PyNcclCommunicator.from_unique_id_bytes(identity, 0, 2, "cpu")
        assert c.group is None and c.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]
        c.destroy()
    else:
        with Communicator.init(2, identity, 1) as plain:
            plain.all_reduce(torch.zeros(1))  # the one-float sum after the init of theirs
            assert plain.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]


def test_processes_meet_at_an_address_or_by_an_id(ranks: RankPool) -> None:
    ranks.run(2, meets, free_port(), bytes(NCCLLibrary().ncclGetUniqueId()))
    with pytest.raises(ValueError, match="128 bytes, got 3"):
        PyNcclCommunicator.from_unique_id_bytes(b"abc", 0, 2, "cpu")
    with pytest.raises(RuntimeError, match="call init_process_group first"):
        PyNcclCommunicator(None, CPU)
    with pytest.raises(ValueError, match="the host library works on the CPU"):
        PyNcclCommunicator(StatelessProcessGroup(0, 2, dist.HashStore()), "cuda:0")


def without_library(group: StatelessProcessGroup) -> Any:
    c = PyNcclCommunicator(group, CPU, library_path="/nowhere/libnccl.so" if group.rank == 0 else None)
    return c.available, c.disabled, c.all_reduce(torch.ones(1))


def test_a_communicator_that_cannot_be_is_disabled_and_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    c = PyNcclCommunicator(StatelessProcessGroup(0, 1, dist.HashStore()), CPU)
    assert (c.available, c.disabled, c.world_size) == (False, True, 1) and c.all_reduce(torch.ones(1)) is None
    with pytest.warns(UserWarning, match="disabled on rank .: no NCCL") as said:
        assert meet(2, without_library) == [(False, True, None)] * 2
    texts = sorted(str(one.message) for one in said)
    assert "/nowhere/libnccl.so" in texts[0] and "rank 0 could not load it" in texts[1]
    monkeypatch.setenv("VLLM_DISABLE_PYNCCL", "1")
    two = PyNcclCommunicator(StatelessProcessGroup(0, 2, dist.HashStore()), CPU)
    assert not two.available and two.all_reduce(torch.ones(1)) is None
