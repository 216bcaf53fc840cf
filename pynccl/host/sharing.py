"""Select the transport of a communicator: every rank tries to share memory, and all agree on the common result.

PYNCCL_HOST_TRANSPORT is "auto" (default: shared memory if all ranks can use it, else sockets), "shm" (shared memory, or
an error on all ranks with the reason), or "sockets". "gloo" is an alias of "sockets", which replaced it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ..bindings.abi import Result
from . import futex
from .failure import HostFailure, invalid_argument
from .segment import MAX_RANKS, OwnSegment, Segment, open_segment
from .shared import SharedMemory
from .transport import Transport
from .watchdog import Activity

VARIABLE = "PYNCCL_HOST_TRANSPORT"
_AUTO, _MEMORY, _SOCKETS = "auto", "shm", "sockets"
_MODES = {_AUTO: _AUTO, _MEMORY: _MEMORY, _SOCKETS: _SOCKETS, "gloo": _SOCKETS}
_MAX_TEXT = 200  # in characters, which may take six bytes each


def requested_transport() -> str:
    """Return the transport that PYNCCL_HOST_TRANSPORT requests."""
    text = os.environ.get(VARIABLE, "") or _AUTO
    if text not in _MODES:
        raise invalid_argument(f"{VARIABLE}={text[:_MAX_TEXT]!r}: expected auto, shm or sockets")
    return _MODES[text]


def agree(
    name: str, rank: int, transport: Transport, activity: Activity, local: bool, required: bool = False
) -> SharedMemory | None:
    """Agree with all peers on the transport; return the shared memory, or None for sockets.

    name: of the function that creates the communicator. local: all ranks are on this node. required: sockets will not
    do. Raises HostFailure, with the same text on all ranks, if the transport is unavailable, and TransportFailure if a
    peer is lost."""
    activity.begin(lambda: name)
    row: dict[str, Any] = {"wants": _SOCKETS, "wrong": "", "why": "", "pid": os.getpid()}
    own: OwnSegment | None = None
    try:
        row["wants"] = requested_transport()
        if row["wants"] != _SOCKETS:
            size = len(transport.peers) + 1
            row["why"] = _unavailable_reason(size) if local else "the ranks are on several nodes"
            own = None if row["why"] else OwnSegment(size)
    except HostFailure as failure:
        row["wrong"] = failure.text
    except (OSError, AttributeError) as error:  # a Python without memfd_create
        row["why"] = error_text(error)
    if own is not None:
        row |= {"fd": own.fd, "token": own.token.hex()}
    rows = transport.exchange_rows(row, 1)
    if not _decide(name, rows, required) or own is None:
        return None
    segments, why = _open_all(rank, own, rows)
    rows = transport.exchange_rows({**row, "why": why}, 2)
    if not _decide(name, rows, required):
        return None
    pids = [other["pid"] for other in rows]
    spin = len(set(pids)) == len(pids)  # ranks in one process would hold the GIL while spinning
    return SharedMemory(rank, segments, transport, activity, spin)


def _decide(name: str, rows: Sequence[dict[str, Any]], required: bool) -> bool:
    """Return whether all ranks can share memory. Raises HostFailure if they cannot and it is required."""
    for rank, row in enumerate(rows):
        if row["wrong"]:
            raise invalid_argument(f"{name}: rank {rank}: {row['wrong']}")
    if all(row["wants"] != _SOCKETS and not row["why"] for row in rows):
        return True
    requiring = next((rank for rank, row in enumerate(rows) if row["wants"] == _MEMORY), None)
    if requiring is None and not required:
        return False
    rank = next(rank for rank, row in enumerate(rows) if row["wants"] == _SOCKETS or row["why"])
    why = rows[rank]["why"] or f"it has {VARIABLE}={_SOCKETS}"
    need = f"rank {requiring} has {VARIABLE}={_MEMORY}" if requiring is not None else "the ranks opened no sockets"
    raise HostFailure(Result.SYSTEM_ERROR, f"{name}: {need}, but rank {rank} cannot share memory: {why}")


def _open_all(rank: int, own: OwnSegment, rows: Sequence[dict[str, Any]]) -> tuple[list[Segment], str]:
    """Map the memory of all ranks; return (segments, "") or ([], error)."""
    segments: list[Segment] = []
    for peer, row in enumerate(rows):
        try:
            found = own if peer == rank else open_segment(row["pid"], row["fd"], bytes.fromhex(row["token"]), len(rows))
        except OSError as error:
            return [], f"cannot open the memory of rank {peer}: {error_text(error)}"
        segments.append(found)
    return segments, ""


def _unavailable_reason(size: int) -> str:
    """Return why the ranks of this node cannot share memory, as far as one rank knows; "" if they can."""
    if size > MAX_RANKS:
        return f"there are {size} ranks, and shared memory supports at most {MAX_RANKS}"
    return futex.unavailable_reason()


def error_text(error: Exception) -> str:
    """Return the text of an error of the system, with the file concerned."""
    named = f": {error.filename}" if isinstance(error, OSError) and error.filename else ""
    return ((getattr(error, "strerror", None) or str(error)) + named)[:_MAX_TEXT]
