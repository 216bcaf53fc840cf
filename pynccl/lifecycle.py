"""Communicators from birth to death: deadlines, the end of the process, forks, objects that nobody closed.

NCCL's calls of birth and death block for as long as a peer is missing, and cannot be interrupted. Here each runs in a
thread that is left behind when its deadline passes. What is still open when the process ends is closed then, with a
deadline as well; a forked child loses its parent's communicators; garbage collection never calls into NCCL.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import queue
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from .abi import Result
from .errors import NcclError, NcclTimeout
from .library import Library

if TYPE_CHECKING:
    from .communicator import Communicator

T = TypeVar("T")

EXIT_SECONDS = 10.0  # for closing all communicators at the end of the process
ABORT_SECONDS = 30.0
_POLL_SECONDS = 0.001

_open: weakref.WeakSet[Communicator] = weakref.WeakSet()
_leaked: list[tuple[Library, int]] = []  # handles of communicators that were collected before they were closed
_reaper: _Reaper | None = None


def within(timeout: float | None, call: Callable[[], T], library: Library, what: str) -> T:
    """`call()`, or NcclTimeout after `timeout` seconds (None: without a deadline)."""
    if timeout is None:
        return call()
    job = _Job(call)
    try:
        threading.Thread(target=job.run, name=f"pynccl {what}", daemon=True).start()
    except RuntimeError:  # the interpreter is ending and starts no more threads
        _started_reaper().jobs.put(job)
    started = time.monotonic()
    if job.done.wait(timeout):
        return job.result()
    detail = library.last_error()
    raise NcclTimeout(
        f"{what} did not return within {time.monotonic() - started:.0f} s (timeout={timeout:g})"
        + (f": {detail}" if detail else "")
        + "\n  a rank is missing or unreachable: were all ranks started, with the same world size and id?"
    )


def settle(library: Library, handle: int | None, code: int, timeout: float | None, what: str) -> int:
    """The final result of a call on a nonblocking communicator that returned `code`, maybe IN_PROGRESS.

    Raises NcclTimeout if it is still in progress after `timeout` seconds."""
    started = time.monotonic()
    state = ctypes.c_int()
    while code == Result.IN_PROGRESS:
        code = library.ncclCommGetAsyncError(handle, ctypes.byref(state)) or state.value
        if code != Result.IN_PROGRESS:
            break
        if timeout is not None and time.monotonic() - started > timeout:
            detail = library.last_error(handle)
            raise NcclTimeout(
                f"{what} is still in progress after {timeout:g} s"
                + (f": {detail}" if detail else "")
                + "\n  abort() it"
            )
        time.sleep(_POLL_SECONDS)
    return code


def abort(comms: Iterable[Communicator], timeout: float = ABORT_SECONDS) -> None:
    """Abort several communicators of this process as one group, so that none waits for another.

    Runs beside the calling thread: a CUDA graph that captured a communicator keeps NCCL busy until it is destroyed. If
    the abort has not returned after `timeout` seconds, a RuntimeWarning says so and it goes on in the background.
    """
    by_library: dict[Library, list[int]] = {}
    for comm in comms:
        handle = comm.surrender("aborted")
        if handle is not None:
            by_library.setdefault(comm.library, []).append(handle)
    for library, handles in by_library.items():
        abort_handles(library, handles, timeout)


def abort_handles(library: Library, handles: list[int], timeout: float = ABORT_SECONDS) -> None:
    """The same for handles that no Communicator has."""
    try:
        within(timeout, partial(_abort_all, library, handles), library, "ncclCommAbort")
    except NcclTimeout:
        warnings.warn(
            f"the abort of {len(handles)} communicators has not returned after {timeout:g} s and goes on in the "
            "background; a live CUDA graph that captured one of them holds it: destroy the graph first",
            RuntimeWarning,
            stacklevel=4,
        )


def _abort_all(library: Library, handles: list[int]) -> None:
    if len(handles) == 1:
        library.check(library.ncclCommAbort(handles[0]), "ncclCommAbort")
        return
    library.check(library.ncclGroupStart(), "ncclGroupStart")
    codes = [library.ncclCommAbort(handle) for handle in handles]
    end = library.ncclGroupEnd()
    library.check(max(codes) or end, "ncclCommAbort")


# The registry


def opened(comm: Communicator) -> None:
    """A communicator was born."""
    if not _open:
        # Registered here, after the library was loaded, to run before what the library itself does at exit.
        atexit.unregister(_close_everything)
        atexit.register(_close_everything)
    _open.add(comm)
    _started_reaper()


def collected(library: Library, handle: int, description: str, site: str) -> None:
    """A communicator was garbage collected while open. Its handle is aborted at exit, never here: the collector runs in
    any thread at any moment, also inside another NCCL call."""
    _leaked.append((library, handle))
    warnings.warn(
        f"{description}, made at {site}, was never closed: call destroy(), or use it in a with statement",
        ResourceWarning,
        stacklevel=3,
    )


class _Job:
    def __init__(self, call: Callable[[], Any]) -> None:
        self.call = call
        self.done = threading.Event()
        self.outcome: tuple[Any, BaseException | None] = (None, None)

    def run(self) -> None:
        try:
            self.outcome = (self.call(), None)
        except BaseException as error:  # raised again in the thread that waits
            self.outcome = (None, error)
        self.done.set()

    def result(self) -> Any:
        value, error = self.outcome
        if error is not None:
            raise error
        return value


class _Reaper:
    """Threads that exist before the interpreter ends, since none can be started then (Python 3.12 and later).

    Two, since one may be held up by the call that the other has to abort."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        for _ in range(2):
            threading.Thread(target=self._work, name="pynccl reaper", daemon=True).start()

    def _work(self) -> None:
        while True:
            self.jobs.get().run()


def _started_reaper() -> _Reaper:
    global _reaper
    if _reaper is None or _reaper.pid != os.getpid():
        _reaper = _Reaper()
    return _reaper


def _close_everything() -> None:
    """Destroy what is open; abort it if the process ends by an exception, since the peers may be gone."""
    comms, failed = list(_open), getattr(sys, "last_value", None) is not None
    if not (comms or _leaked):
        return
    job = _Job(lambda: _close(comms, failed))
    _started_reaper().jobs.put(job)
    if not job.done.wait(EXIT_SECONDS):
        print(f"pynccl: {len(comms)} open communicators did not close within {EXIT_SECONDS:g} s", file=sys.stderr)


def _close(comms: list[Communicator], failed: bool) -> None:
    for library, handle in _leaked:
        library.ncclCommAbort(handle)
    for comm in comms:
        try:
            comm.end_at_exit(failed)
        except NcclError as error:
            print(f"pynccl: closing {comm} at exit: {error}", file=sys.stderr)


def _after_fork_in_child() -> None:
    """NCCL's threads, sockets and CUDA context did not come along."""
    for comm in list(_open):
        comm.lock._at_fork_reinit()  # type: ignore[attr-defined]  # a thread that did not come along may have held it
        comm.surrender("inherited through a fork, where NCCL cannot work")
    _open.clear()
    _leaked.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
