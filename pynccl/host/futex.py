"""Sleep on a word of shared memory until another process changes it: futex(2) through ctypes, without the GIL.

A waker stores the word and then always calls FUTEX_WAKE, without a second word that counts sleepers. The call takes
half a microsecond, and the kernel checks for sleepers with the barriers that prevent lost wake-ups. Python has no
barrier between a store and a load, so a sleeper count would be unreliable, and it would save less time than that.
"""

from __future__ import annotations

import ctypes
import platform
import threading
import time
from collections.abc import Callable

# System call numbers of platforms with 64-bit longs.
_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_WAIT, _WAKE = 0, 1  # not private: the word is shared between processes
_INT_MAX = 2**31 - 1
_SPIN_SECONDS, _POLLS_PER_YIELD = 300e-6, 5
_LONG_YIELD_SECONDS, _CROWDED_SECONDS = 200e-6, 0.05
_crowded_until = 0.0  # by time.perf_counter()
_number = _NUMBERS.get(platform.machine(), 0)
_libc = ctypes.CDLL(None)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_void_p]


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def wait(address: int, value: int, timeout: _Timespec) -> None:
    """Sleep while the word is `value`, up to `timeout`. It may return early, so check the word again."""
    _syscall(_number, address, _WAIT, value, ctypes.addressof(timeout))


def wake(address: int) -> None:
    """Wake all threads that sleep on the word, in all processes."""
    _syscall(_number, address, _WAKE, _INT_MAX, None)


def sched_yield() -> None:
    """Yield this core to other runnable threads."""
    _libc.sched_yield()


def spin(word: memoryview, value: int) -> bool:
    """Poll the word for a short time, yielding the core; return whether it is no longer `value`.

    If a yield takes long, others need the cores: then the kernel runs a thread that wakes up earlier than one that has
    yielded, so nobody spins for a while."""
    global _crowded_until
    now = time.perf_counter()
    if now < _crowded_until:
        return False
    end = now + _SPIN_SECONDS
    while now < end:
        for _ in range(_POLLS_PER_YIELD):
            if word[0] != value:
                return True
        sched_yield()
        before, now = now, time.perf_counter()
        if now - before > _LONG_YIELD_SECONDS:
            _crowded_until = now + _CROWDED_SECONDS
            break
    return word[0] != value


def timeout_of(seconds: float) -> _Timespec:
    return _Timespec(int(seconds), int(seconds % 1 * 1e9))


def unavailable_reason() -> str:
    """Return why futexes are unavailable on this machine; "" if they are available."""
    if not _number or ctypes.sizeof(ctypes.c_long) != 8:
        return f"futex(2) is not supported on {platform.machine()}"
    word = ctypes.c_uint32(0)
    if _syscall(_number, ctypes.addressof(word), _WAKE, 1, None) != 0:
        return "the system forbids futex(2)"
    return ""


def _full_barrier() -> Callable[[], None]:
    """Return a memory barrier, for use between the data and the word that announces it.

    x86 does not reorder stores with stores, or loads with loads. Elsewhere two locks serve as the barrier: accesses
    before the release of the first stay before it, accesses after the acquisition of the second stay after it, and an
    acquisition does not overtake a release."""
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
ORDERED = platform.machine() == "x86_64"  # then `barrier` is a no-op
