"""How a Python function becomes a C function: `@entry` registers it under its name, `function(name)` hands it out.

An entry returns nothing for success and raises HostFailure for a result code; no exception gets out into C, where
ctypes could only print it and return garbage.
"""

from __future__ import annotations

import ctypes
import threading
import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any

from ..bindings.abi import FUNCTIONS, Result
from . import group
from .failure import HostFailure, last_error
from .version import posed_version

VERSION = posed_version()

_entries: dict[str, Callable[..., Any]] = {}
_pointers: dict[str, Any] = {}  # kept for ever: C may hold the address
_pointers_lock = threading.Lock()


class _Interrupt(threading.local):
    """Ctrl-C that arrived inside a C function of this thread."""

    pending = False


_interrupt = _Interrupt()


def function(name: str) -> Any:
    """The C function pointer `name`; None if the host library, or the version that it poses as, does not have it."""
    if name not in _entries or FUNCTIONS[name].since > VERSION:
        return None
    with _pointers_lock:
        if name not in _pointers:
            row = FUNCTIONS[name]
            _pointers[name] = ctypes.CFUNCTYPE(row.restype, *row.argtypes)(_entries[name])
        return _pointers[name]


def entry(implementation: Callable[..., None]) -> Callable[..., int]:
    """Register a C function that returns ncclResult_t."""

    @wraps(implementation)
    def guarded(*arguments: Any) -> int:
        try:
            implementation(*arguments)
            return int(Result.SUCCESS)
        except HostFailure as failure:
            return _refused(failure)
        except KeyboardInterrupt:
            _interrupt.pending = True  # for `take_interrupt`: from here nothing but a result code gets out
            return _refused(HostFailure(Result.SYSTEM_ERROR, f"{implementation.__name__}: interrupted"))
        except MemoryError as error:
            return _refused(HostFailure(Result.SYSTEM_ERROR, f"{implementation.__name__}: out of memory: {error}"))
        except BaseException:
            return _refused(HostFailure(Result.INTERNAL_ERROR, traceback.format_exc()))

    _entries[implementation.__name__] = guarded
    return guarded


def plain_entry(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Register a C function that returns something else; it must not raise."""
    _entries[implementation.__name__] = implementation
    return implementation


def take_interrupt() -> bool:
    """Whether a C function of this thread failed because of Ctrl-C; the caller then raises KeyboardInterrupt. Once."""
    pending, _interrupt.pending = _interrupt.pending, False
    return pending


def _refused(failure: HostFailure) -> int:
    group.refuse(failure)
    last_error.text = failure.text
    return int(failure.code)
