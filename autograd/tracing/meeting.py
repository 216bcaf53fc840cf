"""How the ranks of a trace meet: the clocks compared at its begin, what each has recorded handed to rank 0 at its end.

They meet over connections of their own (TCP, to rank 0), so that nothing here can meet a call of the communicator, or
wait for one: a rank may raise, end or stop at any time. Rank 0 takes what it is sent in a thread for each rank. Nobody
waits for anybody longer than the deadline.

Only who knows a key is admitted, which the ranks tell each other through the communicator (`pynccl.admission`). A
message is its length and its bytes; what ranks hand over is JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import zlib
from dataclasses import dataclass
from typing import NamedTuple

from pynccl import Communicator
from pynccl.admission import Acceptor, Caller, Who, listen
from pynccl.watch.folder import machine

from ..agreement import broadcast_object, gathered
from .marks import now
from .spans import Part, from_json, to_json

_CONNECT_SECONDS = 5.0
_ATTEMPTS = 3  # a connection may be lost among strangers
_ROUNDS = 20  # of which the shortest compares the clocks
_MOST_BYTES = 1 << 30  # of a message
_LENGTH, _TIME = struct.Struct("!Q"), struct.Struct("!d")
_ASK, _DONE = b"?", b"."


class Offset(NamedTuple):
    """What the clock of a rank shows more than that of rank 0, and by how much that may be wrong: seconds."""

    seconds: float = 0.0
    uncertainty: float = 0.0


_SAME = Offset()


@dataclass
class _Guest:
    """A rank as rank 0 knows it. offset: before and after; part: what it has handed over; gone: why it has not"""

    rank: int
    link: socket.socket
    here: bool  # on the machine of rank 0
    before: Offset = _SAME
    after: Offset | None = None
    part: Part | None = None
    gone: str = ""


class Host:
    """Rank 0."""

    def __init__(self, comm: Communicator, listener: socket.socket, key: bytes, machines: list[int]) -> None:
        self._guests: dict[int, _Guest] = {}
        self._threads: list[threading.Thread] = []
        self.missing: dict[int, str] = {}
        self._machines = machines
        self._size = comm.size
        end = time.monotonic() + _CONNECT_SECONDS
        with (
            selectors.DefaultSelector() as selector,
            contextlib.closing(Acceptor(listener, selector, key, self._welcome)) as door,
        ):
            while len(self._guests) < comm.size - 1 and (left := end - time.monotonic()) > 0:
                for ready, _ in selector.select(left):
                    door.handle(ready.fileobj)  # type: ignore[arg-type]
                door.drop()

    def _welcome(self, link: socket.socket, who: Who) -> None:
        rank, _ = who
        if not 0 < rank < self._size or rank in self._guests:
            link.close()
            return
        guest = self._guests[rank] = _Guest(rank, link, self._machines[rank] == self._machines[0])
        thread = threading.Thread(target=self._attend, args=(guest,), name=f"pynccl-trace-{rank}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _attend(self, guest: _Guest) -> None:
        """Until it hands over what it has, in a thread."""
        try:
            guest.link.settimeout(_CONNECT_SECONDS)
            if not guest.here:
                guest.before = _compare(guest.link)
            _send(guest.link, _DONE)
            guest.link.settimeout(None)
            data = _receive(guest.link, _MOST_BYTES)
            guest.link.settimeout(_CONNECT_SECONDS)
            if not guest.here:
                guest.after = _compare(guest.link)
            guest.part = from_json(json.loads(data))
            _send(guest.link, _DONE)
        except Exception as error:
            guest.gone = f"it has ended, or its connection has: {error}"

    def gather(self, seconds: float) -> tuple[list[Part], dict[int, Offset]]:
        """(what the others have handed over within so many seconds, their clocks); the rest is in `missing`."""
        end = now() + seconds
        for thread in self._threads:
            thread.join(max(end - now(), 0.0))
        for rank in range(1, self._size):
            guest = self._guests.get(rank)
            if guest is None:
                self.missing[rank] = "it did not reach rank 0 at the begin"
            elif guest.part is None:
                self.missing[rank] = guest.gone or f"it did not come to the end of the block within {seconds:g} s"
        self.close()
        found = [guest for guest in self._guests.values() if guest.part is not None]
        offsets = {guest.rank: _between(guest.before, guest.after) for guest in found}
        return [guest.part for guest in found if guest.part is not None], offsets

    def close(self) -> None:
        for guest in self._guests.values():
            with contextlib.suppress(OSError):
                guest.link.shutdown(socket.SHUT_RDWR)
            if guest.part is not None or guest.gone:
                guest.link.close()


class Guest:
    """Any other rank. link: None where rank 0 was not reached"""

    def __init__(self, rank: int, addresses: list[tuple[str, int]], key: bytes) -> None:
        self.link: socket.socket | None = None
        end = time.monotonic() + _CONNECT_SECONDS
        for address in addresses * _ATTEMPTS:
            with contextlib.suppress(OSError, ValueError):
                link = socket.create_connection(address, max(min(end - time.monotonic(), 2.0), 0.1))
                Caller(link, key, (rank, 0)).wait(end)
                link.settimeout(_CONNECT_SECONDS)
                _answer(link)
                self.link = link
                return

    def hand_over(self, part: Part, seconds: float) -> str:
        """To rank 0, within so many seconds; returns why it could not be."""
        if self.link is None:
            return "rank 0 was not reached at the begin"
        try:
            with self.link as link:
                link.settimeout(seconds)
                _send(link, json.dumps(to_json(part), allow_nan=False).encode())
                _answer(link)
        except TimeoutError:
            return f"rank 0 did not take it within {seconds:g} s"
        except (OSError, ValueError) as error:
            return f"rank 0 has left the block, or has ended: {error}"
        return ""

    def close(self) -> None:
        if self.link is not None:
            self.link.close()


def meet(comm: Communicator) -> Host | Guest:
    """At the begin; every rank of the communicator must come."""
    machines = [row[0] for row in gathered(comm, [zlib.crc32(f"{machine()} {_clock_of_machine()}".encode())])]
    together = len(set(machines)) == 1
    listener = listen(together) if comm.rank == 0 else None
    port = listener.getsockname()[1] if listener is not None else 0
    names = ["127.0.0.1"] if together else _names()
    names, port, key = broadcast_object(comm, (names, port, secrets.token_hex(16)))
    if listener is not None:
        return Host(comm, listener, key.encode(), machines)
    return Guest(comm.rank, [(name, port) for name in names], key.encode())


def _clock_of_machine() -> str:
    """What tells a container whose monotonic clock is set apart."""
    with contextlib.suppress(OSError), open("/proc/self/timens_offsets") as file:
        return file.read()
    return ""


def _names() -> list[str]:
    """Under which the other machines may reach this one, likely ones first."""
    found = [os.environ["MASTER_ADDR"]] if os.environ.get("RANK") == "0" and "MASTER_ADDR" in os.environ else []
    found.append(socket.gethostname())
    with contextlib.suppress(OSError):
        infos = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
        found += [str(info[4][0]) for info in infos]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: tells the address from which it would be sent
        found.append(probe.getsockname()[0])
    return list(dict.fromkeys(found))


def _compare(link: socket.socket) -> Offset:
    """The clock at the other end: of several questions, by the one that was answered soonest."""
    best = Offset(0.0, float("inf"))
    for _ in range(_ROUNDS):
        before = now()
        _send(link, _ASK)
        (theirs,) = _TIME.unpack(_receive(link, _TIME.size))
        after = now()
        if (after - before) / 2 < best.uncertainty:
            best = Offset(theirs - (before + after) / 2, (after - before) / 2)
    return best


def _answer(link: socket.socket) -> None:
    """Questions about this clock, until all is done."""
    while (said := _receive(link, 1)) == _ASK:
        _send(link, _TIME.pack(now()))
    if said != _DONE:
        raise ValueError(f"rank 0 said {said!r}")


def _between(before: Offset, after: Offset | None) -> Offset:
    """Of the whole block: clocks drift."""
    if after is None:
        return before
    middle, apart = (before.seconds + after.seconds) / 2, abs(before.seconds - after.seconds) / 2
    return Offset(middle, max(before.uncertainty, after.uncertainty) + apart)


def _send(link: socket.socket, data: bytes) -> None:
    link.sendall(_LENGTH.pack(len(data)) + data)


def _receive(link: socket.socket, most: int) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(link, _LENGTH.size))
    if length > most:
        raise ValueError(f"a message of {length} bytes, expected {most} at most")
    return _exactly(link, length)


def _exactly(link: socket.socket, count: int) -> bytes:
    found = bytearray()
    limit = link.gettimeout()
    end = None if limit is None else time.monotonic() + limit
    while len(found) < count:
        if end is not None and time.monotonic() > end:
            raise TimeoutError("timed out")
        piece = link.recv(min(count - len(found), 1 << 20))
        if not piece:
            raise ConnectionError("the connection was closed")
        found += piece
    return bytes(found)
