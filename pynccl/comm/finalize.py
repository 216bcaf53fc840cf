"""Shutdown of communicators: finalize, destroy, abort; process exit, forks, and garbage collection.

Communicators that are open at process exit are closed then, with a deadline. In a forked child, communicators of the
parent are unusable. Garbage collection never calls into NCCL.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from ..bindings.abi import Result
from ..bindings.errors import NcclError, NcclTimeout, reworded
from ..bindings.library import Library, host_module
from ..bindings.values import listed, seconds, shown
from ..bindings.workers import WorkerCall, begin_exit, call_at_exit, exit_left, keep_forever, prepare_exit
from ..watch import exit_hooks
from ..watch.frames import user_site
from ..watch.layout import ENDED_AS, CommEnd
from ..watch.track import Track
from .base import Comm, aborted_late, explained
from .deadline import call_with_deadline, wait_nonblocking

ABORT_SECONDS = 30.0
_NAMED = 3  # graphs that messages name
_BLOCKS_AFTER_SHRINK = (2, 31, 2)  # ncclCommDestroy of the parent after shrink(abort=True): pytorch/pytorch#194775

_open: weakref.WeakSet[Comm] = weakref.WeakSet()
_leaked: list[tuple[Library, ReleasedHandle]] = []  # garbage-collected without being closed


class ReleasedHandle:
    """A handle taken away from its communicator, to be destroyed or aborted.

    handle  the ncclComm_t
    memory  scratch memory that NCCL may use until then; None: none

    Freeing pinned memory waits for the GPU in some versions of cuda.core (0.5, 0.6: for the legacy default stream). So
    `memory` is kept until the C call that ends the communicator has returned, and is freed under its deadline.
    """

    def __init__(
        self, handle: int, memory: Any = None, track: Track | None = None, end: CommEnd = CommEnd.ABORTED
    ) -> None:
        self.handle, self.memory = handle, memory
        by_user = track is not None and not sys.is_finalizing() and end != CommEnd.AT_EXIT
        self._track, self._end, self._site = track, end, user_site() if by_user else ""

    def drop(self) -> None:
        """Free the memory: NCCL has destroyed or aborted the communicator."""
        self.memory = None
        self.record()

    def record(self) -> None:
        """Record the end of the communicator in the flight recorder."""
        if self._track is not None:
            self._track.end(self._end, self._site)
            self._track = None


def finalize(self: Comm) -> None:
    """Wait for the operations in flight (ncclCommFinalize). Afterwards only destroy() is valid.

    Every rank should call it. Raises NcclTimeout after `Communicator.timeout` seconds, NcclRemoteError if a rank has
    failed."""
    self.check_alive()
    with self._lock, self._recorded("finalize", weight=0):
        _flush(self, self.handle)
    self._finalized = True


def destroy(self: Comm) -> None:
    """Wait for the operations in flight and free the communicator. Does nothing if it is already closed.

    Every rank should call it. A communicator that has failed is aborted instead. Raises NcclTimeout after
    `Communicator.timeout` seconds: if a peer does not call destroy(), the communicator is aborted; if a call in another
    thread holds it, it stays open.

    NCCL's destroy and abort wait for every CUDA graph that captured the communicator. Release the graphs first: call
    reset() on a torch.cuda.CUDAGraph. The graphs of torch.compile(mode="reduce-overhead") stay in dynamo's cache, even
    after the compiled function is deleted, until torch._dynamo.reset().
    """
    if self._handle is None:
        return
    blocks = self._stopped and self.library.version >= _BLOCKS_AFTER_SHRINK
    if blocks or self.async_error() not in (Result.SUCCESS, Result.IN_PROGRESS):
        abort([self])
        self._end = ENDED_AS[CommEnd.DESTROYED]
        return
    for dependent in self._dependents:
        destroy(dependent)
    what = f"ncclCommDestroy on rank {self.rank} of {self.size}"
    if not self._lock.acquire(timeout=-1 if self.timeout is None else self.timeout):
        raise NcclTimeout(f"{what}: a call in another thread has not returned for {self.timeout:g} s; call abort()")
    try:
        released = release_handle(self, CommEnd.DESTROYED)
    finally:
        self._lock.release()
    if released is None:  # another thread has closed it
        return
    try:
        with self._recorded("destroy", weight=0):
            _flush_and_destroy(self, released, what)
    except NcclError as error:
        error._closing = True
        raise explained(error, self._track) from None


def _flush_and_destroy(comm: Comm, released: ReleasedHandle, what: str) -> None:
    try:
        if not comm._finalized:
            _flush(comm, released.handle)
    except NcclError as error:
        abort_released(comm.library, [released])
        raise reworded(error, f"{error}\n  the communicator was aborted instead") from None
    destroy_released(comm.library, released, comm.timeout, what)


def abort_late(self: Comm, text: str) -> None:
    """Abort it in the background, for the watchdog: a call in progress then raises NcclTimeout with this text.

    The watchdog does not wait, since ncclCommAbort may wait for the kernel of another communicator, which the watchdog
    aborts next."""
    self._late = NcclTimeout(text)
    if self._track is not None:
        self._track.aborted_by_watchdog(self._late)
    aborted_late[:] = [self._late]
    threading.Thread(target=partial(abort, [self]), name="pynccl abort", daemon=True).start()


def revoke(comms: Iterable[Comm], library: Library, error: NcclError) -> WorkerCall[None]:
    """Abort them as one group in the background: calls in progress raise this error, and so do later ones."""
    released = []
    for comm in comms:
        if comm._handle is not None:
            comm._late = error
        if (one := release_handle(comm, CommEnd.REVOKED)) is not None:
            released.append(one)
    aborted_late[:] = [error]
    return WorkerCall(partial(_abort_all, library, released), "abort")


def release_handle(comm: Comm, end: CommEnd) -> ReleasedHandle | None:
    """Take the handle and scratch memory away from the communicator; None if that was already done.

    Takes no lock, because abort() must work while a blocked thread holds it."""
    handle, comm._handle = comm._handle, None
    if handle is None:
        return None
    comm._end = ENDED_AS[end]
    comm._c_handle = None  # NULL, which every library rejects
    memory, comm._scratch_memory = comm._scratch_memory, None
    return ReleasedHandle(handle, memory, comm._track, end)


def _close_at_exit(comm: Comm, failed: bool) -> ReleasedHandle | None:
    """Close a communicator at exit: abort it if the process `failed` (an exception), and return its handle."""
    if not failed:
        comm.timeout = None  # exit has its own deadline
        destroy(comm)
        return None
    released = release_handle(comm, CommEnd.AT_EXIT)
    if released is not None:
        comm.library.ncclCommAbort(released.handle)
        released.record()
    return released


def _flush(comm: Comm, handle: int) -> None:
    """Call ncclCommFinalize and wait until it is done. A worker thread that is left behind by the deadline does nothing
    afterwards, since the handle may be gone by then."""
    what = f"ncclCommFinalize on rank {comm.rank} of {comm.size}"
    try:
        code = _in_time(comm.timeout, lambda: _finalize(comm, handle), comm.library, handle, what)
        code = wait_nonblocking(comm.library, handle, code, comm.timeout, what)
    except NcclTimeout as error:
        raise NcclTimeout(f"{error}{graph_hint()}") from None
    comm.library.check(code, what, handle)


def _finalize(comm: Comm, handle: int) -> int:
    with comm._on_own_device():
        return int(comm.library.ncclCommFinalize(handle))


def on_garbage_collected(comm: Comm) -> None:
    """Warn that the communicator was never closed, and leave its handle to be aborted at exit. Aborting here is unsafe:
    garbage collection runs in any thread at any time, also inside another NCCL call."""
    handle = getattr(comm, "_handle", None)
    if handle is None or not hasattr(comm, "_site"):
        return
    _leaked.append((comm.library, ReleasedHandle(handle, comm._scratch_memory)))
    warnings.warn(
        f"{comm!r}, made at {comm._site}, was never closed: call destroy(), or use it in a with statement",
        ResourceWarning,
        stacklevel=4,
    )


def abort(comms: Iterable[Comm], timeout: float = ABORT_SECONDS) -> None:
    """Abort several communicators of this process as one group, so that none waits for another.

    comms    a list of communicators; those that are already closed are skipped
    timeout  seconds to wait. ncclCommAbort blocks while a CUDA graph that captured one of them exists. It runs in a
             worker thread; after `timeout` it continues in the background and a RuntimeWarning is issued.
    """
    limit = seconds(timeout, "abort: timeout")
    by_library: dict[Library, list[ReleasedHandle]] = {}
    for comm in [each for parent in _communicators(comms) for each in (*parent._dependents, parent)]:
        released = release_handle(comm, CommEnd.ABORTED_BY_WATCHDOG if comm._late else CommEnd.ABORTED)
        if released is not None:
            by_library.setdefault(comm.library, []).append(released)
    for library, all_released in by_library.items():
        abort_released(library, all_released, limit)


def _communicators(comms: Iterable[Comm]) -> list[Comm]:
    """Return them as a list, checked before the first one is aborted. TypeError if one is not a communicator."""
    values = listed(comms, "abort: comms", "a list of communicators; pass [comm], or call comm.abort()")
    for comm in values:
        if not isinstance(comm, Comm):
            raise TypeError(f"abort: comms holds {shown(comm)}, expected a list of communicators")
    return values


def abort_handle(library: Library, handle: int) -> None:
    """`abort` for a bare handle without a Communicator."""
    abort_released(library, [ReleasedHandle(handle)])


def abort_released(library: Library, handles: list[ReleasedHandle], timeout: float | None = ABORT_SECONDS) -> None:
    """`abort` for released handles of one library."""
    try:
        call_with_deadline(timeout, partial(_abort_all, library, handles), library, "ncclCommAbort")
    except NcclTimeout:
        warnings.warn(
            f"the abort of {len(handles)} communicators has not returned after {timeout:g} s and continues in the "
            f"background; a CUDA graph that captured one of them may block it: destroy the graph first{graph_hint()}",
            RuntimeWarning,
            stacklevel=4,
        )


def _abort_all(library: Library, handles: list[ReleasedHandle]) -> None:
    if not handles:
        return
    try:
        if len(handles) == 1:
            library.check(library.ncclCommAbort(handles[0].handle), "ncclCommAbort")
            return
        library.check(library.ncclGroupStart(), "ncclGroupStart")
        codes = [library.ncclCommAbort(released.handle) for released in handles]
        end = library.ncclGroupEnd()
        library.check(max(codes) or end, "ncclCommAbort")
    finally:
        for released in handles:
            released.drop()


def destroy_released(library: Library, released: ReleasedHandle, timeout: float | None, what: str) -> None:
    """Call ncclCommDestroy with a deadline.   what: name of the call for errors"""

    def run() -> int:
        code = int(library.ncclCommDestroy(released.handle))
        released.drop()
        return code

    try:
        library.check(_in_time(timeout, run, library, released.handle, what), what)
    except NcclTimeout as error:
        raise NcclTimeout(f"{error}{graph_hint()}") from None


def _in_time(timeout: float | None, call: Callable[[], int], library: Library, handle: int, what: str) -> int:
    """`call_with_deadline`; a direct call if the host library has nothing to wait for."""
    if library.is_host and host_module().is_idle(handle):
        return call()
    return call_with_deadline(timeout, call, library, what)


def graph_hint() -> str:
    """Return advice about live CUDA graphs, for messages about a destroy or abort that does not return; "" if none.

    NCCL's destroy and abort wait for every graph that captured the communicator; we cannot know which ones did.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():  # the search below takes up to a second on a large heap
        return ""
    kind = getattr(torch.cuda, "CUDAGraph", None)
    # type(x), because isinstance() would run code of proxy objects such as weakref proxies.
    alive = [x for x in gc.get_objects() if issubclass(type(x), kind)] if isinstance(kind, type) else []
    if not alive:
        return ""
    names: dict[str, None] = {}
    with contextlib.suppress(Exception):  # advice within an error: objects of the program can raise anything
        for graph in alive[:_NAMED]:
            names |= dict.fromkeys(_names_of(graph)[:1])
    named = f" ({', '.join(names)}{', ..' if len(alive) > len(names) else ''})" if names else ""
    return (
        f"\n  torch.cuda.CUDAGraph objects alive: {len(alive)}{named}. NCCL waits for those that captured the "
        "communicator: call reset() on them first, or torch._dynamo.reset() for graphs of "
        'torch.compile(mode="reduce-overhead")'
    )


def _names_of(value: object, item: str = "") -> list[str]:
    """Return the names under which modules and objects hold it: "__main__.graph", "Trainer.graphs[..]". Not those of
    local variables: to read them, Python before 3.13 copies them into the frame, which would keep a graph alive."""
    spaces: list[tuple[str, dict[str, Any]]] = []
    found: list[str] = []
    for holder in gc.get_referrers(value):
        if type(holder) is not dict:
            spaces.append((type(holder).__name__, getattr(holder, "__dict__", {})))
        elif isinstance(module := holder.get("__name__"), str):
            spaces.append((module, holder))
        else:
            owners = [one for one in gc.get_referrers(holder) if getattr(one, "__dict__", None) is holder]
            spaces += [(type(one).__name__, holder) for one in owners]
        if type(holder) in (dict, list) and not item:
            found += _names_of(holder, "[..]")
    return [
        f"{where}.{name}{item}" for where, space in spaces for name, one in [*space.items()] if one is value
    ] + found


# Process exit and forks


def install_exit_hooks() -> None:
    """Install the exit hooks before the first communicator is made, so that peers learn how this process ends even if
    the init fails."""
    if not _open:
        # Registered here, after the library was loaded, to run before the library's own exit handlers.
        exit_hooks.register_removal()
        atexit.unregister(_close_everything)
        atexit.register(_close_everything)
        exit_hooks.prepare()


def register_open(comm: Comm) -> None:
    """Register a new communicator to be closed at process exit, unless it is closed before."""
    install_exit_hooks()
    _open.add(comm)
    prepare_exit()


def _close_everything() -> None:
    """Destroy the open communicators; abort them if the process ends with an exception: the peers may be gone."""
    comms, failed = list(_open), begin_exit(getattr(sys, "last_value", None) is not None)
    count, limit = len(comms) + len(_leaked), exit_left()
    if count and not call_at_exit(lambda: _close(comms, failed)):
        print(f"pynccl: {count} open communicators did not close within {limit:.0f} s{graph_hint()}", file=sys.stderr)


def _close(comms: list[Comm], failed: bool) -> None:
    # Keeps the scratch memory alive until no communicator is left that could keep the GPU busy.
    ended: list[ReleasedHandle | None] = []
    for library, released in _leaked:
        library.ncclCommAbort(released.handle)
        ended.append(released)
    _leaked.clear()
    for comm in comms:
        try:
            ended.append(_close_at_exit(comm, failed))
        except NcclError as error:
            if not exit_left():  # given up: the library's own exit handler is ending them
                return
            print(f"pynccl: closing {comm} at exit: {error}", file=sys.stderr)


def _after_fork_in_child() -> None:
    """Drop the parent's communicators: NCCL's threads, sockets and CUDA context do not survive a fork."""
    ended = [released for _, released in _leaked]
    for comm in list(_open):
        comm._lock._at_fork_reinit()  # type: ignore[attr-defined]  # a thread of the parent may hold it
        released = release_handle(comm, CommEnd.FORKED)
        if released is not None:
            ended.append(released)
    for released in ended:
        keep_forever(released.memory)
    _open.clear()
    _leaked.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
