"""PYNCCL_CHECK=1: compare the calls of all ranks before launching them, with every library.

In NCCL, ranks that disagree about the operation, count, data type, operator or root hang or read garbage. With the
check, an all-gather of call descriptions precedes each collective, split, simulation and barrier. A mismatch raises
NcclInvalidUsage on every rank and names two ranks that differ, their calls, and the user's source lines (frames of
torch and of compiled code are skipped). Sends and receives are not compared, since only two ranks take part in them.

The comparison waits for the other ranks, which is impossible during CUDA graph capture: such calls raise there.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Iterable, Sequence

from ..bindings.abi import DataType, Result
from ..bindings.errors import NcclInvalidUsage, disagreement, ranks_disagree, reworded
from ..bindings.library import Library, gpu_count
from ..interop.devices import cuda_core
from ..interop.streams import is_known
from ..watch.frames import attributions, call_site
from ..watch.layout import MESSAGES
from .base import Comm, check_group_result, locked
from .call import Call
from .scratch import Scratch

RECORD_BYTES = 1024
_WHAT = "all_gather of PYNCCL_CHECK"
_CAPTURE_IMPLICIT = 906  # CUDA_ERROR_STREAM_CAPTURE_IMPLICIT


def compare(calls: Iterable[Call]) -> None:
    """Raise NcclInvalidUsage on all ranks unless all ranks of each communicator make the same calls."""
    texts: dict[Comm, list[str]] = {}
    for call in calls:
        if call.operation not in MESSAGES:
            texts.setdefault(call.comm, []).append(call.text())
    compare_texts({comm: "; ".join(lines) for comm, lines in texts.items()}, {call.stream for call in calls})


def compare_texts(texts: dict[Comm, str], streams: Iterable[int] = ()) -> None:
    """`compare` for calls given as text.   streams: the streams that the calls will use"""
    for comm in texts:
        comm.check_alive()
    site, compared = call_site(), ""
    if attributions and (note := attributions.get(threading.get_ident())) is not None:
        function, line, compared = note
        site += f" ({function} of {line})" if line else ""
    for comm, rows in exchange({comm: f"{text}{compared}\0{site}" for comm, text in texts.items()}, streams).items():
        try:
            compare_rows(rows, comm.rank, "every rank must make the same collective calls in the same order")
        except NcclInvalidUsage as error:
            if comm._track is not None:  # the comparison has shown that the call would not match
                comm._track.failed_last(error)
            raise


def check_not_capturing(library: Library, what: str, remedy: str, streams: Iterable[int] = ()) -> None:
    """Raise NcclInvalidUsage if the caller is capturing a CUDA graph: on torch's current stream, on one of `streams`,
    or on a stream that synchronizes with the default stream."""
    if library.is_host:
        return
    torch = sys.modules.get("torch")
    capturing = torch is not None and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    if capturing or any(map(captured, {0, *streams})):
        raise NcclInvalidUsage(
            f"{what} cannot run during CUDA graph capture: it waits for the other ranks and would invalidate the "
            f"capture; nothing was launched. {remedy}"
        )


def captured(stream: int) -> bool:
    """Return whether work on this stream would go into a CUDA graph, or would break a capture, as far as is known."""
    if not gpu_count() or not is_known(stream):
        return False
    cuda_core()  # its error names the packages if their versions are incompatible
    from cuda.bindings import driver

    code, status = driver.cuStreamIsCapturing(driver.CUstream(stream))[:2]
    if int(code) == _CAPTURE_IMPLICIT:  # the default stream, during a capture on a stream that synchronizes with it
        return True
    return int(code) == 0 and int(status) != 0


def compare_rows(rows: Sequence[str], own: int, remedy: str, where: str = "") -> None:
    """Raise NcclInvalidUsage, which names this rank and one that differs, unless the rows of all ranks are equal.

    rows   as `exchange` returns them, one per rank: the call, "\\0", and its source line, which is not compared
    own    this rank
    where  " in the backward pass", for example
    """
    call, _, site = rows[own].partition("\0")
    for rank, row in enumerate(rows):
        other, _, other_site = row.partition("\0")
        if other != call:
            both = [f"rank {own}: {call} at {site}", f"rank {rank}: {other} at {other_site}", remedy]
            raise ranks_disagree(both, f"{where} (PYNCCL_CHECK=1)")


def exchange(texts: dict[Comm, str], streams: Iterable[int] = ()) -> dict[Comm, list[str]]:
    """Exchange a text per communicator and return the texts of all its ranks. Blocks the caller.

    Raises NcclInvalidUsage if another rank is making a call that is not compared."""
    for comm, text in texts.items():
        what = f"{text.partition(chr(0))[0]} with PYNCCL_CHECK=1"
        remedy = "Compare the calls outside the capture, and capture with communicators made without PYNCCL_CHECK"
        check_not_capturing(comm.library, what, remedy, streams)
    try:
        return all_gather_texts(texts)
    except NcclInvalidUsage as error:
        rows = [f"rank {comm.rank}: {text.replace(chr(0), ' at ')}" for comm, text in texts.items()]
        rows += ["another rank may be making a call that is not compared, such as shrink or grow"]
        rows += [f"error of the comparison itself: {error}"]
        about = " (PYNCCL_CHECK=1), or the communicator is no longer usable"
        raise reworded(error, disagreement(rows, about, lines=True)) from error


def all_gather_texts(texts: dict[Comm, str]) -> dict[Comm, list[str]]:
    """`exchange`, whatever the other ranks do: a text has up to 1,023 bytes. Up to "\\0" it names the call."""
    comms = list(texts)
    with locked(comms):  # until the result is read: barriers and comparisons of other threads use the same memory
        for comm in comms:
            comm.check_alive()
        return dict(zip(comms, _gather_texts(comms, texts), strict=True))


def _gather_texts(comms: list[Comm], texts: dict[Comm, str]) -> list[list[str]]:
    """Return the texts of all ranks of each communicator. The caller holds their locks."""
    if not comms:
        return []
    # Keep references: an abort in another thread takes the scratch memory away from the communicator.
    memory = [comm._scratch((comm.size + 1) * RECORD_BYTES) for comm in comms]
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
    try:
        for comm, scratch in zip(comms, memory, strict=True):
            args = (scratch.address, scratch.address + RECORD_BYTES, RECORD_BYTES, int(DataType.UINT8))
            result = library.ncclAllGather(*args, comm._handle, scratch.stream)
            if result not in (Result.SUCCESS, Result.IN_PROGRESS):
                raise comm._error(result, _WHAT)
    finally:  # the group must not stay open
        end = library.ncclGroupEnd()
    check_group_result(comms, end, _WHAT)
    for comm, scratch in zip(comms, memory, strict=True):
        scratch.wait()
        comm._check_alive_after()  # an abort also ends the wait: raise then


def _write(text: str, address: int) -> None:
    record = text.encode()[: RECORD_BYTES - 1]
    ctypes.memmove(address, record + b"\xff" * (RECORD_BYTES - len(record)), RECORD_BYTES)


def _record(address: int) -> str:
    return ctypes.string_at(address, RECORD_BYTES).rstrip(b"\xff").decode(errors="replace")
