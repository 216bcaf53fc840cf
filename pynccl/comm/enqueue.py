"""The last step of every operation: make its C call, or record it in the open group."""

from __future__ import annotations

import ctypes
from typing import Any

from ..bindings.library import to_pointer
from ..bindings.structs import CollConfig, struct_of
from ..interop.buffers import TORCH, adapter, tensor_types
from ..interop.handles import Handle
from ..interop.streams import hold
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
    """Make one C call now, or record it if the caller is inside a group.

    inputs      arguments of the C function before the communicator
    send, recv  the buffers; C writes to recv
    compared    text of the enclosing operation, which the ranks must agree on; "": the call itself"""
    struct: Any = None
    tail: tuple[Any, ...] = ()
    if config is not None:
        struct = struct_of(config, CollConfig, comm.library, operation)
        function, tail = function + "Config", (ctypes.byref(struct),)
    c_function = comm._functions[function]
    if records or observers or comm._check:
        operator, scalar = (op.op_handle, op.scalar) if type(op) is PreMulSum else (None, None)
        keep = (send, recv, operator, scalar, struct)
        site = user_site() if comm._is_recorded else ""
        enqueue_calls([Call(comm, operation, c_function, inputs, stream, tail, keep, recv, compared, site)])
        return
    args = (*inputs, comm._c_handle, to_pointer(stream), *tail)
    site = "" if comm._track is None else user_site(3)
    issue(comm, operation, c_function, args, inputs, stream, "", site)
    if type(recv) in tensor_types:
        TORCH.bump_versions((recv,))
    elif recv is not None:
        adapter(recv).mark_written(recv)
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
    """Enqueue one ncclSend or ncclRecv of `buf` or of a slice of it."""
    if config is not None:
        raise ValueError("config= needs NCCL >= 2.31; this library runs the operation as sends and receives")
    send, recv = (buf, None) if function == "ncclSend" else (None, buf)
    operation = compared.partition("(")[0] or function[4:].lower()
    enqueue(comm, operation, function, (pointer, count, dtype, peer), stream, send, recv, None, None, compared)
