"""Checks of the arguments of differentiable collectives, before anything is launched.

What is wrong here is wrong in the same way on all ranks that run the same program, so all of them raise. A tensor that
has no plain memory of its own on the communicator's device is refused by the name of its type, with what to pass
instead. What only has a shape (meta and fake tensors) is let through: it communicates nothing. Checks that one
collective alone needs stand in its file.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from pynccl import Communicator, RedOp
from pynccl.bindings.values import attribute, shown

from .torch_internals import dispatch_modes, is_traced, is_zero_tensor, transforms_active
from .wire import CARRIED, REAL_OF, Splits, is_paired

P = ParamSpec("P")
R = TypeVar("R")
Grad = Literal["sum", "replicated"]
Op = Literal["sum", "avg"] | RedOp
AnyOp = Literal["sum", "avg", "max", "min", "prod"] | RedOp  # of all_reduce alone
SUM_OPS = ("sum", "avg")

_PLAIN: frozenset[type] = frozenset((Tensor, torch.nn.Parameter))
_TAKE_LISTS = "ad.all_reduce, ad.all_gather and ad.reduce_scatter take lists, ad.start does not"
# By the name of a type: what is to be passed instead. Names, since most of these need not be loaded.
_INSTEAD = {
    "DTensor": "x.to_local(), this rank's part",
    "AsyncCollectiveTensor": "x.wait(), its result",
    "NestedTensor": "x.values(), and give the lengths to all ranks as splits=",
    "ndarray": "torch.from_numpy(x)",
    "list": f"its tensors one by one; {_TAKE_LISTS}",
    "tuple": f"its tensors one by one; {_TAKE_LISTS}",
    "ProcessGroup": "pynccl.Communicator.from_process_group(group)",
    "NoneType": "pynccl.init()",
    "Proxy": "a tensor to torch.fx.experimental.proxy_tensor.make_fx or torch.export, which trace with tensors",
}
_NUMBERS = (bool, int, float, complex)


def check_call(operation: str, x: Tensor, comm: Communicator) -> None:
    """That x is a tensor that can travel over comm, and comm a communicator that is alive."""
    if type(x) not in _PLAIN:
        check_tensor_type(operation, x, comm)
    if type(comm) is not Communicator:
        check_comm(operation, comm)
    if torch.compiler.is_compiling():
        return
    if not comm.alive:
        comm.check_alive()
    if x.layout is not torch.strided or x.is_quantized or x.is_nested:
        _refuse_layout(operation, x)
    if lost_its_memory(x):
        raise TypeError(
            f"{operation}: x is a tensor {tuple(x.shape)} whose storage was freed (by resize_(0), as FSDP does); "
            "pass it while it has its memory"
        )
    if x.get_device() != comm.ordinal and not x.is_meta and type(x) in _PLAIN:
        raise ValueError(
            f"{operation}: x is on {x.device}, the communicator on {comm.device}; pass x.to({comm.device!r}), or use a "
            "communicator of x's device"
        )


def lost_its_memory(x: Tensor) -> bool:
    """Whether x has elements, but memory no more: torch reads there all the same, which ends the process."""
    try:
        if type(x) not in _PLAIN or x.data_ptr() or not x.numel() or x.is_meta or is_zero_tensor(x):
            return False
        tracing = dispatch_modes() or transforms_active()
        return not tracing and not x.untyped_storage().nbytes()
    except RuntimeError:  # of what stands for a tensor within a transform
        return False


def check_memory(operation: str, x: Tensor) -> None:
    """That an x without memory of its own stands for zeros, as tangents and cotangents may."""
    if not is_zero_tensor(x):
        raise NotImplementedError(
            f"{operation}: the tensor has no memory of its own, as within torch.autograd.grad(is_grads_batched=True) "
            "and torch.autograd.functional with vectorize=True; use torch.func.vmap, jacrev or hessian"
        )


def check_tensor_type(operation: str, x: object, comm: object) -> None:
    """That x is a tensor that owns memory, or a fake one."""
    kind: Any = type(x)
    if isinstance(x, Communicator):
        check_comm(operation, comm, x=x)
    if not isinstance(x, Tensor):
        instead = _INSTEAD.get(kind.__name__) or ("torch.tensor(x)" if isinstance(x, _NUMBERS) else "a tensor")
        raise TypeError(f"{operation}: x is a {type_name(kind)}, expected a torch.Tensor; pass {instead}")
    if kind.__torch_dispatch__ is Tensor.__torch_dispatch__ or is_traced(x):
        return
    instead = _INSTEAD.get(kind.__name__, "the plain tensors that it is made of, one by one")
    raise TypeError(
        f"{operation}: x is a {type_name(kind)}, which is no plain tensor with memory of its own; pass {instead}"
    )


def check_comm(operation: str, comm: object, **others: object) -> None:
    """That comm is a communicator. Where one of `others`, which stand before it, is one, an error says that they are
    swapped."""
    if not isinstance(comm, Communicator):
        for name, value in others.items():
            if isinstance(value, Communicator):
                raise TypeError(
                    f"{operation}: {name} and comm are swapped: {name} is {shown(value)}, comm is {shown(comm)}; pass "
                    f"{name} before comm"
                )
        known = next((_INSTEAD[base.__name__] for base in type(comm).__mro__ if base.__name__ in _INSTEAD), None)
        raise TypeError(
            f"{operation}: comm is {shown(comm)}, expected a pynccl.Communicator; pass "
            + (known or "one, of pynccl.init()")
        )


def check_reduction(operation: str, x: Tensor, op: object, reduce_dtype: Any) -> torch.dtype | None:
    """`reduce_dtype` as the type in which NCCL reduces x, None for the tensor's own; TypeError if NCCL has none."""
    dtype = x.dtype
    if reduce_dtype is None and dtype in CARRIED:  # nearly always
        return None
    if dtype is torch.bool:
        if op in ("max", "min"):
            return None
        ways = ', or op="max" (logical or), op="min" (logical and)' if operation == "all_reduce" else ""
        raise TypeError(f"{operation}: bool has no {op!r}; pass a number per element, x.to(torch.int32){ways}")
    if reduce_dtype is not None:
        return check_reduce_dtype(operation, x, reduce_dtype)
    if dtype in CARRIED or is_paired(dtype):
        return None
    wide = "torch.float32" if dtype.is_floating_point else "torch.int32"
    remedy = f"pass reduce_dtype={wide}" if dtype.itemsize <= 2 and not x.is_complex() else "convert x"
    raise TypeError(f"{operation}: NCCL has no reduction of {dtype}, the type of x; {remedy}")


def check_reduce_dtype(operation: str, x: Tensor, reduce_dtype: Any) -> torch.dtype | None:
    """The type in which sums of tensors like x travel. Of complex x the type of its real part may be meant."""
    if reduce_dtype is None:
        return None
    if not isinstance(reduce_dtype, torch.dtype):
        raise TypeError(f"{operation}: reduce_dtype is {reduce_dtype!r}, expected a torch.dtype, e.g. torch.float32")
    if x.is_complex():
        reduce_dtype = REAL_OF.get(reduce_dtype, reduce_dtype)
    exact = reduce_dtype.is_floating_point or not (x.is_floating_point() or x.is_complex())
    if reduce_dtype not in CARRIED or not exact:
        raise TypeError(
            f"{operation}: reduce_dtype is {reduce_dtype} for x of {x.dtype}, expected "
            + ("a floating-point type" if not exact else "a type that NCCL has")
            + ", e.g. torch.float32"
        )
    return reduce_dtype


def check_op(operation: str, op: Any, allowed: tuple[str, ...] = SUM_OPS) -> Any:
    """The name of the operator."""
    if type(op) is str and op in allowed:
        return op
    name = op.name.lower() if isinstance(op, RedOp) else op
    if not isinstance(name, str) or name not in allowed:
        scaled = attribute(op, "code") is not None and "max" in allowed
        premul = "; of a pre-multiplied sum, ad.PreMul(scale)" if scaled else ""
        raise ValueError(f"{operation}: op is {shown(op)}, expected {_any_of(allowed)}{premul}")
    return name


_WHICH_GRAD = (
    "expected 'sum' (each rank goes on with work of its own on the output) or 'replicated' (every rank goes on alike); "
    "docs/conventions.md"
)


def check_grad(operation: str, grad: object) -> None:
    if not isinstance(grad, str) or grad not in ("sum", "replicated"):
        raise ValueError(f"{operation}: grad is {shown(grad)}, {_WHICH_GRAD}")


def asks_for_grad(function: Callable[P, R]) -> Callable[P, R]:
    """The function, whose `grad` has no default, with an error that says which one to pass."""
    name = function.__name__ if function.__name__ != "__init__" else f"nn.{function.__qualname__.partition('.')[0]}"

    @functools.wraps(function)
    def asked(*args: P.args, **kwargs: P.kwargs) -> R:
        if "grad" not in kwargs:
            raise TypeError(f"{name}: grad= is missing, {_WHICH_GRAD}")
        return function(*args, **kwargs)

    return asked


def as_int(value: Any) -> Any:
    """`value` as an int, if it is an integer of any library; else None. Symbolic sizes stay what they are."""
    if type(value) is int or isinstance(value, torch.SymInt):
        return value
    if isinstance(value, bool) or attribute(value, "dtype") is torch.bool:
        return None
    try:
        return operator.index(value)
    except Exception:  # also what an object of the user's raises
        return None


def check_dim(operation: str, x: Tensor, dim: Any, name: str = "dim") -> int:
    """`dim` as a number >= 0."""
    found = as_int(dim)
    if found is None:
        raise TypeError(f"{operation}: {name} is {shown(dim)}, expected a dimension of x, an integer")
    if not -x.dim() <= found < x.dim():
        raise ValueError(f"{operation}: {name} is {dim}, but the tensor has shape {tuple(x.shape)}")
    return int(found % x.dim())


def check_rank(operation: str, comm: Communicator, rank: Any, name: str = "root") -> int:
    """`rank` as an int."""
    if type(comm) is not Communicator:
        check_comm(operation, comm, **{name: rank})
    found = as_int(rank)
    if found is None or not 0 <= found < comm.size:
        raise ValueError(f"{operation}: {name} is {shown(rank)}, expected a rank in 0..{comm.size - 1}")
    return int(found)


def check_divisible(operation: str, x: Tensor, dim: int, comm: Communicator, remedy: str = "pass splits=") -> None:
    if x.shape[dim] % comm.size:
        raise ValueError(
            f"{operation}: dimension {dim} of {tuple(x.shape)} has {x.shape[dim]} rows, not divisible by {comm.size} "
            f"ranks; pad it or {remedy}"
        )


def check_splits(operation: str, splits: Splits, comm: Communicator, name: str = "splits") -> tuple[int, ...] | None:
    """`splits` as a tuple: one size per rank, none below 0."""
    if splits is None:
        return None
    given: Any = splits
    if attribute(given, "tolist") is not None:  # a tensor, a NumPy array
        given = given.tolist()
    if isinstance(given, (str, bytes, dict)) or not isinstance(given, Iterable):
        raise TypeError(f"{operation}: {name} is {shown(splits)}, expected one size, an integer, for each rank")
    given = tuple(given)
    sizes = tuple(as_int(size) for size in given)
    if None in sizes:
        raise TypeError(f"{operation}: {name} is {given}, expected integers, one for each rank")
    if len(sizes) != comm.size:
        raise ValueError(f"{operation}: {name} is {sizes}, expected one size for each of {comm.size} ranks")
    if any(size < 0 for size in sizes):
        raise ValueError(f"{operation}: {name} is {sizes}, expected sizes >= 0")
    return sizes


def check_cut(operation: str, x: Tensor, dim: int, splits: Splits, comm: Communicator) -> tuple[int, ...] | None:
    """`splits` as a tuple, along which x can be cut; None: equally."""
    sizes = check_splits(operation, splits, comm)
    if sizes is None:
        check_divisible(operation, x, dim, comm)
    else:
        check_total(operation, x, dim, sizes)
    return sizes


def check_total(operation: str, x: Tensor, dim: int, splits: Sequence[int], name: str = "splits") -> None:
    """That x is as long along dim as the splits together."""
    if x.shape[dim] != sum(splits):
        raise ValueError(
            f"{operation}: dimension {dim} of {tuple(x.shape)} has {x.shape[dim]} rows, but {name} {tuple(splits)} add "
            f"up to {sum(splits)}"
        )


def check_own(operation: str, x: Tensor, dim: int, splits: Sequence[int], comm: Communicator, name: str) -> None:
    """That x is as long along dim as this rank's split."""
    if x.shape[dim] != splits[comm.rank]:
        raise ValueError(
            f"{operation}: dimension {dim} of {tuple(x.shape)} has {x.shape[dim]} rows, but {name} {tuple(splits)} "
            f"give rank {comm.rank} {splits[comm.rank]}"
        )


def _refuse_layout(operation: str, x: Tensor) -> None:
    if x.is_nested:
        kind, instead = "nested", "x.to_padded_tensor(0), or its parts by x.unbind()"
    elif x.is_quantized:
        kind, instead = f"quantized ({x.dtype})", "x.int_repr(), or x.dequantize()"
    else:
        kind, instead = f"sparse ({x.layout})", "x.to_dense()"
    raise TypeError(f"{operation}: x is a {kind} tensor, expected a dense one; pass {instead}")


def type_name(kind: Any) -> str:
    return str(kind.__name__) if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _any_of(names: Sequence[str]) -> str:
    *most, last = [repr(name) for name in names]
    return f"{', '.join(most)} or {last}"
