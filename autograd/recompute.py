"""Activation checkpoints: every rank computes a checkpointed region anew at the same point of the backward pass.

torch.utils.checkpoint (not the reentrant kind) does so when the first tensor that was saved in the region is asked
for, which differs from rank to rank where one has saved less, a frozen parameter for example. Collectives in the region
would then meet the adjoints of other ranks. So each node of a collective saves a token, and asks for it before it
communicates. A token is saved only where there are hooks of saved tensors.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import torch

from .torch_internals import (
    StopRecomputation,
    backward_pass,
    checkpointed_regions,
    saved_tensors_hooks,
    without_hooks,
)

_TOKEN = torch.empty(0)

AskForToken = Callable[[], Any] | None


def save_token() -> AskForToken:
    """Save a token, as the hooks of saved tensors say: what asks for it again, None where there are no hooks.

    Called after the communication of a forward pass: a region that is computed anew may end here."""
    if saved_tensors_hooks(False) is None:
        return None
    with torch.no_grad():
        _save_in_outer_regions()
        pack, unpack = saved_tensors_hooks(False)
        return partial(unpack, pack(_TOKEN))


def _save_in_outer_regions() -> None:
    """Count the collective in the regions around the innermost one too, whose hooks torch does not ask.

    Otherwise a rank that saves nothing after an inner region would leave the outer one before it, and skip the
    collectives of the inner one, which the others call."""
    with without_hooks() as hooks:
        for pack, _ in hooks[1:]:
            # Nothing else is saved out there after this collective; the rest of the region calls none.
            with contextlib.suppress(StopRecomputation):
                pack(_TOKEN)


_T = TypeVar("_T")
# What was chosen in the first pass of a region, by home and key, and how many of them each recomputation has had.
_chosen: weakref.WeakKeyDictionary[Any, dict[Any, list[Any]]] = weakref.WeakKeyDictionary()
_taken: weakref.WeakKeyDictionary[Any, dict[Any, int]] = weakref.WeakKeyDictionary()


def as_in_first_pass(home: Any, key: Any, choose: Callable[[], _T], lasting: bool = False) -> tuple[_T, bool]:
    """What `choose` returned when a checkpointed region ran first, and True, where the region is computed anew; else
    what it returns now, and False. home and key tell the choices of a region apart, equal ones their order.

    lasting  `choose` will return the same then: that of the reentrant kind need not be remembered"""
    if lasting and saved_tensors_hooks(False) is None and backward_pass() < 0:
        return choose(), False
    regions = checkpointed_regions()
    found, anew = None, False
    for region, number in regions:
        if number is not None:  # the innermost that is computed anew: what is in it ran in it before
            chosen, taken = _chosen.get(region, {}).get((home, key), ()), _taken.setdefault(region, {})
            at = taken[home, key, number] = taken.get((home, key, number), -1) + 1
            anew = at < len(chosen)
            found = chosen[at] if anew else None
            break
    if not anew:
        found = choose()
    for region, number in regions:
        if number is None:
            _chosen.setdefault(region, {}).setdefault((home, key), []).append(found)
    return cast(_T, found), anew
