"""Progress bars: on the terminal of who runs a command, and nowhere else.

    with progress.shown():                          # a command; a library prints nothing unasked
        load(path)

    for part in progress.over(parts, "loading"):    # where the work is long
        ...

A bar is tqdm's, on standard error. There is none on ranks other than 0, where standard error is no terminal or a dumb
one, where CI is set, and where tqdm is not installed. It is wiped away when it is done, also by an exception.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sized
from contextvars import ContextVar
from types import TracebackType
from typing import IO, Any, TypeVar

T = TypeVar("T")
_open: list[Bar] = []
_wanted: ContextVar[bool] = ContextVar("progress bars are wanted", default=False)


@contextlib.contextmanager
def shown(really: bool = True) -> Iterator[None]:
    """Within it, `over` and `Bar` show bars, where there is a terminal; what is left of them goes at its end. False:
    none, as it is from the start."""
    before, open_before = _wanted.set(really), list(_open)
    try:
        yield
    finally:
        _wanted.reset(before)
        for bar in [one for one in _open if one not in open_before]:  # of loops that an exception has left
            bar.close()


def on_a_terminal() -> bool:
    """Whether this process may draw a bar: rank 0, on a terminal that can, and not in CI."""
    if os.environ.get("RANK", "0") != "0" or os.environ.get("TERM") == "dumb" or os.environ.get("CI"):
        return False
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # closed
        return False


class Bar:
    """A bar over `total` steps, if `shown` is in force; else all of it does nothing but `line`, which prints.

    total     steps; None if nobody knows how many
    label     what they do, in a word or two
    unit      what a step is
    own       False on a rank that is not the first, where the environment does not say so
    """

    def __init__(self, total: int | None, label: str = "", unit: str = "it", own: bool = True) -> None:
        self._tqdm: Any = None
        if own and _wanted.get() and on_a_terminal():
            self._tqdm = _tqdm(total, label, unit)
        if self._tqdm is not None:
            _open.append(self)

    def step(self, count: int = 1, note: str = "") -> None:
        """So many steps are done; `note` stands behind the bar."""
        if self._tqdm is not None:
            if note:
                self._tqdm.set_postfix_str(note, refresh=False)
            self._tqdm.update(count)

    def note(self, text: str) -> None:
        """What is done now, behind the bar, at once."""
        if self._tqdm is not None:
            self._tqdm.set_postfix_str(text)

    def line(self, text: str, file: IO[str] | None = None) -> None:
        """Print a line, if it is not empty, above the bar; `file` None is standard output."""
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
            _open.remove(self)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def over(items: Iterable[T], label: str = "", unit: str = "it", own: bool = True) -> Iterator[T]:
    """The items, with a bar over them where bars are shown."""
    with Bar(len(items) if isinstance(items, Sized) else None, label, unit, own) as bar:
        for item in items:
            yield item
            bar.step()


def _tqdm(total: int | None, label: str, unit: str) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None

    class Quiet(tqdm):
        monitor_interval = 0  # no thread: ranks are forked beside it

    Quiet.set_lock(threading.RLock())  # tqdm's own is a semaphore of the machine, which a killed process leaves behind
    return Quiet(total=total, desc=label or None, unit=unit, file=sys.stderr, dynamic_ncols=True, leave=False)
