"""Observers: callbacks for each call of all communicators. Traces use them.

Without observers the cost is one check of an empty list.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

OnEnd = Callable[[BaseException | None], None]


class Observed(Protocol):
    """A `call.Call` or a `ControlCall`."""

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
    """A control call: barrier, split, destroy, ...   weight: number of collective calls it counts as"""

    comm: Any
    operation: str
    weight: int
    inputs: tuple[int, ...] = ()
    stream: int = 0
    compared: str = ""
    site: str = ""


class Observer:
    """Base class: override the callbacks you need. They run in the thread that does the work. They and the functions
    they return must not raise, since the exception would reach the program."""

    def launching(self, calls: Sequence[Observed]) -> OnEnd | None:
        """Called before calls are made together, in this thread, in order, under the locks of their communicators.

        Returns a function to call with the error or None when the C calls have returned. Work on a stream may still be
        running then."""
        return None

    def waiting(self) -> OnEnd | None:
        """Called before the caller's stream waits for overlapped communication. On the CPU the caller itself waits,
        until the returned function is called."""
        return None


observers: list[Observer] = []
os.register_at_fork(after_in_child=observers.clear)


@contextlib.contextmanager
def observing(observer: Any, among: list[Any] = observers) -> Iterator[None]:
    """Call the observer for everything that this process does in the block, in all threads.

    The replay of a CUDA graph is not observed. A forked child has no observers.

    among  the observers of what: other packages have lists of their own"""
    among.append(observer)
    try:
        yield
    finally:
        if observer in among:  # it is not in a forked child
            among.remove(observer)


def observed(calls: Sequence[Observed]) -> AbstractContextManager[None]:
    """Return a context manager that notifies the observers of the calls made in the block."""
    return _around(lambda observer: observer.launching(calls)) if observers else contextlib.nullcontext()


def waiting() -> AbstractContextManager[None]:
    """Return a context manager for a block in which the caller waits for overlapped communication."""
    return _around(lambda observer: observer.waiting()) if observers else contextlib.nullcontext()


@contextlib.contextmanager
def _around(begin: Callable[[Observer], OnEnd | None]) -> Iterator[None]:
    """Call `begin(observer)` for each observer, and the functions it returned at the end with the error or None."""
    on_end = [end for observer in tuple(observers) if (end := begin(observer)) is not None]
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        for end in on_end:
            end(error)
