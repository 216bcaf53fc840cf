"""Progress bars (tqdm), off by default: the library draws them only inside `shown`.

    with progress.shown():                          # in a program
        load(path)

    for part in progress.over(parts, "loading"):    # in a long-running loop
        ...

Rank 0 draws the bar on standard error if that is a terminal. No bar is drawn on other ranks, in a pipe, on a dumb
terminal, if CI is set, or if tqdm is not installed. The bar is erased when the loop ends or raises.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sized
from typing import IO, Any, TypeVar

from .bindings.listing import public_dir

__all__ = ["Bar", "over", "shown"]
__dir__ = public_dir(globals())

T = TypeVar("T")
_bars: list[Any] | None = None  # the tqdm bars; None outside `shown`


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """Draw progress bars within this context."""
    global _bars
    before, _bars = _bars, []
    try:
        yield
    finally:
        for bar in _bars:  # of loops that were left by an exception
            bar.close()
        _bars = before


class Bar:
    """A bar of `total` steps (None: unknown). Outside `shown`, or without a terminal, only `line` prints.

    label   description shown in front of the bar
    unit    name of one step
    own     False to draw nothing: for ranks other than 0 if the environment does not have RANK
    """

    def __init__(self, total: int | None, label: str = "", unit: str = "it", own: bool = True) -> None:
        self._tqdm: Any = None
        terminal = sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()
        here = os.environ.get("RANK", "0") == "0" and os.environ.get("TERM") != "dumb" and not os.environ.get("CI")
        if _bars is None or not (own and terminal and here):
            return
        try:
            from tqdm import tqdm
        except ImportError:
            return

        class Quiet(tqdm):
            monitor_interval = 0  # no monitor thread: ranks are forked while a bar is drawn

        Quiet.set_lock(threading.RLock())  # tqdm's default lock is multiprocess and starts a helper process
        self._tqdm = Quiet(total=total, desc=label or None, unit=unit, file=sys.stderr, dynamic_ncols=True, leave=False)
        _bars.append(self._tqdm)

    def step(self, count: int = 1, note: str = "") -> None:
        """Advance by `count` steps and show `note` after the bar."""
        if self._tqdm is not None:
            self._tqdm.set_postfix_str(note, refresh=False)
            self._tqdm.update(count)

    def line(self, text: str, file: IO[str] | None = None) -> None:
        """Print a line above the bar, to `file` (default: standard output). An empty text is not printed."""
        if text:
            with self._tqdm.external_write_mode(file) if self._tqdm is not None else contextlib.nullcontext():
                print(text, file=file, flush=True)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._tqdm is not None:
            self._tqdm.close()


def over(items: Iterable[T], label: str = "", unit: str = "it", own: bool = True) -> Iterator[T]:
    """Yield the items and draw a progress bar."""
    with Bar(len(items) if isinstance(items, Sized) else None, label, unit, own) as bar:
        for item in items:
            yield item
            bar.step()
