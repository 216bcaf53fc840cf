"""Bytes between ranks: tagged messages over torch's ProcessGroupGloo.

Why point-to-point messages and not gloo's collectives: they measure 2 to 10 times faster here, and they carry a tag.
What gloo does when a message and the posted receive differ in size (torch 2.13): a longer message throws in gloo's own
thread, which is std::terminate of the process; a shorter one completes and leaves the rest of the buffer as it was.
Therefore the size (and, for collectives, the call) is hashed into the tag: calls that disagree never meet, they wait,
and `stall` finds out and says which two calls disagree.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..abi import Result
from .failure import HostFailure, TransportFailure
from .mailbox import FAREWELL, Mailbox

# A tag is a 31-bit number: [1 bit collective][20 bits hash of what is sent][10 bits sequence number].
# Operations in flight between two ranks differ in the sequence number, so a hash collision cannot mix them up.
_COLLECTIVE = 1 << 30
_ABORT_TAG = (1 << 31) - 1
_NEVER_TAG = (1 << 31) - 3
PUT_TAG = (1 << 31) - 4
PUT_DATA_TAG = (1 << 31) - 5
_SHUT = timedelta(milliseconds=1)
_EVER = timedelta(days=3650)
_JOIN_SECONDS = 2.0

# torch's type stubs leave out what this file is about: send, recv and the options.
_Gloo: Any = dist.ProcessGroupGloo

# A posted message and the peer at its other end.
Pending = tuple[int, dist.Work]


def message_tag(sequence: int, nbytes: int) -> int:
    """Tag of the `sequence`-th message from one rank to another."""
    return _hash20(nbytes, 0) << 10 | (sequence & 0x3FF)


def collective_call(count: int, arguments: int) -> int:
    """The part of a collective's tag that is the same in each of its rounds; `arguments` are all but the count."""
    return _COLLECTIVE | _hash20(count, arguments) << 10


def collective_tag(sequence: int, call: int) -> int:
    """Tag of the `sequence`-th round of exchanges."""
    return call | (sequence & 0x3FF)


def _hash20(a: int, b: int) -> int:
    # Fibonacci hashing: neighbouring sizes get different values, unlike with a checksum.
    return ((a * 0x9E3779B97F4A7C15 + b * 0xC2B2AE3D27D4EB4F) & (2**64 - 1)) >> 44


class Transport:
    """The connections of one communicator. `send` and `recv` post, `wait` completes; one thread at a time."""

    def __init__(self, store: dist.Store, rank: int, size: int, same_machine: bool, timeout: float) -> None:
        """Connect to all peers over `store`; blocks until all of them do the same.

        Args:
            same_machine: use 127.0.0.1, which works whatever the host name resolves to.
            timeout: seconds for connecting and for every later wait.
        """
        options = _Gloo._Options()
        options._devices = [_device(same_machine)]
        options._threads = 1
        options._timeout = timedelta(seconds=timeout)
        try:
            self._group: Any = _Gloo(store, rank, size, options)
        except Exception as error:
            raise HostFailure(
                Result.SYSTEM_ERROR, f"rank {rank} of {size} could not connect to its peers: {_gist(error)}"
            ) from error
        self._peers = [peer for peer in range(size) if peer != rank]
        self.limit(timeout)
        self._spare = torch.empty(1, dtype=torch.uint8)
        self.helpers: list[threading.Thread] = []  # threads that are inside `carry`; they end once this is closed
        self._boxes = {peer: Mailbox(self._group, peer) for peer in range(size) if peer != rank}

    def limit(self, timeout: float) -> None:
        """Seconds for every wait from now on."""
        self._limit = timedelta(seconds=timeout)

    def send(self, peer: int, data: Tensor, tag: int) -> Pending:
        try:
            return peer, self._group.send([data], peer, tag)
        except RuntimeError as error:
            raise _failure(peer, error) from error

    def recv(self, peer: int, data: Tensor, tag: int) -> Pending:
        try:
            return peer, self._group.recv([data], peer, tag)
        except RuntimeError as error:
            raise _failure(peer, error) from error

    def wait(self, works: Iterable[Pending]) -> None:
        limit, peer = self._limit, -1
        try:
            for peer, work in works:  # noqa: B007 (named in the failure)
                work.wait(limit)
        except RuntimeError as error:
            raise _failure(peer, error) from error

    def carry(self, post: Callable[[int, Tensor, int], Pending], peer: int, data: Tensor, tag: int) -> None:
        """`send` or `recv` of one message, from a thread of its own and however long it takes.

        A time-out would close all connections."""
        _, work = post(peer, data, tag)
        try:
            work.wait(_EVER)
        except RuntimeError as error:
            raise _failure(peer, error) from error

    @property
    def nbytes(self) -> int:
        """Memory that waits for messages."""
        return sum(box.nbytes for box in self._boxes.values())

    def exchange(
        self, sends: Sequence[tuple[int, list[Tensor]]], recvs: Sequence[tuple[int, list[Tensor]]], tag: int
    ) -> None:
        """Send to and receive from several peers at once; each pair is a peer and a list of one tensor.

        The lists are as gloo wants them, and this is one loop over few names, for the sake of small messages.
        """
        limit, group, peer = self._limit, self._group, -1
        try:
            sent = [(peer, group.send(data, peer, tag)) for peer, data in sends]
            received = [(peer, group.recv(data, peer, tag)) for peer, data in recvs]
            for peer, work in received:  # noqa: B007 (named in the failure)
                work.wait(limit)
            for peer, work in sent:  # noqa: B007
                work.wait(limit)
        except RuntimeError as error:
            raise _failure(peer, error) from error

    def mail(self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]], tag: int) -> None:
        """Like `exchange`, for messages of a collective that are at most `mailbox.PAYLOAD_BYTES` long."""
        limit, boxes, peer = self._limit, self._boxes, -1
        try:
            sent = [(peer, boxes[peer].send(tag, data.data_ptr(), data.nbytes)) for peer, data in sends]
            for peer, data in recvs:
                if not boxes[peer].receive(tag, data.data_ptr(), data.nbytes, limit):
                    self._wait_for_verdict(peer)
            for peer, work in sent:  # noqa: B007 (named in the failure)
                work.wait(limit)
        except RuntimeError as error:
            raise _failure(peer, error) from error

    def _wait_for_verdict(self, peer: int) -> None:
        """Calls disagree: wait as if the message never came, until `stall` closes the connections and says why."""
        self._group.recv([self._spare], peer, _NEVER_TAG).wait(self._limit)

    def part(self, timeout: float) -> None:
        """Exchange farewells, so that no connection closes while the peer may still read from it, then close.

        Closing a socket to which the peer still writes makes its kernel drop what it has not read yet.
        """
        limit, nothing = timedelta(seconds=timeout), torch.empty(1, dtype=torch.uint8)
        with contextlib.suppress(RuntimeError):  # a peer that is gone, or does not part for so long
            sent = [box.send(FAREWELL, nothing.data_ptr(), 0) for box in self._boxes.values()]
            for box in self._boxes.values():
                box.receive(FAREWELL, nothing.data_ptr(), 0, limit)
            for work in sent:
                work.wait(limit)
        if self.helpers:
            self.shut()  # the peers have sent all they will: wake who still waits for more
            for helper in self.helpers:
                helper.join(_JOIN_SECONDS)
        self._boxes.clear()
        self._group = None  # closes, in this thread: the interpreter must not exit in the middle of it

    def shut(self) -> None:
        """Close all connections at once, from any thread; whoever waits on them, here or there, gets an error.

        gloo closes every connection of a group when one wait on it times out, which is the one way to wake
        a thread that is blocked in another wait.
        """
        for peer in self._peers:
            try:
                self._group.recv([self._spare], peer, _ABORT_TAG).wait(_SHUT)
            except RuntimeError as error:
                if _failure(peer, error).timed_out:
                    return  # that was asked for; a connection that is closed already fails at once, and closes no other


def _device(same_machine: bool) -> object:
    if same_machine:
        return _Gloo.create_device(hostname="127.0.0.1")
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    return _Gloo.create_device(interface=interface) if interface else _Gloo.create_default_device()


def _failure(peer: int, error: RuntimeError) -> TransportFailure:
    text = _gist(error)
    return TransportFailure(f"connection to rank {peer}: {text}", timed_out=text.startswith("Timed out"))


def _gist(error: Exception) -> str:
    """First sentence of gloo's message, without the path of its source file."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0].partition(". This is typically")[0]
    return line.partition("] ")[2] if line.startswith("[") else line
