"""Dtypes: every dtype can be copied; dtypes that NCCL cannot reduce raise before any launch."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from ranks import RankPool
from semantics import OPERATIONS, Case, tensors

import pynccl_autograd as ad
from pynccl import Communicator

# Without float4: torch cannot create zeros of it, and some ranks' results are zeros.
COPIED = (
    *(torch.bool, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2),
    *(torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.complex32, torch.complex64),
)
COPYING = ("copy", "all_gather", "split", "broadcast", "scatter", "gather", "all_to_all", "halo_exchange")


def check_copies(comm: Communicator) -> None:
    warnings.simplefilter("ignore")  # complex32 is experimental
    for name in COPYING:
        operation = OPERATIONS[name]
        for i, dtype in enumerate(COPIED):
            case = Case(
                comm.size,
                dim=i % 2 if "any dim" not in operation.cannot else 0,
                uneven=i % 4 > 1 and "uneven" not in operation.cannot,
            )
            # Arbitrary bits (0 and 1 for bool), which the reference copies as integers of the same size.
            high = 2 if dtype is torch.bool else 256
            bits = [
                (x * 1000).to(torch.int64).remainder(high).to(torch.uint8).repeat_interleave(dtype.itemsize, -1)
                for x in tensors(operation, case, 1)
            ]
            integer_dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
            y = operation.call(bits[comm.rank].view(dtype), comm, case)
            expected = operation.reference([x.view(integer_dtype) for x in bits], case)[comm.rank]
            assert y.dtype is dtype and torch.equal(y.view(integer_dtype), expected), (name, dtype, case)


def test_copying_collectives_preserve_the_bits_of_any_dtype(ranks: RankPool) -> None:
    ranks.run(2, check_copies)


REDUCTIONS: dict[str, Any] = {
    "all_reduce": lambda x, comm, op, **options: ad.all_reduce(x, comm, op, grad="sum", **options),
    "reduce": lambda x, comm, op, **options: ad.reduce(x, comm, 0, op, **options),
    "reduce_scatter": lambda x, comm, op, **options: ad.reduce_scatter(x, comm, 0, op, **options),
    "start": lambda x, comm, op, **options: ad.start(ad.all_reduce, x, comm, op, grad="sum", **options).wait(),
}


def check_bools(comm: Communicator) -> None:
    """Sums of bool raise; max is the logical or, min the logical and."""
    x = torch.tensor([True, comm.rank == 0, False, False])
    for reduction in REDUCTIONS.values():
        for op in ("sum", "avg"):
            with pytest.raises(TypeError, match=f"bool has no '{op}'; pass x.to"):
                reduction(x, comm, op)
    for options in ({"op": "prod"}, {"op": ad.PreMul(True)}, {"reduce_dtype": torch.int32}):
        with pytest.raises(TypeError, match="bool has no"):
            ad.all_reduce(x, comm, grad="sum", **options)  # type: ignore[call-overload]
    for op, expected in (("max", [True, True, False, False]), ("min", [True, False, False, False])):
        for wide in (None, torch.int32):
            y = ad.all_reduce(x, comm, op, grad="sum", reduce_dtype=wide)
            assert y.tolist() == expected and set(y.view(torch.uint8).tolist()) <= {0, 1}
    assert ad.all_reduce(x, comm, ad.PreMul(2.0), grad="sum").tolist() == [4.0, 2.0, 0.0, 0.0]
    comm.barrier()  # nothing was launched


def check_reductions(comm: Communicator) -> None:
    n = comm.size
    for dtype in (torch.int16, torch.uint16, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        x = torch.full((2 * n, 2), comm.rank + 1.0).to(dtype)
        wide = torch.float32 if dtype.is_floating_point else torch.int32
        text = f"NCCL cannot reduce {dtype}, the dtype of x; pass reduce_dtype={wide}"
        for name, reduction in REDUCTIONS.items():
            with pytest.raises(TypeError, match=text):
                reduction(x, comm, "sum")
            y = reduction(x, comm, "sum", reduce_dtype=wide)
            total = 0.0 if name == "reduce" and comm.rank else n * (n + 1) / 2
            assert y.dtype is dtype and y.float().unique().tolist() == [total], (name, dtype)
    means = ad.all_reduce(torch.tensor([-3, 3]) + comm.rank, comm, "avg", grad="sum")
    assert means.tolist() == [-2, 3]  # -5 / 2 and 7 / 2, towards zero


def test_dtypes_without_a_reduction_raise_and_suggest_reduce_dtype(ranks: RankPool) -> None:
    ranks.run(2, check_bools)
    ranks.run(2, check_reductions)


def check_meta_and_fake(comm: Communicator) -> None:
    """Run on rank 0 only, where any communication would hang."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

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
    if comm.rank == 0:
        with FakeTensorMode(), pytest.raises(ValueError, match="both are needed under torch"):
            ad.all_to_all(torch.ones(4), comm, send_splits=[1, 3])


def test_meta_and_fake_tensors_give_shapes_without_communication(ranks: RankPool) -> None:
    ranks.run(2, check_meta_and_fake)
