"""The work of a host stream, and the threads that run it: workers, or those that wait for it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from ..bindings.abi import Result
from ..bindings.errors import NcclError, NcclInvalidUsage, from_result
from ..bindings.workers import WorkerCall
from .alarm import Alarm
from .failure import REASONS, HostFailure, exiting, reason_of

Job = Callable[[], object]


def _never() -> bool:
    return False


def explain(error: BaseException) -> BaseException:
    """Add details to an error that a stream is about to raise. A hook: pynccl replaces this function."""
    return error


def as_error(failure: BaseException) -> BaseException:
    """Return the exception for users: an NcclError for a HostFailure, otherwise `failure` itself."""
    if isinstance(failure, HostFailure):
        error = from_result(failure.code, "an operation on a host stream", REASONS[failure.code], failure.text)
        return failure.describe(error)
    return failure


class Then:
    """A job that is called with the first error of those before it that was not raised yet, or None. It may return a
    function, to be called once later jobs can run. If a signal handler ends it, it is called again."""

    _found: tuple[BaseException | None] | None = None

    def __init__(self, queue: Queue, fn: Callable[[BaseException | None], Job | None]) -> None:
        self._queue, self._fn = queue, fn

    def __call__(self) -> Job | None:
        self._found = self._found or (self._queue.error,)
        [error] = self._found
        explained = None if error is None else explain(error)  # may take a second
        self._queue.forget(error)
        return self._fn(explained)


class Queue:
    """The work of a stream. A worker runs it, one at a time, and is free when there is none."""

    def __init__(self, patient: bool) -> None:
        self.jobs: deque[Job] = deque()
        self._turn: Any = threading.RLock()  # held by the thread that runs jobs: a worker, or another
        self._woken = False  # a worker runs jobs or is about to
        self._alarm = Alarm(self.wake) if patient else None
        self._helped = False  # another thread than a worker has, or had, the last turn
        self._inside: set[int] = set()  # threads in `run`
        self.error: BaseException | None = None  # the first error that has not been raised yet
        self._lock = threading.Lock()

    def put(self, job: Job) -> None:
        self.jobs.append(job)
        if self._helped and self._alarm is not None:
            self._alarm.set()
        else:
            self.wake()

    def wake(self) -> None:
        """Have a worker run the jobs."""
        if not self._woken:
            self._woken = True
            WorkerCall(self._work, "stream")

    def hurry(self) -> None:
        """Wake a thread if none has been."""
        if threading.get_ident() not in self._inside:
            self._leave()
        if self._helped and self.jobs:
            self.wake()

    def _work(self) -> None:
        """In a worker, in which no signal handler runs: run the jobs."""
        self._woken = False
        while self.jobs and self._turn.acquire(blocking=False):
            self._woken = True
            after = self._serve(_never, False)
            self._woken = False
            self._turn.release()
            if after is not None:
                if self.jobs:
                    self.wake()
                after()
                return

    @property
    def is_mine(self) -> bool:
        """Whether this thread runs the jobs."""
        return bool(self._turn._is_owned())

    def run(self, over: Callable[[], bool]) -> None:
        """In another thread: run jobs until `over()` or none is left, unless a thread does already. Raises what a
        signal handler raises meanwhile."""
        if (me := threading.get_ident()) in self._inside:
            raise NcclInvalidUsage("called by a signal handler while this thread makes a call of the same group")
        try:
            self._inside.add(me)
            served = self._leave()
            while self.jobs and not over() and self._turn.acquire(blocking=False):
                served = True
                after = self._serve(over, True)
                self._turn.release()
                if after is not None:
                    WorkerCall(after, "future")
        finally:
            self._inside.discard(me)
            if (self._leave() or served) and self.jobs:
                self.wake()

    def _leave(self) -> bool:
        """Release the turn if a signal handler has kept this thread from it. Return whether it did."""
        if not self.is_mine:
            return False
        self._turn.release()
        return True

    def _serve(self, over: Callable[[], bool], helps: bool) -> Job | None:
        """Run jobs in this thread, whose turn it is, until `over()` or one returns a function. Return that."""
        self._helped, after = helps, None
        if self._alarm is not None:
            self._alarm.clear()
        while self.jobs and after is None and not over():
            after = self._run(self.jobs[0], helps)
        return after

    def _run(self, job: Job, helps: bool) -> Job | None:
        try:
            found: Any = None if exiting.is_set() else job()
            return found if type(job) is Then else None
        except BaseException as error:  # a failing job must not end the thread
            signalled = helps and threading.current_thread() is threading.main_thread()
            if not signalled or isinstance(error, (HostFailure, NcclError)):
                self._failed(as_error(error))
                return None
            if type(job) is Then:  # the error is a signal handler's: the job is still to do
                self.jobs.appendleft(job)
            else:
                text = f"this rank {reason_of(error)} during the operation"
                self._failed(as_error(HostFailure(Result.SYSTEM_ERROR, text)))
            raise
        finally:
            self.jobs.popleft()  # only now: if a signal handler raises just before, the job runs again; it is not lost

    def _failed(self, error: BaseException) -> None:
        with self._lock:
            self.error = self.error or error

    def forget(self, error: BaseException | None) -> None:
        """Somebody else raises this error."""
        with self._lock:
            if self.error is error:
                self.error = None

    def take_error(self) -> BaseException | None:
        """Return and clear the error that has not been raised yet."""
        with self._lock:
            error, self.error = self.error, None
        return explain(error) if error is not None else None

    def raise_once(self) -> None:
        if (error := self.take_error()) is not None:
            raise error
