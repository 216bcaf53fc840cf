"""What is behind one-sided operations: windows, signal counters, and the threads that carry puts beside all else.

A put is copied and queued, and a thread per peer sends it; at the target a thread per peer receives, writes into the
window and only then counts the signal. So a put never waits for its target, and what a wait has counted is in memory.
The threads start with the first window or wait; a communicator without them has none.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import struct
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..bindings.abi import Result
from .failure import HostFailure, TransportFailure, invalid_argument, invalid_usage
from .memory import bytes_of, view
from .transport import Transport

if TYPE_CHECKING:
    from .comm import Comm

_HEAD = struct.Struct("<QQQqq")  # window, offset, bytes, signal, context
_FIRST_WINDOW = 0x317D0010
_SLICE_SECONDS = 0.2

_threads: weakref.WeakKeyDictionary[threading.Thread, Transport] = weakref.WeakKeyDictionary()

# A signal of a rank: peer, its number, its context.
Signal = tuple[int, int, int]


@dataclass
class WindowRecord:
    """This rank's part of a window, and the bytes of every rank's; unknown until they have been exchanged."""

    address: int
    nbytes: int
    sizes: Sequence[int] = ()


@dataclass
class Put:
    """What travels: nbytes at `address` go to `offset` in the target's part of `window`, then a signal is raised."""

    peer: int
    address: int
    nbytes: int
    window: int
    offset: int
    signal: int
    context: int


class Puts:
    """The one-sided side of one communicator."""

    def __init__(self, comm: Comm) -> None:
        # The condition is created once and also guards the windows: memory is written under it.
        self._comm = weakref.proxy(comm)
        self._change = threading.Condition()
        self._windows: dict[int, WindowRecord] = {}
        self._registered = 0
        self._arrived: Counter[Signal] = Counter()
        self._lost: dict[int, str] = {}
        self._outgoing: dict[int, queue.SimpleQueue[tuple[bytes, Tensor | None]]] = {}
        self._listening: set[int] = set()
        self._unsent = self._waits = 0
        self._closed = False

    # Windows

    def add_window(self, address: int, nbytes: int) -> int:
        """The number of a new window, equal on all ranks if they register in the same order."""
        with self._change:
            number = _FIRST_WINDOW + 0x10 * self._registered
            self._registered += 1
            self._windows[number] = WindowRecord(address, nbytes)
            return number

    def window(self, name: str, number: int | None) -> WindowRecord:
        record = self._windows.get(number or 0)
        if record is None:
            raise invalid_argument(
                f"{name}: window is {number or 0:#x}, which this communicator does not have (any more)"
            )
        return record

    def drop_window(self, name: str, number: int | None) -> None:
        with self._change:
            self.window(name, number)
            del self._windows[number or 0]

    # Sending

    def put(self, put: Put) -> None:
        """Queue one put, or do it if it is to this rank itself."""
        data = view(put.address, put.nbytes, 1)
        if put.peer == self._comm.rank:
            self._deliver(put, data)
            return
        with self._change:
            if put.peer in self._lost:
                raise TransportFailure(self._lost[put.peer])
            if put.peer not in self._outgoing:
                self._outgoing[put.peer] = queue.SimpleQueue()
                self._start(self._send, put.peer)
            self._unsent += 1
        head = _HEAD.pack(put.window, put.offset, put.nbytes, put.signal, put.context)
        self._outgoing[put.peer].put((head, data.clone() if put.nbytes else None))

    def _send(self, peer: int, transport: Transport) -> None:
        outgoing = self._outgoing[peer]
        with contextlib.suppress(ReferenceError):  # the communicator is gone
            while not (self._closed and outgoing.empty()):
                with contextlib.suppress(queue.Empty):
                    head, data = outgoing.get(timeout=_SLICE_SECONDS)
                    try:
                        transport.rma_send(peer, head)
                        if data is not None:
                            transport.rma_send(peer, bytes_of(data))
                    except TransportFailure as failure:
                        self._lose(peer, failure)
                        return
                    with self._change:
                        self._unsent -= 1
                        self._change.notify_all()

    # Receiving

    def listen(self) -> None:
        """Receive from all peers from now on."""
        with self._change:
            fresh = [peer for peer in self._comm.peers if peer not in self._listening]
            self._listening.update(fresh)
            for peer in fresh:
                self._start(self._receive, peer)

    def _receive(self, peer: int, transport: Transport) -> None:
        head = bytearray(_HEAD.size)
        with contextlib.suppress(ReferenceError):
            try:
                while True:  # until the peer closes: closing before would cut off what it has not read yet
                    transport.rma_recv(peer, memoryview(head))
                    window, offset, nbytes, signal, context = _HEAD.unpack(head)
                    data = torch.empty(nbytes, dtype=torch.uint8)
                    transport.rma_recv(peer, bytes_of(data))
                    self._deliver(Put(peer, 0, nbytes, window, offset, signal, context), data)
            except TransportFailure as failure:
                self._lose(peer, failure)
            except HostFailure as failure:
                self._comm.fail(failure)

    def _deliver(self, put: Put, data: Tensor) -> None:
        """Write what came from `put.peer`, then count its signal."""
        with self._change:
            if self._closed:  # the memory may be gone
                return
            if put.nbytes:
                record = self._windows.get(put.window)
                if record is None or put.offset + put.nbytes > record.nbytes:
                    have = "was deregistered here" if record is None else f"has {record.nbytes} bytes"
                    raise invalid_usage(
                        f"ncclPutSignal: rank {put.peer} puts {put.nbytes} bytes at offset {put.offset} of window "
                        f"{put.window:#x}, which {have}"
                    )
                ctypes.memmove(record.address + put.offset, data.data_ptr(), put.nbytes)
            self._arrived[put.peer, put.signal, put.context] += 1
            self._change.notify_all()

    def _lose(self, peer: int, failure: TransportFailure) -> None:
        with self._change:
            self._lost[peer] = str(failure)
            self._change.notify_all()

    # Waiting

    def wait(self, wanted: Counter[Signal]) -> None:
        """Block until so many signals have come, and take them off. Raises HostFailure, which sticks."""
        self.listen()
        deadline = time.monotonic() + self._comm.timeout
        with self._change:
            problem: HostFailure | None = None
            while problem is None and any(self._arrived[signal] < count for signal, count in wanted.items()):
                self._change.wait(max(0.0, min(_SLICE_SECONDS, deadline - time.monotonic())))
                problem = self._problem(wanted, deadline)
            if problem is None:
                self._arrived.subtract(wanted)
                return
        raise self._comm.fail(problem)

    def _problem(self, wanted: Counter[Signal], deadline: float) -> HostFailure | None:
        """Why not to wait any longer."""
        comm = self._comm
        if comm.failure is not None:
            return HostFailure(comm.failure.code, comm.failure.text)
        late = {signal: count - self._arrived[signal] for signal, count in wanted.items()}
        if max(late.values()) <= 0:
            return None
        missing = ", ".join(
            f"{count} of rank {peer} (sigIdx={index}, ctx={context})"
            for (peer, index, context), count in late.items()
            if count > 0
        )
        what = f"ncclWaitSignal on rank {comm.rank} of {comm.size}: missing signals: {missing}"
        for peer, _, _ in (signal for signal, count in late.items() if count > 0):
            if peer in self._lost:
                return HostFailure(Result.REMOTE_ERROR, f"{what}; {self._lost[peer]}")
        if time.monotonic() >= deadline:
            return HostFailure(Result.REMOTE_ERROR, f"{what}, after {comm.timeout:g} s (PYNCCL_HOST_TIMEOUT)")
        return None

    @contextlib.contextmanager
    def expected(self) -> Iterator[None]:
        """Around a wait that `expect` announced."""
        try:
            yield
        finally:
            with self._change:
                self._waits -= 1
                self._change.notify_all()

    def expect(self) -> None:
        """A wait was queued; `flush` has to let it run."""
        with self._change:
            self._waits += 1

    # End

    @property
    def busy(self) -> bool:
        return bool(self._unsent or self._waits)

    def flush(self) -> None:
        """Wait until queued waits have run, and puts are on their way."""

        def done() -> bool:
            unsent = 0 if self._lost else self._unsent
            return not (unsent or self._waits) or self._comm.failure is not None

        with self._change:
            self._change.wait_for(done, self._comm.timeout)

    def wake(self) -> None:
        with self._change:
            self._change.notify_all()

    def close(self) -> None:
        """The user's memory is not to be touched any more."""
        with self._change:
            self._closed = True
            self._windows.clear()
            self._change.notify_all()

    def _start(self, work: Callable[[int, Transport], None], peer: int) -> None:
        transport = self._comm.transport
        thread = threading.Thread(target=work, args=(peer, transport), name=f"pynccl-host-put-{peer}", daemon=True)
        _threads[thread] = transport
        thread.start()


def give_up(parting: float, timeout: float) -> None:
    """At exit, after the communicators were destroyed: wait `parting` seconds in all for the peers to do the same,
    since closing before would cut off what they have not read yet; then end the threads."""
    deadline = time.monotonic() + parting
    for thread in list(_threads):
        thread.join(max(0.0, deadline - time.monotonic()))
    for thread, transport in list(_threads.items()):
        transport.wake_helpers()
        thread.join(timeout)
