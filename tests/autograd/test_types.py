"""Types of tensors: every one can be copied; those that NCCL cannot reduce are named before anything is launched."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import RankPool
from semantics import OPERATIONS, Case, tensors
from torch import Tensor

import pynccl_autograd as ad
from pynccl import Communicator

# Not float4, of which torch makes no zeros: what is copied needs none, but some ranks' results are.
COPIED = (
    *(torch.bool, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2),
    *(torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.complex32, torch.complex64),
)
COPYING = ("copy", "all_gather", "split", "broadcast", "scatter", "gather", "all_to_all", "halo_exchange")


def raw_bytes(x: Tensor) -> list[int]:
    found: list[int] = x.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
    return found


def copies(comm: Communicator) -> None:
    warnings.simplefilter("ignore")  # complex32 is experimental
    for name in COPYING:
        operation = OPERATIONS[name]
        for i, dtype in enumerate(COPIED):
            case = Case(
                comm.size,
                dim=i % 2 if "any dim" not in operation.cannot else 0,
                uneven=i % 4 > 1 and "uneven" not in operation.cannot,
            )
            # Numbers of arbitrary bits (0 and 1 for bool), of which the reference copies what torch calls integers.
            high = 2 if dtype is torch.bool else 256
            bits = [
                (x * 1000).to(torch.int64).remainder(high).to(torch.uint8).repeat_interleave(dtype.itemsize, -1)
                for x in tensors(operation, case, 1)
            ]
            like = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
            y = operation.call(bits[comm.rank].view(dtype), comm, case)
            expected = operation.reference([x.view(like) for x in bits], case)[comm.rank]
            assert y.dtype is dtype and torch.equal(y.view(like), expected), (name, dtype, case)


def test_what_only_copies_takes_any_type_bit_by_bit(ranks: RankPool) -> None:
    ranks.run(2, copies)


def meetings(comm: Communicator) -> None:
    """Two sources for rank 0: sums of types that torch cannot add."""
    both = [(0, 0), (1, 0)]
    for dtype in (torch.uint16, torch.uint32, torch.uint64, torch.int16, torch.int8):
        high = torch.iinfo(dtype).max
        x = torch.tensor([3 + comm.rank, high], dtype=torch.uint64).to(dtype)
        y = ad.permute(x, comm, both)
        wrapped = (2 * high) % (1 << 8 * dtype.itemsize)
        wrapped -= (1 << 8 * dtype.itemsize) if wrapped > high else 0
        assert y.dtype is dtype and y.tolist() == ([7, wrapped] if comm.rank == 0 else [0, 0])
    for dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz):
        y = ad.permute(torch.tensor([1.5, -2.0 + comm.rank]).to(dtype), comm, both)
        assert y.dtype is dtype and y.float().tolist() == ([3.0, -3.0] if comm.rank == 0 else [0.0, 0.0])
    for dtype in (torch.bool, torch.float8_e8m0fnu):
        x = torch.ones(2, dtype=torch.uint8).view(dtype)
        with pytest.raises(TypeError, match="has no sum, and a rank is the target of several edges"):
            ad.permute(x, comm, both)
        assert raw_bytes(ad.permute(x, comm, [(0, 1), (1, 0)])) == [1, 1]


def test_permute_adds_what_torch_cannot_and_names_what_nobody_can(ranks: RankPool) -> None:
    ranks.run(2, meetings)


REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "all_reduce": lambda x, comm, op, **options: ad.all_reduce(x, comm, op, grad="sum", **options),
    "reduce": lambda x, comm, op, **options: ad.reduce(x, comm, 0, op, **options),
    "reduce_scatter": lambda x, comm, op, **options: ad.reduce_scatter(x, comm, 0, op, **options),
    "start": lambda x, comm, op, **options: ad.start(ad.all_reduce, x, comm, op, grad="sum", **options).wait(),
    "AllReduce": lambda x, comm, op, **options: ad.nn.AllReduce(comm, op, grad="sum", **options)(x),
}


def bools(comm: Communicator) -> list[str]:
    """Sums of bool are refused; max and min are a logical or and and."""
    x = torch.tensor([True, comm.rank == 0, False, False])
    messages = []
    for reduction in REDUCTIONS.values():
        for op in ("sum", "avg"):
            with pytest.raises(TypeError, match=f"bool has no '{op}'; pass a number per element") as caught:
                reduction(x, comm, op)
            messages.append(str(caught.value))
    products: tuple[Any, ...] = ("prod", ad.PreMul(True))
    for operator in products:
        with pytest.raises(TypeError, match="bool has no"):
            ad.all_reduce(x, comm, operator, grad="sum")
    with pytest.raises(TypeError, match="bool has no"):
        ad.all_reduce(x, comm, grad="sum", reduce_dtype=torch.int32)
    for op, expected in (("max", [True, True, False, False]), ("min", [True, False, False, False])):
        y = ad.all_reduce(x, comm, op, grad="sum")
        assert y.tolist() == expected and set(raw_bytes(y)) <= {0, 1}
        assert ad.all_reduce(x, comm, op, grad="sum", reduce_dtype=torch.int32).tolist() == expected
    assert ad.all_reduce(x, comm, ad.PreMul(2.0), grad="sum").tolist() == [4.0, 2.0, 0.0, 0.0]
    alone = comm.split(comm.rank)
    with pytest.raises(TypeError, match="bool has no 'sum'"):
        ad.all_reduce(x, alone, grad="sum")
    alone.destroy()
    comm.barrier()  # nothing was launched
    return messages


def test_bool_has_no_sum_but_a_logical_or_and_and(ranks: RankPool) -> None:
    for messages in ranks.run(2, bools):
        assert any("all_reduce: bool has no 'sum'" in text and 'op="max" (logical or)' in text for text in messages)


def reductions(comm: Communicator) -> None:
    n = comm.size
    lacking = (torch.int16, torch.uint16, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    for dtype in lacking:
        x = torch.full((2 * n, 2), comm.rank + 1.0).to(dtype)
        wide = torch.float32 if dtype.is_floating_point else torch.int32
        for name, reduction in REDUCTIONS.items():
            with pytest.raises(
                TypeError, match=f"NCCL has no reduction of {dtype}, the type of x; pass reduce_dtype={wide}"
            ):
                reduction(x, comm, "sum")
            y = reduction(x, comm, "sum", reduce_dtype=wide)
            total = 0.0 if name == "reduce" and comm.rank else n * (n + 1) / 2
            assert y.dtype is dtype and y.float().unique().tolist() == [total], (name, dtype)
    warnings.simplefilter("ignore")
    half = torch.full((2 * n,), 1 + 2j).to(torch.complex32)
    assert ad.all_reduce(half, comm, grad="sum").to(torch.complex64).tolist() == [n * (1 + 2j)] * (2 * n)
    single = torch.full((2,), 1 + 2j)
    for wide in (torch.float64, torch.complex128):
        assert ad.all_reduce(single, comm, grad="sum", reduce_dtype=wide).tolist() == [n * (1 + 2j)] * 2
    ones = torch.ones(2)
    wrong: tuple[tuple[Any, str], ...] = (
        ("float32", "reduce_dtype is 'float32', expected a torch.dtype"),
        (torch.complex64, "expected a floating-point type"),
        (torch.int32, "expected a floating-point type"),
        (torch.float8_e4m3fnuz, "expected a type that NCCL has"),
    )
    for given, text in wrong:
        for call in (ad.all_reduce, ad.all_gather):
            with pytest.raises(TypeError, match=text):
                call(ones, comm, grad="sum", reduce_dtype=given)
    means = ad.all_reduce(torch.tensor([-3, 3]) + comm.rank, comm, "avg", grad="sum")
    assert means.tolist() == [-2, 3]  # -5 / 2 and 7 / 2, towards zero
    comm.barrier()


def test_a_type_without_a_reduction_is_named_with_the_type_to_reduce_in(ranks: RankPool) -> None:
    ranks.run(2, reductions)


def zeros_without_memory(comm: Communicator) -> list[str]:
    """torch's ZeroTensors, as tangents are sometimes, as inputs and as cotangents."""
    for name, operation in OPERATIONS.items():
        for dtype in (torch.float64, torch.complex128):
            if dtype.is_complex and "complex" in operation.cannot:
                continue
            case = Case(comm.size)
            shape = operation.shape(comm.rank, case)
            y = operation.call(torch._efficientzerotensor(shape, dtype=dtype), comm, case)
            assert not y._is_zerotensor() and y.count_nonzero() == 0, name
            x = torch.ones(shape, dtype=dtype, requires_grad=True)
            y = operation.call(x, comm, case)
            (dx,) = torch.autograd.grad(y, x, torch._efficientzerotensor(y.shape, dtype=dtype))
            assert dx.count_nonzero() == 0, name
    started = ad.start(ad.all_gather, torch._efficientzerotensor(3), comm, grad="sum").wait()
    assert started.tolist() == [0.0] * 3 * comm.size
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.ones(2, comm.size), torch._efficientzerotensor((2, comm.size)))
        y, t = torch.autograd.forward_ad.unpack_dual(ad.all_gather(dual, comm, 1, grad="sum"))
        assert t.count_nonzero() == 0
    return list(OPERATIONS)


def test_zeros_that_take_no_memory_travel_as_zeros(ranks: RankPool) -> None:
    assert ranks.run(2, zeros_without_memory) == [list(OPERATIONS)] * 2


def only_shapes(comm: Communicator) -> int:
    """On rank 0 alone: any communication would wait for the others."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    checked = 0
    for operation in OPERATIONS.values() if comm.rank == 0 else ():
        case = Case(comm.size, uneven="uneven" not in operation.cannot)
        xs = tensors(operation, case, 1)
        shape = operation.reference(xs, case)[0].shape
        x = xs[0].to("meta").requires_grad_()
        y = operation.call(x, comm, case)
        y.sum().backward()
        assert y.is_meta and y.shape == shape and x.grad.is_meta and x.grad.shape == x.shape
        fake = operation.call(FakeTensorMode().from_tensor(xs[0]), comm, case)  # outside the mode
        assert type(fake) is FakeTensor and fake.shape == shape
        checked += 1
    if comm.rank == 0:
        started = ad.start(ad.all_gather, torch.empty(2, 3, device="meta"), comm, grad="sum").wait()
        assert started.is_meta and started.shape == (2 * comm.size, 3)
    with torch.device("meta"):  # real tensors all the same, as while a model is built
        x = torch.ones(2 * comm.size, 6, device="cpu", requires_grad=True)
        assert ad.all_reduce(x, comm, "avg", grad="sum").tolist() == x.tolist()
        wide: Any = ad.reduce_scatter(x, comm, reduce_dtype=torch.float64)
        wide.sum().backward()
        assert x.grad.tolist() == x.tolist()
        assert ad.halo_exchange(x, comm, 1, 2).shape == x.shape
    return checked


def test_tensors_without_values_give_shapes_and_communicate_nothing(ranks: RankPool) -> None:
    assert ranks.run(2, only_shapes) == [len(OPERATIONS), 0]
