"""The store of a launch, at MASTER_ADDR:MASTER_PORT: what the environment says, how it is served, how it is reached.

torchrun's agent may serve it; else rank 0 does, on no more interfaces than the ranks need to reach it.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import sys
from datetime import timedelta
from typing import Any, NamedTuple

from ..bindings.errors import NcclError, NcclInvalidUsage, NcclSystemError, NcclTimeout
from ..bindings.workers import Abandoned, Clock, Wait
from .rendezvous import first_line

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_CONNECT_SECONDS = 2.0  # for one attempt; there are more until the deadline
_TAKEN_SECONDS = 2.0  # for whoever has rank 0's port to show that it is a store
_LONGEST_PAUSE = 2.0  # torch prints a trace for each listener that is no store
_BACKLOG = 4096
_SILENT = "something listens there, but does not answer as a store: another program's port, or a stopped process"
_CLOSES = "something listens there, but closes the connection: is it a store?"


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


def read_environment() -> Place:
    """This process's place, or NcclInvalidUsage with the line that would have worked."""
    missing = [name for name in _NAMES if name not in os.environ]
    line = "torchrun --standalone --nproc-per-node=2 " + _program()
    if missing:
        raise NcclInvalidUsage(
            f"{', '.join(missing)} not set: this process was not started by torchrun. Start it with\n  {line}\n"
            "or pass rank, size and id yourself to Communicator.init. For all devices in this one process, as in a "
            "notebook, there is\n  comms = pynccl.init_all()"
        )
    rank, nranks = _integer("RANK"), _integer("WORLD_SIZE")
    if rank is None or nranks is None or not 0 <= rank < nranks:
        raise NcclInvalidUsage(
            f"RANK={os.environ['RANK']!r}, WORLD_SIZE={os.environ['WORLD_SIZE']!r}: expected integers with 0 <= RANK < "
            f"WORLD_SIZE. torchrun sets both:\n  {line}"
        )
    local_rank = _integer("LOCAL_RANK") if "LOCAL_RANK" in os.environ else rank
    if local_rank is None or local_rank < 0:
        raise NcclInvalidUsage(
            f"LOCAL_RANK={os.environ['LOCAL_RANK']!r}: expected this rank's number on its machine, 0 or more. torchrun "
            f"sets it:\n  {line}"
        )
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Place(rank, nranks, local_rank, *_master(nranks), agent)


def _program() -> str:
    """The program that runs here and its arguments, as they would follow torchrun."""
    interactive = hasattr(sys, "ps1") or sys.argv[0] in ("", "-", "-c")
    if interactive or os.path.basename(sys.argv[0]) in ("ipykernel_launcher.py", "ipython"):
        return "train.py"
    return " ".join(sys.argv)


def _integer(name: str) -> int | None:
    try:
        return int(os.environ[name])
    except ValueError:
        return None


def _master(nranks: int) -> tuple[str, int]:
    host, port = os.environ["MASTER_ADDR"].strip(), _integer("MASTER_PORT")
    if not host:
        raise NcclInvalidUsage(
            f"MASTER_ADDR={os.environ['MASTER_ADDR']!r}: expected the name or address of rank 0's machine, the same on "
            "all ranks; 127.0.0.1 if all ranks are on one machine"
        )
    lowest = 0 if nranks == 1 else 1  # alone, a rank may take any port
    if port is None or not lowest <= port <= 65535:
        raise NcclInvalidUsage(
            f"MASTER_PORT={os.environ['MASTER_PORT']!r}: expected a number in {lowest}..65535, of a port that is free "
            "on rank 0's machine, the same on all ranks"
        )
    return host, port


def open_store(place: Place, clock: Clock) -> Any:
    """The TCPStore at the place's address, by the clock's deadline."""
    if place.serves:
        return _serve(place, clock)
    return _Search(place, clock).store()


def _serve(place: Place, clock: Clock) -> Any:
    try:
        listener = _listen(place.host, place.port)
    except OSError as error:
        return _serve_together(place, clock, error)
    own, port = listener.getsockname()[:2]
    reachable = "127.0.0.1" if own in ("::", "0.0.0.0") else own
    fd = listener.detach()  # the store's from now on
    return Wait(clock).beside(
        lambda: _tcp_store(reachable, port, clock.timeout, is_master=True, master_listen_fd=fd),
        lambda: NcclTimeout(f"rank 0 could not start the ranks' store at {place.address} within {clock.seconds()}"),
    )


def _tcp_store(host: str, port: int, timeout: float, **options: Any) -> Any:
    from torch.distributed import TCPStore

    # multi_tenant: torch.distributed may serve its store at the same port in this process
    return TCPStore(host, port, timeout=_duration(timeout), wait_for_workers=False, multi_tenant=True, **options)


def _duration(seconds: float) -> timedelta:
    return timedelta(seconds=min(seconds, 1e6))  # it knows no infinity


def _listen(host: str, port: int) -> socket.socket:
    """On the loopback if the job is on one machine, on an address if that is what the others connect to, else on all.

    A name is no such address: on other machines it may stand for another address of this one.
    """
    everywhere = [(socket.AF_INET6, ""), (socket.AF_INET, "")]
    if host.lower() == "localhost":
        places = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
    else:
        try:
            version = ipaddress.ip_address(host).version
        except ValueError:
            places = everywhere
        else:
            places = [(socket.AF_INET6 if version == 6 else socket.AF_INET, host)]
            places += [] if _is_loopback(host) else everywhere  # an address of a gateway that forwards to this machine
    refused = OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    for family, address in places:
        both = family == socket.AF_INET6 and not address and socket.has_dualstack_ipv6()
        try:
            return socket.create_server((address, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
        except OSError as error:
            refused = error
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                break
    raise refused


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _serve_together(place: Place, clock: Clock, refused: OSError) -> Any:
    """Rank 0's port is taken. Maybe by torch's store in this process, or by a store in another one, maybe a second rank
    0: then that one will do, and the rendezvous there tells whether two are rank 0."""
    reason = os.strerror(refused.errno) if refused.errno else str(refused)
    text = f"rank 0 could not serve the ranks' store at {place.address} ({reason})"
    if refused.errno != errno.EADDRINUSE:
        raise NcclSystemError(f"{text}: set another MASTER_PORT, or MASTER_ADDR, on all ranks") from refused
    import torch.distributed as dist

    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # it serves at another port
            return _tcp_store(place.host, place.port, clock.timeout, is_master=True)
    try:
        return _Search(place, Clock(max(min(_TAKEN_SECONDS, clock.left()), 0.1))).store()
    except NcclError as error:
        raise NcclSystemError(
            f"{text}: another process listens there, and it is no store that could be shared\n"
            f"  end it, if it is left over from an earlier run (ss -ltnp 'sport = :{place.port}' names it), or set "
            "another MASTER_PORT on all ranks"
        ) from error


class _Search:
    """Connecting until somebody answers as a store; knows at any time why none was reached so far."""

    def __init__(self, place: Place, clock: Clock) -> None:
        self.place = place
        self.clock = clock
        self.reason = "still connecting"

    def store(self) -> Any:
        wait = Wait(self.clock)
        store = wait.beside(lambda: self._search(wait), self._late)
        store.set_timeout(_duration(self.clock.timeout))
        return store

    def _search(self, wait: Wait) -> Any:
        pause = 0.02
        while True:
            try:
                return self._connect()
            except (NcclError, Abandoned):
                raise
            except socket.gaierror as error:
                self.reason = f"MASTER_ADDR={self.place.host!r} does not resolve: {error.strerror}"
            except TimeoutError:
                self.reason = "no answer to the attempts to connect"
            except OSError as error:
                self.reason = f"{os.strerror(error.errno) if error.errno else error}"
            except RuntimeError as error:  # DistError
                self._judge(error)
            if self.clock.left() <= 0:
                raise self._late()
            wait.pause(max(min(pause, self.clock.left()), 0.0))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _connect(self) -> Any:
        """Tried here first, since torch prints a long trace for a port where nobody listens."""
        place, seconds = self.place, max(min(_CONNECT_SECONDS, self.clock.left() / 3), 0.1)
        with socket.create_connection((place.host, place.port), timeout=seconds) as probe:
            address = probe.getpeername()[0]
        if not self.reason.startswith(_CLOSES):
            self.reason = _SILENT
        return _tcp_store(address, place.port, seconds, is_master=False)

    def _judge(self, error: Exception) -> None:
        said = first_line(error)
        if "Ping failed" in said:  # other bytes than a store's
            raise NcclSystemError(
                f"what listens at {self.place.address} is no torch.distributed store, so the ranks cannot meet there: "
                f"another program has MASTER_PORT={self.place.port}. Set another port on all ranks ({said})"
            ) from error
        self.reason = f"{_CLOSES} ({said})"

    def _late(self) -> NcclTimeout:
        place = self.place
        server = "torchrun's agent" if place.agent else "rank 0"
        return NcclTimeout(
            f"rank {place.rank} reached no store at {place.address} within {self.clock.seconds()}: has {server} "
            f"started there? ({self.reason})\n"
            "  MASTER_ADDR and MASTER_PORT have to be the same on all ranks, and reachable from this machine"
        )
