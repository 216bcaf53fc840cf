"""The two gates of a communicator: arguments in, C calls out.

Every operation passes through both, so they are written for speed where all is well (a few attribute reads, one lock,
one C call) and leave the explaining to functions that are called when something is wrong.
"""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Any

from .abi import ITEMSIZE, DataType
from .buffers import ANY_DEVICE, CPU, Adapter, adapter, adapters, device_name
from .check import compare
from .group import Call, call_text, open_groups, state, to_pointer
from .lifecycle import settle
from .streams import stream_handle

if TYPE_CHECKING:
    from .config import CollConfig
    from .library import Library


def without_argtypes(function: Any, wide: int = 0) -> Any:
    """The same C function without the conversions by argtypes, which are most of the cost of a call by ctypes.

    Its first `wide` arguments may be integers of any size. Of the others, integers are passed as C ints (data type,
    operator, rank), and addresses must be finished values."""
    return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * wide)(ctypes.cast(function, ctypes.c_void_p).value or 0)


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
    timeout: float | None
    _handle: int | None
    _ordinal: int  # CUDA ordinal of the device; buffers.CPU with the host library
    _check: bool  # PYNCCL_CHECK=1
    _detours: list[None]  # empty: launched at once. Not so while a group is open, and never with PYNCCL_CHECK=1

    def _prepare_launches(self) -> None:
        """What the fastest path needs ready: see `Collectives.all_reduce`."""
        self._detours = [None] if self._check else open_groups
        self._functions = Functions(self.library)
        self._acquire, self._release = self.lock.acquire, self.lock.release
        self._all_reduce = without_argtypes(self.library.ncclAllReduce)
        self._c_handle: Any = to_pointer(self._handle)

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
            if kind.may_be_read_only:
                kind.check_writable(send)
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
            if kind.may_be_read_only:
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
        keep: Any,
        config: CollConfig | None = None,
    ) -> None:
        """Launch one C call now, or record it if a group is open in this thread."""
        if config is not None or self._detours:
            self._issue_with_care(operation, function, args, stream, keep, config)
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

    def _issue_with_care(
        self, operation: str, function: str, args: tuple[int, ...], stream: int, keep: Any, config: CollConfig | None
    ) -> None:
        """The same with a configuration, in a group, or compared across ranks first."""
        tail: tuple[Any, ...] = ()
        if config is not None:
            struct = config.to_struct(self.library)
            function += "Config"
            tail = (ctypes.byref(struct),)
            keep = (keep, struct)
        call = Call(self, operation, self._functions[function], args, stream, tail, keep)  # type: ignore[arg-type]
        if state.calls is not None:
            state.calls.append(call)
            return
        if self._check:
            compare([call])
        with self.lock:
            self.check_alive()
            code = call.function(*call.args)
        if code:
            self._fail(code, operation, args)

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
        shape = kind.shape(send) or (1,)
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
        kind = adapter(x)
        try:
            kind.check_writable(x)
        except ValueError as error:
            raise ValueError(f"{operation}: {error}") from None

    def _check_rank(self, operation: str, role: str, rank: int) -> None:
        if type(rank) is not int or not 0 <= rank < self.size:
            raise ValueError(f"{operation}: {role} is {rank!r}, expected a rank in 0..{self.size - 1}")

    def _check_device(self, operation: str, role: str, device: int) -> None:
        if device == ANY_DEVICE:
            return
        raise ValueError(
            f"{operation}: {role} is on {device_name(device)}, the communicator on {device_name(self._ordinal)}; "
            f"move it there, or use a communicator of {device_name(device)}"
        )
