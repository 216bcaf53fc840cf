"""The record behind an ncclComm_t: its ranks, the order of its operations, and how it fails."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ..bindings.abi import Result
from .connect import Channels
from .failure import HostFailure, TransportFailure, invalid_argument, invalid_usage, last_error
from .link import link_of, sleep_until
from .memory import Scratch
from .reduction import PreMulSum
from .rendezvous import MeetingPlace
from .shared import SharedMemory
from .transport import Transport
from .watchdog import Activity

TIMEOUT_VARIABLE = "PYNCCL_HOST_TIMEOUT"

# What a rank that fails tells its peers: {"verdict": text} or {"culprit": rank, "why": text}.
Reason = dict[str, Any]

# Handles are numbers in a table and never addresses, so a stale one is an error and not a crash.
_handles = itertools.count(0xC0110000, 0x10)
_communicators: dict[int, Comm] = {}


def find(handle: int | None) -> Comm:
    """The communicator of a handle; HostFailure if it never was one or was destroyed."""
    comm = _communicators.get(handle or 0)
    if comm is None:
        text = "NULL" if not handle else f"{handle:#x}"
        raise invalid_argument(f"comm is {text}, which is not a communicator or was destroyed or aborted before")
    return comm


def all_of_process() -> list[Comm]:
    return list(_communicators.values())


def after_fork() -> None:
    """In a forked child: leave the connections to the parent, whose they are."""
    for comm in all_of_process():
        comm.after_fork()
    _communicators.clear()


def set_timeout(handle: int, timeout: float) -> None:
    """Seconds that every wait of a communicator may take from now on, whatever PYNCCL_HOST_TIMEOUT says."""
    comm = find(handle)
    comm.timeout = timeout
    if comm._transport is not None:  # one rank alone has none
        comm._transport.limit = timeout


def seconds(variable: str, default: float = 600.0) -> float:
    """A number of seconds from the environment."""
    text = os.environ.get(variable, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not 0 < value < math.inf:
        raise invalid_argument(f"{variable}={text!r}: expected a number of seconds above 0, such as 600")
    return value


class Work(Protocol):
    """What a communicator runs in its turn: one collective, or all sends and receives of a group at once."""

    def run(self) -> None: ...

    def traffic(self) -> tuple[int, float]:
        """(steps, bytes on the wire)"""

    def describe(self) -> str: ...


class Background:
    """What a communicator does beside its operations: nothing, until `rma` replaces this by its own."""

    @property
    def busy(self) -> bool:
        return False

    def flush(self) -> None:
        """Wait until all of it is done."""

    def wake(self) -> None:
        """The communicator has failed: let nobody wait any longer."""

    def close(self) -> None:
        """The user's memory is not to be touched any more."""


class Comm:
    """One rank's end of a communicator.

    Operations execute in the order in which this rank issued them, whichever streams they are on: each takes a ticket
    when it is issued and runs when its number comes up.
    """

    def __init__(self, rank: int, size: int, device: int) -> None:
        self.handle = next(_handles)
        self.device = device
        self.link = link_of(device)
        self.timeout = seconds(TIMEOUT_VARIABLE)
        self.scratch = Scratch()
        self.premul: dict[int, PreMulSum] = {}
        self.meeting: MeetingPlace | None = None  # where its ranks have met
        self.local = True  # all ranks are on this machine
        self.failure: HostFailure | None = None
        self.split_error = ""  # of a split, which is no failure of its parent
        self.initialized = self.finalized = self.suspended = False
        self.rma_signals = self.rma_contexts = 1
        self.registrations: dict[int, tuple[int, int]] = {}
        self.shrinks: Counter[str] = Counter()  # how often it shrank, by whom it excluded
        self.rma = Background()
        # Entered by `with`, which Ctrl-C cannot leave locked: a Condition's own __enter__ is Python code, and it can.
        self.mutex = threading.RLock()
        self.lock = threading.Condition(self.mutex)  # told when the next ticket's time has come, and of a failure
        self._transport: Transport | None = None
        self.shared: SharedMemory | None = None  # through which the collectives go, where the ranks have it
        self._waiting = 0
        self._issued = self._served = 0
        self.set_rank(rank, size)
        _communicators[self.handle] = self

    def set_rank(self, rank: int, size: int) -> None:
        """Say which rank of how many this is, once, before it connects."""
        self.rank, self.size = rank, size
        self.peers = [peer for peer in range(size) if peer != rank]
        self.activity = Activity(size)

    @property
    def transport(self) -> Transport:
        if self._transport is None:
            raise self.failure or invalid_usage("the communicator is not connected (destroyed, or not yet initialised)")
        return self._transport

    def use(self, channels: Mapping[int, Channels]) -> None:
        """Begin to use connections to all peers; the communicator is not initialized yet."""
        transport = Transport(self.rank, channels, self.activity, self.timeout)
        with self.mutex:
            self._transport = transport
        if self.failure is not None:  # aborted meanwhile
            transport.abort(self.because(f"it failed: {self.failure.text}"), TransportFailure(self.failure.text))

    def begin(self, shared: SharedMemory | None) -> None:
        """It is initialized, and its ranks share memory or do not."""
        with self.mutex:
            self.shared, self.initialized = shared, True
        if shared is not None and self.failure is not None:
            shared.close()

    # Order

    def check_usable(self) -> None:
        if self.failure is not None:
            raise HostFailure(self.failure.code, f"the communicator failed before: {self.failure.text}")
        if not self.initialized:
            raise invalid_usage("the communicator is still being initialised; end the group that does so first")
        if self.finalized:
            raise invalid_usage("the communicator was finalized; it can only be destroyed")
        if self.suspended:
            raise invalid_usage("the communicator is suspended; call ncclCommResume first")

    def ticket(self) -> int:
        with self.mutex:
            self._issued += 1
            return self._issued - 1

    def run(self, ticket: int, works: Sequence[Work]) -> None:
        """Execute what was issued under `ticket`, when its turn has come. Raises HostFailure, which sticks."""
        try:
            if self._served != ticket or self.failure is not None:
                self._await(lambda: self._served == ticket)
            for work in works:
                self._execute(work)
        except HostFailure as failure:
            raise self.fail(failure) from failure.__cause__
        except TransportFailure as failure:
            raise self._fail_for(failure, self._what()) from failure
        except KeyboardInterrupt:
            self.interrupt()
            raise
        except BaseException as error:
            lines = traceback.format_exception_only(type(error), error)
            self.fail(HostFailure(Result.INTERNAL_ERROR, f"{works[0].describe()}: {lines[-1].strip()}"))
            raise
        finally:
            self._served += 1  # only the operation whose turn it is gets here, unless all of them fail
            if self._waiting:
                with self.mutex:
                    self.lock.notify_all()

    def _await(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition`; raise the failure if there is one first."""
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
        """Bytes that it keeps through a suspend, which gives back its scratch memory."""
        shared = self.shared.nbytes if self.shared is not None else 0
        return shared + (self._transport.nbytes if self._transport is not None else 0)

    # Failure and end

    def _what(self) -> str:
        return f"{self.activity.describe()} on rank {self.rank} of {self.size}"

    def _fail_for(self, failure: TransportFailure, what: str) -> HostFailure:
        """A broken exchange as the failure of this communicator, unless it broke because of an earlier one."""
        if failure.verdict:
            return self.fail(invalid_usage(failure.verdict), {"verdict": failure.verdict})
        text = f"{what}: {failure}"
        if failure.timed_out:
            text += f" ({TIMEOUT_VARIABLE} is {self.timeout:g} s)"
        # Of "lost rank 2: its process has ended", what those hear whom this rank tells is the end.
        why = str(failure).partition(": ")[2] or str(failure)
        reason: Reason = {"culprit": failure.culprit, "why": why}
        return self.fail(HostFailure(Result.REMOTE_ERROR, text), reason)

    def poll(self, what: str) -> None:
        """Fail, and raise HostFailure, if a peer has failed or is gone."""
        transport = self._transport
        if self.failure is None and transport is not None:
            try:
                transport.poll()
            except TransportFailure as failure:
                self._fail_for(failure, what)
        if self.failure is not None:
            raise self.failure

    def fail(self, failure: HostFailure, reason: Reason | None = None) -> HostFailure:
        """Make the first failure stick, wake everybody who waits here, and tell the peers the reason by closing."""
        with self.mutex:
            first = self.failure is None
            if first:
                self.failure = failure
                last_error.text = failure.text
            transport = self._transport
            self.lock.notify_all()
        if first and transport is not None:
            transport.abort(reason or self.because(f"it failed: {failure.text}"), TransportFailure(failure.text))
            if self.shared is not None:
                self.shared.wake()
        self.rma.wake()
        return self.failure or failure

    def interrupt(self) -> None:
        """Ctrl-C ended an operation: nothing more can be done here, as the others are told."""
        after = "it cannot be used any more: abort() it and make another"
        failure = HostFailure(Result.SYSTEM_ERROR, f"{self._what()} was interrupted (Ctrl-C), and {after}")
        self.fail(failure, self.because("it was interrupted (Ctrl-C)"))

    def because(self, why: str) -> Reason:
        """What the peers are told of an end that this rank wanted."""
        return {"culprit": self.rank, "why": why}

    def forget(self) -> None:
        """Invalidate the handle."""
        _communicators.pop(self.handle, None)

    def destroy(self) -> None:
        """Forget the handle; connections close once everything issued has run, and the peers have done the same."""
        self.forget()
        self.flush()
        self.rma.close()
        if self._transport is not None and self.failure is None:
            self._transport.finalize()
            if self.shared is not None:
                self.shared.wake()
        self.failure = self.failure or invalid_usage("the communicator was destroyed")
        self._drop()

    def abort(self) -> None:
        """Forget the handle, close the connections now, wake an operation that is blocked in them."""
        self.forget()
        why = "it aborted the communicator" + (f", after {self.split_error}" if self.split_error else "")
        self.fail(invalid_usage("the communicator was aborted"), self.because(why))
        self.rma.close()
        self._drop()

    def _drop(self) -> None:
        """Let go of the connections and the memory; a thread that is still inside holds them until it leaves."""
        if self.shared is not None:
            self.shared.close()
        self._transport = self.shared = None
        self.activity.describe = str  # of the last operation, which refers to all this

    def after_fork(self) -> None:
        """In a forked child."""
        self.mutex = threading.RLock()
        self.lock = threading.Condition(self.mutex)
        self.failure = invalid_usage("the communicator was inherited through a fork, where it cannot work")
        if self._transport is not None:
            self._transport.close()
        if self.shared is not None:
            self.shared.after_fork()
        self._drop()
