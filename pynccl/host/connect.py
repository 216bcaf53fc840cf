"""The connections between the ranks of one communicator: who listens where, who dials whom, and who may come in.

Every rank listens for as long as this takes, tells the others where (an endpoint), dials the ranks below it and accepts
those above, in this order: so each that dials is accepted in the end. Who knows the listener's token, as only the ranks
do, is admitted (see `admission`); whatever else connects is closed. A rank that dials goes on only when it was
admitted, and dials again if it was lost in a crowd.
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

from ..admission import STRANGER_SECONDS, Acceptor, Caller, listen
from ..bindings.abi import Result
from .failure import HostFailure, exiting, none_left
from .interfaces import VARIABLES, machine_mark, own_addresses

ENDPOINT_BYTES = 496  # of an endpoint that travels in a table

_DIAL_SECONDS = 2.0
_TICK_SECONDS = 0.2
_RETRY_SECONDS = 0.05
_PROBE_SECONDS = 1.0
_MOST_ADDRESSES = 4
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class Channels(NamedTuple):
    """The three connections to a peer."""

    data: socket.socket  # collectives, sends and receives
    control: socket.socket  # what ranks tell each other about themselves
    rma: socket.socket  # one-sided writes


_CHANNELS = range(len(Channels._fields))

Key = tuple[int, int]  # peer, channel


class Endpoint(NamedTuple):
    """Where a rank listens."""

    machine: str
    hosts: list[str]
    port: int
    token: str


class Listener:
    """Where this rank waits for those above it; open until all have come."""

    def __init__(self, local: bool) -> None:
        """local: all ranks are on this machine."""
        _raise_files_limit()
        self.sock = listen(local)
        self.token = secrets.token_bytes(16)
        self._hosts = [] if local else own_addresses()[:_MOST_ADDRESSES]

    @property
    def endpoint(self) -> str:
        """An `Endpoint` as text of at most ENDPOINT_BYTES."""
        mine = Endpoint(machine_mark(), self._hosts, self.sock.getsockname()[1], self.token.hex())
        return json.dumps(mine)

    def close(self) -> None:
        self.sock.close()


def _raise_files_limit() -> None:
    """As NCCL does: communicators of many ranks take more descriptors than the soft limit allows on most systems."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def read_endpoint(text: str) -> Endpoint:
    return Endpoint(*json.loads(text))


def pairs_in_process(size: int) -> list[dict[int, Channels]]:
    """For each rank, its connections to the others, where all are in this process."""
    made: list[dict[int, Channels]] = [{} for _ in range(size)]
    for low in range(size):
        for high in range(low + 1, size):
            ends = [socket.socketpair() for _ in _CHANNELS]
            made[low][high] = Channels(*(mine for mine, _ in ends))
            made[high][low] = Channels(*(theirs for _, theirs in ends))
    return made


class Connecting:
    """One rank's part in connecting all of them."""

    def __init__(
        self,
        listener: Listener,
        rank: int,
        endpoints: Sequence[str],
        what: str,
        names: Sequence[str],
        check: Callable[[], None],
    ) -> None:
        """names: of the ranks, for messages. check: raises HostFailure where the ranks need not be waited for."""
        self._listener, self._rank, self._what, self._names, self._check = listener, rank, what, names, check
        self._endpoints = [read_endpoint(text) for text in endpoints]
        self._made: dict[Key, socket.socket] = {}
        self._awaited = {(peer, c) for peer in range(rank + 1, len(endpoints)) for c in _CHANNELS}
        self._probe_at = time.monotonic() + _PROBE_SECONDS
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(listener.sock, self._selector, listener.token, self._admit)

    def run(self, timeout: float) -> dict[int, Channels]:
        """Peer -> connections. Raises HostFailure(ncclRemoteError) for a rank that is gone, and at the deadline."""
        deadline = time.monotonic() + timeout
        try:
            for peer in range(self._rank):
                for channel in _CHANNELS:
                    self._made[peer, channel] = self._dial(peer, channel, deadline, timeout)
            while self._awaited:
                self._serve(_TICK_SECONDS)
                self._acceptor.drop()
                self._probe_awaited()
                self._check_deadline({peer for peer, _ in self._awaited}, deadline, timeout)
        except BaseException:
            for sock in self._made.values():
                sock.close()
            raise
        finally:
            self._acceptor.drop(0, 0.0)
            self._selector.close()
            self._listener.close()
        for sock in self._made.values():
            self._configure(sock)
        peers = [peer for peer in range(len(self._endpoints)) if peer != self._rank]
        return {peer: Channels(*(self._made[peer, c] for c in _CHANNELS)) for peer in peers}

    def _dial(self, peer: int, channel: int, deadline: float, timeout: float) -> socket.socket:
        """Connect and be admitted, which a peer that still dials itself may let wait."""
        while True:
            sock = self._connect(peer, deadline)
            try:
                sock.settimeout(_TICK_SECONDS)
                caller = Caller(sock, bytes.fromhex(self._endpoints[peer].token), (self._rank, channel))
                while not caller.step():
                    self._check_deadline({peer}, deadline, timeout)
                return sock
            except OSError:  # lost among strangers, or the peer's process is gone, which the next attempt finds out
                sock.close()
            except BaseException:
                sock.close()
                raise
            self._check_deadline({peer}, deadline, timeout)
            time.sleep(_RETRY_SECONDS)

    def _hosts(self, peer: int) -> list[str]:
        target = self._endpoints[peer]
        return ["127.0.0.1"] if target.machine == machine_mark() else target.hosts

    def _connect(self, peer: int, deadline: float) -> socket.socket:
        target = self._endpoints[peer]
        while True:
            reasons, silent = [], False
            for host in self._hosts(peer):
                try:
                    left = max(min(_DIAL_SECONDS, deadline - time.monotonic()), 0.001)
                    sock = socket.create_connection((host, target.port), timeout=left)
                except OSError as error:
                    if none_left(error):
                        raise
                    reasons.append(f"{host}: {error}")
                    silent |= isinstance(error, TimeoutError)  # a crowd at its door, or an address not to be had here
                else:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    return sock
            self._check()
            if not silent or time.monotonic() > deadline or exiting.is_set():
                break
        why = "; ".join(reasons) or f"it has no address; set {VARIABLES[0]} there"
        raise HostFailure(
            Result.REMOTE_ERROR,
            f"{self._what}: {self._names[peer]} cannot be reached at port {target.port} ({why}): its process has "
            f"ended or could not go on{self._network(target)}",
        )

    @staticmethod
    def _network(target: Endpoint) -> str:
        if target.machine == machine_mark():
            return ", look for its first error"
        return f", or the network is not open between the machines; {VARIABLES[0]} names the interface to use"

    def _serve(self, timeout: float) -> None:
        """Handle what comes within so many seconds."""
        for ready, _ in self._selector.select(timeout):
            self._acceptor.handle(ready.fileobj)  # type: ignore[arg-type]

    def _admit(self, sock: socket.socket, who: Key) -> None:
        """Take the connection of a peer."""
        rank, channel = who
        if not self._rank < rank < len(self._endpoints) or channel not in _CHANNELS:
            sock.close()
            return
        if (earlier := self._made.pop((rank, channel), None)) is not None:
            earlier.close()
        self._made[rank, channel] = sock
        self._awaited.discard((rank, channel))

    def _probe_awaited(self) -> None:
        """A rank that has not dialled yet still listens; if nobody does at its port, its process has ended."""
        if time.monotonic() < self._probe_at:
            return
        self._probe_at = time.monotonic() + _PROBE_SECONDS
        for peer in sorted({peer for peer, _ in self._awaited}):
            if self._refuses(peer):
                self._serve(0)  # it may have dialled just before
                self._acceptor.drop(0, STRANGER_SECONDS)
                if any(awaited == peer for awaited, _ in self._awaited):
                    why = "nobody listens at its port any more: its process has ended or could not go on"
                    raise HostFailure(Result.REMOTE_ERROR, f"{self._what}: lost {self._names[peer]}: {why}")

    def _refuses(self, peer: int) -> bool:
        """Whether nobody listens where the peer did. Silence may mean a network that is slow."""
        for host in self._hosts(peer):
            try:
                socket.create_connection((host, self._endpoints[peer].port), timeout=_DIAL_SECONDS).close()
            except ConnectionRefusedError:
                continue
            except OSError as error:
                if none_left(error):  # so nobody can be accepted either
                    raise
                return False
            return False
        return True

    def _check_deadline(self, missing: set[int], deadline: float, timeout: float) -> None:
        self._check()
        late = time.monotonic() > deadline
        if missing and (late or exiting.is_set()):
            who = ", ".join(self._names[peer] for peer in sorted(missing))
            why = f"within {timeout:g} s, frozen or late" if late else "before the process exits"
            raise HostFailure(Result.REMOTE_ERROR, f"{self._what}: {who} did not connect {why}")

    @staticmethod
    def _configure(sock: socket.socket) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # closed again already, which the first wait finds out
            if not sock.getpeername()[0].endswith("127.0.0.1"):  # a machine that loses power says nothing
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, seconds in _KEEPALIVE.items():
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
