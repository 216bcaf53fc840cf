"""The TCPStore of a launch at MASTER_ADDR:MASTER_PORT, served by rank 0 or torchrun's agent.

Rank 0 listens only on the interfaces that the other ranks need. The other ranks probe the port before they create a
TCPStore, because torch prints a long trace if nothing listens there.
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

_CONNECT_SECONDS = 2.0  # per attempt; attempts are repeated until the deadline
_PAUSE_SECONDS = 0.1  # between attempts
_BACKLOG = 4096


class LaunchEnv(NamedTuple):
    """The launch variables of a rank."""

    rank: int
    nranks: int
    local_rank: int
    host: str
    port: int
    agent: bool  # True: torchrun's agent serves the store

    @property
    def serves(self) -> bool:
        return self.rank == 0 and not self.agent

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def open_store(env: LaunchEnv, clock: Clock) -> Any:
    """Serve or connect to the TCPStore by the clock's deadline, and return it."""
    if not env.serves:
        return _StoreConnector(env, clock).store()
    try:
        listener = _listen(env.host, env.port)
    except OSError as error:
        return _torch_distributed_store(env, clock, error)
    host, port = listener.getsockname()[:2]
    host = "127.0.0.1" if host in ("::", "0.0.0.0") else host
    return _tcp_store(host, port, clock.timeout, is_master=True, master_listen_fd=listener.detach())


def _tcp_store(host: str, port: int, timeout: float, **options: Any) -> Any:
    from torch.distributed import TCPStore

    # multi_tenant: torch.distributed may serve its store at the same port in this process
    return TCPStore(host, port, timeout=_duration(timeout), wait_for_workers=False, multi_tenant=True, **options)


def _duration(seconds: float) -> timedelta:
    return timedelta(seconds=max(min(seconds, 1e6), 0.1))  # TCPStore takes no infinite timeout


def _listen(host: str, port: int) -> socket.socket:
    """Listen at `host`, the address that the other ranks connect to; on the loopback if the job has one node.

    Listen on all interfaces if `host` is a name, which may resolve differently on other nodes, or an address of a
    gateway that forwards to this node."""
    host = "127.0.0.1" if host.lower() == "localhost" else host
    with contextlib.suppress(ValueError):  # a host name
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


def _torch_distributed_store(env: LaunchEnv, clock: Clock, bind_error: OSError) -> Any:
    """Return torch.distributed's store in this process, if it is what occupies rank 0's port. Raises otherwise."""
    import torch.distributed as dist

    if bind_error.errno == errno.EADDRINUSE and dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # its store is at another port
            return _tcp_store(env.host, env.port, clock.timeout, is_master=True)
    reason = os.strerror(bind_error.errno) if bind_error.errno else str(bind_error)
    raise NcclSystemError(
        f"rank 0 could not serve the store at {env.address} ({reason}): a second rank 0 "
        f"or another program may be using the port (ss -ltnp 'sport = :{env.port}' shows it)\n"
        "  end that process, or set another MASTER_PORT (or MASTER_ADDR) on all ranks"
    ) from bind_error


class _StoreConnector:
    """Retries until a store answers; `reason` is the current reason why none was reached."""

    def __init__(self, env: LaunchEnv, clock: Clock) -> None:
        self.env, self.clock = env, clock
        self.reason = "still connecting"

    def store(self) -> Any:
        wait = Wait(self.clock)
        store = wait.run_in_worker(lambda: self._search(wait), self._timeout_error)
        store.set_timeout(_duration(self.clock.timeout))
        return store

    def _search(self, wait: Wait) -> Any:
        while True:
            try:
                return self._connect()
            except socket.gaierror as error:
                self.reason = f"MASTER_ADDR={self.env.host!r} does not resolve: {error.strerror}"
            except OSError as error:
                self.reason = os.strerror(error.errno) if error.errno else "connection attempts timed out"
            except RuntimeError as error:  # DistError, once torch's own attempts have failed
                if "Ping failed" in str(error):  # the reply is not a store's
                    raise self._not_a_store(first_line(error)) from error
            wait.pause(_PAUSE_SECONDS)

    def _connect(self) -> Any:
        env, seconds = self.env, max(min(_CONNECT_SECONDS, self.clock.left() / 3), 0.1)
        with socket.create_connection((env.host, env.port), timeout=seconds) as probe:
            address = probe.getpeername()[0]
        self.reason = "the port is open, but no store answers: it belongs to another program, or the process is stopped"
        return _tcp_store(address, env.port, seconds, is_master=False)

    def _not_a_store(self, detail: str) -> NcclSystemError:
        return NcclSystemError(
            f"the listener at {self.env.address} is not a torch.distributed store: another program uses "
            f"MASTER_PORT={self.env.port}. Set another port on all ranks ({detail})"
        )

    def _timeout_error(self) -> NcclTimeout:
        env = self.env
        server = "torchrun's agent" if env.agent else "rank 0"
        return NcclTimeout(
            f"rank {env.rank} could not connect to the store at {env.address} within {self.clock.seconds()}: has "
            f"{server} started there? ({self.reason})\n"
            "  MASTER_ADDR and MASTER_PORT must be the same on all ranks and reachable from this node"
        )
