"""Who comes in where ranks listen: those who know the key. Strangers take no memory, no place, and no time."""

from __future__ import annotations

import contextlib
import json
import secrets
import selectors
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from host_calls import in_threads, unique_id

import pynccl
from pynccl import Communicator, admission
from pynccl.host import connect, store
from pynccl.host.failure import HostFailure
from pynccl.host.rendezvous import Client

ROOT = Path(__file__).parents[2]
KEY = b"the key of a store"
LOCAL = "127.0.0.1"


def dialled(port: int) -> socket.socket:
    return socket.create_connection((LOCAL, port), 10)


def admitted(port: int, key: bytes = KEY, who: tuple[int, int] = (0, 0)) -> socket.socket:
    sock = dialled(port)
    admission.Caller(sock, key, who).wait(time.monotonic() + 10)
    sock.settimeout(10)
    return sock


def is_closed(sock: socket.socket) -> bool:
    """By the other end, within 10 s; what it had said before is read."""
    sock.settimeout(10)
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


@pytest.fixture
def server() -> Iterator[store.Server]:
    made = store.Server(local=True, key=KEY)
    yield made
    made.close()


# The job goes on

RANK = """
    import sys, time, torch, pynccl
    def rss():
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    identity = bytes(pynccl.get_unique_id()) if rank == 0 else bytes.fromhex(sys.argv[3])
    torch.ones(2).sum()
    print(identity.hex(), flush=True)
    for line in sys.stdin:
        if line == "rss\\n":
            print(rss(), flush=True)
        else:
            began = time.monotonic()
            with pynccl.Communicator.init(size, identity, rank, timeout=60) as comm:
                below = comm.split(0)
                for _ in range(50):
                    x = below.all_reduce(torch.ones(1000))
                below.destroy()
            assert x.tolist() == [float(size)] * 1000
            print(time.monotonic() - began, flush=True)
            break
"""


class Rank:
    """A process of a job; it does as it is told on its standard input."""

    def __init__(self, rank: int, size: int, identity: str = "") -> None:
        command = [sys.executable, "-c", textwrap.dedent(RANK), str(rank), str(size), identity]
        pipe = subprocess.PIPE
        environment = {"PYTHONPATH": str(ROOT), "PYNCCL_LIBRARY": "host", "MASTER_ADDR": LOCAL, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self.identity = self.said()

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, word: str) -> float:
        self.tell(word)
        return float(self.said())


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


CONSTANT = b"PYNCCLh2"  # with which clients were once let in
ATTACKS: dict[str, bytes] = {
    "small frames": CONSTANT + b"".join(framed(b'["%d",0,65536,"x"]' % n) for n in range(800)),
    "long names": CONSTANT + framed(json.dumps(["n" * (8 << 20), 0, 2, "x"]).encode()),
    "a long endpoint": CONSTANT + framed(json.dumps(["n", 0, 2, "x" * (8 << 20)]).encode()),
    "a huge length": CONSTANT + b"\xff" * 4 + bytes(1 << 20),
    "brackets": CONSTANT + framed(b"[" * 1_000_000),
    "garbage": secrets.token_bytes(1 << 20),
    "zeros": bytes(1 << 20),
}


def attack(port: int, data: bytes) -> socket.socket:
    """Say all that, as far as it is taken, and read nothing back."""
    sock = dialled(port)
    sock.settimeout(0.5)
    with contextlib.suppress(OSError):
        sock.sendall(data)
    return sock


@pytest.mark.parametrize("size", [2, 4])
def test_strangers_take_neither_memory_nor_time(size: int) -> None:
    first = Rank(0, size)
    ranks = [first, *(Rank(rank, size, first.identity) for rank in range(1, size))]
    port = int.from_bytes(bytes.fromhex(first.identity)[8:10], "little")
    over, held = threading.Event(), []
    try:
        before = first.ask("rss")
        for data in ATTACKS.values():
            held += [attack(port, data) for _ in range(5)]
        held += [dialled(port) for _ in range(300)]  # more than may wait at once
        grown = first.ask("rss") - before

        def annoy() -> None:
            while not over.is_set():
                for data in ATTACKS.values():
                    with contextlib.suppress(OSError):
                        attack(port, data[:100_000]).close()

        thread = threading.Thread(target=annoy)
        thread.start()
        for rank in ranks:
            rank.tell("go")
        seconds = [float(rank.said()) for rank in ranks]
    finally:
        over.set()
        for rank in ranks:
            rank.process.kill()
            rank.process.communicate()
        for sock in held:
            sock.close()
    thread.join()
    assert grown < 16_000, f"{grown} KB"
    assert max(seconds) < 10.0, seconds  # 0.2 on a machine without other work


def test_strangers_at_the_door_do_not_keep_ranks_out() -> None:
    """Garbage, silence and endings at every port that listens, while ranks join."""
    over = threading.Event()

    def annoy(port: int) -> None:
        held: list[socket.socket] = []
        while not over.is_set():
            try:
                sock = socket.create_connection((LOCAL, port), 1)
                sock.sendall(secrets.token_bytes(64))
            except OSError:
                time.sleep(0.001)
                continue
            held.append(sock)
            if len(held) > 300:
                for old in held[:150]:
                    old.close()
                del held[:150]

    identity = bytes(unique_id())
    threads = [threading.Thread(target=annoy, args=(int.from_bytes(identity[8:10], "little"),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            made = in_threads(3, partial(Communicator.init, 3, bytes(unique_id()), timeout=20))
            assert [comm.rank for comm in made] == [0, 1, 2]
            pynccl.abort(made)
    finally:
        over.set()
        for thread in threads:
            thread.join()


# Who is admitted


def test_another_key_is_refused_at_once_and_the_error_says_so(server: store.Server) -> None:
    with pytest.raises(admission.Refused, match="another key"):
        admitted(server.port, b"some other key")
    with pytest.raises(HostFailure, match=r"another key.*PYNCCL_JOB_KEY is not the same on all ranks"):
        Client(LOCAL, server.port, b"some other key", time.monotonic() + 10)
    admitted(server.port).close()


def test_what_was_heard_once_lets_nobody_in(server: store.Server) -> None:
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
    """A process that has taken the port of one that ended learns nothing, and is found out."""
    hello = b"PYNCCLa1" + bytes(16)
    for reply in (lambda answer: answer[-32:], lambda _: secrets.token_bytes(32), lambda _: bytes(32)):
        with socket.create_server((LOCAL, 0)) as door:

            def pose(door: socket.socket = door, reply: Callable[[bytes], bytes] = reply) -> None:
                sock, _ = door.accept()
                with sock:
                    sock.sendall(hello)
                    sock.sendall(reply(sock.recv(56, socket.MSG_WAITALL)))

            thread = threading.Thread(target=pose)
            thread.start()
            with pytest.raises(admission.Refused):
                admitted(door.getsockname()[1])
            thread.join(10)


def test_a_rank_that_dials_is_admitted_by_the_listeners_token_alone() -> None:
    """Silence, garbage, another token and ranks that are not expected, at the port of a rank that waits for a peer."""
    low, high = connect.Listener(local=True), connect.Listener(local=True)
    endpoints, names = [low.endpoint, high.endpoint], ["rank 0", "rank 1"]
    port = connect.read_endpoint(low.endpoint).port
    found: list[dict[int, connect.Channels]] = []

    def run(listener: connect.Listener, rank: int) -> None:
        found.append(connect.Connecting(listener, rank, endpoints, "test", names, lambda: None).run(20))

    waits = threading.Thread(target=run, args=(low, 0))
    waits.start()
    strangers = [dialled(port), attack(port, secrets.token_bytes(200)), attack(port, b"PYNCCLc2" + bytes(48))]
    with pytest.raises(admission.Refused):
        admitted(port, b"another token", (1, 0))
    unexpected = [admitted(port, low.token, who) for who in ((0, 0), (2, 0), (1, 3))]  # of a rank, but none to come
    assert all(is_closed(sock) for sock in unexpected)
    run(high, 1)
    waits.join(20)
    by_rank = {rank: made for made in found for rank in made}
    by_rank[0][0].data.setblocking(True)
    by_rank[1][1].data.sendall(b"to rank 1")
    assert by_rank[0][0].data.recv(100) == b"to rank 1"
    for sock in (*strangers, *unexpected, *by_rank[0][0], *by_rank[1][1]):
        sock.close()


def test_the_oldest_of_those_who_wait_go_first_and_nobody_stays_for_long() -> None:
    listener, selector = admission.listen(True), selectors.DefaultSelector()
    port, came = listener.getsockname()[1], []
    door = admission.Acceptor(listener, selector, KEY, lambda sock, who: came.append((sock, who)))
    silent = [dialled(port) for _ in range(admission.STRANGERS + 20)]
    while len(door.waiting) < admission.STRANGERS or selector.select(0):
        for ready, _ in selector.select(1):
            door.handle(ready.fileobj)
    assert all(is_closed(sock) for sock in silent[:20]) and len(door.waiting) == admission.STRANGERS
    silent[-1].sendall(b"x")  # a byte now and then is no answer
    door.drop(seconds=0.0)
    assert not door.waiting and is_closed(silent[-1])
    member = threading.Thread(target=lambda: silent.append(admitted(port, who=(3, 4))))
    member.start()
    while not came:
        for ready, _ in selector.select(1):
            door.handle(ready.fileobj)
    member.join(10)
    assert [who for _, who in came] == [(3, 4)]
    door.close()
    for sock in [*silent, came[0][0]]:
        sock.close()


# What those who are in may ask


def test_a_client_that_sends_nonsense_does_not_end_the_store(server: store.Server) -> None:
    lists = [b'["k", 0, 2, 5]', b'["k", 2, 2, "x"]', b'[[], 0, 1, "x"]', b'["k", 0, 100000000, "x"]', b'["k"]']
    nonsense = [b"[" * 4000, b"{", *lists, b"[]", b"7", b"\xff", b'["' + b"k" * 5000 + b'", 0, 2, "x"]']
    for body in nonsense:
        with admitted(server.port) as client:
            client.sendall(framed(body))
            assert client.recv(1) == b"", body[:20]  # dropped, without an answer
    rank = Client(LOCAL, server.port, KEY, time.monotonic() + 10)
    assert rank.answer(["k", 1, 2, "text"]) == ["", [0], []]
    assert rank.answer(["k", 0, 2, "other"]) == ["", [], ["other", "text"]]
    rank.close()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_client_that_does_not_read_its_answers_is_let_go(server: store.Server) -> None:
    """Each answer names 65,536 ranks that are missing."""
    with admitted(server.port) as client:
        until(lambda: server._clients)
        client.sendall(framed(b'["k", 0, 65536, "x"]') * 1000)
        until(lambda: not server._clients)
    with admitted(server.port) as patient, patient.makefile("rb") as answers:  # one that reads gets them all
        for _ in range(20):
            patient.sendall(framed(b'["k", 0, 65536, ""]'))
            (length,) = struct.unpack("<I", answers.read(4))
            assert len(json.loads(answers.read(length))[1]) == 65535


def test_meetings_are_bounded_and_the_newest_stay() -> None:
    table = store.Store()
    for number in range(store.MAX_MEETINGS + 100):
        table.answer([f"k{number}", 0, 2, "x"])
    assert len(table._meetings) == store.MAX_MEETINGS
    assert table.answer([f"k{number}", 1, 2, "y"]) == ["", [], ["x", "y"]]


def test_names_below_a_meeting_stay_short() -> None:
    """As of a shrink by a thousand ranks, of a shrink, of a split."""
    meeting = pynccl.host.rendezvous.MeetingPlace(store.Store(), "name")  # type: ignore[attr-defined]
    names = {meeting.below("split/1/0").name, meeting.below("split/1/1").name, meeting.name}
    for _ in range(5):
        meeting = meeting.below("shrink/" + ".".join(map(str, range(1000))))
        names.add(meeting.name)
    assert len(names) == 8 and max(map(len, names)) <= 64


# The key of the job

MEETS = """
    import sys, pynccl
    identity = bytes.fromhex(sys.argv[2]) if len(sys.argv) > 2 else bytes(pynccl.get_unique_id())
    print(identity.hex(), flush=True)
    with pynccl.Communicator.init(2, identity, int(sys.argv[1]), timeout=float(sys.stdin.readline())) as comm:
        comm.barrier()
    print("met")
"""


def meets(rank: int, identity: str, key: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(MEETS), str(rank), *([identity] if identity else [])]
    environment = {"PYTHONPATH": str(ROOT), "PYNCCL_LIBRARY": "host", "MASTER_ADDR": LOCAL}
    environment |= {"PYNCCL_JOB_KEY": key} if key else {}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)


@pytest.mark.parametrize(("own", "other"), [("a" * 32, "a" * 32), ("a" * 32, "b" * 32), ("a" * 32, ""), ("", "b" * 32)])
def test_with_a_key_of_the_job_the_unique_id_alone_lets_nobody_in(own: str, other: str) -> None:
    first = meets(0, "", own)
    assert first.stdout is not None
    identity = first.stdout.readline().strip()
    second = meets(1, identity, other)
    try:
        if own == other:
            first.stdin.write("30\n")  # type: ignore[union-attr]
            first.stdin.flush()  # type: ignore[union-attr]
            assert second.communicate("30\n", timeout=60)[0].endswith("met\n")
            assert first.communicate(timeout=60)[0] == "met\n"
        else:
            _, said = second.communicate("200\n", timeout=90)  # long before its time is over
            assert second.returncode and "PYNCCL_JOB_KEY is not the same on all ranks" in said
            assert own not in said or not own
    finally:
        for process in (first, second):
            process.kill()
            process.communicate()
