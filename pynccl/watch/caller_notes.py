"""Which autograd function makes the calls of a thread, and of which forward call's line it is: for the record."""

from __future__ import annotations

import os
import threading

# Thread -> (function, line of its forward call). Empty, as it nearly always is, it costs a call nothing.
notes: dict[int, tuple[str, str]] = {}


class calls_noted_as:
    """A context: calls of this thread are made by this function, "AllReduce.backward", of the forward call at `site`.

    Within another one that has a site, that is kept: the adjoint of a collective is a collective too."""

    __slots__ = ("_before", "_note")

    def __init__(self, function: str, site: str = "") -> None:
        self._note = (function, site)

    def __enter__(self) -> None:
        thread = threading.get_ident()
        self._before = before = notes.get(thread)
        if before is None or not before[1]:
            notes[thread] = self._note

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            notes.pop(threading.get_ident(), None)
        else:
            notes[threading.get_ident()] = self._before


os.register_at_fork(after_in_child=notes.clear)
