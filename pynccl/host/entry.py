"""The C functions that every version has, each one Python function named like its C twin.

`abi.FUNCTIONS` holds their signatures, `registry` makes them C functions. What came later has rooms of its own, by
topic: `variants`, `elastic`, `registered`, `onesided`, `settings`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist

from ..abi import ITEMSIZE, RedOp, Result, ScalarResidence, version_code
from . import algorithms, birth, group, rendezvous
from .comm import Comm, find
from .failure import REASONS, HostFailure, invalid_argument, last_error
from .operation import Kind
from .reduction import PreMulSum
from .registry import VERSION, entry, plain_entry
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


def give_birth(newcomm: Any, comm: Comm, connect: Callable[[], None]) -> None:
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
        group.bring_up([job])
    except BaseException:
        newcomm[0] = None
        raise


@entry
def ncclCommInitRank(newcomm: Any, nranks: int, unique_id: Any, rank: int) -> None:
    birth.check_rank(rank, nranks)
    raw = ctypes.string_at(ctypes.addressof(unique_id), ctypes.sizeof(unique_id))
    comm = Comm(rank, nranks, device=0)
    give_birth(newcomm, comm, partial(birth.init_rank, comm, raw))


@entry
def ncclCommInitRankConfig(newcomm: Any, nranks: int, unique_id: Any, rank: int, config: Any) -> None:
    check_config(config)
    ncclCommInitRank.__wrapped__(newcomm, nranks, unique_id, rank)  # type: ignore[attr-defined]


@entry
def ncclCommInitAll(comms: Any, ndev: int, devlist: Any) -> None:
    devices = [devlist[i] for i in range(ndev)] if devlist else list(range(ndev))
    birth.check_devices(devices)
    place = rendezvous.Place(dist.HashStore(), "all")
    made = [Comm(rank, ndev, device) for rank, device in enumerate(devices)]
    try:
        group.together([partial(birth.init_local, comm, place) for comm in made])
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
        give_birth(newcomm, split.comm, split.run)
    else:
        newcomm[0] = None
        group.bring_up([split.run])


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
    failure = find(comm).failure
    code[0] = int(Result.SUCCESS if failure is None else failure.code)


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
    comm: int | None, stream: int | None, op: int = 0, peer: int = 0,
) -> None:  # fmt: skip
    own = find(comm)
    own.check_usable()
    operation = own.operation(name, kind, send or 0, recv or 0, count, dtype, op, peer)
    group.issue(operation, find_stream(stream))


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
