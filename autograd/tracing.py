"""When a collective is run as its custom operator: for what traces programs, and for tensors that only have a shape."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch.autograd import forward_ad

_VALUES = frozenset((Tensor, torch.nn.Parameter))


def sees_operators(x: Tensor) -> bool:
    """Whether the collective of x is to be run as an operator.

    Under dispatch modes (fake tensors, make_fx, export, selective checkpointing), which know operators only; and for
    tensors without values, of which operators know the outputs' shapes. Within torch.func's transforms and forward mode
    the Function is run all the same, which has rules for them; its forward, at the bottom of them, then calls the
    operator."""
    if not (torch._C._len_torch_dispatch_stack() or has_no_values(x)):
        return False
    return not (torch._C._are_functorch_transforms_active() or getattr(forward_ad, "_current_level", -1) >= 0)


def has_no_values(x: Tensor) -> bool:
    """Whether x has a shape only."""
    return x.is_meta or (type(x) not in _VALUES and is_traced(x))


def is_traced(x: Tensor) -> bool:
    """Whether x stands for a tensor in a trace."""
    return type(x).__name__ in ("FakeTensor", "FunctionalTensor")


def is_functionalized() -> bool:
    """Whether torch.func.functionalize is active, which knows operators only.

    Beside a derivative it cannot be: torch's operators have no rule for both."""
    kinds = [interpreter.key() for interpreter in torch._C._functorch.get_interpreter_stack() or []]
    if TransformType.Functionalize not in kinds:
        return False
    if TransformType.Grad in kinds or TransformType.Jvp in kinds:
        raise NotImplementedError(
            "torch.func.functionalize together with torch.func.grad, vjp or jvp has no rule for collectives; leave "
            "functionalize out: make_fx(torch.func.grad(f)) traces them without"
        )
    return True


class _Tangents(threading.local):
    handled = False


_tangents = _Tangents()


@contextlib.contextmanager
def handles_tangents() -> Iterator[None]:
    """Operators called in the block belong to a Function that has a forward mode: they need not refuse tangents."""
    before, _tangents.handled = _tangents.handled, True
    try:
        yield
    finally:
        _tangents.handled = before


def tangents_are_handled() -> bool:
    return _tangents.handled
