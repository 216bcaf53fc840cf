"""The environment variables of the flight recorder and the watchdog."""

from __future__ import annotations

import math
import os
from typing import NamedTuple, TypeVar

from ..bindings.errors import NcclInvalidUsage

T = TypeVar("T")


class Settings(NamedTuple):
    """The values of the PYNCCL_WATCH* variables.

    on       PYNCCL_WATCH=off | on: whether calls are recorded
    folder   PYNCCL_WATCH_DIR: folder for the files; "": a private folder of the user in the temporary folder
    timeout  PYNCCL_WATCH_TIMEOUT: seconds after which a call that has not completed is reported; 0: never
    raises   PYNCCL_WATCH_ACTION=report | raise: whether the watchdog also aborts the communicator after reporting
    """

    on: bool
    folder: str
    timeout: float
    raises: bool

    @property
    def poll(self) -> float:
        """Polling interval of the watchdog, in seconds."""
        return min(max(self.timeout / 20, 0.05), 0.5) if self.timeout else 0.5


def settings() -> Settings:
    """Read the environment. Invalid values raise NcclInvalidUsage, which names the valid ones."""
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
        raise NcclInvalidUsage(f"PYNCCL_WATCH_TIMEOUT={text!r}: expected seconds, such as 60, or 0 to disable")
    return value
