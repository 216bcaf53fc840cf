"""Where ranks find each other: the unique id, the store behind it, and who has arrived.

The 128 bytes of a unique id hold the addresses of a store that the process which made the id keeps until it exits
(one per process), the secret without which nobody is admitted there, a mark of the machine, so that its other processes
use 127.0.0.1, and a number of its own. With PYNCCL_JOB_KEY the id alone is not enough: the key is made of both.
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
from typing import Any, NamedTuple

from ..admission import KEY_VARIABLE, Caller, Refused, job_key, sign
from ..bindings.abi import UNIQUE_ID_BYTES, Result
from .failure import HostFailure, exiting, invalid_argument, invalid_usage, last_error, none_left
from .interfaces import VARIABLES, machine_mark, on_one_machine, own_addresses
from .store import Server, Store, frame, take_frames

_MAGIC = b"PYNCCLh3"
_SECRET_BYTES = 16
_HEAD = struct.Struct(f"<8sH8s8s{_SECRET_BYTES}s")  # magic, port, machine, number, secret; then the addresses as text
_PROBE_SECONDS = 5.0
_RETRY_SECONDS = 0.05


class _Own(NamedTuple):
    """The store of this process. process: that made it; a forked child needs its own"""

    process: int
    server: Server
    secret: bytes


_own: _Own | None = None
_own_lock = threading.Lock()


class Client:
    """A store in another process. Every call ends at the deadline, also where the server accepts and is silent."""

    def __init__(self, host: str, port: int, key: bytes, deadline: float) -> None:
        self.deadline = deadline
        self._host, self._port = host, port
        self._received = bytearray()
        while not self._admitted(key):  # it was lost among strangers
            pass

    def _admitted(self, key: bytes) -> bool:
        try:
            self._sock = socket.create_connection((self._host, self._port), timeout=min(_PROBE_SECONDS, self._left()))
        except OSError as error:
            raise self._lost(error) from error
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            Caller(self._sock, key).wait(self.deadline)
        except OSError as error:
            self.close()
            if isinstance(error, (Refused, TimeoutError)) or exiting.wait(_RETRY_SECONDS):
                raise self._lost(error) from error
            return False
        return True

    def close(self) -> None:
        self._sock.close()

    def answer(self, request: Any) -> Any:
        """As `Store.answer`."""
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
            raise self._lost(error) from error

    def _left(self) -> float:
        return max(self.deadline - time.monotonic(), 0.001)

    def _lost(self, error: Exception) -> HostFailure:
        if none_left(error):
            raise error
        why = "no answer" if isinstance(error, TimeoutError) else str(error)
        if isinstance(error, Refused):
            why += f": that process has ended, or {KEY_VARIABLE} is not the same on all ranks"
        return HostFailure(
            Result.REMOTE_ERROR,
            f"cannot reach the store of the process that made the unique id, {self._host} port {self._port} ({why}); "
            "it has to live as long as communicators are made of its ranks",
        )


class MeetingPlace(NamedTuple):
    """Where ranks meet: in the store of this process or of one at (host, port) that has a key, under a name."""

    store: tuple[str, int, bytes] | Store
    name: str

    def below(self, name: str) -> MeetingPlace:
        return MeetingPlace(self.store, hashlib.sha256(f"{self.name}/{name}".encode()).hexdigest())

    def _open(self, deadline: float) -> contextlib.AbstractContextManager[Store | Client]:
        if isinstance(self.store, Store):
            return contextlib.nullcontext(self.store)
        return contextlib.closing(Client(*self.store, deadline))

    def wait(self, timeout: float, function: str, rank: int, size: int, endpoint: str) -> list[str]:
        """Wait until all ranks are there; returns what each of them gave as `endpoint`.

        While it waits, the process's last error says for whom `function` does. Ranks that contradict each other all get
        ncclInvalidUsage.
        """
        deadline = time.monotonic() + timeout
        what = f"{function}: rank {rank} of {size}"
        pause, missing = 0.001, []
        with self._open(deadline) as store:
            while True:
                try:
                    contradiction, missing, endpoints = store.answer([self.name, rank, size, endpoint])
                except HostFailure as failure:
                    if missing and time.monotonic() > deadline:
                        raise HostFailure(Result.SYSTEM_ERROR, f"{last_error.text} after {timeout:g} s") from failure
                    if missing:
                        failure.text = f"{what} still waits for ranks {missing}, and {failure.text}"
                    raise
                if contradiction:
                    raise invalid_usage(f"{function}: {contradiction}")
                if not missing:
                    last_error.text = f"{what} connects to its peers"
                    return list(endpoints)
                endpoint = ""  # it is known there from now on
                last_error.text = f"{what} still waits for ranks {missing}"
                if time.monotonic() > deadline:
                    raise HostFailure(Result.SYSTEM_ERROR, f"{last_error.text} after {timeout:g} s")
                if exiting.wait(pause):
                    raise HostFailure(Result.SYSTEM_ERROR, f"{last_error.text} as the process exits")
                pause = min(2 * pause, 0.02)


def make_unique_id() -> bytes:
    """128 bytes; starts this process's store at the first call."""
    local = on_one_machine()
    own = _own_store(local)
    head = _HEAD.pack(_MAGIC, own.server.port, bytes.fromhex(machine_mark()), secrets.token_bytes(8), own.secret)
    room = UNIQUE_ID_BYTES - len(head)
    text = ""
    for address in [] if local else own_addresses():
        if len(text) + len(address) + 1 <= room:
            text += ("," if text else "") + address
    return (head + text.encode()).ljust(UNIQUE_ID_BYTES, b"\0")


def _own_store(local: bool) -> _Own:
    global _own
    with _own_lock:
        if _own is None or _own.process != os.getpid():
            secret = secrets.token_bytes(_SECRET_BYTES)
            _own = _Own(os.getpid(), Server(local, _key_of(secret)), secret)
        return _own


def _key_of(secret: bytes) -> bytes:
    """What a store admits by, of the secret in the unique id, and of the job's key if it has one."""
    try:
        return sign(job_key(), secret)
    except ValueError as error:
        raise invalid_argument(str(error)) from error


def close() -> None:
    """At exit; and in a forked child, where it closes copies of what the parent goes on using."""
    global _own, _own_lock
    _own_lock = threading.Lock()
    if _own is not None:
        _own.server.close()
    _own = None


def meeting_of(unique_id: bytes, timeout: float) -> MeetingPlace:
    """The part of a store that belongs to a unique id."""
    magic, port, machine, number, secret = _HEAD.unpack_from(unique_id)
    if magic != _MAGIC or not port:
        raise invalid_argument(
            "commId was not made by ncclGetUniqueId of the host library; all ranks have to use "
            "the host library, and the 128 bytes have to arrive unchanged"
        )
    text = unique_id[_HEAD.size :].rstrip(b"\0").decode("ascii", "replace")
    here = machine.hex() == machine_mark()
    addresses = ["127.0.0.1"] if here else [address for address in text.split(",") if address]
    return MeetingPlace((_reachable(addresses, port, timeout), port, _key_of(secret)), number.hex())


def _reachable(addresses: list[str], port: int, timeout: float) -> str:
    """The first address that answers."""
    reasons = []
    deadline = time.monotonic() + timeout
    for address in addresses:
        try:
            left = max(min(_PROBE_SECONDS, deadline - time.monotonic()), 0.001)
            socket.create_connection((address, port), timeout=left).close()
            return address
        except OSError as error:
            if none_left(error):
                raise
            reasons.append(f"{address}: {error}")
    tried = "; ".join(reasons) or "the unique id names no address that other machines could use"
    raise HostFailure(
        Result.REMOTE_ERROR,
        f"cannot reach the process that made the unique id, port {port} ({tried}); it has to live as long as "
        f"communicators are made of its ranks; where it has several interfaces, name one with {VARIABLES[0]} there",
    )
