"""Deadlines of C calls: NcclTimeout if a call does not return, or a nonblocking call does not complete, in time."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ..bindings.abi import Result
from ..bindings.errors import NcclTimeout
from ..bindings.library import Library
from ..bindings.workers import Clock, WorkerCall, ends_before

T = TypeVar("T")

_POLL_SECONDS = 0.001


def call_with_deadline(
    timeout: float | None,
    call: Callable[[], T],
    library: Library,
    what: str,
    undo: Callable[[], object] | None = None,
    check: Callable[[], object] | None = None,
) -> T:
    """Return `call()`, a C call into `library`; raise NcclTimeout after `timeout` seconds (None: no limit).

    The call runs in a worker thread, so that the main thread can react to signals. Without a deadline, or while the
    process ends by an earlier one, other threads than the main thread make it directly.

    undo   called once the call has returned if this function raises without its result: nobody receives that
    check  called now and then during the wait, may raise"""
    if check is None and ends_before(timeout) and threading.current_thread() is not threading.main_thread():
        return call()
    clock = Clock(timeout)

    def timeout_error() -> NcclTimeout:
        text = f"{what} did not return within {clock.seconds()} (timeout={clock.timeout:g})"
        advice = "a rank is missing or unreachable: were all ranks started, with the same world size and id?"
        return _timeout(text, library.last_error(), advice)

    lock, returned, left = threading.Lock(), False, False

    def run() -> T:
        nonlocal returned
        value = call()
        with lock:
            returned = True
            if left and undo is not None:
                undo()
        return value

    try:
        return WorkerCall(run, what).result(clock.left(), timeout_error, check)
    except BaseException:
        with lock:
            left = True
            if returned and undo is not None:
                undo()
        raise


def wait_nonblocking(library: Library, handle: int | None, code: int, timeout: float | None, what: str) -> int:
    """Return the final result of a call on a nonblocking communicator that returned `code`.

    Raises NcclTimeout if it is still in progress after `timeout` seconds."""
    started, state = time.monotonic(), ctypes.c_int()
    while code == Result.IN_PROGRESS:
        code = library.ncclCommGetAsyncError(handle, ctypes.byref(state)) or state.value
        if code == Result.IN_PROGRESS:
            if timeout is not None and time.monotonic() - started > timeout:
                text = f"{what} is still in progress after {timeout:g} s"
                raise _timeout(text, library.last_error(handle), "call abort()")
            time.sleep(_POLL_SECONDS)
    return code


def _timeout(text: str, detail: str, advice: str) -> NcclTimeout:
    return NcclTimeout(text + (f": {detail}" if detail else "") + f"\n  {advice}")
