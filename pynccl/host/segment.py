"""The memory that a rank shares with its peers: an anonymous file (memfd), mapped by all of them.

It has no name anywhere, so nothing is left behind whoever is killed, and /dev/shm may be full. A peer opens it through
/proc/PID/fd/N, for which the kernel wants the same user, and knows it by a random token. The file has its full length
from the start, so nobody ever has to map it anew; memory is behind a part of it only once that has been reserved
(fallocate), so a page that cannot be had is an error of the reservation, never a SIGBUS.

    0           words, a cache line each: posted, complete, bell
    512         token
    1024        a header of 256 bytes for each slot
    4096        the words of a channel to each rank for messages, a cache line each
    (so far reserved from the start; what follows is reserved by the first operation that needs it)
    then        SLOTS slots for collectives
    then        MESSAGE_SLOTS slots of the channel to each rank, reserved channel by channel

A rank alone writes its memory, but for two words: "complete" of rank 0, see `shared`, and "bell", see `channel`.
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
from .failure import HostFailure

SLOTS = 4
SLOT_BYTES = 1 << 20
MESSAGE_SLOTS = 4
MESSAGE_BYTES = 128 << 10  # of a slot for messages
MOST_RANKS = 1024
POSTED, COMPLETE, BELL = 0, 16, 32  # indices of words of 32 bits
HEADER_BYTES = 256
LINE_BYTES = 64
TOKEN_BYTES = 16
_TOKEN_AT = 512
_HEADERS_AT = 1024
_CHANNELS_AT = 4096
_CHANNEL_BYTES = MESSAGE_SLOTS * MESSAGE_BYTES
_NAME = "pynccl"
_SHARED, _READ_WRITE = 0x01, 0x1 | 0x2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Layout:
    """Where things are in the memory of one of so many ranks."""

    def __init__(self, ranks: int) -> None:
        self.slots_at = -(-(_CHANNELS_AT + ranks * LINE_BYTES) // 4096) * 4096  # a page: it is reserved apart
        self._channels_at = self.slots_at + SLOTS * SLOT_BYTES
        self.total = self._channels_at + ranks * _CHANNEL_BYTES

    def channel_words(self, peer: int) -> int:
        """The words of the channel to `peer`."""
        return _CHANNELS_AT + peer * LINE_BYTES

    def channel(self, peer: int) -> int:
        """The slots of the channel to `peer`."""
        return self._channels_at + peer * _CHANNEL_BYTES


class _Mapping:
    """It ends when nobody refers to its bytes any more, views and tensors included."""

    def __init__(self, fd: int, nbytes: int) -> None:
        address = _libc.mmap(None, nbytes, _READ_WRITE, _SHARED, fd, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), f"cannot map {nbytes} bytes: {os.strerror(ctypes.get_errno())}")
        self.address = address
        self.bytes = _type_of(nbytes).from_address(address)
        # Not at exit, when threads may still be inside.
        weakref.finalize(self.bytes, _libc.munmap, address, nbytes).atexit = False


@functools.cache
def _type_of(nbytes: int) -> Any:
    return type("_Bytes", (ctypes.c_ubyte * nbytes,), {})


class Segment:
    """One rank's memory, as this process has mapped it."""

    def __init__(self, mapping: _Mapping, layout: Layout) -> None:
        self.layout = layout
        self._mapped = mapping.bytes
        self.address = mapping.address
        self.bytes = memoryview(mapping.bytes).cast("B")
        self.words = self.bytes[:_TOKEN_AT].cast("I")
        self.token = bytes(self.bytes[_TOKEN_AT : _TOKEN_AT + TOKEN_BYTES])
        self.headers = [self.bytes[_HEADERS_AT + i * HEADER_BYTES :][:HEADER_BYTES] for i in range(SLOTS)]
        self.slots = [self.address + layout.slots_at + i * SLOT_BYTES for i in range(SLOTS)]  # their addresses


class OwnSegment(Segment):
    """The memory that this rank has made, and may reserve parts of."""

    def __init__(self, ranks: int) -> None:
        """Raises OSError, whose text names the size that cannot be had."""
        self._lock = threading.Lock()  # a descriptor must not be used once it is closed: its number goes to others
        layout = Layout(ranks)
        self.fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            _get(layout.total, lambda: os.ftruncate(self.fd, layout.total))
            self._reserve(0, layout.slots_at)
            mapping = _Mapping(self.fd, layout.total)
        except OSError:
            os.close(self.fd)
            raise
        memoryview(mapping.bytes).cast("B")[_TOKEN_AT : _TOKEN_AT + TOKEN_BYTES] = os.urandom(TOKEN_BYTES)
        super().__init__(mapping, layout)
        self._reserved: set[int] = set()  # where parts begin that were reserved later
        self.nbytes = layout.slots_at  # reserved so far

    def reserve_slots(self) -> None:
        """Have memory behind the slots. Raises HostFailure, whose text names the size that cannot be had."""
        self._reserve_once(self.layout.slots_at, SLOTS * SLOT_BYTES)

    def reserve_channel(self, peer: int) -> None:
        """The same for the slots of the channel to a peer."""
        self._reserve_once(self.layout.channel(peer), _CHANNEL_BYTES)

    def close(self) -> None:
        """Close the descriptor. The mapping ends with its last user."""
        with self._lock:
            fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def after_fork(self) -> None:
        """In a forked child, which has a copy of the descriptor and of a lock that somebody may hold."""
        self._lock = threading.Lock()
        self.close()

    def _reserve_once(self, start: int, nbytes: int) -> None:
        if start not in self._reserved:
            try:
                with self._lock:
                    self._reserve(start, nbytes)
            except OSError as error:
                raise HostFailure(Result.SYSTEM_ERROR, str(error.strerror)) from error
            self._reserved.add(start)
            self.nbytes += nbytes

    def _reserve(self, start: int, nbytes: int) -> None:
        _get(nbytes, lambda: os.posix_fallocate(self.fd, start, nbytes))

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            self.close()


def _get(nbytes: int, get: Callable[[], None]) -> None:
    try:
        get()
    except OSError as error:
        raise OSError(error.errno, f"{nbytes} bytes of shared memory cannot be had: {error.strerror}") from error


def open_segment(pid: int, fd: int, token: bytes, ranks: int) -> Segment:
    """The memory of a peer. Raises OSError where it is not to be had: the kernel lets only the same user open it."""
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
