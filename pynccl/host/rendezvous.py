"""Where ranks find each other: the unique id, the store behind it, and who has arrived.

The 128 bytes of a unique id hold the addresses of a TCPStore that the process which made the id keeps until it exits
(one per process), a mark of the machine, so that its other processes use 127.0.0.1, and a number of its own.
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
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from ..abi import UNIQUE_ID_BYTES, Result
from .failure import HostFailure, exiting, invalid_argument, invalid_usage, last_error

_MAGIC = b"PYNCCLh1"
_HEAD = struct.Struct("<8sH8s8s")  # magic, port, machine, nonce; then the addresses as text
_PROBE_SECONDS = 5.0

_server: tuple[int, dist.TCPStore] | None = None  # with the process that made it: a forked child needs its own
_server_lock = threading.Lock()
_idle_clients: dict[tuple[int, str, int], list[dist.TCPStore]] = {}


def machine_mark() -> bytes:
    """Equal for processes that reach each other by 127.0.0.1: same boot of a kernel, same network namespace."""
    parts = [socket.gethostname()]
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            parts = [file.read().strip(), str(os.stat("/proc/self/ns/net").st_ino)]
    except OSError:  # not Linux: the host name has to do
        pass
    return hashlib.blake2b("|".join(parts).encode(), digest_size=8).digest()


def make_unique_id() -> bytes:
    """128 bytes; starts this process's store at the first call."""
    head = _HEAD.pack(_MAGIC, _own_server().port, machine_mark(), secrets.token_bytes(8))
    room = UNIQUE_ID_BYTES - len(head)
    text = ""
    for address in _own_addresses():
        if len(text) + len(address) + 1 <= room:
            text += ("," if text else "") + address
    return (head + text.encode()).ljust(UNIQUE_ID_BYTES, b"\0")


def _own_server() -> dist.TCPStore:
    global _server
    with _server_lock:
        if _server is None or _server[0] != os.getpid():
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            _server = os.getpid(), store
        return _server[1]


def _own_addresses() -> list[str]:
    """This machine's addresses, the one that routes outwards first."""
    found: list[str] = []
    # Connecting a datagram socket sends nothing: it asks the kernel which address it would use. No route: an OSError.
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        found.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):  # a host name that does not resolve
        found += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    return [address for address in dict.fromkeys(found) if "%" not in address and not address.startswith("127.")]


class Place:
    """A part of a store, by prefix, to which a client is opened when one is needed.

    A client serves one thread at a time, so everyone takes one for a while and gives it back for the next: opening
    one makes torch look up the peer's host name, which takes seconds where the name server does not answer.
    """

    def __init__(self, store: tuple[str, int] | dist.HashStore, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def below(self, name: str) -> Place:
        return Place(self._store, f"{self._prefix}/{name}")

    @contextmanager
    def open(self, timeout: float) -> Iterator[dist.Store]:
        """A client whose blocking calls take at most `timeout` seconds."""
        if isinstance(self._store, dist.HashStore):
            yield dist.PrefixStore(self._prefix, self._store)
            return
        idle = _idle_clients.setdefault((os.getpid(), *self._store), [])
        limit = timedelta(seconds=timeout)
        try:
            client = idle.pop()
            client.set_timeout(limit)
        except IndexError:
            _reachable([self._store[0]], self._store[1])  # else torch tries for the whole time-out
            client = dist.TCPStore(*self._store, is_master=False, timeout=limit)
        yield dist.PrefixStore(self._prefix, client)
        idle.append(client)  # not after an error: it may be in the middle of an answer


def place_of(unique_id: bytes) -> Place:
    """The part of a store that belongs to a unique id."""
    magic, port, machine, nonce = _HEAD.unpack_from(unique_id)
    if magic != _MAGIC or not port:
        raise invalid_argument(
            "commId was not made by ncclGetUniqueId of the host library; all ranks have to use "
            "the host library, and the 128 bytes have to arrive unchanged"
        )
    addresses = unique_id[_HEAD.size :].rstrip(b"\0").decode("ascii", "replace").split(",")
    host = _reachable(["127.0.0.1"] if machine == machine_mark() else addresses, port)
    return Place((host, port), nonce.hex())


class Rendezvous:
    """The ranks of one communicator find out who is there."""

    def __init__(self, store: dist.Store, timeout: float, name: str = "ncclCommInitRank") -> None:
        self._store = store
        self._name = name  # of the C function, for messages
        self._deadline = time.monotonic() + timeout
        self._timeout = timeout

    def meet(self, rank: int, size: int) -> bool:
        """Wait until all ranks are there; returns whether all are on one machine.

        While it waits, the process's last error says for whom. Ranks that contradict each other all get
        ncclInvalidUsage.
        """
        self._announce(rank, size)
        missing, pause = list(range(size)), 0.001
        while missing := [r for r in missing if not self._store.check([f"hello/{r}"])]:
            last_error.text = f"{self._name}: rank {rank} of {size} still waits for ranks {missing}"
            self._raise_contradiction()
            if time.monotonic() > self._deadline:
                raise HostFailure(Result.SYSTEM_ERROR, f"{last_error.text} after {self._timeout:g} s")
            if exiting.wait(pause):
                raise HostFailure(Result.SYSTEM_ERROR, f"{last_error.text} as the process exits")
            pause = min(2 * pause, 0.02)
        self._raise_contradiction()
        last_error.text = f"{self._name}: rank {rank} of {size} connects to its peers"
        return len(set(self._store.multi_get([f"hello/{r}" for r in range(size)]))) == 1

    def _announce(self, rank: int, size: int) -> None:
        agreed = int(self._store.compare_set("size", "", str(size)))
        if agreed != size:
            text = f"rank {rank} says there are {size} ranks, another rank says {agreed}"
            self._store.set("contradiction", text)
        elif self._store.add(f"claims/{rank}", 1) > 1:
            self._store.set("contradiction", f"two processes or threads claim to be rank {rank} of {size}")
        else:
            self._store.set(f"hello/{rank}", machine_mark().hex())
        self._raise_contradiction()

    def _raise_contradiction(self) -> None:
        if self._store.check(["contradiction"]):
            raise invalid_usage(f"{self._name}: {self._store.get('contradiction').decode()}")


def _reachable(addresses: list[str], port: int) -> str:
    """The first address that answers. Probed here since TCPStore prints a long trace for each failure."""
    reasons = []
    for address in addresses:
        try:
            socket.create_connection((address, port), timeout=_PROBE_SECONDS).close()
            return address
        except OSError as error:
            reasons.append(f"{address}: {error}")
    raise HostFailure(
        Result.SYSTEM_ERROR,
        f"cannot reach the process that made the unique id, port {port} ({'; '.join(reasons)}); "
        "it has to live as long as communicators are made of its ranks",
    )
