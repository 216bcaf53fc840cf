"""The socket transport: ordered messages over one connection per peer, with timeouts and failure detection.

It does not use gloo's ProcessGroup, because gloo's waits cannot be interrupted. When a peer dies in the middle of a
large message, Pair::signalException skips half-sent and half-received messages, so a survivor waits until its timeout;
Ctrl-C has no effect; and a timeout closes every connection. Here the waiting thread moves the bytes itself and checks
for signals, failures and its deadline.

Both ends of a connection post their messages in the same order. Each message has a header that identifies its call, so
mismatched calls are detected at their first message, before any data is delivered to the wrong call. A separate control
connection carries "finalize", "fail" and, from ranks that have waited for a while, "status" (what they wait for), so
every rank names the rank that is gone, and not the rank that noticed it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..bindings.resource import destructor
from .connect import Channels
from .connection import FAIL, FINALIZE, HEAD_BYTES, STATUS, TEXT_BYTES, Branches, Connection, Form, Label, Transfer
from .failure import TransportFailure, by_signal, invalid_argument, last_error
from .watchdog import Activity, culprit_of, disagreement, mismatch, timed_out

_TICK_SECONDS = 0.2
_STALL_SECONDS = 0.5
_GRACE_SECONDS = 0.4  # data that a peer sent before it failed may still complete the operation
_REASON_SECONDS = 0.4
_NOTHING = memoryview(b"")
_ROW_BYTES = 2048


class Transport:
    """The connections of one communicator. `send` and `recv` post messages, `wait` completes them. Use it from one
    thread at a time."""

    def __init__(self, rank: int, channels: Mapping[int, Channels], activity: Activity, timeout: float) -> None:
        """activity: the current call of this rank, for error messages. timeout: in seconds, for every wait."""
        self.rank = rank
        self._connections = {peer: Connection(peer, ends) for peer, ends in sorted(channels.items())}
        self.branches = Branches()
        self.is_trunk = False  # other communicators may use its control connections, even once it has failed
        self._activity = activity
        self.timeout = timeout
        self._broken: TransportFailure | None = None
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._by_fd: dict[int, tuple[Connection, bool]] = {}
        self.control_lock = threading.RLock()
        for connection in self._connections.values():
            edges = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
            for sock, is_data in ((connection.data, True), (connection.control, False)):
                sock.setblocking(False)
                self._by_fd[sock.fileno()] = connection, is_data
                self._epoll.register(sock.fileno(), edges if is_data else edges & ~select.EPOLLOUT)
            connection.branches = self.branches
            self._limit_rma(connection.rma)

    def _limit_rma(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        limit = struct.pack("ll", int(min(self.timeout, 1e9)), int(self.timeout % 1 * 1e6))  # a timeval
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    @property
    def peers(self) -> Sequence[int]:
        return list(self._connections)

    @property
    def nbytes(self) -> int:
        """Initial size of the kernel's receive buffers of its connections."""
        sockets = (sock for connection in self._connections.values() for sock in (connection.data, connection.control))
        return sum(sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) for sock in sockets)

    def connection(self, peer: int) -> Connection:
        return self._connections[peer]

    # Data

    def send(self, peer: int, data: memoryview, label: Label) -> Transfer:
        connection = self._connections[peer]
        transfer = Transfer(connection, label.head(len(data)) + label.text, data)
        connection.sends.append(transfer)
        if len(connection.sends) == 1:
            self._push(connection)
        return transfer

    def recv(self, peer: int, data: memoryview, label: Label, ack_label: Label | None = None) -> Transfer:
        """ack_label: label of the empty acknowledgement that is sent back once the message has arrived."""
        connection = self._connections[peer]
        transfer = Transfer(connection, bytearray(HEAD_BYTES), data)
        transfer.ack_label = ack_label
        # The texts of a send and its recv differ; all ranks of a collective have the same text.
        transfer.expected = label.head(len(data))
        if label.form is Form.COLLECTIVE:
            transfer.expected += label.text
        connection.recvs.append(transfer)
        return transfer

    def exchange(
        self, sends: Sequence[tuple[int, memoryview]], recvs: Sequence[tuple[int, memoryview]], label: Label
    ) -> None:
        """Send to and receive from several peers at once."""
        transfers = [self.send(peer, data, label) for peer, data in sends]
        transfers += [self.recv(peer, data, label) for peer, data in recvs]
        self.wait(transfers)

    def exchange_rows(self, row: dict[str, Any], number: int) -> list[dict[str, Any]]:
        """Exchange rows with all peers, before the first operation; return the rows of all ranks."""
        mine = json.dumps(row).encode().ljust(_ROW_BYTES)
        assert len(mine) == _ROW_BYTES
        text = b"transport selection".ljust(TEXT_BYTES, b"\0")
        label = Label(Form.COLLECTIVE, number, text)
        theirs = {peer: bytearray(_ROW_BYTES) for peer in self.peers}
        sends = [(peer, memoryview(mine)) for peer in theirs]
        self.exchange(sends, [(peer, memoryview(data)) for peer, data in theirs.items()], label)
        rows = {peer: json.loads(data) for peer, data in theirs.items()}
        return [rows.get(peer, row) for peer in range(len(theirs) + 1)]

    def _push(self, connection: Connection) -> None:
        """Send as much as the socket accepts without blocking."""
        sends = connection.sends
        try:
            while sends:
                first = sends[0]
                if not first.advance(connection.data.sendmsg(first.parts)):
                    continue
                sends.popleft()
        except BlockingIOError:
            pass
        except OSError as error:
            raise self._io_failure(connection, error) from None

    def _pull(self, connection: Connection) -> None:
        """Receive the data that has arrived for the posted messages."""
        recvs = connection.recvs
        try:
            while recvs:
                first = recvs[0]
                if len(first.parts) == 1:
                    moved = connection.data.recv_into(first.parts[0])
                else:
                    moved = connection.data.recvmsg_into(first.parts)[0]
                if not moved:
                    raise self._peer_failure(connection)
                begun, finished = first.got < HEAD_BYTES, first.advance(moved)
                if begun and first.got >= HEAD_BYTES and not first.head.startswith(first.expected):
                    call = self._activity.describe()
                    raise mismatch(self.rank, call, connection.peer, bytes(first.head), first.expected)
                if finished:
                    recvs.popleft()
                    if first.ack_label is not None:
                        first.ack = self.send(connection.peer, _NOTHING, first.ack_label)
        except BlockingIOError:
            pass
        except OSError as error:
            raise self._io_failure(connection, error) from None

    def wait(self, transfers: Iterable[Transfer]) -> None:
        """Block until all `transfers` are done.

        Raises TransportFailure if any peer fails, even one without a transfer here: the other ranks may wait for it.
        """
        pending = [transfer for transfer in transfers if not transfer.done]
        for connection in {transfer.connection for transfer in pending}:
            self._pull(connection)
        started = next_tick = 0.0
        moved = -1
        while pending := [transfer for transfer in pending if not transfer.done]:
            if self._broken is not None:
                raise self._broken
            for fd, _ in self._epoll.poll(_TICK_SECONDS):
                self._serve(fd)
            now = time.monotonic()
            if not started:
                started, next_tick = now, now + _TICK_SECONDS
            elif now >= next_tick:
                next_tick = now + _TICK_SECONDS
                left = [transfer for transfer in pending if not transfer.done]
                before, moved = moved, sum(transfer.got for transfer in left)
                if left:
                    self.check_wait(
                        {transfer.connection.peer for transfer in left}, started, compare_calls=moved == before
                    )

    def check_wait(self, peers: Iterable[int], started: float, *, compare_calls: bool, drained: bool = False) -> None:
        """Raise TransportFailure if waiting for `peers` cannot succeed; after a while, send them this rank's status.

        compare_calls: also compare this rank's call with the calls of `peers`. drained: all data has been received that
        peers sent before they failed or finalized.
        """
        now = time.monotonic()
        awaited = [self._connections[peer] for peer in sorted(peers)]
        for connection in awaited:
            if drained and (connection.peer_failed or connection.finalized):
                raise self._peer_failure(connection)
        self._check_peers(_GRACE_SECONDS)
        if now - started > self.timeout:
            raise timed_out(self._connections.values(), awaited)
        if now - started > _STALL_SECONDS:
            self._broadcast_status([connection.peer for connection in awaited])
        statuses = {connection.peer: connection.status for connection in awaited} if compare_calls else {}
        for peer, status in statuses.items():
            if status is not None and (failure := disagreement(self.rank, self._activity, peer, status)):
                raise failure

    def read_control(self) -> None:
        """Read the control messages of all peers."""
        with self.control_lock:
            for connection in self._connections.values():
                connection.read_control()

    @property
    def broken(self) -> TransportFailure | None:
        """The failure that ends all waits; None while the transport works."""
        return self._broken

    @property
    def any_peer_failed(self) -> bool:
        return any(connection.peer_failed for connection in self._connections.values())

    def _serve(self, fd: int) -> None:
        if fd == self._wake:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(fd)
            return
        connection, is_data = self._by_fd[fd]
        if is_data:
            if connection.sends:
                self._push(connection)
            self._pull(connection)
            return
        with self.control_lock:
            connection.read_control()

    # Control messages

    def _broadcast_status(self, ranks: Sequence[int]) -> None:
        """Report once per call what this rank waits for: in `ncclGetLastError`, and to all peers."""
        if self._activity.status_sent:
            return
        self._activity.status_sent = True
        call = f"{self._activity.describe()} on rank {self.rank} of {len(self._connections) + 1}"
        last_error.text = f"{call} still waits for ranks {list(ranks)}"
        with self.control_lock:
            for connection in self._connections.values():
                connection.send_control([STATUS, self._activity.status(ranks, connection.peer)])

    def poll(self) -> None:
        """Raise TransportFailure if a peer has failed or its process has exited. Callable from any thread."""
        self.read_control()
        self._check_peers(0.0)

    def lost(self, ranks: Iterable[int]) -> str:
        """Return which of these ranks has ended, and why; one that failed may live. "": none. From any thread."""
        self.read_control()
        for connection in (self._connections[rank] for rank in ranks if rank != self.rank):
            if connection.closed:
                return f"lost rank {connection.peer}: {connection.closed}"
        return ""

    def _check_peers(self, grace: float) -> None:
        now = time.monotonic()
        for connection in self._connections.values():
            if connection.outbox:
                with self.control_lock:
                    connection.flush_control()
            if connection.peer_failed and now - connection.ended_at >= grace:
                raise culprit_of(self.rank, list(self._connections.values()))

    def _io_failure(self, connection: Connection, error: OSError) -> Exception:
        if by_signal(error):
            return error
        if error.errno == errno.EFAULT:
            return invalid_argument(
                "a buffer of the call is not valid memory of this process; keep buffers alive until their stream has "
                "completed the operation"
            )
        return self._peer_failure(connection)

    def _peer_failure(self, connection: Connection) -> TransportFailure:
        """Return why the data connection to a peer is closed, from the control messages of all peers."""
        deadline = time.monotonic() + _REASON_SECONDS
        while True:
            self.read_control()
            if self._broken is not None:
                return self._broken
            if connection.ended_at or connection.failure is not None or time.monotonic() > deadline:
                break
            poller = select.poll()  # select.select rejects descriptors above 1023
            poller.register(connection.control, select.POLLIN)
            poller.poll(20)
        if connection.finalized:
            text = f"lost rank {connection.peer}: it has destroyed the communicator or exited before this operation"
            return TransportFailure(text, culprit=connection.peer)
        if not connection.peer_failed:
            connection.end("it closed the connection")
        return culprit_of(self.rank, list(self._connections.values()))

    # One-sided operations: blocking; separate threads receive, without a timeout

    def rma_send(self, peer: int, data: bytes) -> None:
        connection = self._connections[peer]
        try:
            connection.rma.sendall(data)
        except BlockingIOError as error:
            why = f"rank {peer} does not read its connection (frozen or late)"
            raise TransportFailure(why, timed_out=True, culprit=peer) from error
        except OSError as error:
            raise self._io_failure(connection, error) from error

    def rma_recv(self, peer: int, data: memoryview) -> None:
        sock, why = self._connections[peer].rma, "closed by peer"
        try:
            while data and (moved := sock.recv_into(data)):
                data = data[moved:]
        except OSError as error:
            why = error.strerror or "closed"
        if data:
            raise TransportFailure(f"connection to rank {peer}: {why}", culprit=peer)

    # End

    def finalize(self) -> None:
        """Announce a normal end and close. Data already sent still arrives. No thread may be in `wait`."""
        with self.control_lock:
            for connection in self._connections.values():
                connection.send_control([FINALIZE, None])
                connection.read_control()  # closing with unread data would reset the connection: data loss
                for sock in (connection.data, connection.control, connection.rma):
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_WR)
            self._epoll.close()
            for connection in self._connections.values():
                connection.data.close()
                connection.control.close()
        # The threads that read the rma connections close them when the peer has finalized too: see `rma`.

    def abort(self, failure: Mapping[str, Any], broken: TransportFailure) -> None:
        """Send `failure` to the peers, close all connections and wake blocked threads. Callable from any thread."""
        self._broken = self._broken or broken
        with self.control_lock:
            for connection in self._connections.values():
                connection.send_control([FAIL, dict(failure)])
                ends = [(connection.data, socket.SHUT_RDWR), (connection.rma, socket.SHUT_RDWR)]
                if not self.is_trunk:  # else others still use it
                    ends.append((connection.control, socket.SHUT_WR))
                for sock, how in ends:
                    with contextlib.suppress(OSError):
                        sock.shutdown(how)
        with contextlib.suppress(OSError, ValueError):
            os.eventfd_write(self._wake, 1)

    def end_rma(self) -> None:
        """Shut down the rma connections, which ends the threads that read them."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.rma.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this process's descriptors without notifying the peers: at the end, or in a forked child, whose parent
        keeps using the connections."""
        self._epoll.close()
        for connection in self._connections.values():
            for sock in (connection.data, connection.control, connection.rma):
                sock.close()

    @destructor
    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.close(self._wake)
            self.close()
