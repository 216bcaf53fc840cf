"""The host library reduces like a single process: every data type with every operator, in rank order, bit for bit.

Each pair of a type and an operator goes once to one of the sizes and transports, with one of the counts.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from host_calls import TORCH_TYPES, CallFailed, Ranks, address, call
from reference import expect
from torch import Tensor

from pynccl import host
from pynccl.bindings.abi import DataType, RedOp, Result, ScalarResidence

NARROW = (DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT8_E4M3, DataType.FLOAT8_E5M2)
FLOATS = (DataType.FLOAT32, DataType.FLOAT64, *NARROW)
SEED = 20
COUNTS = (1, 37, 4_099, 16_385, 40_001, 300_007)  # one step; pieces in small slots and in large ones
LARGE = [(dtype, RedOp.SUM, 700_003) for dtype in (DataType.FLOAT32, DataType.BFLOAT16, DataType.UINT8)]


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


def integer_reference(tensors: list[Tensor], op: RedOp) -> Tensor:
    """Sums and products wrap around; an average is the wrapped sum, divided towards zero."""
    rows = np.stack([tensor.numpy() for tensor in tensors])
    if op in (RedOp.MAX, RedOp.MIN):
        return torch.from_numpy(rows.max(0) if op is RedOp.MAX else rows.min(0))
    total = (np.multiply if op is RedOp.PROD else np.add).reduce(rows, axis=0, dtype=rows.dtype)
    if op is RedOp.AVG:
        total = total // len(rows) + ((total % len(rows) != 0) & (total < 0)).astype(rows.dtype)
    return torch.from_numpy(total)


def float_reference(tensors: list[Tensor], op: RedOp) -> Tensor:
    """In rank order, in float32 for the narrow types, with one rounding at the end."""
    steps: dict[RedOp, Callable[[Tensor, Tensor], Tensor]] = {
        RedOp.PROD: torch.mul,
        RedOp.MAX: torch.maximum,
        RedOp.MIN: torch.minimum,
    }
    total, *others = [tensor.float() if tensor.dtype.itemsize < 4 else tensor for tensor in tensors]
    for other in others:
        total = steps.get(op, torch.add)(total, other)
    return (total / len(tensors) if op is RedOp.AVG else total).to(tensors[0].dtype)


def reference(tensors: list[Tensor], op: RedOp) -> Tensor:
    return (float_reference if tensors[0].dtype.is_floating_point else integer_reference)(tensors, op)


def test_every_type_with_every_operator(group: Ranks, transport: str) -> None:
    """all_reduce, reduce and reduce_scatter, out of place and in place."""
    root = group.size - 1
    for dtype, op, count in dealt(group.size, transport):
        what = f"seed {SEED}: {dtype.name} {op.name} {count}"
        sends = inputs(dtype, group.size, count)
        wides = inputs(dtype, group.size, count * group.size)
        whole, parts = reference(sends, op), reference(wides, op).split(count)

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


def test_premultiplied_sum(group: Ranks) -> None:
    """A scalar on the device is read when the operation runs; an immediate one was read when the operator was made."""

    def body(rank: int, comm: int) -> None:
        for dtype, residence in product((DataType.INT32, *FLOATS), ScalarResidence):
            kind = TORCH_TYPES[dtype]
            sends = [torch.arange(37).remainder(5).add(other).to(kind) for other in range(group.size)]
            exact = sum(send.double() * (other + 2) for other, send in enumerate(sends))
            scalar, op = torch.tensor([rank + 2 if residence else 1]).to(kind), ctypes.c_int()
            call("ncclRedOpCreatePreMulSum", ctypes.byref(op), address(scalar), dtype, residence, comm)
            scalar.copy_(torch.tensor([1 if residence else rank + 2]).to(kind))
            data = sends[rank].clone()
            arguments = (address(data), address(data), 37)
            call("ncclAllReduce", *arguments, dtype, op.value, comm, None)
            expect(data, torch.as_tensor(exact).to(kind), f"{dtype.name} {residence.name}")
            call("ncclRedOpDestroy", op.value, comm)

    group.run(body)


def test_a_premultiplied_sum_belongs_to_its_data_type_and_ends(group: Ranks) -> None:
    scalar, op, comm = torch.ones(1), ctypes.c_int(), group.comms[0]
    call("ncclRedOpCreatePreMulSum", ctypes.byref(op), address(scalar), DataType.FLOAT32, 1, comm)
    for dtype, text in (
        (DataType.INT32, "made for datatype float32, the call has int32"),
        (DataType.FLOAT32, f"op is {op.value}; expected"),
    ):
        with pytest.raises(CallFailed, match=text) as refused:
            call("ncclAllReduce", address(scalar), address(scalar), 1, dtype, op.value, comm, None)
        assert refused.value.code is Result.INVALID_ARGUMENT
        if dtype is DataType.INT32:
            call("ncclRedOpDestroy", op.value, comm)


@pytest.mark.parametrize("count", [4, 100_000])
def test_a_premultiplied_sum_is_bound_when_it_is_called(group: Ranks, count: int) -> None:
    """Its number may be gone, or mean another one, when a stream comes to the operation."""

    def body(rank: int, comm: int) -> Tensor:
        stream, gate = host.HostStream(), threading.Event()
        scalars, op, again = [torch.full((1,), 2.0), torch.full((1,), 100.0)], ctypes.c_int(), ctypes.c_int()
        data = torch.ones(count)
        call("ncclRedOpCreatePreMulSum", ctypes.byref(op), address(scalars[0]), DataType.FLOAT32, 0, comm)
        stream.submit(lambda: gate.wait(60))
        call("ncclAllReduce", address(data), address(data), count, DataType.FLOAT32, op.value, comm, stream.handle)
        call("ncclRedOpDestroy", op.value, comm)
        if rank:  # on one of them the number is gone, on the others it has another meaning
            call("ncclRedOpCreatePreMulSum", ctypes.byref(again), address(scalars[1]), DataType.FLOAT32, 0, comm)
            assert again.value == op.value
        gate.set()
        stream.synchronize()
        if rank:
            call("ncclRedOpDestroy", again.value, comm)
        return data

    for data in group.run(body):
        assert data.eq(2.0 * group.size).all()
