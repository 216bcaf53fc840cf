"""How a communicator ends: finalize, destroy, abort; the end of the process, forks, objects that nobody closed.

What is still open when the process ends is closed then, with a deadline; a forked child loses its parent's
communicators; garbage collection never calls into NCCL.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

from ..bindings.abi import Result
from ..bindings.errors import NcclError, NcclTimeout
from ..bindings.library import Library
from ..bindings.values import listed, seconds, shown
from ..bindings.workers import call_at_exit, leak, prepare_exit
from ..watch import exit_hooks, watchdog
from ..watch.frames import user_site
from ..watch.track import Track
from .base import Comm, aborted_late, explained
from .deadline import call_with_deadline, wait_nonblocking

EXIT_SECONDS = 10.0  # for closing all communicators at the end of the process
ABORT_SECONDS = 30.0
_BLOCKS_AFTER_SHRINK = (2, 31, 2)  # ncclCommDestroy of the parent of a shrink that aborts: pytorch/pytorch#194775

_open: weakref.WeakSet[Comm] = weakref.WeakSet()
_leaked: list[tuple[Library, Released]] = []  # of communicators that were collected before they were closed


class Released:
    """The handle that a communicator has given up, and what goes with it.

    handle  to be destroyed or aborted
    memory  of its own operations, which NCCL may be using until then; None where there is none

    To free pinned memory waits for the GPU in some versions of cuda.core (0.5, 0.6: for the legacy default stream). So
    it is kept until the C call that ends the communicator has returned, and is dropped where that has its deadline.
    """

    def __init__(self, handle: int, memory: Any = None, track: Track | None = None, end: str = "") -> None:
        self.handle, self.memory = handle, memory
        by_user = track is not None and not sys.is_finalizing() and "exit" not in end
        self._track, self._end, self._site = track, end, user_site() if by_user else ""

    def drop(self) -> None:
        """Let go of the memory: the communicator has been ended."""
        self.memory = None
        self.record()

    def record(self) -> None:
        """Its end goes into the flight recorder."""
        if self._track is not None:
            self._track.end(self._end, self._site)
            self._track = None


def finalize(self: Comm) -> None:
    """Flush what is in flight; afterwards only destroy() is left to do."""
    self.check_alive()
    with self.lock, self._recorded("finalize", weight=0):
        _flush(self, self.handle)
    self._finalized = True


def destroy(self: Comm) -> None:
    """Finish what is in flight and free the communicator. Twice is harmless; one that has failed is aborted.

    Every rank should call it. Raises NcclTimeout after `timeout` seconds in which a peer, or a call of another
    thread, did not let it finish; a communicator that a peer holds up is aborted then.

    NCCL's destroy and abort wait for every CUDA graph that captured the communicator. Let go of them before:
    reset() a torch.cuda.CUDAGraph; torch.compile(mode="reduce-overhead") keeps its graphs in dynamo's cache, also
    when the compiled function is gone, until torch._dynamo.reset().
    """
    if self._handle is None:
        return
    blocks = self._stopped and self.library.version >= _BLOCKS_AFTER_SHRINK
    if blocks or self.async_error() not in (Result.SUCCESS, Result.IN_PROGRESS):
        abort([self])
        self._end = "destroyed"
        return
    for dependent in self.dependents:
        destroy(dependent)
    what = f"ncclCommDestroy on rank {self.rank} of {self.size}"
    if not self.lock.acquire(timeout=-1 if self.timeout is None else self.timeout):
        raise NcclTimeout(f"{what}: a call of another thread has not returned for {self.timeout:g} s; abort() it")
    try:
        released = release_handle(self, "destroyed")
    finally:
        self.lock.release()
    if released is None:  # another thread was faster
        return
    try:
        with self._recorded("destroy", weight=0):
            _end_it(self, released, what)
    except NcclError as error:
        raise explained(error, self._track) from None


def _end_it(comm: Comm, released: Released, what: str) -> None:
    try:
        if not comm._finalized:
            _flush(comm, released.handle)
    except NcclError as error:
        abort_released(comm.library, [released])
        raise type(error)(f"{error}\n  the communicator was aborted instead") from None
    destroy_released(comm.library, released, comm.timeout, what)


def abort_late(self: Comm, text: str) -> None:
    """By the watchdog: abort it, so that a call that is under way raises NcclTimeout with this text.

    Nobody waits: ncclCommAbort may wait for the kernel of another communicator, which is aborted meanwhile."""
    self._late = text
    if self._track is not None:
        self._track.gave_up(NcclTimeout(text))
    aborted_late[:] = [*aborted_late[-1:], text]
    threading.Thread(target=partial(abort, [self]), name="pynccl abort", daemon=True).start()


def release_handle(comm: Comm, end: str) -> Released | None:
    """Give up the handle and the memory that goes after it; None if that was done already.

    Takes no lock: abort() has to free a thread that holds it."""
    handle, comm._handle = comm._handle, None
    if handle is None:
        return None
    comm._end = end
    comm._c_handle = None  # NULL, which every library refuses
    memory, comm._scratch = comm._scratch, None
    return Released(handle, memory, comm._track, end)


def _close_at_exit(comm: Comm, failed: bool) -> Released | None:
    """Close what the program left open; `failed` if it ends by an exception. What is to go last is returned."""
    if not failed:
        comm.timeout = None  # the end of the process has a deadline of its own
        destroy(comm)
        return None
    released = release_handle(comm, "aborted at exit")
    if released is not None:
        comm.library.ncclCommAbort(released.handle)
        released.record()
    return released


def _flush(comm: Comm, handle: int) -> None:
    """ncclCommFinalize until it is done. The thread that a deadline leaves behind does nothing afterwards, since
    the handle may be gone by then."""
    what = f"ncclCommFinalize on rank {comm.rank} of {comm.size}"
    try:
        code = call_with_deadline(comm.timeout, lambda: _finalize(comm, handle), comm.library, what)
        code = wait_nonblocking(comm.library, handle, code, comm.timeout, what)
    except NcclTimeout as error:
        raise NcclTimeout(f"{error}{graph_hint()}") from None
    comm.library.check(code, what, handle)


def _finalize(comm: Comm, handle: int) -> int:
    with comm.on_own_device():
        return int(comm.library.ncclCommFinalize(handle))


def collected(comm: Comm) -> None:
    """Nobody holds the communicator any more. Its handle is aborted at exit, never here: the collector runs in any
    thread at any moment, also inside another NCCL call."""
    handle = getattr(comm, "_handle", None)
    if handle is None or not hasattr(comm, "_site") or sys.is_finalizing():
        return
    _leaked.append((comm.library, Released(handle, comm._scratch)))
    warnings.warn(
        f"{comm!r}, made at {comm._site}, was never closed: call destroy(), or use it in a with statement",
        ResourceWarning,
        stacklevel=3,
    )


def abort(comms: Iterable[Comm], timeout: float = ABORT_SECONDS) -> None:
    """Abort several communicators of this process as one group, so that none waits for another.

    Runs beside the calling thread: a CUDA graph that captured a communicator keeps NCCL busy until it is destroyed. If
    the abort has not returned after `timeout` seconds, a RuntimeWarning says so and it goes on in the background.
    """
    limit = seconds(timeout)
    by_library: dict[Library, list[Released]] = {}
    for comm in [one for given in _communicators(comms) for one in (*given.dependents, given)]:
        released = release_handle(comm, "aborted")
        if released is not None:
            by_library.setdefault(comm.library, []).append(released)
    for library, all_released in by_library.items():
        abort_released(library, all_released, limit)


def _communicators(comms: Iterable[Comm]) -> list[Comm]:
    """All of them, before the first one is aborted; TypeError if one is none."""
    given = listed(comms, "abort: comms", "communicators, a list of them; pass [comm], or call comm.abort()")
    for comm in given:
        if not isinstance(comm, Comm):
            raise TypeError(f"abort: comms holds {shown(comm)}, expected a list of communicators, and nothing else")
    return given


def abort_handle(library: Library, handle: int) -> None:
    """The same for a handle that no Communicator has."""
    abort_released(library, [Released(handle)])


def abort_released(library: Library, ended: list[Released], timeout: float | None = ABORT_SECONDS) -> None:
    """The same for communicators of one library that have given up their handles."""
    try:
        call_with_deadline(timeout, partial(_abort_all, library, ended), library, "ncclCommAbort")
    except NcclTimeout:
        warnings.warn(
            f"the abort of {len(ended)} communicators has not returned after {timeout:g} s and goes on in the "
            f"background; a live CUDA graph that captured one of them holds it: destroy the graph first{graph_hint()}",
            RuntimeWarning,
            stacklevel=4,
        )


def _abort_all(library: Library, ended: list[Released]) -> None:
    try:
        if len(ended) == 1:
            library.check(library.ncclCommAbort(ended[0].handle), "ncclCommAbort")
            return
        library.check(library.ncclGroupStart(), "ncclGroupStart")
        codes = [library.ncclCommAbort(released.handle) for released in ended]
        end = library.ncclGroupEnd()
        library.check(max(codes) or end, "ncclCommAbort")
    finally:
        for released in ended:
            released.drop()


def destroy_released(library: Library, released: Released, timeout: float | None, what: str) -> None:
    """ncclCommDestroy; the deadline and the error are those of `what`."""

    def run() -> int:
        code = int(library.ncclCommDestroy(released.handle))
        released.drop()
        return code

    try:
        library.check(call_with_deadline(timeout, run, library, what), what)
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


# The end of the process, and forks


def prepare_end() -> None:
    """A communicator is about to be made: the process tells the others how it ends, also if it comes to nothing."""
    if not _open:
        # Registered here, after the library was loaded, to run before what the library itself does at exit.
        exit_hooks.register_removal()
        atexit.unregister(_close_everything)
        atexit.register(_close_everything)
        exit_hooks.prepare()


def register_open(comm: Comm) -> None:
    """A communicator was made: it is closed at the end of the process, if nobody does before."""
    prepare_end()
    _open.add(comm)
    prepare_exit()


def _close_everything() -> None:
    """Destroy what is open; abort it if the process ends by an exception, since the peers may be gone."""
    watchdog.stop()
    comms, failed = list(_open), getattr(sys, "last_value", None) is not None
    count = len(comms) + len(_leaked)
    if count and not call_at_exit(lambda: _close(comms, failed), EXIT_SECONDS):
        late = f"{count} open communicators did not close within {EXIT_SECONDS:g} s{graph_hint()}"
        print(f"pynccl: {late}", file=sys.stderr)


def _close(comms: list[Comm], failed: bool) -> None:
    ended: list[Released | None] = []  # whose memory goes when no communicator is left that could keep the GPU busy
    for library, released in _leaked:
        library.ncclCommAbort(released.handle)
        ended.append(released)
    _leaked.clear()
    for comm in comms:
        try:
            ended.append(_close_at_exit(comm, failed))
        except NcclError as error:
            print(f"pynccl: closing {comm} at exit: {error}", file=sys.stderr)


def _after_fork_in_child() -> None:
    """NCCL's threads, sockets and CUDA context did not come along."""
    ended = [released for _, released in _leaked]
    for comm in list(_open):
        comm.lock._at_fork_reinit()  # type: ignore[attr-defined]  # a thread that did not come along may have it
        released = release_handle(comm, "inherited through a fork, where NCCL cannot work")
        if released is not None:
            ended.append(released)
    for released in ended:
        leak(released.memory)
    _open.clear()
    _leaked.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
