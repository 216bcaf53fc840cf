"""A store that counts its operations."""

from __future__ import annotations

from collections import Counter
from typing import Any


class CountingStore:
    """Wraps a store and counts its operations by name; a check of a key in `turns` counts as "turn"."""

    def __init__(self, store: Any, turns: tuple[str, ...] = ()) -> None:
        self.store, self.turns = store, turns
        self.operations: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.store, name)

        def counted(*arguments: Any) -> Any:
            self.operations["turn" if name == "check" and arguments[0][0] in self.turns else name] += 1
            return found(*arguments)

        return counted if name in ("add", "get", "set", "check", "append") else found

    def clone(self) -> CountingStore:
        return self

    def total(self) -> int:
        """Return the number of operations, except turns."""
        return self.operations.total() - self.operations["turn"]
