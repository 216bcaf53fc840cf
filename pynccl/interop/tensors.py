"""Torch tensors that are not what their memory says, and what to pass instead; and tensors that autograd knows of."""

from __future__ import annotations

import sys
from typing import Any

# Kinds of tensors by the name of their type, and how to get at one with memory of its own.
_INSTEAD = {
    "DTensor": "pass x.to_local(), this rank's part",
    "AsyncCollectiveTensor": "wait for it: pass x.wait() (torch.distributed._functional_collectives.wait_tensor(x))",
    "FakeTensor": "it stands for a tensor while torch traces: call pynccl with real ones, outside FakeTensorMode, or "
    "use pynccl_autograd, which torch.compile can trace",
    "FunctionalTensor": "it stands for a tensor while torch traces: use pynccl_autograd, which torch.compile can trace",
    "NestedTensor": "pass x.values(), and its offsets apart",
    "MaskedTensor": "pass x.get_data(), and x.get_mask() apart",
    "UninitializedParameter": "it has no shape yet: run the module once, or materialize() it",
    "UninitializedBuffer": "it has no shape yet: run the module once, or materialize() it",
}
_PLAIN = "pass the plain tensor that it is made of"
# What pynccl_autograd has for an operation, where that has another name.
_DIFFERENTIABLE = {"send": "send_recv", "recv": "send_recv", "put_signal": "send_recv", "pre_mul_sum": "all_reduce"}


def stands_for_another(kind: type) -> bool:
    """Whether operations on tensors of this type are something else than operations on their memory."""
    torch = sys.modules["torch"]
    disabled = torch._C._disabled_torch_dispatch_impl
    known = {name for base in kind.__mro__ if (name := base.__name__) in _INSTEAD}
    return bool(known) or getattr(kind, "__torch_dispatch__", disabled) is not disabled


def why_no_memory(x: Any) -> str:
    """For a tensor that has no memory to hand to C: what it is, and what to pass."""
    kind = type(x)
    known = next((_INSTEAD[base.__name__] for base in kind.__mro__ if base.__name__ in _INSTEAD), "")
    if known or stands_for_another(kind):
        return f"a {kind.__module__}.{kind.__name__} owns no memory that NCCL could use; {known or _PLAIN}"
    layout, device = x.layout, x.device
    if device.type == "meta":
        return f"{layout} tensor on meta owns no dense memory; pass a dense tensor, made with a device= that has some"
    if layout is sys.modules["torch"].strided:
        return (
            f"{layout} tensor on {device} owns no dense memory; pass a dense tensor, and none of the kind that "
            "torch.func.vmap and torch.func.grad hand to the functions that they call: pynccl_autograd works there"
        )
    parts = "x.values() and its indices apart" if "sparse" in str(layout) else "what it was made of"
    return f"{layout} tensor on {device} owns no dense memory; pass a dense tensor: x.to_dense(), or {parts}"


def negated(x: Any) -> str:
    """For a tensor with a lazy minus sign, which its memory does not have.

    is_neg() is slow. What torch makes with that sign is an imaginary part, whose elements lie two apart, so that it is
    contiguous only where there is one; and it is a view, unless it was detached or made in inference mode."""
    return f"tensor of shape {tuple(x.shape)} has its negative bit set, so its memory holds -x; pass x.resolve_neg()"


def check_not_in_graph(operation: str, role: str, x: Any) -> None:
    """Raise for a tensor that requires grad, under grad mode: as torch does for `out=`."""
    if not sys.modules["torch"].is_grad_enabled():
        return
    kind = "a leaf" if x.is_leaf else "the result of an operation"
    name = _DIFFERENTIABLE.get(operation, operation.removesuffix("_v"))
    raise ValueError(
        f"{operation}: {role}: tensor of shape {tuple(x.shape)} requires grad ({kind}), and autograd does not know of "
        f"this call: no gradient would come through it; use pynccl_autograd.{name} for one, or pass x.detach(), or "
        "call it under torch.no_grad(), to mean it without"
    )
