"""The rendezvous store: lists kept in it, prefixes of its keys, and a client whose operations have a timeout."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from ..bindings.workers import GRACE_SECONDS, NoAnswer, QueryWorker, exit_left
from .layout import printable

T = TypeVar("T")

OPERATION_SECONDS = 2.0  # timeout of an operation; the store then counts as unreachable


def append(store: Any, key: str, text: str) -> None:
    """Append `text`, one or more lines, to a list: one operation if the store has append(), else two per line."""
    if _appends(store):
        store.append(key, text + "\n")
        return
    for line in text.split("\n"):
        store.set(f"{key}/{store.add(f'{key}/count', 1)}", line)


def lines(store: Any, key: str) -> list[str]:
    """Return the list, in no particular order: two operations if the store has append(), else one plus two per line."""
    if _appends(store):
        return read(store, key).removesuffix("\n").split("\n") if store.check([key]) else []
    keys = [f"{key}/{i + 1}" for i in range(store.add(f"{key}/count", 0))]
    return [read(store, key) for key in keys if store.check([key])]  # a missing key is still being written


def read(store: Any, key: str) -> str:
    """Return the value of a key as printable text: any process that can reach the store may have written it."""
    return printable(str(store.get(key).decode(errors="replace")), lines=True)


def _appends(store: Any) -> bool:
    """Return whether append() works. torch's FileStore has the method, but has_extended_api() is False there."""
    return hasattr(store, "append") and (not hasattr(store, "has_extended_api") or bool(store.has_extended_api()))


class Prefixed(NamedTuple):
    """A store whose keys all start with a prefix. Unlike torch's PrefixStore, it takes any object with a store's
    methods, and two with the same store and prefix are equal."""

    underlying_store: Any
    prefix: str

    def add(self, key: str, amount: int) -> int:
        return int(self.underlying_store.add(self.prefix + key, amount))

    def get(self, key: str) -> bytes:
        return bytes(self.underlying_store.get(self.prefix + key))

    def set(self, key: str, value: str | bytes) -> None:
        self.underlying_store.set(self.prefix + key, value)

    def check(self, keys: list[str]) -> bool:
        return bool(self.underlying_store.check([self.prefix + key for key in keys]))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return bytes(self.underlying_store.compare_set(self.prefix + key, expected, value))

    def append(self, key: str, value: str) -> None:
        self.underlying_store.append(self.prefix + key, value)

    def has_extended_api(self) -> bool:
        return _appends(self.underlying_store)

    def clone(self) -> Prefixed:
        return Prefixed(self.underlying_store.clone(), self.prefix)


class StoreClient:
    """A client of a store whose operations have a timeout. `reason`: why the last one failed; "" if it succeeded.
    `closed`: no further one will be made, after an error or `close()`.

    It clones the store if it can, to have its own connection: a TCPStore client runs one operation at a time, and the
    user's may wait for minutes. While an operation is overdue, no other starts. After an error, such as a closed
    connection, nothing is retried, because torch writes a trace to stderr on each attempt."""

    def __init__(self, store: Any) -> None:
        self.reason = ""
        self._original = store  # keep a reference: this object may be the server
        self._clone: Any = None
        self._lock = threading.Lock()
        self._helper = QueryWorker()
        self.closed = False

    def run(self, calls: Callable[[Any], T], default: T) -> T:
        """Return `calls(store)`; if the store is unreachable, return `default` within about two seconds."""
        if not self._lock.acquire(timeout=OPERATION_SECONDS):
            return default
        try:
            if not self.closed:
                result = self._helper.query(lambda: calls(self._connection()), OPERATION_SECONDS)
                self.reason = ""
                return result
        except NoAnswer:
            self.reason = f"{self._name()} did not answer within {OPERATION_SECONDS:g} s"
        except Exception as error:  # from torch, or from a store class of the user
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            self.reason, self.closed = f"{self._name()} is unreachable: {first}", True
        finally:
            self._lock.release()
        return default

    def close(self) -> None:
        """Refuse further operations. Return once the current one has ended or bindings/workers.py has abandoned it."""
        self.closed, self.reason = True, self.reason or "this process is ending"
        if self._lock.acquire(timeout=exit_left(OPERATION_SECONDS + GRACE_SECONDS)):
            self._lock.release()

    def _connection(self) -> Any:
        if self._clone is None:
            try:
                self._clone = self._original.clone()
            except (AttributeError, NotImplementedError, RuntimeError):  # a Python store may lack clone()
                self._clone = self._original
        return self._clone

    def _name(self) -> str:
        """Return a name with the address of a TCPStore's server: that node may be the one that failed."""
        store = self._original
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        address = f" ({store.host}:{store.port})" if hasattr(store, "host") and hasattr(store, "port") else ""
        return f"the rendezvous store{address}"
