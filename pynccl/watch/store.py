"""The store that bootstrap used, for those who must not wait for it: lists, and operations that end by a deadline."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ..bindings.workers import GRACE_SECONDS, Helper, Silent
from .layout import printable

T = TypeVar("T")

OPERATION_SECONDS = 2.0  # for what is asked of the store at once; later it counts as out of reach


def append(store: Any, key: str, text: str) -> None:
    """Add `text`, one line or several, to a list. One operation, where the store has it; else one and one a line."""
    if _appends(store):
        store.append(key, text + "\n")
        return
    for line in text.split("\n"):
        store.set(f"{key}/{store.add(f'{key}/count', 1)}", line)


def lines(store: Any, key: str) -> list[str]:
    """The list so far, in no particular order. Two operations, where the store has append(); else two a line."""
    if _appends(store):
        return read(store, key).removesuffix("\n").split("\n") if store.check([key]) else []
    keys = [f"{key}/{i + 1}" for i in range(store.add(f"{key}/count", 0))]
    return [read(store, one) for one in keys if store.check([one])]  # one that is not there yet is about to be written


def read(store: Any, key: str) -> str:
    """A text, which anybody may have put there who reaches the store, as it may be shown."""
    return printable(str(store.get(key).decode(errors="replace")), lines=True)


def _appends(store: Any) -> bool:
    """torch's FileStore has an append() that it does not vouch for: has_extended_api() says so."""
    return hasattr(store, "append") and (not hasattr(store, "has_extended_api") or bool(store.has_extended_api()))


class OutOfReach(Exception):
    """The store does not answer, or is gone; says which."""


class Reach:
    """A store whose operations end by a deadline, whatever it does.

    Through a connection of its own, where the store can be cloned: a client of a TCPStore makes one operation at a
    time, and the user's may wait for minutes. While an operation is late no other is begun; once it has returned, all
    goes on. An error, such as a closed connection, is for good: torch writes a trace to stderr for each attempt.
    """

    def __init__(self, store: Any) -> None:
        self.reason = ""  # why it is out of reach; "" if it is not
        self._original = store  # kept: it may be what serves the store
        self._own: Any = None
        self._lock = threading.Lock()
        self._helper = Helper()
        self._lost = ""
        self._name = f"the store at which the ranks met{_address(store)}"
        self._pid = os.getpid()

    def do(self, calls: Callable[[Any], T]) -> T:
        """What `calls(store)` returns; OutOfReach within about two seconds otherwise. It changes nothing but the store:
        when it is late, it goes on in a thread."""
        if self._pid != os.getpid():
            self.reason = "this process was forked, and the connection to the store is its parent's"
            raise OutOfReach(self.reason)
        if not self._lock.acquire(timeout=OPERATION_SECONDS):
            raise OutOfReach(self.reason or "another thread waits for the store")
        try:
            result = self._do(calls)
            self.reason = ""
            return result
        except OutOfReach as error:
            self.reason = str(error)
            raise
        finally:
            self._lock.release()

    def close(self) -> None:
        """Ask no more. Returns once what is under way has ended, or is known to bindings/workers.py as left behind."""
        self._lost = self._lost or "this process is ending"
        if self._lock.acquire(timeout=OPERATION_SECONDS + GRACE_SECONDS):
            self._lock.release()

    def _do(self, calls: Callable[[Any], T]) -> T:
        if self._lost:
            raise OutOfReach(self._lost)
        try:
            return self._helper.ask(lambda: calls(self._connection()), OPERATION_SECONDS)
        except Silent:
            raise OutOfReach(f"{self._name} did not answer within {OPERATION_SECONDS:g} s") from None
        except Exception as error:  # of torch, or of whatever the user gave as a store
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._lost = f"{self._name} is lost: {first}"
            raise OutOfReach(self._lost) from error

    def _connection(self) -> Any:
        if self._own is None:
            self._own = _clone(self._original)
        return self._own


def _address(store: Any) -> str:
    """Of the machine that serves a TCPStore, which may be the one that is gone; "" for another store."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return f" ({store.host}:{store.port})" if hasattr(store, "host") and hasattr(store, "port") else ""


def _clone(store: Any) -> Any:
    try:
        return store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):
        # A store of Python may lack it. A connection that is refused is an error of the next operation, too.
        return store
