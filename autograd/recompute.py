"""Activation checkpoints: every rank computes a checkpointed region anew at the same point of the backward pass.

torch.utils.checkpoint (not the reentrant kind) does so when the first tensor that was saved in the region is asked
for, which differs from rank to rank where one has saved less, a frozen parameter for example. Collectives in the region
would then meet the adjoints of other ranks. So each node of a collective saves a token, and asks for it before it
communicates. The hooks of saved tensors stay within this file, and a token is saved only where there are any.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction, _StopRecomputationError

_autograd: Any = torch._C._autograd
saved_tensors_hooks_on_top = _autograd._top_saved_tensors_default_hooks  # (False) -> the innermost, or None
_TOKEN = torch.empty(0)

Kept = Callable[[], Any] | None


def keep() -> Kept:
    """Save a token, as the hooks of saved tensors say: what asks for it again, None where there are no hooks.

    Called after the communication of a forward pass: a region that is computed anew may end here."""
    if saved_tensors_hooks_on_top(False) is None:
        return None
    with torch.no_grad():
        _keep_in_outer_regions()
        pack, unpack = saved_tensors_hooks_on_top(False)
        return partial(unpack, pack(_TOKEN))


def _keep_in_outer_regions() -> None:
    """Count the collective in the regions around the innermost one too, whose hooks torch does not ask.

    Otherwise a rank that saves nothing after an inner region would leave the outer one before it, and skip the
    collectives of the inner one, which the others call."""
    hooks = []
    try:
        while (top := saved_tensors_hooks_on_top(False)) is not None:
            hooks.append(top)
            _autograd._pop_saved_tensors_default_hooks()
        for pack, _ in hooks[1:]:
            # Nothing else is saved out there after this collective; the rest of the region calls none.
            with contextlib.suppress(_StopRecomputationError):
                pack(_TOKEN)
    finally:
        for pack, unpack in reversed(hooks):
            _autograd._push_saved_tensors_default_hooks(pack, unpack)


def reentrant() -> list[bool]:
    """For each reentrant checkpoint whose forward pass is under way: whether an input of it needs a gradient here.

    Where none does, this rank has no backward pass of the region, and the others wait for it."""
    found = []
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            found.append(any(frame.f_locals["ctx"].needs_input_grad))
        frame = frame.f_back
    return found
