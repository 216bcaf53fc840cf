"""The environment variables of the flight recorder and the watchdog; what they mean is said here."""

from __future__ import annotations

import math
import os
from typing import NamedTuple

from ..bindings.errors import NcclInvalidUsage

OFF, ON = "off", "on"
REPORT, RAISE = "report", "raise"

_MOST_CALLS = 1 << 15


class Settings(NamedTuple):
    """What PYNCCL_WATCH and its relatives say.

    mode     PYNCCL_WATCH=off | on: record no calls, or all
    folder   PYNCCL_WATCH_DIR: where the files go; "": a private folder of the user in the temporary folder
    timeout  PYNCCL_WATCH_TIMEOUT: seconds that a call may be under way before all ranks are asked; 0: never
    action   PYNCCL_WATCH_ACTION=report | raise: then tell, or also abort the communicator
    calls    PYNCCL_WATCH_CALLS: the last calls that are kept of each communicator
    """

    mode: str = ON
    folder: str = ""
    timeout: float = 60.0
    action: str = REPORT
    calls: int = 2048

    @property
    def poll(self) -> float:
        """Seconds between two looks of the watchdog."""
        return min(max(self.timeout / 20, 0.05), 0.5) if self.timeout else 0.5


_NAMES = ("PYNCCL_WATCH", "PYNCCL_WATCH_DIR", "PYNCCL_WATCH_TIMEOUT", "PYNCCL_WATCH_ACTION", "PYNCCL_WATCH_CALLS")
_read: dict[tuple[str, ...], Settings] = {}


def settings() -> Settings:
    """What the environment says now. NcclInvalidUsage, with what would have been right, where it makes no sense."""
    given = tuple(os.environ.get(name, "").strip() for name in _NAMES)
    if given not in _read:
        _read[given] = _parsed(*given)
    return _read[given]


def _parsed(mode: str, folder: str, timeout: str, action: str, calls: str) -> Settings:
    return Settings(
        _one_of("PYNCCL_WATCH", mode, (ON, OFF)),
        os.path.abspath(os.path.expanduser(folder)) if folder else "",
        _timeout(timeout),
        _one_of("PYNCCL_WATCH_ACTION", action, (REPORT, RAISE)),
        _calls(calls),
    )


def _one_of(name: str, given: str, choices: tuple[str, ...]) -> str:
    value = given.lower() or choices[0]
    if name == "PYNCCL_WATCH":
        value = {"0": OFF, "1": ON}.get(value, value)
    if value not in choices:
        raise NcclInvalidUsage(f"{name}={given!r}: expected one of {', '.join(choices)}")
    return value


def _timeout(given: str) -> float:
    try:
        value = float(given or 60.0)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise NcclInvalidUsage(f"PYNCCL_WATCH_TIMEOUT={given!r}: expected seconds, such as 60; 0 to never look")
    return value


def _calls(given: str) -> int:
    if (given and not given.isdigit()) or not 8 <= int(given or 2048) <= _MOST_CALLS:
        raise NcclInvalidUsage(f"PYNCCL_WATCH_CALLS={given!r}: expected a number of calls, 8 to {_MOST_CALLS}")
    return int(given or 2048)
