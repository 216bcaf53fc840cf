"""How a Python function becomes a C function: `export` registers it under its name, `function(name)` hands it out.

An exported function returns nothing for success and raises HostFailure for a result code; no exception gets out into
C, where ctypes could only print it and return garbage. A parameter that is annotated `Comm` arrives as the communicator
of the handle that C passed.
"""

from __future__ import annotations

import ctypes
import threading
import traceback
from collections.abc import Callable
from typing import Any

from ..bindings.abi import FUNCTIONS, Result
from . import group
from .comm import find
from .failure import HostFailure, last_error, none_left, of_system
from .version import VERSION

_exports: dict[str, Callable[..., Any]] = {}
_pointers: dict[str, Any] = {}  # kept for ever: C may hold the address
_pointers_lock = threading.Lock()


class _Interrupt(threading.local):
    """Ctrl-C that arrived inside a C function of this thread."""

    pending = False


_interrupt = _Interrupt()


def function(name: str) -> Any:
    """The C function pointer `name`; None if the host library, or the version that it poses as, does not have it."""
    if name not in _exports or FUNCTIONS[name].since > VERSION:
        return None
    with _pointers_lock:
        if name not in _pointers:
            row = FUNCTIONS[name]
            _pointers[name] = ctypes.CFUNCTYPE(row.restype, *row.argtypes)(_exports[name])
        return _pointers[name]


def export(implementation: Callable[..., None], name: str = "") -> Callable[..., int]:
    """Register a C function that returns ncclResult_t."""
    name = name or implementation.__name__
    types = list(getattr(implementation, "__annotations__", {}).values())
    at = types.index("Comm") if "Comm" in types else None

    def guarded(*arguments: Any) -> int:
        try:
            if at is not None:
                arguments = (*arguments[:at], find(arguments[at]), *arguments[at + 1 :])
            implementation(*arguments)
            return int(Result.SUCCESS)
        except HostFailure as failure:
            return _failed(failure)
        except KeyboardInterrupt:
            _interrupt.pending = True  # for `take_interrupt`: from here nothing but a result code gets out
            return _failed(HostFailure(Result.SYSTEM_ERROR, f"{name}: interrupted"))
        except OSError as error:
            found = of_system(name, error) if none_left(error) else None
            return _failed(found or HostFailure(Result.INTERNAL_ERROR, traceback.format_exc()))
        except MemoryError as error:
            return _failed(HostFailure(Result.SYSTEM_ERROR, f"{name}: out of memory: {error}"))
        except BaseException:
            return _failed(HostFailure(Result.INTERNAL_ERROR, traceback.format_exc()))

    _exports[name] = guarded
    return guarded


def export_plain(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Register a C function that returns something else; it must not raise."""
    _exports[implementation.__name__] = implementation
    return implementation


def take_interrupt() -> bool:
    """Whether a C function of this thread failed because of Ctrl-C; the caller then raises KeyboardInterrupt. Once."""
    pending, _interrupt.pending = _interrupt.pending, False
    return pending


def _failed(failure: HostFailure) -> int:
    group.refuse(failure)
    last_error.text = failure.text
    return int(failure.code)
