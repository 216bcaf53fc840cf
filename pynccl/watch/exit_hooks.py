"""The end of this process: record how it ended, with the line of an exception, and remove its file if the job succeeds.

Ends that cannot be recorded (kill -9, os._exit, a crash) are detected by the others: the process is gone and its file
records no end.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..bindings.errors import NcclError, outcome_of
from ..bindings.workers import begin_exit
from . import folder, recorder, watchdog
from .formatting import at, clean
from .frames import innermost_own, internal_files
from .layout import ProcessEnd
from .recorder import Ending
from .records import RUNNING, STOPPED, ProcessRecord, to_json

_CATCHERS = ("multiprocessing.process", "torch.multiprocessing.spawn")
_LINGER_SECONDS = 2.0  # for ranks on other nodes to notice a failure, find the culprit, and exit
_prepared: list[object] = []  # finalizers that multiprocessing runs at the end of its process
on_end: list[Callable[[str], object]] = []  # called with how the process ends: "exited with ValueError: ..", "" if well
_caught: list[BaseException | None] = []  # exception that ended the target function of a multiprocessing process


def prepare() -> None:
    """Register the hooks once a communicator exists: record the end before closing anything, remove files after it."""
    atexit.unregister(_record_end)
    atexit.register(_record_end)
    process = sys.modules.get("multiprocessing.process")
    util = sys.modules.get("multiprocessing.util")
    if process is not None and util is not None and process.parent_process() is not None and not _prepared:
        # Before Python 3.13, multiprocessing does not run atexit handlers in all of its processes, but runs these while
        # it handles the exception of the target function.
        _prepared.append(util.Finalize(None, _record_end, exitpriority=1000))
        _prepared.append(util.Finalize(None, _remove, exitpriority=0))
        if sys.version_info >= (3, 13):
            for name in ("print_exc", "format_exc"):
                setattr(traceback, name, _remember_exception(getattr(traceback, name)))


def _remember_exception(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of `traceback` to remember the exception that multiprocessing prints (or torch.multiprocessing
    sends to the parent): from Python 3.13 on, nothing else runs while multiprocessing handles that exception.

    The program that needs it: `multiprocessing.Process(target=train).start()`, and `train` raises on rank 1. Rank 0
    would learn only that "rank 1 exited by itself", and not "with ValueError at train.py:12"."""

    @functools.wraps(function)
    def wrapper(*args: Any, **options: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__") in _CATCHERS:
            _caught[:] = [sys.exc_info()[1]]
        return function(*args, **options)

    return wrapper


def _forget() -> None:  # multiprocessing drops its finalizers in a forked child too
    _prepared.clear()
    _caught.clear()


os.register_at_fork(after_in_child=_forget)


def register_removal() -> None:
    """Register the removal of files before the hooks that close communicators, so that it runs after them."""
    atexit.unregister(_remove)
    atexit.register(_remove)


def _record_end() -> None:
    """Record how this process ends, and report it to ranks on other nodes through the store. A clean exit is reported
    only if the store is served by torchrun's agent, not by a rank."""
    own = recorder.started()
    if own is None or not own.mine or own.ending:
        return
    ending = _how_process_ended(own)
    own.end(ending)
    begin_exit(own.ending > ProcessEnd.CLEAN)
    how = f"exited with {clean(ending.text)}{at(ending.site)}" if own.ending > ProcessEnd.CLEAN else ""
    for call in on_end:
        with contextlib.suppress(Exception):
            call(how)
    watchdog.stop()
    exchanges = {exchange for owner in (own, *own.tracks) if (exchange := owner.exchange) is not None}
    reports_end = own.ending != ProcessEnd.CLEAN or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if exchanges and reports_end and own.path:
        from . import reader

        with contextlib.suppress(Exception):  # must not prevent the exit
            record = reader.read_file(own.path)
            for exchange in exchanges:
                exchange.report_end(record)
    for exchange in exchanges:
        if not (reports_end and exchange.serves):
            exchange.close()  # a thread inside torch's C++ code at interpreter exit would crash it


def _linger(own: recorder.Recorder) -> None:
    """Let other ranks read the reported ends before a failed process exits, if it serves the store. Its communicators
    are already closed, so the other ranks fail and look for the reason."""
    if own.exchange is not None and own.exchange.serves:
        with contextlib.suppress(Exception):
            own.exchange.linger(_LINGER_SECONDS)
            own.exchange.close()


def _how_process_ended(own: recorder.Recorder) -> Ending:
    """Return how this process ends."""
    error = getattr(sys, "last_value", None) or sys.exc_info()[1] or next(iter(_caught), None)
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return Ending(ProcessEnd.CLEAN, "exit")
    chain = list(_origins(error)) or [error]
    if isinstance(error, SystemExit):  # of a handler, as launchers do
        if len(chain) == 1:
            code = error.code if isinstance(error.code, int) and abs(error.code) < 1 << 31 else 1
            return Ending(ProcessEnd.EXIT, f"exit({_text(repr, error.code)})", code=code)
        chain = chain[1:]
    if isinstance(chain[0], NcclError) and chain[0]._closing:
        chain = [origin for origin in chain if not isinstance(origin, NcclError)] or chain
    message = _text(str, chain[0])
    first = getattr(chain[0], "verdict", "") or message.strip().partition("\n")[0]
    text, site = f"{type(chain[0]).__name__}{': ' if first else ''}{first}", _user_line(chain[0])
    of_call = next((origin for origin in chain if isinstance(origin, NcclError)), None)
    if of_call is not None:
        return Ending(ProcessEnd.CALL_FAILED, text, site, *outcome_of(of_call))
    crossed, outcome, code = own.last_failure
    if crossed and crossed in message:
        return Ending(ProcessEnd.CALL_FAILED, text, site, outcome, code)
    if isinstance(chain[0], KeyboardInterrupt):
        return Ending(ProcessEnd.INTERRUPTED, text, site, code=signal.SIGINT)
    return Ending(ProcessEnd.EXCEPTION, text, site)


def _origins(error: BaseException | None, known: Iterable[int] = ()) -> Iterator[BaseException]:
    """Yield the exception, the one from which or during whose handling it was raised, and so on. In place of an
    ExceptionGroup, as asyncio.TaskGroup raises, one in it: the first that no call has caused, else the first.

    known  by id(), those that have been followed"""
    seen = {*known}
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, getattr(builtins, "BaseExceptionGroup", ())):  # of Python >= 3.11
            group: Any = error
            chains = [list(_origins(each, seen)) for each in group.exceptions]
            own = (chain for chain in chains if not any(isinstance(each, NcclError) for each in chain))
            yield from next(own, chains[0])
        else:
            yield error
        error = error.__cause__ or error.__context__


def _text(convert: Callable[[Any], str], value: Any) -> str:
    """Return the text of a value of the program; "" if its class cannot say it."""
    with contextlib.suppress(Exception):
        return convert(value)
    return ""


def _user_line(error: BaseException) -> str:
    """Return the innermost line of the user's own code in the traceback."""
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)][::-1]
    if all(internal_files[file] for file, _ in lines):
        return ""
    file, line = lines[innermost_own([file for file, _ in lines])]
    return f"{file}:{line}"


def _remove() -> None:
    """Remove the files when the last process of a job exits cleanly: running processes may still need them."""
    own = recorder.started()
    if own is None or not own.mine:
        return
    if own.ending > ProcessEnd.CLEAN:
        _linger(own)
    if not own.path or own.ending != ProcessEnd.CLEAN:
        return
    others: list[ProcessRecord] = []
    with contextlib.suppress(Exception):  # another process may have removed this one's file as the last one
        from . import reader  # a slow import

        me = reader.read_file(own.path, calls=False)
        known, _ = reader.read_folder(os.path.dirname(own.path), calls=False)
        others = [record for record in known if record.job == me.job or record.uids() & me.uids()]
    if any(record.state in (RUNNING, STOPPED) for record in others):
        return
    good = [record for record in others if record.ending == ProcessEnd.CLEAN]
    failed = [record for record in others if record.ending != ProcessEnd.CLEAN]
    uids = set[str]().union(*(record.uids() for record in good))
    if good and not any(record.uids() & uids for record in failed):  # else the failure is what hang shows
        import json

        records = [to_json(record) for record in good]
        folder.write_ended(os.path.dirname(own.path), json.dumps({"processes": records}))
    for path in (own.path, *(record.path for record in good), *own.extra_files):
        folder.remove(path)
