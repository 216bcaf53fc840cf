"""The host library reduces like a single process: every data type with every operator, in rank order, bit for bit.

Each pair of a type and an operator goes once to one of the sizes and transports, with one of the counts.
"""

from __future__ import annotations

import ctypes
import random
import threading
from itertools import product

import pytest
import torch
from host_calls import TORCH_TYPES, Ranks, address, call, refuses
from reference import expect, reduced
from torch import Tensor

from pynccl import host
from pynccl.bindings.abi import DataType, RedOp, Result, ScalarResidence

NARROW = (DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT8_E4M3, DataType.FLOAT8_E5M2)
FLOATS = (DataType.FLOAT32, DataType.FLOAT64, *NARROW)
SEED = 20
COUNTS = (1, 37, 4_099, 16_385, 40_001, 300_007)  # one step; pieces in small slots and in large ones
LARGE = [(dtype, RedOp.SUM, 700_003) for dtype in (DataType.FLOAT32, DataType.BFLOAT16)]


def dealt(size: int, transport: str) -> list[tuple[DataType, RedOp, int]]:
    """What falls to this size and transport: a sixth of all pairs; every count comes about twice."""
    pairs = list(product(DataType, RedOp))
    random.Random(SEED).shuffle(pairs)
    place = 2 * (size - 2) + (transport == "sockets")
    mine = pairs[place::6]
    return [(*pair, COUNTS[(at + place) % len(COUNTS)]) for at, pair in enumerate(mine)] + LARGE[place % 3 :][:1]


def inputs(dtype: DataType, size: int, count: int) -> list[Tensor]:
    """One tensor per rank; integers over the whole range, so that sums wrap and the sign bit matters."""
    generator, kind = torch.Generator().manual_seed(SEED), TORCH_TYPES[dtype]
    if kind.is_floating_point:
        return [torch.randn(count, generator=generator, dtype=torch.float64).to(kind) for _ in range(size)]
    nbytes = count * dtype.itemsize
    return [torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8).view(kind) for _ in range(size)]


def expected(tensors: list[Tensor], op: RedOp) -> Tensor:
    """Floats are added in rank order, in float32 if they are narrow, with one rounding at the end."""
    if not tensors[0].is_floating_point():
        return reduced(tensors, op.name.lower())
    step = {RedOp.PROD: torch.mul, RedOp.MAX: torch.maximum, RedOp.MIN: torch.minimum}.get(op, torch.add)
    total, *others = [tensor.float() if tensor.dtype.itemsize < 4 else tensor for tensor in tensors]
    for other in others:
        total = step(total, other)
    return (total / len(tensors) if op is RedOp.AVG else total).to(tensors[0].dtype)


def test_every_type_with_every_operator(group: Ranks, transport: str) -> None:
    """all_reduce, reduce and reduce_scatter, out of place and in place."""
    root = group.size - 1
    for dtype, op, count in dealt(group.size, transport):
        what = f"seed {SEED}: {dtype.name} {op.name} {count}"
        sends = inputs(dtype, group.size, count)
        wides = inputs(dtype, group.size, count * group.size)
        whole, parts = expected(sends, op), expected(wides, op).split(count)

        def body(rank: int, comm: int) -> None:
            send, wide = sends[rank], wides[rank].clone()  # noqa: B023
            out, in_place, part = torch.empty_like(send), send.clone(), torch.empty_like(send)
            rooted = torch.empty_like(send) if rank == root else None
            own = wide.split(len(send))[rank]  # in place: recvbuff == sendbuff + rank * count
            arguments = (len(send), dtype, op)  # noqa: B023
            call("ncclAllReduce", address(send), address(out), *arguments, comm, None)
            call("ncclAllReduce", address(in_place), address(in_place), *arguments, comm, None)
            call("ncclReduce", address(send), address(rooted), *arguments, root, comm, None)
            call("ncclReduceScatter", address(wide), address(part), *arguments, comm, None)
            call("ncclReduceScatter", address(wide), address(own), *arguments, comm, None)
            for got in (out, in_place, *([] if rooted is None else [rooted])):
                expect(got, whole, what)  # noqa: B023
            for got in (part, own):
                expect(got, parts[rank], what)  # noqa: B023

        group.run(body)


def test_nan_propagates_in_max_and_min(group: Ranks) -> None:
    def body(rank: int, comm: int) -> None:
        for dtype, op in product(FLOATS, (RedOp.MAX, RedOp.MIN)):
            data = torch.tensor([float("nan") if rank == 1 else 1.0, float(rank)]).to(TORCH_TYPES[dtype])
            call("ncclAllReduce", address(data), address(data), 2, dtype, op, comm, None)
            assert data.float()[0].isnan(), (dtype, op)
            assert data.float()[1] == (group.size - 1 if op is RedOp.MAX else 0), (dtype, op)

    group.run(body)


def made(scalar: Tensor, dtype: DataType, residence: ScalarResidence, comm: int) -> int:
    op = ctypes.c_int()
    call("ncclRedOpCreatePreMulSum", ctypes.byref(op), address(scalar), dtype, residence, comm)
    return op.value


def test_premultiplied_sum(group: Ranks) -> None:
    """A scalar on the device is read when the operation runs; an immediate one was read when the operator was made."""

    def body(rank: int, comm: int) -> None:
        for dtype, residence in product((DataType.INT32, *FLOATS), ScalarResidence):
            kind = TORCH_TYPES[dtype]
            sends = [torch.arange(37).remainder(5).add(other).to(kind) for other in range(group.size)]
            exact = sum(send.double() * (other + 2) for other, send in enumerate(sends))
            scalar = torch.tensor([rank + 2 if residence else 1]).to(kind)
            op = made(scalar, dtype, residence, comm)
            scalar.copy_(torch.tensor([1 if residence else rank + 2]).to(kind))
            data = sends[rank].clone()
            call("ncclAllReduce", address(data), address(data), 37, dtype, op, comm, None)
            expect(data, torch.as_tensor(exact).to(kind), f"{dtype.name} {residence.name}")
            call("ncclRedOpDestroy", op, comm)

    group.run(body)
    scalar, comm = torch.ones(1), group.comms[0]
    op, pointer = made(scalar, DataType.FLOAT32, ScalarResidence.HOST_IMMEDIATE, comm), address(scalar)
    for dtype, text in (
        (DataType.INT32, "made for datatype float32, the call has int32"),
        (DataType.FLOAT32, f"op is {op}; expected"),
    ):
        refuses(Result.INVALID_ARGUMENT, text, "ncclAllReduce", pointer, pointer, 1, dtype, op, comm, None)
        if dtype is DataType.INT32:
            call("ncclRedOpDestroy", op, comm)


@pytest.mark.parametrize("count", [4, 100_000])
def test_a_premultiplied_sum_is_bound_when_it_is_called(group: Ranks, count: int) -> None:
    """Its number may be gone, or mean another one, when a stream comes to the operation."""

    def body(rank: int, comm: int) -> Tensor:
        stream, gate, data = host.HostStream(), threading.Event(), torch.ones(count)
        two, hundred = torch.full((1,), 2.0), torch.full((1,), 100.0)
        op = made(two, DataType.FLOAT32, ScalarResidence.DEVICE, comm)
        stream.submit(lambda: gate.wait(60))
        call("ncclAllReduce", address(data), address(data), count, DataType.FLOAT32, op, comm, stream.handle)
        call("ncclRedOpDestroy", op, comm)
        if rank:  # on one of them the number is gone, on the others it has another meaning
            assert made(hundred, DataType.FLOAT32, ScalarResidence.DEVICE, comm) == op
        gate.set()
        stream.synchronize()
        if rank:
            call("ncclRedOpDestroy", op, comm)
        return data

    for data in group.run(body):
        assert data.eq(2.0 * group.size).all()
