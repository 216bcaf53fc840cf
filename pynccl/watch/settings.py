"""The environment variables of the flight recorder and the watchdog."""

from __future__ import annotations

import functools
import math
import os
from typing import NamedTuple

from ..bindings.errors import NcclInvalidUsage

OFF, ON = "off", "on"
REPORT, RAISE = "report", "raise"

_NAMES = ("PYNCCL_WATCH", "PYNCCL_WATCH_DIR", "PYNCCL_WATCH_TIMEOUT", "PYNCCL_WATCH_ACTION")


class Settings(NamedTuple):
    """What PYNCCL_WATCH and its relatives say.

    mode     PYNCCL_WATCH=off | on: record no calls, or all
    folder   PYNCCL_WATCH_DIR: where the files go; "": a private folder of the user in the temporary folder
    timeout  PYNCCL_WATCH_TIMEOUT: seconds that a call may be under way before all ranks are asked; 0: never
    action   PYNCCL_WATCH_ACTION=report | raise: then tell, or also abort the communicator
    """

    mode: str
    folder: str
    timeout: float
    action: str

    @property
    def poll(self) -> float:
        """Seconds between two looks of the watchdog."""
        return min(max(self.timeout / 20, 0.05), 0.5) if self.timeout else 0.5


def settings() -> Settings:
    """What the environment says now. NcclInvalidUsage, with what would have been right, where it makes no sense."""
    return _parsed(*(os.environ.get(name, "").strip() for name in _NAMES))


@functools.cache
def _parsed(mode: str, folder: str, timeout: str, action: str) -> Settings:
    modes = {"": ON, "on": ON, "1": ON, "off": OFF, "0": OFF}
    actions = {"": REPORT, "report": REPORT, "raise": RAISE}
    if mode.lower() not in modes:
        raise NcclInvalidUsage(f"PYNCCL_WATCH={mode!r}: expected one of on, off")
    if action.lower() not in actions:
        raise NcclInvalidUsage(f"PYNCCL_WATCH_ACTION={action!r}: expected one of report, raise")
    folder = os.path.abspath(os.path.expanduser(folder)) if folder else ""
    return Settings(modes[mode.lower()], folder, _timeout(timeout or "60"), actions[action.lower()])


def _timeout(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise NcclInvalidUsage(f"PYNCCL_WATCH_TIMEOUT={text!r}: expected seconds, such as 60; 0 to never look")
    return value
