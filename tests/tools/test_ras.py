"""What NCCL's RAS service says is taken over, and nothing that listens in its place can hold the tool up."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from pynccl.tools.hang import ras, report

STATUS = """NCCL version 2.27.3 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12090

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      1          4            1          4        4

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         1         4         4         4   RUNNING  MISMATCH

Errors
======

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  3 ranks have launched up to operation 41
  1 ranks have launched up to operation 40
"""

Behaviour = Callable[[socket.socket], None]


@contextlib.contextmanager
def serving(behaviour: Behaviour) -> Iterator[str]:
    """A server on this machine that treats one client so. Gives its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                client, _ = server.accept()
                with client:
                    client.settimeout(10)
                    behaviour(client)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            thread.join(10)
            assert not thread.is_alive()


def ncclras(heard: list[str], hello: str = "SERVER PROTOCOL 2", status: bytes = STATUS.encode()) -> Behaviour:
    """A server that keeps to the protocol."""

    def behaviour(client: socket.socket) -> None:
        with client.makefile("rwb") as stream:
            for command in stream:
                heard.append(command.decode())
                if command.startswith(b"CLIENT PROTOCOL"):
                    stream.write(hello.encode() + b"\n")
                elif command.startswith(b"TIMEOUT"):
                    stream.write(b"OK\n")
                else:
                    stream.write(status)
                    return
                stream.flush()

    return behaviour


def says(*texts: bytes) -> Behaviour:
    """Says this, whatever it hears, and then nothing until the client is gone."""

    def behaviour(client: socket.socket) -> None:
        for text in texts:
            client.sendall(text)
        while client.recv(4096):
            pass

    return behaviour


def closes(client: socket.socket) -> None:
    client.recv(4096)


def endless(client: socket.socket) -> None:
    client.sendall(b"SERVER PROTOCOL 2\nOK\n")
    while True:
        client.sendall(b"all is well\n" * 1000)


def asked(behaviour: Behaviour, seconds: float = 1.0) -> tuple[ras.Answer, float]:
    with serving(behaviour) as address, pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_RAS_ADDR", address)
        start = time.monotonic()
        answer = ras.ask(seconds)
        taken = time.monotonic() - start
    assert answer is not None and answer.address == address
    return answer, taken


def test_its_status_is_asked_for_in_its_own_words() -> None:
    heard: list[str] = []
    answer, _ = asked(ncclras(heard))
    assert heard == ["CLIENT PROTOCOL 2\n", "TIMEOUT 2\n", "STATUS\n"]
    assert answer.note == ""
    assert answer.text.splitlines() == [line.rstrip() for line in STATUS.splitlines()]


def test_the_report_shows_it_without_its_rulers() -> None:
    lines = report.ras_says(ras.Answer("localhost:28028", STATUS))
    assert lines[0] == "NCCL's RAS at localhost:28028 says:"
    assert "      3 ranks have launched up to operation 41" in lines
    assert not [line for line in lines if "===" in line or not line.strip() or "CUDA runtime" in line]
    assert all(line.startswith("    ") for line in lines[1:])
    assert "    Warnings" in lines and "    Errors" not in lines  # of which there are none


def test_a_long_status_is_cut_and_what_is_left_out_is_counted() -> None:
    lines = report.ras_says(ras.Answer("a:1", "\n".join(map(str, range(100)))))
    assert len(lines) == 42 and lines[-1].strip() == "... 60 more"


def test_where_nothing_listens_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("NCCL_RAS_ADDR", f"127.0.0.1:{port}")
    assert ras.ask() is None
    assert report.ras_says(None) == []


def test_the_address_is_that_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(ncclras([])) as address:
        monkeypatch.setenv("NCCL_RAS_ADDR", address)
        answer = ras.ask()
    assert answer is not None and (answer.address, answer.note) == (address, "")
    monkeypatch.setenv("NCCL_RAS_ENABLE", "0")
    assert ras.ask() is None


@pytest.mark.parametrize("address", ["28028", "localhost", "localhost:0", "localhost:99999", "a:b:c", "\x1b[31m"])
def test_an_address_that_is_none_is_said(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_RAS_ADDR", address)
    answer = ras.ask()
    assert answer is not None and "expected HOST:PORT" in answer.note and "\x1b" not in answer.address


HOSTILE: dict[str, tuple[Behaviour, str]] = {
    "silence": (says(), "did not answer"),
    "half a greeting": (says(b"SERVER PROTOCOL 2\n"), "did not answer"),
    "no status": (says(b"SERVER PROTOCOL 2\nOK\n"), "did not answer"),
    "http": (says(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "greets with b'HTTP/1.1 400 Bad Request"),
    "garbage": (says(b"\x00\xff\xfe\x1b[2J\n"), "not NCCL's RAS"),
    "closes": (closes, "not NCCL's RAS"),
    "endless": (endless, "cut after 1 MiB"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_whatever_listens_there_it_is_one_line_of_ours_and_soon(kind: str) -> None:
    behaviour, note = HOSTILE[kind]
    answer, taken = asked(behaviour, 0.6)
    assert note in answer.note and "\n" not in answer.note and answer.note.isprintable()
    assert taken < 2
    assert len(report.ras_says(answer)) <= 42


def test_what_has_come_of_an_answer_that_stops_is_shown() -> None:
    answer, _ = asked(says(b"SERVER PROTOCOL 2\nOK\nrank 3: missing\n"), 0.3)
    assert (answer.text.strip(), answer.note) == ("rank 3: missing", "its answer was not complete in time")


def test_an_endless_answer_takes_little_memory() -> None:
    tracemalloc.start()
    try:
        answer, _ = asked(endless, 5)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "cut after 1 MiB" in answer.note
    assert peak < 32 << 20


def test_nothing_that_it_says_reaches_the_terminal_as_a_command() -> None:
    answer, _ = asked(ncclras([], status=b"\x1b[31mred\x1b]0;title\x07 \x9b2J\xff\x00\r\n  two\x1b\n\n"))
    assert "red" in answer.text.splitlines()[0] and answer.text.splitlines()[1].startswith("  two")
    assert all(line.isprintable() for line in answer.text.split("\n"))
