"""The state behind an ncclComm_t: its ranks, the order of its operations, and its failure."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ..bindings.abi import Result
from .connect import Channels
from .failure import HostFailure, TransportFailure, invalid_argument, invalid_usage, last_error, reason_of
from .link import link_of, sleep_until
from .memory import Scratch
from .reduction import PreMulSum
from .rendezvous import Rendezvous
from .shared import SharedMemory
from .transport import Transport
from .watchdog import Activity

TIMEOUT_VARIABLE = "PYNCCL_HOST_TIMEOUT"

# Sent to the peers by a rank that fails: {"verdict": text} or {"culprit": rank, "why": text}.
FailureNotice = dict[str, Any]

# Handles are table keys, not addresses, so a stale handle raises an error instead of crashing.
_handles = itertools.count(0xC0110000, 0x10)
_communicators: dict[int, Comm] = {}


def find(handle: int | None) -> Comm:
    """Return the communicator of a handle. Raises HostFailure if it is unknown or was destroyed."""
    comm = _communicators.get(handle or 0)
    if comm is None:
        text = "NULL" if not handle else f"{handle:#x}"
        raise invalid_argument(f"comm is {text}; expected a communicator that was not destroyed or aborted")
    return comm


def all_communicators() -> list[Comm]:
    return list(_communicators.values())


def after_fork() -> None:
    """In a forked child: invalidate all communicators, whose connections belong to the parent."""
    for comm in all_communicators():
        comm.after_fork()
    _communicators.clear()


def set_timeout(handle: int, timeout: float) -> None:
    """Set the timeout in seconds of every later wait of a communicator, overriding PYNCCL_HOST_TIMEOUT."""
    comm = find(handle)
    comm.timeout = timeout
    if comm._transport is not None:  # None for a single rank
        comm._transport.timeout = timeout


def seconds(variable: str, default: float = 600.0) -> float:
    """Read a number of seconds from an environment variable."""
    text = os.environ.get(variable, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not 0 < value < math.inf:
        raise invalid_argument(f"{variable}={text!r}: expected a positive number of seconds, such as 600")
    return value


def is_idle(handle: int) -> bool:
    """Return whether nothing that was issued on a communicator still runs."""
    comm = _communicators.get(handle)
    return comm is None or comm.idle


class Work(Protocol):
    """A unit of execution of a communicator: one collective, or all sends and receives of a group."""

    def run(self) -> None: ...

    def traffic(self) -> tuple[int, float]:
        """Return (steps, bytes on the wire)."""

    def describe(self) -> str: ...


class Background:
    """Background work of a communicator: none, until `rma` replaces it with its own."""

    @property
    def busy(self) -> bool:
        return False

    def flush(self) -> None:
        """Wait for all background work."""

    def wake(self) -> None:
        """Wake all waiting threads because the communicator has failed."""

    def close(self) -> None:
        """Stop accessing the user's memory."""


class Comm:
    """One rank's end of a communicator.

    Operations execute in the order in which this rank issued them, across streams: each takes a ticket when it is
    issued and runs when that ticket is next.
    """

    def __init__(self, rank: int, size: int, device: int) -> None:
        self.handle = next(_handles)
        self.device = device
        self.link = link_of(device)
        self.timeout = seconds(TIMEOUT_VARIABLE)
        self.scratch = Scratch()
        self.premul: dict[int, PreMulSum] = {}
        self.rendezvous: Rendezvous | None = None  # how its ranks found each other
        self.local = True  # all ranks are on this node
        self.failure: HostFailure | None = None
        self.split_error = ""  # of the last failed split, which does not fail this communicator
        self.initialized = self.finalized = self.suspended = False
        self.rma_signals = self.rma_contexts = 1
        self.registrations: dict[int, tuple[int, int]] = {}
        self.shrinks: Counter[str] = Counter()  # number of shrinks per list of excluded ranks
        self.rma = Background()
        # Use `with self.mutex`: Ctrl-C inside Condition.__enter__, which is Python code, could leave the lock held.
        self.mutex = threading.RLock()
        self.lock = threading.Condition(self.mutex)  # notified when the next ticket may run, and on failure
        self._transport: Transport | None = None
        self._connect: Callable[[str], None] | None = None  # to be called by its first operation
        self.shared: SharedMemory | None = None  # used for collectives and messages if the ranks share memory
        self._waiting = 0
        self._issued = self._served = 0
        self.set_rank(rank, size)
        _communicators[self.handle] = self

    def set_rank(self, rank: int, size: int) -> None:
        """Set rank and world size, once, before connecting."""
        self.rank, self.size = rank, size
        self.peers = [peer for peer in range(size) if peer != rank]
        self.activity = Activity(size)

    def connect_later(self, connect: Callable[[str], None]) -> None:
        """Let the first operation connect it: connect(text of the operation)."""
        self._connect = connect

    @property
    def transport(self) -> Transport:
        if self._connect is not None:
            self.run(self.ticket(), ())
        if self._transport is None:
            raise self.failure or invalid_usage("the communicator is not connected (destroyed, or not yet initialized)")
        return self._transport

    def set_channels(self, channels: Mapping[int, Channels]) -> None:
        """Set the connections to all peers. The communicator is not initialized yet."""
        self.set_transport(Transport(self.rank, channels, self.activity, self.timeout))

    def set_transport(self, transport: Transport) -> None:
        with self.mutex:
            self._transport = transport
        if self.failure is not None:  # aborted meanwhile
            transport.abort(self.failure_notice(f"it failed: {self.failure.text}"), TransportFailure(self.failure.text))

    def mark_initialized(self, shared: SharedMemory | None) -> None:
        """Mark the communicator as initialized. shared: the ranks' shared memory, if any."""
        with self.mutex:
            self.shared, self.initialized = shared, True
        if shared is not None and self.failure is not None:
            shared.close()

    # Order

    def check_not_failed(self) -> None:
        if self.failure is not None:
            raise self.failure

    def check_usable(self) -> None:
        if self.failure is not None:
            raise HostFailure(self.failure.code, f"the communicator has already failed: {self.failure.text}")
        if not self.initialized:
            raise invalid_usage("the communicator is still being initialized; end the group that creates it first")
        if self.finalized:
            raise invalid_usage("the communicator was finalized; it can only be destroyed")
        if self.suspended:
            raise invalid_usage("the communicator is suspended; call ncclCommResume first")

    def ticket(self) -> int:
        with self.mutex:
            self._issued += 1
            return self._issued - 1

    def run(self, ticket: int, works: Sequence[Work]) -> None:
        """Execute the work of `ticket` when it is next. A HostFailure also fails the communicator for good."""
        try:
            if self._served != ticket or self.failure is not None:
                self._await(lambda: self._served == ticket)
            connect, self._connect = self._connect, None  # an abort may clear it meanwhile
            if connect is not None:
                connect(works[0].describe() if works else "connecting")
            for work in works:
                self._execute(work)
        except HostFailure as failure:
            raise self.fail(failure) from failure.__cause__
        except TransportFailure as failure:
            raise self._fail_for(failure, self._current_call()) from failure
        except BaseException as error:
            self.interrupt(error)
            raise
        finally:
            self._served += 1  # only the ticket that is next gets here, unless all fail
            if self._waiting:
                with self.mutex:
                    self.lock.notify_all()

    def _await(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition`; raise the communicator's failure if it fails meanwhile."""
        with self.mutex:
            self._waiting += 1
            try:
                self.lock.wait_for(lambda: condition() or self.failure is not None)
            finally:
                self._waiting -= 1
        if self.failure is not None:
            raise self.failure

    def _execute(self, work: Work) -> None:
        done_at = self.link.reserve(*work.traffic()) if self.link else 0.0
        self.activity.begin(work.describe)
        work.run()
        if done_at:
            sleep_until(done_at)

    @property
    def idle(self) -> bool:
        return self._served == self._issued and not self.rma.busy

    def flush(self) -> None:
        """Wait until everything issued so far has run, or the communicator has failed."""
        last = self._issued
        with contextlib.suppress(HostFailure):
            self._await(lambda: self._served >= last)
            self.rma.flush()

    # Memory

    @property
    def static_bytes(self) -> int:
        """Bytes kept during a suspend, which releases only the scratch memory."""
        shared = self.shared.nbytes if self.shared is not None else 0
        return shared + (self._transport.nbytes if self._transport is not None else 0)

    # Failure and end

    def _current_call(self) -> str:
        return f"{self.activity.describe()} on rank {self.rank} of {self.size}"

    def _fail_for(self, failure: TransportFailure, call: str) -> HostFailure:
        """Fail the communicator after a broken exchange in call `call`. An earlier failure takes precedence."""
        if failure.verdict:
            mismatch = HostFailure(Result.INVALID_USAGE, failure.verdict, mismatch=True)
            return self.fail(mismatch, {"verdict": failure.verdict})
        text = f"{call}: {failure}"
        if failure.timed_out:
            text += f" ({TIMEOUT_VARIABLE} is {self.timeout:g} s)"
        # Of "lost rank 2: its process has ended", send the peers the part after the colon.
        why = str(failure).partition(": ")[2] or str(failure)
        notice: FailureNotice = {"culprit": failure.culprit, "why": why}
        culprit = -1 if failure.culprit is None else failure.culprit
        return self.fail(HostFailure(Result.REMOTE_ERROR, text, culprit=culprit), notice)

    def poll(self, call: str) -> None:
        """Fail the communicator and raise HostFailure if a peer has failed or its process has exited."""
        transport = self._transport
        if self.failure is None and transport is not None:
            try:
                transport.poll()
            except TransportFailure as failure:
                self._fail_for(failure, call)
        if self.failure is not None:
            raise self.failure

    def check_ranks(self, ranks: Sequence[int], call: str) -> None:
        """Raise HostFailure if one of these ranks has ended this communicator, or its process has exited."""
        if (transport := self._transport) is not None and (lost := transport.lost(ranks)):
            raise HostFailure(Result.REMOTE_ERROR, f"{call}: {lost}")

    def fail(self, failure: HostFailure, notice: FailureNotice | None = None) -> HostFailure:
        """Record the first failure, wake waiting threads, and send the peers `notice`. Return the first failure."""
        with self.mutex:
            first = self.failure is None
            if first:
                self.failure = failure
                last_error.text = failure.text
            transport = self._transport
            self.lock.notify_all()
        if first and transport is not None:
            transport.abort(notice or self.failure_notice(f"it failed: {failure.text}"), TransportFailure(failure.text))
            if self.shared is not None:
                self.shared.wake()
        self.rma.wake()
        return self.failure or failure

    def interrupt(self, error: BaseException) -> None:
        """Fail the communicator because an exception ended an operation, such as one of a signal handler."""
        advice = "abort() this communicator and create a new one"
        failure = HostFailure(Result.SYSTEM_ERROR, f"{self._current_call()} {reason_of(error)}; {advice}")
        self.fail(failure, self.failure_notice(f"it {reason_of(error)}"))

    def failure_notice(self, why: str) -> FailureNotice:
        """Return the notice to the peers if this rank itself is the culprit."""
        return {"culprit": self.rank, "why": why}

    def forget(self) -> None:
        """Invalidate the handle."""
        _communicators.pop(self.handle, None)

    def destroy(self) -> None:
        """Invalidate the handle, wait for all issued work, and close the connections."""
        self.forget()
        self.flush()
        self.rma.close()
        if self._transport is not None and self.failure is None:
            self._transport.finalize()
            if self.shared is not None:
                self.shared.wake()
        self.failure = self.failure or invalid_usage("the communicator was destroyed")
        self._release()

    def abort(self) -> None:
        """Invalidate the handle, close the connections at once, and wake blocked operations."""
        self.forget()
        why = "it aborted the communicator" + (f", after {self.split_error}" if self.split_error else "")
        self.fail(invalid_usage("the communicator was aborted"), self.failure_notice(why))
        self.rma.close()
        self._release()

    def _release(self) -> None:
        """Release the connections and the memory; a thread still using them keeps them alive until it returns."""
        if self.shared is not None:
            self.shared.close()
        self._transport = self.shared = self._connect = None
        self.activity.describe = str  # breaks the cycle through the last operation

    def after_fork(self) -> None:
        """In a forked child."""
        self.mutex = threading.RLock()
        self.lock = threading.Condition(self.mutex)
        self.failure = invalid_usage(
            "the communicator was inherited through a fork; create a new one in the child process"
        )
        if self._transport is not None:
            self._transport.close()
        if self.shared is not None:
            self.shared.after_fork()
        self._release()
