"""One C call on its way to NCCL: enqueued under the communicator's lock, recorded in an open group, or compared first.

Like the checks before it, this is written for speed where all is well: one lock, one C call.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from typing import Any

from ..bindings.library import Library, to_pointer, without_argtypes
from ..bindings.structs import CollConfig, CommConfig, struct_of
from ..interop.buffers import TORCH, adapter, tensor_types
from ..interop.streams import Handle, hold
from ..watch.frames import call_site
from ..watch.track import Identity, Track
from .base import DEFAULT_TIMEOUT, Comm
from .call import Call, after_launch, call_text
from .consistency import compare
from .fast_path import GROWTH, FastPath
from .groups import enter, leave, recorder, records
from .observing import observers, telling
from .redop import PreMulSum


class Functions(dict[str, Any]):
    """Name -> C function for `(*inputs, communicator, stream, *config)`, the last ones finished. Filled when used."""

    def __init__(self, library: Library) -> None:
        self.library = library

    def __missing__(self, name: str) -> Any:
        function = getattr(self.library, name)
        # What moves data takes buffers and a size, then ints, then two handles. Other functions keep their argtypes.
        types = list(function.argtypes)
        wide, ints = types.index(ctypes.c_int), types.count(ctypes.c_int)
        handles = types[wide + ints :][:2]
        plain = types[wide : wide + ints] == [ctypes.c_int] * ints and handles == [ctypes.c_void_p] * 2
        self[name] = without_argtypes(function, wide) if plain else function
        return self[name]


class Enqueue(Comm):
    """What the operations of a communicator end in."""

    def __init__(
        self,
        handle: int,
        library: Library,
        timeout: float | None = DEFAULT_TIMEOUT,
        config: CommConfig | None = None,
        track: Track | Identity | None = None,
    ) -> None:
        super().__init__(handle, library, timeout, config, track)
        self._detours = [None] if self._check else records
        self._functions = Functions(library)
        self._fast = {operation: FastPath(self, operation) for operation in GROWTH}

    def _enqueue(
        self,
        operation: str,
        function: str,
        args: tuple[int, ...],
        stream: int,
        send: Any,
        recv: Any,
        config: CollConfig | None = None,
        op: Any = None,
        compared: str = "",
        fast: FastPath | None = None,
        root: int | None = None,
    ) -> None:
        """Make one C call now, or record it if a group is open around the caller.

        send, recv  the buffers; recv is what C writes to
        compared    what the ranks must agree on, where it is an operation that this call is a part of
        fast        where the call is remembered, with its root or peer, to be faster when it is made once more"""
        if config is not None or self._detours:
            self._enqueue_with_care(operation, function, args, stream, send, recv, config, op, compared)
            return
        call = self._functions[function]
        with self.lock:
            if self._handle is None:  # ended by another thread since the arguments were checked
                self.check_alive()
            if (track := self._track) is None:
                code = call(*args, self._c_handle, to_pointer(stream))
            else:
                slot = track.begin(operation, args, stream, compared)
                code = call(*args, self._c_handle, to_pointer(stream))
                if track.careful:
                    track.leave(slot)
        if code:
            self._check_result(code, call_text(operation, args))
        if recv is not None:
            if type(recv) in tensor_types:
                TORCH.count_change((recv,))
            else:
                adapter(recv).received(recv)
        if stream or type(stream) is Handle:
            hold(stream, self.library, (send, recv, op.scalar if type(op) is PreMulSum else None))
        if fast is not None:
            number = int(stream)
            fast.remember(call, args, (self._c_handle, to_pointer(number)), number, send, recv, op, root)

    def _enqueue_with_care(
        self,
        operation: str,
        function: str,
        args: tuple[int, ...],
        stream: int,
        send: Any,
        recv: Any,
        config: CollConfig | None,
        op: Any,
        compared: str,
    ) -> None:
        """The same with a configuration, in a group, or compared across ranks first."""
        tail: tuple[Any, ...] = ()
        struct = None
        if config is not None:
            struct = struct_of(config, CollConfig, self.library, operation)
            function += "Config"
            tail = (ctypes.byref(struct),)
        keep = (send, recv, op.op_handle if type(op) is PreMulSum else None, struct)
        site = call_site() if self._track is not None and self._track.careful else ""
        call = Call(self, operation, self._functions[function], args, stream, tail, keep, recv, compared, site)
        record = recorder()
        if record is not None:
            record.calls.append(call)
            return
        if self._check:
            compare([call])
        with self.lock, telling([call]) if observers else nullcontext():
            self.check_alive()
            slots = enter([call])
            code = call.function(*call.args)
            leave(slots)
        if code:
            self._check_result(code, call_text(operation, args))
        after_launch([call])

    def _enqueue_p2p(
        self,
        function: str,
        pointer: int,
        count: int,
        dtype: int,
        peer: int,
        stream: int,
        buf: Any,
        config: CollConfig | None = None,
        compared: str = "",
        fast: FastPath | None = None,
    ) -> None:
        """One ncclSend or ncclRecv of `buf`, or of a part of it."""
        if config is not None:
            raise ValueError("config= needs NCCL >= 2.31; this library carries the operation by sends and receives")
        send, recv = (buf, None) if function == "ncclSend" else (None, buf)
        inputs = (pointer, count, dtype, peer)
        operation = compared.partition("(")[0] or function[4:].lower()
        self._enqueue(operation, function, inputs, stream, send, recv, compared=compared, fast=fast, root=peer)
