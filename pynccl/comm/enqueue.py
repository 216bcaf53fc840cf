"""Where every operation ends: its C call is made, or recorded in the group that is open."""

from __future__ import annotations

import ctypes
from typing import Any

from ..bindings.library import to_pointer
from ..bindings.structs import CollConfig, struct_of
from ..interop.buffers import TORCH, adapter, tensor_types
from ..interop.streams import Handle, hold
from ..watch.frames import user_site
from .base import Comm
from .call import Call, issue
from .groups import enqueue_calls, records
from .observers import observers
from .redop import PreMulSum


def enqueue(
    comm: Comm,
    operation: str,
    function: str,
    inputs: tuple[int, ...],
    stream: int,
    send: Any,
    recv: Any,
    config: CollConfig | None = None,
    op: Any = None,
    compared: str = "",
) -> None:
    """Make one C call now, or record it if a group is open around the caller.

    inputs      of the C function, up to the communicator
    send, recv  the buffers; recv is what C writes to
    compared    what the ranks must agree on, where it is an operation that this call, in a group, is a part of"""
    struct: Any = None
    tail: tuple[Any, ...] = ()
    if config is not None:
        struct = struct_of(config, CollConfig, comm.library, operation)
        function, tail = function + "Config", (ctypes.byref(struct),)
    c_function = comm._functions[function]
    if records or observers or comm._check:
        operator, scalar = (op.op_handle, op.scalar) if type(op) is PreMulSum else (None, None)
        keep = (send, recv, operator, scalar, struct)
        site = user_site() if comm.recorded else ""
        enqueue_calls([Call(comm, operation, c_function, inputs, stream, tail, keep, recv, compared, site)])
        return
    args = (*inputs, comm._c_handle, to_pointer(stream), *tail)
    site = "" if comm._track is None else user_site(3)
    issue(comm, operation, c_function, args, inputs, stream, "", site)
    if type(recv) in tensor_types:
        TORCH.count_change((recv,))
    elif recv is not None:
        adapter(recv).received(recv)
    if stream or type(stream) is Handle:
        hold(stream, comm.library, (send, recv, op.scalar if type(op) is PreMulSum else None))


def enqueue_p2p(
    comm: Comm,
    function: str,
    pointer: int,
    count: int,
    dtype: int,
    peer: int,
    stream: int,
    buf: Any,
    config: CollConfig | None = None,
    compared: str = "",
) -> None:
    """One ncclSend or ncclRecv of `buf`, or of a part of it."""
    if config is not None:
        raise ValueError("config= needs NCCL >= 2.31; this library carries the operation by sends and receives")
    send, recv = (buf, None) if function == "ncclSend" else (None, buf)
    operation = compared.partition("(")[0] or function[4:].lower()
    enqueue(comm, operation, function, (pointer, count, dtype, peer), stream, send, recv, None, None, compared)
