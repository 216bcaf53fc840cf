"""Whole numbers on their way to C, which would cut off what does not fit."""

from __future__ import annotations

import operator
from typing import Any

from .kinds import listed, shown

INT_MIN, INT_MAX = -(1 << 31), (1 << 31) - 1  # int
SIZE_MAX = (1 << 64) - 1  # size_t, and whatever is as wide: addresses, handles


def integer(value: Any, name: str, low: int = 0, high: int = INT_MAX, expected: str = "") -> int:
    """`value` as an int in low..high; ValueError that says `name is value, expected ...`.

    Takes what Python takes for an index: int, NumPy's integers, a torch tensor of one. Not bool, since True as a rank
    or a size is a slip, and no float, also 2.0.

    expected  in the words of the caller; otherwise the range is given"""
    try:
        found = operator.index(value)
    except Exception:  # also what an object of the user's raises
        found = None
    if found is None or isinstance(value, bool) or not low <= found <= high:
        raise ValueError(f"{name} is {shown(value)}, expected {expected or f'an integer in {low}..{high}'}")
    return found


def integers(values: Any, name: str, expected: str, low: int = 0, high: int = INT_MAX) -> list[int]:
    """`values` as ints in low..high; TypeError if there are no values, ValueError if one of them is none."""
    given = listed(values, name, expected)
    try:
        return [integer(value, name, low, high) for value in given]
    except ValueError:
        raise ValueError(f"{name} is {shown(given)}, expected {expected}") from None
