"""Establish the connections between the ranks of one communicator.

Every rank listens, publishes its endpoint, connects to the lower ranks, and then accepts the higher ranks. This order
has no deadlock. A connection is accepted only if it knows the listener's token, which only the ranks have (see
`admission`); all others are closed. A rank retries if the listener dropped its connection before the handshake.
"""

from __future__ import annotations

import contextlib
import json
import resource
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..admission import HANDSHAKE_SECONDS, Acceptor, ClientHandshake, listen
from ..bindings.abi import Result
from .failure import HostFailure, exiting, out_of_descriptors
from .interfaces import VARIABLES, local_addresses, node_id

ENDPOINT_BYTES = 496  # size of a serialized endpoint

_DIAL_SECONDS = 2.0
_TICK_SECONDS = 0.2
_RETRY_SECONDS = 0.05
_PROBE_SECONDS = 1.0
_MAX_ADDRESSES = 4
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class Channels(NamedTuple):
    """The three connections to a peer."""

    data: socket.socket  # collectives, sends and receives
    control: socket.socket  # the status of the ranks
    rma: socket.socket  # one-sided writes


_CHANNELS = range(len(Channels._fields))

Key = tuple[int, int]  # peer, channel


class Endpoint(NamedTuple):
    """Where a rank listens."""

    node_id: str
    hosts: list[str]
    port: int
    token: str


class Listener:
    """The listening socket of this rank, open until all higher ranks have connected."""

    def __init__(self, local: bool) -> None:
        """local: all ranks are on this node."""
        _raise_files_limit()
        self.sock = listen(local)
        self.token = secrets.token_bytes(16)
        self._hosts = [] if local else local_addresses()[:_MAX_ADDRESSES]

    @property
    def endpoint(self) -> str:
        """Serialize an `Endpoint` in at most ENDPOINT_BYTES."""
        mine = Endpoint(node_id(), self._hosts, self.sock.getsockname()[1], self.token.hex())
        return json.dumps(mine)

    def close(self) -> None:
        self.sock.close()


def _raise_files_limit() -> None:
    """Raise the limit of open files, as NCCL does: many ranks need more descriptors than most soft limits allow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def read_endpoint(text: str) -> Endpoint:
    return Endpoint(*json.loads(text))


def pairs_in_process(size: int) -> list[dict[int, Channels]]:
    """Return the connections of each rank to the others, when all ranks are in this process."""
    channels: list[dict[int, Channels]] = [{} for _ in range(size)]
    for low in range(size):
        for high in range(low + 1, size):
            ends = [socket.socketpair() for _ in _CHANNELS]
            channels[low][high] = Channels(*(mine for mine, _ in ends))
            channels[high][low] = Channels(*(theirs for _, theirs in ends))
    return channels


class Connecting:
    """The connection setup of one rank with all of its peers."""

    def __init__(
        self,
        listener: Listener,
        rank: int,
        endpoints: Sequence[str],
        call: str,
        names: Sequence[str],
        check: Callable[[], None],
    ) -> None:
        """names: of the ranks, for error messages. check: raises HostFailure if waiting is pointless."""
        self._listener, self._rank, self._call, self._names, self._check = listener, rank, call, names, check
        self._endpoints = [read_endpoint(text) for text in endpoints]
        self._connected: dict[Key, socket.socket] = {}
        self._missing = {(peer, c) for peer in range(rank + 1, len(endpoints)) for c in _CHANNELS}
        self._probe_at = time.monotonic() + _PROBE_SECONDS
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(listener.sock, self._selector, listener.token, self._admit)

    def run(self, timeout: float) -> dict[int, Channels]:
        """Return {peer: connections}. Raises HostFailure(ncclRemoteError) if a rank has exited, and at the deadline."""
        deadline = time.monotonic() + timeout
        try:
            for peer in range(self._rank):
                for channel in _CHANNELS:
                    self._connected[peer, channel] = self._dial(peer, channel, deadline, timeout)
            while self._missing:
                self._serve(_TICK_SECONDS)
                self._acceptor.drop()
                self._probe_missing()
                self._check_deadline({peer for peer, _ in self._missing}, deadline, timeout)
        except BaseException:
            for sock in self._connected.values():
                sock.close()
            raise
        finally:
            self._acceptor.drop(0, 0.0)
            self._selector.close()
            self._listener.close()
        for sock in self._connected.values():
            self._configure(sock)
        peers = [peer for peer in range(len(self._endpoints)) if peer != self._rank]
        return {peer: Channels(*(self._connected[peer, c] for c in _CHANNELS)) for peer in peers}

    def _dial(self, peer: int, channel: int, deadline: float, timeout: float) -> socket.socket:
        """Connect to a peer and complete the handshake, which the peer may delay while it connects itself."""
        while True:
            sock = self._connect(peer, deadline)
            try:
                sock.settimeout(_TICK_SECONDS)
                caller = ClientHandshake(sock, bytes.fromhex(self._endpoints[peer].token), (self._rank, channel))
                while not caller.step():
                    self._check_deadline({peer}, deadline, timeout)
                return sock
            except OSError:  # dropped by the listener, or the peer has exited, which the next attempt detects
                sock.close()
            except BaseException:
                sock.close()
                raise
            self._check_deadline({peer}, deadline, timeout)
            time.sleep(_RETRY_SECONDS)

    def _hosts(self, peer: int) -> list[str]:
        target = self._endpoints[peer]
        return ["127.0.0.1"] if target.node_id == node_id() else target.hosts

    def _connect(self, peer: int, deadline: float) -> socket.socket:
        target = self._endpoints[peer]
        while True:
            reasons, silent = [], False
            for host in self._hosts(peer):
                try:
                    left = max(min(_DIAL_SECONDS, deadline - time.monotonic()), 0.001)
                    sock = socket.create_connection((host, target.port), timeout=left)
                except OSError as error:
                    if out_of_descriptors(error):
                        raise
                    reasons.append(f"{host}: {error}")
                    silent |= isinstance(error, TimeoutError)  # its backlog is full, or no route to this address
                else:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    return sock
            self._check()
            if not silent or time.monotonic() > deadline or exiting.is_set():
                break
        why = "; ".join(reasons) or f"it has no address; set {VARIABLES[0]} on its node"
        raise HostFailure(
            Result.REMOTE_ERROR,
            f"{self._call}: cannot reach {self._names[peer]} at port {target.port} ({why}): its process has ended or "
            f"failed{self._network(target)}",
        )

    @staticmethod
    def _network(target: Endpoint) -> str:
        if target.node_id == node_id():
            return "; look for its first error"
        return f", or the network blocks connections between the nodes; set {VARIABLES[0]} to the interface to use"

    def _serve(self, timeout: float) -> None:
        """Handle incoming connections and handshakes for up to `timeout` seconds."""
        for ready, _ in self._selector.select(timeout):
            self._acceptor.handle(ready.fileobj)  # type: ignore[arg-type]

    def _admit(self, sock: socket.socket, caller_id: Key) -> None:
        """Accept the connection of a peer."""
        rank, channel = caller_id
        if not self._rank < rank < len(self._endpoints) or channel not in _CHANNELS:
            sock.close()
            return
        if (earlier := self._connected.pop((rank, channel), None)) is not None:
            earlier.close()
        self._connected[rank, channel] = sock
        self._missing.discard((rank, channel))

    def _probe_missing(self) -> None:
        """Raise HostFailure if a rank that has not connected yet no longer listens: its process has exited."""
        if time.monotonic() < self._probe_at:
            return
        self._probe_at = time.monotonic() + _PROBE_SECONDS
        for peer in sorted({peer for peer, _ in self._missing}):
            if self._port_closed(peer):
                self._serve(0)  # it may have connected just before
                self._acceptor.drop(0, HANDSHAKE_SECONDS)
                if any(awaited == peer for awaited, _ in self._missing):
                    why = "its port is closed: its process has ended or failed"
                    raise HostFailure(Result.REMOTE_ERROR, f"{self._call}: lost {self._names[peer]}: {why}")

    def _port_closed(self, peer: int) -> bool:
        """Return whether the peer's port is closed. No response may mean a slow network, so it counts as open."""
        for host in self._hosts(peer):
            try:
                socket.create_connection((host, self._endpoints[peer].port), timeout=_DIAL_SECONDS).close()
            except ConnectionRefusedError:
                continue
            except OSError as error:
                if out_of_descriptors(error):  # then nothing can be accepted either
                    raise
                return False
            return False
        return True

    def _check_deadline(self, missing: set[int], deadline: float, timeout: float) -> None:
        self._check()
        late = time.monotonic() > deadline
        if missing and (late or exiting.is_set()):
            names = ", ".join(self._names[peer] for peer in sorted(missing))
            why = f"within {timeout:g} s (frozen or late)" if late else "before the process exits"
            raise HostFailure(Result.REMOTE_ERROR, f"{self._call}: {names} did not connect {why}")

    @staticmethod
    def _configure(sock: socket.socket) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # already closed, which the first wait reports
            if not sock.getpeername()[0].endswith("127.0.0.1"):  # detect a node that lost power
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, seconds in _KEEPALIVE.items():
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
