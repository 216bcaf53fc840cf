"""Deadlines: calls that may block for ever in C run in a thread that is left behind when their time is up.

NCCL's init, finalize, destroy and abort block for as long as a peer is missing; torch's stores, process groups and MPI
block in C++; neither a deadline nor a signal reaches them there. Threads that were left behind must not come back
while the interpreter ends: before Python 3.14 a thread that asks for the GIL then is unwound through C++ destructors,
which aborts all. So at the end of the process they are waited for, and what stays in C++ is stopped where it is.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ..bindings.abi import Result
from ..bindings.errors import NcclTimeout
from ..bindings.library import Library
from ..bindings.values import seconds

T = TypeVar("T")

GRACE_SECONDS = 0.5  # past the deadline, for a call that is about to explain itself
LEFT_BEHIND_SECONDS = 2.0  # for all calls of NCCL that outlived their deadlines, at the end of the process
_BLOCKED_SECONDS = 0.2  # for those of torch and MPI, which the end of the process does not end
_LONGEST_WAIT = 3600.0  # a lock does not take an infinite timeout
_POLL_SECONDS = 0.001

_left_behind: list[_Job] = []  # calls whose deadline has passed
_reaper: _Reaper | None = None


class Abandoned(Exception):
    """Raised in a thread that was left behind, to end it."""


class Clock:
    """One deadline for all that a call waits for, started when it is made; None: there is none."""

    def __init__(self, timeout: float | None) -> None:
        limit = seconds(timeout)
        self.timeout = math.inf if limit is None else limit
        self._started = time.monotonic()

    def waited(self) -> float:
        return time.monotonic() - self._started

    def left(self) -> float:
        return self.timeout - self.waited()

    def seconds(self) -> str:
        """The time really waited, for messages: the timeout where that is right within a second."""
        waited = self.waited()
        if self.timeout <= waited < self.timeout + 1:
            return f"{self.timeout:g} s"
        return f"{waited:.0f} s" if waited >= 1 else f"{waited:.2f} s"


class Wait:
    """What the calls of one wait share: the clock, and whether the caller has gone."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._gone = threading.Event()

    def pause(self, seconds: float) -> None:
        """Sleep, in a thread of `beside`; raises Abandoned there once the caller has gone."""
        if self._gone.wait(seconds):
            raise Abandoned

    def beside(self, call: Callable[[], T], late: Callable[[], Exception]) -> T:
        """What `call()` returns or raises; `late()` is raised if it does neither by half a second past the deadline.

        For what blocks in C++. The caller hears Ctrl-C meanwhile, also without a deadline."""
        try:
            return _Job(call, "wait", in_cpp=True).result(max(self.clock.left(), 0.0) + GRACE_SECONDS, late)
        except BaseException:
            self._gone.set()
            raise


class Silent(Exception):
    """A question has not been answered for so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer for {seconds:g} s")
        self.seconds = seconds


class Helper:
    """Asks what may never answer, each time in a thread; never again while it has not answered."""

    def __init__(self) -> None:
        self._job: _Job[Any] | None = None
        self._since = 0.0

    def ask(self, call: Callable[[], T], limit: float) -> T:
        """What `call()` returns or raises; Silent if it, or an earlier one, has done neither for so many seconds."""
        if self._job is not None and not self._job.done.is_set():
            raise self._silent()
        job = _Job(call, "question")
        self._job, self._since = job, time.monotonic()
        return job.result(limit, self._silent)

    def _silent(self) -> Silent:
        return Silent(time.monotonic() - self._since)


def call_with_deadline(timeout: float | None, call: Callable[[], T], library: Library, what: str) -> T:
    """`call()` into `library`, or NcclTimeout after `timeout` seconds (None: never).

    It runs beside the main thread, which hears Ctrl-C. Without a deadline, another thread makes it itself."""
    if timeout is None and threading.current_thread() is not threading.main_thread():
        return call()
    started = time.monotonic()

    def late() -> NcclTimeout:
        detail = library.last_error()
        return NcclTimeout(
            f"{what} did not return within {time.monotonic() - started:.0f} s (timeout={timeout:g})"
            + (f": {detail}" if detail else "")
            + "\n  a rank is missing or unreachable: were all ranks started, with the same world size and id?"
        )

    return _Job(call, what).result(math.inf if timeout is None else timeout, late)


def wait_nonblocking(library: Library, handle: int | None, code: int, timeout: float | None, what: str) -> int:
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


def duration(seconds: float) -> float:
    """`seconds` as torch can take them: timedelta knows no infinity."""
    return min(seconds, 1e6)


class _Job(Generic[T]):
    """A call in a thread of its own.

    in_cpp  whether it blocks in C++ code that may be unwound, and that the end of the process does not end"""

    def __init__(self, call: Callable[[], T], name: str, in_cpp: bool = False) -> None:
        self.call, self.name, self.in_cpp = call, name, in_cpp
        self.done = threading.Event()
        self.thread: threading.Thread | None = None
        self._outcome: list[tuple[Any, BaseException | None]] = []

    def run(self) -> None:
        self.thread = threading.current_thread()
        try:
            self._outcome.append((self.call(), None))
        except BaseException as error:  # raised again in the thread that waits
            self._outcome.append((None, error))
        self.done.set()

    def result(self, limit: float, late: Callable[[], Exception]) -> T:
        """Start it, and return what it returns or raise what it raises; `late()` if it does neither in so many seconds.

        It is left behind then, and also where Ctrl-C ends the wait."""
        self._start()
        end = time.monotonic() + limit
        try:
            while not self.done.wait(min(max(end - time.monotonic(), 0.0), _LONGEST_WAIT)):
                if time.monotonic() >= end and not self.done.is_set():
                    raise late()
        except BaseException:
            _left_behind[:] = [one for one in _left_behind if not one.done.is_set()]
            _left_behind.append(self)
            raise
        value, error = self._outcome.pop()
        if error is not None:
            raise error
        result: T = value
        return result

    def _start(self) -> None:
        try:
            threading.Thread(target=self.run, name=f"pynccl {self.name}", daemon=True).start()
        except RuntimeError:  # the interpreter is ending and starts no more threads
            _started_reaper().jobs.put(self)


# The end of the process


class _Reaper:
    """Threads that exist before the interpreter ends, since none can be started then (Python 3.12 and later).

    Two, since one may be held up by the call that the other has to abort."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.jobs: queue.SimpleQueue[_Job[Any]] = queue.SimpleQueue()
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


def prepare_exit() -> None:
    """From now on, calls with a deadline can be made while the interpreter ends."""
    _started_reaper()


def call_at_exit(call: Callable[[], object], limit: float) -> bool:
    """Make a call while the interpreter ends; False if it has not returned after so many seconds."""
    job = _Job(call, "exit")
    _started_reaper().jobs.put(job)
    return job.done.wait(limit)


@atexit.register  # before any library is loaded, so after what the libraries do at exit, which ends calls into them
def _end_left_behind() -> None:
    in_cpp = [job for job in _left_behind if job.in_cpp]
    _wait_for(in_cpp, _BLOCKED_SECONDS)
    _wait_for([job for job in _left_behind if not job.in_cpp], LEFT_BEHIND_SECONDS)
    _park([job.thread for job in in_cpp if job.thread is not None and not job.done.is_set()])


def _wait_for(jobs: list[_Job[Any]], limit: float) -> None:
    """A thread that comes back from C while the interpreter is torn down can crash the process."""
    deadline = time.monotonic() + limit
    for job in jobs:
        job.done.wait(max(0.0, deadline - time.monotonic()))


def _park(threads: list[threading.Thread]) -> None:
    """Keep what is left behind in C++ from coming back while the interpreter ends: a handler of a signal holds it.

    Such a thread sits in a system call, holding no lock of the interpreter, and it ends with the process.
    """
    if not threads:
        return
    libc = ctypes.CDLL(None)
    libc.signal.restype, libc.signal.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    number = next(n for n in range(signal.SIGRTMAX, signal.SIGRTMIN, -1) if signal.getsignal(n) == signal.SIG_DFL)
    libc.signal(number, ctypes.cast(libc.pause, ctypes.c_void_p))  # pause() never returns, and needs no GIL
    for thread in threads:
        signal.pthread_kill(thread.ident or 0, number)


def leak(held: Any) -> None:
    """Never free this: what frees it would act on what this process, a forked child, does not have."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


def _after_fork_in_child() -> None:
    leak(_left_behind.copy())  # their threads did not come along, and what they hold is the parent's
    _left_behind.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
