"""Progress bars of tqdm, where they are asked for: a library prints nothing by itself.

    with progress.shown():                          # in a program
        load(path)

    for part in progress.over(parts, "loading"):    # where the work is long
        ...

A bar is drawn on standard error, by rank 0, on a terminal. There is none on other ranks, in a pipe, on a dumb terminal,
where CI is set, and where tqdm is not installed. It is erased at its end, also by an exception.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sized
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import IO, Any, TypeVar

T = TypeVar("T")
_bars: ContextVar[ExitStack | None] = ContextVar("the bars of `shown`", default=None)


@contextmanager
def shown(really: bool = True) -> Iterator[None]:
    """Draw bars within this context; `really=False`: none, which is the default of a process."""
    with ExitStack() as bars:  # closes those of loops that an exception has left
        before = _bars.set(bars if really else None)
        try:
            yield
        finally:
            _bars.reset(before)


class Bar:
    """A bar of `total` steps (None: unknown). Without `shown`, or a terminal, nothing is drawn, and `line` prints.

    label   what the steps do
    unit    what a step is
    own     False on a rank other than 0, where the environment does not have RANK
    """

    def __init__(self, total: int | None, label: str = "", unit: str = "it", own: bool = True) -> None:
        bars = _bars.get()
        self._tqdm = _tqdm(total, label, unit) if bars is not None and own and _on_a_terminal() else None
        if bars is not None:
            bars.callback(self.close)

    def step(self, count: int = 1, note: str = "") -> None:
        """Advance by `count`; `note` stands behind the bar."""
        if self._tqdm is not None:
            if note:
                self._tqdm.set_postfix_str(note, refresh=False)
            self._tqdm.update(count)

    def note(self, text: str) -> None:
        """Show what is being done, behind the bar."""
        if self._tqdm is not None:
            self._tqdm.set_postfix_str(text)

    def line(self, text: str, file: IO[str] | None = None) -> None:
        """Print a line above the bar; an empty text is not printed. The default of `file` is standard output."""
        if not text:
            return
        if self._tqdm is not None:
            self._tqdm.clear()
        print(text, file=file, flush=True)
        if self._tqdm is not None:
            self._tqdm.refresh()

    def close(self) -> None:
        if self._tqdm is not None:
            self._tqdm.close()
            self._tqdm = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def over(items: Iterable[T], label: str = "", unit: str = "it", own: bool = True) -> Iterator[T]:
    """Yield the items, with a bar of them."""
    with Bar(len(items) if isinstance(items, Sized) else None, label, unit, own) as bar:
        for item in items:
            yield item
            bar.step()


def _on_a_terminal() -> bool:
    if os.environ.get("RANK", "0") != "0" or os.environ.get("TERM") == "dumb" or os.environ.get("CI"):
        return False
    return sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()


def _tqdm(total: int | None, label: str, unit: str) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None

    class Quiet(tqdm):
        monitor_interval = 0  # no thread: ranks are forked while a bar is drawn

    Quiet.set_lock(threading.RLock())  # tqdm's own is a semaphore of the machine, which a killed process leaves behind
    return Quiet(total=total, desc=label or None, unit=unit, file=sys.stderr, dynamic_ncols=True, leave=False)
