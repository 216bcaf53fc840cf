"""Comm: what everything below the Communicator stands on. Its handle and lock, who it is, whether it is alive, and what
a C call on it has resulted in."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
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

DEFAULT_TIMEOUT = 60.0  # seconds that an init or an end waits for the other ranks


_CHECK = {"": False, "0": False, "off": False, "1": True, "on": True}  # PYNCCL_CHECK, in small letters
_OF_OTHERS = (NcclRemoteError, NcclTimeout, NcclSystemError, NcclInternalError, NcclInvalidUsage)
aborted_late: list[str] = []  # why the watchdog has aborted communicators
_roots = count()


class Origin(NamedTuple):
    """How a communicator was made.

    rank, size  its own
    parent      of which it was split off; None: it comes from no other
    number      of that split among the parent's, the same on all ranks; without a parent, among this process's own
    color       of the split
    axes        of the mesh that made it
    """

    rank: int
    size: int
    parent: Origin | None = None
    number: int = 0
    color: int = 0
    axes: tuple[str, ...] = ()

    def line(self) -> list[Origin]:
        """It, its parent, and so on."""
        return [self] if self.parent is None else [self, *self.parent.line()]


class Comm(Shared):
    """An ncclComm_t and its state. `Communicator` is what users see of it, with its operations."""

    def __init__(
        self,
        handle: int,
        library: Library,
        timeout: float | None = DEFAULT_TIMEOUT,
        config: CommConfig | None = None,
        track: Track | Identity | None = None,
    ) -> None:
        self._handle: int | None = handle
        self._c_handle: Any = to_pointer(handle)  # the same, finished for C
        self.library = library
        self._config = config
        self.timeout = timeout
        self.rank = self._property("ncclCommUserRank")
        self.size = self._property("ncclCommCount")
        self.device_index = self._property("ncclCommCuDevice")
        self._ordinal = CPU if library.is_host else self.device_index
        self.device = device_name(self._ordinal)
        self._check = check_is_on()
        self.dependents: tuple[Any, ...] = ()  # communicators that are destroyed before this one, or aborted with it
        self._end = ""  # how it ended, for messages
        self._late = ""  # why the watchdog has aborted it, if it has
        self.call_timeout: float | None = None  # seconds until the watchdog aborts it for a call that is under way
        self._scratch: Scratch | None = None
        self.origin = Origin(self.rank, self.size, number=next(_roots))
        self._splits = 0
        self._functions = Functions(library)
        self._finalized = False
        self._stopped = False  # by a shrink that has aborted what was in flight
        self._unused_operators: list[int] = []  # nobody holds them any more: see redop.OpHandle
        self._site = call_site()
        if not isinstance(track, Track):
            track = new_track(track, self.rank, self.size)
        self._track = track
        # Of every call. A Ctrl-C between two instructions of `with` may leave it with this thread, which goes on, while
        # other threads wait. abort() needs no lock.
        self.lock = threading.RLock()
        if self._track is not None:
            self._track.made(self, self.device, self._site)
            if library.is_host:
                host_module().stream.explain = _explained_on_a_stream

    @property
    def timeout(self) -> float | None:
        """Seconds that a split, an end, a nonblocking call may take; None: for ever."""
        return self._timeout

    @timeout.setter
    def timeout(self, timeout: float | None) -> None:
        self._timeout = seconds(timeout, zero=True)

    @property
    def config(self) -> CommConfig | None:
        """With which it was made; None: all was left to NCCL."""
        return self._config

    @property
    def handle(self) -> int:
        """ncclComm_t as an integer, for calls into `library`. NcclInvalidUsage after the end."""
        if self._handle is None:
            self.check_alive()
        return self._handle or 0

    @property
    def alive(self) -> bool:
        """Whether it can still be used: neither destroyed nor aborted."""
        return self._handle is not None

    @property
    def ordinal(self) -> int:
        """CUDA ordinal of the device; -1 for the CPU."""
        return self._ordinal

    @property
    def checking(self) -> bool:
        """Whether calls are compared across ranks (PYNCCL_CHECK=1 when it was made)."""
        return self._check

    @property
    def recorded(self) -> bool:
        """Whether its calls are recorded: by the flight recorder, unless PYNCCL_WATCH=off when it was made, or by an
        observer now."""
        return self._track is not None or bool(observers)

    @property
    def name(self) -> str:
        """What messages and traces call it: CommConfig.comm_name, else what made it: "init", "init.split1-0"."""
        made_of = "communicator" if self._track is None else self._track.name
        return comm_name(self._config, made_of) if self._track is None else made_of

    @property
    def uid(self) -> str:
        """The same text on all its ranks, and on no other communicator of the job. Without a flight recorder that is so
        if all ranks made their communicators in one order."""
        if self._track is not None:
            return self._track.uid
        made = [f"{one.number}/{one.color}" for one in self.origin.line()]
        return f"{'.'.join(reversed(made))} of {self.size}"

    def check_alive(self) -> None:
        if self._handle is None:
            if self._late:
                raise NcclTimeout(self._late)
            raise NcclInvalidUsage(
                f"this communicator (rank {self.rank} of {self.size} on {self.device}) was {self._end}; "
                "make a new one with Communicator.init"
            )

    def async_error(self) -> Result:
        """What went wrong since the launch: SUCCESS, IN_PROGRESS (nonblocking), or an error code."""
        code = ctypes.c_int()
        self._status("ncclCommGetAsyncError", ctypes.byref(code))
        return Result(code.value)

    def check_async_error(self) -> None:
        """Raise what `async_error` reports, if it is an error."""
        code = self.async_error()
        if code not in (Result.SUCCESS, Result.IN_PROGRESS):
            raise self.library.error(code, "an operation in flight", self._handle)

    def on_own_device(self) -> on_device:
        """A context manager for C calls that look at the current GPU, or leave another one current."""
        return on_device(self._own_ordinal() if gpu_count() else None)

    def scratch(self, nbytes: int) -> Scratch:
        """At least `nbytes` bytes for the communicator's own operations; for the holder of its lock."""
        if self._scratch is None or self._scratch.nbytes < nbytes:
            self._scratch = Scratch(nbytes, self._ordinal, self.library)
        return self._scratch

    def _own_ordinal(self) -> int | None:
        return None if self._ordinal == CPU else self.device_index

    def _property(self, function: str) -> int:
        value = ctypes.c_int()
        self._status(function, ctypes.byref(value))
        return value.value

    def _status(self, function: str, *args: Any) -> None:
        """A C call on this communicator that launches nothing."""
        handle = self.handle
        code = getattr(self.library, function)(handle, *args)
        if code:
            code = wait_nonblocking(self.library, handle, code, self.timeout, function)
            self.library.check(code, function, handle)

    def _check_result(self, code: int, what: str, entry: int = 0) -> None:
        """Raise for the result of a C call, with what the other ranks' records say about it; wait for a nonblocking
        communicator until its deadline.   entry: of the call in the record"""
        if not code:
            return
        try:
            self.check_alive()  # that another thread has ended the communicator explains more than the code
            code = wait_nonblocking(self.library, self._handle, code, self.timeout, what)
            error = self.library.error(code, what, self._handle) if code else None
        except BaseException as raised:
            if entry and self._track is not None:
                self._track.failed(entry, raised)
            raise
        if error is not None:
            if entry and self._track is not None:
                self._track.failed(entry, error)
            raise explained(error, self._track)

    def _newest(self) -> int:
        """Of its calls, in the record; for the holder of the lock."""
        return 0 if self._track is None else self._track.head

    def _recorded(
        self, operation: str, *, weight: int = 1, detail: str = ""
    ) -> contextlib.AbstractContextManager[None]:
        """For a call that is not made often: what runs within, under the lock, is in the record as this."""
        track = self._track
        recorded = contextlib.nullcontext() if track is None else track.call(operation, weight=weight, detail=detail)
        return self._told_of(operation, weight, recorded) if observers else recorded

    @contextlib.contextmanager
    def _told_of(
        self, operation: str, weight: int, recorded: contextlib.AbstractContextManager[None]
    ) -> Iterator[None]:
        with observed([ControlCall(self, operation, weight)]), recorded:
            yield

    def _child(self, config: CommConfig | None, operation: str, part: Any) -> Identity | None:
        """Who a new communicator of some ranks of this one is, in the flight recorder."""
        parent = self._track
        if parent is None:
            return None
        parent.children[operation] = number = parent.children.get(operation, 0) + 1
        uid = uid_of(parent.uid, operation, number, part)
        name = comm_name(config, f"{parent.name}.{operation}{number}" + (f"-{part}" if operation == "split" else ""))
        return Identity(uid, name, parent.uid)

    def __repr__(self) -> str:
        state = "" if self.alive else f", {self._end}"
        return f"<pynccl.Communicator rank {self.rank} of {self.size} on {self.device}{state}>"


def comm_name(config: CommConfig | None, otherwise: str) -> str:
    """What messages call a communicator that is made with this; what is no CommConfig is refused with the struct."""
    return (isinstance(config, CommConfig) and config.comm_name) or otherwise


def explained(error: NcclError, track: Track | None) -> NcclError:
    """The error of a call, with what the records of all ranks say about it, where another rank may have caused it."""
    if track is None or track.size == 1 or not isinstance(error, _OF_OTHERS) or track.explains:
        return error
    track.explains = True  # once: what fails afterwards fails for the same reason
    try:
        from ..watch.diagnosis import explain

        # Who has waited until its own deadline has given the others time enough.
        text = explain(track, patient=not isinstance(error, NcclTimeout))
    except Exception:  # the error itself is what counts; an import needs a descriptor, too
        return error
    if not text:
        return error
    first, *rest = str(error).splitlines()
    told = type(error)("\n".join([first, *(f"  {line}" for line in text.splitlines()), *rest]))
    told.code, told.verdict = error.code, text.partition("\n")[0]
    return told


def _explained_on_a_stream(error: BaseException) -> BaseException:
    """The same for an error that a stream of the host library raises: of a communicator that has failed."""
    own = started()
    if own is None or not isinstance(error, NcclError):
        return error
    if aborted_late and "was aborted" in str(error):
        return NcclTimeout(aborted_late[-1])
    comms = [comm for track in own.tracks if not track.explains and (comm := track.comm()) is not None and comm.alive]
    for comm in comms:
        if comm.library.is_host and comm.async_error() not in (Result.SUCCESS, Result.IN_PROGRESS):
            comm._track.failed_last(error)
            return explained(error, comm._track)
    return error


def check_is_on() -> bool:
    """What PYNCCL_CHECK says; NcclInvalidUsage where that is neither 1 nor 0."""
    text = os.environ.get("PYNCCL_CHECK", "").strip()
    if text.lower() not in _CHECK:
        raise NcclInvalidUsage(f"PYNCCL_CHECK={text!r}: expected 1, to compare the calls of all ranks, or 0")
    return _CHECK[text.lower()]


def locked(comms: Sequence[Comm]) -> contextlib.AbstractContextManager[Any]:
    """The locks of all of them, which may have ended when they have been taken."""
    return comms[0].lock if len(comms) == 1 else _all_locked(comms)


@contextlib.contextmanager
def _all_locked(comms: Sequence[Comm]) -> Iterator[None]:
    with contextlib.ExitStack() as locks:
        for comm in sorted(comms, key=id):  # one order in all threads, so that two groups cannot wait for each other
            locks.enter_context(comm.lock)
        yield


def check_group_result(comms: list[Comm], code: int, what: str) -> None:
    """Raise for the result of ncclGroupEnd; wait for nonblocking communicators until their deadline."""
    for comm in comms if code == Result.IN_PROGRESS else comms[:1]:
        comm._check_result(code, what, comm._newest())
