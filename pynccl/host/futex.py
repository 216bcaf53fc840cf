"""Sleeping on a word of shared memory until another process has changed it: futex(2) through ctypes, without the GIL.

A waker stores the word and then always calls FUTEX_WAKE; there is no second word that says whether anybody sleeps. The
kernel looks that up itself, behind the barriers that it needs against lost wake-ups, for half a microsecond. Python
has no barrier between a store and a load, so a word of its own could not be relied on, and would save less than that.
"""

from __future__ import annotations

import ctypes
import platform
import threading
from collections.abc import Callable

# The number of the system call, where a long has 64 bits.
_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_WAIT, _WAKE = 0, 1  # not private: the word is shared between processes
_EVERYBODY = 2**31 - 1
_number = _NUMBERS.get(platform.machine(), 0)
_libc = ctypes.CDLL(None)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_void_p]


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def wait(address: int, value: int, timeout: _Timespec) -> None:
    """Sleep while the word is `value`, at most for so long. It may return early: look at the word again."""
    _syscall(_number, address, _WAIT, value, ctypes.addressof(timeout))


def wake(address: int) -> None:
    """Wake everybody who sleeps on the word, in all processes."""
    _syscall(_number, address, _WAKE, _EVERYBODY, None)


def give_way() -> None:
    """Let others have this core, if anybody wants it now."""
    _libc.sched_yield()


def timeout_of(seconds: float) -> _Timespec:
    return _Timespec(int(seconds), int(seconds % 1 * 1e9))


def why_not() -> str:
    """Why this machine cannot; empty where it can."""
    if not _number or ctypes.sizeof(ctypes.c_long) != 8:
        return f"futex(2) is not known for {platform.machine()}"
    word = ctypes.c_uint32(0)
    if _syscall(_number, ctypes.addressof(word), _WAKE, 1, None) != 0:
        return "futex(2) is forbidden here"
    return ""


def _full_barrier() -> Callable[[], None]:
    """Between data and the word that says that it is there.

    x86 keeps the order of stores, and of loads. Elsewhere two locks do: what is before the release of the first stays
    before it, what is behind the acquisition of the second stays behind, and an acquisition does not overtake a
    release."""
    if platform.machine() == "x86_64":
        return lambda: None
    locks = threading.local()

    def barrier() -> None:
        if not hasattr(locks, "pair"):
            locks.pair = threading.Lock(), threading.Lock()
        for lock in locks.pair:
            with lock:
                pass

    return barrier


barrier = _full_barrier()
ORDERED = platform.machine() == "x86_64"  # then `barrier` does nothing
