"""PYNCCL_CHECK=1: compare the calls of all ranks before launching them, on every library.

Ranks that disagree about the operation, count, data type, operator or root hang or read garbage in NCCL. With the check
each collective, split, simulation and barrier is preceded by an all-gather of a description of the call, and a
difference raises NcclInvalidUsage on every rank, naming two ranks that differ, their calls and the lines they were made
from, which are lines of the user, also where modules of torch or compiled code lie in between. Sends and receives are
not compared: no third rank knows of them.

The comparison waits for the other ranks, which the capture of a CUDA graph forbids: there, such a call is refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterable, Sequence

from ..bindings.abi import DataType, Result
from ..bindings.errors import NcclInvalidUsage
from ..bindings.library import Library, gpu_count
from ..interop.devices import cuda_core
from ..watch.frames import call_site
from ..watch.layout import UNNUMBERED
from .base import Comm, check_group_result, locked
from .call import Call
from .scratch import Scratch

RECORD_BYTES = 1024
_WHAT = "all_gather of PYNCCL_CHECK"
_CAPTURE_IMPLICIT = 906  # CUDA_ERROR_STREAM_CAPTURE_IMPLICIT


def compare(calls: Iterable[Call]) -> None:
    """Raise NcclInvalidUsage, on all ranks alike, unless all ranks of each communicator make the same calls."""
    texts: dict[Comm, list[str]] = {}
    for call in calls:
        if call.operation not in UNNUMBERED:
            texts.setdefault(call.comm, []).append(call.text())
    compare_texts({comm: "; ".join(lines) for comm, lines in texts.items()}, {call.stream for call in calls})


def compare_texts(texts: dict[Comm, str], streams: Iterable[int] = ()) -> None:
    """The same for calls in words; `streams` are those that they are for."""
    for comm in texts:
        comm.check_alive()
    site = call_site()
    for comm, rows in exchange({comm: f"{text}\0{site}" for comm, text in texts.items()}, streams).items():
        compare_rows(rows, comm.rank, "every rank must make the same collective calls in the same order")


def refuse_capture(library: Library, what: str, remedy: str, streams: Iterable[int] = ()) -> None:
    """Raise NcclInvalidUsage, before anything is done, where the caller is capturing a CUDA graph.

    That is seen on torch's current stream, on `streams`, and on streams that block the default one."""
    if library.is_host:
        return
    torch = sys.modules.get("torch")
    found = torch is not None and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    if found or any(map(captured, {0, *streams})):
        raise NcclInvalidUsage(
            f"{what} in the capture of a CUDA graph: it waits for the other ranks, which no graph can record and which "
            f"would invalidate the capture; nothing was done. {remedy}"
        )


def captured(stream: int) -> bool:
    """Whether work on the stream with this handle would go into a CUDA graph, or break the capture of one."""
    if not gpu_count():
        return False
    cuda_core()  # names the packages where they do not fit each other
    from cuda.bindings import driver

    code, status = driver.cuStreamIsCapturing(driver.CUstream(stream))[:2]
    if int(code) == _CAPTURE_IMPLICIT:  # of the default stream, by another one
        return True
    return int(code) == 0 and int(status) != 0


def compare_rows(rows: Sequence[str], own: int, remedy: str, where: str = "") -> None:
    """Raise NcclInvalidUsage, which names this rank and one that differs, unless the rows of all ranks are equal.

    rows   as of `exchange`: of each rank its call, "\\0", and the line that it was made from, which is not compared
    own    this rank
    where  " in the backward pass", for example
    """
    call, _, site = rows[own].partition("\0")
    for rank, row in enumerate(rows):
        other, _, other_site = row.partition("\0")
        if other != call:
            raise NcclInvalidUsage(
                f"the ranks of this communicator disagree{where} (PYNCCL_CHECK=1):\n"
                f"  rank {own}: {call} at {site}\n"
                f"  rank {rank}: {other} at {other_site}\n"
                f"  {remedy}"
            )


def exchange(texts: dict[Comm, str], streams: Iterable[int] = ()) -> dict[Comm, list[str]]:
    """For each communicator, the text that each of its ranks gave. Blocks the caller.

    Raises NcclInvalidUsage where another rank does not come here, but makes a call that is not compared."""
    for comm, text in texts.items():
        what = f"{text.partition(chr(0))[0]} with PYNCCL_CHECK=1"
        remedy = "Compare the calls outside the capture, and capture with communicators made without PYNCCL_CHECK"
        refuse_capture(comm.library, what, remedy, streams)
    try:
        return _exchange(texts)
    except NcclInvalidUsage as error:
        calls = {comm.rank: text.replace("\0", " at ") for comm, text in texts.items()}
        own = "\n".join(f"  rank {rank}: {text}" for rank, text in calls.items())
        raise NcclInvalidUsage(
            f"the ranks of this communicator disagree (PYNCCL_CHECK=1), or it is not usable any more:\n{own}\n"
            "  another rank makes no collective call now, but one that is not compared (shrink or grow, for example)\n"
            f"  the library says of the comparison itself: {error}"
        ) from error


def _exchange(texts: dict[Comm, str]) -> dict[Comm, list[str]]:
    comms = list(texts)
    with locked(comms):  # until the answer was read: another thread's barrier or comparison uses the same memory
        for comm in comms:
            comm.check_alive()
        return dict(zip(comms, _gathered(comms, texts), strict=True))


def _gathered(comms: list[Comm], texts: dict[Comm, str]) -> list[list[str]]:
    """The texts of all ranks of each of `comms`, whose locks the caller holds."""
    if not comms:
        return []
    # Held here: what an abort in another thread takes from a communicator goes once it has returned.
    memory = [comm.scratch((comm.size + 1) * RECORD_BYTES) for comm in comms]
    for comm, scratch in zip(comms, memory, strict=True):
        _write(texts[comm], scratch.address)
    with contextlib.ExitStack() as records:
        for comm in comms:
            what = texts[comm].partition("\0")[0]
            records.enter_context(comm._recorded("check", weight=0, detail=what))
        _gather(comms, memory)
    return [
        [_record(scratch.address + RECORD_BYTES * (rank + 1)) for rank in range(comm.size)]
        for comm, scratch in zip(comms, memory, strict=True)
    ]


def _gather(comms: list[Comm], memory: list[Scratch]) -> None:
    library = comms[0].library
    library.check(library.ncclGroupStart(), "ncclGroupStart")
    code = 0
    try:
        for comm, scratch in zip(comms, memory, strict=True):
            args = (scratch.address, scratch.address + RECORD_BYTES, RECORD_BYTES, int(DataType.UINT8))
            result = library.ncclAllGather(*args, comm._handle, scratch.stream)
            if result not in (Result.SUCCESS, Result.IN_PROGRESS):
                code = result
                break
    finally:  # Ctrl-C too: the group must not stay open
        end = library.ncclGroupEnd()
    library.check(code, _WHAT, comms[0]._handle)
    check_group_result(comms, end, _WHAT)
    for comm, scratch in zip(comms, memory, strict=True):
        scratch.wait()
        comm.check_alive()  # an abort ends the wait too


def _write(text: str, address: int) -> None:
    record = text.encode()[: RECORD_BYTES - 1]
    ctypes.memmove(address, record + b"\xff" * (RECORD_BYTES - len(record)), RECORD_BYTES)


def _record(address: int) -> str:
    return ctypes.string_at(address, RECORD_BYTES).rstrip(b"\xff").decode(errors="replace")
