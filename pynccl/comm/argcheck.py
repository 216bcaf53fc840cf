"""Validate the buffers, counts, ranks and devices of a call on this rank, and convert them to C arguments.

Every operation runs this code on every call, so the valid case costs only a few attribute reads.
"""

from __future__ import annotations

from typing import Any

from ..bindings.abi import ITEMSIZE, DataType
from ..bindings.values import counted, integer
from ..interop.buffers import ANY_DEVICE, CPU, TORCH, Adapter, adapter, adapters, device_name, tensor_types
from ..interop.streams import stream_handle
from ..interop.tensors import check_not_in_graph
from .base import Comm


def check_rank(name: str, rank: Any, nranks: int, expected: str = "") -> int:
    """Return `rank` as an int. ValueError (`name is rank, expected ...`) if it is not in 0..nranks-1."""
    if type(rank) is int and 0 <= rank < nranks:
        return rank
    only = "0, the only rank" if nranks == 1 else f"a rank in 0..{nranks - 1}"
    return integer(rank, name, 0, nranks - 1, expected or only)


def check_buffer(comm: Comm, operation: str, role: str, x: Any, stream: Any) -> tuple[int, int, int, int]:
    """Check the only buffer of a call and return (pointer, count, data type, stream handle)."""
    if comm._handle is None:
        comm.check_alive()
    kind = adapters.get(type(x)) or adapter(x, operation, role)
    try:
        pointer, count, dtype, device = kind.describe(x)
        if stream is None:
            raw_stream = 0 if device == CPU else kind.current_stream(x, device)
        else:
            raw_stream = stream_handle(stream)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{operation}: {role}: {error}") from None
    if kind is TORCH and x.requires_grad:
        check_not_in_graph(operation, role, x)
    if device != comm._ordinal:
        _check_device(comm, operation, role, device)
    return pointer, count, dtype, raw_stream


def check_buffers(
    comm: Comm, operation: str, send: Any, recv: Any, stream: Any, grow: int = 1, shrink: int = 1, blocks: int = 1
) -> tuple[int, int, int, int, Any, int]:
    """Check send and recv and return (send pointer, recv pointer, send count, data type, recv, stream handle).

    recv has grow/shrink times as many elements as send. The count of send must be divisible by shrink * blocks."""
    send_ptr, count, dtype, raw_stream = check_buffer(comm, operation, "send", send, stream)
    if recv is send and grow == shrink and blocks == 1:
        if type(send) not in tensor_types:
            check_writable(operation, send)
        return send_ptr, send_ptr, count, dtype, recv, raw_stream
    divisor = shrink * blocks
    if divisor > 1 and count % divisor:
        raise ValueError(
            f"{operation}: send has {count} elements, not divisible by {divisor} ranks; "
            + ("pad it" if blocks > 1 or count_of(recv) != count * shrink else swapped(operation))
        )
    if recv is None:
        recv = _allocate(operation, adapter(send), send, grow, shrink)
    recv_ptr = check_recv(comm, operation, recv, count * grow // shrink, dtype, count, grow, shrink)
    nbytes = count * ITEMSIZE[dtype]
    if send_ptr < recv_ptr + nbytes * grow // shrink and recv_ptr < send_ptr + nbytes:
        _check_overlap(comm, operation, send_ptr, recv_ptr, nbytes, grow, shrink, blocks)
    return send_ptr, recv_ptr, count, dtype, recv, raw_stream


def check_recv(
    comm: Comm, operation: str, recv: Any, expected: int, dtype: int, count: int, grow: int = 1, shrink: int = 1
) -> int:
    """Check that recv holds `expected` elements of `dtype` and return its address. The rest is for messages: the count
    of send, and that recv has grow/shrink times as many."""
    kind = adapters.get(type(recv)) or adapter(recv, operation, "recv")
    try:
        recv_ptr, found, recv_dtype, device = kind.describe(recv)
        kind.check_writable(recv)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{operation}: recv: {error}") from None
    if kind is TORCH and recv.requires_grad:
        check_not_in_graph(operation, "recv", recv)
    if device != comm._ordinal:
        _check_device(comm, operation, "recv", device)
    if found != expected:
        raise ValueError(
            f"{operation}: recv has {counted(found, 'element')}, expected {expected} for send of {count} on "
            f"{counted(comm.size, 'rank')}"
            + (f"; {swapped(operation)}" if grow != shrink and found * grow == count * shrink else "")
        )
    if recv_dtype != dtype:
        names = (DataType(code).name.lower() for code in (dtype, recv_dtype))
        raise ValueError(f"{operation}: send is {next(names)}, recv is {next(names)}; convert one of them")
    return recv_ptr


# Slow paths: allocation, and the error messages


def swapped(operation: str) -> str:
    """Return the end of an error about sizes that would fit the other way round."""
    return f"send and recv seem swapped: {operation}(send, recv) takes the input first"


def count_of(recv: Any) -> int:
    """Return the number of elements of recv; -1 if it is no buffer."""
    try:
        return adapter(recv).describe(recv)[1]
    except Exception:  # raised by the user's object
        return -1


def _allocate(operation: str, kind: Adapter, send: Any, grow: int, shrink: int) -> Any:
    if grow == shrink:
        return kind.empty(send)
    try:
        shape = kind.shape(send) or (1,)
    except TypeError as error:
        raise TypeError(f"{operation}: send: {error}") from None
    if shape[0] % shrink:
        raise ValueError(
            f"{operation}: dimension 0 has {shape[0]} rows, not divisible by {shrink} ranks; pad it or pass recv="
        )
    return kind.empty(send, (shape[0] * grow // shrink, *shape[1:]))


def _check_overlap(
    comm: Comm, operation: str, send_ptr: int, recv_ptr: int, send_bytes: int, grow: int, shrink: int, blocks: int
) -> None:
    """Raise ValueError unless the overlapping buffers are in place as NCCL defines it."""
    block = send_bytes // shrink  # bytes of the smaller buffer
    in_place = 0 if grow == shrink else comm.rank * block
    offset = send_ptr - recv_ptr if grow > shrink else recv_ptr - send_ptr
    if blocks > 1 or offset != in_place:
        expected = "send and recv must not overlap" if blocks > 1 else f"an in-place call requires exactly {in_place}"
        raise ValueError(f"{operation}: send and recv overlap, {recv_ptr - send_ptr} bytes apart; {expected}")


def check_writable(operation: str, x: Any) -> None:
    """ValueError if `x` is read-only."""
    try:
        adapter(x).check_writable(x)
    except ValueError as error:
        raise ValueError(f"{operation}: recv: {error}") from None


def _check_device(comm: Comm, operation: str, role: str, device: int) -> None:
    if device == ANY_DEVICE:
        return
    raise ValueError(
        f"{operation}: {role} is on {device_name(device)}, the communicator is on {device_name(comm._ordinal)}; "
        f"move the buffer, or use a communicator on {device_name(device)}"
    )
