"""Comm, the base class of Communicator: handle, lock, rank and size, lifetime, and the results of its C calls."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

from ..bindings.abi import Result
from ..bindings.errors import (
    NcclError,
    NcclInternalError,
    NcclInvalidUsage,
    NcclRemoteError,
    NcclSystemError,
    NcclTimeout,
    Outcome,
    reworded,
    switch,
    with_outcome,
)
from ..bindings.library import Functions, Library, gpu_count, host_module, to_pointer
from ..bindings.resource import Shared
from ..bindings.structs import CommConfig
from ..bindings.values import seconds
from ..interop.buffers import CPU, device_name
from ..interop.devices import on_device
from ..watch.frames import call_site
from ..watch.recorder import started
from ..watch.track import Identity, Track, new_track, uid_of
from .deadline import wait_nonblocking
from .observers import ControlCall, observed, observers
from .scratch import Scratch

DEFAULT_TIMEOUT = 60.0  # seconds that creation and shutdown wait for the other ranks


_PEER_ERRORS = (NcclRemoteError, NcclTimeout, NcclSystemError, NcclInternalError, NcclInvalidUsage)
aborted_late: list[NcclError] = []  # the errors of the last communicator that another thread than the program's aborted
_roots = count()


class Lineage(NamedTuple):
    """Where a communicator comes from.

    rank, size  of the communicator
    parent      lineage of the communicator that it was split from; None: it was not made by a split
    number      index of that split among the parent's splits, equal on all ranks; without a parent, index among the
                communicators of this process
    color       color of the split
    axes        axes of the mesh that made it
    """

    rank: int
    size: int
    parent: Lineage | None = None
    number: int = 0
    color: int = 0
    axes: tuple[str, ...] = ()

    def line(self) -> list[Lineage]:
        """Return this lineage, its parent's, its grandparent's, and so on."""
        return [self] if self.parent is None else [self, *self.parent.line()]


_numbers = count(1)
# Key of a communicator, a string that is unique in this process -> the communicator, while it exists. torch.compile
# takes the key in place of the communicator.
by_key: weakref.WeakValueDictionary[str, Comm] = weakref.WeakValueDictionary()


class Comm(Shared):
    """An ncclComm_t and its state. Users see the subclass `Communicator`, which adds the operations."""

    def __init__(
        self,
        handle: int,
        library: Library,
        timeout: float | None = DEFAULT_TIMEOUT,
        config: CommConfig | None = None,
        track: Track | Identity | None = None,
    ) -> None:
        self._handle: int | None = handle
        self._c_handle: Any = to_pointer(handle)  # the handle as a ctypes pointer
        self.library = library
        self._config = config
        self.timeout = timeout
        self.rank = self._property("ncclCommUserRank")
        self.size = self._property("ncclCommCount")
        self._device_index = self._property("ncclCommCuDevice")
        self._ordinal = CPU if library.is_host else self._device_index
        self.device = device_name(self._ordinal)
        self._check = check_enabled()
        self._dependents: tuple[Any, ...] = ()  # communicators destroyed before this one, or aborted with it
        self._attached: dict[type, Any] = {}  # what packages above this one keep for it, one object of each type
        self._end = ""  # "destroyed", "aborted", ...: for messages
        self._late: NcclError | None = None  # of its calls, once another thread than the program's has aborted it
        self._generation: Any = None  # of an elastic communicator: it and all that were made from it
        self._call_timeout: float | None = None  # seconds a call may run before the watchdog aborts it
        self._scratch_memory: Scratch | None = None
        self._lineage = Lineage(self.rank, self.size, number=next(_roots))
        self._splits = 0
        self._functions = Functions(library)
        self._finalized = False
        self._stopped = False  # shrink(abort=True) has aborted the calls in flight
        self._unused_operators: list[int] = []  # to be freed: see redop.OpHandle
        self._site = call_site()
        self._key = f"{next(_numbers)}:{self.rank}/{self.size}"
        by_key[self._key] = self
        if not isinstance(track, Track):
            track = new_track(track, self.rank, self.size)
        self._track = track
        # Held during every call. A Ctrl-C between two instructions of `with` can leave the lock with this thread; it
        # can go on (RLock), while other threads wait. abort() takes no lock.
        self._lock = threading.RLock()
        if self._track is not None:
            self._track.made(self, self.device, self._site)
            if library.is_host:
                host_module().jobs.explain = _explain_stream_error

    @property
    def timeout(self) -> float | None:
        """Seconds that split, destroy and nonblocking calls wait for other ranks; None: no limit."""
        return self._timeout

    @timeout.setter
    def timeout(self, timeout: float | None) -> None:
        self._timeout = seconds(timeout, zero=True)

    @property
    def config(self) -> CommConfig | None:
        """The `CommConfig` it was made with; None: NCCL's defaults."""
        return self._config

    @property
    def handle(self) -> int:
        """ncclComm_t as an integer, for calls into `library`. NcclInvalidUsage once destroyed or aborted."""
        if self._handle is None:
            self.check_alive()
        return self._handle or 0

    @property
    def alive(self) -> bool:
        """Whether it can be used: False once destroyed or aborted."""
        return self._handle is not None

    @property
    def ordinal(self) -> int:
        """CUDA ordinal of the device; -1: CPU."""
        return self._ordinal

    @property
    def checking(self) -> bool:
        """Whether calls are compared across ranks: PYNCCL_CHECK=1 was set when it was made."""
        return self._check

    @property
    def _is_recorded(self) -> bool:
        """Whether its calls are recorded: by the flight recorder (on unless PYNCCL_WATCH=off was set when it was made),
        or by an active observer."""
        return self._track is not None or bool(observers)

    @property
    def name(self) -> str:
        """Its name in messages and traces: CommConfig.comm_name, else one derived from how it was made."""
        return comm_name(self._config, "communicator") if self._track is None else self._track.name

    @property
    def uid(self) -> str:
        """A text that is equal on all its ranks and unique in the job. Without a flight recorder this requires that all
        ranks made their communicators in the same order."""
        if self._track is not None:
            return self._track.uid
        splits = [f"{lineage.number}/{lineage.color}" for lineage in self._lineage.line()]
        return f"{'.'.join(reversed(splits))} of {self.size}"

    def check_alive(self) -> None:
        """Raise NcclInvalidUsage if it was destroyed or aborted, NcclTimeout if the watchdog aborted it, and
        NcclRemoteError if its generation has ended."""
        if self._handle is None:
            if self._late is not None:
                raise reworded(self._late, f"this communicator was aborted: {self._late}")
            text = f"this communicator (rank {self.rank} of {self.size} on {self.device}) was {self._end}; "
            text += "make a new one with pynccl.init or pynccl.init_all"
            raise with_outcome(NcclInvalidUsage(text), Outcome.ABORTED_BY_PROGRAM)

    def _check_alive_after(self) -> None:
        """Raise as `check_alive` does, after a call: if the communicator was aborted, that has ended the call."""
        if self._handle is None and self._late is not None:
            raise self._error(0, "")
        self.check_alive()

    def async_error(self) -> Result:
        """Return ncclCommGetAsyncError: SUCCESS, IN_PROGRESS (nonblocking), or the error code of a call in flight."""
        code = ctypes.c_int()
        self._status("ncclCommGetAsyncError", ctypes.byref(code))
        return Result(code.value)

    def check_async_error(self) -> None:
        """Raise the error that `async_error` reports, if any."""
        code = self.async_error()
        if code not in (Result.SUCCESS, Result.IN_PROGRESS):
            raise self._error(code, "an operation in flight")

    def _on_own_device(self) -> on_device:
        """Return a context manager that makes its GPU current inside the block and restores the caller's afterwards."""
        return on_device(self._own_ordinal() if gpu_count() else None)

    def _scratch(self, nbytes: int) -> Scratch:
        """Return at least `nbytes` bytes of scratch memory for internal operations. The caller holds the lock."""
        if self._scratch_memory is None or self._scratch_memory.nbytes < nbytes:
            self._scratch_memory = Scratch(nbytes, self._ordinal, self.library)
        return self._scratch_memory

    def _own_ordinal(self) -> int | None:
        return None if self._ordinal == CPU else self._device_index

    def _property(self, function: str) -> int:
        value = ctypes.c_int()
        self._status(function, ctypes.byref(value))
        return value.value

    def _status(self, function: str, *args: Any) -> None:
        """Make a C call on this communicator that launches no work, and check its result."""
        handle = self.handle
        code = getattr(self.library, function)(handle, *args)
        if code:
            code = wait_nonblocking(self.library, handle, code, self.timeout, function)
            if code:
                raise self._error(code, function)

    def _error(self, code: int, what: str) -> NcclError:
        """Return the error of a C call; if another thread has aborted the communicator meanwhile, the one for that."""
        if self._handle is None and self._late is not None:
            return reworded(self._late, str(self._late))
        return self.library.error(code, what, self._handle)

    def _check_result(self, code: int, what: str, entry: int = 0) -> None:
        """Raise if a C call failed, with a diagnosis from the records of all ranks. On a nonblocking communicator, wait
        first until the call completes or times out.   entry: of the call in the flight recorder"""
        if not code:
            return
        try:
            self.library.raise_exception()
            self._check_alive_after()  # if another thread ended it, that explains more than the result code
            code = wait_nonblocking(self.library, self._handle, code, self.timeout, what)
            error = self._error(code, what) if code else None
        except BaseException as raised:
            if entry and self._track is not None:
                self._track.failed(entry, raised)
            raise
        if error is not None:
            if entry and self._track is not None:
                self._track.failed(entry, error)
            raise explained(error, self._track)

    def _newest(self) -> int:
        """Return the flight recorder entry of its newest call, or 0. The caller holds the lock."""
        return 0 if self._track is None else self._track.head

    def _recorded(
        self, operation: str, *, weight: int = 1, detail: str = ""
    ) -> contextlib.AbstractContextManager[None]:
        """Record the block as one control call. The caller holds the lock.   weight: see `observers.ControlCall`"""
        track = self._track
        recorded = contextlib.nullcontext() if track is None else track.call(operation, weight=weight, detail=detail)
        return self._observed_call(operation, weight, recorded) if observers else recorded

    @contextlib.contextmanager
    def _observed_call(
        self, operation: str, weight: int, recorded: contextlib.AbstractContextManager[None]
    ) -> Iterator[None]:
        with observed([ControlCall(self, operation, weight)]), recorded:
            yield

    def _child(self, config: CommConfig | None, operation: str, key: Any) -> Identity | None:
        """Return the flight recorder identity of a new communicator derived from this one."""
        parent = self._track
        if parent is None:
            return None
        parent.children[operation] = number = parent.children.get(operation, 0) + 1
        uid = uid_of(parent.uid, operation, number, key)
        name = comm_name(config, f"{parent.name}.{operation}{number}" + (f"-{key}" if operation == "split" else ""))
        return Identity(uid, name, parent.uid)

    def __repr__(self) -> str:
        state = "" if self.alive else f", {self._end}"
        return f"<pynccl.Communicator rank {self.rank} of {self.size} on {self.device}{state}>"


def comm_name(config: CommConfig | None, otherwise: str) -> str:
    """Return the name that config gives, else `otherwise`. make_struct() rejects other types."""
    name = config.comm_name if isinstance(config, CommConfig) else None
    return name if isinstance(name, str) and name else otherwise


def explained(error: NcclError, track: Track | None) -> NcclError:
    """Return the error, with a diagnosis from the records of all ranks if another rank may have caused it."""
    if track is None or track.size == 1 or not isinstance(error, _PEER_ERRORS) or track.explains or error.verdict:
        return error
    track.explains = True  # once: later failures have the same cause
    try:
        from ..watch.diagnosis import explain

        # After a timeout of our own, the other ranks have had enough time to write their records.
        text = explain(track, patient=not isinstance(error, NcclTimeout))
    except Exception:  # keep the original error; the import, too, can fail without free file descriptors
        return error
    if not text:
        return error
    verdict, *others = text.splitlines()
    lines = [verdict, *(line for line in others if line not in verdict)]
    first, *rest = (error._short or str(error)).splitlines()  # the diagnosis replaces generic advice
    diagnosed = reworded(error, "\n".join([first, *(f"  {line}" for line in lines), *rest]))
    diagnosed.verdict = verdict
    track.note_failure(diagnosed)
    return diagnosed


def _explain_stream_error(error: BaseException) -> BaseException:
    """`explained` for an error raised by a stream of the host library: find the communicator that failed."""
    recorder = started()
    if recorder is None or not isinstance(error, NcclError):
        return error
    if aborted_late and "was aborted" in str(error):
        return reworded(aborted_late[-1], str(aborted_late[-1]))
    tracks = [track for track in recorder.tracks if not track.explains]
    comms = [comm for track in tracks if (comm := track.comm()) is not None and comm.alive]
    for comm in comms:
        if comm.library.is_host and comm.async_error() not in (Result.SUCCESS, Result.IN_PROGRESS):
            comm._track.failed_last(error)
            return explained(error, comm._track)
    return error


def check_enabled() -> bool:
    """Return whether PYNCCL_CHECK is on. NcclInvalidUsage if it is neither 1 nor 0."""
    return switch("PYNCCL_CHECK", "compare the calls of all ranks")


def locked(comms: Sequence[Comm]) -> contextlib.AbstractContextManager[Any]:
    """Lock all the communicators. One may have been aborted by the time its lock is held: call check_alive()."""
    return comms[0]._lock if len(comms) == 1 else _all_locked(comms)


@contextlib.contextmanager
def _all_locked(comms: Sequence[Comm]) -> Iterator[None]:
    with contextlib.ExitStack() as locks:
        for comm in sorted(comms, key=id):  # the same order in all threads, to avoid deadlock
            locks.enter_context(comm._lock)
        yield


def check_group_result(comms: list[Comm], code: int, what: str) -> None:
    """Raise if ncclGroupEnd failed. Wait for nonblocking communicators until they complete or time out."""
    for comm in comms if code == Result.IN_PROGRESS else comms[:1]:
        comm._check_result(code, what, comm._newest())
