"""Activation checkpointing: recompute a checkpointed region at the same point of the backward pass on every rank.

Non-reentrant torch.utils.checkpoint recomputes a region when the backward pass first reads a tensor saved in it. Ranks
that save different tensors, e.g. because a parameter is frozen on one, would recompute at different points, and
collectives of the region would be matched with adjoints on other ranks. Therefore each collective's node saves a token,
and fetches it before it communicates. A token is saved only if saved-tensor hooks are active.
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

FetchToken = Callable[[], Any] | None


def save_token() -> FetchToken:
    """Save a token through the saved-tensor hooks, and return a function that fetches it; None if there are no hooks.

    Call it after the forward communication: the recomputation of a region may stop here."""
    if saved_tensors_hooks(False) is None:
        return None
    with torch.no_grad():
        _save_in_outer_regions()
        pack, unpack = saved_tensors_hooks(False)
        return partial(unpack, pack(_TOKEN))


def _save_in_outer_regions() -> None:
    """Save a token in the outer regions too: torch calls only the hooks of the innermost one.

    Otherwise a rank that saves nothing after an inner region would stop the recomputation of the outer region before
    the inner one, and skip collectives that the other ranks call."""
    with without_hooks() as hooks:
        for pack, _ in hooks[1:]:
            # If this raises, the outer region saves nothing more, so it has no collective after this one.
            with contextlib.suppress(StopRecomputation):
                pack(_TOKEN)


_T = TypeVar("_T")
# Per region: the choices of its first run by (scope, key), and how many of them each recomputation has replayed.
_choices: weakref.WeakKeyDictionary[Any, dict[Any, list[Any]]] = weakref.WeakKeyDictionary()
_replayed: weakref.WeakKeyDictionary[Any, dict[Any, int]] = weakref.WeakKeyDictionary()


def replay_choice(scope: Any, key: Any, choose: Callable[[], _T], constant: bool = False) -> tuple[_T, bool]:
    """Return (choice, replayed). While a checkpointed region is recomputed, `choice` is what `choose` returned when the
    region first ran, and `replayed` is True; otherwise it is `choose()`, and False.

    scope, key  identify the choice within a region; choices with the same scope and key are replayed in order
    constant    `choose` will return the same value during recomputation, so reentrant checkpoints need not store it"""
    if constant and saved_tensors_hooks(False) is None and backward_pass() < 0:
        return choose(), False
    regions = checkpointed_regions()
    choice, replay = None, False
    for region, number in regions:
        if number is not None:  # the innermost region that is recomputed: its calls ran in it before
            choices, replayed = _choices.get(region, {}).get((scope, key), ()), _replayed.setdefault(region, {})
            at = replayed[scope, key, number] = replayed.get((scope, key, number), -1) + 1
            replay = at < len(choices)
            choice = choices[at] if replay else None
            break
    if not replay:
        choice = choose()
    for region, number in regions:
        if number is None:
            _choices.setdefault(region, {}).setdefault((scope, key), []).append(choice)
    return cast(_T, choice), replay
