"""A simulated network link: PYNCCL_HOST_LINK="latency=50us,bandwidth=1GB/s" slows operations down to its speed.

Each operation takes at least `steps * latency + bytes_on_wire / bandwidth` on a FIFO link. It sleeps for the remaining
time, so the core and the GIL stay free for overlapped work. Units: ns, us, ms, s; B, KB, MB, GB (powers of ten), with
or without "/s". An omitted part costs nothing; without the variable there is no link.

Per rank, with p ranks and V bytes of the full tensor (count * size for all_reduce, broadcast, reduce, send and recv;
p * count * size otherwise):

    all_reduce                       2(p-1) steps   2(p-1)/p V bytes
    all_gather, reduce_scatter        (p-1) steps    (p-1)/p V bytes
    all_to_all                        (p-1) steps    (p-1)/p V bytes
    gather, scatter                   (p-1) steps    (p-1)/p V bytes on the root, V/p elsewhere
    broadcast, reduce                 (p-1) steps    V bytes
    send, recv                            1 step     the larger direction; a group's share one step

Each device of a process has one link, shared by its communicators and their splits. Ranks that are threads of one
process have separate links only with ncclCommInitAll, which numbers their devices.
"""

from __future__ import annotations

import os
import re
import threading
import time
from dataclasses import dataclass, field

from .failure import invalid_argument

VARIABLE = "PYNCCL_HOST_LINK"
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_BYTES = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)([a-z]+)(/s)?", re.IGNORECASE)


@dataclass
class Link:
    """latency: seconds per step. seconds_per_byte: inverse bandwidth."""

    latency: float
    seconds_per_byte: float
    _free_at: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def seconds(self, steps: int, nbytes: float) -> float:
        """Return the duration of one operation on an idle link."""
        return steps * self.latency + nbytes * self.seconds_per_byte

    def reserve(self, steps: int, nbytes: float) -> float:
        """Queue one operation; return the earliest completion time, on the clock of time.perf_counter."""
        with self._lock:
            start = max(time.perf_counter(), self._free_at)
            self._free_at = start + self.seconds(steps, nbytes)
            return self._free_at


def sleep_until(moment: float) -> None:
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left)


def parse(text: str) -> Link | None:
    """Parse a description of a link; None if it is empty."""
    if not text.strip():
        return None
    latency, seconds_per_byte = 0.0, 0.0
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        match = _QUANTITY.fullmatch(value.strip())
        number, unit, per_second = match.groups() if match else ("", "", None)
        if name.strip() == "latency" and unit.lower() in _SECONDS and not per_second:
            latency = float(number) * _SECONDS[unit.lower()]
        elif name.strip() == "bandwidth" and unit.lower() in _BYTES and float(number) > 0:
            seconds_per_byte = 1.0 / (float(number) * _BYTES[unit.lower()])
        else:
            raise invalid_argument(
                f"{VARIABLE}={text!r}: cannot read {part.strip()!r}; expected for example "
                '"latency=50us,bandwidth=1GB/s" (latency in ns, us, ms or s; bandwidth in B/s, KB/s, MB/s or GB/s)'
            )
    return Link(latency, seconds_per_byte)


_links: dict[tuple[int, int, str], Link | None] = {}
_links_lock = threading.Lock()


def link_of(device: int) -> Link | None:
    """Return the link of `device`, as the environment describes it now; None without a description."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None
    key = (os.getpid(), device, text)
    with _links_lock:
        if key not in _links:
            _links[key] = parse(text)
        return _links[key]
