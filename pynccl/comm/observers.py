"""Who is told of what this process does: of each call of all communicators, and of overlapped layers. A trace is, and a
report. Without observers it costs one look at an empty list.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

OnEnd = Callable[[BaseException | None], None]


class Observed(Protocol):
    """A `call.Call`, or `ControlCall`."""

    @property
    def comm(self) -> Any: ...
    @property
    def operation(self) -> str: ...
    @property
    def inputs(self) -> tuple[int, ...]: ...
    @property
    def stream(self) -> int: ...
    @property
    def compared(self) -> str: ...
    @property
    def site(self) -> str: ...


class ControlCall(NamedTuple):
    """A call that is not made often: barrier, split, destroy, ...   weight: how many collective calls it counts as"""

    comm: Any
    operation: str
    weight: int
    inputs: tuple[int, ...] = ()
    stream: int = 0
    compared: str = ""
    site: str = ""


class Observer:
    """Overrides what it wants to hear of, by whichever thread does it. What it raises is raised into the program, so it
    does not: nor does what it returns.

    timing  whether `ran` wants `begin` and `end`"""

    timing = False

    def launching(self, calls: Sequence[Observed]) -> OnEnd | None:
        """Calls are about to be made together, by this thread, under the locks of their communicators, so in their
        order. What is returned is told once the C calls have returned, with the error, if there was one: then work on a
        stream may still be under way."""
        return None

    def waiting(self) -> OnEnd | None:
        """The caller's stream is about to wait for communication beside it; on the CPU the caller, until what is
        returned is told."""
        return None

    # Of overlapped layers: see Lane, Point and Lanes of pynccl_autograd.overlap.lanes.

    def ran(self, lane: Any, name: str, reads: Sequence[Any], writes: Sequence[Any], begin: Any, end: Any) -> None:
        """Work was issued: tensors that it reads and writes, marks of the lane around it."""

    def recorded(self, lane: Any, point: Any) -> None:
        """A point of a lane."""

    def waited(self, lane: Any, point: Any) -> None:
        """The lane waits for the point."""

    def closed(self, lanes: Any) -> None:
        """The caller has waited for all that ran on the lanes."""

    def decided(self, owner: Any, decision: Any) -> None:
        """How a pass of a layer is to overlap: asked for before it, and for a backward pass once more in it."""


observers: list[Observer] = []
os.register_at_fork(after_in_child=observers.clear)


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """The observer is told of all that this process does in the block, in all threads; see Observer.

    What is replayed by a CUDA graph is no call. A forked child has no observers."""
    observers.append(observer)
    try:
        yield
    finally:
        if observer in observers:  # not so in a forked child
            observers.remove(observer)


def observed(calls: Sequence[Observed]) -> AbstractContextManager[None]:
    """The calls are made within."""
    return _around(lambda observer: observer.launching(calls)) if observers else contextlib.nullcontext()


def waiting() -> AbstractContextManager[None]:
    """The caller waits within for communication beside it."""
    return _around(lambda observer: observer.waiting()) if observers else contextlib.nullcontext()


@contextlib.contextmanager
def _around(begin: Callable[[Observer], OnEnd | None]) -> Iterator[None]:
    """What each observer returns at the begin is called at the end, with the error that was raised."""
    ended = [end for observer in tuple(observers) if (end := begin(observer)) is not None]
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        for end in ended:
            end(error)
