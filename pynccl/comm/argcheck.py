"""The two gates of a communicator: arguments in, C calls out.

Every operation passes through both, so they are written for speed where all is well (a few attribute reads, one lock,
one C call) and leave the explaining to functions that are called when something is wrong.
"""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Any

from ..bindings.abi import ITEMSIZE, DataType
from ..bindings.library import to_pointer, without_argtypes
from ..bindings.structs import CollConfig, struct_of
from ..bindings.values import integer, seconds
from ..interop.buffers import ANY_DEVICE, CPU, TORCH, Adapter, adapter, adapters, device_name, tensor_types
from ..interop.streams import Handle, hold, stream_handle
from .consistency import compare
from .fast_path import REPEATED, Again
from .groups import Call, after_launch, call_text
from .lifecycle import settle
from .recording import recorder, records
from .redop import PreMulSum

if TYPE_CHECKING:
    from ..bindings.library import Library


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


class Launcher:
    """What the operations of `Communicator` stand on."""

    rank: int
    size: int
    library: Library
    lock: threading.RLock
    _timeout: float | None
    _handle: int | None
    _ordinal: int  # CUDA ordinal of the device; buffers.CPU with the host library
    _check: bool  # PYNCCL_CHECK=1
    _detours: list[Any]  # empty: launched at once. Not so while a group is open, and never with PYNCCL_CHECK=1

    def _prepare_launches(self) -> None:
        """What the fastest path needs ready: see repeats.py."""
        self._detours = [None] if self._check else records
        self._functions = Functions(self.library)
        self._acquire, self._release = self.lock.acquire, self.lock.release
        self._c_handle: Any = to_pointer(self._handle)
        self._alive: list[None] = [None]
        self._again = {name: Again(self, name) for name in REPEATED}  # type: ignore[arg-type]

    @property
    def timeout(self) -> float | None:
        """Seconds that a split, an end, a nonblocking call may take; None: for ever."""
        return self._timeout

    @timeout.setter
    def timeout(self, timeout: float | None) -> None:
        self._timeout = seconds(timeout, zero=True)

    @property
    def handle(self) -> int:
        """ncclComm_t as an integer, for calls into `library`. NcclInvalidUsage after the end."""
        if self._handle is None:
            self.check_alive()
        return self._handle or 0

    def check_alive(self) -> None:
        raise NotImplementedError

    def _one(self, operation: str, role: str, x: Any, stream: Any) -> tuple[int, int, int, int]:
        """(pointer, count, data type, stream handle) of the only buffer of a call."""
        if self._handle is None:
            self.check_alive()
        kind = adapters.get(type(x)) or adapter(x, operation, role)
        try:
            pointer, count, dtype, device = kind.describe(x)
            if stream is None:
                at = 0 if device == CPU else kind.current_stream(x, device)
            else:
                at = stream_handle(stream)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{operation}: {role}: {error}") from None
        if device != self._ordinal:
            self._check_device(operation, role, device)
        return pointer, count, dtype, at

    def _pair(
        self, operation: str, send: Any, recv: Any, stream: Any, grow: int = 1, shrink: int = 1, blocks: int = 1
    ) -> tuple[int, int, int, int, Any, int]:
        """(send pointer, recv pointer, send count, data type, recv, stream handle), all checks made.

        recv has grow/shrink times as many elements as send, which has to divide into `shrink` or `blocks` parts."""
        if self._handle is None:
            self.check_alive()
        kind = adapters.get(type(send)) or adapter(send, operation, "send")
        try:
            source, count, dtype, device = kind.describe(send)
            if stream is None:
                at = 0 if device == CPU else kind.current_stream(send, device)
            else:
                at = stream_handle(stream)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{operation}: send: {error}") from None
        if device != self._ordinal:
            self._check_device(operation, "send", device)
        if recv is send and grow == shrink and blocks == 1:
            try:
                kind.check_writable(send)
            except ValueError as error:
                raise ValueError(f"{operation}: recv: {error}") from None
            return source, source, count, dtype, recv, at
        parts = shrink * blocks
        if parts > 1 and count % parts:
            raise ValueError(f"{operation}: send has {count} elements, not divisible by {parts} ranks; pad it")
        if recv is None:
            recv = self._allocate(operation, kind, send, grow, shrink)
        target = self._describe_recv(operation, recv, count * grow // shrink, dtype, count)
        nbytes = count * ITEMSIZE[dtype]
        if source < target + nbytes * grow // shrink and target < source + nbytes:
            self._check_overlap(operation, source, target, nbytes, grow, shrink, blocks)
        return source, target, count, dtype, recv, at

    def _describe_recv(self, operation: str, recv: Any, expected: int, dtype: int, count: int) -> int:
        """Address of recv, which has to hold `expected` elements of `dtype`; `count` is that of send, for messages."""
        kind = adapters.get(type(recv)) or adapter(recv, operation, "recv")
        try:
            target, found, recv_dtype, device = kind.describe(recv)
            kind.check_writable(recv)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{operation}: recv: {error}") from None
        if device != self._ordinal:
            self._check_device(operation, "recv", device)
        if found != expected:
            raise ValueError(
                f"{operation}: recv has {found} elements, expected {expected} for send of {count} on {self.size} ranks"
            )
        if recv_dtype != dtype:
            raise ValueError(
                f"{operation}: send is {DataType(dtype).name}, recv is {DataType(recv_dtype).name}; they must be equal"
            )
        return target

    def _issue(
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
        again: Again | None = None,
        root: int | None = None,
    ) -> None:
        """Launch one C call now, or record it if a group is open around the caller.

        send, recv  the buffers; recv is what C writes to
        compared    what the ranks must agree on, where it is an operation that this call is a part of
        again       where the call is noted, with its root or peer, to be faster when it is made once more"""
        if config is not None or self._detours:
            self._issue_with_care(operation, function, args, stream, send, recv, config, op, compared)
            return
        call = self._functions[function]
        self._acquire()
        try:
            if self._handle is None:  # ended by another thread since the arguments were checked
                self.check_alive()
            code = call(*args, self._c_handle, to_pointer(stream))
        finally:
            self._release()
        if code:
            self._fail(code, operation, args)
        if recv is not None:
            if type(recv) in tensor_types:
                TORCH.count_change((recv,))
            else:
                adapter(recv).received(recv)
        if stream or type(stream) is Handle:
            hold(stream, self.library, (send, recv, op.scalar if type(op) is PreMulSum else None))
        if again is not None:
            again.learn(call, args, (self._c_handle, to_pointer(stream)), stream, send, recv, op, root)

    def _issue_with_care(
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
        keep = (send, recv, op.made if type(op) is PreMulSum else None, struct)
        call = Call(self, operation, self._functions[function], args, stream, tail, keep, recv, compared)  # type: ignore[arg-type]
        record = recorder()
        if record is not None:
            record.calls.append(call)
            return
        if self._check:
            compare([call])
        with self.lock:
            self.check_alive()
            code = call.function(*call.args)
        if code:
            self._fail(code, operation, args)
        after_launch([call])

    def _p2p(
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
        again: Again | None = None,
        root: int | None = None,
    ) -> None:
        """One ncclSend or ncclRecv of `buf`, or of a part of it."""
        if config is not None:
            raise ValueError("config= needs NCCL >= 2.31; this library carries the operation by sends and receives")
        send, recv = (buf, None) if function == "ncclSend" else (None, buf)
        inputs = (pointer, count, dtype, peer)
        operation = compared.partition("(")[0] or function[4:].lower()
        self._issue(operation, function, inputs, stream, send, recv, compared=compared, again=again, root=peer)

    def _fail(self, code: int, operation: str, inputs: tuple[Any, ...]) -> None:
        """Raise for the result of a C call with these inputs; wait for a nonblocking communicator."""
        self._check_result(code, call_text(operation, inputs))

    def _check_result(self, code: int, what: str) -> None:
        if not code:
            return
        self.check_alive()  # that another thread has ended the communicator explains more than the code
        code = settle(self.library, self._handle, code, self.timeout, what)
        self.library.check(code, what, self._handle)

    # What is called when something may be wrong

    def _allocate(self, operation: str, kind: Adapter, send: Any, grow: int, shrink: int) -> Any:
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
        self, operation: str, source: int, target: int, send_bytes: int, grow: int, shrink: int, blocks: int
    ) -> None:
        """Overlapping buffers are in place in NCCL's sense, or an error."""
        block = send_bytes // shrink  # bytes of the smaller buffer
        in_place = 0 if grow == shrink else self.rank * block
        offset = source - target if grow > shrink else target - source
        if blocks > 1 or offset != in_place:
            where = "send and recv must not overlap" if blocks > 1 else f"in place means an offset of {in_place} bytes"
            raise ValueError(f"{operation}: send and recv overlap, {target - source} bytes apart; {where}")

    def _check_writable(self, operation: str, x: Any) -> None:
        try:
            adapter(x).check_writable(x)
        except ValueError as error:
            raise ValueError(f"{operation}: recv: {error}") from None

    def _rank(self, operation: str, role: str, rank: Any) -> int:
        """`rank` as an int; ValueError unless it is one of this communicator."""
        if type(rank) is int and 0 <= rank < self.size:
            return rank
        last = self.size - 1
        return integer(rank, f"{operation}: {role}", 0, last, f"a rank in 0..{last}")

    def _check_device(self, operation: str, role: str, device: int) -> None:
        if device == ANY_DEVICE:
            return
        raise ValueError(
            f"{operation}: {role} is on {device_name(device)}, the communicator on {device_name(self._ordinal)}; "
            f"move it there, or use a communicator of {device_name(device)}"
        )
