"""C functions implemented in Python: `export` registers one under its name, `function(name)` returns its pointer.

An exported function returns None for success and raises HostFailure for other result codes. No exception reaches C,
where ctypes would print it and return garbage: an exception of a signal handler is kept for `take_exception`. A
parameter annotated `Comm` receives the communicator of the handle that the caller passed.
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


class _Raised(threading.local):
    """What ended the last C function of this thread that failed, unless that was a failure of its own: an exception of
    a signal handler (Ctrl-C, sys.exit), one that another thread set in this one, or a defect of the host library."""

    error: BaseException | None = None


_raised = _Raised()


def function(name: str) -> Any:
    """Return the C function pointer `name`; None if the host library, or its reported version, does not have it."""
    if name not in _exports or FUNCTIONS[name].since > VERSION:
        return None
    with _pointers_lock:
        if name not in _pointers:
            row = FUNCTIONS[name]
            # PYFUNCTYPE: the caller keeps the GIL. A signal that arrives while `guarded` waits for it would raise at
            # the first instruction of `guarded`, outside of its `try`, and be lost. One that arrives in the
            # microseconds before that instruction still is.
            _pointers[name] = ctypes.PYFUNCTYPE(row.restype, *row.argtypes)(_exports[name])
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
        except MemoryError as error:
            return _failed(HostFailure(Result.SYSTEM_ERROR, f"{name}: out of memory: {error}"))
        except BaseException as error:
            if out_of_descriptors(error):
                return _failed(system_error(name, error))
            return _failed(HostFailure(Result.INTERNAL_ERROR, traceback.format_exc()), error)

    _exports[name] = guarded
    return guarded


def export_plain(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Register a C function with another return type. It must not raise."""
    _exports[implementation.__name__] = implementation
    return implementation


def take_exception() -> BaseException | None:
    """Return the exception that ended the last C function of this thread that failed, once; None: a failure."""
    error, _raised.error = _raised.error, None
    return error


def _failed(failure: HostFailure, error: BaseException | None = None) -> int:
    _raised.error = error
    group.mark_failed(failure)
    last_error.text, last_error.failure = failure.text, failure
    return int(failure.code)
