"""The record behind an ncclComm_t: its ranks, the order of its operations, and how it fails."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..bindings.abi import RedOp, Result
from . import algorithms, stall
from .connect import Channels, Connecting, Listener
from .connection import STATUS, Label, collective_tag, message_tag
from .failure import HostFailure, Mismatch, TransportFailure, invalid_argument, invalid_usage, last_error
from .link import link_of, sleep_until
from .memory import Scratch
from .operation import Kind, Operation
from .puts import Puts
from .reduction import PreMulSum
from .rendezvous import Place
from .transport import Transport

TIMEOUT_VARIABLE = "PYNCCL_HOST_TIMEOUT"

# What a rank that fails tells its peers: {"verdict": text} or {"culprit": rank, "why": text}.
Reason = dict[str, Any]

# Small operations keep scratch of their own size.
_KEPT_OPERATIONS = 512
_KEPT_BYTES = 8 << 10

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


def living() -> list[Comm]:
    return list(_communicators.values())


def abandon() -> None:
    """In a forked child: leave the connections to the parent, whose they are."""
    for comm in living():
        comm.abandon()
    _communicators.clear()


def seconds(variable: str, default: float) -> float:
    """A number of seconds from the environment."""
    text = os.environ.get(variable, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if value <= 0:
        raise invalid_argument(f"{variable}={text!r}: expected a number of seconds above 0")
    return value


def _why(text: str) -> str:
    """The reason in "lost rank 2: its process has ended", for those whom this rank tells."""
    return text.partition(": ")[2] or text


class Turn:
    """A place in the order of a communicator's operations, for a job that a group may keep for its end.

    Taken when the job is launched: a group that launches nothing must not leave a place that everybody waits for.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm, self._ticket = comm, -1

    def take(self) -> None:
        self._ticket = self._comm.ticket()

    def run(self, operation: Operation) -> None:
        self._comm.run(self._ticket, [operation])


class Comm:
    """One rank's end of a communicator.

    Operations execute in the order in which this rank issued them, whichever streams they are on: each takes a ticket
    when it is issued and runs when its number comes up.
    """

    def __init__(self, rank: int, size: int, device: int) -> None:
        self.handle = next(_handles)
        self.device = device
        self.link = link_of(device)
        self.timeout = seconds(TIMEOUT_VARIABLE, 600.0)
        self.scratch = Scratch()
        self.premul: dict[int, PreMulSum] = {}
        self.place: Place | None = None
        self.local = True  # all ranks are on this machine
        self.failure: HostFailure | None = None
        self.trouble = ""  # of a split, which is no failure of its parent
        self.born = False
        self.finalized = False
        self.suspended = False
        self.rma_signals = self.rma_contexts = 1
        self.registrations: dict[int, tuple[int, int]] = {}
        self.derived: Counter[str] = Counter()  # how often it shrank, by whom it excluded
        self._puts: Puts | None = None
        self.activity = stall.Activity()
        self._transport: Transport | None = None
        self._rounds = 0
        self._turn = threading.Condition()
        self._waiting = 0
        self._issued = self._served = 0
        self._operations: dict[tuple[Kind, int, int, int, int, int, int], Operation] = {}
        self.set_rank(rank, size)
        _communicators[self.handle] = self

    def set_rank(self, rank: int, size: int) -> None:
        """Say which rank of how many this is, once, before it connects."""
        self.rank, self.size = rank, size
        self.peers = [peer for peer in range(size) if peer != rank]
        self._sent, self._received = [0] * size, [0] * size

    @property
    def transport(self) -> Transport:
        if self._transport is None:
            raise self.failure or invalid_usage("the communicator is not connected (destroyed, or not yet initialised)")
        return self._transport

    @property
    def puts(self) -> Puts:
        """Its one-sided operations, from the first use on."""
        with self._turn:
            if self._puts is None:
                self._puts = Puts(self)
            return self._puts

    def connect(
        self,
        listener: Listener,
        endpoints: Sequence[str],
        timeout: float,
        name: str,
        parent: Comm | None = None,
        members: Sequence[int] = (),
    ) -> None:
        """Connect to the peers, which all do the same now.

        endpoints  where each rank listens, this one at `listener`
        name       of the C function, for messages
        members    the ranks in `parent`, whose failures end this too
        """
        names = [f"rank {rank}" for rank in members or range(self.size)]
        what = f"{name} on {names[self.rank]}" + (f" of {parent.size}" if parent else f" of {self.size}")
        check = (lambda: None) if parent is None else partial(parent.look, what)
        self.join(Connecting(listener, self.rank, endpoints, what, names, check).run(timeout))

    def join(self, channels: Mapping[int, Channels]) -> None:
        """Begin to use connections to all peers."""
        transport = Transport(self.rank, channels, self._on_status, self.timeout)
        with self._turn:
            self._transport, self.born = transport, True
        if self.failure is not None:  # aborted meanwhile
            self._shut(self.failure)

    # Labels

    def label(self, op: Operation) -> Label:
        """Label of the next round of exchanges of the collective `op`; every rank calls it once per round."""
        self._rounds += 1
        if self.activity.round == 0:
            self.activity.round = self._rounds
        return Label(collective_tag(self._rounds, op.call), self._rounds, op.text)

    @property
    def rounds(self) -> int:
        return self._rounds

    def message_label(self, op: Operation, sending: bool) -> Label:
        counters, peer = self._sent if sending else self._received, op.peer
        counters[peer] += 1
        self.activity.messages.append((sending, peer, counters[peer], op.nbytes))
        return Label(message_tag(counters[peer], op.nbytes), counters[peer], op.text)

    # Order

    def check_usable(self) -> None:
        if self.failure is not None:
            raise HostFailure(self.failure.code, f"the communicator failed before: {self.failure.text}")
        if not self.born:
            raise invalid_usage("the communicator is still being initialised; end the group that does so first")
        if self.finalized:
            raise invalid_usage("the communicator was finalized; it can only be destroyed")
        if self.suspended:
            raise invalid_usage("the communicator is suspended; call ncclCommResume first")

    def operation(
        self, name: str, kind: Kind, send: int, recv: int, count: int, dtype: int, op: int, peer: int
    ) -> Operation:
        """The call with these arguments, checked; the one of the last time if there was one."""
        key = (kind, send, recv, count, dtype, op, peer)
        if (known := self._operations.get(key)) is not None:
            return known
        fresh = Operation(name, kind, self, send, recv, count, dtype, op, peer)
        fresh.check()
        # The number of a pre-multiplied sum may come to mean another one; large operations gain nothing.
        if op <= RedOp.AVG and fresh.nbytes <= _KEPT_BYTES:
            if len(self._operations) >= _KEPT_OPERATIONS:
                self._operations.clear()
            self._operations[key] = fresh
        return fresh

    def ticket(self) -> int:
        with self._turn:
            self._issued += 1
            return self._issued - 1

    def run(self, ticket: int, ops: Sequence[Operation]) -> None:
        """Execute what was issued under `ticket`, when its turn has come. Raises HostFailure, which sticks."""
        try:
            if self._served != ticket or self.failure is not None:
                self._await(lambda: self._served == ticket)
            self._execute(ops)
        except HostFailure as failure:
            raise self.fail(failure) from failure.__cause__
        except (TransportFailure, Mismatch) as failure:
            raise self.fail(self._explain(failure), self._reason(failure)) from failure
        except KeyboardInterrupt:
            self.interrupt()
            raise
        except BaseException as error:
            lines = traceback.format_exception_only(type(error), error)
            self.fail(HostFailure(Result.INTERNAL_ERROR, f"{ops[0].describe()}: {lines[-1].strip()}"))
            raise
        finally:
            self._served += 1  # only the operation whose turn it is gets here, unless all of them fail
            if self._waiting:
                with self._turn:
                    self._turn.notify_all()

    def _await(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition`; raise the failure if there is one first."""
        with self._turn:
            self._waiting += 1
            try:
                self._turn.wait_for(lambda: condition() or self.failure is not None)
            finally:
                self._waiting -= 1
        if self.failure is not None:
            raise self.failure

    def _execute(self, ops: Sequence[Operation]) -> None:
        """Collectives one by one, then all sends and receives at once."""
        if len(ops) == 1:
            self._timed(ops, ops[0].run, ops[0].traffic)
            return
        messages = [op for op in ops if op.kind in algorithms.MESSAGES]
        for op in ops:
            if op.kind not in algorithms.MESSAGES:
                self._timed([op], op.run, op.traffic)
        if messages:
            exchange = partial(algorithms.point_to_point, self, messages)
            self._timed(messages, exchange, partial(algorithms.message_traffic, messages))

    def traffic(self, ops: Sequence[Operation]) -> list[tuple[int, float]]:
        """(steps, bytes on the wire) of what `_execute` runs one after the other."""
        messages = [op for op in ops if op.kind in algorithms.MESSAGES]
        rows = [op.traffic() for op in ops if op.kind not in algorithms.MESSAGES]
        return [*rows, algorithms.message_traffic(messages)] if messages else rows

    def _timed(
        self, ops: Sequence[Operation], run: Callable[[], None], traffic: Callable[[], tuple[int, float]]
    ) -> None:
        done_at = self.link.reserve(*traffic()) if self.link else 0.0
        self.activity.begin(ops)
        run()
        if done_at:
            sleep_until(done_at)

    @property
    def idle(self) -> bool:
        return self._served == self._issued and not (self._puts is not None and self._puts.busy)

    def flush(self) -> None:
        """Wait until everything issued so far has run, or the communicator has failed."""
        last = self._issued
        with contextlib.suppress(HostFailure):
            self._await(lambda: self._served >= last)
            if self._puts is not None:
                self._puts.flush()

    # Memory

    @property
    def dynamic_bytes(self) -> int:
        """Bytes that a suspend gives back."""
        return self.scratch.nbytes + sum(op.held for op in list(self._operations.values()))

    @property
    def static_bytes(self) -> int:
        return self._transport.nbytes if self._transport is not None else 0

    def suspend(self) -> None:
        """Give back what is not needed until `suspended` is taken back."""
        self.flush()
        self.suspended = True
        self._operations.clear()
        self.scratch.release()

    # Failure and end

    def _on_status(self, awaited: Sequence[int]) -> None:
        """Compare what this rank does with what the peers that wait have told; tell them, if this one has waited for
        `awaited` for a while."""
        mine = self.activity.status()
        if awaited:
            what = f"{self.activity.describe()} on rank {self.rank} of {self.size}"
            last_error.text = f"{what} still waits for ranks {list(awaited)}"
            if not self.activity.told:
                self.activity.told = True
                self.transport.tell(STATUS, mine)
        for peer, theirs in self.transport.statuses().items():
            if text := stall.disagreement(self.rank, mine, peer, theirs):
                raise TransportFailure("", verdict=text)

    def _explain(self, failure: TransportFailure | Mismatch) -> HostFailure:
        """The result code for a broken exchange, in a message that names the operation."""
        if self.failure is not None:  # it broke because of an abort
            return self.failure
        if verdict := self._verdict(failure):
            return invalid_usage(verdict)
        assert isinstance(failure, TransportFailure)
        text = f"{self.activity.describe()} on rank {self.rank} of {self.size}: {failure}"
        if failure.timed_out:
            text += f" ({TIMEOUT_VARIABLE} is {self.timeout:g} s)"
        return HostFailure(Result.REMOTE_ERROR, text + failure.detail)

    def _verdict(self, failure: TransportFailure | Mismatch) -> str:
        """How the calls of the ranks disagree, if that is what has failed."""
        if isinstance(failure, TransportFailure):
            return failure.verdict
        if failure.messages is not None:
            sent, expected, number = failure.messages
            return stall.other_sizes(failure.peer, self.rank, sent, expected, number)
        return stall.other_calls(self.rank, self.activity.describe(), failure.peer, failure.theirs)

    def _reason(self, failure: TransportFailure | Mismatch) -> Reason:
        """What the peers are told."""
        if verdict := self._verdict(failure):
            return {"verdict": verdict}
        assert isinstance(failure, TransportFailure)
        return {"culprit": failure.culprit, "why": _why(str(failure))}

    def look(self, what: str) -> None:
        """Fail, and raise HostFailure, if a peer has failed or is gone."""
        transport = self._transport
        if self.failure is None and transport is not None:
            try:
                transport.look()
            except TransportFailure as failure:
                verdict = failure.verdict
                text = f"{what}: {failure}"
                found = invalid_usage(verdict) if verdict else HostFailure(Result.REMOTE_ERROR, text)
                self.fail(found, self._reason(failure))
        if self.failure is not None:
            raise self.failure

    def fail(self, failure: HostFailure, reason: Reason | None = None) -> HostFailure:
        """Make the first failure stick, wake everybody who waits here, and tell the peers the reason by closing."""
        with self._turn:
            first = self.failure is None
            if first:
                self.failure = failure
                last_error.text = failure.text
            self._turn.notify_all()
        if first:
            self._shut(failure, reason)
        if self._puts is not None:
            self._puts.wake()
        return self.failure or failure

    def _shut(self, failure: HostFailure, reason: Reason | None = None) -> None:
        transport = self._transport
        if transport is not None:
            told = reason or {"culprit": self.rank, "why": f"it failed: {failure.text}"}
            transport.shut(told, TransportFailure(failure.text))

    def interrupt(self) -> None:
        """Ctrl-C ended an operation: nothing more can be done here, as the others are told."""
        text = f"{self.activity.describe()} on rank {self.rank} of {self.size} was interrupted"
        self.fail(HostFailure(Result.SYSTEM_ERROR, text), self.because("it was interrupted (Ctrl-C)"))

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
        if self._puts is not None:
            self._puts.close()
        if self._transport is not None and self.failure is None:
            self._transport.part()
        self.failure = self.failure or invalid_usage("the communicator was destroyed")
        self._transport = None
        self._operations.clear()

    def abandon(self) -> None:
        """In a forked child."""
        self._turn = threading.Condition()
        self.failure = invalid_usage("the communicator was inherited through a fork, where it cannot work")
        if self._transport is not None:
            self._transport.close()
        self._transport = None

    def abort(self) -> None:
        """Forget the handle, close the connections now, wake an operation that is blocked in them."""
        self.forget()
        why = "it aborted the communicator" + (f", after {self.trouble}" if self.trouble else "")
        self.fail(invalid_usage("the communicator was aborted"), self.because(why))
        if self._puts is not None:
            self._puts.close()
        self._transport = None
