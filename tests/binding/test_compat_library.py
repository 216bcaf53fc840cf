"""The API of vLLM's and SGLang's wrappers: signatures, constants, C functions, and rendezvous."""

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
from ranks import RankPool
from rendezvous_servers import free_port
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


def has_same_parameters(method: Any, parameters: str) -> bool:
    """Return whether the method has these parameters, in order and with their defaults; it may have more of both."""
    found = inspect.signature(getattr(method, "__func__", method)).parameters.values()
    ours = [parameter for parameter in found if parameter.name not in ("self", "cls")]
    theirs = parameters.split(", ") if parameters else []
    known = [parameter.name + ("=" if parameter.default is not parameter.empty else "") for parameter in ours]
    same = all(mine in (other, f"{other}=") for mine, other in zip(known, theirs, strict=False))
    return same and len(known) >= len(theirs) and all(parameter.endswith("=") for parameter in known[len(theirs) :])


def test_signatures_match_vllm_and_sglang() -> None:
    lines = [line for line in WRAPPERS.read_text().splitlines() if not line.startswith("#")]
    assert len(lines) > 60
    for line in lines:
        found = re.fullmatch(r"(\w+) (\w+)\.(\w+)\((.*)\)", line)
        assert found, line
        module = {"vllm": vllm, "sglang": sglang}[found[1]]
        assert has_same_parameters(getattr(getattr(module, found[2]), found[3]), found[4]), line


def test_raw_calls_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that uses only vLLM's NCCLLibrary, with pointers and without torch.distributed."""
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


# Rendezvous


def run_ranks(count: int, body: Callable[[StatelessProcessGroup], Any]) -> list[Any]:
    """Run body(group) on `count` ranks, which are threads of this process, over one store."""
    store = dist.HashStore()
    found: list[Any] = [None] * count

    def run_rank(rank: int) -> None:
        found[rank] = body(StatelessProcessGroup(rank, count, store))

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def exchange_objects(group: StatelessProcessGroup) -> tuple[Any, ...]:
    n, right, left = group.world_size, (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
    group.send_obj(("from", group.rank), right)
    got = group.recv_obj(left)
    everything = group.all_gather_obj(group.rank**2)
    word = group.broadcast_obj("last" if group.rank == n - 1 else None, n - 1)
    tensor = group.all_reduce(torch.tensor([group.rank, 1]), ReduceOp.MAX).tolist()
    group.send(torch.tensor([float(group.rank)]), right)
    received = group.recv(torch.zeros(1), left).item()
    return got, everything, word, tensor, received, group.broadcast(torch.tensor(group.rank), 1).item()


def test_stateless_group_exchanges_objects_and_names_missing_ranks() -> None:
    expected = [(("from", (r - 1) % 3), [0, 1, 4], "last", [2, 1], float((r - 1) % 3), 1) for r in range(3)]
    assert run_ranks(3, exchange_objects) == expected
    store = dist.HashStore()
    with pytest.raises(pynccl.NcclTimeout, match=r"ranks \[1\] of 2 did not arrive within 0.2 s"):
        StatelessProcessGroup(0, 2, store).barrier(timeout=0.2)
    with pytest.raises(ValueError, match=r"rank is 2, expected 0\.\.1"):
        StatelessProcessGroup(2, 2, store)
    with pytest.raises(RuntimeError, match=r"cannot listen at 192\.0\.2\.1:2: .*an address of its node"):
        StatelessProcessGroup.create("192.0.2.1", 2, 0, 2)


class Bad:
    """Creates the folder `path` when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_forged_store_entries_are_not_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attacker knows the store's keys and another group's objects, but not the job key."""
    path, store, other = str(tmp_path / "made"), dist.HashStore(), dist.HashStore()
    monkeypatch.setenv("PYNCCL_JOB_KEY", "another key of a job")
    StatelessProcessGroup(1, 2, other).send_obj(Bad(path), 0)
    monkeypatch.setenv("PYNCCL_JOB_KEY", "0123456789abcdef")
    group = StatelessProcessGroup(0, 2, store)
    for data in (pickle.dumps(Bad(path)), bytes(32) + pickle.dumps(Bad(path)), other.get("send/1/0/0"), b""):
        store.set("send/1/0/0", data)
        with pytest.raises(pynccl.NcclRemoteError, match=r"is invalid; it was not unpickled.*PYNCCL_JOB_KEY"):
            group.recv_obj(1)
        store.set("broadcast/1/0", data)
        with pytest.raises(pynccl.NcclRemoteError, match="who else writes to the store"):
            group.broadcast_obj(None, 1)
    StatelessProcessGroup(1, 2, store).send_obj({"a": (1,)}, 0)
    store.set("send/1/0/1", store.get("send/1/0/0"))
    assert group.recv_obj(1) == {"a": (1,)}
    with pytest.raises(pynccl.NcclRemoteError, match="send/1/0/1"):  # a replayed message
        group.recv_obj(1)
    assert not os.path.exists(path)


def rendezvous(comm: Communicator, port: int, identity: bytes) -> None:
    """Rendezvous like a trainer and an inference worker, and by a unique id with a rank that uses plain pynccl."""
    group = StatelessProcessGroup.create("127.0.0.1", port, comm.rank, comm.size, store_timeout=50)
    c = PyNcclCommunicator(group, device=0)  # on the host library, an index means the CPU
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
            plain.all_reduce(torch.zeros(1))  # matches the sum that vLLM's init runs
            assert plain.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]


def test_rendezvous_by_address_or_unique_id(ranks: RankPool) -> None:
    ranks.run(2, rendezvous, free_port(), bytes(NCCLLibrary().ncclGetUniqueId()))
    with pytest.raises(ValueError, match="128 bytes, got 3"):
        PyNcclCommunicator.from_unique_id_bytes(b"abc", 0, 2, "cpu")
    with pytest.raises(RuntimeError, match="call init_process_group first"):
        PyNcclCommunicator(None, CPU)
    with pytest.raises(ValueError, match="the host library works on the CPU"):
        PyNcclCommunicator(StatelessProcessGroup(0, 2, dist.HashStore()), "cuda:0")


def init_without_library(group: StatelessProcessGroup) -> Any:
    c = PyNcclCommunicator(group, CPU, library_path="/nowhere/libnccl.so" if group.rank == 0 else None)
    return c.available, c.disabled, c.all_reduce(torch.ones(1))


def test_communicator_without_nccl_is_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    c = PyNcclCommunicator(StatelessProcessGroup(0, 1, dist.HashStore()), CPU)
    assert (c.available, c.disabled, c.world_size) == (False, True, 1) and c.all_reduce(torch.ones(1)) is None
    with pytest.warns(UserWarning, match="disabled on rank .: no NCCL") as caught:
        assert run_ranks(2, init_without_library) == [(False, True, None)] * 2
    texts = sorted(str(warning.message) for warning in caught)
    assert "/nowhere/libnccl.so" in texts[0] and "rank 0 could not load it" in texts[1]
    monkeypatch.setenv("VLLM_DISABLE_PYNCCL", "1")
    two = PyNcclCommunicator(StatelessProcessGroup(0, 2, dist.HashStore()), CPU)
    assert not two.available and two.all_reduce(torch.ones(1)) is None
