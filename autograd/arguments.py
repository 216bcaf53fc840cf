"""Argument checks of the differentiable collectives, before anything is launched.

Ranks that run the same program pass the same wrong arguments, so all of them raise. A tensor without plain memory on
the communicator's device raises an error with its type and what to pass instead. Meta and fake tensors pass the checks,
since they communicate nothing. Checks that only one collective needs are in its file.
"""

from __future__ import annotations

import functools
import inspect
import numbers
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from pynccl import Communicator, RedOp
from pynccl.bindings.torch_names import PAGE, operator_hint
from pynccl.bindings.values import as_int as plain_int, attribute, instance, shown

from .torch_internals import dispatch_modes, is_traced, is_zero_tensor, transforms_active
from .wire import NCCL_DTYPES, REAL_OF, Splits, is_paired

P = ParamSpec("P")
R = TypeVar("R")
Grad = Literal["sum", "replicated"]
Op = Literal["sum", "avg"] | RedOp
AnyOp = Literal["sum", "avg", "max", "min", "prod"] | RedOp  # for all_reduce only
SUM_OPS = ("sum", "avg")

_PLAIN: frozenset[type] = frozenset((Tensor, torch.nn.Parameter))
_TAKE_LISTS = "ad.all_reduce, ad.all_gather and ad.reduce_scatter take lists, ad.start does not"
# Name of a type -> what to pass instead. Names, because most of these types need not be imported.
_INSTEAD = {
    "DTensor": "x.to_local(), this rank's shard",
    "AsyncCollectiveTensor": "x.wait(), its result",
    "NestedTensor": "x.values(), and the lengths of all ranks as splits=",
    "ndarray": "torch.from_numpy(x)",
    "list": f"its tensors one by one; {_TAKE_LISTS}",
    "tuple": f"its tensors one by one; {_TAKE_LISTS}",
    "ProcessGroup": "pynccl.Communicator.from_process_group(group)",
    "DeviceMesh": "pynccl.Communicator.from_process_group(mesh[dimension])",
    "NoneType": "pynccl.init()",
    "Proxy": "a tensor to torch.fx.experimental.proxy_tensor.make_fx or torch.export, which trace with tensors",
}
_NUMBERS = (bool, int, float, complex)


def check_call(operation: str, x: Tensor, comm: Communicator) -> None:
    """Check that comm is an alive communicator, and x a tensor that it can communicate."""
    if type(x) not in _PLAIN:
        check_tensor_type(operation, x, comm)
    if type(comm) is not Communicator:
        check_comm(operation, comm)
    if torch.compiler.is_compiling():
        return
    if not comm.alive:
        comm.check_alive()
    check_dense(operation, x)
    if x.get_device() != comm.ordinal and not x.is_meta and type(x) in _PLAIN:
        raise ValueError(
            f"{operation}: x is on {x.device}, the communicator on {comm.device}; pass x.to({comm.device!r}), or use a "
            f"communicator on {x.device}"
        )


def check_dense(operation: str, x: Tensor, name: str = "x") -> None:
    """Check that x has a plain layout, and that its storage was not freed."""
    if x.layout is not torch.strided or x.is_quantized or x.is_nested:
        _raise_layout_error(operation, x, name)
    if storage_was_freed(x):
        raise TypeError(
            f"{operation}: {name} is a tensor {tuple(x.shape)} whose storage was freed (by resize_(0), as FSDP does); "
            "pass it before that, e.g. while it is unsharded"
        )


def storage_was_freed(x: Tensor) -> bool:
    """Return whether x has elements but its storage was freed. Reading such a tensor crashes the process."""
    try:
        if type(x) not in _PLAIN or x.data_ptr() or not x.numel() or x.is_meta or is_zero_tensor(x):
            return False
        tracing = dispatch_modes() or transforms_active()
        return not tracing and not x.untyped_storage().nbytes()
    except RuntimeError:  # raised by the tensor wrappers of torch.func
        return False


def check_memory(operation: str, x: Tensor) -> None:
    """Check that x, which has no storage, is a zero tensor, as tangents and cotangents may be."""
    if not is_zero_tensor(x):
        raise NotImplementedError(
            f"{operation}: the tensor has no storage, as in torch.autograd.grad(is_grads_batched=True) and in "
            "torch.autograd.functional with vectorize=True; use torch.func.vmap, jacrev or hessian instead"
        )


def check_tensor_type(operation: str, x: object, comm: object) -> None:
    """Check that x is a plain tensor with storage, or a fake tensor."""
    kind: Any = type(x)
    if isinstance(x, Communicator):
        check_comm(operation, comm, x=x)
    if not isinstance(x, Tensor):
        instead = _INSTEAD.get(kind.__name__) or ("torch.tensor(x)" if isinstance(x, _NUMBERS) else "a tensor")
        if x is None:  # _INSTEAD has what to pass for comm=None
            instead = "a tensor of the same shape and dtype on every rank"
        raise TypeError(f"{operation}: x is a {type_name(kind)}, expected a torch.Tensor; pass {instead}")
    if kind.__torch_dispatch__ is Tensor.__torch_dispatch__ or is_traced(x):
        return
    instead = _INSTEAD.get(kind.__name__, "the plain tensors that it consists of, one by one")
    raise TypeError(
        f"{operation}: x is a {type_name(kind)}, expected a plain tensor with its own memory; pass {instead}"
    )


def check_comm(operation: str, comm: object, **others: object) -> None:
    """Check that comm is a communicator. If one of `others`, the arguments before it, is one instead, the error says
    that the two are swapped."""
    if not isinstance(comm, Communicator):
        for name, value in others.items():
            if isinstance(value, Communicator):
                raise TypeError(
                    f"{operation}: {name} and comm are swapped: {name} is {shown(value)}, comm is {shown(comm)}; pass "
                    f"{name} before comm"
                )
        known = next((_INSTEAD[base.__name__] for base in type(comm).__mro__ if base.__name__ in _INSTEAD), None)
        if type(comm) in _PLAIN:
            known = "the communicator; the output is the result, not an argument"
        raise TypeError(
            f"{operation}: comm is {shown(comm)}, expected a pynccl.Communicator; pass "
            + (known or "one, e.g. from pynccl.init()")
        )


def check_linear(operation: str, x: Tensor, w: Tensor, comm: Communicator, bias: Tensor | None) -> None:
    """Check that x can be communicated over comm and multiplied with w, and that bias fits; the errors name the
    operation."""
    if type(comm) is not Communicator:
        check_comm(operation, comm, x=x, w=w)
    check_call(operation, x, comm)
    if torch.compiler.is_compiling() or (isinstance(w, Tensor) and type(w) not in _PLAIN):
        return  # a weight of another class, such as a packed one, checks x itself
    if not isinstance(w, Tensor) or w.dim() != 2:
        raise TypeError(f"{operation}: w is {shown(w)}, expected a weight [out, in], a torch.Tensor")
    if not x.dim() or x.shape[-1] != w.shape[1]:
        raise ValueError(
            f"{operation}: x has shape {tuple(x.shape)}, expected [.., {w.shape[1]}] for a weight of shape "
            f"{tuple(w.shape)} on this rank"
        )
    if bias is not None:
        instance(bias, Tensor, f"{operation}: bias", "a torch.Tensor, or None")
        if bias.shape != w.shape[:1]:
            raise ValueError(
                f"{operation}: bias has shape {tuple(bias.shape)}, expected {tuple(w.shape[:1])}, the out features of "
                f"w {tuple(w.shape)}"
            )
    for name, t in (("x", x), ("bias", bias)):
        if t is None:
            continue
        if t.dtype is not w.dtype and not torch.is_autocast_enabled(torch.device(comm.device).type):
            raise TypeError(
                f"{operation}: {name} is {t.dtype}, the weight {w.dtype}; pass {name}.to({w.dtype}), or use "
                "torch.autocast"
            )
        if t.device != w.device:
            raise ValueError(f"{operation}: {name} is on {t.device}, the weight on {w.device}; pass both on one device")


def check_reduction(operation: str, x: Tensor, op: object, reduce_dtype: Any) -> torch.dtype | None:
    """Return the dtype in which NCCL reduces x, or None for that of x. TypeError if NCCL cannot reduce x."""
    dtype = x.dtype
    if reduce_dtype is None and dtype in NCCL_DTYPES:  # the common case
        return None
    if dtype is torch.bool:
        if op in ("max", "min"):
            return None
        logical = ', or op="max" (logical or), op="min" (logical and)' if operation == "all_reduce" else ""
        raise TypeError(f"{operation}: bool has no {op!r}; pass x.to(torch.int32){logical}")
    if reduce_dtype is not None:
        return check_reduce_dtype(operation, x, reduce_dtype)
    if dtype in NCCL_DTYPES or is_paired(dtype):
        return None
    wide = "torch.float32" if dtype.is_floating_point else "torch.int32"
    remedy = f"pass reduce_dtype={wide}" if dtype.itemsize <= 2 and not x.is_complex() else "convert x"
    raise TypeError(f"{operation}: NCCL cannot reduce {dtype}, the dtype of x; {remedy}")


def check_reduce_dtype(operation: str, x: Tensor, reduce_dtype: Any) -> torch.dtype | None:
    """Return the checked `reduce_dtype`. If x is complex, `reduce_dtype` may be complex or the dtype of the real
    part."""
    if reduce_dtype is None:
        return None
    if not isinstance(reduce_dtype, torch.dtype):
        raise TypeError(
            f"{operation}: reduce_dtype is {shown(reduce_dtype)}, expected a torch.dtype, e.g. torch.float32"
        )
    if x.is_complex():
        reduce_dtype = REAL_OF.get(reduce_dtype, reduce_dtype)
    exact = reduce_dtype.is_floating_point or not (x.is_floating_point() or x.is_complex())
    if reduce_dtype not in NCCL_DTYPES or not exact:
        raise TypeError(
            f"{operation}: reduce_dtype is {reduce_dtype} for x of {x.dtype}, expected "
            + ("a floating-point dtype" if not exact else "a dtype that NCCL supports")
            + ", e.g. torch.float32"
        )
    return reduce_dtype


def check_op(operation: str, op: Any, allowed: tuple[str, ...] = SUM_OPS) -> Any:
    """Return the name of the operator."""
    if type(op) is str and op in allowed:
        return op
    name = op.name.lower() if isinstance(op, RedOp) else op
    if not isinstance(name, str) or name not in allowed:
        scaled = attribute(op, "code") is not None or "PREMUL" in shown(attribute(op, "op"), str)
        premul = "; for a pre-multiplied sum pass ad.PreMul(scale)" if scaled and "max" in allowed else ""
        hint = premul or operator_hint(op, allowed)
        raise ValueError(f"{operation}: op is {shown(op)}, expected {_any_of(allowed)}{hint}")
    return name


_GRAD_HELP = (
    "expected 'replicated' (every rank does the same computation on the output) or 'sum' (ranks do different "
    "computations on it); see docs/conventions.md"
)


def check_grad(operation: str, grad: object) -> None:
    if not isinstance(grad, str) or grad not in ("sum", "replicated"):
        raise ValueError(f"{operation}: grad is {shown(grad)}, {_GRAD_HELP}")


def require_grad_keyword(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function whose `grad` has no default: if it is missing, the error says which value to pass."""
    name = function.__name__ if function.__name__ != "__init__" else f"nn.{function.__qualname__.partition('.')[0]}"

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if "grad" not in kwargs:
            raise TypeError(f"{name}: grad= is missing, {_GRAD_HELP}")
        return function(*args, **kwargs)

    return wrapper


def raise_async_op(operation: str) -> None:
    raise TypeError(
        f"{operation}: async_op is not an argument; pass ad.{operation} to ad.start, which returns a Work; {PAGE}"
    )


def check_device(name: str, device: Any) -> None:
    try:
        torch.device(device)
    except Exception:  # raised by torch, or by a user's object
        raise TypeError(f"{name} is {shown(device)}, expected a device of torch, such as 'cpu', or None") from None


# Annotation of a parameter -> its types, and what the error expects.
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "bool": ((int, type(None)), "True or False"),
    "float": ((numbers.Real,), "a number"),
    "Dtype": ((torch.dtype, type(None)), "a torch.dtype, such as torch.float32, or None"),
}
_TYPES["torch.dtype | None"] = _TYPES["Dtype"]


def check_type(name: str, annotation: str, value: Any) -> None:
    """Raise TypeError unless `value` is of this annotation. Arrays without dimensions pass as numbers and bools."""
    kinds, expected = _TYPES[annotation]
    valid = isinstance(value, kinds) or (annotation in ("bool", "float") and attribute(value, "ndim") == 0)
    if annotation == "float" and isinstance(value, int):
        valid = not isinstance(value, bool) and value.bit_length() < 64  # torch takes no longer ones
    if not valid:
        raise TypeError(f"{name} is {shown(value)}, expected {expected}")


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that is not compiled: arguments with an annotation of _TYPES, and `device`, are checked."""
    parameters = list(inspect.signature(function).parameters.values())
    of_class = function.__name__ == "__init__"

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        owner = type(args[0]).__name__ if of_class else function.__name__
        named = ((parameter, kwargs[parameter.name]) for parameter in parameters if parameter.name in kwargs)
        for parameter, value in (*zip(parameters, args, strict=False), *named):
            if parameter.annotation in _TYPES:
                check_type(f"{owner}: {parameter.name}", parameter.annotation, value)
            elif parameter.name == "device" and value is not None:
                check_device(f"{owner}: device", value)
        return function(*args, **kwargs)

    return wrapper


def as_list(value: Any) -> list[Any] | None:
    """Return a sequence, an array or a tensor as a list; None for anything else. A set has no order."""
    try:
        listed = value.tolist() if attribute(value, "tolist") is not None else list(value)
        return None if isinstance(value, (str, bytes, dict, set, frozenset)) or not isinstance(listed, list) else listed
    except Exception:  # raised by torch, or by a user's object
        return None


def as_int(value: Any) -> Any:
    """As pynccl's as_int; symbolic sizes are returned unchanged."""
    return value if isinstance(value, torch.SymInt) else plain_int(value)


def check_dim(operation: str, x: Tensor, dim: Any, name: str = "dim") -> int:
    """Return `dim` as a number >= 0."""
    found = as_int(dim)
    if found is None:
        raise TypeError(f"{operation}: {name} is {shown(dim)}, expected a dimension of x, an integer")
    if not -x.dim() <= found < x.dim():
        raise ValueError(f"{operation}: {name} is {dim}, but x has shape {tuple(x.shape)}")
    return int(found % x.dim())


def check_rank(operation: str, comm: Communicator, rank: Any, name: str = "root") -> int:
    """Return `rank` as an int."""
    if type(comm) is not Communicator:
        check_comm(operation, comm, **{name: rank})
    found = as_int(rank)
    if found is None or not 0 <= found < comm.size:
        raise ValueError(f"{operation}: {name} is {shown(rank)}, expected a rank in 0..{comm.size - 1}")
    return int(found)


def check_divisible(operation: str, x: Tensor, dim: int, comm: Communicator, remedy: str = "pass splits=") -> None:
    if x.shape[dim] % comm.size:
        raise ValueError(
            f"{operation}: dimension {dim} of x {tuple(x.shape)} has size {x.shape[dim]}, not divisible by "
            f"{comm.size} ranks; pad it or {remedy}"
        )


def check_splits(operation: str, splits: Splits, comm: Communicator, name: str = "splits") -> tuple[int, ...] | None:
    """Return `splits` as a tuple of one size >= 0 per rank."""
    if splits is None:
        return None
    values = as_list(splits)
    if values is None:
        raise TypeError(f"{operation}: {name} is {shown(splits)}, expected a list with one integer for each rank")
    sizes = tuple(as_int(size) for size in values)
    if None in sizes:
        raise TypeError(f"{operation}: {name} is {shown(values)}, expected integers, one for each rank")
    if len(sizes) != comm.size:
        raise ValueError(f"{operation}: {name} is {sizes}, expected one size for each of {comm.size} ranks")
    if any(not 0 <= size < 2**63 for size in sizes):
        raise ValueError(f"{operation}: {name} is {sizes}, expected sizes in 0..2**63-1")
    return sizes


def check_splittable(operation: str, x: Tensor, dim: int, splits: Splits, comm: Communicator) -> tuple[int, ...] | None:
    """Return `splits` as a tuple, after checking that x can be split by it; None: into equal slices."""
    sizes = check_splits(operation, splits, comm)
    if sizes is None:
        check_divisible(operation, x, dim, comm)
    else:
        check_total(operation, x, dim, sizes)
    return sizes


def check_total(operation: str, x: Tensor, dim: int, splits: Sequence[int], name: str = "splits") -> None:
    """Check that the size of x along dim is the sum of the splits."""
    if x.shape[dim] != sum(splits):
        raise ValueError(
            f"{operation}: dimension {dim} of {tuple(x.shape)} has size {x.shape[dim]}, but {name} {tuple(splits)} add "
            f"up to {sum(splits)}"
        )


def check_own_split(operation: str, x: Tensor, dim: int, splits: Sequence[int], comm: Communicator, name: str) -> None:
    """Check that the size of x along dim is this rank's split."""
    if x.shape[dim] != splits[comm.rank]:
        raise ValueError(
            f"{operation}: x has size {x.shape[dim]} along dim {dim}, but {name}[{comm.rank}] is {splits[comm.rank]}"
        )


def _raise_layout_error(operation: str, x: Tensor, name: str) -> None:
    if x.is_nested:
        kind, instead = "nested", f"{name}.to_padded_tensor(0), or the tensors of {name}.unbind()"
    elif x.is_quantized:
        kind, instead = f"quantized ({x.dtype})", f"{name}.int_repr(), or {name}.dequantize()"
    else:
        kind, instead = f"sparse ({x.layout})", f"{name}.to_dense()"
    raise TypeError(f"{operation}: {name} is a {kind} tensor, expected a dense one; pass {instead}")


def type_name(kind: Any) -> str:
    return str(kind.__name__) if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _any_of(names: Sequence[str]) -> str:
    *others, last = [repr(name) for name in names]
    return f"{', '.join(others)} or {last}"
