"""Plain arguments on their way to C: numbers, strings, sequences, seconds. A check says what was passed and expected.

They stand in the general ways, and behind a look for None: a launch in a loop comes through none of them.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Iterable
from typing import Any

INT_MIN, INT_MAX = -(1 << 31), (1 << 31) - 1  # int
SIZE_MAX = (1 << 64) - 1  # size_t, and whatever is as wide: addresses, handles

_LONGEST = 200
_FOR_EVER = 1e9  # seconds: beyond what threading takes, and beyond everybody's patience


def shown(value: Any, how: Callable[[Any], str] = repr) -> str:
    """repr() (or str()) for a message: not long, and not of a tensor, whose memory need not be there."""
    kind = type(value)
    if hasattr(kind, "data_ptr"):
        return f"a {kind.__module__}.{kind.__name__}"
    try:
        text = how(value)
    except Exception:  # of an object of the user's, which is wrong anyway
        text = f"a {kind.__module__}.{kind.__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def attribute(value: Any, name: str, default: Any = None) -> Any:
    """getattr() that takes any error of the object for its not having the attribute."""
    try:
        return getattr(value, name, default)
    except Exception:
        return default


def instance(value: Any, kind: type | tuple[type, ...], name: str, expected: str) -> None:
    """TypeError unless `value` is a `kind`, which the message calls `expected`."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {shown(value)}, expected {expected}")


def methods(value: Any, needed: Iterable[str], name: str, expected: str) -> None:
    """TypeError unless `value` has these methods."""
    missing = [one for one in needed if not callable(attribute(value, one))]
    if missing:
        raise TypeError(f"{name} is {shown(value)}, which has no {', '.join(missing)}; expected {expected}")


def listed(values: Any, name: str, expected: str) -> list[Any]:
    """What `values` holds; TypeError unless it is a sequence of something, or can be gone through like one."""
    try:
        if not isinstance(values, (str, bytes, bytearray, dict)):
            return list(values)
    except Exception:  # whatever the object says: it is none
        pass
    raise TypeError(f"{name} is {shown(values)}, expected {expected}")


def seconds(timeout: Any, *, zero: bool = False) -> float | None:
    """`timeout` as a number of seconds, None for ever, which so many seconds are that no clock takes them.

    zero  whether it may be 0: not to wait at all"""
    real = isinstance(timeout, numbers.Real) and not isinstance(timeout, bool)
    if timeout is not None and not (real and (timeout >= 0 if zero else timeout > 0)):
        least = ">= 0" if zero else "> 0"
        raise ValueError(f"timeout is {shown(timeout)}, expected a number of seconds {least}, or None to wait for ever")
    return None if timeout is None or timeout >= _FOR_EVER else float(timeout)


def text(value: Any, name: str, expected: str = "a string") -> bytes:
    """A string on its way to C, where it ends at the first NUL."""
    if isinstance(value, str) and "\0" not in value:
        try:
            return value.encode()
        except UnicodeEncodeError:  # half of a surrogate pair
            pass
    raise ValueError(f"{name} is {shown(value)}, expected {expected} without NUL, in characters that UTF-8 has")


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
