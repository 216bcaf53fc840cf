"""Who is told of each call of all communicators of this process, as a trace is. Without observers it costs nothing.

What looks for an open group before it takes the short way (fast_path.py, plan.py, enqueue.py) finds one that is
nobody's while there are observers, and so takes the long way, which tells them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

Told = Callable[[BaseException | None], None]


class Observed(Protocol):
    """A `call.Call`, or `Seldom`."""

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


class Seldom(NamedTuple):
    """A call that is not made often: barrier, split, destroy, ...   weight: how many collective calls it counts as"""

    comm: Any
    operation: str
    weight: int
    inputs: tuple[int, ...] = ()
    stream: int = 0
    compared: str = ""
    site: str = ""


class Observer(Protocol):
    def launching(self, calls: Sequence[Observed]) -> Told:
        """Calls are about to be made together, by this thread, under the locks of their communicators, so in their
        order. What is returned is told once the C calls have returned, with the error, if there was one: then work on a
        stream may still be under way. Neither may raise."""


observers: list[Observer] = []
os.register_at_fork(after_in_child=observers.clear)


@contextlib.contextmanager
def telling(calls: Sequence[Observed]) -> Iterator[None]:
    """The calls are made within."""
    ends = [observer.launching(calls) for observer in tuple(observers)]
    try:
        yield
    except BaseException as error:
        for end in ends:
            end(error)
        raise
    for end in ends:
        end(None)
