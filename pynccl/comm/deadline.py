"""Deadlines of C calls: NcclTimeout where one has not returned in time, or a nonblocking one is still in progress."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ..bindings.abi import Result
from ..bindings.errors import NcclTimeout
from ..bindings.library import Library
from ..bindings.workers import Begun, Clock

T = TypeVar("T")

_POLL_SECONDS = 0.001


def call_with_deadline(timeout: float | None, call: Callable[[], T], library: Library, what: str) -> T:
    """`call()` into `library`, or NcclTimeout after `timeout` seconds (None: never).

    It runs beside the main thread, which hears Ctrl-C. Without a deadline, another thread makes it itself."""
    if timeout is None and threading.current_thread() is not threading.main_thread():
        return call()
    clock = Clock(timeout)

    def late() -> NcclTimeout:
        text = f"{what} did not return within {clock.waited():.0f} s (timeout={timeout:g})"
        advice = "a rank is missing or unreachable: were all ranks started, with the same world size and id?"
        return _timeout(text, library.last_error(), advice)

    return Begun(call, what).result(clock.left(), late)


def wait_nonblocking(library: Library, handle: int | None, code: int, timeout: float | None, what: str) -> int:
    """The final result of a call on a nonblocking communicator that returned `code`, maybe IN_PROGRESS.

    Raises NcclTimeout if it is still in progress after `timeout` seconds."""
    started, state = time.monotonic(), ctypes.c_int()
    while code == Result.IN_PROGRESS:
        code = library.ncclCommGetAsyncError(handle, ctypes.byref(state)) or state.value
        if code == Result.IN_PROGRESS:
            if timeout is not None and time.monotonic() - started > timeout:
                text = f"{what} is still in progress after {timeout:g} s"
                raise _timeout(text, library.last_error(handle), "abort() it")
            time.sleep(_POLL_SECONDS)
    return code


def _timeout(text: str, detail: str, advice: str) -> NcclTimeout:
    return NcclTimeout(text + (f": {detail}" if detail else "") + f"\n  {advice}")
