"""Each collective on a GPU equals values computed on the CPU exactly, for all data types and operators."""

from __future__ import annotations

import os

import pytest
import torch
from gpu.values import DTYPES, OPS, name, reduced, to_cpu_float64, values

import pynccl
from pynccl import Communicator

COUNT = 1000

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=name)
subset = int(os.environ.get("WORLD_SIZE", "1")) > 2 or os.environ.get("PYNCCL_CHECK") == "1"  # both take long
pairs = [(dtype, op) for i, dtype in enumerate(DTYPES) for j, op in enumerate(OPS) if not subset or (i - j) % 5 == 0]
each_pair = pytest.mark.parametrize(("dtype", "op"), pairs, ids=lambda x: x if isinstance(x, str) else name(x))


def own_values(comm: Communicator, dtype: torch.dtype, count: int = COUNT) -> torch.Tensor:
    return values(comm.rank, count).to(dtype).to(comm.device)


def values_of_all_ranks(comm: Communicator, count: int = COUNT) -> list[torch.Tensor]:
    return [values(rank, count) for rank in range(comm.size)]


@each_pair
def test_all_reduce(comm: Communicator, dtype: torch.dtype, op: str) -> None:
    send = own_values(comm, dtype)
    expected = reduced(op, comm.size, COUNT, not dtype.is_floating_point)
    assert torch.equal(to_cpu_float64(comm.all_reduce(send, op=op)), expected)
    assert torch.equal(to_cpu_float64(send), values(comm.rank, COUNT))
    assert comm.all_reduce(send, send, op) is send
    assert torch.equal(to_cpu_float64(send), expected)


@each_pair
def test_reduce_scatter(comm: Communicator, dtype: torch.dtype, op: str) -> None:
    count = COUNT * comm.size
    send = own_values(comm, dtype, count)
    expected = reduced(op, comm.size, count, not dtype.is_floating_point).chunk(comm.size)[comm.rank]
    assert torch.equal(to_cpu_float64(comm.reduce_scatter(send, op=op)), expected)
    shard = send.chunk(comm.size)[comm.rank]
    comm.reduce_scatter(send, shard, op)
    assert torch.equal(to_cpu_float64(shard), expected)


@each_dtype
def test_all_gather(comm: Communicator, dtype: torch.dtype) -> None:
    expected = torch.cat(values_of_all_ranks(comm))
    assert torch.equal(to_cpu_float64(comm.all_gather(own_values(comm, dtype))), expected)
    recv = own_values(comm, dtype).repeat(comm.size)
    comm.all_gather(recv.chunk(comm.size)[comm.rank], recv)
    assert torch.equal(to_cpu_float64(recv), expected)


@each_dtype
def test_rooted_collectives_for_every_root(comm: Communicator, dtype: torch.dtype) -> None:
    count = COUNT * comm.size
    for root in [DTYPES.index(dtype) % comm.size] if subset else range(comm.size):
        assert torch.equal(to_cpu_float64(comm.broadcast(own_values(comm, dtype), root=root)), values(root, COUNT))
        assert torch.equal(
            to_cpu_float64(comm.scatter(own_values(comm, dtype, count), root=root)),
            values(root, count).chunk(comm.size)[comm.rank],
        )
        total = comm.reduce(own_values(comm, dtype), root=root)
        gathered = comm.gather(own_values(comm, dtype), root=root)
        if comm.rank != root:
            assert total is None and gathered is None
            continue
        assert torch.equal(to_cpu_float64(total), reduced("sum", comm.size, COUNT, False))
        assert torch.equal(to_cpu_float64(gathered), torch.cat(values_of_all_ranks(comm)))


@each_dtype
def test_all_to_all(comm: Communicator, dtype: torch.dtype) -> None:
    count = COUNT * comm.size
    got = to_cpu_float64(comm.all_to_all(own_values(comm, dtype, count)))
    blocks = [x.chunk(comm.size)[comm.rank] for x in values_of_all_ranks(comm, count)]
    assert torch.equal(got, torch.cat(blocks))


def test_collectives_and_messages_around_a_ring_in_one_group(comm: Communicator) -> None:
    received = torch.zeros(COUNT, device=comm.device)
    with pynccl.group():
        comm.send(own_values(comm, torch.float32), (comm.rank + 1) % comm.size)
        comm.recv(received, (comm.rank - 1) % comm.size)
        total = comm.all_reduce(own_values(comm, torch.bfloat16))
        largest = comm.all_reduce(own_values(comm, torch.int64), op="max")
        gathered = comm.all_gather(own_values(comm, torch.float32, 3))
    assert torch.equal(to_cpu_float64(received), values((comm.rank - 1) % comm.size, COUNT))
    assert torch.equal(to_cpu_float64(total), reduced("sum", comm.size, COUNT, False))
    assert torch.equal(to_cpu_float64(largest), reduced("max", comm.size, COUNT, True))
    assert torch.equal(to_cpu_float64(gathered), torch.cat(values_of_all_ranks(comm, 3)))


def test_pre_mul_sum_scales_each_rank_by_its_own_factor(comm: Communicator) -> None:
    with comm.pre_mul_sum(comm.rank + 2.0, torch.float32) as op:
        got = to_cpu_float64(comm.all_reduce(own_values(comm, torch.float32), op=op))
    expected = torch.stack([(rank + 2.0) * x for rank, x in enumerate(values_of_all_ranks(comm))]).sum(0)
    assert torch.equal(got, expected)
    factor = torch.full((1,), comm.rank + 2.0, device=comm.device)
    with comm.pre_mul_sum(factor) as op:
        assert torch.equal(to_cpu_float64(comm.all_reduce(own_values(comm, torch.float32), op=op)), expected)


def test_a_split_by_parity_sums_within_each_half(comm: Communicator) -> None:
    half = comm.split(comm.rank % 2, -comm.rank)  # the key reverses the order
    assert half is not None
    members = [rank for rank in range(comm.size) if rank % 2 == comm.rank % 2][::-1]
    with half:
        assert (half.rank, half.size, half.device) == (members.index(comm.rank), len(members), comm.device)
        got = to_cpu_float64(half.all_gather(own_values(comm, torch.float32)))
    assert torch.equal(got, torch.cat([values(rank, COUNT) for rank in members]))
