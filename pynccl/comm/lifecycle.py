"""Communicators from birth to death: deadlines, the end of the process, forks, objects that nobody closed.

NCCL's calls of birth and death block for as long as a peer is missing, and cannot be interrupted. Here each runs in a
thread that is left behind when its deadline passes. What is still open when the process ends is closed then, with a
deadline as well; a forked child loses its parent's communicators; garbage collection never calls into NCCL.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
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

from ..bindings.abi import Result
from ..bindings.errors import NcclError, NcclTimeout
from ..bindings.library import Library
from ..bindings.values import attribute, listed, seconds, shown

if TYPE_CHECKING:
    from .communicator import Communicator

T = TypeVar("T")

EXIT_SECONDS = 10.0  # for closing all communicators at the end of the process
ABORT_SECONDS = 30.0
LEFT_BEHIND_SECONDS = 2.0  # for all calls that outlived their deadlines, at the end of the process
_POLL_SECONDS = 0.001

_open: weakref.WeakSet[Communicator] = weakref.WeakSet()
_leaked: list[tuple[Library, Remains]] = []  # of communicators that were collected before they were closed
_left_behind: list[_Job] = []  # calls whose deadline has passed
_reaper: _Reaper | None = None


class Remains:
    """What a communicator leaves when it is given up.

    handle  to be destroyed or aborted
    memory  of its own operations, which NCCL may be using until then; None where there is none

    To free pinned memory waits for the GPU in some versions of cuda.core (0.5, 0.6: for the legacy default stream). So
    it is kept until the C call that ends the communicator has returned, and is dropped where that has its deadline.
    """

    def __init__(self, handle: int, memory: Any = None) -> None:
        self.handle, self.memory = handle, memory

    def drop(self) -> None:
        """Let go of the memory: the communicator has been ended."""
        self.memory = None

    def leak(self) -> None:
        """Never free the memory: it is of a CUDA context that this process, a forked child, does not have."""
        _leak(self.memory)


def _leak(held: Any) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))


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
    _left_behind[:] = [one for one in _left_behind if not one.done.is_set()]
    _left_behind.append(job)
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
    limit = seconds(timeout)
    by_library: dict[Library, list[Remains]] = {}
    for comm in _communicators(comms):
        remains = comm.surrender("aborted")
        if remains is not None:
            by_library.setdefault(comm.library, []).append(remains)
    for library, all_remains in by_library.items():
        abort_remains(library, all_remains, limit)


def _communicators(comms: Iterable[Communicator]) -> list[Communicator]:
    """All of them, before the first one is aborted; TypeError if one is none."""
    given = listed(comms, "abort: comms", "communicators, a list of them; pass [comm], or call comm.abort()")
    for comm in given:
        if not callable(attribute(comm, "surrender")):
            raise TypeError(f"abort: comms holds {shown(comm)}, expected a list of communicators, and nothing else")
    return given


def abort_handle(library: Library, handle: int) -> None:
    """The same for a handle that no Communicator has."""
    abort_remains(library, [Remains(handle)])


def abort_remains(library: Library, ended: list[Remains], timeout: float | None = ABORT_SECONDS) -> None:
    """The same for communicators of one library that were given up already."""
    try:
        within(timeout, partial(_abort_all, library, ended), library, "ncclCommAbort")
    except NcclTimeout:
        warnings.warn(
            f"the abort of {len(ended)} communicators has not returned after {timeout:g} s and goes on in the "
            f"background; a live CUDA graph that captured one of them holds it: destroy the graph first{graph_hint()}",
            RuntimeWarning,
            stacklevel=4,
        )


def _abort_all(library: Library, ended: list[Remains]) -> None:
    try:
        if len(ended) == 1:
            library.check(library.ncclCommAbort(ended[0].handle), "ncclCommAbort")
            return
        library.check(library.ncclGroupStart(), "ncclGroupStart")
        codes = [library.ncclCommAbort(remains.handle) for remains in ended]
        end = library.ncclGroupEnd()
        library.check(max(codes) or end, "ncclCommAbort")
    finally:
        for remains in ended:
            remains.drop()


def destroy(library: Library, remains: Remains, timeout: float | None, what: str) -> None:
    """ncclCommDestroy; the deadline and the error are those of `what`."""

    def run() -> int:
        code = int(library.ncclCommDestroy(remains.handle))
        remains.drop()
        return code

    try:
        library.check(within(timeout, run, library, what), what)
    except NcclTimeout as error:
        raise NcclTimeout(f"{error}{graph_hint()}") from None


def graph_hint() -> str:
    """What to do about the CUDA graphs that are alive, for the message about an end that does not come; else "".

    NCCL's destroy and abort wait for every graph that captured the communicator, and only the program knows which did.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():  # to look through a large heap takes up to a second
        return ""
    kind = getattr(torch.cuda, "CUDAGraph", None)
    # By type(), since isinstance() asks objects that answer for others, such as weak proxies, which run code.
    alive = sum(issubclass(type(x), kind) for x in gc.get_objects()) if isinstance(kind, type) else 0
    if not alive:
        return ""
    return (
        f"\n  torch.cuda.CUDAGraph objects alive: {alive}. NCCL waits for those that captured the communicator: "
        'reset() them first; those of torch.compile(mode="reduce-overhead") live until torch._dynamo.reset()'
    )


# The registry


def opened(comm: Communicator) -> None:
    """A communicator was born."""
    if not _open:
        # Registered here, after the library was loaded, to run before what the library itself does at exit.
        atexit.unregister(_close_everything)
        atexit.register(_close_everything)
    _open.add(comm)
    _started_reaper()


def collected(library: Library, remains: Remains, description: str, site: str) -> None:
    """A communicator was garbage collected while open. Its handle is aborted at exit, never here: the collector runs in
    any thread at any moment, also inside another NCCL call."""
    _leaked.append((library, remains))
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
        late = f"{len(comms)} open communicators did not close within {EXIT_SECONDS:g} s{graph_hint()}"
        print(f"pynccl: {late}", file=sys.stderr)


def _close(comms: list[Communicator], failed: bool) -> None:
    ended: list[Remains | None] = []  # whose memory goes when no communicator is left that could keep the GPU busy
    for library, remains in _leaked:
        library.ncclCommAbort(remains.handle)
        ended.append(remains)
    _leaked.clear()
    for comm in comms:
        try:
            ended.append(comm.end_at_exit(failed))
        except NcclError as error:
            print(f"pynccl: closing {comm} at exit: {error}", file=sys.stderr)


@atexit.register  # before any library is loaded, so after what the libraries do at exit, which ends these calls
def _await_left_behind() -> None:
    """A thread that comes back from C while the interpreter is torn down can crash the process."""
    deadline = time.monotonic() + LEFT_BEHIND_SECONDS
    for job in _left_behind:
        job.done.wait(max(0.0, deadline - time.monotonic()))


def _after_fork_in_child() -> None:
    """NCCL's threads, sockets and CUDA context did not come along."""
    ended = [remains for _, remains in _leaked]
    for comm in list(_open):
        comm.lock._at_fork_reinit()  # type: ignore[attr-defined]  # a thread that did not come along may have held it
        remains = comm.surrender("inherited through a fork, where NCCL cannot work")
        if remains is not None:
            ended.append(remains)
    for remains in ended:
        remains.leak()
    _leak(_left_behind.copy())  # what they hold, too
    _open.clear()
    _leaked.clear()
    _left_behind.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
