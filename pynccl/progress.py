"""Progress bars of tqdm, where they are asked for: a library prints nothing by itself.

    with progress.shown():                          # in a program
        load(path)

    for part in progress.over(parts, "loading"):    # where the work is long
        ...

A bar is drawn on standard error, by rank 0, on a terminal. There is none on other ranks, in a pipe, on a dumb terminal,
where CI is set, and where tqdm is not installed. It is erased at its end, also by an exception.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sized
from typing import IO, Any, TypeVar

T = TypeVar("T")
_bars: list[Any] | None = None  # of tqdm; None outside `shown`


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """Draw bars within this context."""
    global _bars
    before, _bars = _bars, []
    try:
        yield
    finally:
        for bar in _bars:  # of loops that an exception has left
            bar.close()
        _bars = before


class Bar:
    """A bar of `total` steps (None: unknown). Without `shown`, or a terminal, nothing is drawn, and `line` prints.

    label   what the steps do
    unit    what a step is
    own     False on a rank other than 0, where the environment does not have RANK
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
            monitor_interval = 0  # no thread: ranks are forked while a bar is drawn

        Quiet.set_lock(threading.RLock())  # tqdm's own is one of the machine, with a process that watches it
        self._tqdm = Quiet(total=total, desc=label or None, unit=unit, file=sys.stderr, dynamic_ncols=True, leave=False)
        _bars.append(self._tqdm)

    def step(self, count: int = 1, note: str = "") -> None:
        """Advance by `count`; `note` stands behind the bar."""
        if self._tqdm is not None:
            self._tqdm.set_postfix_str(note, refresh=False)
            self._tqdm.update(count)

    def line(self, text: str, file: IO[str] | None = None) -> None:
        """Print a line above the bar; an empty text is not printed. The default of `file` is standard output."""
        if text:
            with self._tqdm.external_write_mode(file) if self._tqdm is not None else contextlib.nullcontext():
                print(text, file=file, flush=True)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._tqdm is not None:
            self._tqdm.close()


def over(items: Iterable[T], label: str = "", unit: str = "it", own: bool = True) -> Iterator[T]:
    """Yield the items, with a bar of them."""
    with Bar(len(items) if isinstance(items, Sized) else None, label, unit, own) as bar:
        for item in items:
            yield item
            bar.step()
