"""The rendezvous of ranks: unique ids and the store behind them.

The process that creates a unique id runs a store until it exits (one store per process). The 128 bytes of the id hold
the addresses of that store, the secret that clients need, the node's id, so that processes on the same node connect to
127.0.0.1, and a random number. With PYNCCL_JOB_KEY the id alone is not enough: the key is derived from both.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ..admission import KEY_VARIABLE, ClientHandshake, HandshakeError, job_key, sign
from ..bindings.abi import UNIQUE_ID_BYTES, Result
from .failure import HostFailure, exiting, invalid_argument, invalid_usage, last_error, out_of_descriptors
from .interfaces import VARIABLES, is_single_node, local_addresses, node_id
from .store import Server, Store, frame, take_frames

_MAGIC = b"PYNCCLh3"
_SECRET_BYTES = 16
_HEAD = struct.Struct(f"<8sH8s8s{_SECRET_BYTES}s")  # magic, port, node id, number, secret; then the addresses as text
_PROBE_SECONDS = 5.0
_RETRY_SECONDS = 0.05


class _LocalStore(NamedTuple):
    """The store of this process. pid: of its creator, since a forked child needs its own store."""

    pid: int
    server: Server
    secret: bytes


_local_store: _LocalStore | None = None
_local_store_lock = threading.Lock()


class Client:
    """A client of the store in another process. Every call ends at the deadline, even if the server hangs."""

    def __init__(self, host: str, port: int, key: bytes, deadline: float) -> None:
        self.deadline = deadline
        self._host, self._port = host, port
        self._received = bytearray()
        while not self._connect(key):  # the server dropped the connection
            pass

    def _connect(self, key: bytes) -> bool:
        try:
            self._sock = socket.create_connection((self._host, self._port), timeout=min(_PROBE_SECONDS, self._left()))
        except OSError as error:
            raise self._unreachable(error) from error
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ClientHandshake(self._sock, key).wait(self.deadline)
        except OSError as error:
            self.close()
            if isinstance(error, (HandshakeError, TimeoutError)) or exiting.wait(_RETRY_SECONDS):
                raise self._unreachable(error) from error
            return False
        return True

    def close(self) -> None:
        self._sock.close()

    def handle(self, request: Any) -> Any:
        """Send a request and return the answer of `Store.handle`."""
        try:
            self._sock.settimeout(self._left())
            self._sock.sendall(frame(request))
            while True:
                for answer in take_frames(self._received):
                    return answer
                self._sock.settimeout(self._left())
                data = self._sock.recv(1 << 16)
                if not data:
                    raise ConnectionResetError("connection closed")
                self._received += data
        except (OSError, ValueError) as error:
            self.close()
            raise self._unreachable(error) from error

    def _left(self) -> float:
        return max(self.deadline - time.monotonic(), 0.001)

    def _unreachable(self, error: Exception) -> HostFailure:
        if out_of_descriptors(error):
            raise error
        why = "no answer" if isinstance(error, TimeoutError) else str(error)
        if isinstance(error, HandshakeError):
            why += f": the process has ended, or {KEY_VARIABLE} is not the same on all ranks"
        return HostFailure(
            Result.REMOTE_ERROR,
            f"cannot reach the store of the process that made the unique id, {self._host} port {self._port} ({why}); "
            "keep that process alive while its ranks create communicators",
        )


class Rendezvous(NamedTuple):
    """A named rendezvous in a store: that of this process, or a remote one given by (host, port, key)."""

    store: tuple[str, int, bytes] | Store
    name: str

    def child(self, name: str) -> Rendezvous:
        return Rendezvous(self.store, hashlib.sha256(f"{self.name}/{name}".encode()).hexdigest())

    def _open(self, deadline: float) -> contextlib.AbstractContextManager[Store | Client]:
        if isinstance(self.store, Store):
            return contextlib.nullcontext(self.store)
        return contextlib.closing(Client(*self.store, deadline))

    def wait(
        self, timeout: float, function: str, rank: int, size: int, endpoint: str, check: Callable[[], None]
    ) -> list[str]:
        """Wait until all ranks have joined, and return their endpoints.   check: raises if waiting is pointless

        Meanwhile the process's last error names the missing ranks. If the ranks contradict each other, all of them get
        ncclInvalidUsage.
        """
        started = time.monotonic()
        deadline, missing = started + timeout, []
        call = f"{function}: rank {rank} of {size}"
        with self._open(deadline) as store:
            while True:
                try:
                    contradiction, missing, endpoints = store.handle([self.name, rank, size, endpoint])
                except HostFailure as failure:
                    if missing and time.monotonic() > deadline:
                        raise HostFailure(Result.SYSTEM_ERROR, f"{last_error.text} after {timeout:g} s") from failure
                    if missing:
                        failure.text = f"{call} still waits for ranks {missing}, and {failure.text}"
                    raise
                if contradiction:
                    raise invalid_usage(f"{function}: {contradiction}")
                if not missing:
                    last_error.text = f"{call} is connecting to its peers"
                    return list(endpoints)
                endpoint = ""  # send it only once
                last_error.text = f"{call} still waits for ranks {missing}"
                if time.monotonic() > deadline:
                    raise HostFailure(Result.SYSTEM_ERROR, f"{last_error.text} after {timeout:g} s")
                check()
                if exiting.wait(min(max((time.monotonic() - started) / 10, 0.0005), 0.02)):
                    raise HostFailure(Result.SYSTEM_ERROR, f"{last_error.text} as the process exits")


def make_unique_id() -> bytes:
    """Return a unique id of 128 bytes. The first call starts the store of this process."""
    local = is_single_node()
    store = _get_local_store(local)
    head = _HEAD.pack(_MAGIC, store.server.port, bytes.fromhex(node_id()), secrets.token_bytes(8), store.secret)
    capacity = UNIQUE_ID_BYTES - len(head)
    text = ""
    for address in [] if local else local_addresses():
        if len(text) + len(address) + 1 <= capacity:
            text += ("," if text else "") + address
    return (head + text.encode()).ljust(UNIQUE_ID_BYTES, b"\0")


def _get_local_store(local: bool) -> _LocalStore:
    global _local_store
    with _local_store_lock:
        if _local_store is None or _local_store.pid != os.getpid():
            secret = secrets.token_bytes(_SECRET_BYTES)
            _local_store = _LocalStore(os.getpid(), Server(local, _key_of(secret)), secret)
        return _local_store


def _key_of(secret: bytes) -> bytes:
    """Derive the key of a store from the secret in its unique id and PYNCCL_JOB_KEY, if set."""
    try:
        return sign(job_key(), secret)
    except ValueError as error:
        raise invalid_argument(str(error)) from error


def close() -> None:
    """Close the store at exit. In a forked child, close the copies of the parent's descriptors."""
    global _local_store, _local_store_lock
    _local_store_lock = threading.Lock()
    if _local_store is not None:
        _local_store.server.close()
    _local_store = None


def rendezvous_of(unique_id: bytes, timeout: float) -> Rendezvous:
    """Return the rendezvous of a unique id."""
    magic, port, node, number, secret = _HEAD.unpack_from(unique_id)
    if magic != _MAGIC or not port:
        raise invalid_argument(
            "commId was not made by ncclGetUniqueId of the host library; use the host library on all ranks and pass "
            "its 128 bytes unchanged"
        )
    text = unique_id[_HEAD.size :].rstrip(b"\0").decode("ascii", "replace")
    same_node = node.hex() == node_id()
    addresses = ["127.0.0.1"] if same_node else [address for address in text.split(",") if address]
    return Rendezvous((_reachable(addresses, port, timeout), port, _key_of(secret)), number.hex())


def _reachable(addresses: list[str], port: int, timeout: float) -> str:
    """Return the first address that accepts a connection."""
    reasons = []
    deadline = time.monotonic() + timeout
    for address in addresses:
        try:
            left = max(min(_PROBE_SECONDS, deadline - time.monotonic()), 0.001)
            socket.create_connection((address, port), timeout=left).close()
            return address
        except OSError as error:
            if out_of_descriptors(error):
                raise
            reasons.append(f"{address}: {error}")
    tried = "; ".join(reasons) or "the unique id has no address that other nodes can reach"
    raise HostFailure(
        Result.REMOTE_ERROR,
        f"cannot reach the process that made the unique id, port {port} ({tried}); keep it alive while its ranks "
        f"create communicators; if its node has several interfaces, select one with {VARIABLES[0]} there",
    )
