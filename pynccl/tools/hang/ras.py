"""What NCCL's own RAS service says of the job: one question by its text protocol, with a deadline and a limit.

NCCL >= 2.24 listens on localhost:28028, or on NCCL_RAS_ADDR; its src/ras/client.cc has the protocol. The client says
CLIENT PROTOCOL n, the server SERVER PROTOCOL n; TIMEOUT s is answered by OK, STATUS by text until the server closes.
Whatever listens there may be something else: it gets one line of ours, and nothing that it does can hold us up.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from dataclasses import dataclass

from .clean import line, lines

PORT = 28028
PROTOCOL = 2
CONNECT_SECONDS = 0.5
GATHER_SECONDS = 2  # that the server may wait for its peers
SECONDS = 5.0  # for all of it
MOST_BYTES = 1 << 20
_LINE_BYTES = 1024


@dataclass
class Answer:
    """What came. `note` says in one line what was odd about it: "" where nothing was."""

    address: str
    text: str = ""
    note: str = ""


class _OddError(Exception):
    """The other side does not follow the protocol."""


def ask(address: str | None = None, deadline: float = SECONDS) -> Answer | None:
    """The status that NCCL gives, or why there is none; None where nothing listens, or RAS is switched off.

    It runs in a thread of its own, since the search for a host's name has no deadline."""
    if os.environ.get("NCCL_RAS_ENABLE", "").strip() == "0":
        return None
    given = (address or os.environ.get("NCCL_RAS_ADDR", "")).strip() or f"localhost:{PORT}"
    try:
        host, port = _parsed(given)
    except ValueError as error:
        return Answer(line(given, 80), note=str(error))
    found: list[Answer | None] = []
    until = time.monotonic() + deadline
    thread = threading.Thread(target=lambda: found.append(_ask(given, host, port, until)), daemon=True)
    thread.start()
    thread.join(deadline + 0.5)
    return found[0] if found else Answer(line(given, 80), note=f"no answer within {deadline:g} s")


def _parsed(address: str) -> tuple[str, int]:
    found = re.fullmatch(r"\[([^\]]+)\]:(\d{1,5})|([^:]+):(\d{1,5})", address)
    if found is None or not 0 < int(found[2] or found[4]) < 65536:
        raise ValueError("NCCL_RAS_ADDR is no address: expected HOST:PORT, such as localhost:28028")
    return found[1] or found[3], int(found[2] or found[4])


def _ask(given: str, host: str, port: int, until: float) -> Answer | None:
    try:
        connection = socket.create_connection((host, port), CONNECT_SECONDS)
    except (OSError, UnicodeError):
        return None  # nothing listens: no NCCL that has RAS, or none yet
    answer = Answer(line(given, 80))
    with connection:
        try:
            answer.note = _greet(connection, until)
            _send(connection, "STATUS", until)
            answer.text, cut_off = _rest(connection, until)
            answer.note = answer.note or cut_off
        except TimeoutError:
            answer.note = "it accepts connections, but does not answer: frozen, or not NCCL's RAS"
        except _OddError as error:
            answer.note = str(error)
        except OSError as error:
            answer.note = f"the connection broke: {error.strerror or error}"
    if not answer.text and not answer.note:
        answer.note = "it closed the connection without an answer"
    return answer


def _greet(connection: socket.socket, until: float) -> str:
    """The handshake. Returns what is odd about it, if one can go on."""
    _send(connection, f"CLIENT PROTOCOL {PROTOCOL}", until)
    hello = _line(connection, until)
    found = re.fullmatch(r"SERVER PROTOCOL (\d{1,9})", hello, re.IGNORECASE)
    if found is None:
        raise _OddError(f"not NCCL's RAS: it greets with {hello[:60]!r}, not with SERVER PROTOCOL")
    _send(connection, f"TIMEOUT {GATHER_SECONDS}", until)
    said = _line(connection, until)
    if said.upper() != "OK" and not said.upper().startswith("ERROR"):
        raise _OddError(f"not NCCL's RAS: it answers TIMEOUT with {said[:60]!r}, not with OK")
    return "" if int(found[1]) == PROTOCOL else f"it speaks protocol {found[1]}, expected {PROTOCOL}"


def _send(connection: socket.socket, text: str, until: float) -> None:
    connection.settimeout(_left(until))
    connection.sendall(f"{text}\n".encode())


def _line(connection: socket.socket, until: float) -> str:
    """One line. Byte by byte, so that nothing of what follows is taken; they are few."""
    got = b""
    while not got.endswith(b"\n"):
        if len(got) >= _LINE_BYTES:
            raise _OddError(f"not NCCL's RAS: a line of more than {_LINE_BYTES:,} bytes")
        connection.settimeout(_left(until))
        if not (one := connection.recv(1)):
            raise _OddError("it closed the connection in the middle of the greeting")
        got += one
    return line(got.decode("utf-8", "replace"))


def _rest(connection: socket.socket, until: float) -> tuple[str, str]:
    """All text until the end, and why it is not all."""
    got, note = bytearray(), ""
    while True:
        try:
            connection.settimeout(_left(until))
            more = connection.recv(min(1 << 16, MOST_BYTES + 1 - len(got)))
        except TimeoutError:
            note = "its answer was not complete in time" if got else "it was asked for the status, and said nothing"
            break
        if not more:
            break
        got += more
        if len(got) > MOST_BYTES:
            note = f"its answer was cut after {MOST_BYTES >> 20} MiB"
            break
    return "\n".join(lines(got[:MOST_BYTES].decode("utf-8", "replace"))), note


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def trimmed(text: str, most: int = 40) -> list[str]:
    """Its lines without rulers, empty sections, versions of CUDA; of a long answer the begin, and what is left out."""
    kept = [one for one in text.splitlines() if one.strip() and not re.fullmatch(r"\s*[=-]{3,}\s*", one)]
    kept = [one[:200] for one in kept if not one.startswith(("CUDA runtime version", "Job summary"))]
    titles = ("Errors", "Warnings")
    empty = {i for i, one in enumerate(kept) if one in titles and (i + 1 == len(kept) or kept[i + 1] in titles)}
    kept = [one for i, one in enumerate(kept) if i not in empty]
    if len(kept) > most:
        kept = [*kept[:most], f"... {len(kept) - most:,} more lines: all are in --json"]
    return kept
