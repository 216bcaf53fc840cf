"""The store that bootstrap used: lists in it, and operations on it that end by a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ..bindings.workers import GRACE_SECONDS, Helper, Silent
from .layout import printable

T = TypeVar("T")

OPERATION_SECONDS = 2.0  # after which the store counts as out of reach


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


class Reach:
    """A store whose operations end by a deadline. `reason`: why the last one did not succeed; "" if it did.

    Through a connection of its own, where the store can be cloned: a client of a TCPStore makes one operation at a
    time, and the user's may wait for minutes. While an operation is late no other is begun. After an error, such as a
    closed connection, none is tried again: torch writes a trace to stderr for each attempt."""

    def __init__(self, store: Any) -> None:
        self.reason = ""
        self._original = store  # kept: it may be what serves the store
        self._own: Any = None
        self._lock = threading.Lock()
        self._helper = Helper()
        self._closed = False

    def do(self, calls: Callable[[Any], T], otherwise: T) -> T:
        """What `calls(store)` returns; `otherwise`, within about two seconds, if the store is out of reach."""
        if not self._lock.acquire(timeout=OPERATION_SECONDS):
            return otherwise
        try:
            if not self._closed:
                result = self._helper.ask(lambda: calls(self._connection()), OPERATION_SECONDS)
                self.reason = ""
                return result
        except Silent:
            self.reason = f"{self._name()} did not answer within {OPERATION_SECONDS:g} s"
        except Exception as error:  # of torch, or of whatever the user gave as a store
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            self.reason, self._closed = f"{self._name()} is lost: {first}", True
        finally:
            self._lock.release()
        return otherwise

    def close(self) -> None:
        """Ask no more. Returns once what is under way has ended, or is known to bindings/workers.py as left behind."""
        self._closed, self.reason = True, self.reason or "this process is ending"
        if self._lock.acquire(timeout=OPERATION_SECONDS + GRACE_SECONDS):
            self._lock.release()

    def _connection(self) -> Any:
        if self._own is None:
            try:
                self._own = self._original.clone()
            except (AttributeError, NotImplementedError, RuntimeError):  # a store of Python may lack it
                self._own = self._original
        return self._own

    def _name(self) -> str:
        """With the address that serves a TCPStore, whose machine may be the one that is gone."""
        store = self._original
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        address = f" ({store.host}:{store.port})" if hasattr(store, "host") and hasattr(store, "port") else ""
        return f"the store at which the ranks met{address}"
