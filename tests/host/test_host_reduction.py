"""The host library reduces floats in rank order: bitwise equal results on every transport, for every operator."""

from __future__ import annotations

import ctypes
from itertools import product

import torch
from host_calls import TORCH_TYPES, Ranks, address, call, check_fails
from reference import expect
from torch import Tensor

from pynccl.bindings.abi import DataType, RedOp, Result, ScalarResidence

NARROW = (DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT8_E4M3, DataType.FLOAT8_E5M2)
FLOATS = (DataType.FLOAT32, DataType.FLOAT64, *NARROW)
SEED = 20
COUNTS = (1, 37, 4_099, 16_385, 40_001, 300_007, 700_003)  # one step; chunks in small slots and in large slots


def in_rank_order(tensors: list[Tensor], op: RedOp) -> Tensor:
    """Reduce in rank order. Narrower types are reduced in float32 and rounded once at the end."""
    step = {RedOp.PROD: torch.mul, RedOp.MAX: torch.maximum, RedOp.MIN: torch.minimum}.get(op, torch.add)
    total, *others = [tensor.float() if tensor.dtype.itemsize < 4 else tensor for tensor in tensors]
    for other in others:
        total = step(total, other)
    return (total / len(tensors) if op is RedOp.AVG else total).to(tensors[0].dtype)


def test_floats_are_reduced_in_rank_order(group: Ranks) -> None:
    """Each data type with each operator, with one of the counts per world size."""
    size = group.size
    for at, (dtype, op) in enumerate(product(FLOATS, RedOp)):
        count, generator = COUNTS[(3 * at + size) % len(COUNTS)], torch.Generator().manual_seed(SEED)
        what = f"seed {SEED}: {dtype.name} {op.name} {count}"
        shard_size = -(-count // size)
        rows = torch.randn(size, size * shard_size, generator=generator, dtype=torch.float64).to(TORCH_TYPES[dtype])
        full = in_rank_order(list(rows), op)

        def body(rank: int, comm: int) -> None:
            send, count = rows[rank].clone(), shard_size  # noqa: B023
            out, shard = torch.empty_like(send), torch.empty_like(send[:count])
            call("ncclAllReduce", address(send), address(out), len(send), dtype, op, comm, None)  # noqa: B023
            call("ncclReduceScatter", address(send), address(shard), count, dtype, op, comm, None)  # noqa: B023
            expect(out, full, what)  # noqa: B023
            expect(shard, full.split(count)[rank], what)  # noqa: B023

        group.run(body)


def test_nan_propagates_in_max_and_min(group: Ranks) -> None:
    def body(rank: int, comm: int) -> None:
        for dtype, op in product(FLOATS, (RedOp.MAX, RedOp.MIN)):
            data = torch.tensor([float("nan") if rank == 1 else 1.0, float(rank)]).to(TORCH_TYPES[dtype])
            call("ncclAllReduce", address(data), address(data), 2, dtype, op, comm, None)
            assert data.float()[0].isnan(), (dtype, op)
            assert data.float()[1] == (group.size - 1 if op is RedOp.MAX else 0), (dtype, op)

    group.run(body)


def make_op(scalar: Tensor, dtype: DataType, residence: ScalarResidence, comm: int) -> int:
    op = ctypes.c_int()
    call("ncclRedOpCreatePreMulSum", ctypes.byref(op), address(scalar), dtype, residence, comm)
    return op.value


def test_premultiplied_sum(group: Ranks) -> None:
    """A device scalar is read when the operation runs, an immediate scalar when the operator is created."""

    def body(rank: int, comm: int) -> None:
        for dtype, residence in product((DataType.INT32, *FLOATS), ScalarResidence):
            kind = TORCH_TYPES[dtype]
            sends = [torch.arange(37).remainder(5).add(other).to(kind) for other in range(group.size)]
            exact = sum(send.double() * (other + 2) for other, send in enumerate(sends))
            scalar = torch.tensor([rank + 2 if residence else 1]).to(kind)
            op = make_op(scalar, dtype, residence, comm)
            scalar.copy_(torch.tensor([1 if residence else rank + 2]).to(kind))
            data = sends[rank].clone()
            call("ncclAllReduce", address(data), address(data), 37, dtype, op, comm, None)
            expect(data, torch.as_tensor(exact).to(kind), f"{dtype.name} {residence.name}")
            call("ncclRedOpDestroy", op, comm)

    group.run(body)
    scalar, comm = torch.ones(1), group.comms[0]
    op, pointer = make_op(scalar, DataType.FLOAT32, ScalarResidence.HOST_IMMEDIATE, comm), address(scalar)
    for dtype, text in (
        (DataType.INT32, "created for datatype float32, but the call has int32"),
        (DataType.FLOAT32, f"op is {op}; expected"),
    ):
        check_fails(Result.INVALID_ARGUMENT, text, "ncclAllReduce", pointer, pointer, 1, dtype, op, comm, None)
        if dtype is DataType.INT32:
            call("ncclRedOpDestroy", op, comm)
