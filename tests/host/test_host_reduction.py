"""The host library reduces like a single process: every data type x operator, 2 to 4 ranks, in and out of place."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from host_calls import TORCH_TYPES, CallFailed, Ranks, address, call
from torch import Tensor

from pynccl import host
from pynccl.bindings.abi import DataType, RedOp, Result, ScalarResidence

pytestmark = pytest.mark.usefixtures("transport")
NARROW = (DataType.FLOAT16, DataType.BFLOAT16, DataType.FLOAT8_E4M3, DataType.FLOAT8_E5M2)
BITS = {torch.uint32: torch.int32, torch.uint64: torch.int64}
COUNT = 37


@pytest.fixture(scope="module", params=[2, 3, 4])
def group(request: pytest.FixtureRequest, transport: str) -> Iterator[Ranks]:
    ranks = Ranks(request.param)
    yield ranks
    ranks.destroy()


def inputs(dtype: DataType, size: int, count: int, seed: int = 0) -> list[Tensor]:
    """One tensor per rank; integers over the whole range, so that sums wrap and the sign bit matters."""
    generator = torch.Generator().manual_seed(seed)
    kind = TORCH_TYPES[dtype]
    if kind.is_floating_point:
        values = [torch.randn(count, generator=generator, dtype=torch.float64) for _ in range(size)]
        return [value.to(kind) for value in values]
    nbytes = count * dtype.itemsize
    return [torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8).view(kind) for _ in range(size)]


def wrap(value: int, dtype: DataType) -> int:
    bits = 8 * dtype.itemsize
    value &= (1 << bits) - 1
    signed = not TORCH_TYPES[dtype].is_floating_point and TORCH_TYPES[dtype].is_signed
    return value - (1 << bits) if signed and value >> (bits - 1) else value


def integer_reference(rows: list[list[int]], dtype: DataType, op: RedOp) -> list[int]:
    result = []
    for column in zip(*rows, strict=True):
        total = column[0]
        for value in column[1:]:
            if op is RedOp.PROD:
                total = wrap(total * value, dtype)
            elif op in (RedOp.MAX, RedOp.MIN):
                total = max(total, value) if op is RedOp.MAX else min(total, value)
            else:
                total = wrap(total + value, dtype)
        if op is RedOp.AVG:
            total = -(-total // len(column)) if total < 0 else total // len(column)
        result.append(total)
    return result


def float_reference(tensors: list[Tensor], dtype: DataType, op: RedOp) -> Tensor:
    """In rank order, in float32 for the narrow types, with one rounding at the end."""
    step: dict[RedOp, Callable[[Tensor, Tensor], Tensor]] = {
        RedOp.PROD: torch.mul,
        RedOp.MAX: torch.maximum,
        RedOp.MIN: torch.minimum,
    }
    wide = [tensor.float() if dtype in NARROW else tensor for tensor in tensors]
    total = wide[0]
    for other in wide[1:]:
        total = step.get(op, torch.add)(total, other)
    return (total / len(tensors) if op is RedOp.AVG else total).to(tensors[0].dtype)


def reference(tensors: list[Tensor], dtype: DataType, op: RedOp) -> Tensor:
    if tensors[0].dtype.is_floating_point:
        return float_reference(tensors, dtype, op)
    values = integer_reference([tensor.tolist() for tensor in tensors], dtype, op)
    return torch.tensor(values, dtype=tensors[0].dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("op", list(RedOp), ids=lambda op: op.name.lower())
@pytest.mark.parametrize("dtype", list(DataType), ids=lambda dtype: dtype.name.lower())
def test_all_reduce_and_reduce(group: Ranks, dtype: DataType, op: RedOp) -> None:
    sends = inputs(dtype, group.size, COUNT)
    expected = reference(sends, dtype, op)
    root = group.size - 1

    def body(rank: int, comm: int) -> tuple[Tensor, Tensor, Tensor | None]:
        out, in_place = torch.empty_like(sends[rank]), sends[rank].clone()
        rooted = torch.empty_like(out) if rank == root else None
        call("ncclAllReduce", address(sends[rank]), address(out), COUNT, dtype, op, comm, None)
        call("ncclAllReduce", address(in_place), address(in_place), COUNT, dtype, op, comm, None)
        call("ncclReduce", address(sends[rank]), address(rooted), COUNT, dtype, op, root, comm, None)
        return out, in_place, rooted

    results = group.run(body)
    for out, in_place, _ in results:
        assert same_bits(out, expected)
        assert same_bits(in_place, expected)
    rooted = results[root][2]
    assert rooted is not None
    assert same_bits(rooted, expected)


@pytest.mark.parametrize("op", list(RedOp), ids=lambda op: op.name.lower())
@pytest.mark.parametrize("dtype", list(DataType), ids=lambda dtype: dtype.name.lower())
def test_reduce_scatter(group: Ranks, dtype: DataType, op: RedOp) -> None:
    sends = inputs(dtype, group.size, COUNT * group.size, seed=1)
    expected = reference(sends, dtype, op).split(COUNT)

    def body(rank: int, comm: int) -> tuple[Tensor, Tensor]:
        out, whole = torch.empty(COUNT, dtype=sends[rank].dtype), sends[rank].clone()
        call("ncclReduceScatter", address(sends[rank]), address(out), COUNT, dtype, op, comm, None)
        own = whole.split(COUNT)[rank]  # in place: recvbuff == sendbuff + rank * count
        call("ncclReduceScatter", address(whole), address(own), COUNT, dtype, op, comm, None)
        return out, own

    for rank, (out, in_place) in enumerate(group.run(body)):
        assert same_bits(out, expected[rank])
        assert same_bits(in_place, expected[rank])


@pytest.mark.parametrize("count", [1, 2, 16384, 16385, 1_000_003])
@pytest.mark.parametrize("dtype", [DataType.FLOAT32, DataType.BFLOAT16, DataType.UINT8], ids=lambda d: d.name.lower())
def test_large_and_uneven_counts_give_the_same_bits_on_all_ranks(group: Ranks, dtype: DataType, count: int) -> None:
    sends = inputs(dtype, group.size, count, seed=2)
    if dtype is DataType.UINT8:
        expected = torch.stack(sends).sum(0, dtype=torch.int64).to(torch.uint8)
    else:
        expected = float_reference(sends, dtype, RedOp.SUM)

    def body(rank: int, comm: int) -> Tensor:
        data = sends[rank].clone()
        call("ncclAllReduce", address(data), address(data), count, dtype, RedOp.SUM, comm, None)
        return data

    for data in group.run(body):
        assert same_bits(data, expected)


@pytest.mark.parametrize("op", [RedOp.MAX, RedOp.MIN], ids=lambda op: op.name.lower())
@pytest.mark.parametrize("dtype", [DataType.FLOAT32, DataType.FLOAT64, *NARROW], ids=lambda d: d.name.lower())
def test_nan_propagates_in_max_and_min(group: Ranks, dtype: DataType, op: RedOp) -> None:
    def body(rank: int, comm: int) -> Tensor:
        values = [float("nan") if rank == 1 else 1.0, float(rank)]
        data = torch.tensor(values).to(TORCH_TYPES[dtype])
        call("ncclAllReduce", address(data), address(data), 2, dtype, op, comm, None)
        return data.float()

    for data in group.run(body):
        assert data[0].isnan()
        assert data[1] == (group.size - 1 if op is RedOp.MAX else 0)


@pytest.mark.parametrize("residence", list(ScalarResidence), ids=lambda residence: residence.name.lower())
@pytest.mark.parametrize(
    "dtype", [DataType.FLOAT32, DataType.FLOAT64, DataType.INT32, *NARROW], ids=lambda d: d.name.lower()
)
def test_premultiplied_sum(group: Ranks, dtype: DataType, residence: ScalarResidence) -> None:
    kind = TORCH_TYPES[dtype]
    sends = [torch.arange(COUNT).remainder(5).add(rank).to(kind) for rank in range(group.size)]
    wide = torch.float32 if dtype in NARROW else kind
    expected = sum((send.to(wide) * (rank + 2) for rank, send in enumerate(sends)), torch.zeros(COUNT, dtype=wide))

    def body(rank: int, comm: int) -> Tensor:
        scalar, op = torch.tensor([rank + 2 if residence else 1]).to(kind), ctypes.c_int()
        call("ncclRedOpCreatePreMulSum", ctypes.byref(op), address(scalar), dtype, residence, comm)
        # A scalar on the device is read when the operation runs; an immediate one was read already.
        scalar.copy_(torch.tensor([1 if residence else rank + 2]).to(kind))
        data = sends[rank].clone()
        call("ncclAllReduce", address(data), address(data), COUNT, dtype, op.value, comm, None)
        call("ncclRedOpDestroy", op.value, comm)
        with pytest.raises(CallFailed, match="op is") as refused:
            call("ncclAllReduce", address(data), address(data), COUNT, dtype, op.value, comm, None)
        assert refused.value.code is Result.INVALID_ARGUMENT
        return data

    for data in group.run(body):
        assert same_bits(data, expected.to(kind))


@pytest.mark.parametrize("count", [4, 100_000])
def test_a_premultiplied_sum_is_bound_when_it_is_called(group: Ranks, count: int) -> None:
    """Its number may be gone, or mean another one, when a stream comes to the operation."""

    def body(rank: int, comm: int) -> Tensor:
        stream, gate = host.HostStream(), threading.Event()
        scalars, op, again = [torch.full((1,), 2.0), torch.full((1,), 100.0)], ctypes.c_int(), ctypes.c_int()
        data = torch.ones(count)
        call("ncclRedOpCreatePreMulSum", ctypes.byref(op), address(scalars[0]), DataType.FLOAT32, 0, comm)
        stream.submit(lambda: gate.wait(10))
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


def test_a_premultiplied_sum_belongs_to_its_data_type(group: Ranks) -> None:
    def body(rank: int, comm: int) -> str:
        scalar, op = torch.ones(1), ctypes.c_int()
        call("ncclRedOpCreatePreMulSum", ctypes.byref(op), address(scalar), DataType.FLOAT32, 1, comm)
        with pytest.raises(CallFailed) as refused:
            call("ncclAllReduce", address(scalar), address(scalar), 1, DataType.INT32, op.value, comm, None)
        call("ncclRedOpDestroy", op.value, comm)
        return refused.value.text

    assert all("made for datatype float32, the call has int32" in text for text in group.run(body))
