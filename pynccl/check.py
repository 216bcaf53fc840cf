"""PYNCCL_CHECK=1: compare the calls of all ranks before launching them, on every library.

Ranks that disagree about the operation, count, data type, operator or root hang or read garbage in NCCL. With the check
each collective is preceded by an all-gather of a description of the call, and a difference raises NcclInvalidUsage on
every rank, naming two ranks that differ, their calls and the lines they were made from. Sends and receives are not
compared: no third rank knows of them.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import TYPE_CHECKING, Any

from .abi import DataType
from .errors import NcclInvalidUsage

if TYPE_CHECKING:
    from .communicator import Communicator
    from .group import Call

RECORD_BYTES = 1024
_PACKAGES = (os.path.dirname(os.path.abspath(__file__)),)


def enabled() -> bool:
    """Whether PYNCCL_CHECK is set to anything but 0."""
    return os.environ.get("PYNCCL_CHECK", "0") not in ("", "0")


def compare(calls: list[Call]) -> None:
    """Raise NcclInvalidUsage, on all ranks alike, unless all ranks of each communicator make the same calls."""
    site = call_site()
    from .group import UNCOMPARED

    texts: dict[Communicator, list[str]] = {}
    for call in calls:
        if call.operation not in UNCOMPARED:
            texts.setdefault(call.comm, []).append(call.text())
    records = exchange({comm: f"{'; '.join(lines)}\0{site}" for comm, lines in texts.items()})
    for comm, rows in records.items():
        _compare_rows(comm, rows)


def _compare_rows(comm: Communicator, rows: list[str]) -> None:
    own_call = rows[comm.rank].partition("\0")[0]
    for rank, row in enumerate(rows):
        call, _, site = row.partition("\0")
        if call != own_call:
            raise NcclInvalidUsage(
                f"the ranks of this communicator disagree (PYNCCL_CHECK=1):\n"
                f"  rank {comm.rank}: {own_call} at {rows[comm.rank].partition(chr(0))[2]}\n"
                f"  rank {rank}: {call} at {site}\n"
                f"  every rank must make the same collective calls in the same order"
            )


def exchange(texts: dict[Communicator, str]) -> dict[Communicator, list[str]]:
    """For each communicator, the text that each of its ranks gave. Blocks the caller."""
    views: dict[Communicator, Any] = {}
    for comm in texts:
        memory = comm.scratch((comm.size + 1) * RECORD_BYTES).address
        record = texts[comm].encode()[: RECORD_BYTES - 1]
        ctypes.memmove(memory, record + b"\xff" * (RECORD_BYTES - len(record)), RECORD_BYTES)
        views[comm] = memory
    comms = sorted(texts, key=id)
    if not comms:
        return {}
    library = comms[0].library
    library.check(library.ncclGroupStart(), "ncclGroupStart")
    for comm in comms:
        args = (views[comm], views[comm] + RECORD_BYTES, RECORD_BYTES, int(DataType.UINT8))
        code = library.ncclAllGather(*args, comm._handle, comm.scratch(0).stream)
        if code:
            break
    end = library.ncclGroupEnd()
    library.check(code or end, "all_gather of PYNCCL_CHECK", comms[0]._handle)
    for comm in comms:
        comm.scratch(0).wait()
    return {comm: [_record(views[comm] + RECORD_BYTES * (rank + 1)) for rank in range(comm.size)] for comm in comms}


def _record(address: int) -> str:
    return ctypes.string_at(address, RECORD_BYTES).rstrip(b"\xff").decode(errors="replace")


def call_site() -> str:
    """file:line of the innermost caller outside this package and pynccl_autograd."""
    frame = sys._getframe(1)
    while frame.f_back and (
        frame.f_code.co_filename.startswith(_PACKAGES) or _package(frame.f_globals) in ("pynccl", "pynccl_autograd")
    ):
        frame = frame.f_back
        if frame.f_code.co_name in ("__exit__",) or frame.f_code.co_filename.endswith("contextlib.py"):
            frame = frame.f_back or frame
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _package(namespace: dict[str, Any]) -> str:
    return str(namespace.get("__name__", "")).partition(".")[0]
