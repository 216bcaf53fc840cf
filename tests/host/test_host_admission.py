"""Ranks admit only connections that know the key. Other connections cannot exhaust memory, slots or time."""

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


def connect(port: int) -> socket.socket:
    return socket.create_connection((LOCAL, port), 10)


def connect_with_key(port: int, key: bytes = KEY, sender: tuple[int, int] = (0, 0)) -> socket.socket:
    sock = connect(port)
    admission.ClientHandshake(sock, key, sender).wait(time.monotonic() + 10)
    sock.settimeout(10)
    return sock


@pytest.fixture
def server() -> Iterator[store.Server]:
    server = store.Server(local=True, key=KEY)
    yield server
    server.close()


@pytest.fixture
def pool() -> Iterator[RankPool]:
    pool = RankPool({**HOST, "MASTER_ADDR": LOCAL}, communicators=False)
    yield pool
    pool.close()


# The job continues


def create_id(place: Place, key: str = "") -> tuple[bytes, list[str]]:
    """Create a unique id, which makes this process listen. Return it and the addresses that it listens on."""
    if key:
        os.environ[admission.KEY_VARIABLE] = key
    torch.ones(2).sum()
    identity = bytes(pynccl.get_unique_id())
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(fd))) as sock:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.append(sock.getsockname()[0])
    return identity, found


def resident_kb(_: Place) -> int:
    """Return the resident memory of a process in KB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def use_communicator(place: Place, identity: bytes) -> list[float]:
    with Communicator.init(place.size, identity, place.rank, timeout=60) as comm:
        child = comm.split(0)
        for _ in range(50):
            x = child.all_reduce(torch.ones(1000))
        child.destroy()
    return x.unique().tolist()


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


OLD_GREETING = b"PYNCCLh2"  # a constant that was once enough to be admitted
ATTACKS = [
    OLD_GREETING + b"".join(frame(b'["%d",0,65536,"x"]' % n) for n in range(800)),
    OLD_GREETING + frame(json.dumps(["n" * (8 << 20), 0, 2, "x"]).encode()),
    OLD_GREETING + b"\xff" * 4 + bytes(1 << 20),
    OLD_GREETING + frame(b"[" * 1_000_000),
    secrets.token_bytes(1 << 20),
]


def attack(port: int, data: bytes) -> socket.socket:
    """Send the data, as far as the peer accepts it, and read nothing."""
    sock = connect(port)
    sock.settimeout(0.1)
    with contextlib.suppress(OSError):
        sock.sendall(data)
    return sock


def test_unauthenticated_connections_take_neither_memory_nor_time(pool: RankPool) -> None:
    (identity, addresses), *_ = pool.run(3, create_id)
    assert addresses == [LOCAL]  # a job on one node listens on loopback only
    port = int.from_bytes(identity[8:10], "little")
    before = pool.run(1, resident_kb)[0]
    held = [attack(port, data) for data in ATTACKS for _ in range(3)]
    held += [connect(port) for _ in range(300)]  # more than may be pending at once
    grown = pool.run(1, resident_kb)[0] - before
    done = threading.Event()

    def keep_attacking() -> None:
        while not done.is_set():
            for data in ATTACKS:
                with contextlib.suppress(OSError):
                    attack(port, data[:100_000]).close()

    thread = threading.Thread(target=keep_attacking)
    thread.start()
    try:
        assert pool.run(3, use_communicator, identity) == [[3.0]] * 3
    finally:
        done.set()
        thread.join()
        for sock in held:
            sock.close()
    assert grown < 16_000, f"{grown} KB"


# Admission


def test_a_wrong_key_and_a_replayed_handshake_are_rejected(server: store.Server) -> None:
    with pytest.raises(admission.HandshakeError, match="another key"):
        connect_with_key(server.port, b"some other key")
    with pytest.raises(HostFailure, match=r"another key.*PYNCCL_JOB_KEY is not the same on all ranks"):
        Client(LOCAL, server.port, b"some other key", time.monotonic() + 10)
    recorded = bytearray()

    class Wiretap:
        def __init__(self, sock: socket.socket) -> None:
            self.sock, self.settimeout, self.recv = sock, sock.settimeout, sock.recv

        def sendall(self, data: bytes) -> None:
            recorded.extend(data)
            self.sock.sendall(data)

    with connect(server.port) as member:
        admission.ClientHandshake(Wiretap(member), KEY).wait(time.monotonic() + 10)
    with connect(server.port) as impostor:
        impostor.sendall(recorded)
        answer = b"".join(iter(partial(impostor.recv, 1 << 16), b""))
    assert len(recorded) == 56 and answer[24:] == bytes(32) and KEY not in recorded


def test_the_listener_must_know_the_key_too() -> None:
    """A process that took over the port of one that exited is detected, although it echoes what it receives."""
    with socket.create_server((LOCAL, 0)) as listener:

        def impersonate() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(b"PYNCCLa1" + bytes(16))
                sock.sendall(sock.recv(56, socket.MSG_WAITALL)[-32:])

        thread = threading.Thread(target=impersonate)
        thread.start()
        with pytest.raises(admission.HandshakeError):
            connect_with_key(listener.getsockname()[1])
        thread.join(10)


# The key of the job


def join(place: Place, identity: bytes, keys: tuple[str, str]) -> str:
    """Join with this rank's key and return "joined" or the error. Rank 0 only listens if the keys differ."""
    os.environ[admission.KEY_VARIABLE] = keys[place.rank]
    if place.rank == 0 and keys[0] != keys[1]:
        return ""
    try:
        with Communicator.init(2, identity, place.rank, timeout=200) as comm:
            comm.barrier()
    except pynccl.NcclError as error:
        return str(error)
    return "joined"


def test_with_a_job_key_the_unique_id_alone_admits_no_rank(pool: RankPool) -> None:
    for first, second in (("a" * 32, "a" * 32), ("a" * 32, "b" * 32), ("a" * 32, ""), ("", "b" * 32)):
        identity, _ = pool.run(1, create_id, first)[0]
        _, outcome = pool.run(2, join, identity, (first, second))
        if first == second:
            assert outcome == "joined"
        else:
            assert "PYNCCL_JOB_KEY is not the same on all ranks" in outcome
            assert not first or first not in outcome
