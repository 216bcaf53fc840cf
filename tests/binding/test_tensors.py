"""Tensors and arrays whose memory does not hold their values raise an error that names the problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from bad_calls import CudaArray
from libraries import Stub
from test_buffers import describe
from torch._subclasses import FakeTensorMode

import pynccl
from pynccl import Communicator

INVALID: dict[str, tuple[Callable[[], Any], str]] = {
    "other byte order": (
        lambda: np.ones(4, ">f4"),
        r"not in this machine's byte order.*x\.astype\(x\.dtype\.newbyteorder\('='\)\)",
    ),
    "dates": (lambda: np.zeros(2, "M8[ns]"), "has no NCCL data type"),
    "records": (lambda: np.zeros(2, [("a", "f4"), ("b", "f4")]), "has no NCCL data type"),
    "objects": (lambda: np.array([1, "a"], object), "has no NCCL data type"),
    "masked": (lambda: np.ma.masked_array([1.0], [1]), "MaskedArray has masked elements; pass x"),
    "conjugated": (lambda: torch.tensor([1 + 2j]).conj(), r"complex64 .*torch.view_as_real\(x.resolve_conj\(\)\)"),
    "cuda array of the other byte order": (
        lambda: CudaArray(typestr=">f4"),
        "not in this machine's byte order; convert",
    ),
    "cuda array with a mask": (lambda: CudaArray(mask=CudaArray()), "__cuda_array_interface__ has a mask"),
}


def test_memory_that_nccl_would_misread_raises() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    for kind, (make, message) in INVALID.items():
        for use in (describe, comm.all_reduce, lambda x: comm.all_reduce(x, x), lambda x: comm.recv(x, 0)):
            with pytest.raises(TypeError, match=message):
                pytest.fail(f"{kind}: {use(make())}")
    for named in (lambda x: pynccl.mem_alloc(4, x), lambda x: comm.pre_mul_sum(2.0, x), lambda x: describe((64, 4, x))):
        with pytest.raises(TypeError, match="not in this machine's byte order"):
            named(np.dtype(">f4"))
    assert stub.names() == []
    for other in (np.ones(2, "<f4"), np.zeros(2).view(np.memmap), CudaArray(typestr="=f4", mask=None)):
        describe(other)


def negative() -> dict[str, torch.Tensor]:
    return {
        "imaginary part": torch.tensor(1 + 2j).conj().imag,
        "parameter": torch.nn.Parameter(torch.tensor(1 + 2j).conj().imag),
        "a view": torch._neg_view(torch.ones(4)),
    }


USES: dict[str, Callable[[Communicator, torch.Tensor], Any]] = {
    "in place": lambda comm, x: comm.all_reduce(x, x),
    "send": lambda comm, x: comm.all_reduce(x),
    "recv": lambda comm, x: comm.recv(x, 0),
    "target": lambda comm, x: comm.broadcast(torch.zeros(x.shape), x),
    "plan": lambda comm, x: comm.plan.all_reduce(x, x),
}


@pytest.mark.parametrize("use", USES)
def test_tensor_with_negative_bit_raises(use: str) -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    for kind, x in negative().items():
        x.requires_grad_(False)
        assert x.is_neg() and x.is_contiguous(), kind
        with pytest.raises(ValueError, match=r"its negative bit set, so its memory holds -x; pass x\.resolve_neg\(\)"):
            USES[use](comm, x)
        assert stub.names() == [], kind
    with torch.inference_mode(), pytest.raises(ValueError, match="negative bit"):
        USES[use](comm, torch.tensor(1 + 2j).conj().imag)
    assert stub.names() == []
    USES[use](comm, x.resolve_neg())


class Doubled(torch.Tensor):
    """A wrapper without its own memory, like the quantized tensors of other packages."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(func)


def async_collective() -> Any:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return AsyncCollectiveTensor(torch.ones(3))


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(3)


def jagged() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


FOREIGN: dict[str, tuple[Callable[[], Any], str]] = {
    "wrapper": (lambda: Doubled(torch.ones(3)), r"a test_tensors\.Doubled owns no memory.*pass the plain tensor"),
    "async": (async_collective, r"AsyncCollectiveTensor owns no memory.*x\.wait\(\).*wait_tensor\(x\)"),
    "fake": (fake, r"a torch._subclasses.fake_tensor.FakeTensor owns no memory.*outside FakeTensorMode"),
    "jagged": (jagged, r"NestedTensor owns no memory.*x\.values\(\)"),
    "sparse": (lambda: torch.ones(3).to_sparse(), r"sparse_coo tensor on cpu owns no dense memory.*x\.to_dense\(\)"),
    "csr": (lambda: torch.ones(3, 3).to_sparse_csr(), r"sparse_csr tensor on cpu.*x\.values\(\) and its indices"),
    "meta": (lambda: torch.ones(3, device="meta"), r"tensor on meta owns no dense memory.*device="),
    "lazy": (torch.nn.UninitializedParameter, r"UninitializedParameter owns no memory.*materialize\(\)"),
    "list": (lambda: [torch.ones(3)], r"is a list, expected a torch tensor.*one call each in a `with pynccl\.group"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR")
@pytest.mark.parametrize("kind", FOREIGN)
def test_tensor_without_own_memory_raises_with_remedy(kind: str) -> None:
    make, message = FOREIGN[kind]
    stub = Stub()
    comm = stub.comm(cpu=True)
    x = make()
    for use in (lambda: comm.all_reduce(x, x), lambda: comm.all_reduce(x), lambda: comm.recv(x, 0)):
        with pytest.raises(TypeError, match=message):
            use()
    assert stub.names() == []
