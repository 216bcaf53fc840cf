"""The buffers between a collective and its matmul, reused from call to call."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from pynccl import Communicator

from ..streams import is_capturing, producer_stream

Allocate = Callable[[int, torch.device], Tensor]


class Fresh:
    """Buffers of one pass, new from torch's allocator: without overlap, and in the capture of a CUDA graph."""

    window = interrupted = False

    def empty(self, role: str, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a buffer as an uninitialized tensor of this shape."""
        return like.new_empty(shape, dtype=dtype)


FRESH = Fresh()


class Buffers:
    """Buffers by role. `state_of(comm, Buffers)` are those of all passes that have none of their own.

    Each grows to the largest requested size, so that later training steps allocate nothing. It is free again when its
    pass has ended on the caller's stream. A caller on another stream gets new buffers, because torch returns memory to
    the stream that allocated it. Fixed buffers stay the same, and the caller's stream first waits for the end of the
    last pass. One pass uses them at a time. Another pass meanwhile (of another thread, or while slices are handed off)
    and a CUDA graph capture get memory of their own.

    gathered         rows of all ranks, as they arrive
    partial          products that are summed over the ranks
    received, total  what other ranks send; sums that are still to be converted, or to be gathered

    fixed        name of the owner, if the buffers are reserved once and do not grow
    carrier      the communicator that communicates the buffers; None: that of the pass
    window       whether the reserved buffers are in symmetric windows of the carrier
    interrupted  whether the last pass raised: its work may still be using the buffers
    """

    def __init__(self, fixed: str | None = None, carrier: Communicator | None = None) -> None:
        self._fixed, self.carrier = fixed, carrier
        self.window = self.interrupted = False
        self._buffers: dict[str, Tensor] = {}
        self._reserved: set[str] = set()
        self._lock = threading.Lock()
        self._stream: object = None  # of the last pass
        self._last: torch.cuda.Event | None = None  # its end

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def reserve(self, role: str, nbytes: int, device: torch.device, allocate: Allocate) -> None:
        """Allocate the buffer of a role. If they are fixed, the roles that are not reserved use torch's memory.

        allocate  (bytes, device) -> a uint8 tensor that outlives the work issued"""
        self._make(role, nbytes, device, allocate)
        self._reserved.add(role)

    def _make(self, role: str, nbytes: int, device: torch.device, allocate: Allocate) -> Tensor:
        with torch.inference_mode(False):  # the buffer outlives the pass that allocates it
            self._buffers[role] = allocate(nbytes, device)
        return self._buffers[role]

    def drop(self) -> None:
        """Free all buffers."""
        self._buffers = {}

    def empty(self, role: str, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return the buffer of a role as an uninitialized tensor of this shape."""
        dtype = dtype or like.dtype
        nbytes = math.prod(shape) * dtype.itemsize
        buffer = self._buffers.get(role)
        if buffer is None or buffer.nbytes < nbytes or buffer.device != like.device:
            if self._fixed is not None and (role in self._reserved or not self._buffers):
                raise ValueError(
                    f"{self._fixed}: its buffer {role!r} has {0 if buffer is None else buffer.nbytes} bytes, but "
                    f"{tuple(shape)} of {dtype} takes {nbytes}; construct it with the tensor_shape and dtype of the "
                    "largest tensor to communicate, and do not use it after close()"
                )
            self._buffers.pop(role, None)
            del buffer  # so that it is freed before the larger one is allocated
            buffer = self._make(role, nbytes, like.device, _torch_empty)
        return buffer[:nbytes].view(dtype).view(tuple(shape))

    @contextmanager
    def acquire(self, like: Tensor) -> Iterator[Buffers | Fresh]:
        """Acquire the buffers for one pass. If it raises, they may still be in use: fixed ones are marked as
        `interrupted`, others are dropped."""
        stream = producer_stream(like)  # at the end another one may be the current one, with hand_off
        if (stream is not None and is_capturing(like.device)) or not self._lock.acquire(blocking=False):
            yield FRESH
            return
        try:
            if stream != self._stream:
                if self._fixed is None:
                    self.drop()
                elif self._last is not None:
                    stream.wait_event(self._last)
            self._stream = stream
            yield self
            self.interrupted = False
        except BaseException:
            if self._fixed is None:
                self.drop()  # the streams keep buffers in use alive
            else:
                self.interrupted = True
            raise
        finally:
            if stream is not None and self._fixed is not None:
                self._last = stream.record_event(self._last)
            self._lock.release()


def _torch_empty(nbytes: int, device: torch.device) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)
