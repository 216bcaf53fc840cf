"""Checks of torch tensors: those whose memory NCCL cannot use, and those that require grad."""

from __future__ import annotations

import sys
from typing import Any

# Tensor types by name, and how to get a plain tensor from them.
_REMEDIES = {
    "DTensor": "pass x.to_local(), this rank's shard",
    "AsyncCollectiveTensor": "pass x.wait() (torch.distributed._functional_collectives.wait_tensor(x))",
    "FakeTensor": "it is a placeholder while torch traces: call pynccl with real tensors, outside FakeTensorMode, or "
    "use pynccl_autograd, which torch.compile can trace",
    "FunctionalTensor": "it is a placeholder while torch traces: use pynccl_autograd, which torch.compile can trace",
    "NestedTensor": "pass x.values(), and its offsets separately",
    "MaskedTensor": "pass x.get_data(), and x.get_mask() separately",
    "UninitializedParameter": "it has no shape yet: run the module once, or materialize() it",
    "UninitializedBuffer": "it has no shape yet: run the module once, or materialize() it",
}
_DEFAULT_REMEDY = "pass the plain tensor that it wraps"
# Differentiable counterparts in pynccl_autograd whose names differ.
_AUTOGRAD_NAMES = {"send": "send_recv", "recv": "send_recv", "put_signal": "send_recv", "pre_mul_sum": "all_reduce"}


def is_wrapper(kind: type) -> bool:
    """Return whether tensors of this type do not operate directly on their own memory."""
    torch = sys.modules["torch"]
    disabled = torch._C._disabled_torch_dispatch_impl
    known = {name for base in kind.__mro__ if (name := base.__name__) in _REMEDIES}
    return bool(known) or getattr(kind, "__torch_dispatch__", disabled) is not disabled


def why_no_memory(x: Any) -> str:
    """Return why a tensor has no memory to pass to C, and what to pass instead."""
    kind = type(x)
    known = next((_REMEDIES[base.__name__] for base in kind.__mro__ if base.__name__ in _REMEDIES), "")
    if known or is_wrapper(kind):
        return f"a {kind.__module__}.{kind.__name__} owns no memory that NCCL could use; {known or _DEFAULT_REMEDY}"
    layout, device = x.layout, x.device
    if device.type == "meta":
        return f"{layout} tensor on meta owns no dense memory; pass a dense tensor, created with a real device="
    if layout is sys.modules["torch"].strided:
        return (
            f"{layout} tensor on {device} owns no dense memory; pass a dense tensor. Inside torch.func.vmap and "
            "torch.func.grad, use pynccl_autograd instead"
        )
    components = (
        "x.values() and its indices separately" if "sparse" in str(layout) else "the tensor that it was made from"
    )
    return f"{layout} tensor on {device} owns no dense memory; pass a dense tensor: x.to_dense(), or {components}"


def negative_bit_error(x: Any) -> str:
    """Return the message for a tensor with the negative bit set, whose memory holds the values before negation.

    is_neg() is slow. torch sets the bit on imaginary parts of conjugates, which are strided by two, so they are
    contiguous only with one element; and they are views, unless detached or created in inference mode."""
    return f"tensor of shape {tuple(x.shape)} has its negative bit set, so its memory holds -x; pass x.resolve_neg()"


def check_not_in_graph(operation: str, role: str, x: Any) -> None:
    """Raise if grad mode is on, for a tensor that requires grad, as torch does for `out=`."""
    if not sys.modules["torch"].is_grad_enabled():
        return
    kind = "a leaf" if x.is_leaf else "the result of an operation"
    name = _AUTOGRAD_NAMES.get(operation, operation.removesuffix("_v"))
    raise ValueError(
        f"{operation}: {role}: tensor of shape {tuple(x.shape)} requires grad ({kind}), but autograd does not record "
        f"this call; use pynccl_autograd.{name} for gradients; without, pass x.detach() or call it under "
        "torch.no_grad()"
    )
