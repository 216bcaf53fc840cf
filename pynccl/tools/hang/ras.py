"""What NCCL's own RAS service says of the job: one question by its text protocol.

NCCL >= 2.24 listens on localhost:28028, or on NCCL_RAS_ADDR; its src/ras/client.cc has the protocol. The client says
CLIENT PROTOCOL n, the server SERVER PROTOCOL n; TIMEOUT s is answered by OK, STATUS by text until the server closes.
"""

from __future__ import annotations

import os
import re
import socket
from typing import NamedTuple

from ...watch.layout import printable

PORT = 28028
CONNECT_SECONDS = 0.5
SECONDS = 5.0
MOST_BYTES = 1 << 20
_LINE_BYTES = 1024


class Answer(NamedTuple):
    """The status as text. `note` says why there is none, or why it is not all."""

    address: str
    text: str = ""
    note: str = ""


def ask(seconds: float = SECONDS) -> Answer | None:
    """The status that NCCL gives, or why there is none; None where nothing listens, or RAS is switched off.

    seconds  that each of its answers may take"""
    if os.environ.get("NCCL_RAS_ENABLE", "").strip() == "0":
        return None
    address = printable(os.environ.get("NCCL_RAS_ADDR", "").strip()) or f"localhost:{PORT}"
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        return Answer(address, note="NCCL_RAS_ADDR is no address: expected HOST:PORT, such as localhost:28028")
    try:
        connection = socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS)
    except (OSError, UnicodeError):
        return None
    with connection:
        connection.settimeout(seconds)
        try:
            return Answer(address, *_status(connection))
        except TimeoutError:
            return Answer(address, note=f"it accepts connections, but did not answer within {seconds:g} s")
        except OSError as error:
            return Answer(address, note=f"the connection broke: {error.strerror or error}")


def _status(connection: socket.socket) -> tuple[str, str]:
    """Its answer to STATUS, and why that is not all."""
    answers = connection.makefile("rb", buffering=0)
    connection.sendall(b"CLIENT PROTOCOL 2\n")
    hello = answers.readline(_LINE_BYTES)
    if not hello.upper().startswith(b"SERVER PROTOCOL"):
        return "", f"not NCCL's RAS: it greets with {hello[:60]!r}, not with SERVER PROTOCOL"
    connection.sendall(b"TIMEOUT 2\n")  # seconds that it may wait for its peers
    answers.readline(_LINE_BYTES)  # OK, or an error of a server that has no such command
    connection.sendall(b"STATUS\n")
    got, note = bytearray(), ""
    try:
        while len(got) < MOST_BYTES and (more := connection.recv(1 << 16)):
            got += more
    except TimeoutError:
        if not got:
            raise
        note = "its answer was not complete in time"
    text = printable(got.decode(errors="replace"), lines=True)
    if not text:
        return "", "it closed the connection without an answer"
    return text, f"its answer was cut after {MOST_BYTES >> 20} MiB" if len(got) >= MOST_BYTES else note


def trimmed(text: str) -> list[str]:
    """The lines without rulers, empty sections and CUDA's versions."""
    kept = [one[:200] for one in text.splitlines() if one.strip() and not re.fullmatch(r"\s*[=-]{3,}\s*", one)]
    kept = [one for one in kept if not one.startswith(("CUDA runtime version", "Job summary"))]
    titles = ("Errors", "Warnings")
    empty = {at for at, one in enumerate(kept) if one in titles and (at + 1 == len(kept) or kept[at + 1] in titles)}
    return [one for at, one in enumerate(kept) if at not in empty]
