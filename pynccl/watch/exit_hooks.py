"""The end of this process: its record says how, by an exception with its line or in good order, and goes with its job.

What cannot be recorded (kill -9, os._exit, a crash) is seen by the others: the process is gone, its file says nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from . import folder, layout, recorder
from .frames import between
from .records import RUNNING, STOPPED, ProcessRecord

_CLEAN = "exit"  # ProcessRecord.end of one that has ended well
_CATCHERS = ("multiprocessing.process", "torch.multiprocessing.spawn")
_LINGER_SECONDS = 2.0  # in which ranks on other machines hear of a failure, find out who is to blame, and end
_prepared: list[object] = []  # what multiprocessing runs when its process ends
_caught: list[BaseException | None] = []  # what a function of multiprocessing has raised


def prepare() -> None:
    """A communicator is there: its end is told before anything of it is closed, and files go after that."""
    atexit.unregister(_record_end)
    atexit.register(_record_end)
    process = sys.modules.get("multiprocessing.process")
    util = sys.modules.get("multiprocessing.util")
    if process is not None and util is not None and process.parent_process() is not None and not _prepared:
        # It catches what the function of the process raises, and prints it itself; only here can it be seen. Handlers
        # of atexit are not run in all such processes.
        _prepared.append(util.Finalize(None, _record_end, exitpriority=1000))
        _prepared.append(util.Finalize(None, _remove, exitpriority=0))
        for name in ("print_exc", "format_exc"):
            setattr(traceback, name, _noting(getattr(traceback, name)))


def _noting(function: Callable[..., Any]) -> Callable[..., Any]:
    """From Python 3.13 on multiprocessing runs nothing while it has the exception in hand, but to print it, and
    torch.multiprocessing to send it to its parent: so it is taken there."""

    @functools.wraps(function)
    def wrapper(*args: Any, **options: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__") in _CATCHERS:
            _caught[:] = [sys.exc_info()[1]]
        return function(*args, **options)

    return wrapper


def _forget() -> None:  # as multiprocessing does with what it was given
    _prepared.clear()
    _caught.clear()


os.register_at_fork(after_in_child=_forget)


def register_removal() -> None:
    """Registered before whatever closes communicators, so that it runs after that."""
    atexit.unregister(_remove)
    atexit.register(_remove)


def _record_end() -> None:
    """Write down how this process ends, and tell ranks on other machines, where they can be told: in good order only
    where the store does not end with a rank."""
    own = recorder.started()
    if own is None or not own.mine or own.ended:
        return
    own.end(*_how())
    exchanges = {exchange for one in (own, *own.tracks) if (exchange := one.exchange) is not None}
    telling = own.ended != layout.CLEAN or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if exchanges and telling and own.path:
        from . import reader

        with contextlib.suppress(Exception):  # that it ends is more important
            record = reader.read_file(own.path)
            for exchange in exchanges:
                exchange.tell_end(record)
    for exchange in exchanges:
        if not (telling and exchange.serves):
            exchange.close()  # a thread that is in torch's C++ when the interpreter ends would crash it


def _linger(own: recorder.Recorder) -> None:
    """The communicators of a process that has failed are closed, which the others notice; where the store goes with
    this process, it stays until they have read there what has happened."""
    if own.exchange is not None and own.exchange.serves:
        with contextlib.suppress(Exception):
            own.exchange.linger(_LINGER_SECONDS)
            own.exchange.close()


def _how() -> tuple[int, str, str]:
    """How this process ends: kind, text, the user's line."""
    error = _cause(getattr(sys, "last_value", None) or sys.exc_info()[1] or next(iter(_caught), None))
    if error is None:
        return layout.CLEAN, _CLEAN, ""
    if isinstance(error, SystemExit):
        clean = error.code in (None, 0)
        return (layout.CLEAN, _CLEAN, "") if clean else (layout.EXCEPTION, f"exit({error.code!r})", "")
    first = getattr(error, "verdict", "") or str(error).strip().partition("\n")[0]
    return layout.EXCEPTION, f"{type(error).__name__}{': ' if first else ''}{first}", _line_of(error)


def _cause(error: BaseException | None) -> BaseException | None:
    """Of a sys.exit() in a handler of another exception, as launchers make it, that other one."""
    if isinstance(error, SystemExit) and error.code not in (None, 0) and error.__context__ is not None:
        return error.__context__
    return error


def _line_of(error: BaseException) -> str:
    """The user's innermost line that the exception came through."""
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return next((f"{file}:{line}" for file, line in reversed(lines) if not between[file]), "")


def _remove() -> None:
    """Files go when a job has ended well, with its last process: those who run may have to be told of others."""
    own = recorder.started()
    if own is None or not own.mine:
        return
    if own.ended == layout.EXCEPTION:
        _linger(own)
    if not own.path or own.ended != layout.CLEAN:
        return
    others: list[ProcessRecord] = []
    with contextlib.suppress(Exception):  # this process's own may be gone: another one was the last
        from . import reader  # what it imports takes long

        me = reader.read_file(own.path, calls=False)
        known, _ = reader.read_folder(os.path.dirname(own.path), calls=False)
        others = [one for one in known if one.job == me.job or one.uids() & me.uids()]
    if any(one.state in (RUNNING, STOPPED) for one in others):
        return
    for path in (own.path, *(one.path for one in others if one.end == _CLEAN), *own.beside):
        folder.remove(path)
