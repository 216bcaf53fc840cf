"""The store of a launch, at MASTER_ADDR:MASTER_PORT: served by rank 0, or by torchrun's agent, and reached by the rest.

Rank 0 listens on no more interfaces than the ranks need to reach it. The others try the port themselves before torch
does, which prints a long trace for a port where nobody listens.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from datetime import timedelta
from typing import Any, NamedTuple

from ..bindings.errors import NcclSystemError, NcclTimeout
from ..bindings.workers import Clock, Wait
from .rendezvous import first_line

_CONNECT_SECONDS = 2.0  # for one attempt; there are more until the deadline
_PAUSE_SECONDS = 0.1  # between two of them
_BACKLOG = 4096


class Place(NamedTuple):
    """A rank's place in its launch."""

    rank: int
    nranks: int
    local_rank: int
    host: str
    port: int
    agent: bool  # torchrun's agent serves the store

    @property
    def serves(self) -> bool:
        return self.rank == 0 and not self.agent

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def open_store(place: Place, clock: Clock) -> Any:
    """The TCPStore at the place's address, by the clock's deadline."""
    if not place.serves:
        return _Search(place, clock).store()
    try:
        listener = _listen(place.host, place.port)
    except OSError as error:
        return _store_of_torch(place, clock, error)
    host, port = listener.getsockname()[:2]
    host = "127.0.0.1" if host in ("::", "0.0.0.0") else host
    return _tcp_store(host, port, clock.timeout, is_master=True, master_listen_fd=listener.detach())


def _tcp_store(host: str, port: int, timeout: float, **options: Any) -> Any:
    from torch.distributed import TCPStore

    # multi_tenant: torch.distributed may serve its store at the same port in this process
    return TCPStore(host, port, timeout=_duration(timeout), wait_for_workers=False, multi_tenant=True, **options)


def _duration(seconds: float) -> timedelta:
    return timedelta(seconds=max(min(seconds, 1e6), 0.1))  # it knows no infinity


def _listen(host: str, port: int) -> socket.socket:
    """At the address that the others connect to, which is the loopback's if the job is on one machine.

    On all interfaces if that is a name, which may stand for another address on other machines, or an address of a
    gateway that forwards to this machine."""
    host = "127.0.0.1" if host.lower() == "localhost" else host
    with contextlib.suppress(ValueError):  # a name
        address = ipaddress.ip_address(host)
        family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
        try:
            return socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            if address.is_loopback or error.errno != errno.EADDRNOTAVAIL:
                raise
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)


def _store_of_torch(place: Place, clock: Clock, refused: OSError) -> Any:
    """The store of torch.distributed in this process, if it is that which has rank 0's port."""
    import torch.distributed as dist

    if refused.errno == errno.EADDRINUSE and dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # it serves at another port
            return _tcp_store(place.host, place.port, clock.timeout, is_master=True)
    reason = os.strerror(refused.errno) if refused.errno else str(refused)
    raise NcclSystemError(
        f"rank 0 could not serve the ranks' store at {place.address} ({reason}): a second rank 0, "
        f"or another program, may have the port (ss -ltnp 'sport = :{place.port}' names it)\n"
        "  end it, or set another MASTER_PORT, or MASTER_ADDR, on all ranks"
    ) from refused


class _Search:
    """Connects until a store answers; `reason` says at any time why none was reached so far."""

    def __init__(self, place: Place, clock: Clock) -> None:
        self.place, self.clock = place, clock
        self.reason = "still connecting"

    def store(self) -> Any:
        wait = Wait(self.clock)
        store = wait.beside(lambda: self._search(wait), self._late)
        store.set_timeout(_duration(self.clock.timeout))
        return store

    def _search(self, wait: Wait) -> Any:
        while True:
            try:
                return self._connect()
            except socket.gaierror as error:
                self.reason = f"MASTER_ADDR={self.place.host!r} does not resolve: {error.strerror}"
            except OSError as error:
                self.reason = os.strerror(error.errno) if error.errno else "no answer to the attempts to connect"
            except RuntimeError as error:  # DistError, where torch's own attempts have come to nothing
                if "Ping failed" in str(error):  # other bytes than a store's
                    raise self._no_store(first_line(error)) from error
            wait.pause(_PAUSE_SECONDS)

    def _connect(self) -> Any:
        place, seconds = self.place, max(min(_CONNECT_SECONDS, self.clock.left() / 3), 0.1)
        with socket.create_connection((place.host, place.port), timeout=seconds) as probe:
            address = probe.getpeername()[0]
        self.reason = (
            "something listens there, but does not answer as a store, or closes the connection: another program's "
            "port, or a stopped process"
        )
        return _tcp_store(address, place.port, seconds, is_master=False)

    def _no_store(self, said: str) -> NcclSystemError:
        return NcclSystemError(
            f"what listens at {self.place.address} is no torch.distributed store, so the ranks cannot meet there: "
            f"another program has MASTER_PORT={self.place.port}. Set another port on all ranks ({said})"
        )

    def _late(self) -> NcclTimeout:
        place = self.place
        server = "torchrun's agent" if place.agent else "rank 0"
        return NcclTimeout(
            f"rank {place.rank} reached no store at {place.address} within {self.clock.seconds()}: has {server} "
            f"started there? ({self.reason})\n"
            "  MASTER_ADDR and MASTER_PORT have to be the same on all ranks, and reachable from this machine"
        )
