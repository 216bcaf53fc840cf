"""Memory that is not what its owner means is refused by name; autograd hears of what is written to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from bad_calls import CudaArray
from libraries import Stub
from ranks import RankPool
from test_buffers import describe
from torch._subclasses import FakeTensorMode

import pynccl
from pynccl import Communicator
from pynccl.interop.buffers import data_type

SWAPPED = "is not in the byte order of this machine"


def test_arrays_of_the_other_byte_order_are_refused_with_the_conversion() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    for name in (">f4", ">f8", ">i8", ">u4", ">f2"):
        x = np.ones(4, name)
        for call in (
            lambda x=x: comm.all_reduce(x),
            lambda x=x: comm.all_reduce(x, x),
            lambda x=x: comm.recv(x, 0),
            lambda x=x: comm.all_reduce(np.ones(4, x.dtype.newbyteorder("=")), x),
            lambda x=x: data_type(x.dtype),
            lambda x=x: describe((64, 4, x.dtype)),
            lambda x=x: pynccl.mem_alloc(4, x.dtype),
            lambda x=x: comm.pre_mul_sum(2.0, x.dtype),
        ):
            with pytest.raises(TypeError, match=rf"{SWAPPED}.*x\.astype\(x\.dtype\.newbyteorder\('='\)\)"):
                call()
        assert describe(x.astype(x.dtype.newbyteorder("=")))[1] == 4
    assert stub.names() == []
    assert data_type(np.dtype("<f4")) is data_type(np.dtype("=f4")) is pynccl.DataType.FLOAT32


NO_NUMBERS: dict[str, Any] = {
    "dates": np.zeros(2, "M8[ns]"),
    "spans": np.zeros(2, "m8[s]"),
    "records": np.zeros(2, [("a", "f4"), ("b", "f4")]),
    "long double": np.zeros(2, np.longdouble),
    "objects": np.array([1, "a"], object),
    "bytes": np.zeros(2, "S4"),
}


def test_arrays_of_other_than_numbers_of_nccl_are_refused() -> None:
    for kind, array in NO_NUMBERS.items():
        if array.dtype != np.float64:  # which long double may be
            with pytest.raises(TypeError, match="has no NCCL data type"):
                pytest.fail(f"{kind}: {describe(array)}")


def test_cuda_arrays_of_the_other_byte_order_or_with_a_mask_are_refused() -> None:
    with pytest.raises(TypeError, match="typestr '>f4' is not in this machine's byte order; convert it"):
        describe(CudaArray(typestr=">f4"))
    with pytest.raises(TypeError, match="__cuda_array_interface__ has a mask"):
        describe(CudaArray(mask=CudaArray()))
    assert describe(CudaArray(typestr="=f4", mask=None))[2] == pynccl.DataType.FLOAT32


def test_masked_arrays_are_refused_and_other_kinds_of_arrays_are_not() -> None:
    masked = np.ma.masked_array([1.0, 2.0], [0, 1])
    with pytest.raises(TypeError, match=r"a numpy MaskedArray has elements that do not count; pass x\.filled"):
        describe(masked)
    assert describe(masked.data)[1] == 2
    assert describe(np.zeros(2).view(np.memmap))[1] == 2


def negative() -> dict[str, torch.Tensor]:
    return {
        "imaginary part": torch.tensor(1 + 2j).conj().imag,
        "its only element": torch.tensor([1 + 2j, 3 + 4j]).conj().imag[1:],
        "detached": torch.tensor([1 + 2j]).conj().imag.detach(),
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
def test_a_tensor_with_a_lazy_sign_is_refused(use: str) -> None:
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


def test_a_conjugated_tensor_is_refused_like_all_complex_ones() -> None:
    with pytest.raises(TypeError, match=r"complex64 has no NCCL data type.*torch.view_as_real\(x.resolve_conj\(\)\)"):
        describe(torch.tensor([1 + 2j]).conj())


class Doubled(torch.Tensor):
    """A wrapper, as the quantized tensors of other packages are: its own memory is none."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(func)


class Named(torch.Tensor):
    """A subclass that only adds methods: its memory is what it means."""


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
    "list": (lambda: [torch.ones(3)], r"a builtins\.list is no buffer.*one call each in a `with pynccl\.group"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR")
@pytest.mark.parametrize("kind", FOREIGN)
def test_what_has_no_memory_of_its_own_is_named_with_a_way_out(kind: str) -> None:
    make, says = FOREIGN[kind]
    stub = Stub()
    comm = stub.comm(cpu=True)
    x = make()
    for use in (lambda: comm.all_reduce(x, x), lambda: comm.all_reduce(x), lambda: comm.recv(x, 0)):
        with pytest.raises(TypeError, match=says):
            use()
    assert stub.names() == []


def distributed(comm: Communicator) -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    x = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (1,)), [Replicate()])
    with pytest.raises(
        TypeError, match=r"DTensor owns no memory that NCCL could use; pass x\.to_local\(\), this rank's"
    ):
        comm.all_reduce(x, x)
    assert comm.all_reduce(x.to_local()).tolist() == [1.0, 1.0]
    dist.destroy_process_group()


def test_a_distributed_tensor_is_refused_with_its_local_part_named(doomed: RankPool) -> None:
    """In a process of its own: torch.distributed leaves traces in the one it has been used in."""
    assert doomed.run(1, distributed) == [None]


def test_tensors_inside_vmap_and_grad_are_refused() -> None:
    stub = Stub()
    comm = stub.comm(cpu=True)
    for transform in (torch.func.vmap, torch.func.grad):
        for f in (lambda t: comm.all_reduce(t, t), lambda t: comm.all_reduce(t).sum()):
            with pytest.raises((TypeError, ValueError), match=r"torch\.func|requires grad"):
                transform(f)(torch.ones(2))
    assert stub.names() == []


def test_a_subclass_with_memory_of_its_own_is_a_tensor() -> None:
    stub = Stub()
    x = torch.zeros(3).as_subclass(Named)
    assert stub.comm(cpu=True).all_reduce(x, x) is x
    assert stub.calls()[0].args["send"] == x.data_ptr()
    assert describe(copy.deepcopy(torch.nn.Parameter(torch.zeros(2))))[1] == 2
