"""The memory that a rank shares with its peers: an anonymous file (memfd) that all of them map.

The file has no name, so killed processes leave nothing behind, and /dev/shm may be full. A peer opens it through
/proc/PID/fd/N, which the kernel permits for the same user only, and verifies a random token. The file has its full
length from the start, so it is mapped once. Its memory is allocated in parts (fallocate) when first used, so a lack of
memory is an error of the allocation and never a SIGBUS.

    0           words, one cache line each: posted, complete, doorbell
    512         token
    1024        a header of 256 bytes per slot
    4096        the words of the channel to each rank, one cache line each
    (allocated at the start up to here; the rest by the first operation that needs it)
    then        SLOTS slots for collectives
    then        MESSAGE_SLOTS slots of the channel to each rank, allocated per channel

Only a rank itself writes its memory, except for two words: "complete" of rank 0 (see `shared`) and "doorbell" (see
`channel`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import stat
import threading
import weakref
from collections.abc import Callable
from typing import Any

from ..bindings.abi import Result
from ..bindings.resource import destructor
from .failure import HostFailure, by_signal

SLOTS = 4
SLOT_BYTES = 1 << 20
MESSAGE_SLOTS = 8
MESSAGE_BYTES = 68 << 10  # size of a message slot: 64 KB, and a header
MAX_RANKS = 1024
POSTED, COMPLETE, DOORBELL = 0, 16, 32  # indices of 32-bit words
HEADER_BYTES = 256
LINE_BYTES = 64
TOKEN_BYTES = 16
_TOKEN_AT = 512
_HEADERS_AT = 1024
_CHANNELS_AT = 4096
_CHANNEL_BYTES = MESSAGE_SLOTS * MESSAGE_BYTES
_MIN_SLOT_BYTES = 64 << 10
_NAME = "pynccl"
_SHARED, _READ_WRITE = 0x01, 0x1 | 0x2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Layout:
    """Offsets in the segment of one rank, for a number of ranks."""

    def __init__(self, ranks: int) -> None:
        self.slots_at = -(-(_CHANNELS_AT + ranks * LINE_BYTES) // 4096) * 4096  # page-aligned: allocated separately
        self._channels_at = self.slots_at + SLOTS * SLOT_BYTES
        self.total = self._channels_at + ranks * _CHANNEL_BYTES

    def channel_words(self, peer: int) -> int:
        """Return the offset of the words of the channel to `peer`."""
        return _CHANNELS_AT + peer * LINE_BYTES

    def channel(self, peer: int) -> int:
        """Return the offset of the slots of the channel to `peer`."""
        return self._channels_at + peer * _CHANNEL_BYTES


class _Mapping:
    """A memory mapping, unmapped when the last reference to its bytes is gone, including views and tensors."""

    def __init__(self, fd: int, nbytes: int) -> None:
        address = _libc.mmap(None, nbytes, _READ_WRITE, _SHARED, fd, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), f"cannot map {nbytes} bytes: {os.strerror(ctypes.get_errno())}")
        self.address = address
        self.bytes = _type_of(nbytes).from_address(address)
        # Not at exit, when threads may still use it.
        weakref.finalize(self.bytes, _libc.munmap, address, nbytes).atexit = False


@functools.cache
def _type_of(nbytes: int) -> Any:
    return type("_Bytes", (ctypes.c_ubyte * nbytes,), {})


class Segment:
    """One rank's memory, mapped into this process."""

    def __init__(self, mapping: _Mapping, layout: Layout) -> None:
        self.layout = layout
        self._mapped = mapping.bytes
        self.address = mapping.address
        self.bytes = memoryview(mapping.bytes).cast("B")
        self.words = self.bytes[:_TOKEN_AT].cast("I")
        self.token = bytes(self.bytes[_TOKEN_AT : _TOKEN_AT + TOKEN_BYTES])
        self.headers = [self.bytes[_HEADERS_AT + i * HEADER_BYTES :][:HEADER_BYTES] for i in range(SLOTS)]
        self.slots = [self.address + layout.slots_at + i * SLOT_BYTES for i in range(SLOTS)]  # addresses


class OwnSegment(Segment):
    """This rank's own memory, which it creates and allocates."""

    def __init__(self, ranks: int) -> None:
        """Raises OSError, which states the size, if memory is lacking."""
        self._lock = threading.Lock()  # the number of a closed descriptor may be reused, so do not use it then
        layout = Layout(ranks)
        self.fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            _allocate(layout.total, lambda: os.ftruncate(self.fd, layout.total))
            self._reserve(0, layout.slots_at)
            mapping = _Mapping(self.fd, layout.total)
        except OSError:
            os.close(self.fd)
            raise
        memoryview(mapping.bytes).cast("B")[_TOKEN_AT : _TOKEN_AT + TOKEN_BYTES] = os.urandom(TOKEN_BYTES)
        super().__init__(mapping, layout)
        self._reserved: set[int] = set()  # offsets of the parts allocated later
        self._slot_bytes = 0  # allocated of each slot
        self.nbytes = layout.slots_at  # allocated so far

    def reserve_slots(self, nbytes: int) -> int:
        """Allocate the first `nbytes` of every slot, or some more; return how many each has now.

        Raises HostFailure, which states the size, if memory is lacking."""
        had, needed = self._slot_bytes, min(max(1 << (nbytes - 1).bit_length(), _MIN_SLOT_BYTES), SLOT_BYTES)
        for i in range(SLOTS):
            self._reserve_once(self.layout.slots_at + i * SLOT_BYTES + had, needed - had)
        self._slot_bytes = needed
        return needed

    def reserve_message(self, address: int) -> None:
        """Allocate the slot of a channel at this address, like `reserve_slots`."""
        self._reserve_once(address - self.address, MESSAGE_BYTES)

    def close(self) -> None:
        """Close the descriptor. The mapping lives until its last user is gone."""
        with self._lock:
            fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def after_fork(self) -> None:
        """In a forked child: close the copy of the descriptor, and replace the lock, which may be held."""
        self._lock = threading.Lock()
        self.close()

    def _reserve_once(self, start: int, nbytes: int) -> None:
        if start not in self._reserved:
            try:
                with self._lock:
                    self._reserve(start, nbytes)
            except OSError as error:
                if by_signal(error):
                    raise
                raise HostFailure(Result.SYSTEM_ERROR, str(error.strerror)) from error
            self._reserved.add(start)
            self.nbytes += nbytes

    def _reserve(self, start: int, nbytes: int) -> None:
        _allocate(nbytes, lambda: os.posix_fallocate(self.fd, start, nbytes))

    @destructor
    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            self.close()


def _allocate(nbytes: int, call: Callable[[], None]) -> None:
    try:
        call()
    except OSError as error:
        if by_signal(error):
            raise
        raise OSError(error.errno, f"cannot allocate {nbytes} bytes of shared memory: {error.strerror}") from error


def open_segment(pid: int, fd: int, token: bytes, ranks: int) -> Segment:
    """Map the memory of a peer. Raises OSError if that is impossible, e.g. for a process of another user."""
    path, layout = f"/proc/{pid}/fd/{fd}", Layout(ranks)
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
        raise OSError(f"{path} is another file: its process is in another PID namespace")
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode) or found.st_size != layout.total:
            raise OSError(f"{path} is another file: its process is in another PID namespace")
        segment = Segment(_Mapping(opened, layout.total), layout)
    finally:
        os.close(opened)
    if segment.token != token:
        raise OSError(f"{path} is the memory of another rank: its process is in another PID namespace")
    return segment
