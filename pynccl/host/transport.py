"""Bytes between ranks: messages in order over a connection per peer, and how a wait for them ends.

Why not gloo's ProcessGroup: it has no wait that can be left. When a peer dies in the middle of a large message, gloo
forgets whoever waits for it (Pair::signalException passes over what is half sent or half received), so a survivor would
stand in it until its time-out; Ctrl-C is not heard; and a time-out closes every connection. Here the thread that waits
moves the bytes itself, and looks up for signals, failures and its deadline.

Both ends of a connection post their messages in the same order. Each carries a header that says which call it belongs
to, so calls that disagree are found out by the first of them that meet, before any data is taken for another's.
Beside the data runs a control connection, on which ranks say how they end ("finalize", "fail") and, once they have
waited for a while, what they wait for ("status"): so the one rank that is gone is named by all, and not who noticed it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .connect import Channels
from .connection import FAIL, FINALIZE, HEAD_BYTES, STATUS, Connection, Form, Label, Transfer
from .failure import TransportFailure, invalid_argument, last_error
from .watchdog import Activity, culprit_of, disagreement, mismatch, timed_out

_TICK_SECONDS = 0.2
_STALL_SECONDS = 0.5
_GRACE_SECONDS = 0.4  # for what a peer sent before its end to complete the operation all the same
_EXPLAIN_SECONDS = 0.4
_NOTHING = memoryview(b"")


class Transport:
    """The connections of one communicator. `send` and `recv` post, `wait` completes; one thread at a time."""

    def __init__(self, rank: int, channels: Mapping[int, Channels], activity: Activity, timeout: float) -> None:
        """activity: what this rank does, for messages. timeout: seconds for every wait."""
        self._rank = rank
        self._connections = {peer: Connection(peer, ends) for peer, ends in sorted(channels.items())}
        self._activity = activity
        self.limit = timeout
        self._broken: TransportFailure | None = None
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._by_fd: dict[int, tuple[Connection, bool]] = {}
        self._control_lock = threading.RLock()
        limit = struct.pack("ll", int(min(timeout, 1e9)), int(timeout % 1 * 1e6))  # a timeval
        for connection in self._connections.values():
            edges = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
            for sock, is_data in ((connection.data, True), (connection.control, False)):
                sock.setblocking(False)
                self._by_fd[sock.fileno()] = connection, is_data
                self._epoll.register(sock.fileno(), edges if is_data else edges & ~select.EPOLLOUT)
            connection.rma.setblocking(True)
            connection.rma.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    @property
    def peers(self) -> Sequence[int]:
        return list(self._connections)

    @property
    def nbytes(self) -> int:
        """Memory of its own: the kernel's buffers of its connections, as they are at first."""
        sockets = (sock for connection in self._connections.values() for sock in (connection.data, connection.control))
        return sum(sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) for sock in sockets)

    # Data

    def send(self, peer: int, data: memoryview, label: Label) -> Transfer:
        connection = self._connections[peer]
        transfer = Transfer(connection, label.head(len(data)) + label.text, data)
        connection.sends.append(transfer)
        if len(connection.sends) == 1:
            self._push(connection)
        return transfer

    def recv(self, peer: int, data: memoryview, label: Label, answer: Label | None = None) -> Transfer:
        """answer: what to send back, without data, once the message is here."""
        connection = self._connections[peer]
        transfer = Transfer(connection, bytearray(HEAD_BYTES), data)
        transfer.then = answer
        # The two ends of a message differ in their texts, "send" and "recv"; those of a collective in nothing.
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

    def _push(self, connection: Connection) -> None:
        """Send what the connection takes now."""
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
            raise self._broken_off(connection, error) from None

    def _pull(self, connection: Connection) -> None:
        """Receive what has come for what was posted."""
        recvs = connection.recvs
        try:
            while recvs:
                first = recvs[0]
                if len(first.parts) == 1:
                    moved = connection.data.recv_into(first.parts[0])
                else:
                    moved = connection.data.recvmsg_into(first.parts)[0]
                if not moved:
                    raise self._loss(connection)
                begun, finished = first.got < HEAD_BYTES, first.advance(moved)
                if begun and first.got >= HEAD_BYTES and not first.head.startswith(first.expected):
                    call = self._activity.describe()
                    raise mismatch(self._rank, call, connection.peer, bytes(first.head), first.expected)
                if finished:
                    recvs.popleft()
                    if first.then is not None:
                        first.answer = self.send(connection.peer, _NOTHING, first.then)
        except BlockingIOError:
            pass
        except OSError as error:
            raise self._broken_off(connection, error) from None

    def wait(self, transfers: Iterable[Transfer]) -> None:
        """Until all of them are done. Raises TransportFailure, also for the failure of a peer that has no part in them:
        whoever has one may wait for it."""
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
                    self.look({transfer.connection.peer for transfer in left}, started, compare=moved == before)

    def look(self, peers: Iterable[int], started: float, *, compare: bool, all_is_here: bool = False) -> None:
        """What a rank that waits for `peers` does now and then: raise TransportFailure where it waits in vain, and tell
        them what it waits for.

        compare: its call with those of `peers`. all_is_here: nothing is under way any more from a peer that has ended
        """
        now = time.monotonic()
        awaited = [self._connections[peer] for peer in sorted(peers)]
        for connection in awaited:
            if all_is_here and (connection.lost or connection.finalized):
                raise self._loss(connection)
        self._check_peers(_GRACE_SECONDS)
        if now - started > self.limit:
            raise timed_out(self._connections.values(), awaited)
        if now - started > _STALL_SECONDS:
            self._tell_what_is_awaited([connection.peer for connection in awaited])
        statuses = {connection.peer: connection.status for connection in awaited} if compare else {}
        for peer, status in statuses.items():
            if status is not None and (failure := disagreement(self._rank, self._activity, peer, status)):
                raise failure

    def hear(self) -> None:
        """Read what the peers say of themselves."""
        with self._control_lock:
            for connection in self._connections.values():
                connection.read_control()

    @property
    def broken(self) -> TransportFailure | None:
        """Why nobody may wait here any longer."""
        return self._broken

    @property
    def has_lost(self) -> bool:
        return any(connection.lost for connection in self._connections.values())

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
        with self._control_lock:
            connection.read_control()

    # What peers say of themselves

    def _tell_what_is_awaited(self, ranks: Sequence[int]) -> None:
        """Say what this rank does, once, in `ncclGetLastError` and to all peers."""
        if self._activity.told:
            return
        self._activity.told = True
        what = f"{self._activity.describe()} on rank {self._rank} of {len(self._connections) + 1}"
        last_error.text = f"{what} still waits for ranks {list(ranks)}"
        with self._control_lock:
            for connection in self._connections.values():
                connection.send_control([STATUS, self._activity.status(ranks)])

    def poll(self) -> None:
        """Raise TransportFailure if a peer has failed or is gone. From any thread."""
        self.hear()
        self._check_peers(0.0)

    def _check_peers(self, grace: float) -> None:
        now = time.monotonic()
        for connection in self._connections.values():
            if connection.outbox:
                with self._control_lock:
                    connection.flush_control()
            if connection.lost and now - connection.ended_at >= grace:
                raise culprit_of(self._rank, list(self._connections.values()))

    def _broken_off(self, connection: Connection, error: OSError) -> Exception:
        if error.errno == errno.EFAULT:
            return invalid_argument(
                "a buffer of the call is no memory of this process (any more): keep it until its stream has passed the "
                "operation"
            )
        return self._loss(connection)

    def _loss(self, connection: Connection) -> TransportFailure:
        """Why the data connection to a peer is closed: what it, or another one, says of it."""
        deadline = time.monotonic() + _EXPLAIN_SECONDS
        while True:
            self.hear()
            if self._broken is not None:
                return self._broken
            if connection.ended_at or connection.failure is not None or time.monotonic() > deadline:
                break
            heard = select.poll()  # which unlike select.select takes every descriptor
            heard.register(connection.control, select.POLLIN)
            heard.poll(20)
        if connection.finalized:
            text = f"lost rank {connection.peer}: it has destroyed the communicator, or left the program, before this"
            return TransportFailure(text, culprit=connection.peer)
        if not connection.lost:
            connection.end("it closed the connection")
        return culprit_of(self._rank, list(self._connections.values()))

    # One-sided: blocking; received by threads of their own, however long it takes

    def rma_send(self, peer: int, data: bytes) -> None:
        connection = self._connections[peer]
        try:
            connection.rma.sendall(data)
        except BlockingIOError as error:
            why = f"rank {peer} reads nothing, frozen or late"
            raise TransportFailure(why, timed_out=True, culprit=peer) from error
        except OSError as error:
            raise self._loss(connection) from error

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
        """Say that all is in order and close; what was sent still arrives. Nobody may be waiting here."""
        with self._control_lock:
            for connection in self._connections.values():
                connection.send_control([FINALIZE, None])
                connection.read_control()  # closing over what was not read would cut off what was not received
                for sock in (connection.data, connection.control, connection.rma):
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_WR)
            self._epoll.close()
            for connection in self._connections.values():
                connection.data.close()
                connection.control.close()
        # The rma connections are closed by the threads that read them, when the peer has finalized too: see `rma`.

    def abort(self, failure: Mapping[str, Any], broken: TransportFailure) -> None:
        """Close all connections at once, from any thread, telling the peers why; wake who waits here."""
        self._broken = self._broken or broken
        with self._control_lock:
            for connection in self._connections.values():
                connection.send_control([FAIL, dict(failure)])
                for sock, how in (
                    (connection.control, socket.SHUT_WR),
                    (connection.data, socket.SHUT_RDWR),
                    (connection.rma, socket.SHUT_RDWR),
                ):
                    with contextlib.suppress(OSError):
                        sock.shutdown(how)
        with contextlib.suppress(OSError, ValueError):
            os.eventfd_write(self._wake, 1)

    def end_rma(self) -> None:
        """Wake the threads that read the rma connections: nothing more is wanted."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.rma.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this process's ends without a word: once nobody uses them any more, or in a forked child, since the
        parent goes on using its own."""
        self._epoll.close()
        for connection in self._connections.values():
            for sock in (connection.data, connection.control, connection.rma):
                sock.close()

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.close(self._wake)
            self.close()
