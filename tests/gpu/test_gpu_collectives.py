"""Every collective on a GPU against values computed on the CPU, exactly, for all data types and operators."""

from __future__ import annotations

import os

import pytest
import torch
from gpu.values import DTYPES, OPS, name, plain, reduced, values

import pynccl
from pynccl import Communicator

COUNT = 1000

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=name)
few = int(os.environ.get("WORLD_SIZE", "1")) > 2 or os.environ.get("PYNCCL_CHECK") == "1"  # which both take long
pairs = [(dtype, op) for i, dtype in enumerate(DTYPES) for j, op in enumerate(OPS) if not few or (i - j) % 5 == 0]
each_pair = pytest.mark.parametrize(("dtype", "op"), pairs, ids=lambda x: x if isinstance(x, str) else name(x))


def own(comm: Communicator, dtype: torch.dtype, count: int = COUNT) -> torch.Tensor:
    return values(comm.rank, count).to(dtype).to(comm.device)


def of_all(comm: Communicator, count: int = COUNT) -> list[torch.Tensor]:
    return [values(rank, count) for rank in range(comm.size)]


@each_pair
def test_all_reduce(comm: Communicator, dtype: torch.dtype, op: str) -> None:
    send = own(comm, dtype)
    expected = reduced(op, comm.size, COUNT, not dtype.is_floating_point)
    assert torch.equal(plain(comm.all_reduce(send, op=op)), expected)
    assert torch.equal(plain(send), values(comm.rank, COUNT))
    assert comm.all_reduce(send, send, op) is send
    assert torch.equal(plain(send), expected)


@each_pair
def test_reduce_scatter(comm: Communicator, dtype: torch.dtype, op: str) -> None:
    count = COUNT * comm.size
    send = own(comm, dtype, count)
    expected = reduced(op, comm.size, count, not dtype.is_floating_point).chunk(comm.size)[comm.rank]
    assert torch.equal(plain(comm.reduce_scatter(send, op=op)), expected)
    part = send.chunk(comm.size)[comm.rank]
    comm.reduce_scatter(send, part, op)
    assert torch.equal(plain(part), expected)


@each_dtype
def test_all_gather(comm: Communicator, dtype: torch.dtype) -> None:
    expected = torch.cat(of_all(comm))
    assert torch.equal(plain(comm.all_gather(own(comm, dtype))), expected)
    recv = own(comm, dtype).repeat(comm.size)
    comm.all_gather(recv.chunk(comm.size)[comm.rank], recv)
    assert torch.equal(plain(recv), expected)


@each_dtype
def test_rooted_collectives_for_every_root(comm: Communicator, dtype: torch.dtype) -> None:
    count = COUNT * comm.size
    for root in [DTYPES.index(dtype) % comm.size] if few else range(comm.size):
        assert torch.equal(plain(comm.broadcast(own(comm, dtype), root=root)), values(root, COUNT))
        assert torch.equal(
            plain(comm.scatter(own(comm, dtype, count), root=root)), values(root, count).chunk(comm.size)[comm.rank]
        )
        total = comm.reduce(own(comm, dtype), root=root)
        gathered = comm.gather(own(comm, dtype), root=root)
        if comm.rank != root:
            assert total is None and gathered is None
            continue
        assert torch.equal(plain(total), reduced("sum", comm.size, COUNT, False))
        assert torch.equal(plain(gathered), torch.cat(of_all(comm)))


@each_dtype
def test_all_to_all(comm: Communicator, dtype: torch.dtype) -> None:
    count = COUNT * comm.size
    got = plain(comm.all_to_all(own(comm, dtype, count)))
    blocks = [x.chunk(comm.size)[comm.rank] for x in of_all(comm, count)]
    assert torch.equal(got, torch.cat(blocks))


def test_collectives_and_messages_around_a_ring_in_one_group(comm: Communicator) -> None:
    received = torch.zeros(COUNT, device=comm.device)
    with pynccl.group():
        comm.send(own(comm, torch.float32), (comm.rank + 1) % comm.size)
        comm.recv(received, (comm.rank - 1) % comm.size)
        total = comm.all_reduce(own(comm, torch.bfloat16))
        largest = comm.all_reduce(own(comm, torch.int64), op="max")
        gathered = comm.all_gather(own(comm, torch.float32, 3))
    assert torch.equal(plain(received), values((comm.rank - 1) % comm.size, COUNT))
    assert torch.equal(plain(total), reduced("sum", comm.size, COUNT, False))
    assert torch.equal(plain(largest), reduced("max", comm.size, COUNT, True))
    assert torch.equal(plain(gathered), torch.cat(of_all(comm, 3)))


def test_pre_mul_sum_scales_each_rank_by_its_own_factor(comm: Communicator) -> None:
    with comm.pre_mul_sum(comm.rank + 2.0, torch.float32) as op:
        got = plain(comm.all_reduce(own(comm, torch.float32), op=op))
    expected = torch.stack([(rank + 2.0) * x for rank, x in enumerate(of_all(comm))]).sum(0)
    assert torch.equal(got, expected)
    factor = torch.full((1,), comm.rank + 2.0, device=comm.device)
    with comm.pre_mul_sum(factor) as op:
        assert torch.equal(plain(comm.all_reduce(own(comm, torch.float32), op=op)), expected)


def test_a_split_by_parity_sums_within_each_half(comm: Communicator) -> None:
    half = comm.split(comm.rank % 2, -comm.rank)  # the key reverses the order
    assert half is not None
    members = [rank for rank in range(comm.size) if rank % 2 == comm.rank % 2][::-1]
    with half:
        assert (half.rank, half.size, half.device) == (members.index(comm.rank), len(members), comm.device)
        got = plain(half.all_gather(own(comm, torch.float32)))
    assert torch.equal(got, torch.cat([values(rank, COUNT) for rank in members]))
