"""Who comes in where ranks listen: those who know the key. Strangers take no memory, no place, and no time."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from ranks import HOST, Place, RankPool

import pynccl
from pynccl import Communicator, admission
from pynccl.host import store
from pynccl.host.failure import HostFailure
from pynccl.host.rendezvous import Client

KEY = b"the key of a store"
LOCAL = "127.0.0.1"


def dialled(port: int) -> socket.socket:
    return socket.create_connection((LOCAL, port), 10)


def admitted(port: int, key: bytes = KEY, who: tuple[int, int] = (0, 0)) -> socket.socket:
    sock = dialled(port)
    admission.Caller(sock, key, who).wait(time.monotonic() + 10)
    sock.settimeout(10)
    return sock


@pytest.fixture
def server() -> Iterator[store.Server]:
    made = store.Server(local=True, key=KEY)
    yield made
    made.close()


@pytest.fixture
def places() -> Iterator[RankPool]:
    pool = RankPool({**HOST, "MASTER_ADDR": LOCAL}, communicators=False)
    yield pool
    pool.close()


# The job goes on


def made_id(place: Place, key: str = "") -> tuple[bytes, list[str]]:
    """An id of this process, which listens from then on; and the addresses at which it does."""
    if key:
        os.environ[admission.KEY_VARIABLE] = key
    torch.ones(2).sum()
    identity = bytes(pynccl.get_unique_id())
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(fd))) as one:
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.append(one.getsockname()[0])
    return identity, found


def resident(_: Place) -> int:
    """KB of memory of a process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def works(place: Place, identity: bytes) -> list[float]:
    with Communicator.init(place.size, identity, place.rank, timeout=60) as comm:
        below = comm.split(0)
        for _ in range(50):
            x = below.all_reduce(torch.ones(1000))
        below.destroy()
    return x.unique().tolist()


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


CONSTANT = b"PYNCCLh2"  # with which clients were once let in
ATTACKS = [
    CONSTANT + b"".join(framed(b'["%d",0,65536,"x"]' % n) for n in range(800)),
    CONSTANT + framed(json.dumps(["n" * (8 << 20), 0, 2, "x"]).encode()),
    CONSTANT + b"\xff" * 4 + bytes(1 << 20),
    CONSTANT + framed(b"[" * 1_000_000),
    secrets.token_bytes(1 << 20),
]


def attack(port: int, data: bytes) -> socket.socket:
    """Say all that, as far as it is taken, and read nothing back."""
    sock = dialled(port)
    sock.settimeout(0.1)
    with contextlib.suppress(OSError):
        sock.sendall(data)
    return sock


def test_strangers_take_neither_memory_nor_time(places: RankPool) -> None:
    (identity, at), *_ = places.run(3, made_id)
    assert at == [LOCAL]  # a job on one machine listens on the loopback alone
    port = int.from_bytes(identity[8:10], "little")
    before = places.run(1, resident)[0]
    held = [attack(port, data) for data in ATTACKS for _ in range(3)]
    held += [dialled(port) for _ in range(300)]  # more than may wait at once
    grown = places.run(1, resident)[0] - before
    over = threading.Event()

    def annoy() -> None:
        while not over.is_set():
            for data in ATTACKS:
                with contextlib.suppress(OSError):
                    attack(port, data[:100_000]).close()

    thread = threading.Thread(target=annoy)
    thread.start()
    try:
        assert places.run(3, works, identity) == [[3.0]] * 3
    finally:
        over.set()
        thread.join()
        for sock in held:
            sock.close()
    assert grown < 16_000, f"{grown} KB"


# Who is admitted


def test_who_has_another_key_or_only_heard_a_caller_is_refused(server: store.Server) -> None:
    with pytest.raises(admission.Refused, match="another key"):
        admitted(server.port, b"some other key")
    with pytest.raises(HostFailure, match=r"another key.*PYNCCL_JOB_KEY is not the same on all ranks"):
        Client(LOCAL, server.port, b"some other key", time.monotonic() + 10)
    heard = bytearray()

    class Wiretap:
        def __init__(self, sock: socket.socket) -> None:
            self.sock, self.settimeout, self.recv = sock, sock.settimeout, sock.recv

        def sendall(self, data: bytes) -> None:
            heard.extend(data)
            self.sock.sendall(data)

    with dialled(server.port) as member:
        admission.Caller(Wiretap(member), KEY).wait(time.monotonic() + 10)
    with dialled(server.port) as poser:
        poser.sendall(heard)
        said = b"".join(iter(partial(poser.recv, 1 << 16), b""))
    assert len(heard) == 56 and said[24:] == bytes(32) and KEY not in heard


def test_who_listens_has_to_know_the_key_too() -> None:
    """A process that has taken the port of one that ended is found out, though it says back what it hears."""
    with socket.create_server((LOCAL, 0)) as door:

        def pose() -> None:
            sock, _ = door.accept()
            with sock:
                sock.sendall(b"PYNCCLa1" + bytes(16))
                sock.sendall(sock.recv(56, socket.MSG_WAITALL)[-32:])

        thread = threading.Thread(target=pose)
        thread.start()
        with pytest.raises(admission.Refused):
            admitted(door.getsockname()[1])
        thread.join(10)


# The key of the job


def meets(place: Place, identity: bytes, keys: tuple[str, str]) -> str:
    """What a rank is told, which joins with its own key. Rank 0 only listens where that is in vain."""
    os.environ[admission.KEY_VARIABLE] = keys[place.rank]
    if place.rank == 0 and keys[0] != keys[1]:
        return ""
    try:
        with Communicator.init(2, identity, place.rank, timeout=200) as comm:
            comm.barrier()
    except pynccl.NcclError as error:
        return str(error)
    return "met"


def test_with_a_key_of_the_job_the_unique_id_alone_lets_nobody_in(places: RankPool) -> None:
    for first, second in (("a" * 32, "a" * 32), ("a" * 32, "b" * 32), ("a" * 32, ""), ("", "b" * 32)):
        identity, _ = places.run(1, made_id, first)[0]
        _, said = places.run(2, meets, identity, (first, second))
        if first == second:
            assert said == "met"
        else:
            assert "PYNCCL_JOB_KEY is not the same on all ranks" in said
            assert not first or first not in said
