"""The C functions that every version has, each one Python function named like its C twin.

`abi.FUNCTIONS` holds their signatures, `registry` makes them C functions. What came later has rooms of its own, by
topic: `variants`, `elastic`, `registered`, `onesided`, `settings`.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from ..bindings.abi import ITEMSIZE, RedOp, Result, ScalarResidence, version_code
from . import algorithms, birth, group, rendezvous, structs
from .comm import Comm, Turn, find
from .failure import REASONS, HostFailure, invalid_argument, last_error
from .operation import Kind
from .reduction import PreMulSum
from .registry import VERSION, entry, plain_entry
from .stream import HostEvent
from .stream import find as find_stream
from .structs import check_config

# Library


@entry
def ncclGetVersion(version: Any) -> None:
    version[0] = version_code(VERSION)


_reasons = {code: ctypes.create_string_buffer(text.encode()) for code, text in REASONS.items()}
_unknown = ctypes.create_string_buffer(b"unknown result code")


@plain_entry
def ncclGetErrorString(code: int) -> int:
    return ctypes.addressof(_reasons.get(code, _unknown))


class _LastErrorBuffer(threading.local):
    """What ncclGetLastError returned to this thread; valid until its next call."""

    def __init__(self) -> None:
        self.chars = ctypes.create_string_buffer(8192)


_buffer = _LastErrorBuffer()


@plain_entry
def ncclGetLastError(comm: int | None) -> int:
    try:
        failure = find(comm).failure if comm else None
    except HostFailure:
        failure = None
    text = failure.text if failure is not None else last_error.text
    _buffer.chars.value = text.encode("utf-8", "replace")[: len(_buffer.chars) - 1]
    return ctypes.addressof(_buffer.chars)


# Birth of a communicator


@entry
def ncclGetUniqueId(unique_id: Any) -> None:
    ctypes.memmove(unique_id, rendezvous.make_unique_id(), ctypes.sizeof(unique_id.contents))


def give_birth(newcomm: Any, comm: Comm, connect: Callable[[], None], turn: Turn | None = None) -> None:
    """Hand out the handle at once, as NCCL does inside a group, and take it back if `connect` fails."""

    def job() -> None:
        try:
            connect()
        except BaseException as error:
            comm.forget()
            comm.fail(error if isinstance(error, HostFailure) else HostFailure(Result.INTERNAL_ERROR, repr(error)))
            raise

    newcomm[0] = comm.handle
    try:
        group.bring_up(job, turn)
    except BaseException:
        newcomm[0] = None
        raise


def join(newcomm: Any, nranks: int, raw: bytes, rank: int, config: Any) -> None:
    """A communicator of all ranks that hold the same unique id."""
    birth.check_rank(rank, nranks)
    comm = configured(Comm(rank, nranks, device=0), config)
    give_birth(newcomm, comm, partial(birth.init_rank, comm, raw))


def configured(comm: Comm, config: Any, parent: Comm | None = None) -> Comm:
    """`comm` with what a checked ncclConfig_t*, else its parent's, says of the numbers of its signals."""
    if parent is not None:
        comm.rma_contexts, comm.rma_signals = parent.rma_contexts, parent.rma_signals
    if config:
        comm.rma_contexts = structs.field(config.contents, "numRmaCtx", 0) or comm.rma_contexts
        comm.rma_signals = structs.field(config.contents, "numRmaSig", 0) or comm.rma_signals
    return comm


@entry
def ncclCommInitRank(newcomm: Any, nranks: int, unique_id: Any, rank: int) -> None:
    raw = ctypes.string_at(ctypes.addressof(unique_id), ctypes.sizeof(unique_id))
    join(newcomm, nranks, raw, rank, None)


@entry
def ncclCommInitRankConfig(newcomm: Any, nranks: int, unique_id: Any, rank: int, config: Any) -> None:
    check_config(config)
    raw = ctypes.string_at(ctypes.addressof(unique_id), ctypes.sizeof(unique_id))
    join(newcomm, nranks, raw, rank, config)


@entry
def ncclCommInitRankScalable(newcomm: Any, nranks: int, rank: int, count: int, ids: Any, config: Any) -> None:
    """One store serves as many ranks as there are: the first id is taken, which all ranks agree on."""
    if not 1 <= count <= max(nranks, 1) or not ids:
        raise invalid_argument(
            f"ncclCommInitRankScalable: {count} ids at {'an address' if ids else 'NULL'}; expected 1 to {nranks} of "
            "them, for so many ranks"
        )
    ncclCommInitRankConfig.__wrapped__(newcomm, nranks, ids[0], rank, config)  # type: ignore[attr-defined]


@entry
def ncclCommInitAll(comms: Any, ndev: int, devlist: Any) -> None:
    devices = [devlist[i] for i in range(ndev)] if devlist else list(range(ndev))
    birth.check_devices(devices)
    made = [Comm(rank, ndev, device) for rank, device in enumerate(devices)]
    try:
        birth.init_local(made)
    except BaseException:
        for comm in made:
            comm.forget()
        raise
    for rank, comm in enumerate(made):
        comms[rank] = comm.handle


@entry
def ncclCommSplit(comm: int | None, color: int, key: int, newcomm: Any, config: Any) -> None:
    check_config(config)
    split = birth.Split(find(comm), color, key)
    if split.comm is not None:
        configured(split.comm, config, find(comm))
        give_birth(newcomm, split.comm, split.run, split.turn)
    else:
        newcomm[0] = None
        group.bring_up(split.run, split.turn)


# Life and end of a communicator


@entry
def ncclCommFinalize(comm: int | None) -> None:
    own = find(comm)
    own.check_usable()
    own.finalized = True
    own.flush()


@entry
def ncclCommDestroy(comm: int | None) -> None:
    if comm:
        find(comm).destroy()


@entry
def ncclCommAbort(comm: int | None) -> None:
    if comm:
        find(comm).abort()


@entry
def ncclCommGetAsyncError(comm: int | None, code: Any) -> None:
    own = find(comm)
    with contextlib.suppress(HostFailure):
        own.look("ncclCommGetAsyncError")
    code[0] = int(Result.SUCCESS if own.failure is None else own.failure.code)


@entry
def ncclCommCount(comm: int | None, count: Any) -> None:
    count[0] = find(comm).size


@entry
def ncclCommCuDevice(comm: int | None, device: Any) -> None:
    device[0] = find(comm).device


@entry
def ncclCommUserRank(comm: int | None, rank: Any) -> None:
    rank[0] = find(comm).rank


# Reduction operators


@entry
def ncclRedOpCreatePreMulSum(op: Any, scalar: int | None, dtype: int, residence: int, comm: int | None) -> None:
    own = find(comm)
    if not 0 <= dtype < len(ITEMSIZE):
        raise invalid_argument(f"ncclRedOpCreatePreMulSum: datatype is {dtype}; expected 0 to {len(ITEMSIZE) - 1}")
    if not scalar:
        raise invalid_argument("ncclRedOpCreatePreMulSum: scalar is NULL; expected the address of one element")
    if residence not in tuple(ScalarResidence):
        raise invalid_argument(f"ncclRedOpCreatePreMulSum: residence is {residence}; expected 0 or 1")
    number = next(n for n in range(RedOp.AVG + 1, 2**31) if n not in own.premul)
    own.premul[number] = PreMulSum(scalar, dtype, residence == ScalarResidence.HOST_IMMEDIATE)
    op[0] = number


@entry
def ncclRedOpDestroy(op: int, comm: int | None) -> None:
    if find(comm).premul.pop(op, None) is None:
        raise invalid_argument(f"ncclRedOpDestroy: op {op} is not one that ncclRedOpCreatePreMulSum made for this comm")


# Communication


def issue(
    name: str, kind: Kind, send: int | None, recv: int | None, count: int, dtype: int,
    comm: int | None, stream: int | None, op: int = 0, peer: int = 0, started: HostEvent | None = None,
) -> None:  # fmt: skip
    """Check the call and run or queue it; `started` is recorded when it begins."""
    own = find(comm)
    own.check_usable()
    operation = own.operation(name, kind, send or 0, recv or 0, count, dtype, op, peer)
    queue = find_stream(stream)
    if started is not None:
        group.announce_start(started, queue)
    group.issue(operation, queue)


@entry
def ncclReduce(send, recv, count, dtype, op, root, comm, stream) -> None:  # type: ignore[no-untyped-def]
    issue("ncclReduce", algorithms.REDUCE, send, recv, count, dtype, comm, stream, op=op, peer=root)


@entry
def ncclBcast(buffer, count, dtype, root, comm, stream) -> None:  # type: ignore[no-untyped-def]
    issue("ncclBroadcast", algorithms.BROADCAST, buffer, buffer, count, dtype, comm, stream, peer=root)


@entry
def ncclBroadcast(send, recv, count, dtype, root, comm, stream) -> None:  # type: ignore[no-untyped-def]
    issue("ncclBroadcast", algorithms.BROADCAST, send, recv, count, dtype, comm, stream, peer=root)


@entry
def ncclAllReduce(send, recv, count, dtype, op, comm, stream) -> None:  # type: ignore[no-untyped-def]
    issue("ncclAllReduce", algorithms.ALL_REDUCE, send, recv, count, dtype, comm, stream, op=op)


@entry
def ncclReduceScatter(send, recv, count, dtype, op, comm, stream) -> None:  # type: ignore[no-untyped-def]
    issue("ncclReduceScatter", algorithms.REDUCE_SCATTER, send, recv, count, dtype, comm, stream, op=op)


@entry
def ncclAllGather(send, recv, count, dtype, comm, stream) -> None:  # type: ignore[no-untyped-def]
    issue("ncclAllGather", algorithms.ALL_GATHER, send, recv, count, dtype, comm, stream)


@entry
def ncclAlltoAll(send, recv, count, dtype, comm, stream) -> None:  # type: ignore[no-untyped-def]
    issue("ncclAlltoAll", algorithms.ALL_TO_ALL, send, recv, count, dtype, comm, stream)


@entry
def ncclGather(send, recv, count, dtype, root, comm, stream) -> None:  # type: ignore[no-untyped-def]
    issue("ncclGather", algorithms.GATHER, send, recv, count, dtype, comm, stream, peer=root)


@entry
def ncclScatter(send, recv, count, dtype, root, comm, stream) -> None:  # type: ignore[no-untyped-def]
    issue("ncclScatter", algorithms.SCATTER, send, recv, count, dtype, comm, stream, peer=root)


@entry
def ncclSend(send, count, dtype, peer, comm, stream) -> None:  # type: ignore[no-untyped-def]
    issue("ncclSend", algorithms.SEND, send, None, count, dtype, comm, stream, peer=peer)


@entry
def ncclRecv(recv, count, dtype, peer, comm, stream) -> None:  # type: ignore[no-untyped-def]
    issue("ncclRecv", algorithms.RECV, None, recv, count, dtype, comm, stream, peer=peer)


# Groups


@entry
def ncclGroupStart() -> None:
    group.start()


@entry
def ncclGroupEnd() -> None:
    group.end()


@entry
def ncclGroupSimulateEnd(info: Any) -> None:
    if info:
        structs.check(info.contents)
    seconds = group.simulate_end()
    if info:
        info.contents.estimatedTime = seconds * 1e6  # NCCL's unit is a microsecond
