"""Invalid and unusual values for every kind of argument; some of the unusual ones are valid. See call_kinds.py.

Each rank makes a value from its name here, so that all ranks pass the same and a failure can be replayed. Buffers hold
numbers that differ by rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import pynccl
import pynccl_autograd as ad

Make = Callable[[Any, int], Any]  # (Environment of this rank, rank) -> the value


class BadIndex:
    """Raises when it is used as an integer."""

    def __index__(self) -> int:
        raise RuntimeError("no index today")

    def __repr__(self) -> str:
        return "BadIndex()"


class Hostile:
    """Raises RuntimeError for every missing attribute."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name} today")

    def __repr__(self) -> str:
        return "Hostile()"


class Subclass(torch.Tensor):
    """A tensor subclass."""


def fixed(value: Any) -> Make:
    return lambda env, rank: value


# Expressions, evaluated on every rank; env is the Environment of the rank.
EXPRESSIONS = (
    *("None", "'x'", "''", "b'x'", "0", "1", "-1", "2", "7", "2**31", "-2**31", "2**32", "2**32 + 1", "2**63"),
    *("-2**63", "2**64", "10**30", "1.5", "0.0", "1.0", "nan", "inf", "1j", "True", "False", "12345", "..."),
    *("np.int64(0)", "np.int64(1)", "np.int32(-1)", "np.uint64(2**63)", "np.float32(1.5)", "np.bool_(True)"),
    *("np.array(0)", "np.array([0, 1])", "torch.tensor(0)", "torch.tensor([1., 2.])", "object()", "int", "len"),
    *("[]", "[0]", "()", "(0, 1)", "['a', 'b']", "[None, None]", "{}", "{0: 1}", "{1}", "range(2)", "slice(None)"),
    *("NotImplemented", "SimpleNamespace()", "SimpleNamespace(handle='x', code='x', ptr='x')", "BadIndex()"),
    *("Hostile()", "'sum'", "'SUM'", "'mean'", "'avg'", "'replicated'", "torch.float32", "torch.complex64"),
    *("torch.quint8", "torch.int64", "'cuda:0'", "'cpu'", "'\\0'", "'\\ud800'", "RedOp.SUM", "DataType.FLOAT32"),
    *("ad.PreMul('x')", "ad.PreMul(None)", "ad.PreMul(2.0)", "ad.PreMul(1j)", "ad.PreMul(torch.ones(3))"),
    *("CollConfig()", "CollConfig(min_ctas='x')", "CollConfig(min_ctas=2**40)", "CollConfig(alg_selection=3)"),
    *("CollConfig(launch_completion_event=object())", "CommConfig()", "CommConfig(min_ctas='x')"),
    *("CommConfig(min_ctas=-5)", "CommConfig(min_ctas=2**40)", "CommConfig(blocking='no')"),
    *("CommConfig(comm_name=5)", "CommConfig(comm_name='a\\0b')", "bytes(128)", "bytes(127)", "bytearray(128)"),
)
RANK_OBJECTS = {
    "generator": "(i for i in range(2))",
    "long string": "'x' * 5000",
    "comm": "env.comm",
    "destroyed comm": "env.destroyed",
    "SUM operator of another communicator": "env.foreign_operator",
    "operator": "env.operator",
    "operator of another type": "env.operator64",
    "destroyed operator": "env.destroyed_operator",
    "stream": "env.stream",
    "closed stream": "env.closed_stream",
    "event": "env.event",
    "window": "env.window",
    "closed window": "env.closed_window",
    "memory": "env.fresh_memory(rank)",
    "freed memory": "env.freed_memory",
    "unique id": "pynccl.get_unique_id()",
    "library": "env.comm.library",
}


NAMES = {**vars(math), **{name: getattr(pynccl, name) for name in pynccl.__all__}, "np": np, "torch": torch, "ad": ad}
NAMES |= {"SimpleNamespace": SimpleNamespace, "BadIndex": BadIndex, "Hostile": Hostile, "pynccl": pynccl}


def made(expression: str) -> Make:
    return lambda env, rank: eval(expression, {**NAMES, "env": env, "rank": rank})


SCALARS: dict[str, Make] = {name: made(name) for name in EXPRESSIONS}
SCALARS |= {name: made(text) for name, text in RANK_OBJECTS.items()}


class Buffer(NamedTuple):
    """A buffer: how to make it, and whether every call that expects a buffer must raise for it."""

    make: Make
    invalid: bool = False


N = 4  # elements of a valid buffer


def numbers(rank: int, count: int = N) -> Tensor:
    return torch.arange(1.0, count + 1) + 10 * rank


def _fake(rank: int) -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(N)


def _resized(rank: int) -> Tensor:
    x = numbers(rank)
    x.untyped_storage().resize_(0)
    return x


class Interface:
    """An object with this __cuda_array_interface__."""

    def __init__(self, **interface: Any) -> None:
        self.__cuda_array_interface__ = interface


def _interface(rank: int, **changes: Any) -> Interface:
    keep = numbers(rank)
    args = {"shape": (N,), "typestr": "<f4", "data": (keep.data_ptr(), False), "version": 3, **changes}
    made = Interface(**{key: value for key, value in args.items() if value is not ...})
    made.keep = keep  # type: ignore[attr-defined]
    return made


class Dlpack:
    """A DLPack exporter that returns its arguments."""

    def __init__(self, capsule: Any, device: Any = (1, 0)) -> None:
        self.capsule, self.device_value = capsule, device

    def __dlpack__(self, **options: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> Any:
        return self.device_value


BUFFERS: dict[str, Buffer] = {
    "tensor": Buffer(lambda env, rank: numbers(rank)),
    "float64": Buffer(lambda env, rank: numbers(rank).double()),
    "bfloat16": Buffer(lambda env, rank: numbers(rank).bfloat16()),
    "int32": Buffer(lambda env, rank: numbers(rank).int()),
    "uint8": Buffer(lambda env, rank: numbers(rank).byte()),
    "float8": Buffer(lambda env, rank: (numbers(rank) % 8).to(torch.float8_e4m3fn)),
    "float8 fnuz": Buffer(lambda env, rank: numbers(rank).to(torch.float8_e4m3fnuz), True),
    "int16": Buffer(lambda env, rank: numbers(rank).short(), True),
    "bool": Buffer(lambda env, rank: numbers(rank) > 2, True),
    "complex64": Buffer(lambda env, rank: numbers(rank).to(torch.complex64), True),
    "conj": Buffer(lambda env, rank: numbers(rank).to(torch.complex64).conj(), True),
    "neg view": Buffer(lambda env, rank: torch._neg_view(numbers(rank))),
    "imag of conj": Buffer(lambda env, rank: torch.tensor([1 + 2j * (rank + 1)]).conj().imag),
    "0 elements": Buffer(lambda env, rank: numbers(rank)[:0]),
    "1 element": Buffer(lambda env, rank: numbers(rank, 1)),
    "5 elements": Buffer(lambda env, rank: numbers(rank, 5)),
    "8 elements": Buffer(lambda env, rank: numbers(rank, 8)),
    "2 elements": Buffer(lambda env, rank: numbers(rank, 2)),
    "matrix": Buffer(lambda env, rank: numbers(rank).reshape(2, 2)),
    "transposed": Buffer(lambda env, rank: numbers(rank).reshape(2, 2).t(), True),
    "stride 0": Buffer(lambda env, rank: numbers(rank, 1).expand(N), True),
    "flipped NumPy": Buffer(lambda env, rank: numbers(rank).numpy()[::-1], True),
    "sparse": Buffer(lambda env, rank: numbers(rank).to_sparse(), True),
    "meta": Buffer(lambda env, rank: torch.empty(N, device="meta"), True),
    "fake": Buffer(lambda env, rank: _fake(rank), True),
    "quantized": Buffer(lambda env, rank: torch.quantize_per_tensor(numbers(rank), 1.0, 0, torch.quint8), True),
    "nested": Buffer(lambda env, rank: torch.nested.nested_tensor(list(numbers(rank).split(2)))),
    "leaf": Buffer(lambda env, rank: numbers(rank).requires_grad_()),
    "subclass": Buffer(lambda env, rank: numbers(rank).as_subclass(Subclass)),
    "inference": Buffer(lambda env, rank: _inference(rank)),
    "storage resized to nothing": Buffer(lambda env, rank: _resized(rank), True),
    "NumPy": Buffer(lambda env, rank: numbers(rank).numpy().copy()),
    "NumPy big-endian": Buffer(lambda env, rank: numbers(rank).numpy().astype(">f4")),
    "NumPy read-only": Buffer(lambda env, rank: np.frombuffer(numbers(rank).numpy().tobytes(), "f4")),
    "NumPy of no dimensions": Buffer(lambda env, rank: np.array(1.0 + rank, dtype="f4")),
    "NumPy objects": Buffer(lambda env, rank: np.array([None] * N), True),
    "NumPy structured": Buffer(lambda env, rank: np.zeros(N, dtype=[("a", "f4"), ("b", "i4")]), True),
    "NumPy masked": Buffer(lambda env, rank: np.ma.masked_array(numbers(rank).numpy(), [True] + [False] * (N - 1))),
    "NumPy broadcast": Buffer(lambda env, rank: np.broadcast_to(np.float32(1.0), (N,)), True),
    "list": Buffer(lambda env, rank: [1.0] * N, True),
    "memoryview": Buffer(lambda env, rank: memoryview(bytearray(16)), True),
    "raw": Buffer(lambda env, rank: env.raw(rank)),
    "raw null": Buffer(fixed((0, N, "float32")), True),
    "raw of 0 elements": Buffer(fixed((0, 0, "float32"))),
    "raw negative count": Buffer(lambda env, rank: (env.raw(rank)[0], -1, "float32"), True),
    "raw count 2**64": Buffer(lambda env, rank: (env.raw(rank)[0], 2**64, "float32"), True),
    "raw pointer 2**64": Buffer(fixed((2**64, N, "float32")), True),
    "raw pointer True": Buffer(fixed((True, 0, "float32"))),
    "raw count 4.0": Buffer(lambda env, rank: (env.raw(rank)[0], 4.0, "float32"), True),
    "raw type 'f'": Buffer(lambda env, rank: (env.raw(rank)[0], N, "f"), True),
    "raw type None": Buffer(lambda env, rank: (env.raw(rank)[0], N, None), True),
    "raw of two": Buffer(lambda env, rank: env.raw(rank)[:2], True),
    "interface": Buffer(lambda env, rank: _interface(rank)),
    "interface of complex": Buffer(lambda env, rank: _interface(rank, typestr="<c8"), True),
    "interface big-endian": Buffer(lambda env, rank: _interface(rank, typestr=">f4"), True),
    "interface without data": Buffer(lambda env, rank: _interface(rank, data=...), True),
    "interface without shape": Buffer(lambda env, rank: _interface(rank, shape=...), True),
    "interface typestr None": Buffer(lambda env, rank: _interface(rank, typestr=None), True),
    "interface strided": Buffer(lambda env, rank: _interface(rank, shape=(2,), strides=(8,)), True),
    "interface read-only": Buffer(lambda env, rank: _interface(rank, data=(numbers(rank).data_ptr(), True))),
    "dlpack None": Buffer(lambda env, rank: Dlpack(None), True),
    "dlpack device None": Buffer(lambda env, rank: Dlpack(numbers(rank).__dlpack__(), None), True),
    "dlpack of a used capsule": Buffer(lambda env, rank: _used(rank), True),
    "memory": Buffer(lambda env, rank: env.fresh_memory(rank)),
    "freed memory": Buffer(lambda env, rank: env.freed_memory, True),
    "torch.float32": Buffer(fixed(torch.float32), True),
    "tensor class": Buffer(fixed(torch.Tensor), True),
}


def _inference(rank: int) -> Tensor:
    with torch.inference_mode():
        return numbers(rank)


def _used(rank: int) -> Any:
    capsule = numbers(rank).__dlpack__()
    torch.utils.dlpack.from_dlpack(capsule)
    return Dlpack(capsule)


def logical(x: Any) -> Tensor | None:
    """Return the numbers in a buffer in double precision; None if unknown."""
    if isinstance(x, torch.Tensor):
        if x.layout is torch.strided and x.untyped_storage().nbytes() < x.numel() * x.element_size():
            return None  # torch would read past the end
        fake = type(x).__name__ == "FakeTensor"
        if fake or x.is_meta or x.layout is not torch.strided or x.is_quantized or x.is_complex():
            return None
        if x.is_contiguous() and x.untyped_storage().nbytes() < x.numel() * x.element_size():
            return None
        if x.is_nested:
            return torch.cat([part.reshape(-1) for part in x.unbind()]).double()
        return torch.as_tensor(x.detach().as_subclass(torch.Tensor).resolve_neg()).double().clone()
    if isinstance(x, np.ma.MaskedArray):
        return torch.from_numpy(np.asarray(x.data, dtype="f8"))
    if isinstance(x, np.ndarray):
        return torch.from_numpy(np.array(x, dtype="f8"))
    if isinstance(x, pynccl.Memory):
        return torch.from_dlpack(x).double().clone()
    if isinstance(x, Interface):
        return x.keep.double().clone()  # type: ignore[attr-defined]
    return None
