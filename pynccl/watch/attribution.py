"""For the flight recorder: the autograd function that is making calls in each thread, and its forward call site."""

from __future__ import annotations

import os
import threading

# Thread -> (function, line of its forward call, what PYNCCL_CHECK=1 compares besides the call). It is almost always
# empty, and then costs a call nothing.
attributions: dict[int, tuple[str, str, str]] = {}


class attribute_calls:
    """Context manager that attributes this thread's calls to `function` ("AllReduce.backward") and its forward `site`.

    When nested, an outer attribution that has a site wins, because the adjoint of a collective is a collective too."""

    __slots__ = ("_before", "_note")

    def __init__(self, function: str, site: str = "", compared: str = "") -> None:
        self._note = (function, site, compared)

    def __enter__(self) -> None:
        thread = threading.get_ident()
        self._before = before = attributions.get(thread)
        if before is None or not before[1]:
            attributions[thread] = self._note

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            attributions.pop(threading.get_ident(), None)
        else:
            attributions[threading.get_ident()] = self._before


os.register_at_fork(after_in_child=attributions.clear)
