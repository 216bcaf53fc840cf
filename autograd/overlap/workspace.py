"""The memory between a collective and its matmul, kept from call to call."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from pynccl import Communicator

from ..streams import is_capturing

ALIGNMENT = 256  # bytes; of torch's own allocator on GPUs is 512


class Workspace:
    """Buffers by role, each as large as the largest that was asked for: steps of a training loop allocate nothing.

    A buffer is free again when the operation that took it has ended, on the stream that the operation's caller had. A
    caller with another stream gets others: torch's memory goes back to the stream that made it, so no other may have
    used it. Of an allocator that knows no streams he gets the same, and his stream first waits for that end. One
    operation has the workspace at a time; another thread's, and what is captured into a CUDA graph, gets memory of its
    own.

    allocate  (bytes, device) -> memory as a tensor of uint8, which outlives what was issued; None: torch's
    fixed     whose it is, if its buffers are reserved once and do not grow
    carrier   the communicator over which they are to travel; None: the operation's
    """

    def __init__(
        self,
        allocate: Callable[[int, torch.device], Tensor] | None = None,
        fixed: str | None = None,
        carrier: Communicator | None = None,
    ) -> None:
        self.carrier = carrier
        self._allocate, self._knows_streams = allocate or _of_torch, allocate is None
        self._fixed = fixed
        self.broken_off = False  # the last operation: what it has launched may still be using the buffers
        self._buffers: dict[str, Tensor] = {}
        self._reserved: set[str] = set()
        self.window = False  # whether what is reserved is in symmetric windows of the carrier
        self._lock = threading.Lock()
        self._home: object = None  # the stream of the last operation
        self._last: torch.cuda.Event | None = None  # its end

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def reserve(self, role: str, nbytes: int, device: torch.device) -> None:
        """Make the buffer of a role, of the workspace's own memory. If that is fixed, the other roles' are torch's."""
        self._make(role, nbytes, device, self._allocate)
        self._reserved.add(role)

    def _make(
        self, role: str, nbytes: int, device: torch.device, allocate: Callable[[int, torch.device], Tensor]
    ) -> None:
        with torch.inference_mode(False):  # whoever makes it: it outlives his pass
            self._buffers[role] = allocate(max(nbytes, ALIGNMENT), device)

    def drop(self) -> None:
        """Let go of all buffers."""
        self._buffers = {}

    def empty(self, role: str, shape: Sequence[int], like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """The buffer of this role, as a tensor of this shape: what is in it, is undefined."""
        dtype = dtype or like.dtype
        nbytes = math.prod(shape) * dtype.itemsize
        buffer = self._buffers.get(role)
        if buffer is None or buffer.nbytes < nbytes or buffer.device != like.device:
            if self._fixed is not None and (role in self._reserved or not self._buffers):
                raise ValueError(
                    f"{self._fixed}: its buffer {role!r} has {0 if buffer is None else buffer.nbytes} bytes, but "
                    f"{tuple(shape)} of {dtype} takes {nbytes}; make it with the tensor_shape and dtype of the "
                    "largest tensor that is to travel, and do not use it after close()"
                )
            self._buffers.pop(role, None)  # before the larger one is made
            allocate = self._allocate if self._fixed is None else _of_torch
            self._make(role, nbytes, like.device, allocate)
            buffer = self._buffers[role]
        return buffer[:nbytes].view(dtype).view(tuple(shape))

    @contextmanager
    def lent(self, like: Tensor) -> Iterator[Workspace]:
        """The workspace, for one operation; after an exception in it, its buffers are given up: they may be in use."""
        if (like.is_cuda and is_capturing(like.device)) or not self._lock.acquire(blocking=False):
            yield Workspace(None)
            return
        home = None
        try:
            if like.is_cuda:
                home = torch.cuda.current_stream(like.device)
                self._begin(home)
            yield self
            self.broken_off = False
        except BaseException:
            if self._fixed is None:
                self.drop()  # the streams keep what is in use
            else:
                self.broken_off = True
            raise
        finally:
            if home is not None:  # which need not be current any more, where slices are handed out
                self._last = home.record_event(self._last)
            self._lock.release()

    def _begin(self, here: torch.cuda.Stream) -> None:
        if here != self._home:
            if self._knows_streams:
                self._buffers = {}
            elif self._last is not None:
                here.wait_event(self._last)
        self._home = here


def _of_torch(nbytes: int, device: torch.device) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


_workspaces: weakref.WeakKeyDictionary[Communicator, Workspace] = weakref.WeakKeyDictionary()


def workspace_of(comm: Communicator) -> Workspace:
    """That of all operations on a communicator which bring none of their own."""
    found = _workspaces.get(comm)
    if found is None:
        found = _workspaces[comm] = Workspace()
    return found
