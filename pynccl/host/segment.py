"""The memory that a rank shares with its peers: an anonymous file (memfd), mapped by all of them.

It has no name anywhere, so nothing is left behind whoever is killed, and /dev/shm may be full. A peer opens it through
/proc/PID/fd/N, for which the kernel wants the same user, and knows it by a random token. The file has its full length
from the start, so nobody ever has to map it anew; memory is behind a part of it only once that has been reserved
(fallocate), so a page that cannot be had is an error of the reservation, never a SIGBUS.

    0           words, a cache line each: posted, done, large, complete
    256         token
    1024        a header of 256 bytes for each slot
    4096        SLOTS small slots, reserved from the start
    then        SLOTS large slots, reserved when an operation first needs them
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from .memory import normal_tensors

SLOTS = 4
SMALL_BYTES = 64 << 10
LARGE_BYTES = 1 << 20
MOST_RANKS = SMALL_BYTES // 64
POSTED, DONE, LARGE, COMPLETE = 0, 16, 32, 48  # indices of words of 32 bits
HEADER_BYTES = 256
_TOKEN_AT = 256
_HEADERS_AT = 1024
_SMALL_AT = 4096
_LARGE_AT = _SMALL_AT + SLOTS * SMALL_BYTES
TOTAL_BYTES = _LARGE_AT + SLOTS * LARGE_BYTES
TOKEN_BYTES = 16
_NAME = "pynccl"
_PUNCH_HOLE = 0x01 | 0x02  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_SHARED, _READ_WRITE = 0x01, 0x1 | 0x2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


class _Bytes(ctypes.c_ubyte * TOTAL_BYTES):  # type: ignore[misc]
    """A mapping. It ends when nobody refers to it any more, views and tensors included."""


def _map(fd: int) -> _Bytes:
    address = _libc.mmap(None, TOTAL_BYTES, _READ_WRITE, _SHARED, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), f"cannot map {TOTAL_BYTES} bytes: {os.strerror(ctypes.get_errno())}")
    mapped = _Bytes.from_address(address)
    # Not at exit, when threads may still be inside.
    weakref.finalize(mapped, _libc.munmap, address, TOTAL_BYTES).atexit = False
    return mapped


class Segment:
    """One rank's memory, as this process has mapped it."""

    def __init__(self, mapped: _Bytes) -> None:
        self._mapped = mapped
        self.address = ctypes.addressof(mapped)
        self.bytes = memoryview(mapped).cast("B")
        self.words = self.bytes[:_TOKEN_AT].cast("I")
        self.token = bytes(self.bytes[_TOKEN_AT : _TOKEN_AT + TOKEN_BYTES])
        self.headers = [self.bytes[_HEADERS_AT + i * HEADER_BYTES :][:HEADER_BYTES] for i in range(SLOTS)]
        self._tensors: dict[tuple[bool, int, torch.dtype], Tensor] = {}

    def slot(self, large: bool, slot: int) -> int:
        """Its address."""
        return self.address + self._offset(large, slot)

    def view(self, large: bool, slot: int, dtype: torch.dtype) -> Tensor:
        """A slot as a tensor, made once."""
        key = large, slot, dtype
        if key not in self._tensors:
            count = (LARGE_BYTES if large else SMALL_BYTES) // dtype.itemsize
            with normal_tensors():
                self._tensors[key] = torch.frombuffer(
                    self._mapped, dtype=dtype, count=count, offset=self._offset(large, slot)
                )
        return self._tensors[key]

    @staticmethod
    def _offset(large: bool, slot: int) -> int:
        return _LARGE_AT + slot * LARGE_BYTES if large else _SMALL_AT + slot * SMALL_BYTES


class OwnSegment(Segment):
    """The memory that this rank has made, and may reserve and give back parts of."""

    def __init__(self) -> None:
        """Raises OSError, whose text names the size that cannot be had."""
        self._lock = threading.Lock()  # a descriptor must not be used once it is closed: its number goes to others
        self.fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        try:
            _get(TOTAL_BYTES, lambda: os.ftruncate(self.fd, TOTAL_BYTES))
            self._reserve(0, _LARGE_AT)
            mapped = _map(self.fd)
        except OSError:
            os.close(self.fd)
            raise
        _at(mapped)[_TOKEN_AT : _TOKEN_AT + TOKEN_BYTES] = os.urandom(TOKEN_BYTES)
        super().__init__(mapped)
        self.has_large = False

    @property
    def reserved(self) -> int:
        """Bytes beyond those that it has as long as it lives."""
        return SLOTS * LARGE_BYTES if self.has_large else 0

    @property
    def fixed(self) -> int:
        return _LARGE_AT

    def reserve_large(self) -> None:
        """Have memory behind the large slots. Raises OSError, whose text names the size that cannot be had."""
        with self._lock:
            if not self.has_large:
                self._reserve(_LARGE_AT, SLOTS * LARGE_BYTES)
                self.has_large = True

    def release_large(self) -> None:
        """Give it back. What is in it is lost."""
        with self._lock:
            if self.has_large and self.fd >= 0:
                self.has_large = _libc.fallocate(self.fd, _PUNCH_HOLE, _LARGE_AT, SLOTS * LARGE_BYTES) != 0

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


def _at(mapped: _Bytes) -> memoryview:
    return memoryview(mapped).cast("B")


def open_segment(pid: int, fd: int, token: bytes) -> Segment:
    """The memory of a peer. Raises OSError where it is not to be had: the kernel lets only the same user open it."""
    path = f"/proc/{pid}/fd/{fd}"
    if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
        raise OSError(f"{path} is another file: its process is in another PID namespace")
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode) or found.st_size != TOTAL_BYTES:
            raise OSError(f"{path} is another file: its process is in another PID namespace")
        segment = Segment(_map(opened))
    finally:
        os.close(opened)
    if segment.token != token:
        raise OSError(f"{path} is the memory of another rank: its process is in another PID namespace")
    return segment
