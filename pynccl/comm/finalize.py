"""How a communicator ends: finalized, destroyed, aborted, at the exit of the process, or by garbage collection."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeVar

from ..bindings.abi import Result
from ..bindings.errors import NcclError, NcclTimeout
from ..bindings.library import gpu_count
from ..interop.devices import on_device
from . import lifecycle
from .argcheck import Launcher
from .lifecycle import Remains

if TYPE_CHECKING:
    from .scratch import Scratch

Self = TypeVar("Self", bound="Finalize")


class Finalize(Launcher):
    """The part of `Communicator` that ends it, and its use in a `with` statement."""

    device_index: int
    _end: str  # how it ended, for messages
    _finalized: bool
    _scratch: Scratch | None

    def async_error(self) -> Result:
        raise NotImplementedError

    def finalize(self) -> None:
        """Flush what is in flight; afterwards only destroy() is left to do."""
        with self.lock:
            self._flush(self.handle)
        self._finalized = True

    def destroy(self) -> None:
        """Finish what is in flight and free the communicator. Twice is harmless; one that has failed is aborted.

        Every rank should call it. Raises NcclTimeout after `timeout` seconds in which a peer, or a call of another
        thread, did not let it finish; a communicator that a peer holds up is aborted then.

        NCCL's destroy and abort wait for every CUDA graph that captured the communicator. Let go of them before:
        reset() a torch.cuda.CUDAGraph; torch.compile(mode="reduce-overhead") keeps its graphs in dynamo's cache, also
        when the compiled function is gone, until torch._dynamo.reset().
        """
        if self._handle is None:
            return
        if self.async_error() not in (Result.SUCCESS, Result.IN_PROGRESS):
            self.abort()
            self._end = "destroyed"
            return
        what = f"ncclCommDestroy on rank {self.rank} of {self.size}"
        if not self.lock.acquire(timeout=-1 if self.timeout is None else self.timeout):
            raise NcclTimeout(f"{what}: a call of another thread has not returned for {self.timeout:g} s; abort() it")
        try:
            remains = self.surrender("destroyed")
        finally:
            self.lock.release()
        if remains is None:  # another thread was faster
            return
        try:
            if not self._finalized:
                self._flush(remains.handle)
        except NcclError as error:
            lifecycle.abort_remains(self.library, [remains])
            raise type(error)(f"{error}\n  the communicator was aborted instead") from None
        lifecycle.destroy(self.library, remains, self.timeout, what)

    def abort(self) -> None:
        """Stop what is in flight, also from another thread, and free the communicator. Twice is harmless.

        For several communicators of one process, `pynccl.abort(comms)`, which also says what happens to CUDA graphs."""
        lifecycle.abort([self])

    def surrender(self, end: str) -> Remains | None:
        """Give up the handle and the memory that goes after it; None if that was done already.

        Takes no lock: abort() has to free a thread that holds it."""
        handle, self._handle = self._handle, None
        if handle is None:
            return None
        self._end = end
        self._c_handle = None  # NULL, which every library refuses
        self._alive.clear()
        memory, self._scratch = self._scratch, None
        return Remains(handle, memory)

    def end_at_exit(self, failed: bool) -> Remains | None:
        """Close what the program left open; `failed` if it ends by an exception. What is to go last is returned."""
        if not failed:
            self.timeout = None  # the end of the process has a deadline of its own
            self.destroy()
            return None
        remains = self.surrender("aborted at exit")
        if remains is not None:
            self.library.ncclCommAbort(remains.handle)
        return remains

    def _flush(self, handle: int) -> None:
        """ncclCommFinalize until it is done. The thread that a deadline leaves behind does nothing afterwards, since
        the handle may be gone by then."""
        what = f"ncclCommFinalize on rank {self.rank} of {self.size}"
        try:
            code = lifecycle.within(self.timeout, lambda: self._finalize(handle), self.library, what)
            code = lifecycle.settle(self.library, handle, code, self.timeout, what)
        except NcclTimeout as error:
            raise NcclTimeout(f"{error}{lifecycle.graph_hint()}") from None
        self.library.check(code, what, handle)

    def _finalize(self, handle: int) -> int:
        with self.on_own_device():
            return int(self.library.ncclCommFinalize(handle))

    def on_own_device(self) -> on_device:
        """A context manager for C calls that look at the current GPU, or leave another one current."""
        return on_device(None if self.library.is_host or not gpu_count() else self.device_index)

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is None:
            self.destroy()
        else:
            self.abort()

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle is not None and hasattr(self, "_site") and not sys.is_finalizing():
            lifecycle.collected(self.library, Remains(handle, self._scratch), repr(self), self._site)
