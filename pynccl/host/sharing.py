"""Do the ranks of a communicator share memory? They find out by doing, and agree on what all of them could do.

PYNCCL_HOST_TRANSPORT says what is wanted: "auto" (the default) is memory where all ranks can have it, else sockets;
"shm" is memory, or an error on all ranks that says why not; "sockets" is sockets. "gloo" means sockets too: these took
its place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from ..bindings.abi import Result
from . import futex
from .connection import TEXT_BYTES, Form, Label
from .failure import HostFailure, invalid_argument
from .segment import MOST_RANKS, OwnSegment, Segment, open_segment
from .shared import SharedMemory
from .transport import Transport
from .watchdog import Activity

VARIABLE = "PYNCCL_HOST_TRANSPORT"
_AUTO, _MEMORY, _SOCKETS = "auto", "shm", "sockets"
_MODES = {_AUTO: _AUTO, _MEMORY: _MEMORY, _SOCKETS: _SOCKETS, "gloo": _SOCKETS}
_ROW_BYTES = 2048
_MOST_TEXT = 200  # characters, of which one may take six bytes


def wanted() -> str:
    """What the environment asks for."""
    text = os.environ.get(VARIABLE, "") or _AUTO
    if text not in _MODES:
        raise invalid_argument(f"{VARIABLE}={text[:_MOST_TEXT]!r}: expected auto, shm or sockets")
    return _MODES[text]


def agree(name: str, rank: int, transport: Transport, activity: Activity, local: bool) -> SharedMemory | None:
    """Talk to all peers; the memory that is shared now, or None for sockets. Equal on all ranks.

    name: of the function that makes the communicator. local: all ranks are on this machine. Raises HostFailure, with
    the same text on all ranks, where the environment asks for what cannot be had; TransportFailure where a peer is
    lost."""
    activity.begin(lambda: name)
    row: dict[str, Any] = {"wants": _SOCKETS, "wrong": "", "why": "", "pid": os.getpid()}
    own: OwnSegment | None = None
    try:
        row["wants"] = wanted()
        if row["wants"] != _SOCKETS:
            row["why"] = "its peers are on several machines" if not local else _why_not(len(transport.peers) + 1)
            own = None if row["why"] else OwnSegment(len(transport.peers) + 1)
    except HostFailure as failure:
        row["wrong"] = failure.text
    except (OSError, AttributeError) as error:  # a Python without memfd_create
        row["why"] = _reason(error)
    if own is not None:
        row |= {"fd": own.fd, "token": own.token.hex()}
    rows = _tell(transport, rank, row, 1)
    if not _decide(name, rows) or own is None:
        return None
    segments, why = _open_all(rank, own, rows)
    rows = _tell(transport, rank, {**row, "why": why}, 2)
    if not _decide(name, rows):
        return None
    pids = [other["pid"] for other in rows]
    spin = len(set(pids)) == len(pids)  # threads of one process would spin with the lock of its interpreter
    return SharedMemory(rank, segments, transport, activity, spin)


def _tell(transport: Transport, rank: int, row: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """The rows of all ranks."""
    mine = json.dumps(row).encode().ljust(_ROW_BYTES)
    assert len(mine) == _ROW_BYTES
    what = b"which transport".ljust(TEXT_BYTES, b"\0")
    label = Label(Form.COLLECTIVE, number, what)
    theirs = {peer: bytearray(_ROW_BYTES) for peer in transport.peers}
    sends = [(peer, memoryview(mine)) for peer in theirs]
    transport.exchange(sends, [(peer, memoryview(data)) for peer, data in theirs.items()], label)
    rows = {peer: json.loads(data) for peer, data in theirs.items()}
    return [rows.get(peer, row) for peer in range(len(theirs) + 1)]


def _decide(name: str, rows: Sequence[dict[str, Any]]) -> bool:
    """Whether all ranks can have what they want; HostFailure where they cannot, and one insists."""
    for rank, row in enumerate(rows):
        if row["wrong"]:
            raise invalid_argument(f"{name}: rank {rank}: {row['wrong']}")
    if all(row["wants"] != _SOCKETS and not row["why"] for row in rows):
        return True
    insists = next((rank for rank, row in enumerate(rows) if row["wants"] == _MEMORY), None)
    if insists is None:
        return False
    rank = next(rank for rank, row in enumerate(rows) if row["wants"] == _SOCKETS or row["why"])
    why = rows[rank]["why"] or f"it has {VARIABLE}={_SOCKETS}"
    raise HostFailure(
        Result.SYSTEM_ERROR,
        f"{name}: rank {insists} has {VARIABLE}={_MEMORY}, and rank {rank} cannot share memory: {why}",
    )


def _open_all(rank: int, own: OwnSegment, rows: Sequence[dict[str, Any]]) -> tuple[list[Segment], str]:
    """The memory of all ranks; or why one is not to be had."""
    segments: list[Segment] = []
    for peer, row in enumerate(rows):
        try:
            found = own if peer == rank else open_segment(row["pid"], row["fd"], bytes.fromhex(row["token"]), len(rows))
        except OSError as error:
            return [], f"that of rank {peer} cannot be opened: {_reason(error)}"
        segments.append(found)
    return segments, ""


def _why_not(size: int) -> str:
    """Why ranks of this machine cannot share memory, as far as one can tell alone."""
    if size > MOST_RANKS:
        return f"there are {size} ranks, and a slot is cut into {MOST_RANKS} at most"
    return futex.why_not()


def _reason(error: Exception) -> str:
    named = f": {error.filename}" if isinstance(error, OSError) and error.filename else ""
    return ((getattr(error, "strerror", None) or str(error)) + named)[:_MOST_TEXT]
