"""Validation of plain arguments: numbers, strings, sequences, timeouts. Errors say what was passed and expected.

Not used on the fast path of a launch.
"""

from __future__ import annotations

import numbers
import operator
import os
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

INT_MIN, INT_MAX = -(1 << 31), (1 << 31) - 1  # int
SIZE_MAX = (1 << 64) - 1  # size_t, addresses, handles

_MAX_SHOWN_CHARS = 200
_MAX_SECONDS = 1e9  # more means no timeout: threading cannot wait that long


def shown(value: Any, how: Callable[[Any], str] = repr) -> str:
    """Return repr() (or str()) for a message, shortened.

    Tensors show only their type, since their memory may be gone, and so do configs, whose repr is long."""
    if hasattr(type(value), "data_ptr") or hasattr(type(value), "to_struct"):
        return type_of(value)
    try:
        text = how(value)
    except Exception:  # raised by the user's object
        text = type_of(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def type_of(value: Any) -> str:
    """Return "a list", "an int", "a torch.Tensor", "None", for messages."""
    kind = type(value)
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return "None" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def counted(number: int, noun: str) -> str:
    """Return "1 rank", "2 ranks", for messages."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def closest(text: str, names: Collection[str]) -> str:
    """Return the closest of `names`, ignoring case, "_" and "-"; "" if none is close."""
    import difflib  # only for messages

    by_letters = {name.replace("_", "").lower(): name for name in names}
    found = difflib.get_close_matches(re.sub("[_-]", "", text.lower()), by_letters, n=1)
    return by_letters[found[0]] if found else ""


def did_you_mean(text: str, names: Collection[str]) -> str:
    """Return "did you mean NAME?" with the closest of `names`; "" if none is close."""
    found = closest(text, names)
    return f"did you mean {found}?" if found else ""


def attribute(value: Any, name: str, default: Any = None) -> Any:
    """Like getattr(), but return `default` if the object raises anything."""
    try:
        return getattr(value, name, default)
    except Exception:
        return default


def instance(value: Any, kind: type | tuple[type, ...], name: str, expected: str) -> None:
    """Raise TypeError unless `value` is a `kind`; the message describes it as `expected`."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {shown(value)}, expected {expected}")


def methods(value: Any, needed: Iterable[str], name: str, expected: str) -> None:
    """Raise TypeError unless `value` has these methods."""
    missing = [method for method in needed if not callable(attribute(value, method))]
    if missing:
        raise TypeError(f"{name} is {shown(value)}, which has no {', '.join(missing)}; expected {expected}")


def ordered(values: Any, name: str, expected: str) -> list[Any]:
    """As `listed`, but a set raises too: it loses equal elements, and its order may differ between ranks."""
    if isinstance(values, (set, frozenset)):
        raise TypeError(f"{name} is {shown(values)}, expected {expected}")
    return listed(values, name, expected)


def listed(values: Any, name: str, expected: str) -> list[Any]:
    """Return `values` as a list. Raises TypeError unless it is iterable and not a string, bytes or dict."""
    try:
        if not isinstance(values, (str, bytes, bytearray, dict)):
            return list(values)
    except Exception:  # iterating raised: not a sequence
        pass
    raise TypeError(f"{name} is {shown(values)}, expected {expected}")


def seconds(timeout: Any, name: str = "timeout", *, zero: bool = False) -> float | None:
    """Return `timeout` in seconds, or None for no timeout (None, or more than 1e9 s). Raises ValueError otherwise.

    zero  allow 0: do not wait"""
    real = isinstance(timeout, numbers.Real) and not isinstance(timeout, bool)
    if timeout is not None and not (real and (timeout >= 0 if zero else timeout > 0)):
        bound = ">= 0" if zero else "> 0"
        raise ValueError(f"{name} is {shown(timeout)}, expected a number of seconds {bound}, or None for no timeout")
    return None if timeout is None or timeout >= _MAX_SECONDS else float(timeout)


def text(value: Any, name: str, expected: str = "a string") -> bytes:
    """Encode a string for C. Raises ValueError for a NUL, which would end it early, or characters outside UTF-8."""
    if isinstance(value, str) and "\0" not in value:
        try:
            return value.encode()
        except UnicodeEncodeError:  # half of a surrogate pair
            pass
    raise ValueError(f"{name} is {shown(value)}, expected {expected} without NUL, encodable in UTF-8")


def path_of(value: Any, name: str, expected: str = "the path of a file, a string") -> str:
    """Return a path (a string, bytes or os.PathLike) as a string. Raises TypeError if it is none."""
    try:
        path = os.fsdecode(value)
        if path and b"\0" not in os.fsencode(path):
            return path
    except Exception:  # of another type; half of a surrogate pair; raised by a user's object
        pass
    raise TypeError(f"{name} is {shown(value)}, expected {expected}")


def as_int(value: Any) -> int | None:
    """Return `value` as an int if it is an integer of any library, else None.

    Accepts anything with `__index__`: int, NumPy integers, arrays of them without dimensions, a torch tensor with one
    element. A float is none, even 2.0, and neither is a bool of any library, since True as a rank or a size is a
    mistake."""
    if type(value) is int:
        return value
    try:
        is_bool = isinstance(value, bool) or str(attribute(value, "dtype")) == "torch.bool"
        return None if is_bool else operator.index(value)
    except Exception:  # including what a user's object raises
        return None


def integer(value: Any, name: str, low: int = 0, high: int = INT_MAX, expected: str = "") -> int:
    """Return `value` as an int in low..high, or raise ValueError ("`name` is `value`, expected ..."). See `as_int`.

    expected  text for the message; default: the range"""
    found = as_int(value)
    if found is None or not low <= found <= high:
        raise ValueError(f"{name} is {shown(value)}, expected {expected or f'an integer in {low}..{high}'}")
    return found


def integers(values: Any, name: str, expected: str, low: int = 0, high: int = INT_MAX) -> list[int]:
    """Return `values` as ints in low..high. Raises TypeError if not a sequence, ValueError for an invalid element."""
    items = ordered(values, name, expected)
    try:
        return [integer(value, name, low, high) for value in items]
    except ValueError:
        raise ValueError(f"{name} is {shown(items)}, expected {expected}") from None
