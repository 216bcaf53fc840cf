"""What this package keeps for a communicator: its side streams, buffers, schedules, .. They end with it."""

from __future__ import annotations

from typing import TypeVar

from pynccl import Communicator

T = TypeVar("T")


def state_of(comm: Communicator, kind: type[T]) -> T:
    """Return the communicator's object of this type, made at first use."""
    found: T | None = comm._attached.get(kind)
    return comm._attached.setdefault(kind, kind()) if found is None else found
