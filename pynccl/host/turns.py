"""How soon the kernel lets a thread run beside others: short turns for the threads of streams.

A stream's thread works little and sleeps much, and all ranks wait for it. Linux (6.12 and later) gives every thread
turns of a millisecond and more; where cores are busy with matmuls, a thread that has given its core away waits for that
long. A thread may ask for shorter turns: it gets no more of the processor, but sooner. No privilege is needed.
"""

from __future__ import annotations

import ctypes
import platform
import struct

SECONDS = 1e-4  # the shortest that the kernel takes
_NUMBERS = {"x86_64": 314, "aarch64": 274, "riscv64": 274, "ppc64le": 355, "s390x": 345}  # sched_setattr(2)
_GET = {"x86_64": 315, "aarch64": 275, "riscv64": 275, "ppc64le": 356, "s390x": 346}  # sched_getattr(2)
_LAYOUT = struct.Struct("IIQiIQQQ")  # struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period
_SCHED_OTHER = 0


def shorten(seconds: float = SECONDS) -> bool:
    """Ask for short turns for the calling thread. False where the kernel knows none, or the thread is no ordinary one;
    everything works without."""
    number, get = _NUMBERS.get(platform.machine()), _GET.get(platform.machine())
    if number is None or get is None or platform.system() != "Linux":
        return False
    syscall = ctypes.CDLL(None).syscall
    attributes = ctypes.create_string_buffer(_LAYOUT.size)
    if syscall(get, 0, attributes, _LAYOUT.size, 0) != 0:
        return False
    size, policy, flags, nice, priority, _runtime, deadline, period = _LAYOUT.unpack(attributes.raw)
    if policy != _SCHED_OTHER:
        return False
    wanted = _LAYOUT.pack(size, policy, flags, nice, priority, int(seconds * 1e9), deadline, period)
    return bool(syscall(number, 0, wanted, 0) == 0)
