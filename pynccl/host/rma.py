"""One-sided operations: windows, signal counters, and the threads that receive puts.

A put sends its bytes over a separate connection. At the target, one thread per peer receives them, writes them into the
window, and then counts the signal. So the data of a counted signal is in memory, and a put does not wait for a call of
its target. The threads start with the first window or wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..bindings.abi import DataType, Result
from ..bindings.workers import wait_at_exit
from . import group
from .argcheck import check_flags, check_range
from .comm import TIMEOUT_VARIABLE, Background, Comm
from .exports import export
from .failure import HostFailure, TransportFailure, invalid_argument, invalid_usage
from .memory import bytes_of, view
from .operation import Kind, Operation, UsedOn
from .stream import find as find_stream
from .transport import Transport

_FIRST_WINDOW = 0x317D0010
_SLICE_SECONDS = 0.2
_PEERS_SECONDS, _JOIN_SECONDS = 0.5, 2.0

_threads: weakref.WeakKeyDictionary[threading.Thread, Transport] = weakref.WeakKeyDictionary()

# (peer, index, context)
Signal = tuple[int, int, int]


@dataclass
class Window:
    """This rank's memory of a window. sizes: bytes on every rank, once exchanged."""

    address: int
    nbytes: int
    sizes: Sequence[int] = ()


class PutHeader(NamedTuple):
    """The header of a put: its place in the target's window, and its signal."""

    window: int
    offset: int
    nbytes: int
    signal: int
    context: int


_HEAD = struct.Struct("<QQQqq")


def rma_of(comm: Comm) -> Rma:
    """Return the one-sided state of a communicator; the first call creates it."""
    with comm.mutex:
        if not isinstance(comm.rma, Rma):
            comm.rma = Rma(comm)
        return comm.rma


class Rma(Background):
    """The one-sided operations of one communicator."""

    def __init__(self, comm: Comm) -> None:
        # The mutex also guards the windows: memory is written while holding it.
        self._comm: Comm = weakref.proxy(comm)
        self._mutex = threading.RLock()  # see Comm.mutex
        self._change = threading.Condition(self._mutex)
        self._windows: dict[int, Window] = {}
        self._registered = 0
        self._arrived: Counter[Signal] = Counter()
        self._peer_errors: dict[int, str] = {}
        self._listening: set[int] = set()
        self._waits = 0
        self._closed = False

    # Windows

    def add_window(self, address: int, nbytes: int) -> int:
        """Add a window and return its number, which is equal on all ranks if they register in the same order."""
        with self._mutex:
            number = _FIRST_WINDOW + 0x10 * self._registered
            self._registered += 1
            self._windows[number] = Window(address, nbytes)
            return number

    def window(self, name: str, number: int | None) -> Window:
        window = self._windows.get(number or 0)
        if window is None:
            raise invalid_argument(
                f"{name}: window is {number or 0:#x}; expected a window that is registered with this communicator"
            )
        return window

    def drop_window(self, name: str, number: int | None) -> None:
        with self._mutex:
            self.window(name, number)
            del self._windows[number or 0]

    # Sending

    def put(self, peer: int, head: PutHeader, data: Tensor) -> None:
        """Send one put; write it directly if the target is this rank."""
        if peer == self._comm.rank:
            self._deliver(peer, head, data)
        else:
            self._comm.transport.rma_send(peer, _HEAD.pack(*head) + bytes_of(data))

    # Receiving

    def listen(self) -> None:
        """Start the receiving threads of all peers."""
        with self._mutex:
            fresh = [peer for peer in self._comm.peers if peer not in self._listening]
            self._listening.update(fresh)
            for peer in fresh:
                transport = self._comm.transport
                thread = threading.Thread(target=self._receive, args=(peer, transport), daemon=True)
                _threads[thread] = transport
                thread.start()

    def _receive(self, peer: int, transport: Transport) -> None:
        packed = bytearray(_HEAD.size)
        with contextlib.suppress(ReferenceError):
            try:
                while True:  # until the peer closes: closing earlier would lose data that it has not read
                    transport.rma_recv(peer, memoryview(packed))
                    head = PutHeader(*_HEAD.unpack(packed))
                    with self._mutex:
                        self._check_window(peer, head)  # before allocating memory
                    data = torch.empty(head.nbytes, dtype=torch.uint8, device="cpu")
                    transport.rma_recv(peer, bytes_of(data))
                    self._deliver(peer, head, data)
            except TransportFailure as failure:
                self._peer_closed(peer, failure)
            except HostFailure as failure:
                self._comm.fail(failure)

    def _deliver(self, peer: int, head: PutHeader, data: Tensor) -> None:
        """Write the data of a put from `peer`, then count its signal."""
        with self._mutex:
            if self._closed:  # the user may have freed the memory
                return
            if (window := self._check_window(peer, head)) is not None:
                ctypes.memmove(window.address + head.offset, data.data_ptr(), head.nbytes)
            self._arrived[peer, head.signal, head.context] += 1
            self._change.notify_all()

    def _check_window(self, peer: int, head: PutHeader) -> Window | None:
        """Check that a put fits into its window; None for a signal without data, and after `close`."""
        if self._closed or not head.nbytes:
            return None
        window = self._windows.get(head.window)
        if window is None or head.offset + head.nbytes > window.nbytes:
            have = "was deregistered here" if window is None else f"has {window.nbytes} bytes"
            raise invalid_usage(
                f"ncclPutSignal: rank {peer} puts {head.nbytes} bytes at offset {head.offset} of window "
                f"{head.window:#x}, which {have}"
            )
        return window

    def _peer_closed(self, peer: int, failure: TransportFailure) -> None:
        with self._mutex:
            self._peer_errors[peer] = str(failure)
            self._change.notify_all()

    # Waiting

    def expect(self, wanted: Counter[Signal]) -> Callable[[], None]:
        """Return a function that waits for the `wanted` signals. `flush` waits until it has run."""
        with self._mutex:
            self._waits += 1

        def expected() -> None:
            try:
                self._wait(wanted)
            finally:
                with self._mutex:
                    self._waits -= 1
                    self._change.notify_all()

        return expected

    def _wait(self, wanted: Counter[Signal]) -> None:
        """Block until the `wanted` signals have arrived, and consume them. A failure also fails the communicator."""
        self.listen()
        deadline = time.monotonic() + self._comm.timeout
        with self._mutex:
            problem: HostFailure | None = None
            while problem is None and wanted - self._arrived:
                self._change.wait(max(0.0, min(_SLICE_SECONDS, deadline - time.monotonic())))
                problem = self._problem(wanted, deadline)
            if problem is None:
                self._arrived.subtract(wanted)
                return
        raise self._comm.fail(problem)

    def _problem(self, wanted: Counter[Signal], deadline: float) -> HostFailure | None:
        """Return the failure that ends the wait, if any."""
        comm = self._comm
        if comm.failure is not None:
            return HostFailure(comm.failure.code, comm.failure.text)
        if not (late := wanted - self._arrived):
            return None
        rows = [f"{n} from rank {peer} (sigIdx={index}, ctx={ctx})" for (peer, index, ctx), n in late.items()]
        call = f"ncclWaitSignal on rank {comm.rank} of {comm.size}: missing signals: {', '.join(rows)}"
        for peer, _, _ in late:
            if peer in self._peer_errors:
                return HostFailure(Result.REMOTE_ERROR, f"{call}; {self._peer_errors[peer]}")
        if time.monotonic() >= deadline:
            return HostFailure(Result.REMOTE_ERROR, f"{call}, after {comm.timeout:g} s ({TIMEOUT_VARIABLE})")
        return None

    # End

    @property
    def busy(self) -> bool:
        return self._waits > 0

    def flush(self) -> None:
        """Wait until all queued waits have run."""
        with self._mutex:
            self._change.wait_for(lambda: not self._waits or self._comm.failure is not None, self._comm.timeout)

    def wake(self) -> None:
        with self._mutex:
            self._change.notify_all()

    def close(self) -> None:
        with self._mutex:
            self._closed = True
            self._windows.clear()
            self._change.notify_all()


def join_threads() -> None:
    """At exit, after destroying the communicators: wait for the peers to do the same for a little while, since closing
    earlier would lose data that they have not read; then end the threads."""
    threads = dict(_threads)
    wait_at_exit([thread.join for thread in threads], _PEERS_SECONDS)
    for transport in threads.values():
        transport.end_rma()
    wait_at_exit([thread.join for thread in threads], _JOIN_SECONDS)


@dataclass(eq=False)
class PutOperation(Operation):
    """A put; a signal without data if count is 0 and window is 0. It is ordered with the communicator's operations."""

    window: int = 0
    offset: int = 0
    signal: int = 0
    context: int = 0

    def check(self) -> None:
        super().check()
        _check_signal(self.name, self.comm, self.signal, self.context)
        if self.kind is PUT:
            window = rma_of(self.comm).window(self.name, self.window)
            capacity = window.sizes[self.peer] if window.sizes else window.nbytes
            if self.offset + self.nbytes > capacity:
                raise invalid_argument(
                    f"{self.name}: {self.nbytes} bytes at offset {self.offset} do not fit into the window of rank "
                    f"{self.peer}, which has {capacity} bytes"
                )


def _put(operation: Any) -> None:
    put: PutOperation = operation
    head = PutHeader(put.window, put.offset, put.nbytes, put.signal, put.context)
    rma_of(put.comm).put(put.peer, head, view(put.send_ptr, put.nbytes, 1))


def _traffic(p: int, nbytes: int, to_self: bool) -> tuple[int, float]:
    return (0, 0.0) if to_self else (1, float(nbytes))


PUT = Kind("ncclPutSignal", _put, _traffic, recv=UsedOn.NONE, peer_is="peer")
SIGNAL = Kind("ncclSignal", _put, _traffic, send=UsedOn.NONE, recv=UsedOn.NONE, peer_is="peer")


def _check_signal(name: str, comm: Comm, signal: int, context: int) -> None:
    signals, contexts = comm.rma_signals, comm.rma_contexts
    check_range(name, "sigIdx", signal, 0, signals - 1, f" (numRmaSig is {signals})")
    check_range(name, "ctx", context, 0, contexts - 1, f" (numRmaCtx is {contexts})")


def _issue(
    kind: Kind, comm: Comm, send_ptr: int, count: int, dtype: int, peer: int, flags: int, stream: int | None,
    **place: int,
) -> None:  # fmt: skip
    comm.check_usable()
    put = PutOperation(kind, comm, send_ptr, 0, count, dtype, 0, peer, **place)
    put.check()
    check_flags(kind.name, "flags", flags, [0], "0")
    group.issue(put, find_stream(stream))


@export
def ncclPutSignal(
    send_ptr: int | None, count: int, dtype: int, peer: int, window: int | None, offset: int, signal: int, context: int,
    flags: int, comm: Comm, stream: int | None,
) -> None:  # fmt: skip
    place = {"window": window or 0, "offset": offset, "signal": signal, "context": context}
    _issue(PUT, comm, send_ptr or 0, count, dtype, peer, flags, stream, **place)


@export
def ncclSignal(peer: int, signal: int, context: int, flags: int, comm: Comm, stream: int | None) -> None:
    _issue(SIGNAL, comm, 0, 0, DataType.UINT8, peer, flags, stream, signal=signal, context=context)


@export
def ncclWaitSignal(count: int, rows: Any, comm: Comm, stream: int | None) -> None:
    """Read the descriptors now and wait on the stream, without blocking operations on other streams."""
    name = "ncclWaitSignal"
    comm.check_usable()
    if count < 1 or not rows:
        raise invalid_argument(f"{name}: {count} descriptors at {'an address' if rows else 'NULL'}; expected 1 or more")
    wanted: Counter[Signal] = Counter()
    for row in (rows[i] for i in range(count)):
        if not 0 <= row.peer < comm.size or row.opCnt < 1:
            raise invalid_argument(
                f"{name}: {row.opCnt} signals from rank {row.peer}; expected 1 or more, from rank 0 to {comm.size - 1}"
            )
        _check_signal(name, comm, row.sigIdx, row.ctx)
        wanted[row.peer, row.sigIdx, row.ctx] += row.opCnt
    host_stream = find_stream(stream)

    def wait() -> None:
        comm.check_usable()
        expected = rma_of(comm).expect(wanted)

        def job(comm: Comm = comm) -> None:  # keeps an aborted communicator alive until this wait ends
            expected()

        if host_stream is None:
            job()
        else:
            host_stream.submit(job)

    group.issue_wait(wait)
