"""The environment variables of the flight recorder and the watchdog."""

from __future__ import annotations

import math
import os
from typing import NamedTuple, TypeVar

from ..bindings.errors import NcclInvalidUsage

T = TypeVar("T")


class Settings(NamedTuple):
    """What PYNCCL_WATCH and its relatives say.

    on       PYNCCL_WATCH=off | on: record no calls, or all
    folder   PYNCCL_WATCH_DIR: where the files go; "": a private folder of the user in the temporary folder
    timeout  PYNCCL_WATCH_TIMEOUT: seconds that a call may be under way before all ranks are asked; 0: never
    raises   PYNCCL_WATCH_ACTION=report | raise: then tell, or also abort the communicator
    """

    on: bool
    folder: str
    timeout: float
    raises: bool

    @property
    def poll(self) -> float:
        """Seconds between two looks of the watchdog."""
        return min(max(self.timeout / 20, 0.05), 0.5) if self.timeout else 0.5


def settings() -> Settings:
    """What the environment says now. NcclInvalidUsage, with what would have been right, where it makes no sense."""
    on = _one_of("PYNCCL_WATCH", {"": True, "on": True, "1": True, "off": False, "0": False}, "on, off")
    raises = _one_of("PYNCCL_WATCH_ACTION", {"": False, "report": False, "raise": True}, "report, raise")
    folder = _value("PYNCCL_WATCH_DIR")
    return Settings(on, os.path.abspath(os.path.expanduser(folder)) if folder else "", _timeout(), raises)


def _value(name: str) -> str:
    return os.environ.get(name, "").strip()


def _one_of(name: str, values: dict[str, T], expected: str) -> T:
    text = _value(name)
    if text.lower() not in values:
        raise NcclInvalidUsage(f"{name}={text!r}: expected one of {expected}")
    return values[text.lower()]


def _timeout() -> float:
    text = _value("PYNCCL_WATCH_TIMEOUT")
    try:
        value = float(text or "60")
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise NcclInvalidUsage(f"PYNCCL_WATCH_TIMEOUT={text!r}: expected seconds, such as 60; 0 to never look")
    return value
