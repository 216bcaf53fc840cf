"""C functions implemented in Python: `export` registers one under its name, `function(name)` returns its pointer.

An exported function returns None for success and raises HostFailure for other result codes. No exception reaches C,
where ctypes would print it and return garbage. A parameter annotated `Comm` receives the communicator of the handle
that the caller passed.
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
from .failure import HostFailure, last_error, out_of_descriptors, system_error
from .version import VERSION

_exports: dict[str, Callable[..., Any]] = {}
_pointers: dict[str, Any] = {}  # kept alive: C may hold the address
_pointers_lock = threading.Lock()


class _Interrupt(threading.local):
    """Whether Ctrl-C arrived inside a C function of this thread."""

    pending = False


_interrupt = _Interrupt()


def function(name: str) -> Any:
    """Return the C function pointer `name`; None if the host library, or its reported version, does not have it."""
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
            _interrupt.pending = True  # for `take_interrupt`: C receives only a result code
            return _failed(HostFailure(Result.SYSTEM_ERROR, f"{name}: interrupted"))
        except OSError as error:
            known = system_error(name, error) if out_of_descriptors(error) else None
            return _failed(known or HostFailure(Result.INTERNAL_ERROR, traceback.format_exc()))
        except MemoryError as error:
            return _failed(HostFailure(Result.SYSTEM_ERROR, f"{name}: out of memory: {error}"))
        except BaseException:
            return _failed(HostFailure(Result.INTERNAL_ERROR, traceback.format_exc()))

    _exports[name] = guarded
    return guarded


def export_plain(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Register a C function with another return type. It must not raise."""
    _exports[implementation.__name__] = implementation
    return implementation


def take_interrupt() -> bool:
    """Return whether Ctrl-C interrupted a C function of this thread, and reset it. The caller raises the exception."""
    pending, _interrupt.pending = _interrupt.pending, False
    return pending


def _failed(failure: HostFailure) -> int:
    group.mark_failed(failure)
    last_error.text = failure.text
    return int(failure.code)
